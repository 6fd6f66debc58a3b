"""Tests losses without training: as plain PyTorch computes them, beside steps that do not notice, with weights read once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed, every
from transformers import AutoModelForCausalLM, PreTrainedConfig

from fuyou_cli.core.errors import PlanError, UsageError
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.cutting import cut_vocabulary
from fuyou_cli.engine.forward_only import ForwardOnly, StreamedLosses, Visited, WeightStream, passing, room
from fuyou_cli.engine.skeleton import build
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.spec.model import ITEM_SIZE

from .comparing import relative, unequal
from .families import FAMILIES, gpt2, llama
from .measuring import Seen
from .rig import Rectangle, Rig, Shape, Subject
from .test_vocabulary import batched

STEPS = 3


def rows_of(subject: Subject, groups: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids, labels) of as many batches; the last has a row less."""
    ids, labels = (torch.cat(parts)[:-1] for parts in zip(*subject.batches(groups), strict=True))
    return ids, labels


def evaluated(forward: ForwardOnly, subject: Subject, groups: int = 2) -> list[float]:
    """Each row's loss."""
    ids, labels = rows_of(subject, groups)
    found: list[float] = []
    with forward.open():
        for begin in range(0, len(ids), forward.rows):
            rows = slice(begin, begin + forward.rows)
            found += forward.losses(Rectangle(ids[rows], labels[rows]), last=rows.stop >= len(ids)).sum(-1).tolist()
    return found


@torch.no_grad()
def plain(subject: Subject, ids: torch.Tensor, labels: torch.Tensor, weights: Any = None) -> list[float]:
    """The same by the model's own forward with its own loss, row by row. `weights`: None are the initial ones."""
    model, found = subject.fresh().eval(), list[float]()
    model.load_state_dict(subject.initial if weights is None else weights, strict=False)  # a tied head is not among them
    for row in range(len(ids)):
        count = int((labels[row, 1:] != -100).sum())
        found.append(count * float(model(input_ids=ids[row : row + 1], labels=labels[row : row + 1], use_cache=False).loss))
    return found


def assert_as_in_memory(subject: Subject, folder: Path, **way: Any) -> None:
    with Rig(subject, folder, **way) as rig:
        rows = evaluated(ForwardOnly(rig.executor), subject)
    assert relative(rows, plain(subject, *rows_of(subject))) <= 1e-6


@pytest.mark.parametrize("family", every(4, FAMILIES))
def test_as_transformers_in_memory(family: str, tmp_path: Path) -> None:
    assert_as_in_memory(Subject(FAMILIES[family], Shape()), tmp_path)


@crossed(2, tied=[False, True], device=["cpu", "emulated"], vocabulary=[0, 40])
def test_with_a_cut_or_tied_vocabulary(vocabulary: int, device: str, tied: bool, tmp_path: Path) -> None:
    subject = Subject(llama(tie_word_embeddings=tied), Shape(vocabulary=vocabulary, chunk=5))
    assert_as_in_memory(subject, tmp_path, device=device)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"clip": None}, {"clip": None, "home": "cpu"}, {"device": "emulated", "kept": "all"},
        {"device": "emulated", "batch_on_device": False, "home": None}, {"sweeps": 2, "clip": None},
    ],
    ids=str,
)  # fmt: skip
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
    assert relative(seen[-1], plain(subject, *rows_of(subject), weights)) <= 1e-6
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("family", every(3, FAMILIES))
def test_next_tokens_as_transformers_in_memory(family: str, tmp_path: Path) -> None:
    subject = Subject(FAMILIES[family], Shape())
    with Rig(subject, tmp_path) as rig:
        ours = next_logits(rig, subject)
    torch.testing.assert_close(ours, plain_logits(subject), rtol=1e-4, atol=1e-5)


@crossed(2, vocabulary=[0, 40], there=[False, True], tied=[False, True])
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


@crossed(2, clip=[None, 0.5], tied=[False, True])
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


# ---- weights that pass through memory ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3"])
def test_losses_as_transformers_in_memory(family: str) -> None:
    subject = Subject(FAMILIES[family], Shape())
    ids, labels = next(subject.batches(1))
    with opened(subject, PLENTY) as (losses, _, _):
        found = losses.losses(Rectangle(ids, labels), last=True).sum(-1).tolist()
    assert relative(found, plain(subject, ids, labels)) <= 1e-6


@crossed(2, vocabulary=[0, 40], tied=[False, True])
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


# ---- generating ----------------------------------------------------------------------------------------------------


PROMPT, NEW = 9, 8
LITTLE = 135_000  # bytes: of most families some blocks stay, and others take turns


