"""Where compute happens. `Device` is the interface; cpu, emulated and cuda implement it."""

from __future__ import annotations

from ...core.errors import UsageError
from .base import Device


def open_device(kind: str) -> Device:
    """The device a plan names: "cpu", "emulated" or "cuda"."""
    if kind == "cpu":
        from .cpu import CpuDevice

        return CpuDevice()
    if kind == "emulated":
        from .emulated import EmulatedDevice

        return EmulatedDevice()
    if kind == "cuda":
        from .cuda import CudaDevice

        return CudaDevice()
    raise UsageError(f"unknown device {kind!r}", hint="offload.device is auto, cpu, cuda or emulated")
