"""Computes the RAM of each phase of a run (also before and after training) from a plan's own table of memory."""

from __future__ import annotations

from ..core.units import MiB
from ..spec.plan import Plan

READ_BACK = 32 * MiB  # of the arena, through which a saved state is read and compared with its sums


def phase_peaks(plan: Plan) -> dict[str, int]:
    """Returns phase -> bytes of RAM at most, in the order of a run.

    Saving has all of the arena; resuming reads everything through a window of it, then what rests in RAM into its place.
    """
    peaks = dict(plan.predicted.cpu_peaks)
    computing = sum(line.size for line in plan.memory if line.what == "compute" and line.tier == "cpu")
    process = sum(line.size for line in plan.memory if line.what == "process")
    arena = plan.arena_size
    homes = sum(
        span.size
        for stage in plan.stages
        for span in (stage.weights_ram, stage.trained_ram, stage.remainder_ram, stage.momentum_ram, stage.variance_ram)
        if span is not None
    )
    around = {
        "save": max(process, peaks.get("train", 0) - computing),
        "resume": process + homes + min(READ_BACK, max(0, arena - homes)),
    }
    order = ("load", "train", "save", "resume", "export")
    known = {**peaks, **around}
    return {name: known[name] for name in (*order, *known) if name in known}
