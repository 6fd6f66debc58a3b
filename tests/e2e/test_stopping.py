"""Stops at a chosen place of a chosen step, in one process, and tests what a resumed run insists on."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed, every
from safetensors.torch import load_file, save_file

from fuyou_cli.core.errors import FuyouError, Interrupted, UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.swap.store import Store
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.prepare import check_resumed, inspect, resolve
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import saved_store
from fuyou_cli.training.state.resume import check_unchanged_run
from fuyou_cli.training.state.store_folders import STORE_FILE

from .conftest import ROWS, NewProject, Project, WholeOf
from .running import (
    STEPS,
    assert_same_exports,
    exported,
    interrupt,
    loaded_run,
    manifest_of,
    prepared_run,
    run_of,
    silent,
    stop,
    store_of,
    train,
)

RAM = {f"offload.{kind}": "cpu" for kind in ("weights", "optimizer_states", "gradients", "boundaries")}
PLACES: dict[str, dict[str, Any]] = {
    "clipped, on the ssd": {},
    "unclipped, on the ssd": {"train.clip_grad_norm": None},
    "clipped, in RAM": RAM,
    "unclipped, in RAM": {**RAM, "train.clip_grad_norm": None},
    "clipped, emulated device": {"offload.device": "emulated"},
    "unclipped, fp32, two directories": {"train.clip_grad_norm": None, "precision.compute": "float32"},
    "clipped, vocabulary cut": {"train.head_chunk_vocab": 100},
    "unclipped, vocabulary cut": {"train.head_chunk_vocab": 100, "train.clip_grad_norm": None},
    "unclipped, all deferred": {"train.clip_grad_norm": None, "offload.defer_updates": 1},
    "all deferred, in RAM": {**RAM, "train.clip_grad_norm": None, "offload.defer_updates": 1},
    "clipped, a packed mixture": {"dataset.packing": "concat", "dataset.max_seq_len": 16},
}


def _changes(project_folder: Path, place: str) -> dict[str, Any]:
    changes = {**PLACES[place], "train.max_steps": STEPS}
    if "two directories" in place:
        changes["offload.dir"] = [str(project_folder / f"disk{number}") for number in range(2)]
    if "mixture" in place:
        changes["dataset.train"] = _mixture(project_folder.parent / "data")
    return changes


def _mixture(folder: Path) -> list[dict[str, Any]]:
    """Writes two entries in files of the folder: the smaller one is repeated within a few steps."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("many", ROWS[:30]), ("few", ROWS[40:43])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [{"path": str(folder / "many.jsonl"), "weight": 0.3}, {"path": str(folder / "few.jsonl"), "weight": 0.7}]


@pytest.mark.parametrize("place", every(6, PLACES))
def test_stopped_anywhere_and_resumed_is_the_same_run(
    place: str, new_project: NewProject, whole: WholeOf, tmp_path: Path
) -> None:
    expected = whole(_changes(tmp_path / "whole", place))
    broken = new_project("broken", _changes(tmp_path / "broken", place))
    for step, phase in ((1, "forward"), (2, "backward"), (4, "forward"), (5, "backward")):
        with pytest.raises(Interrupted, match=rf"stopped after step \d of {STEPS}") as stopped:
            train(broken, interrupt(step, phase))
        assert stopped.value.exit_code == 130
        done = manifest_of(broken).step
        # an unclipped step whose backward has begun is finished, every other one is given up
        assert done == (step if phase == "backward" and "unclipped" in place else step - 1)
    losses, resumed = train(broken)
    assert losses == expected.losses
    assert_same_exports(resumed, expected.store, tmp_path)


@pytest.mark.parametrize("place", ["clipped, vocabulary cut", "unclipped, vocabulary cut"])
def test_stopped_in_a_cut_head(place: str, new_project: NewProject, whole: WholeOf, tmp_path: Path) -> None:
    """Nothing has been updated yet: gradients of a tied head's pieces rest until the embedding has added its own."""
    expected = whole(_changes(tmp_path, place))
    broken = new_project("broken", _changes(tmp_path / "broken", place))
    for step, phase in ((2, "logits"), (3, "head")):
        stop(broken, interrupt(step, phase))
        assert manifest_of(broken).step == step - 1
    losses, resumed = train(broken)
    assert losses == expected.losses
    assert_same_exports(resumed, expected.store, tmp_path)


