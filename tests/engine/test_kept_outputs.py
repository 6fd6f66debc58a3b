"""Tests outputs kept from forward to backward: not a bit of the result changes, and what was kept is not computed again."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine import activations
from fuyou_cli.engine.attention import SDPA
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.operators import InAttention, Operators, Resting, Views
from fuyou_cli.planner.boundary_layout import Kept, every_operator
from fuyou_cli.planner.memory import device_memory
from fuyou_cli.planner.schedule import plan_schedule
from tests.emulated import EmulatedDevice

from .comparing import Outcome, assert_same, unequal
from .families import FAMILIES, gpt2, llama
from .late import late
from .measuring import Seen, copied_in_a_step, peak_of_a_step
from .rig import Rig, Shape, Subject, outcome

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


def work_of_a_step(rig: Rig) -> tuple[float, float]:
    """Returns FLOPs of the products of matrices that a step runs, and those of all that is planned."""
    multiplied = Seen(lambda func, args: 2 * args[0].numel() * args[1].shape[1] if func is torch.ops.aten.mm.default else None)
    with multiplied:
        rig.run(1)
    return sum(multiplied.found), sum(visit.flops for visit in plan_schedule(rig.spec, rig.plan).visits)


def test_what_is_kept_is_not_computed_again(tmp_path: Path) -> None:
    """Counts while a step runs, beside what the schedule says."""
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=2))
    every = subject.spec.stages[1].operators
    products = tuple(operator.index for operator in every if operator.kind == "mm")
    kept: Kept = ((), products, (), products[2:4], (), ())
    found = []
    for way in (None, kept):
        with Rig(subject, tmp_path / str(way is None), home="cpu", kept=way) as rig:
            found.append(work_of_a_step(rig))
    spared = sum(
        operator.flops for stage, some in zip(subject.spec.stages, kept, strict=True)
        for operator in stage.operators if operator.index in some
    )  # fmt: skip
    assert len(products) == 6 and spared > 0  # the last product of a block is never computed again
    assert [whole - less for whole, less in zip(*found, strict=True)] == [2 * spared] * 2


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
    visit = rig.visit
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


@pytest.mark.parametrize("is_late", [False, True], ids=["cpu", "late copies"])
def test_an_output_changed_in_place_is_kept_as_it_was(is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a copy still under way before its source changes; backward uses the value before the change."""
    subject = Subject(llama(), Shape())
    plain = _outcome(subject, tmp_path / "plain")
    for layer in subject.anatomy.model.base_model.layers:
        monkeypatch.setattr(layer.mlp, "forward", _changing(layer.mlp))
    expected = _outcome(subject, tmp_path / "recompute")
    assert expected[0] != plain[0]
    way = late() if is_late else {"device": "cpu"}
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
    way: Any = {place: {"kept": "all", "kept_there": "room"}[place], **late()}
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
        assert stages and all((calls is not None) == by_name for own in stages for calls in own._calls_by_shape.values())


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
            peaks.append(peak_of_a_step(rig))
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


# ---- on the device -------------------------------------------------------------------------------------------------


THERE: dict[str, Any] = {"home": "cpu", "device": "emulated", "boundaries": "gpu"}


