"""Tests that where bytes rest, how they move and in which order visits run changes no bit of losses and weights.

One matrix: a row (`WAYS`) is a device, homes and a mode of the schedule, a column (`MODELS`) a model with its numerics. What a
model gives in the plainest way (all on the ssd, one sweep, recomputed, on device cpu) is computed once for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import transformers
from drawn import every, examples, quick_and_slow
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.errors import SwapError
from fuyou_cli.planner.boundary_layout import every_operator
from fuyou_cli.planner.schedule import Visit
from fuyou_cli.spec.model import ITEM_SIZE, STATE_TILE, StateDtype

from .comparing import Outcome, assert_same
from .families import FAMILIES, VOCABULARY, gpt2, llama
from .rig import SPARE, Rig, Shape, Subject

STEPS = 3  # of the third on nothing is new: states are not zero, deferred updates ran, both extents of a pair were written
UNEVEN: dict[str, Any] = {"batch": 5, "micro": 2}  # three micro-batches, the last one of a single row


def _untied_gpt2() -> Subject:
    config = gpt2(dropout=0.1)  # within blocks and between stages
    config.tie_word_embeddings = False
    return Subject(config, Shape())


def _of_rows(**shape: Any) -> Subject:
    """Untied, with dropout in attention: which numbers it draws depends on the micro-batch alone, so it may be swept."""
    return Subject(llama(num_hidden_layers=3, attention_dropout=0.1), Shape(**shape))


def _narrow(**shape: Any) -> Subject:
    return Subject(llama(num_hidden_layers=3), Shape(dtype="bfloat16", **shape))


def _small(states: StateDtype, **shape: Any) -> Subject:
    """164,000 parameters a block: two tiles of states, and one that ends early."""
    return Subject(llama(hidden_size=128, intermediate_size=256), Shape(states=states, **shape))


MODELS: dict[str, Callable[[], Subject]] = {
    "gpt2": lambda: Subject(gpt2(dropout=0.1), Shape()),  # a tied head
    # 37,000 parameters a block: an update takes three chunks
    "llama": lambda: Subject(llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3), Shape()),
    "tied, cut": lambda: Subject(llama(tie_word_embeddings=True), Shape(vocabulary=40)),
    "capped, cut": lambda: Subject(FAMILIES["gemma2"], Shape(vocabulary=40, chunk=5)),
    "uneven": lambda: Subject(gpt2(dropout=0.1), Shape(**UNEVEN)),
    "uneven, bf16": lambda: Subject(gpt2(dropout=0.1), Shape(dtype="bfloat16", **UNEVEN)),
    "rows": lambda: _of_rows(batch=6, micro=1),
    "rows, cut": lambda: _of_rows(batch=6, micro=1, vocabulary=40, chunk=8),
    "rows, bf16": lambda: _of_rows(batch=12, micro=2, dtype="bfloat16"),
    "rows, bf16, cut": lambda: _of_rows(batch=12, micro=2, dtype="bfloat16", vocabulary=40, accumulate="bfloat16"),
    "bf16": _narrow,
    "bf16, cut": lambda: _narrow(vocabulary=40),
    "bf16, int8 states": lambda: _narrow(states="int8"),
    "untied gpt2": _untied_gpt2,
    "bf16 states": lambda: _small("bfloat16"),
    "int8 states": lambda: _small("int8"),
    "narrow, bf16 states": lambda: _small("bfloat16", dtype="bfloat16"),
    "narrow, int8 states": lambda: _small("int8", dtype="bfloat16"),
}
TWO, CUT = ("gpt2", "llama"), ("llama", "gpt2", "tied, cut", "capped, cut")
ROWS = ("rows", "rows, cut", "rows, bf16", "rows, bf16, cut")
SMALL = ("bf16 states", "narrow, int8 states", "int8 states", "narrow, bf16 states")
NARROW = ("bf16", "untied gpt2", "bf16, int8 states", "bf16, cut")

EMULATED: dict[str, Any] = {"device": "emulated"}
# (row, models, clipping: None where updates begin at once, "both" for every other model, way)
Clip = float | Literal["both"] | None
WAYS: list[tuple[str, tuple[str, ...], Clip, dict[str, Any]]] = [
    # homes, lookahead and the machine
    ("all in RAM", TWO, "both", dict(home="cpu")),
    ("gradients in RAM", TWO, "both", dict(gradients="cpu")),
    ("lookahead 1", TWO, "both", dict(lookahead=1)),
    ("lookahead 2", TWO, "both", dict(lookahead=2)),
    ("lookahead 4", TWO, "both", dict(lookahead=4)),
    ("lookahead further than the step", TWO, "both", dict(lookahead=1000)),
    ("three directories", TWO, "both", dict(directories=3)),
    ("threads", TWO, "both", dict(backend="threads")),
    ("io_uring", TWO, "both", dict(backend="io_uring")),
    ("two update threads", TWO, "both", dict(update_threads=2)),
    ("as many update threads as beside a GPU", TWO, "both", dict(update_threads=16, chunks=21)),
    ("little scratch", TWO, "both", dict(chunks=2)),
    ("emulated", TWO, "both", EMULATED),
    ("emulated, all in RAM", TWO, "both", dict(EMULATED, home="cpu")),
    ("everything at once", TWO, "both", dict(EMULATED, lookahead=4, directories=3, backend="threads", update_threads=2)),
    # updates that wait for the next forward; without clipping none waits otherwise
    ("deferred", CUT, None, dict(defer=True)),
    ("deferred, all in RAM", CUT, None, dict(defer=True, home="cpu")),
    ("deferred, gradients in RAM", CUT, None, dict(defer=True, gradients="cpu")),
    ("deferred, one ahead", CUT, None, dict(defer=True, lookahead=1)),
    ("deferred, emulated", CUT, None, dict(EMULATED, defer=True)),
    ("deferred, emulated, gradients in RAM", CUT, None, dict(EMULATED, defer=True, gradients="cpu", lookahead=4)),
    # several sweeps
    ("sweeps", ROWS, 0.5, dict(sweeps=2)),
    ("sweeps, updated at once", ROWS, None, dict(sweeps=3)),
    ("sweeps, updated later", ROWS, None, dict(sweeps=6, defer=True, lookahead=1)),
    ("sweeps, lookahead 4", ROWS, 0.5, dict(sweeps=2, lookahead=4)),
    ("sweeps, lookahead further than the step", ROWS, None, dict(sweeps=3, lookahead=1000)),
    ("sweeps, gradients in RAM", ROWS, None, dict(sweeps=6, gradients="cpu")),
    ("sweeps, outputs kept", ROWS, None, dict(sweeps=2, home="cpu", kept="all")),
    ("sweeps, outputs kept on the ssd", ROWS, 0.5, dict(sweeps=3, kept="all")),
    ("sweeps, emulated", ROWS, 0.5, dict(EMULATED, sweeps=6)),
    ("sweeps, emulated, updated at once", ROWS, None, dict(EMULATED, sweeps=2, lookahead=2)),
    ("sweeps, emulated, across", ROWS, 0.5, dict(EMULATED, sweeps=3, batch_on_device=False, home="cpu")),
    ("sweeps, emulated, outputs kept", ROWS, None, dict(EMULATED, sweeps=6, kept="all", home="cpu")),
    ("sweeps, emulated, states there", ROWS, 0.5, dict(EMULATED, sweeps=2, states="gpu")),
    ("sweeps, emulated, some states there", ROWS, None, dict(EMULATED, sweeps=3, device_states=(0, 2), defer=True)),
    ("sweeps, emulated, outputs kept there", ROWS, 0.5, dict(EMULATED, sweeps=6, kept_there="room", home="cpu")),
    ("sweeps, emulated, outputs kept, across", ROWS, None, dict(EMULATED, sweeps=2, kept="all", batch_on_device=False)),
    ("sweeps, emulated, boundaries there", ROWS, 0.5, dict(EMULATED, sweeps=2, home="cpu", boundaries="gpu")),
    # boundaries and outputs kept on the device
    ("boundaries there", ("uneven",), 0.5, dict(EMULATED, boundaries="gpu")),
    ("boundaries and outputs there", ("uneven",), "both", dict(EMULATED, home="cpu", boundaries="gpu", kept_there="room")),
    ("everything there", ("uneven",), 0.5, dict(EMULATED, home="gpu", boundaries="gpu")),
    ("boundaries there, deferred", ("uneven",), None, dict(EMULATED, boundaries="gpu", defer=True)),
    # states of fewer bits
    ("small states, in RAM", SMALL, "both", dict(home="cpu", update_threads=2, chunk=STATE_TILE)),
    ("small states, emulated", SMALL, "both", dict(EMULATED, gradients="ssd", chunk=4 * STATE_TILE)),
    ("small states, emulated, in RAM", SMALL, 0.5, dict(EMULATED, home="cpu", chunk=2 * STATE_TILE)),
    ("small states, deferred", SMALL, None, dict(EMULATED, home="cpu", defer=True, chunk=2 * STATE_TILE)),
    # a first backward that only measures the norm
    ("norm first", NARROW, 0.5, dict(norm_first=True, lookahead=1)),
    ("norm first, far ahead", NARROW, 0.5, dict(norm_first=True, lookahead=4)),
    ("norm first, all in RAM", NARROW, 0.5, dict(norm_first=True, home="cpu")),
    ("norm first, emulated", NARROW, 0.5, dict(EMULATED, norm_first=True, lookahead=2, boundaries="cpu")),
    ("norm first, emulated, one ahead", NARROW, 0.5, dict(EMULATED, norm_first=True, lookahead=1)),
    ("norm first, across", NARROW, 0.5, dict(EMULATED, norm_first=True, home="cpu", batch_on_device=False)),
    ("norm first, outputs", NARROW, 0.5, dict(norm_first=True, kept="all", lookahead=1)),
    ("norm first, outputs there", NARROW, 0.5, dict(EMULATED, norm_first=True, kept_there="room", boundaries="cpu")),
    ("norm first, states there", ("bf16",), 0.5, dict(EMULATED, norm_first=True, device_states=(1, 2), lookahead=2)),
    ("norm first, later", NARROW, 0.5, dict(norm_first=True, defer=True, lookahead=2)),
    ("norm first, later, emulated", NARROW, 0.5, dict(EMULATED, norm_first=True, defer=True, home="cpu")),
]


def _cases() -> list[Any]:
    """Every row with each of its models. In the quick suite a row has one, and the three longest groups every other row."""
    cases, quick = list[tuple[Any, ...]](), list[bool]()
    for number, (row, models, clip, _) in enumerate(WAYS):
        for place in range(len(models)):
            model = models[(number + place) % len(models)]
            cases.append((row, model, (0.5, None)[(number + place) % 2] if clip == "both" else clip))
            quick.append(place == 0 and (number % 2 == 0 or models not in (TWO, ROWS, NARROW)))
    return quick_and_slow(cases, lambda number: quick[number])


@pytest.fixture(scope="module")
def subjects() -> Callable[[str], Subject]:
    """Makes each once."""
    return cache(lambda model: MODELS[model]())


@pytest.fixture(scope="module")
def plainly(
    subjects: Callable[[str], Subject], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, float | None], Outcome]]:
    """Gives plainly(model, clip), the outcome of the plainest way, computed once."""

    @cache
    def outcome(model: str, clip: float | None) -> Outcome:
        chunk = {"chunk": 2 * STATE_TILE} if model in SMALL else {}
        with Rig(subjects(model), tmp_path_factory.mktemp("plain"), clip=clip, defer=None if clip else False, **chunk) as rig:
            assert clip or not any(stage.deferred for stage in rig.plan.stages)
            return rig.run(STEPS), rig.weights()

    yield outcome
    outcome.cache_clear()


Plainly = Callable[[str, float | None], Outcome]
ROW = {row: way for row, _, _, way in WAYS}


@pytest.mark.parametrize(("row", "model", "clip"), _cases())
def test_no_bit_differs(
    row: str, model: str, clip: float | None, subjects: Callable[[str], Subject], plainly: Plainly, tmp_path: Path
) -> None:
    way = ROW[row]
    try:
        with Rig(subjects(model), tmp_path, clip=clip, **way) as rig:
            if clip is None:
                assert all(stage.deferred == way.get("defer", False) for stage in rig.plan.stages)
            losses, weights = rig.run(STEPS), rig.weights()
            assert rig.generations == {STEPS}
            assert not rig.device.separate or rig.device.peak_memory() <= rig.plan.predicted.gpu_peak + SPARE
    except SwapError as error:
        if way.get("backend") != "io_uring" or "cannot start" not in str(error):
            raise
        pytest.skip(f"this machine refuses io_uring: {error}")
    assert_same((losses, weights), plainly(model, clip))


# ---- a step that is given up, and done again -------------------------------------------------------------------------


Place = Callable[[Rig, Visit], bool]


def _block(*phases: str, sweep: int = 0) -> list[Place]:
    def at(phase: str, rig: Rig, visit: Visit) -> bool:
        return (visit.phase, visit.sweep) == (phase, sweep) and rig.spec.stages[visit.stage].kind == "block"

    return [partial(at, phase) for phase in phases]


def _piece(*phases: str) -> list[Place]:
    def at(phase: str, rig: Rig, visit: Visit) -> bool:
        return visit.phase == phase and rig.spec.stages[visit.stage].vocabulary == (40, 80)

    return [partial(at, phase) for phase in phases]


def _measured() -> list[Place]:
    """Every third visit before the second backward, after which nothing is measured any more."""

    def at(number: int, rig: Rig, visit: Visit) -> bool:
        second = min(visit.index for visit in rig.executor.visits.schedule.visits if visit.again)
        return visit.index == min(number, second - 1)

    return [partial(at, number) for number in range(0, 12, 3)]


IN_PIECES = _piece("forward", "logits", "head", "backward")
ACROSS = _block("forward", "backward")
# row -> models, clipping, way, where it is given up: between micro-batches, or after the visit
GIVEN_UP: dict[str, tuple[tuple[str, ...], float | None, dict[str, Any], list[Place], bool]] = {
    "deferred": (CUT[::2], None, dict(defer=True), _block("forward"), False),
    "deferred, emulated": (CUT[1::2], None, dict(EMULATED, defer=True), _block("backward"), False),
    "sweeps": (("rows",), 0.5, dict(sweeps=3, lookahead=3), _block("forward", "backward", sweep=1), True),
    "sweeps, emulated": (("rows",), 0.5, dict(EMULATED, sweeps=3, lookahead=3), _block("forward", "backward", sweep=1), True),
    "cut": (("tied, cut",), 0.5, {}, IN_PIECES, False),
    "cut, emulated": (("rows, cut",), 0.5, EMULATED, IN_PIECES, False),
    "norm first": (("bf16",), 0.5, dict(norm_first=True, lookahead=1), _measured(), True),
    "norm first, emulated": (("bf16",), 0.5, dict(EMULATED, norm_first=True, lookahead=1), _measured(), True),
    "outputs kept in RAM": (("llama",), 0.5, dict(EMULATED, home="cpu", kept="all"), ACROSS, False),
    "outputs kept on the ssd": (("llama",), 0.5, dict(EMULATED, home="cpu", boundaries="ssd", kept="all"), ACROSS, False),
    "outputs kept there": (("llama",), 0.5, dict(EMULATED, home="cpu", kept_there="room"), ACROSS, False),
    "boundaries there": (("llama",), 0.5, dict(EMULATED, home="cpu", boundaries="gpu"), ACROSS, False),
}


# In the quick suite, a row that there is on both devices runs on the emulated one.
GIVEN_UP_QUICKLY = {row for row in GIVEN_UP if f"{row}, emulated" not in GIVEN_UP and row != "outputs kept in RAM"}
GIVEN_UP_CASES = [(row, model) for row, (models, *_) in GIVEN_UP.items() for model in models]


@pytest.mark.parametrize(
    ("row", "model"), quick_and_slow(GIVEN_UP_CASES, lambda number: GIVEN_UP_CASES[number][0] in GIVEN_UP_QUICKLY)
)
def test_a_step_given_up_can_be_done_again(
    row: str, model: str, subjects: Callable[[str], Subject], plainly: Plainly, tmp_path: Path
) -> None:
    """Gives it up more often than there are spans that could be lost. Updates of the step before stay due, and are done where
    the run is drained, as if it were saved and resumed here."""
    _, clip, way, places, after = GIVEN_UP[row]
    with Rig(subjects(model), tmp_path, clip=clip, **way) as rig:

        def look() -> None:
            assert rig.executor.may_abandon()

        rig.step(*next(rig.subject.batches(1)), 1)
        for place in places:
            for drain in (False, True):
                rig.give_up(2, partial(place, rig), after=after, times=2, drain=drain, look=look)
            assert rig.generations == {1}
        rig.run(STEPS, begin=2)
        assert_same((rig.losses, rig.weights()), plainly(model, clip))
        assert len(rig.executor.visits.boundaries.ledger.free) == len(rig.plan.boundary_slots)


# ---- homes by budget -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 2, 1 << 20])
@pytest.mark.parametrize(("model", "clip"), [("gpt2", 0.5), ("llama", None)])
def test_weights_of_some_stages_on_the_device(
    room: int, model: str, clip: float | None, subjects: Callable[[str], Subject], plainly: Plainly, tmp_path: Path
) -> None:
    """Leaves room for as many blocks beside those that take turns, or for all there is."""
    subject = subjects(model)
    blocks = [stage.index for stage in subject.spec.stages if stage.kind == "block"]
    block = ITEM_SIZE[subject.spec.compute_dtype] * subject.spec.stages[blocks[0]].params
    emulated = dict[str, Any](EMULATED, home=None, clip=clip)
    with Rig(subject, tmp_path / "streamed", **emulated) as rig:
        peak = rig.plan.predicted.gpu_peak
    with Rig(subject, tmp_path / "at home", gpu_budget=peak + room * block, **emulated) as rig:
        at_home = [stage.stage for stage in rig.plan.stages if stage.weights == "gpu"]
        assert at_home and rig.plan.predicted.gpu_peak <= peak + room * block
        if room == 1 and len(blocks) > 2:  # of two blocks all fit once neither takes turns
            assert len(at_home) < len(blocks)
        assert_same((rig.run(STEPS), rig.weights()), plainly(model, clip))


@pytest.mark.parametrize(
    ("clip", "cut", "tied"), every(3, [(0.5, 0, False), (None, 0, False), (0.5, 800, False), (None, 800, True)])
)
def test_mixed_by_budget(clip: float | None, cut: int, tied: bool, tmp_path: Path) -> None:
    """A model large enough for a budget to matter: two blocks of 852,000 parameters, and spans are rounded to 2 MiB. Whole, or
    its vocabulary in three pieces."""
    config = llama(vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=2, tie_word_embeddings=tied)
    large = Subject(config, Shape(batch=2, micro=1, vocabulary=cut))
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
            assert_same((rig.run(STEPS), rig.weights()), expected)
    assert len(mixes) == 3


def test_dropout_was_at_work(plainly: Plainly, tmp_path: Path) -> None:
    with Rig(Subject(gpt2(), Shape()), tmp_path, home="cpu") as rig:
        assert rig.run(1)[0] != plainly("gpt2", 0.5)[0][0]


# ---- kept outputs of every operator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", quick_and_slow(range(len(FAMILIES)), lambda number: number % 4 == 1))
def test_kept_outputs_of_every_family(number: int, tmp_path: Path) -> None:
    """Every operator of every family, each in some dtype and cut of the batch, kept in RAM, on the ssd and on the device."""
    dtype: Any = ("float32", "bfloat16")[number % 2]
    shape = Shape(dtype=dtype, accumulate=dtype, **(UNEVEN, {"batch": 2, "micro": 2})[number // 2 % 2])
    subject = Subject(list(FAMILIES.values())[number], shape)
    device, other = ("cpu", "emulated") if number % 3 else ("emulated", "cpu")
    ways: dict[str, dict[str, Any]] = {
        "RAM": dict(boundaries="cpu", device=device, kept="all"),
        "ssd": dict(boundaries="ssd", device=other, kept="all"),
        "there": dict(EMULATED, kept_there=every_operator(subject.spec)),
    }
    expected = _two_steps(subject, tmp_path / "recompute")
    for name, way in ways.items():
        assert_same(_two_steps(subject, tmp_path / name, **way), expected)


def _two_steps(subject: Subject, folder: Path, **way: Any) -> Outcome:
    with Rig(subject, folder, **{"home": "cpu", **way}) as rig:
        return rig.run(2), rig.weights()


def test_forward_multiplies_as_backward_does(tmp_path: Path) -> None:
    """Of an input whose rows are not contiguous, torch takes another product for a weight that wants no gradient."""
    mamba = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    subject = Subject(mamba, Shape(batch=2, micro=2))
    assert_same(_two_steps(subject, tmp_path / "kept", kept="all"), _two_steps(subject, tmp_path / "recompute"))


@examples(8, share_fixtures=True)
@given(data=st.data())
def test_any_places(
    data: st.DataObject, subjects: Callable[[str], Subject], plainly: Plainly, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Keeps each operator's output on the device, with the boundary, or nowhere, of a model that draws random numbers between
    its operators: there are 5,832 ways on a device, and 256 without one."""
    model, clip = data.draw(st.sampled_from([("uneven", None), ("uneven, bf16", 0.5)]))
    subject = subjects(model)
    device = data.draw(st.sampled_from(["cpu", "emulated"]))
    choices = st.sampled_from("bn" if device == "cpu" else "dbn")
    places = [[(o.index, data.draw(choices)) for o in stage.operators] for stage in subject.spec.stages]
    kept_there, kept = (tuple(tuple(o for o, place in some if place == name) for some in places) for name in "db")
    way: dict[str, Any] = {"kept": kept, "device": device, "boundaries": data.draw(st.sampled_from(["cpu", "ssd"]))}
    if device == "emulated":
        way |= {"kept_there": kept_there, "batch_on_device": data.draw(st.booleans())}
    with (
        TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder,
        Rig(subject, Path(folder), home="cpu", clip=clip, **way) as rig,
    ):
        assert_same((rig.run(STEPS), rig.weights()), plainly(model, clip))
