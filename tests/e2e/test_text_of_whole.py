"""Tests text training of a model that also takes images: its vision tower is nowhere but in the exports, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fuyou_cli.cli.app import main
from fuyou_cli.cli.stores import run_export
from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.batches import collate
from fuyou_cli.engine.anatomy import dissect, frozen
from fuyou_cli.engine.skeleton import build, load_config
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.schema import AdapterSection
from fuyou_cli.training.evaluation import kept_step
from fuyou_cli.training.exporting import export_store, how_to_load
from fuyou_cli.training.report import BestReport
from fuyou_cli.training.state.at_rest import saved_store

from .conftest import NewProject, copy_tokenizer
from .running import interrupt, loaded_run, planned, prepared_run, stop, train
from .test_inference import in_memory, streamed

TOWER = ("model.vision_tower", "model.multi_modal_projector")
BESIDE = ("vision_tower.", "multi_modal_projector.")  # what a checkpoint calls them


@pytest.fixture(scope="module")
def whole_gemma(materials: Path) -> Path:
    """Makes a Gemma 3 as the hub has it: a vision tower, bfloat16, names of an older transformers."""
    folder = materials / "gemma3"
    tokenizer = transformers.AutoTokenizer.from_pretrained(materials / "model")
    small: dict[str, Any] = {"num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    text = {"num_hidden_layers": 2, "vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.Gemma3Config(
        text_config={**small, **text, "bos_token_id": 0, "eos_token_id": 0},
        vision_config={**small, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4,
        image_token_id=len(tokenizer) - 1, boi_token_id=len(tokenizer) - 2, eoi_token_id=len(tokenizer) - 3,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.Gemma3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    copy_tokenizer(materials, folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return folder


def write_gemma4(folder: Path, tokenizer: Path) -> Path:
    """A Gemma 4 as the hub has it: what its blocks multiply their outputs by is in no parameter."""
    size = len(transformers.AutoTokenizer.from_pretrained(tokenizer))
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
    text = {"num_hidden_layers": 2, "vocab_size": size, "num_key_value_heads": 1, "global_head_dim": 16, "sliding_window": 8}
    config = transformers.Gemma4Config(
        text_config={**small, **text, "hidden_size_per_layer_input": 0, "bos_token_id": 0, "eos_token_id": 0},
        vision_config={**small, "num_hidden_layers": 1, "num_key_value_heads": 2}, image_token_id=size - 1,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Gemma4ForConditionalGeneration(config)
    for number, block in enumerate(model.model.language_model.layers):
        block.layer_scalar.fill_(0.3 + number)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tokenizer / file).read_bytes())
    return folder


def test_buffers_are_the_checkpoints(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    """They are loaded to train, to resume and to compute with a store, and are in the exports."""
    own = write_gemma4(tmp_path / "own", materials / "model")
    changes = {"model.name_or_path": str(own), "precision.compute": "float32", "export.at_end": False}
    project = new_project(changes={**changes, "train.max_steps": 2})
    ready = prepared_run(project)
    batch = collate(ready.rows, ready.sampler.batch(0), pad_id=ready.rows.summary.pad_id, max_len=24)
    ids, labels = batch.tensors()
    stop(project, interrupt(2, "forward"))
    losses, store = train(project)
    begun = transformers.AutoModelForImageTextToText.from_pretrained(own, dtype=torch.float32)
    assert losses[0] == pytest.approx(begun(input_ids=ids, labels=labels).loss.item(), rel=1e-6)
    export_store(saved_store(store), out := tmp_path / "out", dtype="float32", max_shard_size=1 << 30)
    scales = {name: value.item() for name, value in tensors(out).items() if name.endswith("layer_scalar")}
    assert sorted(scales.values()) == pytest.approx([0.3, 1.3])
    assert streamed(store) == pytest.approx(in_memory(out), rel=1e-6)
    (own / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="what was not trained is in the model's checkpoint"):
        streamed(store)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def beside(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if name.startswith(BESIDE)}


def test_exports_have_the_tower_as_it_was(new_project: NewProject, whole_gemma: Path) -> None:
    asked = {"train.max_steps": 2, "export": {"at_end": False, "dtype": "bfloat16"}, "eval": {"keep_best": True}}
    changes = {"model.name_or_path": str(whole_gemma), "dataset.eval_fraction": 0.1, **asked}
    project, said = new_project(changes=changes), list[str]()
    model = planned(load_recipe(project.recipe).recipe, say=said.append).model
    assert not any("vision" in stage.name for stage in model.stages)
    (note,) = [text for text in said if "only text is trained" in text]
    assert all(part in note for part in TOWER)
    _, store = train(project)
    out = project.folder / "again"
    export_store(saved_store(store), out, dtype="float32", max_shard_size=100_000)
    before, after = beside(tensors(whole_gemma)), tensors(out)
    assert before and (out / "model.safetensors.index.json").is_file() and (out / "preprocessor_config.json").is_file()
    for written in (after, tensors(project.out / "best")):
        assert {n: v.view(torch.uint8).tolist() for n, v in beside(written).items()} == {
            n: v.view(torch.uint8).tolist() for n, v in before.items()
        }
    loaded, told = transformers.AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert type(loaded).__name__ == "Gemma3ForConditionalGeneration" and not any(told.values())
    whole_gemma.rename(whole_gemma.with_name("away"))
    third, away = project.folder / "third", whole_gemma.with_name("away")
    try:
        with pytest.raises(UsageError, match="what was not trained is in the model's checkpoint"):
            export_store(saved_store(store), third, dtype="float32", max_shard_size=100_000)
        run_export(project.recipe, third, [f"model.name_or_path={away}"], dtype="bfloat16")
        assert {n: v.tolist() for n, v in beside(tensors(third)).items()} == {n: v.tolist() for n, v in before.items()}
    finally:
        away.rename(whole_gemma)


@pytest.mark.slow
def test_a_run_goes_on_where_its_model_is_now(new_project: NewProject, whole_gemma: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_gemma, own := tmp_path / "own")
    asked = {"train.max_steps": 2, "export": {"at_end": False, "dtype": "bfloat16"}, "model.name_or_path": str(own)}
    project = new_project(changes=asked)
    train(project)
    moved = own.rename(tmp_path / "moved")
    words = ["finetune", project.recipe, f"model.name_or_path={moved}", "export.at_end=true"]
    done = project.fuyou(*words)
    assert done.returncode == 0 and beside(tensors(project.out / "model")), done.stderr
    shutil.rmtree(project.out / "model")
    for file in moved.glob("*.safetensors"):
        file.unlink()
    refused = project.fuyou(*words)
    assert refused.returncode == 2 and "what was not trained" in refused.stderr
    assert "model.name_or_path=FOLDER" in refused.stderr and "writes the model elsewhere" not in refused.stderr


def test_a_tower_that_changes_under_a_run_is_not_copied(new_project: NewProject, whole_gemma: Path, tmp_path: Path) -> None:
    """The best copy before stays, and a note says why."""
    own, reports = tmp_path / "own", list[BestReport]()
    shutil.copytree(whole_gemma, own)
    changes = {
        "model.name_or_path": str(own),
        "train.max_steps": 3,
        "dataset.eval_fraction": 0.1,
        "precision.compute": "float32",
    }
    evaluated = {"eval": {"every_steps": 1, "keep_best": True}, "lr_scheduler": {"name": "constant"}}
    project = new_project(changes={**changes, **evaluated})

    def heard(report: object) -> None:
        if isinstance(report, BestReport):
            reports.append(report)
            if len(reports) == 1:
                for file in own.glob("*.safetensors"):
                    kept = load_file(file)
                    other = {name: value + 1 if name.startswith(BESIDE) else value for name, value in kept.items()}
                    save_file(other, file, metadata={"format": "pt"})  # every tensor stays where it was
            elif len(reports) == 2:
                own.rename(own.with_name("gone"))

    with loaded_run(project) as run:
        run.train(lambda report: None, heard)
    good, changed, gone = reports
    assert not good.problem and kept_step(project.out / "best") == good.step
    assert "does not hold the parts of the model that were not trained as they were" in changed.problem
    assert "what was not trained is in the model's checkpoint" in gone.problem


def test_an_adapter_goes_into_the_text(whole_gemma: Path) -> None:
    from fuyou_cli.adapters.injection import inject, lora_layers

    pytest.importorskip("peft", reason="peft comes with the extra lora")
    for targets in ("all-linear", ["q_proj"]):
        model = build(load_config(whole_gemma), dtype="float32", attention="sdpa")
        config = inject(model, AdapterSection(r=2, target_modules=targets))
        names = [name for name, _ in lora_layers(model)]
        assert len(names) == (14 if targets == "all-linear" else 2)
        assert all(name.startswith("model.language_model.layers.") for name in names)
        assert config.exclude_modules is not None  # so whoever loads it leaves the tower out too
        stages = dissect(model, marked=True).stages
        assert sum(stage.trained > 0 for stage in stages) == 2
    with pytest.raises(UsageError, match="does not run on text"):
        inject(build(load_config(whole_gemma), dtype="float32", attention="sdpa"), AdapterSection(modules_to_save=["fc1"]))


def test_an_adapter_is_loaded_by_the_class_of_its_model(whole_gemma: Path, materials: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "somewhere"}')
    for model, name in ((whole_gemma, "AutoModelForMultimodalLM"), (materials / "model", "AutoModelForCausalLM")):
        shutil.copytree(model, (store := tmp_path / name) / "companions")
        assert f"  base = {name}.from_pretrained('somewhere'," in str(how_to_load(tmp_path, store))
    assert how_to_load(materials / "model", store) is None


def test_what_is_frozen_anyway_may_be_named(whole_gemma: Path) -> None:
    anatomy = dissect(build(load_config(whole_gemma), dtype="float32", attention="sdpa"))
    assert not any(stage.frozen for stage in frozen(anatomy, ["model.vision_tower"]).stages)


@pytest.mark.slow
def test_eval_and_generate(whole_gemma: Path, new_project: NewProject, capsys: pytest.CaptureFixture[str]) -> None:
    project = new_project(changes={"dataset.eval_fraction": 0.1})
    for words in (["eval", project.recipe], ["generate", "--prompt", "The road", "--max-new-tokens", "6", "--json"]):
        with pytest.raises(SystemExit) as ended:
            main([words[0], str(whole_gemma), *map(str, words[1:])])
        said = capsys.readouterr()
        assert ended.value.code == 0, said.err
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole_gemma)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(whole_gemma)
    given = tokenizer("The road", return_tensors="pt")["input_ids"]
    expected = model.generate(input_ids=given, max_new_tokens=6, do_sample=False)[0, given.shape[1] :]
    generated = json.loads(said.out)["generated"]
    assert generated == tokenizer.decode(expected, skip_special_tokens=True)
