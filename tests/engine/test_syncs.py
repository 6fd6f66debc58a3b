"""Tests what the launching thread asks of a device's values in a step: each such question waits for all that is submitted."""

from __future__ import annotations

import bisect
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.devices.base import Event
from fuyou_cli.engine.devices.emulated import EmulatedDevice

from .families import gpt2, llama, opt
from .rig import Rig, Shape, Subject

ASKS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal", "bincount"}


class _Told(EmulatedDevice):
    """Knows what is its own: memory it gave, what it was told, and (`Syncs`) what was computed with that."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[tuple[int, int]] = []  # addresses, in order
        self._computed: dict[int, torch.Tensor] = {}  # kept, so that no address is used twice

    def empty(self, size: int) -> torch.Tensor:
        return self._mine(super().empty(size))

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return self._mine(super().empty_like(host))

    def told(self, host: torch.Tensor) -> torch.Tensor:
        return self._mine(super().told(host))

    def upload(self, host: torch.Tensor, device: torch.Tensor, **how: Any) -> Event:
        assert self.owns(device) and not self.owns(host)
        return super().upload(host, device, **how)

    def _mine(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = tensor.untyped_storage().data_ptr()
        bisect.insort(self._given, (begin, begin + tensor.untyped_storage().nbytes()))
        self._computed[begin] = tensor
        return tensor

    def computes(self, tensor: torch.Tensor) -> None:
        if not self.owns(tensor):
            self._computed[tensor.untyped_storage().data_ptr()] = tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        place = bisect.bisect_right(self._given, (address, 1 << 62)) - 1
        return address in self._computed or (place >= 0 and address < self._given[place][1])


class Syncs(TorchDispatchMode):
    """Counts questions, by the file of whoever asks."""

    def __init__(self, device: _Told) -> None:
        super().__init__()
        self._device, self.asked = device, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        if any(self._device.owns(tensor) for tensor in tensors):
            by_mask = name in ("index", "index_put_") and any(tensor.dtype == torch.bool for tensor in tensors[1:])
            comes_back = name == "copy_" and not self._device.owns(tensors[0])
            if name in ASKS or by_mask or comes_back:
                frames = [f for f in traceback.extract_stack() if "fuyou_cli" in f.filename or "transformers" in f.filename]
                self.asked[f"{Path(frames[-1].filename).name}: {name}"] += 1
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._device.computes(leaf)
            return out
        return func(*args, **(kwargs or {}))


SUBJECTS = {
    "llama": lambda: Subject(llama(), Shape(batch=8)),
    "llama, tied, padding": lambda: Subject(llama(tie_word_embeddings=True, pad_token_id=0), Shape(batch=8)),
    "llama, cut": lambda: Subject(llama(pad_token_id=0), Shape(batch=8, vocabulary=40)),
    "gpt2": lambda: Subject(gpt2(), Shape(batch=8)),
    "opt": lambda: Subject(opt(), Shape(batch=8, vocabulary=40)),
}
OF_A_CUT_HEAD = {"loss.py: _local_scalar_dense", "loss.py: index"}


@crossed(2, sweeps=[1, 2], name=SUBJECTS)
def test_only_the_loss_is_asked_for(name: str, sweeps: int, tmp_path: Path) -> None:
    """Asks once a sweep, and only between the passes of a cut head: the loss of a whole one comes by itself."""
    device = _Told()
    with Rig(SUBJECTS[name](), tmp_path, device="emulated", home="cpu", opened=device, sweeps=sweeps) as rig:
        syncs, batches = Syncs(device), rig.subject.batches(2)
        rig.step(*next(batches), 1)
        with syncs:
            rig.step(*next(batches), 2, last=True)
        rig.executor.drain()
    assert syncs.asked.keys() <= (OF_A_CUT_HEAD if rig.subject.shape.vocabulary else set()), syncs.asked
    assert sum(syncs.asked.values()) <= 4 * sweeps, syncs.asked


@pytest.mark.parametrize("vocabulary", [0, 40])
def test_an_id_of_no_row_is_refused_before_it_is_looked_up(vocabulary: int, tmp_path: Path) -> None:
    subject = Subject(llama(), Shape(vocabulary=vocabulary))
    with Rig(subject, tmp_path, device="emulated", home="cpu") as rig:
        ids, labels = next(subject.batches(1))
        ids[1, 2] = subject.config.vocab_size
        with pytest.raises(
            UsageError, match=rf"a token id outside of the model's vocabulary of {subject.config.vocab_size} tokens"
        ):
            rig.step(ids, labels, 1)
        rig.executor.abandon()
