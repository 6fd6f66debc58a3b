"""Tests on the emulated device what a GPU would refuse: an operator that is given tensors of both memories.

Both are the host's memory here, so only where a tensor comes from tells. The host's are the arena, a step's ids and labels, the
model's buffers that no run has placed, and what is computed from these alone. A tensor of the host without dimensions may meet
the device's, as on a GPU; so may here what a function makes from nothing, of which nothing tells where it was meant to be.
"""

from __future__ import annotations

import bisect
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed, every
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine import streamed
from fuyou_cli.engine.devices.base import Device, Event
from fuyou_cli.engine.forward_only import ForwardOnly
from fuyou_cli.engine.streamed import MovedBuffer
from fuyou_cli.recipe.schema import AdapterSection
from tests.emulated import EmulatedDevice

from .families import FAMILIES, gpt2, llama, opt
from .rig import Rectangle, Rig, Shape, Subject
from .test_mixtures import FAMILIES as MIXTURES


class Told(EmulatedDevice):
    def __init__(self) -> None:
        super().__init__()
        self._given: list[tuple[int, int]] = []  # addresses, in order
        self._computed: dict[int, torch.Tensor] = {}  # kept, so that no address is used twice

    def empty(self, size: int) -> torch.Tensor:
        return self.mine(super().empty(size))

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return self.mine(super().empty_like(host))

    def upload_now(self, host: torch.Tensor) -> torch.Tensor:
        return self.mine(super().upload_now(host))

    upload_all = Device.upload_all

    def upload(self, host: torch.Tensor, device: torch.Tensor, **how: Any) -> Event:
        assert self.owns(device) and not self.owns(host)
        return super().upload(host, device, **how)

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
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


class Mixed(TorchDispatchMode):
    """Counts operators that are given both, by the line that calls them; and all that are given the device's."""

    def __init__(self, device: Told, rig: Rig) -> None:
        super().__init__()
        self.found, self.there = Counter[str](), 0
        self._device, self._memory = device, rig.memory
        self._host: dict[int, torch.Tensor] = {}  # by address; kept, so that no address is used twice
        for buffer in rig.anatomy.model.buffers():
            self.knows(buffer)

    def knows(self, tensor: torch.Tensor) -> None:
        if not self._device.owns(tensor):
            self._host[tensor.untyped_storage().data_ptr()] = tensor

    def _of_host(self, tensor: torch.Tensor) -> bool:
        return self._memory.holds(tensor) or tensor.untyped_storage().data_ptr() in self._host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        there = [leaf for leaf in given if self._device.owns(leaf)]
        here = [leaf for leaf in given if not self._device.owns(leaf) and self._of_host(leaf)]
        name = func.overloadpacket.__name__
        self.there += bool(there)
        if there and any(leaf.dim() for leaf in here) and name != "copy_":
            frames = [f for f in traceback.extract_stack() if "fuyou_cli" in f.filename or "transformers" in f.filename]
            self.found[f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {name}"] += 1
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (there or here):
                (self._device.computes if there else self.knows)(leaf)
        return out


@contextmanager
def watched(subject: Subject, folder: Path, monkeypatch: pytest.MonkeyPatch, **way: Any) -> Iterator[tuple[Rig, Mixed]]:
    """Opens a rig on the emulated device, and checks at its end that no operator inside the mode was given both memories."""
    device = Told()

    def place(root: nn.Module, _: torch.device) -> list[MovedBuffer]:
        for module in root.modules():
            for name, value in module._buffers.items():
                if value is not None and not device.owns(value):
                    module._buffers[name] = device.mine(value.clone())
        return []

    monkeypatch.setattr(streamed, "place_buffers", place)
    with Rig(subject, folder, device="emulated", opened=device, **way) as rig:
        mixed = Mixed(device, rig)
        yield rig, mixed
        rig.executor.drain()
    assert not mixed.found
    assert mixed.there > 100


def step_twice(rig: Rig, mixed: Mixed) -> None:
    for number, (ids, labels) in enumerate(rig.subject.batches(2), start=1):
        mixed.knows(ids)
        mixed.knows(labels)
        documents = [[9, 7]] * len(ids) if rig.anatomy.isolated else None
        with mixed:
            rig.executor.step(ids, labels, step=number, lr=1e-3, last=number == 2, documents=documents)


def _subject(config: Any, *, freeze: tuple[str, ...] = (), apart: bool = False, **shape: Any) -> Subject:
    return Subject(config, Shape(batch=4, **shape), freeze=freeze, apart=apart)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    **{name: partial(_subject, config) for name, config in FAMILIES.items()},
    "dropout": partial(_subject, gpt2(dropout=0.1)),
    "tied, cut": partial(_subject, llama(tie_word_embeddings=True), vocabulary=40, chunk=5),
    "small states": partial(_subject, llama(), dtype="bfloat16", states="int8"),
    "apart": partial(_subject, llama(), apart=True),
    "freeze": partial(_subject, llama(), freeze=("model.embed_tokens", "model.layers.0")),
}
WAYS: dict[str, dict[str, Any]] = {
    "ssd": {},
    "all kept": dict(home="cpu", kept="all"),
    "on the device": dict(home="gpu", boundaries="cpu", kept_there="room"),
    "batch on the host": dict(home="cpu", batch_on_device=False),
    "two sweeps": dict(home="cpu", sweeps=2, clip=None),
}
CASES = [case for case in product(SUBJECTS, WAYS) if case != ("small states", "on the device")]  # they have no such home


