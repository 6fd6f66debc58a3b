"""Tests that a machine that nobody has measured is measured before a run is planned for it, unless the recipe or a flag says
no."""

from __future__ import annotations

import pytest

from .conftest import HANGS, NewProject, Project, ended

# Little of everything, so that measuring for real is quick: it happens in a process of its own, which reads this at its start.
QUICK = """
from fuyou_cli.machine.measure import recipe_stages, stages, store_rates, whole
whole.MATMUL_SECONDS, whole.REPEAT_SECONDS, whole.SHARED_WIDTH, whole.SHARED_QUICK_SECONDS = 0.01, 0.1, 256, 0.2
stages.WIDTHS, stages.QUICK_PAIR, stages.QUICK_SECONDS = (256,), 0.05, 0.1
recipe_stages.QUICK_PAIR, recipe_stages.SECONDS = 0.5, {"block": 0.5, "head": 0.5}
store_rates.QUICK_SPAN = 64 << 20
"""


def _finetune(project: Project, *arguments: str) -> str:
    """Returns what a run that ends well says on stderr."""
    hook = project.folder / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(QUICK)
    first = f"import os\nos.environ['PYTHONPATH'] = os.pathsep.join([{str(hook)!r}, os.environ['PYTHONPATH']])"
    done = ended(project.begin("finetune", project.recipe, *arguments, first=first), within=2 * HANGS)  # it measures
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_run_measures_its_machine_once(new_project: NewProject) -> None:
    project = new_project()
    project.write_recipe({"offload.measure": True, "checkpoint.resume": "never", "train.max_steps": 3})
    for said_no in ("--assume-rates", "offload.measure=false"):
        assert "measuring this machine" not in _finetune(project, said_no)
    assert not list((project.folder / "cache").rglob("profile-*.json"))
    first = _finetune(project)
    assert "measuring this machine, once" in first and "measured in" in first
    assert len(list((project.folder / "cache").rglob("profile-*.json"))) == 1
    assert "measuring this machine, once" not in _finetune(project)  # again, where the first time others were busy
