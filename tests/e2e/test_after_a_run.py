"""Tests the commands on what a run has left: `fuyou eval`, `report` and `verify`."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.training.run import Run
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import saved_store, verify_store
from tests.damage import flip

from .conftest import NewProject, Project, WholeOf
from .running import exported, manifest_of, prepared_run, store_of, train
from .test_evaluation import EXACT, in_memory, with_sets


def test_a_model_a_store_and_an_output_folder(new_project: NewProject, whole: WholeOf, tmp_path: Path) -> None:
    """Gives the losses of transformers with the whole model in memory."""
    changes = {**EXACT, "dataset.eval_fraction": 0.1}
    project, store = new_project(changes=changes), whole(EXACT).store
    with_sets(project, changes)
    model, out = project.materials / "model", tmp_path / "trained"
    exported(store, out / "model")
    ready = prepared_run(project)
    for source, weights in ((model, model), (store, out / "model"), (out, out / "model")):
        done = project.done("eval", source, project.recipe, "--json")
        said = json.loads(done.stdout)
        assert [one["name"] for one in said["sets"]] == ["held-out", "one", "held-back"]
        for one in said["sets"]:
            assert one["loss"] == pytest.approx(in_memory(weights, ready, one["name"]), rel=1e-6), source
        assert said["memory"]["peak"] < said["memory"]["budget"] and said["passes"] == 3
    assert not project.out.exists() or not list(project.out.glob("store*"))


def test_what_a_run_told_is_told_again(new_project: NewProject) -> None:
    """`fuyou eval` of its output folder gives the loss that it ended with, `fuyou report` the figures of its log."""
    project = new_project(changes=EXACT)
    with_sets(project, EXACT)
    project.done("finetune", project.recipe)
    records = [json.loads(line) for line in (project.out / "log.jsonl").read_text().splitlines()]
    last = {record["name"]: record["loss"] for record in records if record["event"] == "eval"}
    done = project.done("eval", project.out, project.recipe)
    for name, loss in last.items():
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"{name}  loss "))
        assert float(line.split()[2]) == pytest.approx(loss, rel=1e-5)
    assert "bytes per parameter and pass" in done.stderr
    said = json.loads(project.fuyou("plan", project.recipe, "--json", "checkpoint.resume=never").stdout)["evaluation"]
    assert (said["rows"], said["passes"], said["times"]) == (8, 3, 4) and said["seconds"] == 3 * said["pass_seconds"] > 0
    shown = project.fuyou("report", project.out)
    assert shown.returncode == 0 and "6 of 6: all steps are done" in shown.stdout, shown.stderr
    assert "Predicted and measured" in shown.stdout and "One step" in shown.stdout
    told = json.loads(project.fuyou("report", project.recipe, "--json", "--html", "run.html").stdout)
    assert {step["step"]: step["loss"] for step in told["steps"]} == project.losses()
    assert told["ended"] and {line["what"] for line in told["compared"]} >= {"peak RAM", "step", "ssd read", "ssd written"}
    assert told["measured"]["written_total"] >= sum(step["written_bytes"] for step in told["steps"]) > 0
    page = (project.folder / "run.html").read_text()
    assert "The last step" in page and "compute" in page


def test_mistakes(new_project: NewProject, tmp_path: Path) -> None:
    project = new_project()
    model = project.materials / "model"
    nothing = project.fuyou("eval", model, project.recipe)
    assert nothing.returncode == 2 and "the recipe has nothing to evaluate" in nothing.stderr
    little = project.fuyou("eval", model, project.recipe, "dataset.eval_fraction=0.1", "offload.max_memory.cpu=1MiB")
    assert little.returncode == 3 and "the evaluation needs " in little.stderr
    missing = project.fuyou("eval", tmp_path, project.recipe, "dataset.eval_fraction=0.1")
    assert missing.returncode == 2 and "config.json" in missing.stderr
    confused = project.fuyou("eval", project.recipe, project.recipe)
    assert confused.returncode == 2 and "is a recipe, not a model" in confused.stderr
    if not torch.cuda.is_available():
        without = project.fuyou("eval", model, project.recipe, "dataset.eval_fraction=0.1", "offload.device=cuda")
        assert without.returncode == 2 and "finds no CUDA device" in without.stderr


def test_a_model_of_nan_is_told_in_valid_json(new_project: NewProject, tmp_path: Path) -> None:
    project, folder = new_project(), tmp_path / "model"
    shutil.copytree(project.materials / "model", folder)
    (file,) = folder.glob("*.safetensors")
    weights = {name: tensor.fill_(math.nan) for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    done = project.done("eval", folder, project.recipe, "dataset.eval_fraction=0.5", "--json")
    (told,) = json.loads(done.stdout, parse_constant=pytest.fail)["sets"]
    assert told["loss"] is None and told["perplexity"] is None


# ---- fuyou verify ------------------------------------------------------------------------------------------------------


def _content(store: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in store.iterdir() if path.is_file()}


def test_an_intact_store_is_read_and_not_changed(stopped: Project) -> None:
    before = _content(store_of(stopped))
    done = stopped.fuyou("verify", stopped.out / "store")
    assert before == _content(store_of(stopped))
    extents = sum(len(stage.extents()) for stage in manifest_of(stopped).stages)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(f"state after step 2: {extents} extents, ")
    assert "the state before it, after step 1: " in done.stdout and "all checksums match" in done.stdout


def test_damage_is_named(stopped: Project) -> None:
    saved = manifest_of(stopped)
    extent = saved.stages[2].variance
    assert extent is not None
    flip(Path(saved.files[0]), extent.offset + extent.size - 1)
    done = stopped.fuyou("verify", store_of(stopped))
    assert done.returncode == 1
    assert f"variance of {saved.stages[2].name}: bytes {extent.offset} to {extent.offset + extent.size}" in done.stdout
    assert saved.files[0] in done.stdout and "continues from the state after step 1, which is intact" in done.stdout
    data = json.loads(stopped.fuyou("verify", store_of(stopped), "--json").stdout)
    assert [(state["step"], state["older"], len(state["damages"])) for state in data["states"]] == [(2, False, 1), (1, True, 0)]
    assert data["states"][0]["damages"][0]["tensor"] == "variance"


def test_a_store_in_use_and_none_at_all(stopped: Project, tmp_path: Path) -> None:
    looked: list[bool] = []

    def look(run: Run) -> None:
        if not looked:  # who comes waits a second for whoever was killed to be gone
            with pytest.raises(FuyouError, match="is in use by a running fuyou"):
                verify_store(saved_store(store_of(stopped)))
            looked.append(True)

    train(stopped, look)
    assert looked
    refused = stopped.fuyou("verify", tmp_path)
    assert refused.returncode == 2 and f"there is no store in {tmp_path}" in refused.stderr


def test_a_copy_is_not_taken_for_the_store_whose_files_it_names(stopped: Project, tmp_path: Path) -> None:
    """Refuses it even where it is the copy that is damaged: nobody would read it."""
    store, copy = store_of(stopped), tmp_path / "backup" / store_of(stopped).name
    shutil.copytree(store, copy)
    (copy / "store.bin").write_bytes(b"")
    for words in (
        ("verify", copy),
        ("export", copy, tmp_path / "model"),
        ("finetune", stopped.recipe, f"checkpoint.resume={copy}"),
    ):
        done = stopped.fuyou(*words)
        assert done.returncode == 2 and f"{copy} is a copy of the store in {store}" in " ".join(done.stderr.split()), (
            done.stderr
        )
    assert not (tmp_path / "model").exists() and manifest_of(stopped).step == 2


def test_a_store_that_was_used_since_its_manifest_was_read(stopped: Project) -> None:
    """As by a run that takes a step before the store is locked: what was read may name what is overwritten. The same manifest
    in another file, as some file systems number files anew, is the same."""
    saved = saved_store(store_of(stopped))
    manifests.write(saved.folder, saved.manifest, amends=True)
    assert verify_store(saved)[0].is_whole
    manifests.write(saved.folder, replace(saved.manifest, written_total=saved.manifest.written_total + 1), amends=True)
    with pytest.raises(UsageError, match="another process has used the store"):
        verify_store(saved)
    assert verify_store(saved_store(saved.folder))[0].is_whole
