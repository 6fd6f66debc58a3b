"""Tests what the launching thread asks of a device's values in a step: each such question waits for all that is submitted."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuyou_cli.core.errors import UsageError

from .families import gpt2, llama, opt
from .rig import Rig, Shape, Subject
from .test_mixtures import FAMILIES
from .told import Told

ASKS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal", "bincount"}


class Syncs(TorchDispatchMode):
    """Counts questions, by the file of whoever asks."""

    def __init__(self, device: Told) -> None:
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


class Lists(TorchFunctionMode):
    """Counts tensors that are read as lists of numbers, which no dispatcher sees."""

    def __init__(self, device: Told) -> None:
        super().__init__()
        self._device, self.asked = device, Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and self._device.owns(args[0]):
            self.asked[Path(traceback.extract_stack()[-2].filename).name] += 1
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
    device = Told()
    with Rig(SUBJECTS[name](), tmp_path, device="emulated", home="cpu", opened=device, sweeps=sweeps) as rig:
        syncs, batches = Syncs(device), rig.subject.batches(2)
        rig.step(*next(batches), 1)
        with syncs:
            rig.step(*next(batches), 2, last=True)
        rig.executor.drain()
    assert syncs.asked.keys() <= (OF_A_CUT_HEAD if rig.subject.shape.vocabulary else set()), syncs.asked
    assert sum(syncs.asked.values()) <= 4 * sweeps, syncs.asked


@pytest.mark.parametrize("way", [{}, dict(sweeps=2), dict(norm_first=True)])
@pytest.mark.parametrize("aux", [0.0, 0.5])
def test_rows_of_each_expert_are_asked_for_once(aux: float, way: dict[str, Any], tmp_path: Path) -> None:
    """In forward, once for each micro-batch of each mixture; backward knows them. Choices are compared where they are."""
    if aux and "sweeps" in way:
        pytest.skip("the auxiliary loss takes one sweep")
    device, subject = Told(), Subject(FAMILIES["qwen3_moe"], Shape(batch=8, router_aux_loss=aux))
    with Rig(subject, tmp_path, device="emulated", home="cpu", opened=device, **way) as rig:
        lists, syncs, batches = Lists(device), Syncs(device), subject.batches(2)
        rig.step(*next(batches), 1)
        with lists, syncs:
            rig.step(*next(batches), 2, last=True)
        rig.executor.drain()
    assert lists.asked["experts.py"] == 4 * 2
    assert lists.asked.keys() <= {"experts.py", "base.py"} and lists.asked["base.py"] <= 4
    assert not syncs.asked, syncs.asked


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
