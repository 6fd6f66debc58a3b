"""Tests that a machine that nobody has measured is measured before a run is planned for it, and the layers of a recipe that is
new to it, unless the recipe or a flag says no."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fuyou_cli.machine.profile import read_profile, write_profile

from .conftest import HANGS, NewProject, Project, ended

# Little of everything, so that measuring for real is quick: it happens in a process of its own, which reads this at its start.
QUICK = """
from fuyou_cli.machine.measure import compute, store_rates, whole
whole.MATMUL_SECONDS, whole.REPEAT_SECONDS, whole.SHARED_WIDTH, whole.SHARED_QUICK_SECONDS = 0.01, 0.1, 256, 0.2
compute.WIDTHS, compute.QUICK_PAIR, compute.QUICK_SECONDS = (256,), 0.05, 0.1
compute.QUICK_RECIPE_PAIR, compute.SECONDS = 0.5, {"block": 0.5, "head": 0.5}
store_rates.QUICK_SPAN = 64 << 20
"""


def _said(project: Project, command: str, *arguments: str) -> str:
    """Returns what a command that ends well says on stderr."""
    hook = project.folder / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(QUICK)
    first = f"import os\nos.environ['PYTHONPATH'] = os.pathsep.join([{str(hook)!r}, os.environ['PYTHONPATH']])"
    done = ended(project.begin(command, project.recipe, *arguments, first=first), within=2 * HANGS)  # it measures
    assert done.returncode == 0, done.stderr
    return done.stderr


def _profile(project: Project) -> Path:
    (path,) = (project.folder / "cache").rglob("profile-*.json")
    return path


@pytest.mark.slow
def test_a_run_measures_its_machine_once(new_project: NewProject) -> None:
    project = new_project()
    project.write_recipe({"offload.measure": True, "checkpoint.resume": "never", "train.max_steps": 3})
    for said_no in ("--assume-rates", "offload.measure=false"):
        assert "measuring" not in _said(project, "finetune", said_no)
    assert not list((project.folder / "cache").rglob("profile-*.json"))
    first = _said(project, "finetune")
    assert "measuring this machine, once" in first and "measured in" in first and "layers" not in first
    assert "measuring this machine, once" not in _said(project, "finetune")  # again, where the first time others were busy


@pytest.mark.slow
def test_the_first_plan_of_a_recipe_measures_its_layers_and_the_second_does_not(new_project: NewProject) -> None:
    """Another recipe for the same machine has other layers, as with an adapter, rows of another length, or float32."""
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    project = new_project()
    project.write_recipe({"offload.measure": True})
    _said(project, "plan")
    before = replace(read_profile(_profile(project)), others_cores=0.0)
    write_profile(before, _profile(project))  # else a loud machine would be measured again once it is idle
    for changes in (["adapter={r: 4}"], ["dataset.max_seq_len=16"]):
        first = _said(project, "plan", *changes)
        assert "this model's layers" in first and "measured in" in first and "this machine" not in first
        assert "measuring" not in _said(project, "plan", *changes)
        assert "measuring" not in _said(project, "plan", *changes, "train.batch_size=2", "train.max_steps=7")
    assert "measuring" not in _said(project, "plan", "offload.measure=false", "precision.compute=float32")
    after = read_profile(_profile(project))
    assert set(before.stage_rates) <= set(after.stage_rates), "those of the first recipe are still there"
    own = [rate for rate in after.stage_rates if rate.layers]
    assert len({rate.layers for rate in own}) == 3 and {rate.kind for rate in own} == {"block", "head"}
    assert all(rate.forward > 0 and rate.backward_flops > rate.forward_flops for rate in own)
