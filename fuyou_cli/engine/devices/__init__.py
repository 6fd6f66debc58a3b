"""Where compute happens. `Device` is the interface; cpu, emulated and cuda implement it."""

from __future__ import annotations

from ...core.errors import UsageError
from .base import Device


def open_device(kind: str, *, memory: int | None = None) -> Device:
    """The device a plan names: "cpu", "emulated" or "cuda". `memory`: bytes of its own that it may have in use; what is asked
    for beyond them raises torch.OutOfMemoryError."""
    if kind == "cpu":
        from .cpu import CpuDevice

        return CpuDevice()
    if kind == "emulated":
        from .emulated import EmulatedDevice

        return EmulatedDevice(memory)
    if kind == "cuda":
        from .cuda import CudaDevice

        return CudaDevice(memory)
    raise UsageError(f"unknown device {kind!r}", hint="offload.device is auto, cpu, cuda or emulated")
