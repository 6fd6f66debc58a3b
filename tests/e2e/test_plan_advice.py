"""Changes that `fuyou plan` names where a run does not fit or wears a drive out: of the store's kind and of what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from fuyou_cli.advice.changes import candidates
from fuyou_cli.advice.facts import facts_of
from fuyou_cli.advice.room import room_of

from .conftest import Command, Project
from .running import manifest_of, resolved_as
from .test_plan_command import HERE, NewProject
from .test_store_room import PLENTY, _planned

pytestmark = pytest.mark.usefixtures("served_here")


def test_a_store_of_another_kind_fits_the_disk(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    """Nothing else of the run changes."""
    snapshots = {"mode": "snapshot", "snapshot_every_steps": 2, "keep_last": 16}
    fuyou = command(new_project(changes={"checkpoint": snapshots}))
    whole = fuyou.json("--dry-run")["plan"]["store_size"]
    limit = f"offload.max_memory.ssd={whole - 1}"
    shown = fuyou.json("--dry-run", limit, code=3)["changes"]
    changes = [tuple(change["overrides"]) for change in shown]
    assert ("checkpoint.mode=redo", "checkpoint.snapshot_every_steps=null") in changes
    (fewer,) = (change for change in changes if change[0].startswith("checkpoint.keep_last="))
    assert fewer in (("checkpoint.keep_last=15",), ("checkpoint.keep_last=8",))  # a store is whole stripes
    for change in shown:
        assert fuyou.json("--dry-run", limit, *change["overrides"])["plan"]["store_size"] == change["figures"]["store_size"]


def test_ways_to_one_extent(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives none where the planner chooses it by itself, or the store is there already."""

    def ways(*changes: str) -> list[tuple[str, ...]]:
        prepared = _planned(project, monkeypatch, PLENTY, *changes)
        kinds = candidates(prepared, fits=False)
        return [step for kind in kinds for step in kind.steps if "checkpoint.mode=redo" in step]

    project = new_project()
    assert ways() == ways("checkpoint.mode=redo") == []
    rare = ways("checkpoint.commit_every_steps=10")
    assert rare == [("checkpoint.mode=redo", "checkpoint.commit_every_steps=1")]
    snapshots = ways("checkpoint.mode=snapshot", "checkpoint.snapshot_every_steps=2")
    assert snapshots == [("checkpoint.mode=redo", "checkpoint.snapshot_every_steps=null")]
    for (way,) in (rare, snapshots):
        assert _planned(project, monkeypatch, PLENTY, *way).plan.store_mode == "redo"


