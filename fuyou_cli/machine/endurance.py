"""How much common drives are warranted to be written, by what they call themselves.

Makers rate TBW by capacity within a series: `per_tb` is what each terabyte of capacity adds. From the public data sheets of
the makers: Samsung, Western Digital, Crucial, Kingston, Seagate, Solidigm, Micron, KIOXIA. Drives rated per day: writes per
day x 365 x 5 years.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TB = 10**12
_DAYS = 365 * 5


@dataclass(frozen=True, slots=True)
class _Series:
    pattern: str  # of the model's name
    per_tb: float  # TB that may be written per TB of capacity


_SERIES = (
    _Series(r"Samsung SSD (980|990|9100) PRO", 600),  # 600 TBW at 1 TB, 1,200 at 2 TB
    _Series(r"Samsung SSD (970 EVO|980\b|990 EVO|870 EVO)", 600),  # 600 TBW at 1 TB, 1,200 at 2 TB
    _Series(r"Samsung SSD 8[67]0 QVO", 360),  # 360 TBW at 1 TB, 720 at 2 TB
    _Series(r"WD_?BLACK SN(770|850X?|8100)\b", 600),  # 600 TBW at 1 TB, 1,200 at 2 TB
    _Series(r"WDS\d+T\dX0E", 600),  # order numbers of SN770, SN850 and SN850X
    _Series(r"CT\d+(T500|T700|T705|P5P)SSD\d", 600),  # Crucial T500, T700, T705, P5 Plus: 600 TBW at 1 TB, 1,200 at 2 TB
    _Series(r"KINGSTON SKC3000", 800),  # 800 TBW at 1 TB, 1,600 at 2 TB
    _Series(r"Seagate FireCuda 530", 1275),  # 1,275 TBW at 1 TB, 2,550 at 2 TB
    _Series(r"(SOLIDIGM|INTEL) SSDPF2KX", 1 * _DAYS),  # D7-P5510 and P5520: 1 drive write per day
    _Series(r"(SOLIDIGM|INTEL) SSDPF2KE", 3 * _DAYS),  # D7-P5620: 3 drive writes per day
    _Series(r"SAMSUNG MZ(QL2|1L2|WL[JRO])", 1 * _DAYS),  # PM9A3, PM1733, PM1743: 1 drive write per day
    _Series(r"Micron_7450_MTFDK\w+TFR", 1 * _DAYS),  # 7450 PRO: 1 drive write per day
    _Series(r"KCD6\w*LUL", 1 * _DAYS),  # KIOXIA CD6-R: 1 drive write per day
)


def rated_bytes(model: str, capacity: int) -> int:
    """Returns the bytes a drive of this name and capacity (bytes) is warranted to be written; 0 where that is not known."""
    for series in _SERIES:
        if re.match(series.pattern, model, re.IGNORECASE):
            return round(series.per_tb * _nominal(capacity) * _TB)
    return 0


def _nominal(capacity: int) -> float:
    """Rounds to TB as sold: 2.0 of a drive of 2,000,398,934,016 bytes; a drive of 960 GB stays one."""
    return round(capacity / _TB, 2)
