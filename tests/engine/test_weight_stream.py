"""Tests weights that pass through memory: losses as transformers has them with all of it there, and each byte read once a
pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from fuyou_cli.core.errors import PlanError
from fuyou_cli.engine.weight_stream import StreamedLosses, Visited, WeightStream

from .comparing import relative
from .families import FAMILIES, llama
from .rig import Rectangle, Shape, Subject

PLENTY = 1 << 40


class Counted:
    """Reads from memory, and counts."""

    def __init__(self, subject: Subject) -> None:
        self._weights, self.elements = subject.stored(subject.initial), 0
        self.whole = sum(stage.numel for stage in subject.spec.stages)

    def __call__(self, name: str, into: torch.Tensor, first: int) -> None:
        self.elements += into.numel()
        into.copy_(self._weights[name].view(-1)[first : first + into.numel()])


@contextmanager
def opened(subject: Subject, memory: int, device_memory: int = 0) -> Iterator[tuple[StreamedLosses, WeightStream, Counted]]:
    read = Counted(subject)
    subject.anatomy.model.eval()
    sizes = {"memory": memory, "device_memory": device_memory}
    with (
        WeightStream(subject.anatomy, read, dtype=torch.float32, **sizes) as weights,
        StreamedLosses(weights, replace(subject.numerics, micro_batch_size=2)) as losses,
    ):
        yield losses, weights, read


def least_memory(subject: Subject) -> int:
    """Returns two slots for the largest stage, as a first try is told."""
    sizes = [4 * stage.params for i, stage in enumerate(subject.anatomy.stages) if stage.kind != "embedding"]
    return 2 * max(sizes)


@torch.no_grad()
def plain(subject: Subject, ids: torch.Tensor, labels: torch.Tensor) -> list[float]:
    model, found = subject.fresh().eval(), []
    for row in range(len(ids)):
        count = int((labels[row, 1:] != -100).sum())
        found.append(count * float(model(input_ids=ids[row : row + 1], labels=labels[row : row + 1]).loss))
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3"])
def test_losses_as_transformers_in_memory(family: str) -> None:
    subject = Subject(FAMILIES[family], Shape())
    ids, labels = next(subject.batches(1))
    with opened(subject, PLENTY) as (losses, _, _):
        found = losses.losses(Rectangle(ids, labels), last=True).sum(-1).tolist()
    assert relative(found, plain(subject, ids, labels)) <= 1e-6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [0, 40])
def test_each_byte_is_read_once_in_a_pass(vocabulary: int, tied: bool) -> None:
    """Reads in the least memory what does not stay again for every pass, and nothing for a pass that does not come."""
    config = llama(num_hidden_layers=5, tie_word_embeddings=tied)
    subject = Subject(config, Shape(vocabulary=vocabulary, chunk=5))
    batches, seen = list(subject.batches(3)), []
    with opened(subject, least_memory(subject)) as (losses, weights, read):
        assert weights.memory <= least_memory(subject)
        for number, (ids, labels) in enumerate(batches):
            before = read.elements
            found = losses.losses(Rectangle(ids, labels), last=True).sum(-1).tolist()
            seen.append(read.elements - before)
            assert relative(found, plain(subject, ids, labels)) <= 1e-6, number
    table = 32 * 97
    rows = [ids.unique().numel() * 32 for ids, _ in batches]
    assert seen[0] == read.whole - (0 if tied else table) + rows[0]
    assert seen[1] == seen[0] - sum(subject.spec.stages[i].numel for i in weights.staying) + rows[1] - rows[0]
    assert seen[2] == seen[1] + rows[2] - rows[1]


def test_all_that_fits_stays() -> None:
    subject = Subject(llama(num_hidden_layers=6), Shape())
    ids, labels = next(subject.batches(1))
    losses_of = dict[int, list[float]]()
    block = 4 * subject.anatomy.stages[1].params
    for blocks in (2, 4, 8):
        with opened(subject, least_memory(subject) + blocks * block) as (losses, weights, read):
            first = losses.losses(Rectangle(ids, labels), last=False).sum(-1).tolist()
            losses_of[blocks] = losses.losses(Rectangle(ids, labels), last=True).sum(-1).tolist()
            assert first == losses_of[blocks]
            assert read.elements < 2 * read.whole
            if blocks == 8:
                assert weights.streamed_bytes == 0
    assert losses_of[2] == losses_of[4] == losses_of[8]


@pytest.mark.parametrize("tied", [False, True])
def test_what_stays_on_a_device_comes_through_the_slots(tied: bool) -> None:
    """Reads once what stays on the device, though RAM has two slots only; losses are the same."""
    subject = Subject(llama(num_hidden_layers=6, tie_word_embeddings=tied), Shape())
    ids, labels = next(subject.batches(1))
    expected, rows = plain(subject, ids, labels), ids.unique().numel() * 32
    block, visited = 4 * subject.anatomy.stages[1].params, Visited.of(subject.anatomy, torch.float32)
    for there, seen in ((0, 0), (3 * block + least_memory(subject) // 2, 2), (PLENTY, 6)):
        with opened(subject, least_memory(subject), there) as (losses, weights, read):
            assert weights.device_memory <= there and weights.memory <= least_memory(subject)
            assert len([i for i in weights.on_device if subject.anatomy.stages[i].kind == "block"]) >= seen
            for last in (False, False, True):
                assert relative(losses.losses(Rectangle(ids, labels), last=last).sum(-1).tolist(), expected) <= 1e-6
            first = read.whole - (0 if tied else 32 * 97)
            again = sum(subject.spec.stages[i].numel for i in visited.order)
            again -= sum(subject.spec.stages[i].numel for i in weights.on_device | weights.staying)
            assert read.elements == first + 2 * again + 3 * rows
    assert weights.streamed_bytes == 0


def test_a_stage_too_large_for_two_slots_does_not_go_to_the_device() -> None:
    """RAM for the head alone and two blocks: two slots for the head, through which it would go, have no room."""
    subject = Subject(llama(num_hidden_layers=6, vocab_size=997), Shape())
    sizes = [4 * stage.params for stage in subject.anatomy.stages]
    memory = sizes[-1] + 2 * max(sizes[1:-1])
    with opened(subject, memory, memory) as (losses, weights, _):
        assert weights.memory <= memory and len(sizes) - 1 in weights.staying and weights.on_device
        ids, labels = next(subject.batches(1))
        assert relative(losses.losses(Rectangle(ids, labels), last=True).sum(-1).tolist(), plain(subject, ids, labels)) <= 1e-6


def test_too_little_memory_is_said() -> None:
    subject = Subject(llama(), Shape())
    with pytest.raises(PlanError, match="weights need at least"):
        WeightStream(subject.anatomy, Counted(subject), dtype=torch.float32, memory=least_memory(subject) // 2)
