"""Checkpoints in fp8, and mixtures whose experts are in mxfp4 (gpt-oss) or fp8: an adapter over their own bytes has the losses
of one over the decoded weights, bit for bit, and what is trained begins with these."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fuyou_cli.checkpoint.files import open_checkpoint
from fuyou_cli.checkpoint.reader import weights_mark
from fuyou_cli.cli.stores import run_export
from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.exporting import with_untouched
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.manifest import Untouched
from tests.quantised_checkpoint import fp8, mxfp4, of_fp8

from .conftest import NewProject, Project, write_model
from .running import interrupt, planned, prepared_run, stop, store_of, train
from .test_inference import losses_of, streamed

peft = pytest.importorskip("peft", reason="peft comes with the extra lora")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
SQUARES = {"hidden_size": 136, "head_dim": 36}  # matrices have several squares, the last of them cut
EXPERTS = {"num_experts_per_tok": 2}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("Qwen3Config", {**SQUARES, "intermediate_size": 260, "tie_word_embeddings": True}),
    "fp8 experts": ("Qwen3MoeConfig", {**SQUARES, **EXPERTS, "moe_intermediate_size": 72, "num_experts": 4}),
    "mxfp4": (
        "GptOssConfig",
        {
            **EXPERTS, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_local_experts": 4, "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}  # fmt: skip
SAID: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8 experts": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["mlp.gate", "lm_head"]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}
_MATRICES = 14  # of both blocks in fp8


def _stored(kind: str, name: str, value: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns what the file has of a weight, and what that is decoded."""
    if kind == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        blocks, exponents = mxfp4(value)
        return {f"{name}_blocks": blocks, f"{name}_scales": exponents}, convert_moe_packed_tensors(
            blocks, exponents
        ).contiguous()
    if kind != "mxfp4" and "layers." in name and value.dim() == 2 and not name.endswith("mlp.gate.weight"):
        codes, scales = fp8(value)
        return {name: codes, f"{name}_scale_inv": scales}, of_fp8(codes, scales).bfloat16()
    return {name: value}, value


@pytest.fixture(scope="session")
def models(materials: Path) -> Callable[[str], tuple[Path, Path]]:
    """Gives models(kind): one whose weights are quantised, and the one of decoded weights, in bfloat16."""

    def make(kind: str) -> tuple[Path, Path]:
        packed, decoded = (materials / f"{kind} {what}" for what in ("packed", "decoded"))
        if packed.exists():
            return packed, decoded
        made, sizes = MADE[kind]
        write_model(materials, decoded, made, dtype="bfloat16", **SIZES, **sizes)
        shutil.copytree(decoded, packed)
        parts = {name: _stored(kind, name, value) for name, value in load_file(decoded / "model.safetensors").items()}
        save_file({n: v for part, _ in parts.values() for n, v in part.items()}, packed / "model.safetensors", {"format": "pt"})
        save_file({name: value for name, (_, value) in parts.items()}, decoded / "model.safetensors", {"format": "pt"})
        config = json.loads((decoded / "config.json").read_text())
        (packed / "config.json").write_text(json.dumps(config | {"quantization_config": SAID[kind]}))
        return packed, decoded

    return make


@pytest.fixture
def project_of(new_project: NewProject) -> Callable[..., Project]:
    """Gives project_of(folder with a model, name, {dotted key: value}), which trains an adapter in bfloat16."""

    def make(model: Path, name: str = "project", changes: dict[str, Any] | None = None) -> Project:
        usual = {
            "model.name_or_path": str(model), "adapter": {"r": 4}, "precision": {"compute": "bfloat16"}, "train.max_steps": 4,
            "export.at_end": False, "offload.optimizer_states": "cpu", "offload.gradients": "cpu",
        }  # fmt: skip
        return new_project(name, usual | (changes or {}))

    return make


