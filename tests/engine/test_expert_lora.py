"""LoRA of experts: the engine beside plain PyTorch, which adds B A to each expert's matrix, and in several placements."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import every
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrize

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.experts import is_experts
from fuyou_cli.engine.skeleton import build
from fuyou_cli.planner.memory import compute_memory
from fuyou_cli.recipe.schema import AdapterSection

from .comparing import relative
from .families import FAMILIES as DENSE
from .measuring import peak_of_a_step, without_holes
from .plain_torch import assert_as_plain_torch, plain_run
from .rig import OPTIMIZER, Rig, Shape, assert_moves_as_planned, outcome
from .test_mixtures import FAMILIES, Decided, _one_for_all, _with_routers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import models_table

pytest.importorskip("peft", reason="peft comes with the extra lora")
STEPS = 6
RANK = 4
TARGETS = {"deepseek_v3": ["q_a_proj", "q_b_proj", "o_proj"]}


class Merged(nn.Module):
    """Adds B A, scaled, to the matrices of all experts: those of each part, one below the other."""

    def __init__(self, like: torch.Tensor, parts: int, scaling: float) -> None:
        super().__init__()
        experts, outputs, inputs = like.shape
        self.scaling = scaling
        make = {"dtype": like.dtype}
        self.A = nn.ParameterList([nn.Parameter(0.2 * torch.randn(experts, RANK, inputs, **make)) for _ in range(parts)])
        self.B = nn.ParameterList([nn.Parameter(0.05 * torch.randn(experts, outputs // parts, RANK, **make)) for _ in self.A])

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scaling * torch.cat([b @ a for a, b in zip(self.A, self.B, strict=True)], 1)


class Adapted(Decided):
    """Has LoRA in attention and experts."""

    def __init__(self, family: str, shape: Shape | None = None, **keys: Any) -> None:
        targets = TARGETS.get(family.partition(",")[0], ["q_proj", "v_proj"])
        section = AdapterSection(r=RANK, lora_alpha=6, target_modules=targets, experts=True, **keys)
        super().__init__(FAMILIES[family], shape or Shape(), adapter=section)

    def fresh(self) -> Any:
        model = super().fresh()
        assert self.adapter is not None
        scaling = self.adapter.lora_alpha / (RANK**0.5 if self.adapter.use_rslora else RANK)
        for module in list(model.modules()):
            if is_experts(module):
                for name, parts in (("gate_up_proj", 2), ("down_proj", 1)):
                    parametrize.register_parametrization(module, name, Merged(getattr(module, name), parts, scaling))
                    module.parametrizations[name].original.requires_grad_(False)
        return model

    def stored(self, weights: Any) -> dict[str, torch.Tensor]:
        named = {}
        for name, value in weights.items():
            before, inside, after = name.partition("parametrizations.")
            own, _, part = after.partition(".")
            kind = part.removeprefix("0.").replace(".", "")  # A0
            named[f"{before}{own}" + ("" if part == "original" else f"_lora_{kind}") if inside else name] = value
        return super().stored(named)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3_moe", {}),
        ("mixtral", {"use_rslora": True}),
        *every(2, [("deepseek_v3", {}), ("qwen3_moe, dense and sparse", {})]),
    ],
)
def test_beside_plain_torch(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    subject = Adapted(family, **keys)
    optimizer = replace(OPTIMIZER, lr=1e-3, epsilon=1e-6)
    assert_as_plain_torch(subject, tmp_path, STEPS, optimizer=optimizer, moved="lora_")


def test_an_expert_that_nobody_chooses(tmp_path: Path) -> None:
    """Its A and B decay as torch's do with gradients of zero."""
    subject = _with_routers(Adapted("qwen3_moe"), _one_for_all)
    losses, weights = outcome(subject, tmp_path, 3, clip=0.5)
    plain_losses, plain = plain_run(subject, 3, clip=0.5)
    assert relative(losses, plain_losses) <= 1e-6
    before, wanted = subject.stored(subject.initial), subject.stored(plain)
    decay = (1 - OPTIMIZER.lr * OPTIMIZER.weight_decay) ** 3
    adapter = [name for name in weights if ".experts." in name and "lora_" in name]
    left = [name for name in adapter if torch.allclose(weights[name], before[name] * decay, rtol=1e-6, atol=0)]
    assert len(left) == 2 * (2 * 6)  # in each layer two of four experts
    assert all(torch.allclose(weights[name], wanted[name], rtol=1e-6, atol=0) for name in left)


def test_counts_its_work_and_memory() -> None:
    """Every token goes to two experts, each with three matrices of 32 x 32."""
    dense = AdapterSection(r=RANK, target_modules=["q_proj", "v_proj"])
    plain = Decided(FAMILIES["qwen3_moe"], Shape(), adapter=dense).spec.stages[2]
    adapted = Adapted("qwen3_moe").spec.stages[2]
    rows = 2 * 16 * 2
    assert adapted.forward_flops - plain.forward_flops == rows * 3 * 2 * (32 * RANK + RANK * 32)
    assert adapted.frozen_flops == plain.frozen_flops
    more = sum(t.numel for t in adapted.trained_tensors) - sum(t.numel for t in plain.trained_tensors)
    assert more == 4 * 3 * 2 * 32 * RANK
    assert 4 * rows * 3 * RANK < adapted.backward_peak - plain.backward_peak < 4 * (4 * 3 * 32 * 32)  # no W + B A is made


