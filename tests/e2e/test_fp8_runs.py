"""Checkpoints in fp8: an adapter over their own bytes has the losses of one over the decoded weights, bit for bit, and what is
trained begins with these.

Costs about 25 s of one core."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuyou_cli.checkpoint.files import open_checkpoint
from fuyou_cli.checkpoint.reader import weights_mark
from fuyou_cli.cli.stores import run_export
from fuyou_cli.core.errors import Interrupted, UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.exporting import with_untouched
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.manifest import Untouched
from tests.quantised_checkpoint import fp8, of_fp8

from .conftest import NewProject, Project
from .running import interrupt, planned, prepared_run, store_of, train
from .test_inference import losses_of, streamed

peft = pytest.importorskip("peft", reason="peft comes with the extra lora")

_MATRICES = 14  # of both blocks


@pytest.fixture(scope="session")
def plain(materials: Path) -> Path:
    """Makes a Qwen3 in bfloat16 whose matrices have several squares, the last of them cut."""
    import transformers

    folder = materials / "plain-qwen3"
    config = transformers.Qwen3Config(
        vocab_size=len(transformers.AutoTokenizer.from_pretrained(materials / "model")), num_hidden_layers=2, hidden_size=136,
        intermediate_size=260, num_attention_heads=4, num_key_value_heads=2, head_dim=36, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=0, pad_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(materials / "model" / file, folder / file)
    return folder


def _copied(plain: Path, folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], said: Any) -> Path:
    shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    chosen = {name for name, value in tensors.items() if "layers." in name and value.dim() == 2}
    found = [change(name, value) if name in chosen else {name: value} for name, value in tensors.items()]
    save_file({name: value for one in found for name, value in one.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | said))
    return folder


@pytest.fixture(scope="session")
def in_fp8(plain: Path, materials: Path) -> Path:
    """Makes the model with the matrices of its blocks in fp8."""
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

    def change(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales = fp8(value)
        return {name: codes, f"{name}_scale_inv": scales}

    return _copied(plain, materials / "fp8-qwen3", change, {"quantization_config": said})


@pytest.fixture(scope="session")
def decoded(plain: Path, materials: Path) -> Path:
    """Makes the model of which the other's codes are, in bfloat16."""
    return _copied(plain, materials / "decoded-qwen3", lambda name, value: {name: of_fp8(*fp8(value)).bfloat16()}, {})


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


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "emulated"])
def test_an_adapter_over_fp8_has_the_losses_of_one_over_decoded_weights(
    device: str, in_fp8: Path, decoded: Path, project_of: Callable[..., Project]
) -> None:
    changes = {"offload.device": device, "adapter": {"r": 4, "use_dora": device == "cpu"}}  # magnitudes begin as norms
    wanted, _ = train(project_of(decoded, "decoded", changes))
    told = list[str]()
    project = project_of(in_fp8, "fp8", changes)
    losses, store = train(project)
    assert losses == wanted and losses[-1] < losses[0]
    saved, _ = manifests.newest(store)
    assert saved is not None and saved.quantisation == "fp8"
    recipe = load_recipe(project.recipe).recipe
    model = planned(recipe, to_run=True, say=told.append).model
    assert "model: its weights are quantised already (`quantize: fp8`): their bytes are used as they are" in told
    names = [tensor for stage in model.stages for tensor in stage.tensors if tensor.quantised]
    assert len(names) == _MATRICES
    squares = sum(-(-tensor.shape[0] // 128) * -(-tensor.shape[1] // 128) for tensor in names)
    rests = sum(stage.packed_bytes for stage in model.stages)
    exact = sum(tensor.numel for tensor in names) + 4 * squares
    assert exact <= rests < exact + 2 * 4096 + 2 * 64 * _MATRICES  # a bank's page, and parts at multiples of 64


def test_a_stopped_run_continues_unless_a_scale_of_its_files_changed(
    in_fp8: Path, project_of: Callable[..., Project], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(in_fp8, tmp_path / "model"))
    wanted, _ = train(project_of(model, "whole"))
    stopped = project_of(model, "stopped")
    with pytest.raises(Interrupted):
        train(stopped, interrupt(3, "backward"))
    whole = (model / "model.safetensors").read_bytes()
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][0] *= 2
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="weights"):
        prepared_run(stopped)
    (model / "model.safetensors").write_bytes(whole)
    assert train(stopped)[0] == wanted