@pytest.mark.parametrize(
    ("kind", "device", "adapter"),
    [
        ("fp8", "emulated", {"r": 4}),
        ("mxfp4", "emulated", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
        pytest.param("fp8", "cpu", {"r": 4, "use_dora": True}, marks=pytest.mark.slow),  # magnitudes begin as norms
        pytest.param("mxfp4", "cpu", {"r": 4, "target_modules": ["q_proj", "v_proj"]}, marks=pytest.mark.slow),
        pytest.param("fp8 experts", "cpu", {"r": 4, "target_modules": ["q_proj"]}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_are_those_over_decoded_weights_stopped_or_not(
    kind: str, device: str, adapter: dict[str, Any], models: Any, project_of: Callable[..., Project], tmp_path: Path
) -> None:
    """A stopped run is not gone on with where its files changed: in fp8 only a scale."""
    packed, decoded = models(kind)
    model = Path(shutil.copytree(packed, tmp_path / "model"))
    changes = {"offload.device": device, "adapter": adapter}
    wanted, _ = train(project_of(decoded, "decoded", changes))
    project = project_of(model, "packed", changes)
    stop(project, interrupt(3, "backward"))
    whole, tensors = (model / "model.safetensors").read_bytes(), load_file(model / "model.safetensors")
    scale = next(name for name in tensors if name.endswith(("up_proj.weight_scale_inv", "down_proj_scales")))
    tensors[scale][0] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="weights"):
        prepared_run(project)
    (model / "model.safetensors").write_bytes(whole)
    losses, store = train(project)
    assert losses == wanted and losses[-1] < losses[0]
    saved, _ = manifests.newest(store)
    assert saved is not None and saved.quantisation == kind.partition(" ")[0]


def test_bytes_in_fp8_rest_as_they_are(models: Any, project_of: Callable[..., Project]) -> None:
    told = list[str]()
    model = planned(load_recipe(project_of(models("fp8")[0]).recipe).recipe, to_run=True, say=told.append).model
    assert "model: its weights are quantised already (`quantize: fp8`): their bytes are used as they are" in told
    names = [tensor for stage in model.stages for tensor in stage.tensors if tensor.quantised]
    assert len(names) == _MATRICES
    squares = sum(-(-tensor.shape[0] // 128) * -(-tensor.shape[1] // 128) for tensor in names)
    rests = sum(stage.packed_bytes for stage in model.stages)
    exact = sum(tensor.numel for tensor in names) + 4 * squares
    assert exact <= rests < exact + 2 * 4096 + 2 * 64 * _MATRICES  # a bank's page, and parts at multiples of 64


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_the_command_trains_generates_and_merges(
    kind: str, models: Any, project_of: Callable[..., Project], tmp_path: Path
) -> None:
    packed, decoded = models(kind)
    adapter = {"r": 4, "target_modules": ["q_proj"]}
    project = project_of(packed, changes={"train.max_steps": 2, "export": {"at_end": True}, "adapter": adapter})
    project.done("finetune", project.recipe)
    base = transformers.AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    assert streamed(packed, "bfloat16", memory=1 << 22) == streamed(decoded, "bfloat16", memory=1 << 22)
    if kind == "fp8":  # whose weights are rounded to bfloat16
        assert streamed(packed, "float32", memory=1 << 22) == pytest.approx(losses_of(base), rel=1e-2)
    project.done("generate", project.out, "--prompt", "The road", "--max-new-tokens", "3")
    run_export(store_of(project), tmp_path / "merged", [], dtype="bfloat16", merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert not hasattr(merged.config, "quantization_config") and merged.dtype == torch.bfloat16
    wanted = peft.PeftModel.from_pretrained(base, project.out / "adapter").merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value.float(), wanted[name], rtol=2**-7, atol=1e-6)
    ours, others = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", decoded))
    assert ours.keys() == others.keys()
    changed = {name for name in ours if not torch.equal(ours[name], others[name])}
    assert changed and all("q_proj" in name for name in changed)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("fp8", "all"), ("fp8", "some"), ("fp8", "decoded"), ("mxfp4", "all"),
        pytest.param("fp8 experts", "all", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_does_not_rest_quantised_is_decoded(
    kind: str, asked: str, models: Any, project_of: Callable[..., Project], tmp_path: Path
) -> None:
    """Weights that are trained, and all where the recipe says `quantize: none`. Exports are in bfloat16."""
    packed, decoded = models(kind)
    changes: dict[str, Any] = {
        "all": {"adapter": None}, "some": {"adapter": None, "freeze": ["model.layers.0"]}, "decoded": {},
    }[asked]  # fmt: skip
    wanted, theirs = train(project_of(decoded, "plain", changes))
    told = list[str]()
    project = project_of(packed, "read", changes | ({"model.quantize": "none"} if asked == "decoded" else {}))
    losses, store = train(prepared_run(project, say=told.append))
    assert losses == wanted and losses[-1] < losses[0]
    end = ", and what is exported is too" if asked == "all" else ""
    form = kind.partition(" ")[0]
    said = f"model: its weights are quantised ({form}): they are decoded to bfloat16 while they are imported{end}"
    assert (said in told) == (asked != "some")
    saved, _ = manifests.newest(store)
    assert saved is not None and saved.quantisation == (form if asked == "some" else None)
    if asked == "decoded":
        return
    for source, name in ((store, "ours"), (theirs, "theirs")):
        run_export(source, tmp_path / name, [], dtype="bfloat16")
    ours, plain_ones = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == plain_ones.keys() == load_file(decoded / "model.safetensors").keys()
    assert all(torch.equal(ours[name], plain_ones[name]) for name in ours)
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())


def test_what_a_run_leaves_alone_is_exported_decoded(models: Any) -> None:
    """As a vision tower in fp8 would be: config.json then says nothing of fp8."""
    packed, decoded = models("fp8")
    name = "model.layers.0.mlp.up_proj.weight"
    entries = {name: open_checkpoint(packed).entries[name]}
    left = Untouched(names=(name,), mark=weights_mark(entries))
    with with_untouched(left, packed, [], lambda tensor, first, count: memoryview(b"")) as (tensors, read):
        assert [(tensor.name, tensor.dtype) for tensor in tensors] == [(name, "bfloat16")]
        wanted = load_file(decoded / "model.safetensors")[name].reshape(-1)
        found = torch.frombuffer(bytearray(read(tensors[0], 100, 30_000)), dtype=torch.bfloat16)
    assert torch.equal(found, wanted[100:30_100])


def test_a_recipe_and_its_checkpoint_agree(models: Any, project_of: Callable[..., Project]) -> None:
    in_fp8, plain = models("fp8")
    refused = [
        (
            in_fp8,
            {"model.quantize": "nf4"},
            r"model\.quantize is nf4, but the checkpoint is quantised already: .*`quantize: fp8`",
        ),
        (in_fp8, {"adapter": None, "freeze": ["model.embed_tokens"]}, r"no frozen matrix in a block is one .* has in fp8"),
        (plain, {"model.quantize": "fp8"}, r"model\.quantize is fp8, but .*config\.json does not say that weights rest so"),
        (plain, {"model.quantize": "mxfp4"}, r"model\.quantize is mxfp4, but .*config\.json does not say that weights rest so"),
    ]
    for number, (model, changes, message) in enumerate(refused):
        with pytest.raises(UsageError, match=message) as caught:
            planned(load_recipe(project_of(model, f"refused-{number}", changes).recipe).recipe, to_run=True)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": None}, r"in fp8 with weight_block_size None, not \[128, 128\]"),
        ({"weight_block_size": [64, 128]}, r"in fp8 with weight_block_size \[64, 128\], not"),
        ({"fmt": "e5m2"}, r"in fp8 as e5m2, not e4m3"),
        ({"modules_to_not_convert": 3}, r"modules_to_not_convert is not a list of names"),
    ],
)
def test_other_fp8_is_refused(
    change: dict[str, Any], message: str, models: Any, project_of: Callable[..., Project], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(models("fp8")[0], tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] |= change
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        planned(load_recipe(project_of(model).recipe).recipe, to_run=True)
