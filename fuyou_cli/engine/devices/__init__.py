"""Holds the places to compute. `Device` is the interface, and device cpu; emulated and cuda have their own memory."""

from __future__ import annotations

from ...core.errors import UsageError
from .base import Device


def open_device(kind: str, *, memory: int | None = None) -> Device:
    """Opens the device that a plan names: "cpu", "emulated" or "cuda". `memory`: bytes of its own memory that it may use.
    Requests beyond it raise torch.OutOfMemoryError."""
    if kind == "cpu":
        return Device()
    if kind == "emulated":
        from .emulated import EmulatedDevice

        return EmulatedDevice(memory)
    if kind == "cuda":
        from .cuda import CudaDevice

        return CudaDevice(memory)
    raise UsageError(f"unknown device {kind!r}", hint="offload.device is auto, cpu, cuda or emulated")