@pytest.mark.parametrize(("name", "way"), every(14, CASES))
def test_steps(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(SUBJECTS[name](), tmp_path, monkeypatch, **WAYS[way]) as (rig, mixed):
        step_twice(rig, mixed)


@pytest.mark.parametrize("options", [{}, {"use_dora": True, "lora_dropout": 0.1}], ids=["lora", "dora"])
def test_adapters(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    subject = Subject(llama(), Shape(batch=4), adapter=AdapterSection(r=4, **options))
    with watched(subject, tmp_path, monkeypatch, home="cpu") as (rig, mixed):
        step_twice(rig, mixed)


@pytest.mark.parametrize("way", ["ssd", "batch on the host"])
@pytest.mark.parametrize("name", ["llama", "tied, cut"])
def test_losses_without_training(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(SUBJECTS[name](), tmp_path, monkeypatch, **WAYS[way]) as (rig, mixed):
        ids, labels = next(rig.subject.batches(1))
        mixed.knows(ids)
        mixed.knows(labels)
        forward = ForwardOnly(rig.executor)
        with forward.open(), mixed:
            assert len(forward.losses(Rectangle(ids[: forward.rows], labels[: forward.rows]), last=True))


# ---- questions that wait for the device ----------------------------------------------------------------------------


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


ASKED = {
    "llama": lambda: Subject(llama(), Shape(batch=4)),
    "llama, tied, padding": lambda: Subject(llama(tie_word_embeddings=True, pad_token_id=0), Shape(batch=4)),
    "llama, cut": lambda: Subject(llama(pad_token_id=0), Shape(batch=4, vocabulary=40)),
    "gpt2": lambda: Subject(gpt2(), Shape(batch=4)),
    "opt": lambda: Subject(opt(), Shape(batch=4, vocabulary=40)),
}
OF_A_CUT_HEAD = {"loss.py: _local_scalar_dense", "loss.py: index"}


@crossed(2, sweeps=[1, 2], name=ASKED)
def test_only_the_loss_is_asked_for(name: str, sweeps: int, tmp_path: Path) -> None:
    """Asks once a sweep, and only between the passes of a cut head: the loss of a whole one comes by itself."""
    device = Told()
    with Rig(ASKED[name](), tmp_path, device="emulated", home="cpu", opened=device, sweeps=sweeps) as rig:
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
    device, subject = Told(), Subject(MIXTURES["qwen3_moe"], Shape(batch=4, router_aux_loss=aux))
    with Rig(subject, tmp_path, device="emulated", home="cpu", opened=device, **way) as rig:
        lists, syncs, batches = Lists(device), Syncs(device), subject.batches(2)
        rig.step(*next(batches), 1)
        with lists, syncs:
            rig.step(*next(batches), 2, last=True)
        rig.executor.drain()
    assert lists.asked["experts.py"] == 2 * 2
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
