"""Says what to do where a device runs out of memory, or cannot pin the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from ..core.errors import DeviceMemoryError
from ..core.units import gib
from ..engine.devices.base import Device
from ..spec.plan import Plan

_KEY = "offload.max_memory.gpu"
_MORE = 1.02  # less than this beyond the limit is no room to speak of
# How libraries beside torch's allocator say it.
_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def unpinned(refused: int, size: int) -> str:
    """Says what unpinned host memory means. Bytes."""
    return (
        f"note: {gib(refused)} of {gib(size)} of host memory could not be pinned: copies between it and the device go through "
        "small pinned buffers, each byte moved once more by the processor, so they are slower than planned. `fuyou doctor` "
        "says how much can be pinned; offload.max_memory.cpu decides how much is"
    )


@contextmanager
def named(device: Device, plan: Plan, most: int | None, where: Callable[[], str]) -> Iterator[None]:
    """Turns running out of the device's memory inside into an error that says what to do. `most`: bytes allowed."""
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
    with suppress(RuntimeError):  # of a context that has failed
        used, free = device.memory(), device.free_memory()
    said = (str(error).strip().splitlines() or ["no details"])[0].partition(". GPU ")[0].rstrip(".")
    allowed = f", {gib(most)} may be ({_KEY})" if most is not None else f" ({_KEY} sets no limit)"
    numbers = f"{gib(plan.predicted.gpu_peak)} are planned, {gib(used)} in use{allowed}"
    return DeviceMemoryError(f"{where}: out of device memory: {said}; {numbers}", hint=_advice(plan, used, free, most))


def _advice(plan: Plan, used: int, free: int | None, most: int | None) -> str:
    there = used + free if free is not None else None
    if most is not None and there is not None and there < most / _MORE:
        return f"others have taken some of the GPU since: set {_KEY} to less than {gib(there)}, or end them"
    if most is not None and there is not None and there > most * _MORE:
        return f"raise {_KEY}: the GPU has {gib(there)} for this process"
    if any(stage.weights == "gpu" for stage in plan.stages):
        return f"the step takes more than was planned, and {_KEY} is all there is: offload.weights=cpu keeps none on the GPU"
    return f"the step takes more than was planned, and {_KEY} is all there is: a new run with a smaller micro-batch takes less"
