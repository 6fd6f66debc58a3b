"""Says what to do if a device runs out of memory, or cannot pin host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from ..core.errors import DeviceMemoryError
from ..core.units import gib
from ..engine.devices.base import Device
from ..spec.plan import Plan

_KEY = "offload.max_memory.gpu"
_MORE = 1.02  # a smaller excess over the limit does not count as free memory
# Messages of libraries that do not use torch's allocator.
_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def unpinned(refused: int, size: int) -> str:
    """Explains the effect of host memory that could not be pinned. Sizes are in bytes."""
    return (
        f"note: {gib(refused)} of {gib(size)} of host memory could not be pinned. Copies between it and the device go through "
        "small pinned buffers, and the CPU copies each byte once more, so they are slower than planned. `fuyou doctor` "
        "shows how much can be pinned; offload.max_memory.cpu sets how much is used"
    )


@contextmanager
def named(device: Device, plan: Plan, most: int | None, where: Callable[[], str]) -> Iterator[None]:
    """Turns a lack of device memory inside the context into an error that says what to do. `most`: bytes allowed."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise _described(error, device, plan, most, where()) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)


def _described(error: RuntimeError, device: Device, plan: Plan, most: int | None, where: str) -> DeviceMemoryError:
    used, free = 0, None
    with suppress(RuntimeError):  # the device's context may have failed
        used, free = device.memory(), device.free_memory()
    said = (str(error).strip().splitlines() or ["no details"])[0].partition(". GPU ")[0].rstrip(".")
    allowed = f", {gib(most)} are allowed ({_KEY})" if most is not None else f" ({_KEY} sets no limit)"
    numbers = f"{gib(plan.predicted.gpu_peak)} are planned, {gib(used)} in use{allowed}"
    return DeviceMemoryError(f"{where}: out of device memory: {said}; {numbers}", hint=_advice(plan, used, free, most))


def _advice(plan: Plan, used: int, free: int | None, most: int | None) -> str:
    there = used + free if free is not None else None
    if most is not None and there is not None and there < most / _MORE:
        return f"other processes now use some of the GPU's memory: set {_KEY} to less than {gib(there)}, or end them"
    if most is not None and there is not None and there > most * _MORE:
        return f"raise {_KEY}: this process can use {gib(there)} of the GPU"
    if any(stage.weights == "gpu" for stage in plan.stages):
        return f"the step needs more than planned, and {_KEY} is all the GPU has: offload.weights=cpu keeps no weights there"
    return f"the step needs more than planned, and {_KEY} is all the GPU has: start a new run with a smaller micro-batch"