def test_a_step_reads_writes_and_takes_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, without what the heap makes of it; also where all tokens go to the same experts."""
    without_holes(monkeypatch)
    _, updated = assert_moves_as_planned(Adapted("qwen3_moe"), tmp_path / "moves", after=2)
    assert updated == Adapted("qwen3_moe").spec.updated_parameters
    peaks = []
    for change in (torch.Tensor.detach, _one_for_all):
        subject = _with_routers(Adapted("qwen3_moe", Shape(batch=8, micro=1, tokens=64)), change)
        with Rig(subject, tmp_path / change.__name__, home="cpu") as rig:
            charged = compute_memory(subject.spec, rig.request)
            peaks.append(peak_of_a_step(rig))
        assert peaks[-1] <= charged.whole_batch + charged.stage
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)


def test_first_values() -> None:
    """A is drawn as peft draws a linear layer's, each another one, B is zero; what others begin with does not depend on it."""
    from fuyou_cli.adapters.injection import FirstValues, inject

    begun = {}
    for experts in (False, True):
        model = build(FAMILIES["mixtral"], dtype="float32", attention="sdpa")
        inject(model, AdapterSection(r=RANK, experts=experts))
        stages = dissect(model, marked=True).stages
        values = FirstValues(model, seed=3)
        begun[experts] = {}
        for stage in stages:  # in turn, as a run asks for them
            begun[experts] |= values.of([tensor.name for tensor in stage.tensors], lambda name: iter(()))
    added = begun[True].keys() - begun[False].keys()
    assert len(added) == 2 * 4 * 3 * 2
    assert not any(begun[False][name].ne(begun[True][name]).any() for name in begun[False])
    drawn = [begun[True][name] for name in sorted(added) if "lora_A" in name]
    assert all(0.9 < float(a.abs().max()) * a.shape[1] ** 0.5 <= 1 for a in drawn)
    assert len({float(a[0, 0]) for a in drawn}) == len(drawn)
    assert not any(begun[True][name].any() for name in added if "lora_B" in name)


@pytest.mark.parametrize(("family", "says"), [
    ("llama", "LlamaForCausalLM has no experts"),
    ("gpt_oss", "have one tensor for all experts"),
    ("granitemoe", "have one tensor for all experts"),
    ("nemotron_h", "peft cannot load an adapter of the experts of NemotronHForCausalLM"),
])  # fmt: skip
def test_is_refused_by_name(family: str, says: str) -> None:
    from fuyou_cli.adapters.injection import inject

    with pytest.raises(UsageError, match=rf"adapter\.experts: .*{says}"):
        inject(build({**DENSE, **FAMILIES}[family], dtype="float32", attention="sdpa"), AdapterSection(experts=True))


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_of_experts_is_refused(key: str) -> None:
    from fuyou_cli.adapters.injection import inject

    section = AdapterSection(experts=True, target_modules=["q_proj"], **{key: {"q_proj|.*proj": 2}})
    with pytest.raises(UsageError, match=rf"adapter\.{key}: `q_proj\|\.\*proj` matches experts"):
        inject(build(FAMILIES["qwen3_moe"], dtype="float32", attention="sdpa"), section)


KNOWN = ["deepseek_v2", "deepseek_v3, groups", "glm4_moe", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next"]


@pytest.mark.parametrize("family", every(4, KNOWN))
def test_peft_loads_and_computes_what_merging_gives(family: str, tmp_path: Path) -> None:
    """Of every family that is not refused."""
    import peft

    from fuyou_cli.adapters.adapter_names import as_beside, config_of, config_text, file_name, is_added, layer_of
    from fuyou_cli.adapters.injection import inject
    from fuyou_cli.adapters.merging import LoraWeights

    skeleton = build(FAMILIES[family], dtype="float32", attention="sdpa")
    inject(skeleton, AdapterSection(r=RANK, lora_alpha=6, experts=True))
    anatomy = dissect(skeleton, marked=True)
    torch.manual_seed(3)
    every_one = [t for stage in anatomy.stages for t in stage.tensors if is_added(t.name)]
    added = {t.name: 0.1 * torch.randn(t.shape) for t in every_one}
    holder = "block_sparse_moe" if family in ("mixtral", "minimax_m2") else "mlp"  # as their files have it
    keys = {
        name: as_beside(file_name(name), f"{holder}.experts.0.") if ".experts." in name else file_name(name) for name in added
    }
    save_file({keys[name]: value for name, value in added.items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes(config_text(config_of(skeleton), base_model="any"))
    base = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), experts_implementation="eager").eval()
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    ids = torch.arange(1, 17).view(1, -1)
    with torch.no_grad():
        before = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path).eval()(input_ids=ids).logits
        for layer in {layer_of(name) for name in added}:
            a, b = (added[f"{layer}.lora_{kind}.default.weight"] for kind in "AB")
            lora = LoraWeights(a=a, b=b, scaling=6 / RANK)
            matrix = _matrix_of(layer, weights, anatomy.parts)
            matrix.copy_(lora.merged(matrix.reshape(-1), 0).view_as(matrix))
        merged = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), experts_implementation="eager")
        merged.load_state_dict(weights)
        wanted = merged.eval()(ids).logits
    assert (before - wanted).abs().max() > 0.05
    assert torch.allclose(adapted, wanted, atol=1e-5)


