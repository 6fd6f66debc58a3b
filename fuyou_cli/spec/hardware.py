"""`HardwareProfile`: the machine as measured (or as described in a file), dated.

Rates are bytes or FLOPs per second. Zero means "not measured".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    device: str  # cpu | emulated | cuda
    device_name: str
    cores: int
    ram_total: int
    ram_available: int  # what this process may use: cgroup limit or free memory, whichever is less
    process_bytes: int  # anonymous + kernel memory of this process before the arena exists, libraries loaded
    device_memory: int  # 0 on device cpu
    disk_free: int
    matmul_flops: float  # in the compute dtype, all threads
    store_read: float
    store_write: float
    store_read_mixed: float  # while writing
    store_write_mixed: float  # while reading
    adamw_bytes: float  # one update thread
    h2d: float
    d2h: float
    measured: str  # ISO date, or "assumed"
