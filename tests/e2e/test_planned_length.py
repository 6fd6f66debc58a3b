"""Tests how many steps `fuyou plan` plans and how long they take: of epochs, limits, drives that slow down and saved runs."""

from __future__ import annotations

import pytest
import yaml

from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training import length
from fuyou_cli.training.state import manifest as manifests

from .conftest import CommandIn, Project
from .running import STEPS, manifest_of, store_of
from .test_plan_command import HERE, MACHINE, NewProject


def test_limits_of_a_recipe_end_a_planned_run(new_project: NewProject, command: CommandIn) -> None:
    fuyou = command(new_project(changes=HERE))
    whole = fuyou.json("--hardware", MACHINE)
    assert whole["endings"] == []
    loaded = sum(stage["weights_at"]["size"] for stage in whole["plan"]["stages"])
    limit = loaded + 2 * whole["plan"]["predicted"]["written_per_step"] + 1
    limited = fuyou.json("--hardware", MACHINE, f"offload.ssd_write_limit={limit}", "train.max_time=1h")  # for all six steps
    assert [(ending["limit"], ending["step"]) for ending in limited["endings"]] == [(f"offload.ssd_write_limit={limit}", 2)]
    assert limited["plan"] == whole["plan"]


def test_how_long_the_epochs_are(new_project: NewProject, command: CommandIn) -> None:
    """Looks into the data where it says how long the run is; nothing of that is left."""
    project = new_project(changes={**HERE, "train.max_steps": None, "train.epochs": 2, "dataset.cache_dir": None})
    fuyou = command(project)
    shown = fuyou.json("--hardware", MACHINE)
    step = shown["plan"]["predicted"]["step_seconds"]
    assert shown["steps"] == 32 and shown["run_seconds"] == pytest.approx(32 * step)  # 64 rows twice, 4 at once
    assert fuyou.json("--hardware", MACHINE, "train.batch_size=32")["steps"] == 4
    assert fuyou.json("--hardware", MACHINE, "--dry-run")["steps"] is None
    assert {path.name for path in project.folder.iterdir()} == {"kept", "recipe.yaml"}
    assert (
        fuyou("plan", "recipe.yaml", "--hardware", MACHINE, "model.name_or_path=" + str(project.folder))[0] == 2
    )  # no model there
    bare = project.folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((project.materials / "model" / "config.json").read_text())
    code, out, _ = fuyou("plan", "recipe.yaml", "--hardware", MACHINE, f"model.name_or_path={bare}")
    assert code == 0 and "the number of steps is not known:" in " ".join(out.split()) and "1,000 steps" in out


