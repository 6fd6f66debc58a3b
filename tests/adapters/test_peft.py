"""Compares LoRA in a skeleton with peft: names, shapes, first values, files that peft loads, and merged weights."""

from __future__ import annotations

import json
from functools import cache

import peft
import pytest
import torch
import transformers
from drawn import crossed
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from fuyou_cli.adapters.adapter_names import base_name, config_text, file_name
from fuyou_cli.adapters.injection import initial_values, inject, lora_layers
from fuyou_cli.adapters.merging import LoraWeights
from fuyou_cli.checkpoint.files import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.skeleton import TORCH_DTYPE, build
from fuyou_cli.recipe.schema import AdapterSection
from tests.engine.families import FAMILIES

SECTIONS = {
    "plain": {"r": 4},
    "rslora": {"r": 4, "use_rslora": True, "lora_alpha": 16, "rank_pattern": {r"\w+\.[01]\.(self_)?att\w*\.\w+": 2}},
    "dora": {"r": 4, "use_dora": True, "alpha_pattern": {r"[a-z.]*\.1\..*": 3}},
}
REGEX = r".*layers\.1\..*(q_proj|up_proj)"


def plain(family, dtype="float32"):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(FAMILIES[family], dtype=TORCH_DTYPE[dtype])


def by_peft(model, section: AdapterSection, seed=5):
    """Returns what peft makes of the same keys."""
    keys = section.model_dump(exclude={"type"}) | {"modules_to_save": list(section.modules_to_save) or None}
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(**keys), autocast_adapter_dtype=False)


@cache
def injected(family, section: str, dtype="float32"):
    model = build(FAMILIES[family], dtype=dtype, attention="sdpa")
    return model, inject(model, AdapterSection(**SECTIONS[section]))


@crossed(2, family=["llama", "qwen3", "gemma2", "gpt2", "opt", "phi3"], section=SECTIONS)
def test_targets_names_and_first_values_are_those_of_peft(family, section):
    model, _ = injected(family, section)
    theirs = by_peft(plain(family), AdapterSection(**SECTIONS[section]))
    wanted = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    ours = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {f"base_model.model.{name}": p.shape for name, p in ours.items()} == {n: p.shape for n, p in wanted.items()}
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    assert {base_name(name) for name in model.state_dict() if "lora_" not in name} == set(plain(family).state_dict())
    for name, value in initial_values(model, seed=5):
        assert torch.equal(value, wanted.pop(f"base_model.model.{name}")), name
    assert all("magnitude" in name for name in wanted)


def test_in_bfloat16_first_values_are_rounded_as_peft_does():
    model, _ = injected("llama", "plain", "bfloat16")
    theirs = dict(by_peft(plain("llama", "bfloat16"), AdapterSection(r=4)).named_parameters())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    before = torch.get_rng_state()
    assert all(torch.equal(value, theirs[f"base_model.model.{name}"]) for name, value in initial_values(model, seed=5))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": ["q_proj", "layers.0.mlp.down_proj"]},
        {"target_modules": REGEX},
        {"target_modules": "all-linear", "modules_to_save": ["lm_head", "norm"], "use_dora": True},
    ],
    ids=str,
)
def test_names_regular_expressions_and_modules_trained_in_full(keys):
    section = AdapterSection(**keys)
    model = build(FAMILIES["llama"], dtype="float32", attention="sdpa")
    inject(model, section)
    theirs = peft.get_peft_model_state_dict(by_peft(plain("llama"), section))
    ours = {file_name(name) for name, p in model.named_parameters() if p.requires_grad}
    assert ours == set(theirs)


