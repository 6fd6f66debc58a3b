"""The places to compute. `Device` is the interface, and device cpu; cuda has its own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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


# ---- repeating itself bit for bit ---------------------------------------------------------------------------------
# Makes compute on a GPU repeat itself bit for bit. The CPU does so anyway.
#
# torch then uses kernels whose sums have a fixed order: flash and memory-efficient attention for backward (not cuDNN's), sums
# by index, products in a fixed workspace. If it has none, it raises an error that names the operator.

_NO_KERNEL = "does not have a deterministic implementation"
_NO_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def compute_repeatably() -> Callable[[], None]:
    """Makes torch compute repeatably from now on, in this process. Returns a function that undoes it."""
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory

    def undo() -> None:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]

    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False  # otherwise all allocated memory is written first
    return undo


@contextmanager
def naming_operators() -> Iterator[None]:
    """Turns torch's refusal inside the context into an error that names the operator and the recipe key."""
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if _NO_KERNEL in message:
            operator = message.partition(_NO_KERNEL)[0].strip()
            raise UsageError(
                f"train.deterministic: {operator} has no deterministic kernel here",
                hint="set train.deterministic=false: the last bits may then differ between two runs of the same recipe",
            ) from error
        if _NO_WORKSPACE in message:
            raise UsageError(
                "train.deterministic: matrix products are not repeatable with the workspace that the environment sets",
                hint=f"unset {_NO_WORKSPACE}, or set it to :4096:8",
            ) from error
        raise
