"""The places to compute. `Device` is the interface, and device cpu; cuda has its own memory."""

from __future__ import annotations

from collections.abc import Callable

from ...core.errors import UsageError
from .base import Device


def _open_cuda(memory: int | None) -> Device:
    from .cuda import CudaDevice

    return CudaDevice(memory)


# kind -> opens one that may use so many bytes of its own memory. Tests add a device that needs no hardware.
OPENERS: dict[str, Callable[[int | None], Device]] = {"cpu": lambda memory: Device(), "cuda": _open_cuda}


def open_device(kind: str, *, memory: int | None = None) -> Device:
    """Opens the device that a plan names. `memory`: bytes of its own memory that it may use. Requests beyond it raise
    torch.OutOfMemoryError."""
    if kind not in OPENERS:
        raise UsageError(f"unknown device {kind!r}", hint="offload.device is auto, cpu or cuda")
    return OPENERS[kind](memory)
