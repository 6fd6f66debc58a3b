"""Blocks whose experts are stages of their own: beside a block as one stage, at any size of a range, in several placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed, every

from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.cutting import cut_experts, obstacles
from fuyou_cli.engine.forward_only import Visited, WeightStream, passing
from fuyou_cli.engine.skeleton import build
from fuyou_cli.planner.memory import compute_memory
from fuyou_cli.recipe.schema import AdapterSection

from .comparing import Outcome, assert_near, assert_same, relative
from .late import late
from .measuring import peak_of_a_step, without_holes
from .rig import OPTIMIZER, Rectangle, Rig, Shape, Subject, assert_moves_as_planned, outcome
from .test_expert_lora import Adapted
from .test_forward_only import Counted, assert_as_in_memory
from .test_forward_only import opened as streamed
from .test_forward_only import plain as plain_losses
from .test_mixtures import EXPERTS, GATED, Decided, _config, _one_for_all, _with_routers
from .test_mixtures import FAMILIES as MIXTURES
from .test_unlike_rows import SHAPE as UNLIKE_ROWS
from .test_unlike_rows import numerics_of as unlike_numerics
from .test_unlike_rows import run as run_unlike

MANY = "qwen3_moe, many"  # outputs of a token, whose sum depends on their order
FAMILIES = MIXTURES | {MANY: _config("Qwen3MoeConfig", GATED, EXPERTS, head_dim=8, num_experts=8, num_experts_per_tok=4)}
OF_EACH = [name for name in (MANY, *MIXTURES) if "granitemoe" not in name and name != "nemotron_h, every kind"]
SMOOTH = replace(OPTIMIZER, lr=1e-3, epsilon=1e-4)  # else the last bits of gradients near zero decide where a bias goes
LORA = AdapterSection(r=4, lora_alpha=8, target_modules=["q_a_proj", "q_b_proj", "o_proj"])


def _outcome(family: str, folder: Path, size: int, *, kind: type[Subject] = Decided, **more: Any) -> Outcome:
    subject = kind(FAMILIES[family], Shape(experts=size, batch=6), **more)
    return outcome(subject, folder / str(size), 2, clip=0.5, optimizer=SMOOTH)  # the second with states and both extents


def _assert_as_whole(whole: Outcome, cut: Sequence[Outcome]) -> None:
    """The same bits wherever a block is cut."""
    for one in cut[1:]:
        assert_same(one, cut[0])
    assert_near(cut[0], whole)


@pytest.mark.parametrize("family", every(12, OF_EACH))
def test_beside_one_stage(family: str, tmp_path: Path) -> None:
    """Losses and weights are those of whole blocks, and the same bits wherever a block is cut."""
    whole = _outcome(family, tmp_path, 0)
    cut = [_outcome(family, tmp_path, size) for size in (8, 1)]
    _assert_as_whole(whole, cut)


@pytest.mark.parametrize("family", every(2, [MANY, "gpt_oss"]))
def test_the_same_bits_in_bfloat16(family: str, tmp_path: Path) -> None:
    """Also where many rows go to an expert, which are multiplied in pieces."""
    shape = Shape(dtype="bfloat16", batch=8, micro=4, tokens=64)
    subjects = [Subject(FAMILIES[family], replace(shape, experts=size)) for size in (4, 3, 1)]
    first, *others = [outcome(one, tmp_path / str(n), 2, clip=0.5) for n, one in enumerate(subjects)]
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("dtype", every(2, ["float32", "bfloat16"]))
def test_adapters_on_attention_beside_frozen_experts(dtype: Any, tmp_path: Path) -> None:
    def run(size: int) -> Outcome:
        subject = Decided(FAMILIES["deepseek_v3, groups"], Shape(dtype=dtype, experts=size), adapter=LORA)
        assert not any(stage.trained for stage in subject.spec.stages if stage.expert_range is not None)
        return outcome(subject, tmp_path / str(size), 2, clip=0.5, optimizer=SMOOTH)

    whole, *cut = [run(size) for size in (0, 4, 1)]
    _assert_as_whole(whole if dtype == "float32" else cut[0], cut)


def test_adapters_of_experts(tmp_path: Path) -> None:
    subjects = [Adapted("qwen3_moe", Shape(experts=size)) for size in (0, 4, 1)]
    whole, *cut = [outcome(one, tmp_path / str(n), 2, clip=0.5, optimizer=SMOOTH) for n, one in enumerate(subjects)]
    _assert_as_whole(whole, cut)


@pytest.mark.parametrize(
    "freeze", [["layers.0.*", "embed_tokens"], ["embed_tokens", "layers.*.self_attn", "layers.0.mlp.experts.[0-1]"]]
)
def test_frozen_below(freeze: list[str], tmp_path: Path) -> None:
    """Backward ends at a range of experts, or at a block whose ranges below are frozen."""
    freeze = [f"model.{one}" for one in freeze]
    whole, *cut = [_outcome("qwen3_moe", tmp_path, size, freeze=freeze) for size in (0, 4, 1)]
    _assert_as_whole(whole, cut)


# ---- placements ----------------------------------------------------------------------------------------------------------


def test_moves_as_planned(tmp_path: Path) -> None:
    """A step reads the weights of each range once in each pass, and what the block sent to its experts once."""
    subject = Subject(FAMILIES["deepseek_v3, groups"], Shape(experts=2))
    plan, _ = assert_moves_as_planned(subject, tmp_path, home="ssd", lookahead=0)
    weights = sum(stage.weight_bytes for stage in subject.spec.stages if stage.expert_range is not None)
    assert plan.predicted.read_per_step > 2 * weights


def test_balanced(tmp_path: Path) -> None:
    """The auxiliary loss counts the choices of all layers, wherever their experts are computed."""
    found, sent = [], []
    for size in (0, 2):
        subject = Decided(FAMILIES["qwen3_moe"], Shape(router_aux_loss=0.05, experts=size))
        with Rig(subject, tmp_path / str(size), clip=0.5, optimizer=SMOOTH) as rig:
            rig.run(2)
            found.append(([one.aux_loss for one in rig.outcomes], rig.weights()))
            sent.append([one.sent for one in rig.outcomes])
    assert sent[0] == sent[1]
    assert_near(*found)  # type: ignore[arg-type]


@crossed(2, way=[{}, dict(device="emulated"), dict(device="emulated", batch_on_device=False)], apart=[False, True])
def test_rows_of_unlike_length(apart: bool, way: dict[str, Any], tmp_path: Path) -> None:
    """Micro-batches of unlike width: padded, or end to end. Padding adds nothing to the sums of other rows."""
    found = []
    for size in (0, 2):
        subject = Decided(FAMILIES["qwen3_moe"], replace(UNLIKE_ROWS, experts=size), apart=apart)
        subject.numerics = unlike_numerics(subject)
        with Rig(subject, tmp_path / str(size), clip=0.5, optimizer=SMOOTH, **way) as rig:
            found.append((run_unlike(rig), rig.weights()))
    assert_near(*found)


def test_evaluated_as_transformers_in_memory(tmp_path: Path) -> None:
    assert_as_in_memory(Decided(FAMILIES["deepseek_v3, groups"], Shape(experts=2)), tmp_path)


@pytest.mark.parametrize("family", every(2, ["deepseek_v3, groups", "gpt_oss"]))
@torch.no_grad()
def test_weights_that_pass_through_memory_do_so_range_by_range(family: str) -> None:
    """Losses and generated tokens are those in memory, the same bits wherever a block is cut. Slots hold no whole block."""
    found, slots, tokens = [], [], []
    for size in (0, 1, 2):
        subject = Decided(FAMILIES[family], Shape(experts=size))
        ids, labels = next(subject.batches(1))
        with streamed(subject, 1 << 40) as (losses, _, _):
            found.append(losses.losses(Rectangle(ids, labels), last=True).sum(-1).tolist())
        slots.append(Visited.of(subject.anatomy, torch.float32).least)
        with (
            WeightStream(subject.anatomy, Counted(subject), dtype=torch.float32, memory=slots[-1]) as weights,
            passing(weights) as model,
        ):
            tokens.append(model.generate(input_ids=ids[:, :6], max_new_tokens=5, do_sample=False, pad_token_id=0).tolist())
    assert relative(found[1], plain_losses(subject, ids, labels)) <= 1e-6
    assert relative(found[1], found[0]) <= 1e-6 and found[1] == found[2]
    assert tokens[0] == tokens[1] == tokens[2]
    assert slots[1] <= slots[2] < slots[0]


# ---- what is cut -----------------------------------------------------------------------------------------------------------


def test_stages_hold_every_matrix_once() -> None:
    whole = dissect(build(FAMILIES["gpt_oss"], dtype="float32", attention="sdpa"))
    cut = cut_experts(whole, 3)
    assert [stage.name for stage in cut.stages][1:4] == ["layers.0", "layers.0.mlp.experts[0:3]", "layers.0.mlp.experts[3:4]"]
    elements: dict[str, int] = {}
    for tensor in (tensor for stage in cut.stages for tensor in stage.tensors):
        assert tensor.first == elements.get(tensor.name, 0)
        elements[tensor.name] = tensor.first + tensor.numel
    assert elements == {tensor.name: tensor.numel for stage in whole.stages for tensor in stage.tensors}


@pytest.mark.parametrize(
    ("family", "told"),
    [("granitemoe, top 1", "does more with what its experts return"), ("nemotron_h, every kind", "own width")],
)
def test_blocks_that_do_more_are_left_whole(family: str, told: str) -> None:
    anatomy = dissect(build(FAMILIES[family], dtype="float32", attention="sdpa"))
    reasons = obstacles(anatomy)
    assert reasons and all(told in reason or "does more" in reason for reason in reasons.values())
    assert [stage.name for stage in cut_experts(anatomy, 2).stages] == [stage.name for stage in anatomy.stages]


def test_all_tokens_to_one_expert(tmp_path: Path) -> None:
    """Equal logits send every token to the first experts; the last range has nothing to compute, and decays."""

    class Tied(Subject):
        def fresh(self) -> Any:
            model = super().fresh()
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    torch.nn.init.zeros_(parameter)
            return model

    whole, *cut = [_outcome("qwen3_moe", tmp_path, size, kind=Tied) for size in (0, 2, 1)]
    _assert_as_whole(whole, cut)


@pytest.mark.parametrize("micro", [1, 8])
def test_memory_does_not_depend_on_where_tokens_go(micro: int, tmp_path: Path) -> None:
    peaks = []
    for change in (_one_for_all, lambda router: None):
        shape = Shape(batch=8, micro=micro, tokens=64, experts=2)
        subject = _with_routers(Subject(FAMILIES["qwen3_moe"], shape), change)
        with Rig(subject, tmp_path / str(len(peaks)), home="cpu") as rig:
            charged = compute_memory(subject.spec, rig.request)
            peaks.append(peak_of_a_step(rig))
        assert peaks[-1] <= charged.whole_batch + charged.stage
    assert max(peaks) <= 1.1 * min(peaks)


@crossed(2, stays=[True, False], batch=[8, 2])
def test_a_step_stays_within_what_a_device_is_charged(
    stays: bool, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `test_crossings` has it of dense models: storage by storage, with copies as late as they may be."""
    without_holes(monkeypatch)
    subject = Subject(FAMILIES["deepseek_v3, groups"], Shape(batch=batch, micro=2, tokens=64, experts=2, dtype="bfloat16"))
    with Rig(subject, tmp_path, home="cpu", batch_on_device=stays, **late()) as rig:
        fixed = rig.device.peak_memory()
        on_device = rig.plan.predicted.gpu_peak - fixed
        charged = compute_memory(subject.spec, rig.request).whole_batch + on_device
        peak = peak_of_a_step(rig)
        assert rig.device.peak_memory() <= rig.plan.predicted.gpu_peak
    assert peak <= charged