class Model:
    """Holds one random model: its stages, and all of it in memory."""

    def __init__(self, config: PreTrainedConfig, *, vocabulary: int = 0) -> None:
        torch.set_num_threads(1)
        self.skeleton = build(config, dtype="float32", attention="sdpa").eval()
        self.anatomy = cut_vocabulary(dissect(self.skeleton), vocabulary)
        torch.manual_seed(11)
        attention = self.skeleton.config._attn_implementation
        own = type(config).from_dict(config.to_dict())
        self.whole: Any = AutoModelForCausalLM.from_config(own, attn_implementation=attention).eval()
        self.weights = dict(self.whole.state_dict())

    def read(self, name: str, into: torch.Tensor, first: int) -> None:
        into.copy_(self.weights[name].view(-1)[first : first + into.numel()])

    def streamed(self, read: Any = None, **asked: Any) -> list[list[int]]:
        with (
            WeightStream(self.anatomy, read or self.read, dtype=torch.float32, memory=LITTLE) as weights,
            passing(weights) as model,
        ):
            return generated(model, **asked)

    def in_memory(self, **asked: Any) -> list[list[int]]:
        return generated(self.whole, **asked)


def generated(model: Any, **asked: Any) -> list[list[int]]:
    torch.manual_seed(3)
    tokens: list[list[int]] = model.generate(**asked, max_new_tokens=NEW, pad_token_id=0).tolist()
    return tokens


def prompts(rows: int) -> dict[str, torch.Tensor]:
    """Returns prompts of 9, 8, 7 and 6 tokens in turn, padded on the left."""
    ids = torch.randint(1, 97, (rows, PROMPT), generator=torch.Generator().manual_seed(5))
    there = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : row % 4] = there[row, : row % 4] = 0
    return {"input_ids": ids, "attention_mask": there}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "opt", "gpt_neox"])
def test_greedy_tokens_as_in_memory(family: str) -> None:
    """Compares token for token, one prompt and eight; rows end at different places, by one of many end tokens."""
    model = Model(FAMILIES[family])
    for rows in (1, 8):
        asked = {**prompts(rows), "do_sample": False, "eos_token_id": list(range(70, 97))}
        found = model.streamed(**asked)
        assert found == model.in_memory(**asked), rows
    assert len({token for row in found for token in row[PROMPT:]}) > 6


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_pieces(tied: bool) -> None:
    model = Model(llama(num_hidden_layers=4, tie_word_embeddings=tied), vocabulary=40)
    asked = {**prompts(3), "do_sample": False}
    assert model.streamed(**asked) == model.in_memory(**asked)


def test_drawn_tokens_as_in_memory() -> None:
    model, asked = Model(llama()), {**prompts(8), "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40}
    drawn = model.streamed(**asked)
    assert drawn == model.in_memory(**asked)
    assert drawn != model.in_memory(**prompts(8), do_sample=False)


@pytest.mark.parametrize("rows", [1, 8])
def test_the_head_multiplies_by_its_weights_once_for_all_prompts(rows: int) -> None:
    """Torch makes a batched product of rows whose strides are not regular, and copies bfloat16 weights for each."""
    model = Model(llama())
    with Seen(batched) as products:
        model.streamed(**prompts(rows))
    assert not [shape for shape in products.found if model.skeleton.config.vocab_size in shape]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_cache_is_counted(family: str) -> None:
    """Counts exactly what transformers' cache holds at the end, also where it keeps the tokens of a window only."""
    model = Model(FAMILIES[family])
    needed = room(model.skeleton, rows=3, prompt=PROMPT, new=NEW)
    cache = model.whole(input_ids=torch.ones(3, PROMPT + NEW, dtype=torch.long), use_cache=True).past_key_values
    assert needed.cache == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert needed.work > 3 * PROMPT * 32 * 4


def test_a_row_that_is_computed_anew_is_counted() -> None:
    """Its first tokens are few, and a pass over most of it follows once its positions change."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    usual = room(build(llama(), dtype="float32", attention="sdpa"), rows=2, prompt=2, new=62)
    changing = llama(rope_parameters={**rope, "original_max_position_embeddings": 60})
    anew = room(build(changing, dtype="float32", attention="sdpa"), rows=2, prompt=2, new=62)
    never = room(build(changing, dtype="float32", attention="sdpa"), rows=2, prompt=2, new=58)
    assert anew.cache == usual.cache and anew.work > usual.work + anew.cache // 2 and never.work <= usual.work


def test_what_reading_raises_arrives() -> None:
    model = Model(llama())

    def fails(name: str, into: torch.Tensor, first: int) -> None:
        raise UsageError("the file is gone")

    with pytest.raises(UsageError, match="gone"):
        model.streamed(fails, **prompts(1), do_sample=False)
    assert "forward" not in vars(model.skeleton.get_output_embeddings())