def _refusal(project: Project, changes: dict[str, Any]) -> str:
    """Returns what the run says when the recipe has changed; the saved state must not have."""
    before = _digest(project)
    project.write_recipe({"train.max_steps": STEPS, **changes})
    with pytest.raises(UsageError) as refused:
        train(project)
    assert refused.value.exit_code == 2
    assert _digest(project) == before
    return f"{refused.value.message} {refused.value.hint}"


def _digest(project: Project) -> dict[str, bytes]:
    store = next(iter(project.folder.rglob(manifests.NAME))).parent
    return {path.name: path.read_bytes() for path in store.iterdir()}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train.batch_size": 8}, "batch_size was 4, is 8"),
        (
            {"train.batch_size": 8, "optimizer.lr": 0.1, "optimizer.betas": [0.9, 0.99]},
            "its numerics and optimizer changed since it was saved: train.batch_size was 4, is 8; "
            "optimizer.lr was 0.003, is 0.1; optimizer.betas was",
        ),
        ({"train.micro_batch_size": 4}, "micro_batch_size was 2, is 4"),
        ({"train.threads": 2}, "threads was 1, is 2"),
        ({"train.head_chunk_tokens": 7}, "head_chunk_tokens was 0, is 7"),
        ({"train.head_chunk_vocab": 100}, "head_chunk_vocab was 0, is 100"),
        ({"precision.grad_accum": "bfloat16"}, "precision.grad_accum was float32, is bfloat16"),
        ({"optimizer.state_dtype": "int8"}, "optimizer.state_dtype was float32, is int8"),
        ({"optimizer.name": "lion"}, "optimizer.name was adamw, is lion"),
        ({"seed": 1}, "seed was 42, is 1"),
        ({"optimizer.betas": [0.9, 0.99]}, "optimizer.betas was [0.9, 0.95], is [0.9, 0.99]; momentum"),
        (
            {"optimizer.lr": 0.1, "optimizer.betas": [0.8, 0.95]},
            "optimizer.lr was 0.003, is 0.1; optimizer.betas was [0.9, 0.95], is [0.8, 0.95]",
        ),
        ({"train.clip_grad_norm": 1.0}, "train.clip_grad_norm was 0.5, is 1.0"),
        ({"train.clip_grad_norm": None}, "train.clip_grad_norm was 0.5, is null"),
        ({"dataset.shuffle": False}, "dataset.shuffle was true, is false"),
        ({"model.attn_implementation": "eager"}, "model.attn_implementation was sdpa, is eager"),
        ({"adapter": {"r": 4}}, "adapter.r was null, is 4"),
        ({"freeze": ["transformer.wte"]}, 'freeze was [], is ["transformer.wte"]'),
    ],
    ids=str,
)
def test_changed_recipe_is_refused_by_name(changes: dict[str, Any], named: str, stopped: Project) -> None:
    message = _refusal(stopped, changes)
    assert named in message
    assert "checkpoint.resume=never" in message
    for key in changes:
        if key == "optimizer.lr":
            assert "(--accept-changes goes on with optimizer.lr)" in message
        elif was := re.search(rf"{re.escape(key)} was (.+?), is ", message):
            assert f"{key}={was[1]}" in message  # what to write
    with pytest.raises(UsageError) as refused:
        prepared_run(stopped, accept_changes=True)
    assert refused.value.message in message


def test_a_refused_run_is_refused_before_this_machine_is_measured(stopped: Project) -> None:
    """By what its recipe says alone. A length that may be another is refused so, too, unless it is accepted."""
    for changes in ("dataset.max_seq_len=16", "train.clip_grad_norm=1", "adapter.r=4", "train.max_steps=9"):
        done = stopped.fuyou("finetune", stopped.recipe, f"train.max_steps={STEPS}", "offload.measure=true", changes)
        key = changes.partition("=")[0]
        assert done.returncode == 2 and f"{key} was" in " ".join(done.stderr.split()), done.stderr
        assert "measur" not in done.stderr
    stopped.write_recipe({"train.max_steps": 9})
    inspected = inspect(resolve(load_recipe(stopped.recipe).recipe, say=silent), say=silent)
    check_resumed(inspected, accept_changes=True)
    with pytest.raises(UsageError, match=r"train\.max_steps was 6, is 9"):
        check_resumed(inspected, accept_changes=False)


