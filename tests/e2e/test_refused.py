"""Tests that what cannot be trained is one error with what to do and exit code 2, from the command as a person runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fuyou_cli.core.errors import UsageError

from .conftest import NewProject, Project
from .running import manifest_of, train


def _refused(project: Project, *arguments: str) -> str:
    said = project.fuyou(*arguments)
    assert said.returncode == 2, said.stderr
    assert "Traceback" not in said.stderr and "internal error" not in said.stderr
    assert "help: " in said.stderr
    assert not list(project.folder.rglob("store.bin"))
    return said.stderr


def _model(materials: Path, target: Path) -> Path:
    return Path(shutil.copytree(materials / "model", target))


def test_a_family_that_cannot_be_streamed(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    model = _model(materials, tmp_path / "mamba")
    transformers.MambaConfig(vocab_size=322, hidden_size=32, num_hidden_layers=2).save_pretrained(model)
    (model / "model.safetensors").unlink()
    project = new_project(changes={"model.name_or_path": str(model)})
    said = _refused(project, "finetune", "recipe.yaml", "precision.compute=bfloat16")
    assert "MambaForCausalLM cannot be streamed: layers.1 takes float32" in said and "residual_in_fp32 to false" in said


def test_files_that_do_not_fit_the_model(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    """A plan says so too, each time: it would else end with the command that is refused."""
    model = _model(materials, tmp_path / "lacking")
    tensors = load_file(model / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    project = new_project(changes={"model.name_or_path": str(model)})
    said = _refused(project, "finetune", "recipe.yaml")
    for _ in range(2):
        planned = project.fuyou("plan", "recipe.yaml")
        told = " ".join(planned.stdout.split())
        assert planned.returncode == 0 and "missing: 'transformer.h.1.mlp.c_fc.weight'" in said
        assert "missing: 'transformer.h.1.mlp.c_fc.weight'" in told and "A run would be refused" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(new_project: NewProject) -> None:
    said = _refused(new_project(changes={"offload.device": "cuda"}), "plan", "recipe.yaml")
    assert "offload.device: cuda, but no CUDA device is usable" in said


def test_a_configuration_that_says_quantized(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    model = _model(materials, tmp_path / "quantized")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    said = _refused(new_project(changes={"model.name_or_path": str(model)}), "plan", "recipe.yaml")
    assert "says that it is quantized with gptq" in said


@pytest.mark.parametrize(("stored", "compute"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_a_checkpoint_with_nan(new_project: NewProject, materials: Path, tmp_path: Path, stored: str, compute: str) -> None:
    model = _model(materials, tmp_path / "damaged")
    tensors = {name: value.to(getattr(torch, stored)) for name, value in load_file(model / "model.safetensors").items()}
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    project = new_project(changes={"model.name_or_path": str(model), "precision.compute": compute})
    with pytest.raises(UsageError, match=r"model\.safetensors: 1 value of transformer\.h\.1\.mlp\.c_fc\.weight is not finite"):
        train(project)
    assert manifest_of(project).state == "loading"  # nothing to lose: the next run starts again


@pytest.mark.parametrize("config", ["llama", "gpt2"])
def test_more_layers_than_any_model_has(config: str, new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    model = _model(materials, tmp_path / "endless")
    key = {"llama": "num_hidden_layers", "gpt2": "n_layer"}[config]
    if config == "gpt2":
        transformers.GPT2Config().save_pretrained(model)
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, key: 10**9}))
    said = _refused(new_project(changes={"model.name_or_path": str(model)}), "finetune", "recipe.yaml")
    assert f"config.json: {key} is 1,000,000,000" in said


def test_one_folder_by_two_names(new_project: NewProject) -> None:
    project = new_project(changes={"offload.dir": ["disk", "disk/../disk"]})
    said = _refused(project, "plan", "recipe.yaml", "--dry-run")
    assert "offload.dir: disk and disk/../disk are the same folder" in said


def _with_code(model: Path, kind: str) -> Path:
    """Gives a model's tokenizer a class in code of its own, which would say that it was run. kind: how it is named."""
    own = "raise SystemExit('own code was run')\nclass OwnTokenizer: pass\n"
    (model / "tokenization_own.py").write_text(own)
    config = json.loads((model / "tokenizer_config.json").read_text())
    classes = [None, "tokenization_own.OwnTokenizer"]
    named = classes if kind == "list" else {"AutoTokenizer": classes}
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "auto_map": named, "tokenizer_class": "OwnTokenizer"}))
    return model


@pytest.mark.parametrize("kind", ["map", pytest.param("list", marks=pytest.mark.slow)])
def test_code_of_a_tokenizer(kind: str, new_project: NewProject, llama: Path, tmp_path: Path) -> None:
    """Names it before a plan is shown, also where the model's own code is trusted; then takes the remedy that it names."""
    model = _with_code(Path(shutil.copytree(llama, tmp_path / "own")), kind)
    project = new_project(changes={"model.name_or_path": str(model), "model.trust_remote_code": True, "train.max_steps": 2})
    said = _refused(project, "finetune", "recipe.yaml")
    assert "(tokenization_own.OwnTokenizer), and code of a tokenizer is never run, whatever model.trust_remote_code" in said
    assert "tokenizer.name_or_path" in said and "plan" not in said.partition("error:")[0]
    planned = project.fuyou("plan", "recipe.yaml")
    assert planned.returncode == 0 and "code of a tokenizer is never run" in " ".join(planned.stdout.split())
    for arguments in (("generate", str(model), "--prompt", "The"), ("data", "recipe.yaml")):
        assert "code of a tokenizer is never run" in _refused(project, *arguments)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(model / "tokenizer.json", copy)
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["auto_map"]
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}))
    project.done("finetune", "recipe.yaml", f"tokenizer.name_or_path={copy}")


def test_code_of_a_tokenizer_that_transformers_does_not_need(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    """It has a class for GPT-2, whatever the tokenizer names. The code goes into the export, for who asks for it there."""
    model = _with_code(_model(materials, tmp_path / "own"), "map")
    project = new_project(changes={"model.name_or_path": str(model), "model.trust_remote_code": True, "train.max_steps": 2})
    ran = project.fuyou("finetune", "recipe.yaml")
    assert ran.returncode == 0 and "own code (tokenization_own.OwnTokenizer) is not run" in ran.stderr, ran.stderr
    assert (project.out / "model" / "tokenization_own.py").read_bytes() == (model / "tokenization_own.py").read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(project.out / "model").eos_token == "<|end|>"
