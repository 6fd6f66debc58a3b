"""Mixtures of experts: the engine beside plain PyTorch with transformers' own loop over experts, and in several placements.

Routers start with large weights, so that no token's choice hangs on the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
import transformers
from drawn import every
from torch._dynamo.eval_frame import set_eval_frame
from transformers import PreTrainedConfig

from fuyou_cli.engine.experts import MOST_ROWS, ROWS, is_experts, is_product

from .comparing import assert_same, unequal
from .families import _GATED as GATED
from .measuring import Seen
from .plain_torch import assert_as_plain_torch
from .rig import OPTIMIZER, Rig, Shape, Subject, outcome

STEPS = 5
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **GATED, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 0, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
LINEAR = {
    **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
BOTH = ["linear_attention", "full_attention"]


def _config(kind: str, *parts: dict[str, Any], **changes: Any) -> PreTrainedConfig:
    made: dict[str, Any] = {}
    for part in (*parts, changes):
        made |= part
    config: PreTrainedConfig = getattr(transformers, kind)(**made)
    return config


FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen3_moe": _config("Qwen3MoeConfig", GATED, EXPERTS, head_dim=8),
    "qwen3_moe, dense and sparse": _config(
        "Qwen3MoeConfig", GATED, EXPERTS, head_dim=8, num_hidden_layers=4, mlp_only_layers=[1], decoder_sparse_step=1,
        norm_topk_prob=True, num_experts_per_tok=1,
    ),
    "mixtral": _config("MixtralConfig", GATED, num_local_experts=4),
    "mixtral, top 1, window": _config("MixtralConfig", GATED, num_local_experts=3, num_experts_per_tok=1, sliding_window=8),
    "olmoe": _config("OlmoeConfig", GATED, EXPERTS),
    "olmoe, normalised": _config("OlmoeConfig", GATED, EXPERTS, num_experts=8, norm_topk_prob=True, clip_qkv=4.0),
    "gpt_oss": _config("GptOssConfig", GATED, num_local_experts=4, head_dim=8, sliding_window=8),
    "gpt_oss, top 1": _config("GptOssConfig", GATED, num_local_experts=4, num_experts_per_tok=1, head_dim=8, sliding_window=4),
    "deepseek_v2": _config("DeepseekV2Config", LATENT, topk_method="greedy", n_group=1, topk_group=1),
    "deepseek_v2, groups": _config(
        "DeepseekV2Config", LATENT, topk_method="group_limited_greedy", n_group=2, topk_group=1, first_k_dense_replace=1,
        routed_scaling_factor=2.0,
    ),
    "deepseek_v3": _config("DeepseekV3Config", LATENT, n_group=1, topk_group=1),
    "deepseek_v3, groups": _config("DeepseekV3Config", LATENT, n_group=2, topk_group=1, first_k_dense_replace=1),
    "glm4_moe": _config("Glm4MoeConfig", GATED, EXPERTS, n_routed_experts=4, first_k_dense_replace=0, head_dim=8),
    "glm4_moe, dense first": _config(
        "Glm4MoeConfig", GATED, EXPERTS, n_routed_experts=4, first_k_dense_replace=1, head_dim=8, norm_topk_prob=False,
        n_group=2, topk_group=1,
    ),
    "qwen3_next": _config("Qwen3NextConfig", GATED, LINEAR, layer_types=BOTH),
    "qwen3_next, dense first": _config("Qwen3NextConfig", GATED, LINEAR, layer_types=BOTH, mlp_only_layers=[0]),
    "granitemoe": _config("GraniteMoeConfig", GATED, num_local_experts=4),
    "granitemoe, top 1": _config(
        "GraniteMoeConfig", GATED, num_local_experts=4, num_experts_per_tok=1, residual_multiplier=0.3, logits_scaling=2.0
    ),
    "qwen3_5_moe": _config("Qwen3_5MoeTextConfig", GATED, LINEAR, layer_types=BOTH),
    "qwen3_5_moe, full attention": _config("Qwen3_5MoeTextConfig", GATED, LINEAR, layer_types=BOTH[1:] * 2, num_experts=8),
    "minimax_m2": _config("MiniMaxM2Config", GATED, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "minimax_m2, top 1": _config("MiniMaxM2Config", GATED, num_local_experts=4, num_experts_per_tok=1, head_dim=8),
    "afmoe": _config("AfmoeConfig", GATED, EXPERTS, num_dense_layers=0, head_dim=8, sliding_window=8),
    "afmoe, dense first": _config("AfmoeConfig", GATED, EXPERTS, num_dense_layers=1, head_dim=8, mup_enabled=True),
    "nemotron_h": _config(
        "NemotronHConfig", GATED, layers_block_type=["attention", "moe"], n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, head_dim=8,
    ),
    "nemotron_h, every kind": _config(
        "NemotronHConfig", GATED, layers_block_type=["attention", "moe", "mlp", "moe"], n_routed_experts=4,
        num_experts_per_tok=1, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, head_dim=8,
        moe_latent_size=16,
    ),
}  # fmt: skip


class Decided(Subject):
    """Has routers whose choices are far apart."""

    def fresh(self) -> Any:
        model = super().fresh()
        for module in model.modules():
            if any(is_experts(part) for part in module.children()):
                for name, parameter in module.named_parameters():
                    if name in ("gate.weight", "router.weight", "router.layer.weight", "router.gate.weight"):
                        parameter.data.mul_(50)
        return model


@pytest.mark.parametrize("family", every(6, FAMILIES))
def test_beside_plain_torch(family: str, tmp_path: Path) -> None:
    subject = Decided(FAMILIES[family], Shape())
    # Gradients of some biases are near zero: with a small epsilon their last bits would decide which way a weight goes.
    optimizer = replace(OPTIMIZER, lr=1e-3, epsilon=1e-4 if "gpt_oss" in family else 1e-6)
    _, weights = assert_as_plain_torch(subject, tmp_path, STEPS, optimizer=optimizer)
    assert any("experts" in name for name in weights)
    moved = unequal(weights, {name: value for name, value in subject.stored(subject.initial).items() if name in weights})
    unmoved = {name for name in set(weights) - set(moved) if not name.endswith("expert_bias")}  # which has no gradient
    # The weight of one choice is 1 whatever the router says.
    assert not unmoved or ("top 1" in family and all(".router." in name for name in unmoved))


@contextmanager
def _seen_by_dynamo() -> Iterator[None]:
    """Has Python show every frame to dynamo first, as while a thread compiles and after a compilation that failed."""
    begun, over = Event(), Event()

    def hold() -> None:
        before = set_eval_frame(False)
        begun.set()
        over.wait()
        set_eval_frame(before)

    thread = Thread(target=hold)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("seen_by_dynamo", [False, True])
def test_sorted_rows_end_with_the_first_product(seen_by_dynamo: bool) -> None:
    """Where experts are narrow, sorted rows as wide as the model are the most that a block holds: those that the first product
    read are not beside the outputs of the last one. Nor where dynamo sees every frame, whose caller then holds arguments."""
    shape = Shape(dtype="bfloat16", tokens=72 if seen_by_dynamo else 64)  # what was described is not described again
    config = _config("Qwen3MoeConfig", GATED, num_experts=8, num_experts_per_tok=8, moe_intermediate_size=4, head_dim=8)
    with _seen_by_dynamo() if seen_by_dynamo else nullcontext():
        block = next(stage for stage in Subject(config, shape).spec.stages if stage.kind == "block")
    rows = shape.micro * shape.tokens * 8 * config.hidden_size * 2  # bytes
    assert block.forward_peak < 6 * rows  # with them 7.4


# ---- where tokens are sent -----------------------------------------------------------------------------------------------


def _with_routers(subject: Subject, change: Callable[[torch.Tensor], None]) -> Subject:
    for name, value in subject.initial.items():
        if name.endswith("mlp.gate.weight"):
            change(value)
    return subject


def _one_for_all(router: torch.Tensor) -> None:
    router.zero_()  # all probabilities are equal, and the first experts are taken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ties_and_experts_that_nobody_chooses(dtype: Any, tmp_path: Path) -> None:
    """Equal logits: every token goes to the same experts, whatever the placement; the others decay as torch's do with
    gradients of zero."""
    subject = _with_routers(Subject(FAMILIES["qwen3_moe"], Shape(dtype=dtype, batch=8, micro=4)), _one_for_all)
    ran = assert_as_plain_torch if dtype == "float32" else outcome
    usual = ran(subject, tmp_path / "usual", 3, clip=0.5)
    for number, way in enumerate((dict(kept="all"), dict(device="emulated", sweeps=2))):
        assert_same(outcome(subject, tmp_path / str(number), 3, clip=0.5, **way), usual)


def test_pieces_of_rows_have_few_sizes() -> None:
    from fuyou_cli.engine.experts import _pieces

    sizes = set()
    for count in range(1, 3 * MOST_ROWS):
        pieces = list(_pieces(7, count))
        assert sum(real for _, _, real in pieces) == count and pieces[0][0] == 7
        assert all(real == size for _, size, real in pieces[:-1])
        sizes |= {size for _, size, _ in pieces}
    assert sizes == set(range(ROWS, MOST_ROWS + 1, ROWS))


def test_counts_the_work_of_chosen_experts_alone() -> None:
    """Two of four experts compute each token."""
    of_two, of_one = (
        Subject(_config("Qwen3MoeConfig", GATED, EXPERTS, head_dim=8, num_experts_per_tok=k), Shape()) for k in (2, 1)
    )
    more = of_two.spec.stages[1].forward_flops - of_one.spec.stages[1].forward_flops
    assert more == 2 * (2 * 16) * (
        3 * 32 * 32
    )  # a multiply and an add for every token of a micro-batch and weight of an expert


def test_frozen_experts_take_no_gradient(tmp_path: Path) -> None:
    subject = Subject(FAMILIES["qwen3_moe"], Shape(), freeze=["model.layers.*.mlp.experts"])
    _, weights = assert_as_plain_torch(subject, tmp_path, 3, prepare=_freeze_experts)
    assert subject.spec.stages[1].frozen_flops == 2 * (2 * 16) * 2 * (3 * 32 * 32)
    experts = {name: value for name, value in weights.items() if ".experts." in name}
    assert unequal(experts, {name: subject.stored(subject.initial)[name] for name in experts}) == []


def _freeze_experts(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)


def _products(func: Any, args: Any) -> Any:
    return func if is_product(func) else None


@pytest.mark.parametrize(("kept", "again"), [(None, 1), ("all", 0)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_last_product_is_not_computed_again(family: str, kept: str | None, again: int, tmp_path: Path) -> None:
    """Its outputs are weighted before it, so that backward reads none of them; those of the first can be kept."""
    subject = Subject(FAMILIES[family], Shape(batch=4, micro=2))
    with Rig(subject, tmp_path, home="cpu", **({"kept": kept} if kept else {})) as rig, Seen(_products) as products:
        rig.run(1)
    layers, micro_batches = 2, 2
    assert len(products.found) == layers * micro_batches * (2 + again)


def test_only_experts_learn(tmp_path: Path) -> None:
    """Nothing else of the lowest block leads autograd to them."""
    rest = ["model.embed_tokens", "model.norm", "lm_head", "model.layers.*.self_attn", "model.layers.*.mlp.gate"]
    rest += ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"]
    subject = Subject(FAMILIES["qwen3_moe"], Shape(), freeze=rest)

    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." in name)

    _, weights = assert_as_plain_torch(subject, tmp_path, 3, prepare=freeze)
    moved = {name for name in weights if ".experts." in name}
    assert set(unequal(weights, {name: subject.stored(subject.initial)[name] for name in weights})) == moved


def test_a_routers_correction_stays_as_it_is() -> None:
    """Rounded to bfloat16 it would choose other experts than `from_pretrained` does."""
    from fuyou_cli.engine.skeleton import build

    for family in ("deepseek_v3", "glm4_moe"):
        model = build(FAMILIES[family], dtype="bfloat16", attention="sdpa")
        found = [buffer.dtype for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        assert found == [torch.float32] * 2


def test_compiling_is_refused_by_name() -> None:
    from fuyou_cli.core.errors import UsageError
    from fuyou_cli.engine.compiled import as_compiled

    with pytest.raises(UsageError, match=r"train\.compile: the experts of Qwen3MoeForCausalLM cannot be compiled"):
        as_compiled(Subject(FAMILIES["qwen3_moe"], Shape()).spec)
