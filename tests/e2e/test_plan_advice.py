"""Changes that `fuyou plan` names where a run does not fit or wears a drive out: of the store's kind and of what is kept; and
what the disks have for a store."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from fuyou_cli.advice.facts import described_disks, disks_of, facts_of, plan_problems, room_of
from fuyou_cli.advice.planning import candidates
from fuyou_cli.core import disk
from fuyou_cli.machine.described import described
from fuyou_cli.machine.profile import assumed_hardware
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.plan_step import plan
from fuyou_cli.training.prepare import DiskShare, Planned, StoreDisks, inspect, resolve, run_directories
from fuyou_cli.training.state.store_folders import STORE_FILE

from .conftest import CommandIn, NewProject, Project
from .running import manifest_of, silent
from .test_plan_command import HERE


def test_a_saved_run_keeps_its_numbers_and_its_store(stopped: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped.write_recipe({"train.max_steps": manifest_of(stopped).step + 100})
    prepared = _planned(stopped, monkeypatch, PLENTY)
    assert prepared.manifest is not None
    fixed = ("train.", "dataset.", "precision.")
    for fits in (True, False):
        found = [key for kind in candidates(prepared, fits=fits) for step in kind.steps for key in step]
        assert found and not [key for key in found if key.startswith(fixed)]
    anew = list(candidates(replace(prepared, saved=None), fits=False))
    assert any(key.startswith("train.") for kind in anew for step in kind.steps for key in step)
    there = replace(prepared, plan=replace(prepared.plan, device="cuda"))
    advised = [facts_of(one, room_of(one)).may_compile for one in (there, replace(there, saved=None))]
    assert advised == [False, True]


def test_states_in_ram_are_committed_less_often(new_project: NewProject, command: CommandIn) -> None:
    in_ram = {f"offload.{what}": "cpu" for what in ("weights", "optimizer_states", "gradients", "boundaries")}
    project = new_project(changes={**HERE, **in_ram, "train.max_steps": 1000, "checkpoint.commit_every_steps": 1})
    fuyou = command(project)
    small_drive = fuyou.machine(rated_bytes="1GB")
    shown = fuyou.json(*small_drive)
    assert shown["wear"] > 0.3
    rarer = "checkpoint.commit_every_steps=10"
    assert [rarer] in [change["overrides"] for change in shown["changes"]]
    again = fuyou.json(*small_drive, rarer)
    assert again["wear"] < 0.3 and again["writes"]["steps"] == pytest.approx(shown["writes"]["steps"] / 10, rel=1e-3)


def test_compiling_is_advised_where_it_is_possible(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    project = new_project()

    def advised(*changes: str, device: str = "cuda") -> bool:
        prepared = _planned(project, monkeypatch, PLENTY, *changes)
        there = replace(prepared, plan=replace(prepared.plan, device=device))
        return facts_of(there, room_of(there)).may_compile

    assert advised() and not advised(device="cpu")
    for key in ("train.compile=true", "dataset.packing=isolated", "freeze=[transformer.h.0]"):
        assert not advised(key), key


def test_outputs_that_are_kept_may_be_computed_again(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    project = new_project(changes={"train.batch_size": 1024})
    recompute = ("offload.activations=recompute",)

    def steps(*changes: str) -> list[tuple[str, ...]]:
        return [step for kind in candidates(_planned(project, monkeypatch, PLENTY, *changes), fits=True) for step in kind.steps]

    assert recompute in steps() and recompute not in steps(*recompute)


def _large_llama(folder: Path, new_project: NewProject, **size: int) -> Project:
    """Makes a recipe of 8 rows of 4,096 tokens a step for a Llama that only has a configuration."""
    LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, architectures=["LlamaForCausalLM"], **size,
    ).save_pretrained(folder / "large")  # fmt: skip
    anywhere = {f"offload.{what}": "auto" for what in ("weights", "optimizer_states", "gradients", "boundaries")}
    batch = {"train.batch_size": 8, "train.micro_batch_size": "auto", "train.max_steps": 1000, "dataset.max_seq_len": 4096}
    model = {"model.name_or_path": str(folder / "large"), "precision.compute": "bfloat16"}
    return new_project(changes={**HERE, **anywhere, **batch, **model})


SMALL = ["optimizer.state_dtype=int8", "precision.grad_accum=bfloat16"]
LARGER = ["train.batch_size=32", "train.max_steps=250"]


@pytest.mark.slow
def test_small_states_and_sums_lead_where_larger_batches_gain_less(
    new_project: NewProject, command: CommandIn, tmp_path: Path
) -> None:
    """8B on two drives with 64 GiB. Compute is the busiest, and yet the drives limit the step: a backward runs twice, as
    gradients find no room. The command that is told gives the figures that are told."""
    size = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    fuyou = command(_large_llama(tmp_path, new_project, **size))
    machine = ("--hardware", "rtx4090,2xgen4,64GiB")
    shown = fuyou.json(*machine)
    assert shown["plan"]["norm_first"] and shown["plan"]["predicted"]["bottleneck"] == "compute"
    small, larger = shown["faster"]
    assert small["overrides"][:2] == SMALL and larger["overrides"][:2] == LARGER
    assert small["alters"] == ["states rounded to int8", "gradients summed in bfloat16"]
    assert larger["alters"] == ["32 rows a step instead of 8"]
    assert small["figures"]["tokens_per_second"] > 1.1 * larger["figures"]["tokens_per_second"]
    assert small["figures"]["step_seconds"] < 0.6 * shown["plan"]["predicted"]["step_seconds"]
    for way in (small, larger):
        again = fuyou.json(*machine, *way["overrides"])
        assert again["plan"]["predicted"]["step_seconds"] == way["figures"]["step_seconds"]
        assert again["plan"]["predicted"]["written_per_step"] == way["figures"]["written_per_step"]
        busy = again["plan"]["predicted"]["seconds"]["compute"]
        assert way is larger or way["figures"]["step_seconds"] < 1.25 * busy
    _, out, _ = fuyou("plan", "recipe.yaml", *machine)
    told = " ".join(out.split())
    assert f"next add {' '.join(SMALL)}" in told and f" or add {' '.join(LARGER)}" in told
    for way in (small, larger):
        assert f"{way['figures']['tokens_per_second']:,.0f} tokens/s instead of {shown['tokens_per_second']:,.0f}" in told
    assert f"try fuyou plan recipe.yaml {' '.join(small['overrides'])} {' '.join(machine)}" in told


@pytest.mark.slow
def test_larger_batches_lead_where_they_gain_more(new_project: NewProject, command: CommandIn, tmp_path: Path) -> None:
    """70B on one drive: even small states are many more bytes than 8 rows compute. The drive has no room for an export as well,
    nor for what a plan of 32 rows takes that is not searched."""
    size = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    fuyou = command(_large_llama(tmp_path, new_project, **size))
    few = "train.max_steps=100"  # more would wear the drive out
    shown = fuyou.json("--hardware", "rtx4090,gen4,64GiB", "export.at_end=false", few)
    larger, small = shown["faster"]
    assert larger["overrides"][:2] == ["train.batch_size=32", "train.max_steps=25"] and small["overrides"][:2] == SMALL
    speeds = [way["figures"]["tokens_per_second"] for way in (larger, small, {"figures": shown})]
    assert speeds[0] > 1.2 * speeds[1] > 1.2 * speeds[2]


@pytest.mark.slow
def test_commits_that_a_kill_makes_dear_may_be_made_sooner(new_project: NewProject, command: CommandIn, tmp_path: Path) -> None:
    """8B in 128 GiB: states rest in RAM. The plan with the key that is told costs what is told."""
    size = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    fuyou, machine = command(_large_llama(tmp_path, new_project, **size)), ("--hardware", "rtx4090,gen4,128GiB")
    _, out, _ = fuyou("plan", "recipe.yaml", *machine)
    told = re.search(
        r"commits every \d+ steps: a crash loses at most (\d+)m \d\ds, commits take ([\d.]+)% of the time and \d+% of the "
        r"writes; with (checkpoint.commit_every_steps=\d+) at most (\d+)m \d\ds, for ([\d.]+)% of the time;",
        " ".join(out.split()),
    )
    assert told is not None
    lost, share, key, less, more = told.groups()
    assert int(lost) > 40 and 0 < float(share) <= 2.5 < float(more) < 20 and int(less) in (8, 9, 10)
    costs = fuyou.json(*machine, key)["commits"]["costs"]
    assert costs["lost"] <= 600 and 100 * costs["time"] == pytest.approx(float(more), abs=0.2)


@pytest.mark.slow
def test_what_makes_a_run_fit_is_said_where_its_drives_are_worn_anyway(new_project: NewProject, command: CommandIn) -> None:
    project = new_project(changes={**HERE, "train.max_steps": 1000})
    fuyou = command(project)
    small_drive = fuyou.machine(rated_bytes="1MB")
    whole = fuyou.json(*small_drive)["plan"]["store_size"]
    limit = f"offload.max_memory.ssd={whole - 1}"
    shown = fuyou.json(*small_drive, limit, code=3)
    assert shown["changes"]
    for change in shown["changes"]:
        assert fuyou.json(*small_drive, limit, *change["overrides"])["wear"] > 1
    code, out, _ = fuyou("plan", "recipe.yaml", *small_drive, limit)
    assert code == 3 and "of these still writes" in " ".join(out.split())


def test_smaller_states_where_a_drive_is_worn_or_binds(new_project: NewProject, command: CommandIn) -> None:
    """Says what they gain, which is what the plan with them says."""
    project = new_project(changes={**HERE, "train.max_steps": 1000})
    fuyou, int8 = command(project), "optimizer.state_dtype=int8"
    machine = {"parts": "1xgen4,64GiB", "store_read": 1e6, "store_write": 1e6}
    (project.folder / "slow.yaml").write_text(yaml.safe_dump(machine))
    shown = fuyou.json("--hardware", "slow.yaml")
    (told,) = (way for way in shown["faster"] if int8 in way["overrides"])
    _, out, _ = fuyou("plan", "recipe.yaml", "--hardware", "slow.yaml")
    assert f"add {int8}" in " ".join(out.split())
    small = fuyou.json("--hardware", "slow.yaml", *told["overrides"])
    assert not [way for way in small["faster"] if int8 in way["overrides"]]
    seconds = [found["plan"]["predicted"]["step_seconds"] for found in (small, shown)]
    assert seconds[0] == told["figures"]["step_seconds"] < seconds[1]
    (project.folder / "memory.yaml").write_text(yaml.safe_dump({"parts": "1xgen4,64GiB", "dram": 1e6}))
    bound = fuyou.json("--hardware", "memory.yaml", "offload.optimizer_states=ssd")
    assert bound["plan"]["predicted"]["bottleneck"] == "dram" and any(int8 in way["overrides"] for way in bound["faster"])
    written = shown["plan"]["predicted"]["written_per_step"]
    drives = [{"model": "small", "capacity": "1TB", "rated_bytes": round(1000 * written / 0.35)}]
    (project.folder / "worn.yaml").write_text(yaml.safe_dump({"parts": "1xgen4,64GiB", "drives": drives}))
    worn = fuyou.json("--hardware", "worn.yaml")
    helps = [change for change in worn["changes"] if int8 in change["overrides"]]
    assert worn["wear"] > 0.3 and helps and all(one["figures"]["written_per_step"] < 0.86 * written for one in helps)
    speeds = [change["figures"]["tokens_per_second"] for change in worn["changes"]]
    assert speeds[0] > 0.9 * max(speeds), "the best goes first, or nearly the best that changes less"


# ---- room for a store ----------------------------------------------------------------------------------------------------


PLENTY = 10**12


def _slow_computer(device: str) -> Any:
    """Makes a measured computer so slow that outputs are worth their room on the ssd."""
    return replace(assumed_hardware(device=device), measured="2026-01-01", matmul_flops=1e6)


def _planned(project: Project, monkeypatch: pytest.MonkeyPatch, free: int, *changes: str) -> Planned:
    """Plans on a machine whose disks say that `free` bytes are left."""
    monkeypatch.setattr(disk, "free_space", lambda path: free)
    recipe = load_recipe(project.recipe, changes).recipe
    inspected = inspect(resolve(recipe, to_run=False, say=silent), say=silent)
    return plan(inspected, _slow_computer(inspected.device), disks_of(inspected), say=silent)


def _preallocated(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def test_a_search_stays_within_what_the_run_may_have(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the recipe's limit, the export on the same disk, and on a resumed run a disk that its own store has filled."""
    project = new_project(changes={"train.batch_size": 1024})
    roomy = _planned(project, monkeypatch, PLENTY).plan
    recompute = _planned(project, monkeypatch, PLENTY, "offload.activations=recompute").plan
    least, most = recompute.store_size, roomy.store_size
    assert most > least, "outputs on the ssd take room there"
    limited = _planned(project, monkeypatch, PLENTY, f"offload.max_memory.ssd={most - 1}")
    assert limited.plan.store_size <= most - 1 and not plan_problems(limited.plan, room_of(limited))

    export = roomy.predicted.export_bytes
    beside = _planned(project, monkeypatch, most + export - 1)
    assert beside.plan.store_size < most and not plan_problems(beside.plan, room_of(beside))
    alone = _planned(project, monkeypatch, most + export - 1, "export.at_end=false")
    assert alone.plan.store_size == most

    (folder,) = run_directories(load_recipe(project.recipe).recipe)
    _preallocated(folder / STORE_FILE, least)
    resumed = _planned(project, monkeypatch, export + 4096)
    assert resumed.plan.store_size < most and not plan_problems(resumed.plan, room_of(resumed))