@pytest.mark.parametrize("changes", [{"optimizer.lr": 0.1}, {"train.batch_size": 8}], ids=str)
def test_data_that_may_be_other_is_named_with_what_is_refused(changes: dict[str, Any], stopped: Project) -> None:
    """Not after that was put right: what the data is, is known once it is read."""
    rows = stopped.folder / "rows.jsonl"
    rows.write_text(json.dumps({"text": "Other rows."}) + "\n")
    stopped.write_recipe({"train.max_steps": STEPS, **changes, "dataset.train": [{"path": str(rows), "format": "text"}]})
    inspected = inspect(resolve(load_recipe(stopped.recipe).recipe, say=silent), say=silent)
    with pytest.raises(
        UsageError, match=r"; and dataset\.train\[0\]\.path was .*, with which data and model have to be the same"
    ) as refused:
        check_resumed(inspected, accept_changes=False)
    assert f"{next(iter(changes))} was" in refused.value.message


def test_a_key_that_nobody_wrote_is_not_named(new_project: NewProject) -> None:
    """What gradients are summed in follows from there being one micro-batch."""
    one = {"train.batch_size": 2, "train.max_steps": STEPS}
    project = new_project(changes=one)
    train(project)
    said = _refusal(project, {"train.batch_size": 4})
    assert "train.batch_size was 2, is 4" in said and "grad_accum" not in said
    said = _refusal(project, {"train.batch_size": 4, "precision.grad_accum": "bfloat16"})
    assert "grad_accum" not in said, "they stay as they were: compute's"
    said = _refusal(project, {"train.batch_size": 4, "precision.compute": "float32"})
    assert "precision.compute was bfloat16, is float32" in said and "grad_accum" not in said
    project.write_recipe({**one, "precision.grad_accum": "bfloat16"})
    prepared_run(project)


def test_changed_model_data_or_disks_are_refused_by_name(stopped: Project) -> None:
    rows = stopped.folder / "rows.jsonl"
    rows.write_text((stopped.materials / "rows.jsonl").read_text() + json.dumps({"text": "One more row."}) + "\n")
    data = {"dataset.train": [{"path": str(rows), "format": "text"}]}
    said = _refusal(stopped, data)
    assert "the tokens of the data (dataset, tokenizer) changed" in said and "(model.name_or_path=OUT)" in said
    tokenizer = {"tokenizer.name_or_path": str(stopped.materials / "model")}
    assert "the model's configuration" in _refusal(
        stopped, {"model.name_or_path": str(stopped.materials / "other"), **tokenizer}
    )
    one_more = [str(stopped.out / "store"), str(stopped.folder / "second")]
    assert "offload.dir" in _refusal(stopped, {"offload.dir": one_more})