LINEAR = {  # family -> ends of layers that have LoRA, and of some that do not, because peft takes their names for experts
    "qwen2_moe": ("mlp.shared_expert.down_proj", None),
    "qwen3_5_moe_text": ("mlp.shared_expert.gate_proj", None),
    "jamba": ("feed_forward.up_proj", None),
    "laguna": ("self_attn.g_proj", "mlp.shared_experts.up_proj"),
    "axk1": ("shared_experts.gate_proj", None),
    "hy_v3": ("shared_experts.gate_proj", None),
    "flint": ("mlp.shared_expert.up_proj", None),
    "aria_text": ("mlp.shared_experts.up_proj", None),
    "qwen4_exp_text": ("mlp.shared_expert.up_proj", "input_mix_weight_down"),
    "deepseek_v2": ("self_attn.q_a_proj", "shared_experts.gate_proj"),
    "deepseek_v3": ("self_attn.kv_b_proj", "mlp.shared_experts.gate_proj"),
    "glm4_moe": ("self_attn.q_proj", "mlp.shared_experts.up_proj"),
    "ernie4_5_moe": ("self_attn.o_proj", "shared_experts.down_proj"),
    "afmoe": ("self_attn.q_proj", "router.gate"),
    "hunyuan_v1_moe": ("self_attn.v_proj", "gate.wg"),
}


@pytest.mark.parametrize("family", ["qwen2_moe", *every(4, [family for family in LINEAR if family != "qwen2_moe"])])
def test_all_linear_is_what_peft_loads(family: str, tmp_path: Path) -> None:
    """Every linear layer of the blocks but routers, as far as peft does not take its name for the experts."""
    import peft

    from fuyou_cli.adapters.adapter_names import config_of, config_text, file_name, is_added, layer_of
    from fuyou_cli.adapters.injection import inject

    config = models_table.small(family)
    skeleton = build(copy.deepcopy(config), dtype="float32", attention="sdpa")
    inject(skeleton, AdapterSection(r=RANK, lora_alpha=6))
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), experts_implementation="eager").eval()
    added = {name: 0.1 * torch.randn(p.shape) for name, p in skeleton.named_parameters() if is_added(name)}
    layers = {layer_of(name) for name in added}
    has, lacks = LINEAR[family]
    linear = {name for name, module in base.named_modules() if isinstance(module, nn.Linear) and ".layers." in name}
    assert any(layer.endswith(has) for layer in layers) and layers <= linear
    assert lacks is None or (any(name.endswith(lacks) for name in linear) and not any(one.endswith(lacks) for one in layers))
    save_file({file_name(name): value for name, value in added.items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes(config_text(config_of(skeleton), base_model="any"))
    merged, ids = copy.deepcopy(base), torch.arange(1, 17).view(1, -1)
    with torch.no_grad():
        for layer in layers:
            a, b = (added[f"{layer}.lora_{kind}.default.weight"] for kind in "AB")
            merged.get_submodule(layer).weight += 6 / RANK * (b @ a)
        before, wanted = (model(ids, use_cache=False).logits for model in (base, merged))
        adapted = peft.PeftModel.from_pretrained(base, tmp_path).eval()(input_ids=ids, use_cache=False).logits
    assert (before - wanted).abs().max() > 1e-2
    assert (adapted - wanted).abs().max() < 2e-3 * (before - wanted).abs().max()


def test_a_layer_whose_lora_peft_would_lose_is_refused() -> None:
    from fuyou_cli.adapters.injection import inject

    skeleton = build(models_table.small("laguna"), dtype="float32", attention="sdpa")
    with pytest.raises(UsageError, match=r"peft does not find LoRA of model\.layers\.0\.mlp\.shared_experts\.down_proj when"):
        inject(skeleton, AdapterSection(target_modules=["down_proj"]))


def _matrix_of(layer: str, weights: dict[str, torch.Tensor], parts: Any) -> torch.Tensor:
    """Returns a view of the layer's matrix: of an expert's in the parameter of all of them."""
    if f"{layer}.weight" in weights:
        return weights[f"{layer}.weight"]
    name, number = next((n, i) for n, those in parts.items() for i, (part, _) in enumerate(those) if part == f"{layer}.weight")
    experts = len(weights[name])
    rows = weights[name][number % experts]
    return rows.view(len(parts[name]) // experts, -1, rows.shape[1])[number // experts]