def test_an_output_changed_in_place_is_found_by_inspection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds it when the model is inspected: it is copied, where others are computed in their places."""
    subject = Subject(llama(), Shape())
    assert not any(operator.overwritten for operator in subject.spec.stages[1].operators)
    for layer in subject.anatomy.model.base_model.layers:
        monkeypatch.setattr(layer.mlp, "forward", _changing(layer.mlp))
    expected = _outcome(subject, tmp_path / "recompute")
    way = late()
    with (
        pytest.raises(UsageError, match=r"add_ changes the output of mm"),
        Rig(subject, tmp_path / "unexpected", home="cpu", kept_there="room", **way) as rig,
    ):
        rig.run(1)
    subject.spec = inspect(
        subject.anatomy, dtype="float32", micro_batch_size=subject.shape.micro, max_seq_len=subject.shape.tokens,
        head_chunk_tokens=0,
    )  # fmt: skip
    changed = [operator.name for operator in subject.spec.stages[1].operators if operator.overwritten]
    assert changed == ["mm mlp.gate_proj"]
    assert_same(_outcome(subject, tmp_path / "kept", kept_there="room", **way), expected)


def test_products_are_computed_where_they_are_kept(tmp_path: Path) -> None:
    """Computes them without a copy, in the device as well."""
    subject = Subject(llama(num_hidden_layers=2), Shape(batch=4, micro=2))
    products = [o for stage in subject.spec.stages for o in stage.operators if o.kind == "mm"]
    counts = []
    for kept_there in (None, "room"):
        with Rig(subject, tmp_path / str(kept_there), home="cpu", device="emulated", kept_there=kept_there) as rig:  # type: ignore[arg-type]
            with Seen(lambda func, args: str(func)) as made:
                rig.run(1)
            counts.append(Counter(made.found))
    assert counts[1]["aten.mm.out"] == 2 * len(products) and counts[0]["aten.mm.out"] == 0
    assert counts[0]["aten.mm.default"] - counts[1]["aten.mm.default"] == 2 * 2 * len(products)  # recomputed, and in forward


def test_no_output_crosses(tmp_path: Path) -> None:
    """Bytes each way are those of recompute; where outputs rest with the boundary they are those and every output, once: no
    parameter that backward looks at is among them."""
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=2, tokens=32))  # no kernel pads
    outputs = sum(operator.bytes for stage in subject.spec.stages for operator in stage.operators)
    ways: dict[str, dict[str, Any]] = {
        "recompute": {}, "device": {"kept_there": every_operator(subject.spec)}, "boundary": {"kept": "all"},
    }  # fmt: skip
    moved = {}
    for name, way in ways.items():
        with Rig(subject, tmp_path / name, home="cpu", device="emulated", **way) as rig:
            moved[name] = copied_in_a_step(rig)
    assert moved["device"] == moved["recompute"]
    assert moved["boundary"] == [before + 2 * outputs for before in moved["recompute"]]


@pytest.mark.parametrize("shape", [Shape(**UNEVEN), Shape(batch=2, micro=2, dtype="bfloat16")], ids=["uneven", "one"])
def test_memory_of_outputs_is_what_the_plan_charges(shape: Shape, tmp_path: Path) -> None:
    """Takes to the byte more than without, and never more than the plan."""
    subject = Subject(llama(), shape)
    every, way = every_operator(subject.spec), {"home": "cpu", "device": "emulated"}
    peaks, charged, limit = [], [], 0
    for number, kept_there in enumerate((None, every)):
        with Rig(subject, tmp_path / str(number), kept_there=kept_there, **way) as rig:  # type: ignore[arg-type]
            rig.run(2)
            peaks.append(rig.device.peak_memory())
            charged.append(device_memory(subject.spec, rig.request, rig.plan.stages).outputs)
            limit = rig.plan.predicted.gpu_peak
    assert peaks[1] - peaks[0] == charged[1] > charged[0] == 0
    with Rig(subject, tmp_path / "limit", kept_there=every, opened=EmulatedDevice(limit), **way) as rig:  # type: ignore[arg-type]
        rig.run(2)
    with pytest.raises(torch.OutOfMemoryError):
        Rig(subject, tmp_path / "less", kept_there=every, opened=EmulatedDevice(charged[1] - 1), **way)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_as_many_as_there_is_room_for(share: float, tmp_path: Path) -> None:
    """Keeps what fits a device that has no more than its limit."""
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=2))
    every, way = every_operator(subject.spec), {"home": "cpu", "device": "emulated"}
    with Rig(subject, tmp_path / "every", kept_there=every, **way) as rig:  # type: ignore[arg-type]
        charged = device_memory(subject.spec, rig.request, rig.plan.stages)
    operators = sum(map(len, every))
    rounding = 2 * 4096 * operators  # of each output of each micro-batch, where they are chosen
    limit = charged.total - charged.outputs + int(share * (charged.outputs + rounding))
    opened = EmulatedDevice(limit)
    with Rig(subject, tmp_path / "room", kept_there="room", gpu_budget=limit, opened=opened, **way) as rig:  # type: ignore[arg-type]
        rig.run(1)
        found = sum(len(stage.kept_there) for stage in rig.plan.stages)
        assert rig.plan.predicted.gpu_peak <= limit
    assert found == operators if share == 1 else found < operators
    assert bool(found) == bool(share)


def test_no_boundary_crosses(tmp_path: Path) -> None:
    """Counts what crosses: less by every boundary, once each way."""
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=2, tokens=32))
    moved = []
    for boundaries in ("cpu", "gpu"):
        with Rig(subject, tmp_path / boundaries, **{**THERE, "boundaries": boundaries}) as rig:
            moved.append(copied_in_a_step(rig))
    one = subject.spec.boundary_bytes_per_token * subject.numerics.tokens
    every = one * sum(stage.keeps_input for stage in subject.spec.stages)
    stashed = one * sum(visit.stash for visit in rig.executor.visits.schedule.visits)
    assert moved[0] == [moved[1][0] + every, moved[1][1] + stashed] and stashed


@pytest.mark.parametrize("kept_there", [False, True])
def test_memory_of_boundaries_is_what_the_plan_charges(kept_there: bool, tmp_path: Path) -> None:
    """Takes to the byte more than without, and never more than the plan; nothing in RAM."""
    subject = Subject(llama(), Shape(**UNEVEN))
    there = every_operator(subject.spec) if kept_there else None
    peaks, charged, limit = [], [], 0
    for boundaries in ("cpu", "gpu"):
        with Rig(subject, tmp_path / boundaries, kept_there=there, **{**THERE, "boundaries": boundaries}) as rig:
            rig.run(1)
            peaks.append(rig.device.peak_memory())
            charged.append(device_memory(subject.spec, rig.request, rig.plan.stages).boundaries)
            limit = rig.plan.predicted.gpu_peak
            in_ram = sum(line.size for line in rig.plan.memory if (line.what, line.tier) == ("boundaries", "cpu"))
            assert bool(in_ram) == (boundaries == "cpu")
    assert peaks[1] - peaks[0] == charged[1] > charged[0] == 0
    with Rig(subject, tmp_path / "limit", kept_there=there, opened=EmulatedDevice(limit), **THERE) as rig:
        rig.run(1)
