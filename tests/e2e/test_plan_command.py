"""Tests `fuyou plan` for machines one has and has not, its file, and a run of that very plan."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fuyou_cli.cli.app import main
from fuyou_cli.core.units import GiB
from fuyou_cli.machine.first_measurement import _measured
from fuyou_cli.machine.profile import assumed_hardware
from fuyou_cli.machine.profile_store import keep
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training import length
from fuyou_cli.training.state import manifest as manifests

from .conftest import Project
from .running import STEPS, manifest_of, store_of

NewProject = Callable[..., Project]
MACHINE = "rtx4090,2xgen4,128GiB"
HERE = {"offload.device": "auto", "offload.max_memory.cpu": "90%"}


class Command:
    """Runs commands of `fuyou` in this process; gives the exit code, and what was written."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys = capsys
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "kept"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("FUYOU_OFFLOAD_DIR", raising=False)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = self._capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        found, out, err = self("plan", "recipe.yaml", "--json", *arguments)
        assert found == code, err
        data: dict[str, Any] = json.loads(out)
        return data


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[Project], Command]:
    return lambda project: Command(capsys, monkeypatch, project.folder)


def test_limits_of_a_recipe_end_a_planned_run(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    fuyou = command(new_project(changes=HERE))
    whole = fuyou.json("--hardware", MACHINE)
    assert whole["endings"] == []
    loaded = sum(stage["weights_at"]["size"] for stage in whole["plan"]["stages"])
    limit = loaded + 2 * whole["plan"]["predicted"]["written_per_step"] + 1
    limited = fuyou.json("--hardware", MACHINE, f"offload.ssd_write_limit={limit}", "train.max_time=1h")  # for all six steps
    assert [(ending["limit"], ending["step"]) for ending in limited["endings"]] == [(f"offload.ssd_write_limit={limit}", 2)]
    assert limited["plan"] == whole["plan"]


def test_a_described_machine_stands_in_for_this_one(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    project = new_project(changes=HERE)
    fuyou = command(project)
    shown = fuyou.json("--hardware", MACHINE, "-o", "plan.json", "--compare")
    assert (shown["fits"], shown["assumed"], shown["plan"]["device"]) == (True, True, "cuda")
    origins = {rate["what"]: rate["origin"] for rate in shown["rates"]}
    assert origins["compute"] == "measured" and origins["store, both at once"] == "assumption"
    assert shown["plan"]["cpu_budget"] == int(0.9 * (128 << 30))
    assert shown["room"]["disks"][0] | {"wanted": 0} == {
        "folders": [MACHINE], "what": ["the store", "the exported model"], "wanted": 0, "held": 0, "free": 4 * 10**12,
    }  # fmt: skip
    assert shown["rated_bytes"] == 2400 * 10**12 and 0 < shown["wear"] < 1e-6
    assert shown["run_seconds"] == pytest.approx(6 * shown["plan"]["predicted"]["step_seconds"])
    assert list(shown["phase_peaks"]) == ["load", "train", "save", "resume", "export"]
    others = shown["compared"]
    states = {row["words"]: row["figures"] for row in others if row["words"].startswith("optimizer.state_dtype=")}
    assert sorted(states) == ["optimizer.state_dtype=bfloat16", "optimizer.state_dtype=int8"] and all(states.values())
    assert 1 <= len(others) <= 9
    assert all(row["why"] for row in others if row["slower"] is None or row["slower"] > 0.01)
    first = (project.folder / "plan.json").read_bytes()
    assert fuyou.json("--hardware", MACHINE, "-o", "plan.json")["compared"] is None
    assert (project.folder / "plan.json").read_bytes() == first
    assert str(project.materials).encode() not in first
    least = min(row["figures"]["cpu_peak"] for row in others)
    tight = fuyou.json("--hardware", MACHINE, "--compare", f"offload.max_memory.cpu={least}")["compared"]
    assert tight[-1]["slower"] is None and tight[-1]["figures"] is None  # what takes more memory, last
    assert tight[-1]["why"] == "needs more RAM than there is"
    assert sorted(path.name for path in project.folder.iterdir()) == ["kept", "plan.json", "recipe.yaml"]  # no store
    assert [path.name for path in (project.folder / "kept/fuyou").iterdir()] == ["models"]  # no profile


def test_two_processes_make_the_same_plan_file(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares on this machine: what differs between two processes, their own size above all, is in neither file."""
    project = new_project()
    monkeypatch.setenv("XDG_CACHE_HOME", project.environment()["XDG_CACHE_HOME"])
    keep(replace(assumed_hardware(project.folder), measured="2026-01-02", process_bytes=GiB), project.folder, say=print)
    files = [project.folder / name for name in ("first.json", "second.json")]
    for file in files:
        assert project.fuyou("plan", project.recipe, "-o", file).returncode == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    memory = 0.9 * assumed_hardware(project.folder).ram_available
    assert 0 < json.loads(files[0].read_text())["memory"] <= memory - GiB  # by the process of the kept profile


def test_the_screen_fits_80_columns(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    fuyou = command(new_project(changes=HERE))
    code, out, _ = fuyou("plan", "recipe.yaml", "--hardware", MACHINE, "--compare", "-v")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    for words in (
        "described, profile",
        "Rates of this machine",
        "Ratel (ICDE 2025), measured peak",
        "specification, not measured",  # a drive's source is no column of a word a line
        "Other choices",
        "slower",
        "head and backward",
        "fits: RAM",
    ):
        assert words in " ".join(out.split()), words
    assert "fuyou finetune" not in out  # that machine is not here


def test_a_pinned_device_and_a_described_one_must_agree(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    code, _, err = command(new_project())("plan", "recipe.yaml", "--hardware", MACHINE)
    assert code == 2 and "offload.device: cpu, but the described machine computes on cuda" in err
    assert "offload.device=auto" in err


def test_nothing_is_measured_for_a_recipe_that_is_refused(
    new_project: NewProject, command: Callable[[Project], Command]
) -> None:
    code, _, err = command(new_project())("plan", "recipe.yaml", "model.name_or_path=./nowhere")
    assert code == 2 and "nowhere" in err and "measuring" not in err


def test_why_a_machine_could_not_be_measured() -> None:
    code, why = _measured(["--nope"], ())
    assert code == 2 and why.startswith("No such option: --nope")


def test_changes_are_ones_that_make_it_fit(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    fuyou = command(new_project(changes={"offload.max_memory": {"cpu": "90%", "ssd": "6MB"}, "train.batch_size": 1024}))
    shown = fuyou.json("--dry-run", "-o", "plan.json", code=3)
    assert not Path("plan.json").exists()
    assert shown["problems"] and shown["assumed"]
    overrides = [change["overrides"] for change in shown["changes"]]
    same_numbers = {("offload.boundaries=auto",), ("offload.max_memory.ssd=auto",)}
    assert {tuple(keys) for keys in overrides[:2]} == same_numbers  # one key each: they come before what changes the run
    assert overrides[2][0].startswith("train.batch_size=")
    for change in shown["changes"][:3]:
        again = fuyou.json("--dry-run", *change["overrides"])
        assert again["fits"] and again["plan"]["store_size"] == change["figures"]["store_size"]


def test_a_run_that_wears_a_drive_out_is_told_a_larger_batch(
    new_project: NewProject, command: Callable[[Project], Command], tmp_path: Path
) -> None:
    project = new_project(changes={**HERE, "train.max_steps": 1000})
    drives = [{"model": "small", "capacity": "1TB", "rated_bytes": "1GB", "used_bytes": "100MB"}]
    (project.folder / "machine.yaml").write_text(yaml.safe_dump({"parts": "1xgen4,64GiB", "drives": drives}))
    fuyou = command(project)
    code, out, _ = fuyou("plan", "recipe.yaml", "--hardware", "machine.yaml")
    said = " ".join(out.split())
    assert code == 0 and "warning: the run writes" in said and "of a drive's rated writes" in said
    assert "10% used before" in said
    shown = fuyou.json("--hardware", "machine.yaml")
    assert shown["wear"] > 0.3
    changes = {tuple(change["overrides"]): change["figures"] for change in shown["changes"]}
    larger = next(keys for keys in changes if keys[0].startswith("train.batch_size="))
    batch, steps = (int(key.partition("=")[2]) for key in larger)
    assert batch * steps == 4 * 1000  # as much training
    assert steps * changes[larger]["written_per_step"] <= 0.3e9 < shown["written_by_run"]


def test_a_change_that_is_pasted_gives_the_plan_that_was_shown(
    new_project: NewProject, command: Callable[[Project], Command]
) -> None:
    """Checks it also where micro-batches are the planner's to choose: all 31 rows at once, which it would not do with 62."""
    batch = {"dataset.max_seq_len": 64, "train.max_steps": 1000, "train.batch_size": 31, "train.micro_batch_size": "auto"}
    project = new_project(changes={**HERE, **batch, "offload.boundaries": "cpu", "offload.gradients": "cpu"})
    drives = [{"model": "small", "capacity": "1TB", "rated_bytes": "1GB"}]
    (project.folder / "machine.yaml").write_text(yaml.safe_dump({"parts": "1xgen4,64GiB", "drives": drives}))
    fuyou = command(project)
    changes = fuyou.json("--hardware", "machine.yaml")["changes"]
    assert any(change["overrides"][0].startswith("train.batch_size=") for change in changes)
    for change in changes:
        again = fuyou.json("--hardware", "machine.yaml", *change["overrides"])
        figures = {**again, **again["plan"], **again["plan"]["predicted"]}
        assert {key: figures[key] for key in change["figures"]} == change["figures"], change["overrides"]


def test_the_very_plan_is_run(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    project = new_project(changes={"train.max_steps": 2, "export.at_end": False})
    fuyou = command(project)
    code, out, err = fuyou("plan", "recipe.yaml", "--dry-run", "--json", "-o", "plan.json")
    assert code == 0 and "fuyou finetune RECIPE --plan plan.json" in err
    stale = fuyou("finetune", "recipe.yaml", "train.batch_size=8", "--plan", "plan.json")
    assert stale[0] == 2 and "plan.json: numerics.batch_size was 4, is 8 for this run" in stale[2]
    sized = "offload.max_memory.cpu=3GiB"  # this process counts, and holds what tests before this one loaded
    assert fuyou("plan", "recipe.yaml", sized, "--dry-run", "-o", "sized.json")[0] == 0
    text = (project.folder / "sized.json").read_text()
    (project.folder / "edited.json").write_text(re.sub(r'"placement": "\w', '"placement": "-', text))
    edited = fuyou("finetune", "recipe.yaml", sized, "--plan", "edited.json")
    assert edited[0] == 2 and "edited.json: placement: with this recipe and this fuyou something else comes" in edited[2]
    done = project.fuyou("finetune", "recipe.yaml", "logging.every_steps=2", "--plan", "plan.json")
    assert done.returncode == 0, done.stderr
    planned = json.loads(out)["plan"]
    records = [json.loads(line) for line in (project.out / "log.jsonl").read_text().splitlines()]
    (promised,) = (record for record in records if record["event"] == "plan")
    assert promised["arena"] == planned["arena_size"]
    assert (
        promised["choice"].startswith(f"{planned['lookahead']} stages fetched early, ")
        and "0% of the weights in RAM" in promised["choice"]
    )
    assert promised["predicted_written_by"] == planned["predicted"]["written_by"]
    (end,) = (record for record in records if record["event"] == "end")
    lines = {line["what"]: line for line in end["compared"]}
    assert {"peak RAM", "step", "compute under way", "update under way", "ssd read", "ssd written", "waiting"} <= set(lines)
    assert lines["ssd written"]["predicted"] == planned["predicted"]["written_per_step"]
    assert end["saved_bytes"] == 0  # everything rests on the ssd as it is
    step = [record for record in records if record["event"] == "step"][-1]
    assert lines["compute under way"]["measured"] == step["busy"]["compute"] > 0
    broken, changed = re.subn(r'"lookahead": (\d)', r'"lookahead": -\1', (project.folder / "plan.json").read_text())
    assert changed
    (project.folder / "plan.json").write_text(broken)
    assert fuyou("finetune", "recipe.yaml", "--plan", "plan.json")[0] == 2
    assert fuyou("finetune", "recipe.yaml", "--plan", "plan.json", "--dry-run")[0] == 2
    missing = fuyou("finetune", "recipe.yaml", "--plan", "no.json")
    assert missing[0] == 2 and "cannot read the plan no.json" in missing[2]


def test_how_long_the_epochs_are(new_project: NewProject, command: Callable[[Project], Command]) -> None:
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


@pytest.mark.parametrize("content", ["model: {name_or_path: m}\n", '{"text": "a row"}\n'])
def test_a_plan_is_written_over_plans_alone(
    content: str, new_project: NewProject, command: Callable[[Project], Command]
) -> None:
    project = new_project()
    fuyou = command(project)
    (project.folder / "mine").write_text(content)
    code, _, err = fuyou("plan", "recipe.yaml", "--dry-run", "-o", "mine")
    assert code == 2 and "-o mine: exists and is not a plan" in err
    assert (project.folder / "mine").read_text() == content
    assert fuyou("plan", "recipe.yaml", "--dry-run", "-o", ".")[0] == 2
    (project.folder / "mine").write_text("")
    for _ in range(2):
        assert fuyou("plan", "recipe.yaml", "--dry-run", "-o", "mine")[0] == 0


def test_a_plan_takes_the_place_of_no_device_pipe_or_link(
    new_project: NewProject, command: Callable[[Project], Command]
) -> None:
    """Refuses what has a reader that would be waited for, or is found by nobody afterwards."""
    project = new_project()
    fuyou = command(project)
    os.mkfifo(project.folder / "pipe")
    (project.folder / "link").symlink_to("/dev/null")
    for name in ("pipe", "link", "/dev/null", "/dev/stdout"):
        code, _, err = fuyou("plan", "recipe.yaml", "--dry-run", "-o", name)
        assert code == 2 and f"-o {name}: it is there already and is no plain file" in err
    assert (project.folder / "pipe").is_fifo() and (project.folder / "link").is_symlink()


def test_much_data_is_not_read_for_a_plan(
    new_project: NewProject, command: Callable[[Project], Command], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_a_run_would_be_refused_for_is_said_before_the_plan(
    new_project: NewProject, command: Callable[[Project], Command]
) -> None:
    """Nobody reads `fits` and finds a run refused."""
    project = new_project()
    fuyou = command(project)
    (project.out / "model").mkdir(parents=True)
    (project.out / "model" / "thesis.tex").write_text("mine")
    for refused in (("plan", "recipe.yaml", "--dry-run", "--json"), ("plan", "recipe.yaml", "--dry-run")):
        code, out, err = fuyou(*refused)
        assert (code, out) == (2, "") and "thesis.tex" in err
    code, out, err = fuyou("plan", "recipe.yaml", "--dry-run", f"output_dir={project.recipe}/out")
    assert (code, out) == (2, "") and "is a file" in err
    assert fuyou("plan", "recipe.yaml", "--hardware", MACHINE, "offload.device=auto")[0] == 0  # nothing is written there


def test_a_run_past_the_fast_region_is_planned_with_what_drives_sustain(
    new_project: NewProject, command: Callable[[Project], Command]
) -> None:
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


@pytest.mark.slow
def test_a_budget_above_the_machine_does_not_fit(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    """Counts what the plan takes, not what it was allowed: the budget alone refuses nothing."""
    project = new_project(changes={"offload.device": "auto"})
    fuyou = command(project)
    many = "offload.max_memory.cpu=64GiB"
    small = "rtx4090,2xgen4,3GiB"  # 1 GiB beside the system: the process alone takes twice that
    shown = fuyou.json("--hardware", small, many, code=3)
    (problem,) = shown["problems"]
    assert "1.00 GiB are free: lower offload.max_memory.cpu" in problem
    assert fuyou.json("--hardware", "rtx4090,2xgen4,8GiB", many)["fits"]
    assert fuyou("plan", "recipe.yaml", "--hardware", small, many)[0] == 3


def test_a_saved_run_is_planned_from_where_it_stands(stopped: Project, command: Callable[[Project], Command]) -> None:
    """Plans hours, bytes and wear of the steps that are left, with the numbers that the run began with; looks at its state
    alone."""
    saved, kept = manifest_of(stopped), (store_of(stopped) / manifests.NAME).read_bytes()
    left = STEPS - saved.step
    assert 0 < left < STEPS
    stopped.write_recipe({"train.max_steps": STEPS, "train.micro_batch_size": "auto"})
    fuyou = command(stopped)
    shown = fuyou.json("--dry-run", "-o", "plan.json")
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
    assert code == 0 and "train.batch_size was 4, is 8. A run would be refused" in said
    assert "see the notes below" in said and "Run: fuyou" not in said
    assert fuyou.json("--dry-run", "train.batch_size=8")["done"] is None
    other_mode = fuyou.json("--dry-run", "checkpoint.mode=redo")
    assert other_mode["done"] is None and other_mode["commits"]["mode"] == "redo"
    assert fuyou.json("--dry-run", "checkpoint.resume=never")["done"] is None
    assert fuyou.json("--hardware", MACHINE, "offload.device=auto")["done"] is None  # nothing of it is there
    assert (store_of(stopped) / manifests.NAME).read_bytes() == kept
    done = stopped.fuyou("finetune", "recipe.yaml", "--plan", "plan.json")
    assert done.returncode == 0, done.stderr
    finished = fuyou.json("--dry-run")
    assert (finished["done"], finished["run_seconds"], finished["writes"]["steps"]) == (STEPS, 0, 0)
    assert "all steps are done" in fuyou("plan", "recipe.yaml", "--dry-run")[1]
