"""Tests `fuyou plan` for machines one has and has not, its file, and a run of that very plan."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fuyou_cli.core.units import GiB
from fuyou_cli.machine.first_measurement import _measured
from fuyou_cli.machine.probe import mount_of
from fuyou_cli.machine.profile import assumed_hardware
from fuyou_cli.machine.profile_store import keep

from .conftest import Command, NewProject, Project

pytestmark = pytest.mark.usefixtures("served_here")

MACHINE = "rtx4090,2xgen4,128GiB"
HERE = {"offload.device": "auto", "offload.max_memory.cpu": "90%"}


def test_a_described_machine_stands_in_for_this_one(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    project = new_project(changes=HERE)
    fuyou = command(project)
    shown = fuyou.json("--hardware", MACHINE, "-o", "plan.json", "--compare")
    assert (shown["fits"], shown["assumed"], shown["plan"]["device"]) == (True, True, "cuda")
    origins = {rate["what"]: rate["origin"] for rate in shown["rates"]}
    assert origins["compute"] == "measured" and origins["store, both at once"] == origins["GPU memory"] == "assumption"
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
    assert others == sorted(others, key=lambda row: (row["slower"] is None, row["slower"] or 0.0, row["words"]))
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


def test_a_store_in_memory_is_warned_of(new_project: NewProject) -> None:
    memory = mount_of(Path("/dev/shm"))
    if memory is None or memory.kind != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    project = new_project(changes={"offload.dir": "/dev/shm/fuyou-store"})
    said = " ".join(project.fuyou("plan", project.recipe, "--dry-run").stdout.split())
    assert "is memory (tmpfs), not a drive" in said and "lost at the next reboot" in said
    assert "not a drive" not in project.fuyou("plan", new_project("other").recipe, "--dry-run").stdout
    assert not Path("/dev/shm/fuyou-store").exists()


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