def test_changed_configuration_of_the_same_shapes_is_refused(stopped: Project) -> None:
    other = stopped.folder / "model"
    shutil.copytree(stopped.materials / "model", other)
    config = json.loads((other / "config.json").read_text())
    config["layer_norm_epsilon"] = 1e-3
    (other / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer.name_or_path": str(stopped.materials / "model")}
    message = _refusal(stopped, {"model.name_or_path": str(other), **tokenizer})
    assert "the model's configuration (model.name_or_path) changed" in message and "weights" not in message


def test_other_weights_of_the_same_shapes_are_refused_before_the_plan_is_shown(stopped: Project) -> None:
    """Refuses them as a base model and one that was trained from it: what is saved goes on from one of them only."""
    other = stopped.folder / "model"
    shutil.copytree(stopped.materials / "model", other)
    stopped.write_recipe({"model.name_or_path": str(other), "train.max_steps": STEPS})
    check_unchanged_run(manifest_of(stopped), prepared_run(stopped).fingerprints, total_steps=STEPS)  # a copy is the same
    (file,) = other.glob("*.safetensors")
    weights = load_file(file)
    save_file({name: value * 1.01 for name, value in weights.items()}, file, metadata={"format": "pt"})
    kept = _digest(stopped)
    done = stopped.fuyou("finetune", stopped.recipe)
    assert done.returncode == 2
    assert "because the weights it began with (model.name_or_path, model.revision) changed since" in done.stderr
    assert "resuming" not in done.stderr and "Placement" not in done.stderr
    assert _digest(stopped) == kept


def test_a_state_without_a_mark_is_nobodys(stopped: Project) -> None:
    stopped.write_recipe({"train.max_steps": STEPS})
    saved = manifest_of(stopped)
    without = {name: value for name, value in saved.fingerprints.items() if name != "weights"}
    marks = prepared_run(stopped).fingerprints
    check_unchanged_run(saved, marks, total_steps=STEPS)
    with pytest.raises(UsageError, match="the weights it began with"):
        check_unchanged_run(replace(saved, fingerprints=without), marks, total_steps=STEPS)


def test_another_torch_between_stop_and_resume_is_told(stopped: Project) -> None:
    saved = manifest_of(stopped)
    manifests.write(store_of(stopped), replace(saved, libraries={**saved.libraries, "torch": "2.9.0"}))
    done = stopped.done("finetune", stopped.recipe, f"train.max_steps={STEPS}")
    assert f"note: torch was 2.9.0, is {saved.libraries['torch']}: results from here on may differ" in done.stderr
    assert manifest_of(stopped).libraries == saved.libraries
    again = stopped.fuyou("finetune", stopped.recipe, f"train.max_steps={STEPS}")
    assert "may differ" not in again.stderr


def test_placement_may_change_between_stop_and_resume(stopped: Project, tmp_path: Path, whole: WholeOf) -> None:
    stopped.write_recipe({"train.max_steps": STEPS, **RAM, "offload.lookahead": 4, "offload.io.backend": "threads"})
    losses, resumed = train(stopped)
    assert losses == whole().losses
    assert_same_exports(resumed, whole().store, tmp_path)


def test_updates_may_be_deferred_or_not_after_a_stop(new_project: NewProject, tmp_path: Path, whole: WholeOf) -> None:
    unclipped = {"train.max_steps": STEPS, "train.clip_grad_norm": None}
    project = new_project("deferred", {**unclipped, "offload.defer_updates": 0})
    for step, share in ((2, 1), (4, 0), (5, 1)):
        stop(project, interrupt(step, "forward"))
        project.write_recipe({**unclipped, "offload.defer_updates": share})
    losses, resumed = train(project)
    expected = whole(unclipped)
    assert losses == expected.losses
    assert_same_exports(resumed, expected.store, tmp_path)


class Killed(BaseException):
    """Stands for whatever ends a run without a word."""


def test_starting_over_gives_the_old_state_up_first(stopped: Project, whole: WholeOf) -> None:
    """Kills while a new run's weights are loaded over the old ones: nobody may take the rest for the old run."""

    def die(count: int) -> None:
        raise Killed

    stopped.write_recipe({"train.max_steps": STEPS, "checkpoint.resume": "never"})
    with (
        pytest.raises(Killed),
        run_of(stopped) as run,
    ):
        run.load(die)
    stopped.write_recipe({"train.max_steps": STEPS})
    losses, _ = train(stopped)
    assert losses == whole().losses


def test_a_damaged_manifest_is_refused(stopped: Project) -> None:
    """Refuses it where the one before it is damaged as well; else that one is gone on from."""
    manifest, before = (store_of(stopped) / name for name in (manifests.NAME, manifests.BEFORE))
    whole = manifest.read_text()
    for damaged in (whole[: len(whole) // 2], "[]", whole.replace('"stages"', '"steps"'), "{}"):
        manifest.write_text(damaged)
        before.write_text(damaged)
        with pytest.raises(FuyouError) as refused:
            train(stopped)
        assert str(manifest) in refused.value.message


@crossed(2, compute=["bfloat16", "float32"], rows=[0, 100])
def test_a_float32_checkpoint_survives_to_the_bit(rows: int, compute: str, new_project: NewProject, tmp_path: Path) -> None:
    """Stops before anything was learnt: weights and remainders are what the checkpoint held, put together from the pieces of a
    cut vocabulary."""
    numerics = {"train.head_chunk_vocab": rows, "precision.compute": compute}
    project = new_project(changes={"train.max_steps": STEPS, **numerics})
    stop(project, interrupt(1, "forward"))
    weights = exported(store_of(project), tmp_path / "export")
    original = load_file(project.materials / "model" / "model.safetensors")
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], original[name]) for name in original)


