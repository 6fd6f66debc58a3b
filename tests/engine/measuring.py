"""Measures what a step allocates beside the arena, storage by storage, and which operators run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuyou_cli.core import process
from fuyou_cli.engine.describe import LiveBytes
from fuyou_cli.swap.native import ffi
from fuyou_cli.swap.store import Arena

from .rig import Rig


class Seen(TorchDispatchMode):
    """Lists what `of` makes of each operator run inside and of its arguments, unless that is None."""

    def __init__(self, of: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._of, self.found = of, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (found := self._of(func, args)) is not None:
            self.found.append(found)
        return func(*args, **(kwargs or {}))


class LiveOutside(LiveBytes):
    """Counts live bytes of storages made inside that are not in the arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.low = int(ffi.cast("uintptr_t", arena._base))
        self.high = self.low + arena.size
        self.aside = range(0)  # addresses of memory that was taken before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            if self.low <= storage.data_ptr() < self.high or storage._cdata in self._seen:
                continue
            if storage.data_ptr() in self.aside:
                continue
            self._seen.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out


def without_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has plans charge byte for byte, without what the heap makes of it."""
    monkeypatch.setattr(process, "HOLES", 0.0)
    monkeypatch.setattr(process, "HELD", 0.0)


def copied_in_a_step(rig: Rig, *, number: int = 1) -> list[int]:
    """Returns the bytes that go up, and that come down, in the last of this many steps."""
    for step, (ids, labels) in enumerate(rig.subject.batches(number), start=1):
        rig.executor.drain()
        rig.device.copies()
        rig.step(ids, labels, step, last=step == number)
    rig.executor.drain()
    rig.device.synchronize()
    copies = rig.device.copies()
    return [sum(copy.bytes for copy in copies if copy.up == way) for way in (True, False)]


def peak_of_a_step(rig: Rig) -> int:
    """Runs one step, and returns the most bytes that were alive outside of the arena and of what its device took before."""
    live, visits = LiveOutside(rig.memory.arena), rig.executor.visits
    inputs = [] if visits.crossings.inputs is None else visits.crossings.inputs._places
    for place in (*visits.sums._spans, *visits.weights.turns, *inputs):
        live._seen.add(place.memory.untyped_storage()._cdata)
    if (memory := visits.crossings.batches.memory) is not None:
        live.aside = range(memory.data_ptr(), memory.data_ptr() + max(span.offset + span.size for span in rig.plan.batch_slots))
    ids, labels = next(rig.subject.batches(1))
    with live:
        rig.step(ids, labels, 1, last=True)
    rig.executor.drain()
    return live.peak
