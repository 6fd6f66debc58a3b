"""Where tokens are sent: kept from forward to backward and compared, counted, and balanced by the auxiliary loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fuyou_cli.core.errors import RecomputeError
from fuyou_cli.engine.experts import is_experts
from fuyou_cli.engine.routing import routers, without_aux_loss
from fuyou_cli.planner.memory import routing_bytes
from fuyou_cli.planner.place import sweep_counts
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.recipe.schema import AdapterSection

from .comparing import assert_same, distance
from .families import _GATED as GATED
from .families import llama
from .rig import Rig, Shape, Subject, add_named, outcome
from .test_mixtures import EXPERTS, FAMILIES, _config
from .test_mixtures_placed import WAYS

MIXED = "qwen3_moe, dense and sparse"  # 4 blocks, the second dense; top 1 of 4

# ---- kept and compared ---------------------------------------------------------------------------------------------------


class Elsewhere:
    """Sends the first token of a stage's micro-batch elsewhere, from its second forward on."""

    def __init__(self, rig: Rig, *, stage: int, micro_batch: int) -> None:
        self._rig, self._forwards = rig, 0
        self._stage, self._wanted = stage, micro_batch
        module = rig.anatomy.stages[stage].module
        assert module is not None
        (experts,) = (part for part in module.modules() if is_experts(part))
        self.hook = experts.register_forward_pre_hook(self._change)

    def _change(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, chosen, weights = args
        self._forwards += 1
        count = self._rig.plan.numerics.micro_batches
        if self._forwards == count + 1 + self._wanted:  # the recompute of the wanted micro-batch
            chosen = chosen.clone()
            chosen[0] = (chosen[0] + 1) % module.num_experts
        return hidden, chosen, weights


@pytest.mark.parametrize("way", [{}, dict(device="emulated"), dict(norm_first=True), dict(clip=None), dict(kept="all")])
def test_a_recompute_that_chooses_otherwise_ends_the_step(way: dict[str, Any], tmp_path: Path) -> None:
    subject = Subject(FAMILIES[MIXED], Shape(batch=6, micro=2))
    with Rig(subject, tmp_path, **way) as rig:
        elsewhere = Elsewhere(rig, stage=3, micro_batch=1)
        ids, labels = next(subject.batches(1))
        told = r"step 1: layers\.2 sends 1 tokens of micro-batch 2 to other experts in backward than in forward"
        with pytest.raises(RecomputeError, match=told) as raised:
            rig.step(ids, labels, 1)
        elsewhere.hook.remove()
        assert raised.value.changed == ("clip" in way)
        rig.executor.abandon()
        if "clip" not in way:
            assert rig.generations == {0}


def test_kept_choices_are_planned(tmp_path: Path) -> None:
    """Two bytes for each choice of each token of a sweep, where they lie."""
    subject = Subject(FAMILIES[MIXED], Shape(batch=4, micro=2, tokens=16))
    assert [stage.choices for stage in subject.spec.stages] == [0, 1, 0, 1, 1, 0, 0]
    assert {stage.experts for stage in subject.spec.stages if stage.choices} == {4}
    for device in ("cpu", "emulated"):
        with Rig(subject, tmp_path / device, device=device, sweeps=2) as rig:  # type: ignore[arg-type]
            size = 3 * 2 * 2 * 16
            lines = [(line.tier, line.size) for line in rig.plan.memory if line.what == "chosen experts"]
            assert routing_bytes(rig.spec, rig.request) == size
            assert lines == [("cpu" if rig.device.name == "cpu" else "gpu", size)]
            chosen = rig.executor.routing._chosen
            assert chosen is not None and chosen.nbytes == size
            rig.run(2)


def test_a_dense_model_keeps_and_tells_nothing(tmp_path: Path) -> None:
    subject = Subject(llama(), Shape())
    with Rig(subject, tmp_path) as rig:
        rig.run(1)
        assert rig.outcomes[0].sent is None and rig.outcomes[0].aux_loss is None
        assert not any(line.what == "chosen experts" for line in rig.plan.memory)


# ---- counted -------------------------------------------------------------------------------------------------------------


def chosen_by(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, list[int]]:
    """Returns how many real tokens of a batch each expert of a model in memory gets, by block."""
    found: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if is_experts(module):

            def look(module: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                real = (ids != 0).reshape(-1)
                found[name.removeprefix("model.").removesuffix(".mlp.experts")] = torch.bincount(
                    args[1][real].reshape(-1), minlength=4
                ).tolist()

            module.register_forward_pre_hook(look)
    with torch.no_grad():
        model(input_ids=ids)
    return found


@pytest.mark.parametrize("way", [{}, dict(sweeps=3), dict(device="emulated", norm_first=True)])
def test_tokens_of_each_expert_without_padding(way: dict[str, Any], tmp_path: Path) -> None:
    subject = Subject(FAMILIES["qwen3_moe, dense and sparse"], Shape(batch=6, micro=2))
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    ids, _ = next(subject.batches(1))
    with Rig(subject, tmp_path, **way) as rig:
        rig.run(2)
        sent = rig.outcomes[0].sent
    assert sent is not None
    assert {name: list(counts) for name, counts in sent.items()} == chosen_by(model, ids)
    assert {sum(counts) for counts in sent.values()} == {6 * 16 - 3}


# ---- balanced ------------------------------------------------------------------------------------------------------------

_BALANCED: dict[str, PreTrainedConfig] = {
    **{name: FAMILIES[name] for name in ("qwen3_moe", "mixtral", "olmoe", "granitemoe")},
    "gpt_oss": _config(
        "GptOssConfig", GATED, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8,
    ),
    "qwen2_moe": _config("Qwen2MoeConfig", GATED, EXPERTS, shared_expert_intermediate_size=32),
    "ernie4_5_moe": _config(
        "Ernie4_5_MoeConfig", GATED, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1,
        moe_layer_start_index=0, moe_layer_interval=1,
    ),
    "jamba": _config(
        "JambaConfig", GATED, num_experts=4, num_experts_per_tok=2, expert_layer_offset=0, expert_layer_period=1,
        attn_layer_offset=0, attn_layer_period=1, use_mamba_kernels=False,
    ),
    "minimax": _config("MiniMaxConfig", GATED, num_local_experts=4, head_dim=8, layer_types=["full_attention"] * 2),
}  # fmt: skip
COEFFICIENT = 0.5


def gradients_of(rig: Rig) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for stage in rig.owning_stages():
        add_named(found, stage, rig.resting_gradients(stage))
    return found


def plain(subject: Subject, parts: int) -> tuple[dict[str, torch.Tensor], float]:
    """Returns the gradients of the cross entropy and the auxiliary loss in memory, and that loss. parts: micro-batches, whose
    auxiliary losses are weighted by their tokens; 1 is the whole batch at once."""
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    model.router_aux_loss_coef = 0.0
    ids, labels = next(subject.batches(1))
    real = (ids != 0).long()
    tokens, aux = int((labels[:, 1:] != -100).sum()), 0.0
    for part in range(parts):
        rows = slice(part * len(ids) // parts, (part + 1) * len(ids) // parts)
        out = model(input_ids=ids[rows], attention_mask=real[rows], labels=labels[rows], output_router_logits=True)
        share = float(real[rows].sum() / real.sum())
        loss = out.loss * (int((labels[rows, 1:] != -100).sum()) / tokens) + COEFFICIENT * share * out.aux_loss
        loss.backward()
        aux += share * float(out.aux_loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, aux


@pytest.mark.parametrize("family", every(2, _BALANCED))
def test_the_auxiliary_loss_is_of_the_whole_batch(family: str, tmp_path: Path) -> None:
    subject = Subject(_BALANCED[family], Shape(batch=6, micro=2, router_aux_loss=COEFFICIENT))
    assert without_aux_loss(subject.anatomy) == ""
    with Rig(subject, tmp_path, home="cpu", clip=None, defer=True) as rig:
        ids, labels = next(subject.batches(1))
        step = rig.step(ids, labels, 1)
        gradients = gradients_of(rig)
        rig.executor.drain()
    (whole, loss), (mean, _) = plain(subject, 1), plain(subject, 3)
    routed = {f"{name}.weight" for name in routers(subject.fresh()).values()}
    assert len(routed) == 2 and step.aux_loss is not None
    assert step.aux_loss == pytest.approx(loss, rel=1e-6)
    ours, theirs, weighted = ({name: found[name] for name in routed} for found in (gradients, whole, mean))
    assert distance(ours, theirs) <= 1e-6
    assert distance(ours, weighted) > 1e-2  # a mean over micro-batches is another loss
    others = {name: value for name, value in subject.stored(whole).items() if name not in routed}
    assert distance({name: gradients[name] for name in others}, others) <= 1e-6


@pytest.mark.parametrize("dtype", every(2, ["bfloat16", "float32"]))
def test_the_same_bits_with_the_auxiliary_loss(dtype: Any, tmp_path: Path) -> None:
    subject = Subject(FAMILIES[MIXED], Shape(dtype=dtype, router_aux_loss=COEFFICIENT))
    usual = outcome(subject, tmp_path / "usual", 2)
    without = outcome(Subject(FAMILIES[MIXED], Shape(dtype=dtype)), tmp_path / "without", 2)
    assert usual[0][0] == without[0][0] and usual[0][1:] != without[0][1:]  # the loss is the cross entropy alone
    ways = [way for name, way in WAYS.items() if name != "two sweeps"]
    for number, way in enumerate(ways[:: 3 if dtype == "bfloat16" else 1]):  # all of them in float32, which is slow
        assert_same(outcome(subject, tmp_path / str(number), 2, **way), usual)


def test_an_auxiliary_loss_takes_one_sweep() -> None:
    request = PlanRequest(
        numerics=Subject(FAMILIES[MIXED], Shape(batch=8, micro=2)).numerics, model_name="tiny", device="cpu",
        clip_grad_norm=None, cpu_budget=1 << 33,
    )  # fmt: skip
    spec = Subject(FAMILIES[MIXED], Shape()).spec
    assert sweep_counts(spec, request) == (1, 2, 4)
    with_loss = replace(request.numerics, router_aux_loss=COEFFICIENT)
    assert sweep_counts(spec, replace(request, numerics=with_loss)) == (1,)


def test_models_without_an_auxiliary_loss_are_told() -> None:
    assert without_aux_loss(Subject(llama(), Shape()).anatomy) == "LlamaForCausalLM has no routed experts"
    none = without_aux_loss(Subject(FAMILIES["deepseek_v3"], Shape()).anatomy)
    assert none == "transformers has no auxiliary loss for DeepseekV3ForCausalLM"
    frozen = Subject(FAMILIES["qwen3_moe"], Shape(), freeze=["model.layers.1.mlp.gate"])
    assert without_aux_loss(frozen.anatomy) == "model.layers.1.mlp.gate is a router that does not learn"
    adapter = AdapterSection.model_validate({"type": "lora", "r": 4, "target_modules": ["q_proj"]})
    lora = Subject(FAMILIES["qwen3_moe"], Shape(), adapter=adapter)
    assert without_aux_loss(lora.anatomy).endswith("layers.0.mlp.gate is a router that does not learn")
