"""What a run takes of the writes that its drives are warranted for, beside what they have written already."""

from __future__ import annotations

from dataclasses import dataclass

from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.plan import Plan

WORN = 0.3  # of what drives are rated for: a run that writes more is not let pass without a word


@dataclass(frozen=True, kw_only=True, slots=True)
class Wear:
    """Shares of rated writes."""

    run: float  # that the run takes, of the drive that is rated for least
    rated: int  # bytes of that drive
    before: float  # that the most worn drive has written, and will have after the run
    after: float

    @property
    def ends_a_life(self) -> bool:
        """Whether a drive comes to the end of what it is rated for in this run. One past it is nothing new."""
        return self.before < 1 < self.after

    @property
    def accepted(self) -> bool:
        return self.run <= WORN and not self.ends_a_life


def wear_of(plan: Plan, hardware: HardwareProfile, steps: float | None) -> Wear | None:
    """Of this many steps, spread evenly over the drives, each of which wears by itself; None where the number of steps or
    what any drive is rated for is not known."""
    rated = [drive for drive in hardware.drives if drive.rated_bytes]
    if not steps or not rated:
        return None
    each = steps * plan.predicted.written_per_step / len(hardware.drives)
    least = min(drive.rated_bytes for drive in rated)
    worst = max(rated, key=lambda drive: (drive.used_bytes + each) / drive.rated_bytes)
    return Wear(
        run=each / least,
        rated=least,
        before=worst.used_bytes / worst.rated_bytes,
        after=(worst.used_bytes + each) / worst.rated_bytes,
    )
