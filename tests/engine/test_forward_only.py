"""Tests losses without training: as plain PyTorch computes them, beside steps that do not notice, with weights read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed, every
from transformers import PreTrainedModel

from fuyou_cli.engine.forward_only import ForwardOnly
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.spec.model import ITEM_SIZE

from .comparing import relative, unequal
from .families import FAMILIES, gpt2, llama
from .rig import Rectangle, Rig, Shape, Subject

STEPS = 3


def evaluated(forward: ForwardOnly, subject: Subject, groups: int = 2) -> list[float]:
    """Each row's loss, of as many batches; the last has a row less."""
    batches = list(subject.batches(groups))
    ids, labels = (torch.cat(parts)[:-1] for parts in zip(*batches, strict=True))
    found: list[float] = []
    with forward.open():
        for begin in range(0, len(ids), forward.rows):
            rows = slice(begin, begin + forward.rows)
            found += forward.losses(Rectangle(ids[rows], labels[rows]), last=rows.stop >= len(ids)).sum(-1).tolist()
    return found


@torch.no_grad()
def plain(model: PreTrainedModel, subject: Subject, groups: int = 2) -> list[float]:
    """The same by the model's own forward with its own loss, row by row."""
    model.eval()
    found: list[float] = []
    for number, (ids, labels) in enumerate(subject.batches(groups)):
        for row in range(len(ids) - (number == groups - 1)):
            count = int((labels[row, 1:] != -100).sum())
            found.append(count * float(model(input_ids=ids[row : row + 1], labels=labels[row : row + 1], use_cache=False).loss))
    return found


def assert_as_in_memory(subject: Subject, folder: Path, **way: Any) -> None:
    with Rig(subject, folder, **way) as rig:
        rows = evaluated(ForwardOnly(rig.executor), subject)
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    assert relative(rows, plain(model, subject)) <= 1e-6


@pytest.mark.parametrize("family", every(2, FAMILIES))
def test_as_transformers_in_memory(family: str, tmp_path: Path) -> None:
    assert_as_in_memory(Subject(FAMILIES[family], Shape()), tmp_path)


@crossed(2, tied=[False, True], device=["cpu", "emulated"], vocabulary=[0, 40])
def test_with_a_cut_or_tied_vocabulary(vocabulary: int, device: str, tied: bool, tmp_path: Path) -> None:
    subject = Subject(llama(tie_word_embeddings=tied), Shape(vocabulary=vocabulary, chunk=5))
    assert_as_in_memory(subject, tmp_path, device=device)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": None},
        {"clip": None, "home": "cpu"},
        {"device": "emulated", "kept": "all"},
        {"device": "emulated", "batch_on_device": False, "home": None},
        {"sweeps": 2, "clip": None},
    ],
    ids=str,
)
def test_training_does_not_notice(options: dict[str, object], tmp_path: Path) -> None:
    """Compares losses, weights and generators with a run without evaluations; an evaluation has the weights of a whole step."""
    subject = Subject(gpt2(dropout=0.1) if "sweeps" not in options else llama(), Shape())
    with Rig(subject, tmp_path / "alone", **options) as rig:  # type: ignore[arg-type]
        losses, weights, random = rig.run(STEPS), rig.weights(), torch.get_rng_state()
    with Rig(subject, tmp_path / "beside", **options) as rig:  # type: ignore[arg-type]
        forward, seen = ForwardOnly(rig.executor), []
        evaluated(forward, subject)
        for number, (ids, labels) in enumerate(subject.batches(STEPS), start=1):
            rig.step(ids, labels, number, last=True)
            seen.append(evaluated(forward, subject))
        rig.executor.drain()
        assert rig.losses == losses
        assert unequal(rig.weights(), weights) == []
        assert torch.equal(torch.get_rng_state(), random)
        assert evaluated(forward, subject) == seen[-1]
    model = subject.fresh()
    model.load_state_dict(weights, strict=False)  # a tied head is not among them
    assert relative(seen[-1], plain(model, subject)) <= 1e-6
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_next_tokens_as_transformers_in_memory(family: str, tmp_path: Path) -> None:
    subject = Subject(FAMILIES[family], Shape())
    with Rig(subject, tmp_path) as rig:
        ours = next_logits(rig, subject)
    torch.testing.assert_close(ours, plain_logits(subject), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("vocabulary", [0, 40])
def test_next_tokens_of_a_device(vocabulary: int, there: bool, tied: bool, tmp_path: Path) -> None:
    """The vocabulary whole and cut, the batch on the device and across from it. What was prefetched in vain is forgotten."""
    subject = Subject(llama(tie_word_embeddings=tied), Shape(vocabulary=vocabulary, chunk=5))
    with Rig(subject, tmp_path, device="emulated", batch_on_device=there) as rig:
        ours = next_logits(rig, subject)
        rig.run(1)
    torch.testing.assert_close(ours, plain_logits(subject), rtol=1e-4, atol=1e-5)


AT = torch.tensor([15, 3, 9])  # of three rows, one less than a batch


def next_logits(rig: Rig, subject: Subject) -> torch.Tensor:
    ids = next(subject.batches(1))[0][: len(AT)]
    padded = ids.masked_fill(torch.arange(ids.shape[1]) > AT.unsqueeze(1), 1)
    forward = ForwardOnly(rig.executor)
    with forward.open():
        found = [forward.next_logits(Rectangle(padded, padded), list(enumerate(AT.tolist())), last=False) for _ in range(2)]
        forward.stop_ahead()
    assert torch.equal(found[0], found[1])
    return found[0]


@torch.no_grad()
def plain_logits(subject: Subject) -> torch.Tensor:
    model, ids = subject.fresh(), next(subject.batches(1))[0]
    model.load_state_dict(subject.initial)
    rows = enumerate(AT.tolist())
    return torch.stack([model.eval()(input_ids=ids[n : n + 1, : at + 1], use_cache=False).logits[0, -1] for n, at in rows])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_weights_are_read_once_per_group(clip: float | None, tied: bool, tmp_path: Path) -> None:
    subject = Subject(llama(tie_word_embeddings=tied, vocab_size=2000), Shape())
    with Rig(subject, tmp_path, clip=clip) as rig:
        rig.step(*next(subject.batches(1)), 1, last=True)
        rig.executor.drain()
        forward, before = ForwardOnly(rig.executor), rig.counters()
        evaluated(forward, subject, groups=1)
        once = rig.counters().read_bytes - before.read_bytes
        evaluated(forward, subject, groups=3)  # which may find what the group before still holds
        after = rig.counters()
        stored = ITEM_SIZE[rig.spec.compute_dtype] * rig.spec.stored_parameters
        assert once == stored == forward.schedule.traffic.read_total
        assert after.read_bytes - before.read_bytes <= 4 * stored
        assert after.written_bytes == before.written_bytes
        assert plan_schedule(rig.spec, rig.plan).traffic.read_total > stored