def test_files_on_one_disk_share_it(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    project = new_project(changes={"offload.dir": ["a", "b"], "export.at_end": False})
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(disk, "free_space", lambda path: 6 << 20)

    def room(*changes: str) -> int:
        resolved = resolve(load_recipe(project.recipe, changes).recipe, to_run=False, say=silent)
        return disks_of(resolved).budget(resolved.recipe, 1 << 20)

    assert room() == 6 << 20
    assert room("export.at_end=true") == 5 << 20
    assert room("offload.max_memory.ssd=3MiB") == 3 << 20
    _preallocated(run_directories(load_recipe(project.recipe).recipe)[0] / STORE_FILE, 2 << 20)
    assert room() == 8 << 20 and room("offload.max_memory.ssd=1TB") == 8 << 20
    monkeypatch.setattr(disk, "free_space", lambda path: 0)
    assert room("export.at_end=true") == 1 << 20


def test_what_is_shown_as_available_is_what_the_search_went_by(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export is left out, and of two drives twice what the fuller one has."""
    project = new_project()
    prepared = _planned(project, monkeypatch, PLENTY)
    assert room_of(prepared).store == PLENTY - prepared.plan.predicted.export_bytes
    shares = tuple(DiskShare(free=free, files=1, has_export=False) for free in (4 * 10**12, 5 * 10**11))
    assert StoreDisks(shares=shares, total=10**13).budget(prepared.recipe, 10**11) == 10**12


def test_a_described_machine_has_what_its_drives_have(new_project: NewProject) -> None:
    project = new_project()
    machine = described("2xgen4,64GiB")

    def room(*changes: str) -> int:
        recipe = load_recipe(project.recipe, changes).recipe
        return described_disks(machine).budget(recipe, 10**11)

    assert room("export.at_end=false") == 4 * 10**12
    assert room() == 39 * 10**11
    assert room("offload.max_memory.ssd=50%") == 2 * 10**12
