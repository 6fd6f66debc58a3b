"""With everything on the ssd the daemon's counters show what the plan promised, byte for byte, in an arena that holds a
fraction of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drawn import every

from fuyou_cli.engine.updates import Optimizer
from fuyou_cli.planner.schedule import plan_schedule, weights_left

from .families import llama
from .rig import Rig, Shape, Subject, assert_moves_as_planned

OPTIMIZER = Optimizer(lr=1e-3, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0)
BLOCKS = 8


@pytest.fixture(scope="module")
def subjects() -> Callable[[Any], Subject]:
    """Makes each once: eight blocks, and an embedding and a head nearly as large, so that all share their slots."""
    config = llama(vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=BLOCKS)

    def made(name: Any) -> Subject:
        dtype, rule = ("float32", "lion") if name == "lion" else (name, "adamw")
        return Subject(config, Shape(dtype=dtype, accumulate=dtype, batch=2, micro=2, rule=rule))

    return cache(made)


@pytest.fixture
def subject(request: pytest.FixtureRequest, subjects: Callable[[Any], Subject]) -> Subject:
    return subjects(request.param)


@pytest.mark.parametrize(
    ("subject", "clip", "defer"),
    every(2, [("bfloat16", 0.5, None), ("float32", None, None), ("bfloat16", None, True), ("lion", 0.5, None)]),
    indirect=["subject"],
)
def test_one_more_step_moves_exactly_what_was_predicted(
    clip: float | None, defer: bool | None, subject: Subject, tmp_path: Path
) -> None:
    _, updated = assert_moves_as_planned(subject, tmp_path, clip=clip, defer=defer, lookahead=1, optimizer=OPTIMIZER)
    assert updated == subject.spec.stored_parameters


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
