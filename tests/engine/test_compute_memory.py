"""Tests that what a step allocates beside the arena, followed storage by storage, is within what the plan charges for
compute."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, LlamaConfig

from fuyou_cli.core import process
from fuyou_cli.engine.describe import LiveBytes
from fuyou_cli.planner.memory import compute_memory
from fuyou_cli.swap.native import ffi
from fuyou_cli.swap.store import Arena

from .rig import Rig, Shape, Subject

SHAPE = {"batch": 64, "micro": 1, "tokens": 64}  # a boundary of the whole batch is much more than a stage's own
LLAMA = LlamaConfig(
    vocab_size=192, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=256,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=192, n_embd=64, n_inner=64, n_layer=3, n_head=4, n_positions=256)


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
            if self.low <= storage.data_ptr() < self.high or storage._cdata in self._known:
                continue
            if storage.data_ptr() in self.aside:
                continue
            self._known.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._dropped, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out


@pytest.mark.parametrize(
    ("config", "clip", "vocabulary", "freeze"),
    every(2, [
        (LLAMA, 0.5, 0, ()), (LLAMA, None, 80, ()), (GPT2, 0.5, 80, ()), (GPT2, None, 0, ()),
        (LLAMA, 0.5, 80, ("model.embed_tokens", "model.layers.[0-1]")),
    ]),
)  # fmt: skip
def test_a_step_stays_within_what_is_charged(
    config: Any, clip: float | None, vocabulary: int, freeze: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts byte by byte, without what the heap makes of it."""
    monkeypatch.setattr(process, "HOLES", 0.0)
    monkeypatch.setattr(process, "HELD", 0.0)
    subject = Subject(config, Shape(vocabulary=vocabulary, **SHAPE), freeze=freeze)
    with Rig(subject, tmp_path, home="cpu", clip=clip) as rig:
        charged = compute_memory(subject.spec, rig.request)
        live = LiveOutside(rig.memory.arena)
        ids, labels = next(subject.batches(1))
        with live:
            rig.step(ids, labels, 1, last=True)
        rig.executor.drain()
    boundary = subject.spec.boundary_bytes_per_token * SHAPE["batch"] * SHAPE["tokens"]
    assert live.peak > 2 * boundary
    assert live.peak <= charged.whole_batch + charged.stage
    assert charged.whole_batch + charged.stage <= live.peak + 1.5 * boundary