def test_the_command_trains_generates_and_merges(
    in_fp8: Path, decoded: Path, project_of: Callable[..., Project], tmp_path: Path
) -> None:
    import transformers

    project = project_of(in_fp8, changes={"train.max_steps": 2, "export": {"at_end": True}})
    ended = project.fuyou("finetune", project.recipe)
    assert ended.returncode == 0, ended.stderr
    base = transformers.AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    assert streamed(in_fp8, "bfloat16", memory=1 << 22) == streamed(decoded, "bfloat16", memory=1 << 22)
    exact = streamed(in_fp8, "float32", memory=1 << 22)
    assert exact == pytest.approx(losses_of(base), rel=1e-2)  # whose weights are rounded to bfloat16
    wrote = project.fuyou("generate", project.out, "--prompt", "The road", "--max-new-tokens", "3")
    assert wrote.returncode == 0, wrote.stderr
    run_export(store_of(project), tmp_path / "merged", [], dtype="bfloat16", merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert not hasattr(merged.config, "quantization_config") and merged.dtype == torch.bfloat16
    wanted = peft.PeftModel.from_pretrained(base, project.out / "adapter").merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value.float(), wanted[name], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("asked", ["all", "some", "decoded"])
def test_what_does_not_rest_in_fp8_is_decoded(
    asked: str, in_fp8: Path, decoded: Path, project_of: Callable[..., Project], tmp_path: Path
) -> None:
    """Weights that are trained, and all where the recipe says `quantize: none`. Exports are in bfloat16."""
    changes: dict[str, Any] = {
        "all": {"adapter": None}, "some": {"adapter": None, "freeze": ["model.layers.0"]}, "decoded": {},
    }[asked]  # fmt: skip
    wanted, theirs = train(project_of(decoded, "plain", changes))
    told = list[str]()
    project = project_of(in_fp8, "read", changes | ({"model.quantize": "none"} if asked == "decoded" else {}))
    losses, store = train(prepared_run(project, say=told.append))
    assert losses == wanted and losses[-1] < losses[0]
    end = ", and what is exported is too" if asked == "all" else ""
    said = f"model: its weights are quantised (fp8): they are decoded to bfloat16 while they are imported{end}"
    assert (said in told) == (asked != "some")
    saved, _ = manifests.newest(store)
    assert saved is not None and saved.quantisation == ("fp8" if asked == "some" else None)
    if asked == "decoded":
        return
    for source, name in ((store, "ours"), (theirs, "theirs")):
        run_export(source, tmp_path / name, [], dtype="bfloat16")
    ours, plain_ones = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == plain_ones.keys() and all(torch.equal(ours[name], plain_ones[name]) for name in ours)
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())


def test_what_a_run_leaves_alone_is_exported_decoded(in_fp8: Path, decoded: Path) -> None:
    """As a vision tower in fp8 would be: config.json then says nothing of fp8."""
    name = "model.layers.0.mlp.up_proj.weight"
    entries = {name: open_checkpoint(in_fp8).entries[name]}
    left = Untouched(names=(name,), mark=weights_mark(entries))
    with with_untouched(left, in_fp8, [], lambda tensor, first, count: memoryview(b"")) as (tensors, read):
        assert [(tensor.name, tensor.dtype) for tensor in tensors] == [(name, "bfloat16")]
        wanted = load_file(decoded / "model.safetensors")[name].reshape(-1)
        found = torch.frombuffer(bytearray(read(tensors[0], 100, 30_000)), dtype=torch.bfloat16)
    assert torch.equal(found, wanted[100:30_100])


def test_a_recipe_and_its_checkpoint_agree(in_fp8: Path, plain: Path, project_of: Callable[..., Project]) -> None:
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
    change: dict[str, Any], message: str, in_fp8: Path, project_of: Callable[..., Project], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(in_fp8, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] |= change
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        planned(load_recipe(project_of(model).recipe).recipe, to_run=True)
