"""Tests `fuyou plan` for machines one has and has not, its file, and a run of that very plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fuyou_cli.core.probe import mount_of
from fuyou_cli.core.units import GiB
from fuyou_cli.machine.profile import _measured, assumed_hardware, keep

from .conftest import CommandIn, NewProject

MACHINE = "rtx4090,2xgen4,128GiB"
HERE = {"offload.device": "auto", "offload.max_memory.cpu": "90%"}


def test_a_described_machine_stands_in_for_this_one(new_project: NewProject, command: CommandIn) -> None:
    project = new_project(changes=HERE)
    fuyou = command(project)
    shown = fuyou.json("--hardware", MACHINE)
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
    assert str(project.materials) not in json.dumps(shown["plan"] | {"model": ""})
    assert sorted(path.name for path in project.folder.iterdir()) == ["kept", "recipe.yaml"]  # no store
    assert [path.name for path in (project.folder / "kept/fuyou").iterdir()] == ["models"]  # no profile


def test_two_processes_make_the_same_plan(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares on this machine: what differs between two processes, their own size above all, is in neither plan."""
    project = new_project()
    monkeypatch.setenv("XDG_CACHE_HOME", project.environment()["XDG_CACHE_HOME"])
    keep(replace(assumed_hardware(project.folder), measured="2026-01-02", process_bytes=GiB), project.folder, say=print)
    first, second = (json.loads(project.fuyou("plan", project.recipe, "--json").stdout) for _ in range(2))
    assert first["plan"] == second["plan"]
    assert first["hardware"]["process_bytes"] >= GiB  # by the process of the kept profile


def test_a_store_in_memory_is_warned_of(new_project: NewProject) -> None:
    memory = mount_of(Path("/dev/shm"))
    if memory is None or memory.kind != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    project = new_project(changes={"offload.dir": "/dev/shm/fuyou-store"})
    said = " ".join(project.fuyou("plan", project.recipe, "--dry-run").stdout.split())
    assert "is memory (tmpfs), not a drive" in said and "lost at the next reboot" in said
    assert "not a drive" not in project.fuyou("plan", new_project("other").recipe, "--dry-run").stdout
    assert not Path("/dev/shm/fuyou-store").exists()


def test_the_screen_fits_80_columns(new_project: NewProject, command: CommandIn) -> None:
    fuyou = command(new_project(changes=HERE))
    code, out, _ = fuyou("plan", "recipe.yaml", "--hardware", MACHINE, "-v")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    for words in (
        "described, profile",
        "Rates of this machine",
        "Ratel (ICDE 2025), measured peak",
        "specification, not measured",  # a drive's source is no column of a word a line
        "head and backward",
        "fits: RAM",
    ):
        assert words in " ".join(out.split()), words
    assert "fuyou finetune" not in out  # that machine is not here


def test_a_pinned_device_and_a_described_one_must_agree(new_project: NewProject, command: CommandIn) -> None:
    code, _, err = command(new_project())("plan", "recipe.yaml", "--hardware", MACHINE)
    assert code == 2 and "offload.device: cpu, but the described machine computes on cuda" in err
    assert "offload.device=auto" in err


def test_nothing_is_measured_for_a_recipe_that_is_refused(new_project: NewProject, command: CommandIn) -> None:
    code, _, err = command(new_project())("plan", "recipe.yaml", "model.name_or_path=./nowhere")
    assert code == 2 and "nowhere" in err and "measuring" not in err


def test_why_a_machine_could_not_be_measured() -> None:
    code, why = _measured(["--nope"], ())
    assert code == 2 and why.startswith("No such option: --nope")


def test_changes_are_ones_that_make_it_fit(new_project: NewProject, command: CommandIn) -> None:
    fuyou = command(new_project(changes={"offload.max_memory": {"cpu": "90%", "ssd": "6MB"}, "train.batch_size": 1024}))
    shown = fuyou.json("--dry-run", code=3)
    assert shown["problems"] and shown["assumed"]
    overrides = [change["overrides"] for change in shown["changes"]]
    same_numbers = {("offload.boundaries=auto",), ("offload.max_memory.ssd=auto",)}
    assert {tuple(keys) for keys in overrides[:2]} == same_numbers  # one key each: they come before what changes the run
    assert overrides[2][0].startswith("train.batch_size=")
    for change in shown["changes"][:3]:
        again = fuyou.json("--dry-run", *change["overrides"])
        assert again["fits"] and again["plan"]["store_size"] == change["figures"]["store_size"]


def test_a_run_that_wears_a_drive_out_is_told_a_larger_batch(
    new_project: NewProject, command: CommandIn, tmp_path: Path
) -> None:
    project = new_project(changes={**HERE, "train.max_steps": 1000})
    fuyou = command(project)
    small_drive = fuyou.machine(rated_bytes="1GB", used_bytes="100MB")
    code, out, _ = fuyou("plan", "recipe.yaml", *small_drive)
    said = " ".join(out.split())
    assert code == 0 and "warning: the run writes" in said and "of a drive's rated writes" in said
    assert "10% used before" in said
    shown = fuyou.json(*small_drive)
    assert shown["wear"] > 0.3
    changes = {tuple(change["overrides"]): change["figures"] for change in shown["changes"]}
    larger = next(keys for keys in changes if keys[0].startswith("train.batch_size="))
    batch, steps = (int(key.partition("=")[2]) for key in larger)
    assert batch * steps == 4 * 1000  # as much training
    assert steps * changes[larger]["written_per_step"] <= 0.3e9 < shown["written_by_run"]


def test_a_change_that_is_pasted_gives_the_plan_that_was_shown(new_project: NewProject, command: CommandIn) -> None:
    """Checks it also where micro-batches are the planner's to choose: all 31 rows at once, which it would not do with 62."""
    batch = {"dataset.max_seq_len": 64, "train.max_steps": 1000, "train.batch_size": 31, "train.micro_batch_size": "auto"}
    project = new_project(changes={**HERE, **batch, "offload.boundaries": "cpu", "offload.gradients": "cpu"})
    fuyou = command(project)
    small_drive = fuyou.machine(rated_bytes="1GB")
    changes = fuyou.json(*small_drive)["changes"]
    assert any(change["overrides"][0].startswith("train.batch_size=") for change in changes)
    for change in changes:
        again = fuyou.json(*small_drive, *change["overrides"])
        figures = {**again, **again["plan"], **again["plan"]["predicted"]}
        assert {key: figures[key] for key in change["figures"]} == change["figures"], change["overrides"]


def test_the_plan_that_is_shown_is_run(new_project: NewProject, command: CommandIn) -> None:
    project = new_project(changes={"train.max_steps": 2, "export.at_end": False})
    code, out, _ = command(project)("plan", "recipe.yaml", "--dry-run", "--json")
    assert code == 0
    project.done("finetune", "recipe.yaml", "logging.every_steps=2")
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


def test_what_a_run_would_be_refused_for_is_said_before_the_plan(new_project: NewProject, command: CommandIn) -> None:
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
def test_a_budget_above_the_machine_does_not_fit(new_project: NewProject, command: CommandIn) -> None:
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