@pytest.mark.parametrize("section", SECTIONS)
def test_peft_loads_what_is_written(tmp_path, section):
    model, config = injected("llama", section)
    trained = {name: torch.randn(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    save_file({file_name(name): value for name, value in trained.items()}, tmp_path / ADAPTER_NAME)
    (tmp_path / ADAPTER_CONFIG_NAME).write_bytes(config_text(config, base_model="owner/name"))
    assert json.loads((tmp_path / ADAPTER_CONFIG_NAME).read_text())["base_model_name_or_path"] == "owner/name"
    loaded = PeftModel.from_pretrained(plain("llama"), tmp_path, is_trainable=True)
    found = {name: p for name, p in loaded.named_parameters() if p.requires_grad}
    assert set(found) == {f"base_model.model.{name}" for name in trained}
    assert all(torch.equal(found[f"base_model.model.{name}"], value) for name, value in trained.items())


@pytest.mark.parametrize(("keys", "says"), [
    ({"target_modules": ["q_porj"]}, "q_porj"),
    ({"target_modules": ["q_proj", "q_porj"]}, "target_modules: matches nothing: q_porj"),
    ({"modules_to_save": ["heads"]}, "modules_to_save: matches nothing: heads"),
    ({"rank_pattern": {"v_porj": 2}}, "rank_pattern: matches nothing: v_porj"),
    ({"target_modules": ["q_proj"], "alpha_pattern": {"v_proj": 2}}, "alpha_pattern: matches nothing: v_proj"),
    ({"target_modules": ["lm_head"]}, "lm_head is not a linear layer of a decoder block"),
    ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens is not a linear layer"),
    ({"target_modules": ["input_layernorm"]}, "input_layernorm|LlamaRMSNorm"),
])  # fmt: skip
def test_what_cannot_be_adapted_is_named(keys, says):
    model = build(FAMILIES["llama"], dtype="float32", attention="sdpa")
    with pytest.raises(UsageError, match=says) as caught:
        inject(model, AdapterSection(**keys))
    assert caught.value.hint


def test_layers_that_peft_refuses_are_not_offered():
    mamba = build(transformers.MambaConfig(hidden_size=32, num_hidden_layers=1), dtype="float32", attention="sdpa")
    with pytest.raises(UsageError, match="'out_proj' is incompatible") as caught:
        inject(mamba, AdapterSection(r=2))
    assert caught.value.hint.endswith("such as in_proj, x_proj, dt_proj")


def test_layers_inside_modules_to_save_get_no_lora():
    model = build(FAMILIES["llama"], dtype="float32", attention="sdpa")
    with pytest.raises(UsageError, match="No modules were targeted") as caught:
        inject(model, AdapterSection(modules_to_save=("layers",)))
    assert caught.value.hint.endswith("none inside adapter.modules_to_save can")


def test_where_no_other_layer_can_have_lora_the_hint_names_none():
    mamba = build(transformers.MambaConfig(hidden_size=32, num_hidden_layers=1), dtype="float32", attention="sdpa")
    for name in ("in_proj", "x_proj", "dt_proj"):
        delattr(mamba.backbone.layers[0].mixer, name)
    with pytest.raises(UsageError, match="'out_proj' is incompatible") as caught:
        inject(mamba, AdapterSection(r=2, target_modules=("out_proj",)))
    assert caught.value.hint.startswith("remove `adapter`")


def test_tied_weights_are_not_trained_in_full_by_one_of_their_names():
    model = build(FAMILIES["gpt2"], dtype="float32", attention="sdpa")
    with pytest.raises(UsageError, match="shares its weights"):
        inject(model, AdapterSection(modules_to_save=("lm_head",)))


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_in_pieces_equals_merge_and_unload(family, section):
    theirs = by_peft(plain(family), AdapterSection(**SECTIONS[section]))
    torch.manual_seed(8)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.rand_like(parameter))
    ours = {}
    for name, layer in lora_layers(theirs.base_model.model):
        weight = layer.get_base_layer().weight.detach().clone()
        magnitude = layer.lora_magnitude_vector
        lora = LoraWeights(
            a=layer.lora_A["default"].weight.detach(), b=layer.lora_B["default"].weight.detach(),
            scaling=layer.scaling["default"], transposed=layer.fan_in_fan_out,
            magnitude=magnitude["default"].weight.detach() if magnitude else None,
        )  # fmt: skip
        pieces = weight.reshape(-1).split(101)
        norms = lora.output_norms(pieces)
        merged = [lora.merged(piece, 101 * number, norms=norms) for number, piece in enumerate(pieces)]
        ours[f"{name}.weight"] = torch.cat(merged).view(weight.shape)
    whole = theirs.merge_and_unload().state_dict()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, whole[name], rtol=3e-7, atol=3e-8)  # the sums cancel


def test_a_merged_weight_is_rounded_once():
    torch.manual_seed(8)
    weight, a, b = torch.randn(24, 40).bfloat16(), torch.randn(4, 40), torch.randn(24, 4)
    merged = LoraWeights(a=a, b=b, scaling=0.5).merged(weight.reshape(-1), 0).bfloat16().view(24, 40).double()
    exact = weight.double() + 0.5 * b.double() @ a.double()
    assert ((merged - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
