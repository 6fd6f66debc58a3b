"""Tests outputs kept from forward to backward: not a bit of the result changes, and what was kept is not computed again."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine import activations
from fuyou_cli.engine.attention import SDPA
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.executor import StepAbandoned
from fuyou_cli.engine.operators import InAttention, Operators, Resting, Views
from fuyou_cli.planner.boundary_layout import Kept, every_operator
from fuyou_cli.planner.schedule import plan_schedule

from .comparing import Outcome, assert_same, unequal
from .families import FAMILIES, gpt2, llama
from .late import make_late
from .rig import Rig, Shape, Subject, assert_moves_as_planned, outcome
from .test_compute_memory import LiveOutside

STEPS = 2

# Three micro-batches, the last one of a single row.
UNEVEN = {"batch": 5, "micro": 2}
WHOLE = {"batch": 2, "micro": 2}


def _outcome(subject: Subject, folder: Path, **way: Any) -> Outcome:
    return outcome(subject, folder, STEPS, **{"home": "cpu", **way})


@pytest.fixture(scope="module")
def dropping() -> Subject:
    """Makes a GPT-2 that draws random numbers between its operators, and inside its attention."""
    return Subject(gpt2(dropout=0.1), Shape(**UNEVEN))


class _Multiplied(TorchDispatchMode):
    """Counts FLOPs of the products of matrices run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.flops += 2 * args[0].numel() * args[1].shape[1]
        return func(*args, **(kwargs or {}))


def test_what_is_kept_is_not_computed_again(tmp_path: Path) -> None:
    """Counts while a step runs, beside what the schedule says."""
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=2))
    every = subject.spec.stages[1].operators
    products = tuple(operator.index for operator in every if operator.kind == "mm")
    kept: Kept = ((), products, (), products[2:4], (), ())
    counted, planned = [], []
    for way in (None, kept):
        with Rig(subject, tmp_path / str(way is None), home="cpu", kept=way) as rig:
            ids, labels = next(subject.batches(1))
            with _Multiplied() as counter:
                rig.step(ids, labels, 1, last=True)
            rig.executor.drain()
            counted.append(counter.flops)
            planned.append(sum(visit.flops for visit in plan_schedule(subject.spec, rig.plan).visits))
    spared = sum(
        operator.flops for stage, some in zip(subject.spec.stages, kept, strict=True)
        for operator in stage.operators if operator.index in some
    )  # fmt: skip
    assert len(products) == 6 and spared > 0  # the last product of a block is never computed again
    assert counted[0] - counted[1] == planned[0] - planned[1] == 2 * spared


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_backward_uses_what_was_kept(device: Any, tmp_path: Path) -> None:
    """Spoils it between forward and backward, which shows in the result."""
    subject = Subject(llama(), Shape())
    outcomes = []
    for spoil in (False, True):
        with Rig(subject, tmp_path / str(spoil), home="cpu", device=device, kept="all") as rig:
            if spoil:
                rig.executor.after_visit = lambda _, rig=rig: _spoil_first_output(rig)  # type: ignore[misc]
            outcomes.append((rig.run(1), rig.weights()))
    assert outcomes[0][0] == outcomes[1][0]
    names = unequal(outcomes[0][1], outcomes[1][1])
    assert any(name.startswith("model.layers.0.") for name in names)


def _spoil_first_output(rig: Rig) -> None:
    visit = rig.executor.visits.schedule.visits[rig.executor.visits.lookahead.cursor]
    if (visit.phase, visit.stage) == ("forward", 1):
        for operator in rig.spec.stages[1].operators:
            if operator.name == "mm mlp.up_proj":
                rig.memory.tensor(rig.executor.visits.boundaries.output(1, 0, operator.index), torch.float32).mul_(2)