def test_much_data_is_not_read_for_a_plan(new_project: NewProject, command: CommandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads it only if an earlier run may have tokenised it."""
    monkeypatch.setattr(length, "COUNTED", 0)
    project = new_project(changes={**HERE, "train.max_steps": None, "train.epochs": 2, "dataset.cache_dir": "rows"})
    fuyou = command(project)
    unknown, looked = "is not known until a run has tokenised the data", "to find the rows of an earlier run"
    _, out, err = fuyou("plan", "recipe.yaml", "--hardware", MACHINE)
    assert unknown in " ".join(out.split()) and looked not in err
    (project.folder / "rows" / "others").mkdir(parents=True)
    _, out, err = fuyou("plan", "recipe.yaml", "--hardware", MACHINE)
    assert unknown in " ".join(out.split()) and looked in err
    length.tokenised_rows(load_recipe(project.recipe).recipe, project.materials / "model")
    assert fuyou.json("--hardware", MACHINE)["steps"] == 32


def test_rows_of_an_earlier_run_say_how_long_rows_are(new_project: NewProject) -> None:
    """Nothing is tokenised for a plan once they are there."""
    project, said = new_project(), list[str]()
    recipe = load_recipe(project.recipe, [f"dataset.cache_dir={project.folder / 'rows'}"]).recipe
    tokenizer = project.materials / "model"
    first = length.sampled_epoch(recipe, tokenizer, said.append)
    assert first is not None and len(first.lengths) == 64 and said == ["reading some of the data, to see how long its rows are"]
    length.tokenised_rows(recipe, tokenizer)
    assert length.sampled_epoch(recipe, tokenizer, said.append) == first and len(said) == 1


@pytest.mark.slow
def test_a_run_past_the_fast_region_is_planned_with_what_drives_sustain(new_project: NewProject, command: CommandIn) -> None:
    project = new_project(changes={**HERE, "train.max_steps": 20})

    def machine(burst: int) -> None:
        rates = {"sustained_write": "14MB/s", "sustained_write_mixed": "7MB/s", "burst_bytes": burst}
        (project.folder / "machine.yaml").write_text(yaml.safe_dump({"parts": "gen4,64GiB", **rates}))

    fuyou = command(project)
    machine(10**12)
    within = fuyou.json("--hardware", "machine.yaml")
    written = within["plan"]["predicted"]["written_per_step"]
    assert within["fast_region"]["left"] is False and within["plan"]["sustained"] is False
    assert within["run_seconds"] == pytest.approx(20 * within["plan"]["predicted"]["step_seconds"])
    out = " ".join(fuyou("plan", "recipe.yaml", "--hardware", "machine.yaml")[1].split())
    assert "are fast; the run stays within them" in out
    epochs = ("train.max_steps=null", "train.epochs=1")
    assert fuyou.json("--hardware", "machine.yaml", *epochs)["plan"]["sustained"] is False  # few enough, once counted
    assert fuyou.json("--hardware", "machine.yaml", "--dry-run", *epochs)["plan"]["sustained"]  # nobody counts them
    machine(4 * written)
    past = fuyou.json("--hardware", "machine.yaml")
    region, later = past["fast_region"], past["plan"]["predicted"]["step_seconds"]
    assert past["plan"]["sustained"] and region["left"] and region["bytes"] == 4 * written
    assert later == region["step_seconds_later"] > region["step_seconds"]
    assert region["steps"] == pytest.approx(4 * written / past["plan"]["predicted"]["written_per_step"])
    expected = region["seconds"] + (20 - region["steps"]) * later
    assert past["run_seconds"] == pytest.approx(expected)
    out = " ".join(fuyou("plan", "recipe.yaml", "--hardware", "machine.yaml")[1].split())
    assert "predicted with sustained drive rates" in out and "at first, then" in out
    assert fuyou.json("--hardware", "machine.yaml", "train.max_steps=2")["plan"]["sustained"] is False
    counted = ("train.max_steps=null", "train.epochs=2")  # 32 steps, once the data said so
    assert fuyou.json("--hardware", "machine.yaml", *counted)["plan"]["sustained"]


def test_a_saved_run_is_planned_from_where_it_stands(stopped: Project, command: CommandIn) -> None:
    """Plans hours, bytes and wear of the steps that are left, with the numbers that the run began with; looks at its state
    alone."""
    saved, kept = manifest_of(stopped), (store_of(stopped) / manifests.NAME).read_bytes()
    left = STEPS - saved.step
    assert 0 < left < STEPS
    stopped.write_recipe({"train.max_steps": STEPS, "train.micro_batch_size": "auto"})
    fuyou = command(stopped)
    shown = fuyou.json("--dry-run")
    predicted = shown["plan"]["predicted"]
    assert (shown["steps"], shown["done"]) == (STEPS, saved.step)
    assert shown["plan"]["numerics"]["micro_batch_size"] == saved.numerics.micro_batch_size  # a new run would take 4 rows
    assert shown["run_seconds"] == pytest.approx(left * predicted["step_seconds"])
    assert shown["writes"] == {
        "loading": 0, "steps": left * predicted["written_per_step"], "saving": 0, "export": predicted["export_bytes"],
    }  # fmt: skip
    said = " ".join(fuyou("plan", "recipe.yaml", "--dry-run")[1].split())
    assert f"resumes after step {saved.step}; {left} steps in" in said and f"the {left} remaining steps write" in said
    code, out, _ = fuyou("plan", "recipe.yaml", "--dry-run", "train.batch_size=8")
    said = " ".join(out.split())
    assert code == 0 and "train.batch_size was 4, is 8" in said and "A run would be refused" in said
    assert "see the notes below" in said and "Run: fuyou" not in said
    assert fuyou.json("--dry-run", "train.batch_size=8")["done"] is None
    assert fuyou.json("--dry-run", "checkpoint.resume=never")["done"] is None
    assert fuyou.json("--hardware", MACHINE, "offload.device=auto")["done"] is None  # nothing of it is there
    assert (store_of(stopped) / manifests.NAME).read_bytes() == kept
    stopped.done("finetune", "recipe.yaml")
    finished = fuyou.json("--dry-run")
    assert (finished["done"], finished["run_seconds"], finished["writes"]["steps"]) == (STEPS, 0, 0)
    assert "all steps are done" in fuyou("plan", "recipe.yaml", "--dry-run")[1]
