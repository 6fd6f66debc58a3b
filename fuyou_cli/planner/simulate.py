"""Seconds each resource is busy in one step. The step takes at least the busiest one's time.

On device cpu compute and update share the cores, so their seconds add up.
"""

from __future__ import annotations

from ..spec.hardware import HardwareProfile
from ..spec.model import ITEM_SIZE, ModelSpec
from .schedule import Schedule

_UPDATE_BYTES = 26  # per parameter and update, bf16: weights, remainder, moments read and written, gradient read
_IO_CPU_SECONDS_PER_BYTE = 0.1e-9  # kernel and checksum time; measured with `fuyou bench`, order of magnitude


def busy_seconds(model: ModelSpec, hardware: HardwareProfile, schedule: Schedule, *, device: str) -> dict[str, float]:
    """Resource -> seconds. Resources whose rate is unknown (zero) are left out."""
    traffic = schedule.traffic
    both = traffic.read_total > 0 and traffic.written_total > 0
    read_rate = hardware.store_read_mixed if both else hardware.store_read
    write_rate = hardware.store_write_mixed if both else hardware.store_write
    seconds: dict[str, float] = {}
    compute = sum(visit.flops for visit in schedule.visits) / hardware.matmul_flops if hardware.matmul_flops else 0.0
    item = ITEM_SIZE[model.compute_dtype]
    update = model.stored_parameters * _UPDATE_BYTES / hardware.adamw_bytes if hardware.adamw_bytes else 0.0
    moved = (traffic.read_total + traffic.written_total) * _IO_CPU_SECONDS_PER_BYTE
    if device == "cpu":
        seconds["cpu"] = compute + update + moved
    else:
        seconds["compute"] = compute
        seconds["update"] = update
        per_step = item * model.stored_parameters
        if hardware.h2d:
            seconds["h2d"] = 2 * per_step / hardware.h2d
        if hardware.d2h:
            seconds["d2h"] = per_step / hardware.d2h
    if read_rate and traffic.read_total:
        seconds["ssd read"] = traffic.read_total / read_rate
    if write_rate and traffic.written_total:
        seconds["ssd write"] = traffic.written_total / write_rate
    return seconds
