"""Mixtures whose experts rest in their files' own format, mxfp4 (gpt-oss) or fp8: an adapter has the losses of one over the
decoded weights, bit for bit, and what is trained begins with these.

Costs about 25 s of one core."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fuyou_cli.cli.stores import run_export
from fuyou_cli.core.errors import Interrupted
from fuyou_cli.training.state import manifest as manifests
from tests.quantised_checkpoint import fp8, mxfp4, of_fp8

from .conftest import NewProject, Project
from .running import interrupt, prepared_run, store_of, train
from .test_inference import streamed

pytest.importorskip("peft", reason="peft comes with the extra lora")


@pytest.fixture(scope="session")
def models(materials: Path) -> tuple[Path, Path]:
    """Makes a gpt-oss whose experts are in mxfp4, and the one of decoded weights."""
    import transformers

    folder = materials / "decoded-gpt-oss"
    config = transformers.GptOssConfig(
        vocab_size=len(transformers.AutoTokenizer.from_pretrained(materials / "model")), num_hidden_layers=2, hidden_size=64,
        intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=64, sliding_window=16, bos_token_id=0, eos_token_id=0, pad_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(materials / "model" / file, folder / file)
    packed = Path(shutil.copytree(folder, materials / "mxfp4-gpt-oss"))
    plain, stored = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, exponents = mxfp4(plain.pop(name))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        plain[name] = convert_moe_packed_tensors(blocks, exponents).contiguous()
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    kept = {name: value for name, value in plain.items() if f"{name}_blocks" not in stored}
    save_file(kept | stored, packed / "model.safetensors", {"format": "pt"})
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = json.loads((folder / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return packed, folder


@pytest.fixture
def project_of(new_project: NewProject) -> Callable[..., Project]:
    def make(model: Path, name: str = "project", changes: dict[str, Any] | None = None) -> Project:
        usual = {
            "model.name_or_path": str(model), "adapter": {"r": 4}, "precision": {"compute": "bfloat16"}, "train.max_steps": 4,
            "export.at_end": False, "offload.optimizer_states": "cpu", "offload.gradients": "cpu",
        }  # fmt: skip
        return new_project(name, usual | (changes or {}))

    return make


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "emulated"])
def test_an_adapter_over_mxfp4_has_the_losses_of_one_over_decoded_weights(
    device: str, models: tuple[Path, Path], project_of: Callable[..., Project]
) -> None:
    packed, decoded = models
    changes = {"offload.device": device, "adapter": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}
    wanted, _ = train(project_of(decoded, "decoded", changes))
    losses, store = train(project_of(packed, "packed", changes))
    assert losses == wanted and losses[-1] < losses[0]
    saved, _ = manifests.newest(store)
    assert saved is not None and saved.quantisation == "mxfp4"


def test_the_command_merges(models: tuple[Path, Path], project_of: Callable[..., Project], tmp_path: Path) -> None:
    packed, decoded = models
    project = project_of(packed, changes={"adapter.target_modules": ["q_proj"], "train.max_steps": 2})
    ended = project.fuyou("finetune", project.recipe)
    assert ended.returncode == 0, ended.stderr
    run_export(store_of(project), tmp_path / "merged", [], dtype="bfloat16", merged=True)
    ours, others = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", decoded))
    assert ours.keys() == others.keys()
    changed = {name for name in ours if not torch.equal(ours[name], others[name])}
    assert changed and all("q_proj" in name for name in changed)


def test_a_stopped_run_continues(models: tuple[Path, Path], project_of: Callable[..., Project]) -> None:
    wanted, _ = train(project_of(models[0], "whole", {"adapter.target_modules": ["q_proj", "v_proj"]}))
    stopped = project_of(models[0], "stopped", {"adapter.target_modules": ["q_proj", "v_proj"]})
    with pytest.raises(Interrupted):
        train(stopped, interrupt(3, "backward"))
    assert train(stopped)[0] == wanted


def test_all_weights_are_trained_from_the_decoded_ones(
    models: tuple[Path, Path], project_of: Callable[..., Project], tmp_path: Path
) -> None:
    import transformers

    packed, decoded = models
    wanted, _ = train(project_of(decoded, "decoded", {"adapter": None}))
    told = list[str]()
    project = project_of(packed, "packed", {"adapter": None})
    losses, store = train(prepared_run(project, say=told.append))
    assert losses == wanted
    assert any(
        "(mxfp4): they are decoded to bfloat16 while they are imported, and what is exported is too" in line for line in told
    )
    run_export(store, tmp_path / "out", [], dtype="bfloat16")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert names == load_file(decoded / "model.safetensors").keys()
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_model_is_computed_without_training(models: tuple[Path, Path]) -> None:
    packed, decoded = models
    assert streamed(packed, "bfloat16", memory=1 << 22) == streamed(decoded, "bfloat16", memory=1 << 22)


@pytest.mark.parametrize("adapter", every(2, [{"r": 4, "target_modules": ["q_proj"]}, None]))
@pytest.mark.slow
def test_experts_in_fp8(adapter: Any, materials: Path, project_of: Callable[..., Project], tmp_path: Path) -> None:
    """One tensor for each expert, but for the router, whose squares are cut at the ends."""
    import transformers

    decoded = tmp_path / "decoded"
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(transformers.AutoTokenizer.from_pretrained(materials / "model")), num_hidden_layers=2, hidden_size=136,
        moe_intermediate_size=72, num_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=36, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(decoded)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(materials / "model" / file, decoded / file)
    packed = Path(shutil.copytree(decoded, tmp_path / "packed"))
    plain, stored = load_file(decoded / "model.safetensors"), dict[str, torch.Tensor]()
    for name, value in plain.items():
        if "layers." not in name or value.dim() != 2 or name.endswith("mlp.gate.weight"):
            stored[name] = value
            continue
        codes, scales = fp8(value)
        stored |= {name: codes, f"{name}_scale_inv": scales}
        plain[name] = of_fp8(codes, scales).bfloat16()
    save_file(plain, decoded / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["mlp.gate", "lm_head"]}
    told = json.loads((decoded / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(told | {"quantization_config": said}))
    wanted, _ = train(project_of(decoded, "of-decoded", {"adapter": adapter}))
    losses, store = train(project_of(packed, "of-packed", {"adapter": adapter}))
    assert losses == wanted and losses[-1] < losses[0]
    saved, _ = manifests.newest(store)
    assert saved is not None and saved.quantisation == (None if adapter is None else "fp8")
