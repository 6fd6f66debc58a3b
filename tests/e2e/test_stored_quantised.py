"""Checkpoints that bitsandbytes has quantised: their bytes are the bytes of a run that quantises the same weights itself.

Costs about 12 s of one core."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fuyou_cli.cli.stores import run_export
from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.manifest import Manifest
from tests.quantised_checkpoint import write_quantised

from . import test_adapter_runs as adapter_runs
from .conftest import NewProject, Project, write_llama
from .running import planned, prepared_run, store_of, train
from .test_inference import losses_of, streamed
from .test_quantised_runs import with_decoded

peft = pytest.importorskip("peft", reason="peft comes with the extra lora")

KINDS = ("nf4_double", "int8", "nf4")
_Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="session")
def plain(materials: Path) -> Path:
    """Makes a model in bfloat16 whose matrices end within a block of 64."""
    folder = write_llama(materials, "plain-llama", hidden_size=40, intermediate_size=52)
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def project_of(new_project: NewProject) -> NewProject:
    """Gives project_of(folder with a model, name, {dotted key: value}), which trains an adapter."""

    def make(model: Path, name: str = "project", changes: dict[str, Any] | None = None) -> Project:
        usual = {
            "model.name_or_path": str(model), "adapter": {"r": 4}, "precision": {"compute": "float32"}, "train.max_steps": 5,
            "export.at_end": False, "offload.optimizer_states": "cpu", "offload.gradients": "cpu",
        }  # fmt: skip
        return new_project(name, usual | (changes or {}))

    return make


def _asks(kind: str) -> dict[str, Any]:
    return {"model.quantize": kind.removesuffix("_double")} | ({"model.double_quant": True} if kind == "nf4_double" else {})


def _saved(store: Path) -> Manifest:
    saved, _ = manifests.newest(store)
    assert saved is not None
    return saved


@pytest.mark.parametrize("kind", every(3, KINDS))
def test_losses_and_bytes_are_those_of_a_run_that_quantises(
    kind: str, plain: Path, project_of: NewProject, tmp_path: Path
) -> None:
    """The recipe says nothing of a format, and a DoRA's magnitudes begin as norms of decoded weights."""
    model = write_quantised(plain, tmp_path / "stored", kind)
    changes = {"adapter": {"r": 4, "use_dora": True}, "precision.compute": "bfloat16"}
    wanted, own = train(project_of(plain, "own", changes | _asks(kind)))
    losses, store = train(project_of(model, "stored-run", changes))
    assert losses == wanted and losses[-1] < losses[0]
    ours, theirs = _saved(store), _saved(own)
    assert ours.quantisation == theirs.quantisation == kind
    assert [list(stage.extents()) for stage in ours.stages] == [list(stage.extents()) for stage in theirs.stages]


def test_a_recipe_and_its_checkpoint_agree(plain: Path, project_of: NewProject, tmp_path: Path) -> None:
    model, told = write_quantised(plain, tmp_path / "stored", "nf4"), list[str]()
    recipe = load_recipe(project_of(model, changes=_asks("nf4")).recipe).recipe
    assert planned(recipe, to_run=True, say=told.append).model.quantisation == "nf4"
    assert "model: its weights are quantised already (`quantize: nf4`): their bytes are used as they are" in told
    refused = [
        (
            {"model.quantize": "int8"},
            r"model\.quantize is int8, but the checkpoint is quantised already: .*says `quantize: nf4`",
        ),
        ({"model.quantize": "none"}, r"model\.quantize is none, but the checkpoint is quantised already"),
        (_asks("nf4_double"), r"model\.double_quant is true, but the checkpoint is quantised already"),
        ({"adapter": None}, r"config\.json says that the weights are quantised: .*every parameter is trained"),
        ({"adapter": None, "freeze": ["model.layers.0"]}, r"has quantised 'model\.layers\.1\.mlp\..*: only frozen matrices"),
    ]
    for number, (changes, message) in enumerate(refused):
        with pytest.raises(UsageError, match=message) as caught:
            planned(load_recipe(project_of(model, f"refused-{number}", changes).recipe).recipe, to_run=True)
        assert caught.value.hint


def test_a_quantised_head_is_refused_by_name(plain: Path, project_of: NewProject, tmp_path: Path) -> None:
    model = write_quantised(plain, tmp_path / "stored", "nf4", head=True)
    with pytest.raises(UsageError, match=r"has quantised 'lm_head\.weight': only frozen matrices") as caught:
        planned(load_recipe(project_of(model).recipe).recipe, to_run=True)
    assert caught.value.hint is not None and "quantise the model again without them" in caught.value.hint


