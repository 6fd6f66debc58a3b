"""Tells where a machine's rates come from: measured (or published as measured), specified, assumed, or given in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fuyou_cli.spec.hardware import BURST_RATES, SUSTAINED_RATES, HardwareProfile

Origin = Literal["measured", "given", "specification", "assumption"]

GIVEN = "given in "  # + a file: the source of its figures
_ORDER: tuple[Origin, ...] = ("measured", "given", "specification", "assumption")  # the best known first
_RATES: tuple[tuple[str, tuple[str, ...]], ...] = (  # rates shown together: a name, and keys of the profile
    ("compute", ("matmul_flops",)),
    ("compute of stages", ("stage_rates",)),
    ("store read, write", BURST_RATES[:2]),
    ("store, both at once", BURST_RATES[2:]),
    ("store, sustained", SUSTAINED_RATES),
    ("AdamW, one thread", ("adamw",)),
    ("to GPU, back", ("h2d", "d2h")),
    ("GPU memory", ("device_memory_rate",)),
    ("DRAM", ("dram",)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedBy:
    """Holds rates that are shown together, in FLOPs per second if `flops`, else in bytes per second."""

    what: str
    keys: tuple[str, ...]
    values: tuple[float, ...]
    flops: bool
    origin: Origin
    source: str


def origins_of(hardware: HardwareProfile) -> tuple[RatedBy, ...]:
    """Lists every known rate, in a fixed order."""
    found = []
    for what, keys in _RATES:
        values = tuple(value for key in keys for value in _values(hardware, key))
        if not any(values) or (keys == SUSTAINED_RATES and not hardware.slows_down):
            continue
        sources = dict.fromkeys(hardware.source_of(key) for key in keys)
        origin = max(map(_origin, sources), key=_ORDER.index)
        flops = keys[0] in ("matmul_flops", "stage_rates")
        found.append(RatedBy(what=what, keys=keys, values=values, flops=flops, origin=origin, source="; ".join(sources)))
    return tuple(found)


def _values(hardware: HardwareProfile, key: str) -> tuple[float, ...]:
    if key == "adamw":
        return (hardware.adamw_bytes,)
    if key == "stage_rates":
        return tuple(rate.backward for rate in hardware.stage_rates)[:1]
    return (getattr(hardware, key),)


def _origin(source: str) -> Origin:
    if "assumption" in source or "interpolated" in source or source == "nobody says":
        return "assumption"
    if "specification" in source:
        return "specification"
    return "given" if source.startswith(GIVEN) else "measured"