def test_attention_with_dropout_is_never_kept(dropping: Subject) -> None:
    """Leaves attention out, whose random numbers would not be drawn. What comes behind it keeps its number."""
    exact = Subject(gpt2(), Shape(**UNEVEN)).spec.stages[2].operators
    random = dropping.spec.stages[2].operators
    assert [operator.name for operator in exact] == [
        "addmm attn.c_attn", "attention", "addmm attn.c_proj", "addmm mlp.c_fc",
    ]  # fmt: skip
    assert [operator.index for operator in exact] == [0, 1, 2, 3]
    assert random == (exact[0], *exact[2:])
    assert [operator.index for operator in dropping.spec.stages[2].unneeded] == [4]


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late copies"])
def test_an_output_changed_in_place_is_kept_as_it_was(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a copy still under way before its source changes; backward uses the value before the change."""
    subject = Subject(llama(), Shape())
    for layer in subject.anatomy.model.base_model.layers:
        monkeypatch.setattr(layer.mlp, "forward", _changing(layer.mlp))
    expected = _outcome(subject, tmp_path / "recompute")
    assert expected[0] != _outcome(Subject(llama(), Shape()), tmp_path / "plain")[0]
    way = make_late(monkeypatch) if late else {"device": "cpu"}
    assert_same(_outcome(subject, tmp_path / "kept", kept="all", **way), expected)


def _changing(mlp: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        gate = mlp.gate_proj(x)
        gate += 0.5
        return mlp.down_proj(torch.nn.functional.silu(gate) * mlp.up_proj(x))

    return forward


@pytest.mark.parametrize("place", ["kept", "kept_there"])
def test_a_later_change_in_place_is_an_error(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes an output in the second micro-batch only, when nothing looks at the operators any more."""
    subject, count = Subject(llama(num_hidden_layers=1), Shape()), iter(range(9))
    mlp = subject.anatomy.model.base_model.layers[0].mlp
    usual, changing = mlp.forward, _changing(mlp)
    monkeypatch.setattr(mlp, "forward", lambda x: changing(x) if next(count) == 1 else usual(x))
    way: Any = {place: {"kept": "all", "kept_there": "room"}[place], **make_late(monkeypatch)}
    with (
        Rig(subject, tmp_path, home="cpu", **way) as rig,
        pytest.raises(UsageError, match=r"the model's code changes the output of mm mlp\.gate_proj"),
    ):
        rig.run(1)
    assert {type(parameter) for parameter in mlp.parameters()} == {torch.nn.Parameter}


@pytest.mark.parametrize("place", ["kept", "kept_there", "products"])
def test_only_the_first_micro_batch_of_a_shape_is_looked_at(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts operators that a mode numbers. The last micro-batch has one row, so it is looked at too, once."""
    subject, seen = Subject(llama(num_hidden_layers=1), Shape(**UNEVEN)), list[str]()
    kind = Operators._kind
    monkeypatch.setattr(Operators, "_kind", lambda self, *call: seen.append(type(self).__name__) or kind(self, *call))
    products = tuple(tuple(o.index for o in stage.operators if o.kind == "mm") for stage in subject.spec.stages)
    way: Any = {"kept": {"kept": "all"}, "kept_there": {"kept_there": "room"}, "products": {"kept": products}}[place]
    counts = []
    with Rig(subject, tmp_path, home="cpu", device="emulated", **way) as rig:
        for number, batch in enumerate(subject.batches(2), 1):
            rig.step(*batch, number, last=number == 2)
            counts.append(len(seen))
    assert counts[0] == counts[1] > 0 and set(seen) == {"_Keeping"}


@pytest.mark.parametrize("by_name", [True, False])
def test_attention_that_calls_torchs_by_another_name_stays_in_the_mode(
    by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such calls cannot be handed over."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        function = torch.nn.functional.scaled_dot_product_attention if by_name else attend
        key, value = (one.repeat_interleave(module.num_key_value_groups, dim=1) for one in (key, value))
        return function(query, key, value, is_causal=True).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attention)
    subject = Subject(llama(), Shape())
    expected = outcome(subject, tmp_path / "recomputed", 2, home="cpu", device="emulated")
    with Rig(subject, tmp_path / "kept", home="cpu", device="emulated", kept="all") as rig:
        assert_same((rig.run(2), rig.weights()), expected)
        stages = [own for own in rig.executor.activations if isinstance(own, activations.KeptOutputs)]
        assert stages and all((known is not None) == by_name for own in stages for known in own._known.values())


def test_torchs_attention_is_put_back_when_a_model_raises() -> None:
    with pytest.raises(ZeroDivisionError), InAttention(nullcontext()):
        assert torch.nn.functional.scaled_dot_product_attention is not SDPA
        raise ZeroDivisionError
    assert torch.nn.functional.scaled_dot_product_attention is SDPA


def test_attention_that_somebody_else_put_in_torchs_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", theirs := lambda *_: torch.ones(1))
    with InAttention(nullcontext(), seen.append):
        assert torch.nn.functional.scaled_dot_product_attention(None) == 1.0
    assert torch.nn.functional.scaled_dot_product_attention is theirs and not seen


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_one_product_of_eager_attention_may_be_kept(device: Any, tmp_path: Path) -> None:
    """A plan with little room keeps the product with the values and not the scores."""
    subject = Subject(llama(), Shape(batch=4, micro=2), attention="eager")
    kept = tuple(tuple(o.index for o in stage.operators if o.kind == "bmm")[1:2] for stage in subject.spec.stages)
    assert any(kept)
    expected = outcome(subject, tmp_path / "recomputed", 2, home="cpu")
    assert_same(outcome(subject, tmp_path / "kept", 2, home="cpu", device=device, kept=kept), expected)


def _twice(mlp: Any) -> Any:
    """Uses one weight in two products."""
    return lambda x: mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.gate_proj(x + 1.0))


def _otherwise(mlp: Any) -> Any:
    """Uses a weight in a call of its own, before the product."""
    return lambda x: mlp.down_proj(x @ (mlp.gate_proj.weight * 2.0).T * mlp.up_proj(x))


@pytest.mark.parametrize("computing", [_twice, _otherwise])
def test_a_block_that_computes_otherwise_stays_in_the_mode(
    computing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(llama(num_hidden_layers=1), Shape())
    mlp = subject.anatomy.model.base_model.layers[0].mlp
    monkeypatch.setattr(mlp, "forward", computing(mlp))
    subject.spec = inspect(
        subject.anatomy, dtype="float32", micro_batch_size=subject.shape.micro, max_seq_len=subject.shape.tokens,
        head_chunk_tokens=0,
    )  # fmt: skip
    expected = _outcome(subject, tmp_path / "recompute")
    monkeypatch.setattr(activations, "_KeepingCalls", None)
    for place in ("kept", "kept_there"):
        way: Any = {place: {"kept": "all", "kept_there": "room"}[place]}
        assert_same(_outcome(subject, tmp_path / place, device="emulated", **way), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_memory_of_a_step_does_not_rise(family: str, tmp_path: Path) -> None:
    """Uses what was kept where it rests, so backward allocates less."""
    subject = Subject(FAMILIES[family], Shape(batch=4, micro=4, tokens=64))
    peaks = []
    for kept in (None, "all"):
        with Rig(subject, tmp_path / str(kept), home="cpu", kept=kept) as rig:  # type: ignore[arg-type]
            live = LiveOutside(rig.memory.arena)
            ids, labels = next(subject.batches(1))
            with live:
                rig.step(ids, labels, 1, last=True)
            rig.executor.drain()
            peaks.append(live.peak)
    assert peaks[1] <= peaks[0]


def test_remembered_views_hold_no_memory_until_the_collector_runs() -> None:
    """A device's memory is free for the next run as soon as this one lets go of it."""
    memory = torch.arange(16, dtype=torch.float32).view(torch.uint8)
    held, views = weakref.ref(memory), Views(memory.view)
    assert views.at(16, Resting(4, torch.float32, torch.Size([2]), (1,))).tolist() == [5.0, 6.0]
    gc.disable()
    try:
        del views, memory
        assert held() is None
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Subject, Outcome]:
    subject = Subject(llama(), Shape())
    return subject, _outcome(subject, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("place", ["cpu", "ssd", "outputs there", "boundaries there"])
def test_a_step_given_up_leaves_nothing_behind(place: Any, two_steps: tuple[Subject, Outcome], tmp_path: Path) -> None:
    subject, expected = two_steps
    way: dict[str, Any] = {
        "outputs there": {"kept_there": every_operator(subject.spec)}, "boundaries there": {"boundaries": "gpu"},
    }.get(place, {"boundaries": place, "kept": "all"})  # fmt: skip
    with Rig(subject, tmp_path, home="cpu", device="emulated", **way) as rig:
        _two_steps_one_given_up(rig, subject)
        assert_same((rig.losses, rig.weights()), expected)
        assert len(rig.executor.visits.boundaries.ledger.free) == len(rig.plan.boundary_slots)


def _two_steps_one_given_up(rig: Rig, subject: Subject) -> None:
    """Runs two steps. The second is given up in its forward, then in its backward, then done."""
    batches = list(subject.batches(2))
    rig.step(*batches[0], 1)
    for phase in ("forward", "backward"):
        rig.executor.between_micro_batches = lambda phase=phase: _give_up(rig, phase)  # type: ignore[misc]
        with pytest.raises(StepAbandoned):
            rig.executor.step(*batches[1], step=2, lr=rig.optimizer.lr)
        rig.executor.abandon()
    rig.executor.between_micro_batches = lambda: None
    rig.step(*batches[1], 2, last=True)
    rig.executor.drain()


def _give_up(rig: Rig, phase: str) -> None:
    visit = rig.executor.visits.schedule.visits[rig.executor.visits.lookahead.cursor]
    if (visit.phase, visit.stage) == (phase, 1):
        raise StepAbandoned


def test_one_more_step_moves_exactly_what_was_predicted(tmp_path: Path) -> None:
    subject = Subject(llama(num_hidden_layers=3), Shape(dtype="bfloat16", accumulate="bfloat16", **UNEVEN))
    way = dict(home="cpu", boundaries="ssd", kept="all")
    predicted = assert_moves_as_planned(subject, tmp_path, after=2, **way)[0].predicted
    outputs = sum(operator.bytes for stage in subject.spec.stages for operator in stage.operators)
    assert predicted.read_by["boundaries"] == predicted.read_per_step > 3 * outputs  # three micro-batches


def test_another_sequence_of_operators_than_planned_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplies otherwise, as a device's library may."""
    subject = Subject(llama(), Shape())
    with Rig(subject, tmp_path, home="cpu", kept="all") as rig:
        mlp = subject.anatomy.model.base_model.layers[0].mlp
        monkeypatch.setattr(mlp, "forward", lambda x: torch.bmm(x, x.transpose(1, 2)) @ x)
        with pytest.raises(UsageError, match=r"operator 5 of a stage is bmm, but the plan was made for mm mlp\.gate_proj"):
            rig.run(1)
        monkeypatch.undo()
        rig.executor.abandon()


@pytest.mark.parametrize("family", every(2, ["llama", "gpt2", "gemma2", "gpt_neo", "falcon"]))
def test_flops_of_a_dense_block(family: str) -> None:
    """Counts twice its matrices per token, and half of attention's scores and of their product with the values."""
    subject = Subject(FAMILIES[family], Shape(micro=2, tokens=16))
    text = subject.config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for stage in subject.spec.stages:
        if stage.kind == "block":
            matrices = sum(tensor.numel for tensor in stage.tensors if len(tensor.shape) == 2)
            attention = 2 * 2 * 16 * 16 * text.num_attention_heads * size
            assert stage.forward_flops == 2 * matrices * 2 * 16 + attention
            every = (*stage.operators, *stage.unneeded)
            assert 0.9 * stage.forward_flops <= sum(operator.flops for operator in every) <= stage.forward_flops
            assert len({operator.index for operator in every}) == len(every) >= 4
