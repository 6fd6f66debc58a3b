"""Tests that where bytes rest and how they move changes no bit of losses and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drawn import quick_and_slow

from fuyou_cli.core.errors import SwapError
from fuyou_cli.spec.model import ITEM_SIZE

from .comparing import Outcome, assert_same
from .families import gpt2, llama
from .rig import Rig, Shape, Subject, outcome

STEPS = 4
WAYS: dict[str, dict[str, Any]] = {
    "all in RAM": dict(home="cpu"),
    "gradients in RAM": dict(gradients="cpu"),
    "lookahead 1": dict(lookahead=1),
    "lookahead 2": dict(lookahead=2),
    "lookahead 4": dict(lookahead=4),
    "lookahead further than the step": dict(lookahead=1000),
    "three directories": dict(directories=3),
    "threads": dict(backend="threads"),
    "io_uring": dict(backend="io_uring"),
    "two update threads": dict(update_threads=2),
    "as many update threads as beside a GPU": dict(update_threads=16, chunks=21),
    "little scratch": dict(chunks=2),
    "emulated device": dict(device="emulated"),
    "emulated device, all in RAM": dict(device="emulated", home="cpu"),
    "everything at once": dict(device="emulated", lookahead=4, directories=3, backend="threads", update_threads=2),
}

# (model, clipping): every way, and every room on the device, has one of the pairs, in turn
PAIRS = ([("gpt2", 0.5), ("llama", None)], [("gpt2", None), ("llama", 0.5)])


def _in_turn(cases: Iterable[Any]) -> list[tuple[Any, str, float | None]]:
    return [(case, *pair) for number, case in enumerate(cases) for pair in PAIRS[number % 2]]


def _subject(family: str) -> Subject:
    if family == "gpt2":
        return Subject(gpt2(dropout=0.1), Shape())
    # 37,000 parameters a block: an update takes three chunks
    return Subject(llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3), Shape())


@pytest.fixture(scope="module")
def subjects() -> Callable[[str], Subject]:
    """Makes each once."""
    return cache(_subject)


@pytest.fixture
def subject(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    """Makes a GPT-2 (dropout and a tied head) or a Llama (several update chunks, untied)."""
    return subjects(request.param)


@pytest.fixture(scope="module")
def on_the_ssd(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Subject, float | None], Outcome]:
    """Gives on_the_ssd(subject, clip): all of it, one directory, the usual backend; computed once."""
    return cache(lambda subject, clip: outcome(subject, tmp_path_factory.mktemp("store"), STEPS, clip=clip))


@pytest.fixture
def expected(subject: Subject, clip: float | None, on_the_ssd: Callable[[Subject, float | None], Outcome]) -> Outcome:
    return on_the_ssd(subject, clip)


@pytest.mark.parametrize(
    ("way", "subject", "clip"), quick_and_slow(_in_turn(WAYS), lambda n: n % 4 in (0, 3)), indirect=["subject"]
)
def test_bitwise_the_same(way: str, subject: Subject, clip: float | None, expected: Outcome, tmp_path: Path) -> None:
    try:
        losses, weights = outcome(subject, tmp_path, STEPS, clip=clip, **WAYS[way])
    except SwapError as error:
        if WAYS[way].get("backend") != "io_uring" or "cannot start" not in str(error):
            raise
        pytest.skip(f"this machine refuses io_uring: {error}")
    assert_same((losses, weights), expected)


@pytest.mark.parametrize(("room", "subject", "clip"), _in_turn([1, 2, 1 << 20]), indirect=["subject"])
def test_weights_of_some_stages_on_the_device(
    room: int, subject: Subject, clip: float | None, expected: Outcome, tmp_path: Path
) -> None:
    """Leaves room for as many blocks beside those that take turns, or for all there is."""
    blocks = [stage.index for stage in subject.spec.stages if stage.kind == "block"]
    block = ITEM_SIZE[subject.spec.compute_dtype] * subject.spec.stages[blocks[0]].params
    emulated = dict[str, Any](device="emulated", home=None, clip=clip)
    with Rig(subject, tmp_path / "streamed", **emulated) as rig:
        peak = rig.plan.predicted.gpu_peak
    with Rig(subject, tmp_path / "at home", gpu_budget=peak + room * block, **emulated) as rig:
        at_home = [stage.stage for stage in rig.plan.stages if stage.weights == "gpu"]
        assert at_home and rig.plan.predicted.gpu_peak <= peak + room * block
        if room == 1 and len(blocks) > 2:  # of two blocks all fit once neither takes turns
            assert len(at_home) < len(blocks)
        losses, weights = rig.run(STEPS), rig.weights()
    assert_same((losses, weights), expected)


def test_dropout_was_at_work(tmp_path: Path) -> None:
    with_dropout = outcome(Subject(gpt2(dropout=0.1), Shape()), tmp_path / "with", STEPS, home="cpu")
    without = outcome(Subject(gpt2(), Shape()), tmp_path / "without", STEPS, home="cpu")
    assert with_dropout[0][0] != without[0][0]


@pytest.fixture(scope="module")
def large() -> Subject:
    """Makes a model large enough for a budget to matter: two blocks of 852,000 parameters, and spans are rounded to 2 MiB."""
    config = llama(vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=2)
    return Subject(config, Shape(batch=2, micro=1))


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
def test_mixed_by_budget(clip: float | None, large: Subject, tmp_path: Path) -> None:
    with Rig(large, tmp_path / "ssd", clip=clip) as rig:
        expected = rig.run(STEPS), rig.weights()
        low = rig.plan.predicted.cpu_peak
    with Rig(large, tmp_path / "cpu", home="cpu", clip=clip) as rig:
        high = rig.plan.predicted.cpu_peak
    mixes = set()
    for share in (0.25, 0.5, 0.75):
        budget = int(low + share * (high - low))
        with Rig(large, tmp_path / str(share), home=None, clip=clip, budget=budget) as rig:
            homes = [(p.weights, p.states, p.gradients_extent is None, p.boundary) for p in rig.plan.stages]
            assert {tier for weights, states, _, _ in homes for tier in (weights, states)} == {"cpu", "ssd"}
            mixes.add(str(homes))
            losses, weights = rig.run(STEPS), rig.weights()
        assert_same((losses, weights), expected)
    assert len(mixes) == 3