def test_files_say_which_weights_are_quantised(plain: Path, project_of: NewProject, tmp_path: Path) -> None:
    """Without files, the configuration does. A plan by it is not run where the files say something else."""
    model = write_quantised(plain, tmp_path / "stored", "nf4", left=["q_proj", "layers.1.mlp"], told=["k_proj"])
    project = project_of(model)
    recipe = load_recipe(project.recipe).recipe

    def names(kind: Callable[..., Any]) -> set[str]:
        return {t.name.replace(".base_layer.", ".") for s in kind.model.stages for t in s.tensors if t.quantised}  # type: ignore[attr-defined]

    with safe_open(model / "model.safetensors", "np") as file:
        there = {key.removesuffix(".absmax") for key in file.keys() if key.endswith(".absmax")}  # noqa: SIM118
    assert names(planned(recipe, to_run=True)) == there
    losses, _ = train(project)
    assert losses[-1] < losses[0]
    (model / "model.safetensors").rename(tmp_path / "aside")
    by_config = names(planned(recipe))
    assert len(by_config) == 12 and not any("k_proj" in name for name in by_config) and f"{_Q}.weight" in by_config


def test_what_configuration_and_files_do_not_agree_on(plain: Path, project_of: NewProject, tmp_path: Path) -> None:
    double = write_quantised(plain, tmp_path / "double", "nf4_double")
    config = json.loads((double / "config.json").read_text())
    changes = [
        ({"bnb_4bit_use_double_quant": False}, r"says `quantize: nf4`, but .* is `quantize: nf4, double_quant: true`"),
        (None, r"14 weights in the files of .* are quantised, and config\.json does not say so"),
    ]
    for number, (change, message) in enumerate(changes):
        said = None if change is None else config["quantization_config"] | change
        (double / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
        with pytest.raises(UsageError, match=message):
            prepared_run(project_of(double, f"changed-{number}"))
    (double / "config.json").write_text(json.dumps(config))
    (double / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    with pytest.raises(UsageError, match=r"says that the weights are quantised, but no tensor in its files is"):
        prepared_run(project_of(double, "plain-files"))


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_a_model_is_computed_without_training(kind: str, plain: Path, tmp_path: Path) -> None:
    import transformers

    model = write_quantised(plain, tmp_path / "stored", kind)
    wanted = with_decoded(kind, transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    assert streamed(model, "float32") == pytest.approx(losses_of(wanted), rel=1e-6)


def test_the_command_trains_and_merges(plain: Path, project_of: NewProject, tmp_path: Path) -> None:
    import transformers

    kind = "nf4_double"
    model = write_quantised(plain, tmp_path / "stored", kind)
    project = project_of(model, changes={"train.max_steps": 2, "export": {"at_end": True, "dtype": "float32"}})
    ended = project.done("finetune", project.recipe)
    assert "weights are quantised already (`quantize: nf4, double_quant: true`)" in ended.stderr
    saved = json.loads((project.out / "adapter" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(model)
    base = with_decoded(kind, transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    wanted = peft.PeftModel.from_pretrained(base, project.out / "adapter").merge_and_unload().state_dict()
    run_export(store_of(project), tmp_path / "merged", [], dtype="float32", merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert not hasattr(merged.config, "quantization_config")
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_the_library_writes_the_same_file_and_has_the_same_losses(
    kind: str, plain: Path, project_of: NewProject, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="files and losses are compared with the library's own where it is")
    import transformers

    asked: dict[str, Any] = {"load_in_8bit": True}
    if kind != "int8":
        asked = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind == "nf4_double"}
    settings = transformers.BitsAndBytesConfig(**asked, bnb_4bit_compute_dtype=torch.float32)
    dtype = torch.float16 if kind == "int8" else torch.bfloat16
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = write_quantised(plain, tmp_path / "ours", kind)
    ours = load_file(model / "model.safetensors")
    load(plain, quantization_config=settings, device_map="cpu", dtype=dtype).save_pretrained(model)
    theirs = load_file(model / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert value.dtype == torch.float16 or torch.equal(value, ours[name]), name
    project = project_of(model, changes={"train.max_steps": adapter_runs.STEPS})
    ready = prepared_run(project)
    assert ready.planned.recipe.adapter is not None
    keys = ready.planned.recipe.adapter.model_dump(exclude={"type"}) | {"modules_to_save": None}
    torch.manual_seed(ready.planned.recipe.seed)
    base = load(model, device_map="cpu", dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **keys)).train()
    assert train(project)[0] == pytest.approx(list(adapter_runs.steps_in_memory(ready, adapted)), rel=1e-3)
