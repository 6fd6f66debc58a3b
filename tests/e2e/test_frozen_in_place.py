"""Tests recipes with `freeze`: the same run as plain PyTorch with `requires_grad=False`; frozen weights that are read from the
checkpoint's own files have the bits of a copy in the store, and no copy."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from drawn import every
from safetensors.torch import load_file, save_file

from fuyou_cli.cli.stores import run_export
from fuyou_cli.core.errors import FuyouError, ModelFileError, UsageError
from fuyou_cli.core.units import gb
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.report import StepReport
from fuyou_cli.training.run import Run
from fuyou_cli.training.state.at_rest import at_rest, saved_store, to_check, verify_store
from fuyou_cli.training.state.manifest import Manifest
from tests.damage import flip

from .conftest import NewProject, Project, WholeOf
from .running import exported, interrupt, loaded_run, manifest_of, planned, prepared_run, run_of, stop, store_of, sums, train

STEPS = 3
FROZEN = {
    "freeze": ["transformer.h.0.*", "transformer.h.1.mlp.*"], "train.max_steps": STEPS, "precision.compute": "float32",
    "checkpoint.commit_every_steps": 1,
}  # fmt: skip


@pytest.fixture
def model(materials: Path, tmp_path: Path) -> Path:
    """Makes a copy of the model, which a test may change."""
    return Path(shutil.copytree(materials / "model", tmp_path / "model"))


@pytest.fixture
def frozen(new_project: NewProject, model: Path) -> NewProject:
    def make(name: str = "project", changes: dict[str, Any] | None = None) -> Project:
        return new_project(name, {"model.name_or_path": str(model)} | FROZEN | (changes or {}))

    return make


def weights_of(model: Path) -> Path:
    return model / "model.safetensors"


def test_a_copy_in_the_store_gives_the_same_bits(frozen: NewProject, tmp_path: Path) -> None:
    """Uses two drives, and so a copy; with one, the store has no place for them, and a step reads what the plan says."""
    two = frozen("two", {"offload.dir": [str(tmp_path / "a"), str(tmp_path / "b")]})
    copied = prepared_run(two).planned
    assert not copied.model.sources
    assert "striped over several drives" in copied.model.imported_because
    project = frozen()
    ready = prepared_run(project)
    plan, model = ready.planned.plan, ready.planned.model
    assert not model.imported_because
    assert sum(stage.frozen_extent is not None for stage in copied.plan.stages) == 2
    assert not any(stage.frozen_extent for stage in plan.stages)
    wanted, store = train(two)
    reports = list[StepReport]()
    with loaded_run(ready) as run:
        assert run.daemon.counters().written_bytes == sum(stage.trained_weight_bytes for stage in model.stages)
        before = run.daemon.counters().read_bytes
        run.train(reports.append)
        assert run.losses == wanted
        read, a_step = run.daemon.counters().read_bytes - before, plan.predicted.read_per_step
        kept = sum(stage.frozen_weight_bytes for stage in model.stages if stage.kind == "block")  # by one step for the next
        assert 0.7 * STEPS * a_step < read <= STEPS * a_step + kept  # the first step reads no states
    assert trained_sums(store_of(project)) == trained_sums(store)


def trained_sums(store: Path) -> list[tuple[str, str, int]]:
    return [one for one in sums(store) if one[1] != "frozen"]


@pytest.mark.parametrize("how", every(2, ["touched", "renamed", "cut", "gone"]))
def test_a_file_that_changes_between_runs_is_named(how: str, frozen: NewProject, model: Path) -> None:
    """Shows that a copy cannot be compared in a run that does not sum what it reads."""
    compares = how in ("cut", "gone")
    project, file = frozen(changes={"offload.verify_reads": compares}), weights_of(model)
    stop(project, interrupt(2, "forward"))
    status = file.stat()
    if how == "touched":
        os.utime(file, ns=(0, status.st_mtime_ns + 1))
    elif how == "renamed":  # two tensors of one shape take each other's name
        names = b"h.0.ln_1.bias", b"h.1.ln_1.bias", b"h.-.ln_1.bias"
        content = file.read_bytes()
        for old, new in ((names[0], names[2]), (names[1], names[0]), (names[2], names[1])):
            content = content.replace(old, new, 1)
        file.write_bytes(content)
        os.utime(file, ns=(0, status.st_mtime_ns))
    elif how == "cut":
        os.truncate(file, status.st_size - 1)
    else:
        file.rename(file.with_name("elsewhere"))
    with pytest.raises(UsageError, match="from the model's files, and one has changed") as caught:
        prepared_run(project)
    assert str(model if compares else file) in caught.value.message
    if compares:  # a copy will do
        assert "put the file" in str(caught.value.hint) and "time" not in str(caught.value.hint)


@pytest.mark.parametrize("content", ["the same", "another"])
def test_a_copy_of_a_file_is_compared_with_what_was_read(content: str, frozen: NewProject, model: Path, whole: WholeOf) -> None:
    """It has another time of change."""
    project, file = frozen("changed"), weights_of(model)
    stop(project, interrupt(2, "forward"))
    if content == "another":
        put_another_byte(file, manifest_of(project))
    os.utime(file, ns=(0, 7))
    said: list[str] = []
    if content == "another":
        with pytest.raises(UsageError, match=f"{file}: its content is not what the saved run has read"):
            train(project, say=said.append)
        assert manifest_of(project).step == 1
    else:
        losses, again = train(project, say=said.append)
        assert (losses, trained_sums(again)) == (whole(FROZEN).losses, trained_sums(whole(FROZEN).store))
        assert manifest_of(project).sources[0].changed == 7
    assert any(f"{file} has another time of change: comparing" in text for text in said)


def test_a_file_with_the_weights_of_another_model_is_named(frozen: NewProject, model: Path) -> None:
    from safetensors.torch import load_file, save_file

    project, file = frozen(), weights_of(model)
    stop(project, interrupt(2, "forward"))
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=f"the weights it began with .* changed since it was saved: '{file}'"):
        train(project)


def test_a_run_that_does_not_start_leaves_no_store(frozen: NewProject, model: Path) -> None:
    project = frozen()
    ready = prepared_run(project)
    os.utime(weights_of(model), ns=(0, 7))
    with pytest.raises(UsageError, match="has changed"):
        run_of(ready)
    assert not list(project.out.rglob("store.bin"))


@pytest.mark.parametrize("how", every(2, ["touched", "gone", "cut"]))
def test_nothing_is_kept_of_a_file_that_changes_during_a_run(how: str, frozen: NewProject, model: Path, whole: WholeOf) -> None:
    """Goes on from what was committed before with the same bits once the file is as it was."""
    expected = whole(FROZEN)
    project, file = frozen("changed"), weights_of(model)
    status, content = file.stat(), file.read_bytes()

    def change(run: Run) -> None:
        if not run.saver.saved_step or not file.exists() or file.stat().st_mtime_ns != status.st_mtime_ns:
            return  # what was read is summed in the commit of step 1: before it, the hint is another
        if how == "touched":
            os.utime(file, ns=(0, status.st_mtime_ns + 1))
        elif how == "cut":
            os.truncate(file, 4096)
        else:
            file.unlink()

    with pytest.raises(ModelFileError, match=f"{file}.*has changed, or is gone") as caught:
        train(project, change)
    told = re.match(
        r"put the file back as it was: then the same command continues from the state after step (\d)\. With another",
        str(caught.value.hint),
    )
    assert told and 1 <= int(told[1]) <= manifest_of(project).step  # a commit may end after the error was told
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    losses, again = train(project)
    assert losses == expected.losses
    assert trained_sums(again) == trained_sums(expected.store)


def test_other_bytes_under_the_same_time_are_found(frozen: NewProject, model: Path) -> None:
    file = weights_of(model)

    def change(run: Run) -> None:
        if not run.saver.saved_step:
            return  # what was read is summed in the commit of step 1
        status = file.stat()
        piece = next(stage.source for stage in run.model.stages if stage.source)[0]
        with file.open("r+b") as opened:
            opened.seek(piece.offset % (1 << 48) + 4096)
            opened.write(b"\x01")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    project = frozen(changes={"offload.verify_reads": True, "export.at_end": False})
    with pytest.raises(ModelFileError, match=f"of {file} are not what was read there before.*'s file {file} has") as caught:
        train(project, change)
    assert str(caught.value.hint).startswith("put the file back as it was: then") and "dmesg" not in str(caught.value.hint)
    verified = project.fuyou("verify", store_of(project))
    assert verified.returncode == 1, verified.stdout
    assert f"the model's file {file}: its content is not what the run has read: put it back" in verified.stdout


def test_other_bytes_under_the_same_time_are_not_exported(frozen: NewProject, model: Path, tmp_path: Path) -> None:
    """Changes a byte near either end of what a stage reads of the file."""
    project, file = frozen(changes={"export.at_end": False}), weights_of(model)
    _, store = train(project)
    saved, status, content = manifest_of(project), file.stat(), file.read_bytes()
    piece = next(stage.pieces for stage in saved.stages if stage.pieces)[0]
    for at in (piece.offset % (1 << 48) + 4096, piece.offset % (1 << 48) + piece.size - 4097):
        flip(file, at)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(ModelFileError, match=f"{file}: its content is not what the saved run has read"):
            export_store(saved_store(store), tmp_path / "exported", dtype="float32", max_shard_size=1 << 30)
        assert not (tmp_path / "exported").exists()
        file.write_bytes(content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    export_store(saved_store(store), tmp_path / "exported", dtype="float32", max_shard_size=1 << 30)


@pytest.mark.parametrize("summed", [True, False])
def test_verifying_compares_the_models_files(summed: bool, frozen: NewProject, model: Path) -> None:
    """Counts their bytes once, and says what nobody has summed."""
    changes = {"offload.verify_reads": summed, "freeze": ["transformer.h.0.*", "transformer.h.1.*"]}
    project, file = frozen(changes=changes), weights_of(model)
    _, store = train(project)
    os.utime(file, ns=(0, 7))  # as a copy has another time
    done = project.done("verify", store)
    name = f"frozen weights in the model's file {file}: "
    if not summed:
        assert f"{name}not compared: the saved state has no checksums" in done.stdout
        return
    (checked,) = json.loads(project.fuyou("verify", store, "--json").stdout)["states"][0]["files"]
    assert not checked["changed"] and 0 < checked["same"] <= file.stat().st_size
    assert f"{name}{gb(checked['same'])}, all checksums match" in done.stdout
    assert checked["same"] < to_check(manifest_of(project))  # the blocks share a page, which is counted once
    said: list[str] = []
    with at_rest(saved_store(store), arena_size=1 << 22, say=said.append):
        assert said == [f"{file} has another time of change: comparing {gb(checked['same'])} with what was read before"]


def test_another_dtype_is_copied_and_the_plan_says_so(frozen: NewProject) -> None:
    copied = prepared_run(frozen(changes={"precision.compute": "bfloat16"})).planned.model
    assert not copied.sources
    assert "is float32 in the model's files, and computes in bfloat16" in copied.imported_because


def test_files_on_another_file_system_are_copied(frozen: NewProject, model: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        if Path(folder).stat().st_dev == model.stat().st_dev:
            pytest.skip("the tests' folder is in memory, too")
        there = shutil.copytree(model, Path(folder, "model"))
        copied = prepared_run(frozen(changes={"model.name_or_path": str(there)})).planned.model
    assert not copied.sources
    assert copied.imported_because == "the model's files are on another file system than offload.dir"


def test_a_time_of_change_that_a_store_cannot_name_is_no_error(frozen: NewProject, model: Path) -> None:
    os.utime(weights_of(model), ns=(0, -1))
    copied = prepared_run(frozen()).planned.model
    assert not copied.sources and "before 1970" in copied.imported_because


def test_the_plan_says_where_frozen_weights_are_read(frozen: NewProject) -> None:
    project = frozen()
    shown = project.done("plan", project.recipe)
    assert "read from the model's own files, not copied" in " ".join(shown.stdout.split())


def test_an_export_has_them_from_the_files(frozen: NewProject, tmp_path: Path, model: Path) -> None:
    from safetensors.torch import load_file

    from fuyou_cli.training.exporting import export_store

    project = frozen()
    _, store = train(project)
    (written,) = export_store(saved_store(store), tmp_path / "out", dtype="float32", max_shard_size=1 << 30)
    before, after = load_file(weights_of(model)), load_file(written)
    same = {name for name in before if before[name].equal(after[name])}
    assert {name for name in before if ".h.0." in f".{name}"} <= same
    assert {name for name in before if name.endswith("h.1.attn.c_attn.weight")}.isdisjoint(same)
    os.utime(weights_of(model), ns=(0, 5))
    (again,) = export_store(saved_store(store), tmp_path / "again", dtype="float32", max_shard_size=1 << 30)
    assert again.read_bytes() == written.read_bytes()
    put_another_byte(weights_of(model), manifest_of(project))
    os.utime(weights_of(model), ns=(0, 6))
    with pytest.raises(FuyouError, match="its content is not what the saved run has read"):
        export_store(saved_store(store), tmp_path / "never", dtype="float32", max_shard_size=1 << 30)


def put_another_byte(file: Path, saved: Manifest) -> None:
    """Changes what a run reads of it."""
    piece = next(stage.pieces for stage in saved.stages if stage.pieces)[0]
    with file.open("r+b") as opened:
        opened.seek(piece.offset % (1 << 48) + 4096)
        opened.write(b"\x01")


def test_an_adapter_is_exported_without_the_models_files(frozen: NewProject, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    project = frozen(changes={"freeze": [], "adapter": {"r": 2}, "export.at_end": False})
    project.done("finetune", project.recipe)
    store = store_of(project)
    assert manifest_of(project).sources
    weights_of(model).unlink()
    run_export(store, tmp_path / "out", [], dtype=None)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    verified = verify_store(saved_store(store))
    assert not any(found.damages for found in verified)
    assert verified[0].files[0].unknown == "No such file or directory" and verified[0].is_whole
    with pytest.raises(UsageError, match=r"model\.safetensors: No such file"):
        run_export(store, tmp_path / "merged", [], dtype="float32", merged=True)


# ---- what `freeze` trains ------------------------------------------------------------------------------------------------


FREEZE = ["transformer.wte", "transformer.h.0.*"]  # the head is tied to the embedding


def _is_frozen(name: str) -> bool:
    return name.startswith(("transformer.wte.", "transformer.h.0.", "lm_head."))


@pytest.mark.parametrize(
    "changes", [{}, {"offload.device": "emulated", "offload.activations": "swap"}], ids=["cpu", "emulated"]
)
def test_it_trains_the_rest_resumes_and_exports_frozen_weights_as_they_came(
    changes: dict[str, Any], new_project: NewProject
) -> None:
    keys = {**changes, "freeze": FREEZE, "train.max_steps": STEPS}
    whole, stopped = new_project("whole", keys), new_project("stopped", keys)
    losses, _ = train(whole)
    stop(stopped, interrupt(3, "forward"))
    assert train(stopped)[0] == losses and len(losses) == STEPS
    ours, again = (exported(store_of(project), project.folder / "model") for project in (whole, stopped))
    began = load_file(whole.materials / "model/model.safetensors")  # float32, and the run computes in bfloat16
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert {name for name in ours if torch.equal(ours[name], began[name])} == {name for name in ours if _is_frozen(name)}
    assert all(stage.frozen and not stage.momentum for stage in manifest_of(whole).stages if _is_frozen(stage.name + "."))


def test_without_the_models_files_frozen_weights_are_rounded_and_that_is_said(
    new_project: NewProject, materials: Path, tmp_path: Path
) -> None:
    model, away = Path(shutil.copytree(materials / "model", tmp_path / "start")), tmp_path / "away"
    keys = {"freeze": FREEZE, "model.name_or_path": str(model), "train.max_steps": 2, "export.at_end": False}
    project = new_project(changes=keys)
    project.done("finetune", project.recipe)
    store = store_of(project)
    began, said = load_file(model / "model.safetensors"), list[str]()
    model.rename(away)
    (path,) = export_store(
        saved_store(store), tmp_path / "rounded", dtype="float32", max_shard_size=1 << 30, say=said.append, model_dir=None
    )
    rounded, name = load_file(path), "transformer.wte.weight"
    assert torch.equal(rounded[name], began[name].bfloat16().float()) and not torch.equal(rounded[name], began[name])
    assert any("what was not trained is written as it was computed with, rounded to bfloat16" in line for line in said)
    export_store(saved_store(store), tmp_path / "narrow", dtype="bfloat16", max_shard_size=1 << 30, say=said.append)
    assert len(said) == 1  # where that is no loss
    there = project.fuyou("export", "recipe.yaml", tmp_path / "own", "--dtype", "float32", f"model.name_or_path={away}")
    assert there.returncode == 0 and "rounded" not in there.stderr, there.stderr
    assert torch.equal(load_file(tmp_path / "own" / "model.safetensors")[name], began[name])
    save_file({**began, name: began[name] * 1.01}, away / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"model\.safetensors: transformer\.wte\.weight is not what the run began with"):
        export_store(saved_store(store), tmp_path / "other", dtype="float32", max_shard_size=1 << 30, model_dir=away)
    assert not (tmp_path / "other").exists()


def test_a_run_goes_on_with_the_same_parts_alone(stopped: Project) -> None:
    stopped.write_recipe({"freeze": FREEZE})
    with pytest.raises(UsageError, match=r"because which parameters are trained \(freeze\) changed since") as refused:
        prepared_run(stopped)
    assert "checkpoint.resume=never" in str(refused.value.hint)


def test_what_is_frozen_with_another_weight_is_told(new_project: NewProject) -> None:
    said: list[str] = []
    planned(load_recipe(new_project("project", {"freeze": ["lm_head"]}).recipe).recipe, say=said.append)
    assert "note: freeze: transformer.wte.weight is tied to lm_head.weight, so it is not trained either" in said


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["transformer.h.[5-9]"], r"freeze: no parameter of GPT2LMHeadModel matches `transformer\.h\.\[5-9\]`"),
        (["transformer"], "freeze: every parameter of GPT2LMHeadModel matches, so nothing is left to train"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(patterns: list[str], message: str, new_project: NewProject) -> None:
    recipe = load_recipe(new_project("project", {"freeze": patterns}).recipe).recipe
    with pytest.raises(UsageError, match=message):
        planned(recipe)
