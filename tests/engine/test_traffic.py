"""With everything on the ssd the daemon's counters show what the plan promised, byte for byte, in an arena that holds a
fraction of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drawn import quick_and_slow

from fuyou_cli.planner.schedule import plan_schedule, weights_left
from fuyou_cli.spec.model import ITEM_SIZE, STATE_TILE

from .families import llama
from .rig import Rig, Shape, Subject, assert_moves_as_planned
from .test_equal_bits import MODELS as EQUAL

BLOCKS = 8


@pytest.fixture(scope="module")
def subjects() -> Callable[[Any], Subject]:
    """Makes each once: eight blocks, and an embedding and a head nearly as large, so that all share their slots."""
    config = llama(vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=BLOCKS)

    def made(name: Any) -> Subject:
        if name in MODELS:
            return MODELS[name]()
        dtype, rule = ("float32", "lion") if name == "lion" else (name, "adamw")
        return Subject(config, Shape(dtype=dtype, accumulate=dtype, batch=2, micro=2, rule=rule))

    return cache(made)


@pytest.fixture
def subject(request: pytest.FixtureRequest, subjects: Callable[[Any], Subject]) -> Subject:
    return subjects(request.param)


# Vocabularies of which pieces of 700, 700 and 600 rows share slots with the blocks.
PIECES: dict[str, Any] = dict(vocab_size=2000, hidden_size=128, intermediate_size=256)
SMALL = llama(vocab_size=800, hidden_size=128, intermediate_size=384, num_hidden_layers=4)


def _pieces(tied: bool, dtype: Any) -> Subject:
    return Subject(llama(**PIECES, tie_word_embeddings=tied), Shape(dtype=dtype, batch=2, micro=2, vocabulary=700))


def _small(states: Any) -> Subject:
    return Subject(SMALL, Shape(dtype="bfloat16", accumulate="bfloat16", batch=2, micro=2, states=states))


def _uneven() -> Subject:
    return Subject(llama(num_hidden_layers=3), Shape(dtype="bfloat16", accumulate="bfloat16", batch=5, micro=2))


MODELS: dict[str, Callable[[], Subject]] = {
    **EQUAL, "pieces": lambda: _pieces(False, "float32"), "pieces, bf16": lambda: _pieces(False, "bfloat16"),
    "pieces, tied": lambda: _pieces(True, "float32"), "pieces, tied, bf16": lambda: _pieces(True, "bfloat16"),
    "states of bf16": lambda: _small("bfloat16"), "states of int8": lambda: _small("int8"), "three micro-batches": _uneven,
}  # fmt: skip
STATES: dict[str, Any] = dict(clip=None, boundaries="cpu", lookahead=1, chunk=STATE_TILE)
MOVED: list[tuple[str, dict[str, Any]]] = [
    ("bfloat16", dict(clip=0.5, lookahead=1)), ("float32", dict(clip=None, lookahead=1)),
    ("bfloat16", dict(clip=None, defer=True, lookahead=1)), ("lion", dict(clip=0.5, lookahead=1)),
    *((model, dict(clip=None, defer=True, lookahead=1)) for model in ("llama", "gpt2", "tied, cut")),
    ("rows", dict(clip=0.5, lookahead=1, sweeps=2)), ("rows", dict(clip=None, lookahead=1, sweeps=3)),
    ("rows", dict(clip=0.5, lookahead=1, sweeps=6)), ("rows, bf16, cut", dict(clip=None, lookahead=1, sweeps=2)),
    ("rows, bf16, cut", dict(clip=0.5, lookahead=1, sweeps=3)), ("rows, bf16, cut", dict(clip=None, lookahead=1, sweeps=6)),
    ("bf16", dict(clip=0.5, norm_first=True, lookahead=1)), ("bf16", dict(clip=0.5, norm_first=True, kept="all", lookahead=1)),
    ("bf16", dict(clip=0.5, norm_first=True, device="emulated", lookahead=1)),
    ("bf16", dict(clip=0.5, norm_first=True, defer=True, lookahead=2)),
    ("bf16", dict(clip=0.5, norm_first=True, device="emulated", device_states=(1, 2), lookahead=2)),
    ("pieces", dict(clip=0.5, lookahead=1)), ("pieces, tied, bf16", dict(clip=0.5, lookahead=1)),
    ("pieces, tied", dict(clip=None, lookahead=1)), ("pieces, bf16", dict(clip=None, lookahead=1)), ("states of bf16", STATES),
    ("states of int8", STATES), ("three micro-batches", dict(home="cpu", boundaries="ssd", kept="all")),
]  # fmt: skip
MOST = {"states of bf16": 18.0, "states of int8": 14.8}  # bytes read and written for a parameter; 26 with float32 states
OFTEN = (0, 4, 7, 13, 17, 20, 22, 24)  # in the quick suite


@pytest.mark.parametrize("number", quick_and_slow(range(len(MOVED)), lambda number: number in OFTEN))
def test_one_more_step_moves_exactly_what_was_predicted(
    number: int, subjects: Callable[[Any], Subject], tmp_path: Path
) -> None:
    """Gradients go to the ssd and come back of updates that wait for the next forward, and where weights have two users."""
    name, way = MOVED[number]
    subject = subjects(name)
    spec, (plan, updated) = subject.spec, assert_moves_as_planned(subject, tmp_path, **way)
    predicted = plan.predicted
    assert updated == spec.stored_parameters - sum(spec.stages[stage].trained for stage in way.get("device_states", ()))
    if "sweeps" not in way and way.get("home") != "cpu":
        resting = {stage.stage for stage in plan.stages if stage.deferred}
        two_users = [stage for stage in spec.stages if spec.has_two_users(stage.index)]
        parameters = sum(spec.stages[stage].trained for stage in resting) + sum(stage.trained for stage in two_users)
        item = ITEM_SIZE[subject.shape.accumulate]
        assert predicted.read_by["gradients"] == predicted.written_by["gradients"] == item * parameters
    if name in MOST:
        assert predicted.read_per_step + predicted.written_per_step <= MOST[name] * spec.stored_parameters
    if "kept" in way and "home" in way:
        outputs = sum(operator.bytes for stage in spec.stages for operator in stage.operators)
        assert predicted.read_by["boundaries"] == predicted.read_per_step > 3 * outputs


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_first_step_reads_what_later_ones_find_in_their_slots(lookahead: int, tmp_path: Path) -> None:
    """Of blocks that are frozen, under an embedding that is not."""
    config = llama(vocab_size=2000, hidden_size=64, intermediate_size=192, num_hidden_layers=BLOCKS)
    subject = Subject(config, Shape(batch=2, micro=2), freeze=["model.layers.*"])
    with Rig(subject, tmp_path, clip=None, lookahead=lookahead) as rig:
        rig.run(1, settle=True)
        predicted, read = rig.plan.predicted, rig.counters().read_bytes
        left = weights_left(subject.spec, rig.plan, plan_schedule(subject.spec, rig.plan).visits)
    assert left > 0 and read == predicted.read_per_step - predicted.read_by["states"] + left


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("subject", ["float32", "bfloat16"], indirect=True)
def test_weights_twice_states_once(clip: float | None, subject: Subject, tmp_path: Path) -> None:
    with Rig(subject, tmp_path, clip=clip, lookahead=1) as rig:
        predicted, stages = rig.plan.predicted, subject.spec.stages
    fp32 = subject.spec.compute_dtype == "float32"
    weight, states = (4, 8) if fp32 else (2, 10)
    of_kind = {kind: sum(s.params for s in stages if s.kind == kind) for kind in ("embedding", "block", "norm", "head")}
    everything = sum(of_kind.values())
    # Blocks and norm in forward and in backward, but the last block of either pass stays for the other; the head in its one
    # pass; the embedding once, because its backward leaves its weights where the next forward takes them.
    blocks = (2 * BLOCKS - 2) * of_kind["block"] // BLOCKS
    once = of_kind["embedding"] + of_kind["head"]
    assert predicted.read_by["weights"] == weight * (blocks + 2 * of_kind["norm"] + once)
    assert predicted.written_by["weights"] == weight * everything
    assert predicted.read_by["states"] == predicted.written_by["states"] == states * everything
    gradients = weight * everything if clip else 0
    assert predicted.read_by["gradients"] == predicted.written_by["gradients"] == gradients
    assert predicted.read_by["boundaries"] == predicted.written_by["boundaries"]
    boundary = 2 * 16 * 256 * weight
    assert predicted.read_by["boundaries"] == (BLOCKS + 1) * boundary


@pytest.mark.parametrize("subject", ["bfloat16"], indirect=True)
def test_at_most_26_bytes_per_parameter_unclipped(subject: Subject, tmp_path: Path) -> None:
    """Counts bf16, all on the ssd: 14 read and 12 written, besides boundaries."""
    with Rig(subject, tmp_path, clip=None) as rig:
        predicted = rig.plan.predicted
    boundaries = predicted.read_by["boundaries"] + predicted.written_by["boundaries"]
    moved = predicted.read_per_step + predicted.written_per_step - boundaries
    assert moved <= 26 * subject.spec.parameters


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
def test_the_arena_is_smaller_than_two_stages(clip: float | None, tmp_path: Path) -> None:
    """Takes less than two stages of fp32 weights, gradients and states; the model has ten such stages."""
    config = llama(vocab_size=2800, hidden_size=320, intermediate_size=1280, num_hidden_layers=BLOCKS)
    subject = Subject(config, Shape(batch=2, micro=2))
    with Rig(subject, tmp_path, clip=clip, lookahead=1, chunks=3) as rig:
        rig.run(2)
        assert rig.plan.arena_size < 2 * 16 * max(stage.params for stage in subject.spec.stages)
        assert rig.plan.arena_size < 16 * subject.spec.stored_parameters / 4