def test_the_export_computes_what_the_store_holds(new_project: NewProject, tmp_path: Path) -> None:
    """Compares logits of from_pretrained's model with those of the skeleton with the store's weights put in by hand."""
    from transformers import AutoModelForCausalLM

    project = new_project(changes={"train.max_steps": 3, "precision.compute": "float32"})
    prepared = prepared_run(project)
    with loaded_run(prepared) as run:
        run.train(lambda report: None)
        weights: dict[str, torch.Tensor] = {}
        records = run.executor.visits.residency.records
        for stage, placed, record in zip(run.model.stages, run.plan.stages, records, strict=True):
            if stage.params == 0:
                continue
            slot, extent = run.plan.slot_classes[placed.slot_class].weight_slots[0], placed.extent("weights", record.turn)
            assert extent is not None
            assert record.generation == 3
            run.daemon.wait(run.daemon.read(slot.offset, extent.offset, extent.size))
            flat = run.files.memory.tensor(slot, torch.float32, stage.params)
            for tensor in stage.tensors:
                weights[tensor.name] = flat[tensor.offset :][: tensor.numel].view(tensor.shape).clone()
        store = run.store.paths[0].parent
    export_store(saved_store(store), tmp_path / "export", dtype="float32", max_shard_size=1 << 16)
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    plain = AutoModelForCausalLM.from_config(prepared.planned.anatomy.model.config).eval()
    plain.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})
    ids = torch.arange(40).view(2, 20)
    assert torch.equal(exported(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_a_run_at_a_constant_rate_may_be_made_longer(new_project: NewProject) -> None:
    constant = {"lr_scheduler.name": "constant", "lr_scheduler.warmup_steps": 0}
    project = new_project("longer", {"train.max_steps": 2, **constant})
    train(project)
    project.write_recipe({"train.max_steps": 4, **constant})
    longer, _ = train(project)
    assert longer == train(new_project("whole", {"train.max_steps": 4, **constant}))[0]


def test_a_run_named_by_its_folder_goes_on_there(stopped: Project, whole: WholeOf) -> None:
    folder = next(iter(stopped.folder.rglob(manifests.NAME))).parent
    elsewhere = {"offload.dir": str(stopped.folder / "elsewhere"), "checkpoint.resume": str(folder)}
    stopped.write_recipe({"train.max_steps": STEPS, **elsewhere})
    losses, store = train(stopped)
    assert store == folder
    assert not (stopped.folder / "elsewhere").exists()
    assert losses == whole().losses


def test_exports_keep_the_names_of_the_checkpoint(new_project: NewProject, tmp_path: Path) -> None:
    """Keeps hub names of GPT-2, which lack the prefix of the model class."""
    project = new_project("names", {"train.max_steps": 2})
    bare = project.folder / "bare"
    shutil.copytree(project.materials / "model", bare)
    weights = load_file(bare / "model.safetensors")
    renamed = {name.removeprefix("transformer."): value for name, value in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, bare / "model.safetensors", metadata={"format": "pt"})
    tokenizer = {"tokenizer.name_or_path": str(project.materials / "model")}
    project.write_recipe({"train.max_steps": 2, "model.name_or_path": str(bare), **tokenizer})
    _, store = train(project)
    assert exported(store, tmp_path / "out").keys() == renamed.keys()


def test_a_run_that_ends_before_its_store_is_named_leaves_none(new_project: NewProject, tmp_path: Path) -> None:
    """Interrupts as its GPU is set up, say: files of the whole store's size, which no manifest names. Those of others stay."""
    project = new_project(changes={"offload.dir": [str(tmp_path / "one"), str(tmp_path / "two")]})
    prepared = prepared_run(project)
    paths = [directory / STORE_FILE for directory in prepared.planned.directories]
    for there in (0, 1, 2):
        for path in paths[:there]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
        with pytest.raises(KeyboardInterrupt), run_of(prepared):
            assert all(path.exists() for path in paths)
            raise KeyboardInterrupt
        assert [path.exists() for path in paths] == [number < there for number in range(2)]
    with loaded_run(prepared):
        pass
    assert all(path.exists() for path in paths)


def test_a_run_that_comes_late_leaves_the_store_of_the_one_before_it(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found no file, and another run begins and ends before it opens its own."""
    project = new_project(changes={"train.max_steps": 2})
    late = prepared_run(project)
    trained: list[float] = []

    def open_late(*given: Any, **named: Any) -> Store:
        monkeypatch.undo()
        trained.extend(train(project)[0])
        return Store.open(*given, **named)

    monkeypatch.setattr(Store, "open", open_late)
    with (
        pytest.raises(UsageError, match="another process has used the store"),
        run_of(late),
    ):
        pass
    assert len(trained) == 2 and (store_of(project) / STORE_FILE).is_file()
    assert manifest_of(project).step == 2
