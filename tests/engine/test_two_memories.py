"""Tests on the emulated device what a GPU would refuse: an operator that is given tensors of both memories.

Both are the host's memory here, so only where a tensor comes from tells. The host's are the arena, a step's ids and labels, the
model's buffers that no run has placed, and what is computed from these alone. A tensor of the host without dimensions may meet
the device's, as on a GPU; so may here what a function makes from nothing, of which nothing tells where it was meant to be.
"""

from __future__ import annotations

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
from drawn import every
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuyou_cli.engine import streamed
from fuyou_cli.engine.forward_only import ForwardOnly
from fuyou_cli.engine.streamed import Placed
from fuyou_cli.recipe.schema import AdapterSection

from .families import FAMILIES, gpt2, llama
from .rig import Rectangle, Rig, Shape, Subject
from .told import Told


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

    def place(root: nn.Module, _: torch.device) -> list[Placed]:
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
    return Subject(config, Shape(batch=8, **shape), freeze=freeze, apart=apart)


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


@pytest.mark.parametrize(("name", "way"), every(7, CASES))
def test_steps(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(SUBJECTS[name](), tmp_path, monkeypatch, **WAYS[way]) as (rig, mixed):
        step_twice(rig, mixed)


@pytest.mark.parametrize("options", [{}, {"use_dora": True, "lora_dropout": 0.1}], ids=["lora", "dora"])
def test_adapters(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    subject = Subject(llama(), Shape(batch=8), adapter=AdapterSection(r=4, **options))
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