def test_a_saved_run_keeps_its_numbers_and_its_store(stopped: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped.write_recipe({"train.max_steps": manifest_of(stopped).step + 100})
    prepared = _planned(stopped, monkeypatch, PLENTY)
    assert prepared.manifest is not None
    fixed = ("train.", "dataset.", "precision.", "checkpoint.mode", "checkpoint.keep_last")
    for fits in (True, False):
        found = [key for kind in candidates(prepared, fits=fits) for step in kind.steps for key in step]
        assert found and not [key for key in found if key.startswith(fixed)]
    anew = list(candidates(resolved_as(prepared, manifest=None), fits=False))
    assert any(key.startswith("train.") for kind in anew for step in kind.steps for key in step)
    there = replace(prepared, plan=replace(prepared.plan, device="cuda"))
    advised = [facts_of(one, room_of(one)).may_compile for one in (there, resolved_as(there, manifest=None))]
    assert advised == [False, True]


def test_states_in_ram_are_committed_less_often(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    in_ram = {f"offload.{what}": "cpu" for what in ("weights", "optimizer_states", "gradients", "boundaries")}
    project = new_project(changes={**HERE, **in_ram, "train.max_steps": 1000, "checkpoint.commit_every_steps": 1})
    drives = [{"model": "small", "capacity": "1TB", "rated_bytes": "1GB"}]
    (project.folder / "machine.yaml").write_text(yaml.safe_dump({"parts": "1xgen4,64GiB", "drives": drives}))
    fuyou = command(project)
    shown = fuyou.json("--hardware", "machine.yaml")
    assert shown["wear"] > 0.3
    rarer = "checkpoint.commit_every_steps=10"
    assert [rarer] in [change["overrides"] for change in shown["changes"]]
    again = fuyou.json("--hardware", "machine.yaml", rarer)
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


@pytest.mark.slow
def test_smaller_states_where_a_backward_runs_twice_as_gradients_find_no_room(
    new_project: NewProject, command: Callable[[Project], Command], tmp_path: Path
) -> None:
    """Compute is the busiest then, and yet the drives limit the step. With int8 states it runs once."""
    LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "8b")  # fmt: skip
    anywhere = {f"offload.{what}": "auto" for what in ("weights", "optimizer_states", "gradients", "boundaries")}
    batch = {"train.batch_size": 8, "train.micro_batch_size": "auto", "train.max_steps": 1000, "dataset.max_seq_len": 4096}
    model = {"model.name_or_path": str(tmp_path / "8b"), "precision.compute": "bfloat16"}
    fuyou = command(new_project(changes={**HERE, **anywhere, **batch, **model}))
    shown = fuyou.json("--hardware", "rtx4090,2xgen4,64GiB")
    assert shown["plan"]["norm_first"] and shown["plan"]["predicted"]["bottleneck"] == "compute"
    told = shown["smaller_states"]["figures"]["step_seconds"]
    assert told < 0.75 * shown["plan"]["predicted"]["step_seconds"]


@pytest.mark.slow
def test_what_makes_a_run_fit_is_said_where_its_drives_are_worn_anyway(
    new_project: NewProject, command: Callable[[Project], Command]
) -> None:
    project = new_project(changes={**HERE, "train.max_steps": 1000})
    drives = [{"model": "small", "capacity": "1TB", "rated_bytes": "1MB"}]
    (project.folder / "machine.yaml").write_text(yaml.safe_dump({"parts": "1xgen4,64GiB", "drives": drives}))
    fuyou = command(project)
    whole = fuyou.json("--hardware", "machine.yaml")["plan"]["store_size"]
    limit = f"offload.max_memory.ssd={whole - 1}"
    shown = fuyou.json("--hardware", "machine.yaml", limit, code=3)
    assert shown["changes"]
    for change in shown["changes"]:
        assert fuyou.json("--hardware", "machine.yaml", limit, *change["overrides"])["wear"] > 1
    code, out, _ = fuyou("plan", "recipe.yaml", "--hardware", "machine.yaml", limit)
    assert code == 3 and "of these still writes" in " ".join(out.split())


def test_smaller_states_where_a_drive_is_worn_or_binds(new_project: NewProject, command: Callable[[Project], Command]) -> None:
    """Says what they gain, which is what the plan with them says."""
    project = new_project(changes={**HERE, "train.max_steps": 1000})
    fuyou, int8 = command(project), "optimizer.state_dtype=int8"
    machine = {"parts": "1xgen4,64GiB", "store_read": 1e6, "store_write": 1e6}
    (project.folder / "slow.yaml").write_text(yaml.safe_dump(machine))
    shown = fuyou.json("--hardware", "slow.yaml")
    told = shown["smaller_states"]
    assert int8 in told["overrides"]
    _, out, _ = fuyou("plan", "recipe.yaml", "--hardware", "slow.yaml")
    assert f"add {int8}" in " ".join(out.split())
    small = fuyou.json("--hardware", "slow.yaml", *told["overrides"])
    assert small["smaller_states"] is None
    seconds = [found["plan"]["predicted"]["step_seconds"] for found in (small, shown)]
    assert seconds[0] <= told["figures"]["step_seconds"] < seconds[1]
    (project.folder / "memory.yaml").write_text(yaml.safe_dump({"parts": "1xgen4,64GiB", "dram": 1e6}))
    bound = fuyou.json("--hardware", "memory.yaml", "offload.optimizer_states=ssd")
    assert bound["plan"]["predicted"]["bottleneck"] == "dram" and int8 in bound["smaller_states"]["overrides"]
    written = shown["plan"]["predicted"]["written_per_step"]
    drives = [{"model": "small", "capacity": "1TB", "rated_bytes": round(1000 * written / 0.35)}]
    (project.folder / "worn.yaml").write_text(yaml.safe_dump({"parts": "1xgen4,64GiB", "drives": drives}))
    worn = fuyou.json("--hardware", "worn.yaml")
    (helps,) = (change for change in worn["changes"] if int8 in change["overrides"])
    assert worn["wear"] > 0.3 and helps["figures"]["written_per_step"] < 0.86 * written
