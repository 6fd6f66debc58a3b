"""Tests scripts/proof/alternatives.py: plans that are the recipe's, differ, and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, NewProject, Project, ended

AUTO = {f"offload.{key}": "auto" for key in ("weights", "optimizer_states", "gradients", "boundaries")}
CHANGES = {
    **AUTO, "train.clip_grad_norm": None, "train.max_steps": 2, "checkpoint.resume": "never", "export.at_end": False,
    "offload.activations": "recompute",  # fewer choices, whose bounds are all looked at
}  # fmt: skip


ALTERNATIVES, FORCED = (ROOT / "scripts" / "proof" / f"{name}.py" for name in ("alternatives", "forced_plan"))


def script(path: Path, *words: object) -> str:
    """Returns a program that runs a script with these words."""
    return (
        f"import runpy, sys\nsys.argv = {[str(path), *map(str, words)]!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )


def alternatives(project: Project, seed: int, *, larger: bool = False) -> list[dict[str, Any]]:
    """Returns what the script writes, in a process forked for it; `larger`: with 64 MB more than usual in it."""
    out = project.folder / f"plans-{seed}.json"
    more = "more = b'x' * 64_000_000\n" if larger else ""
    done = ended(project.begin(first=more + script(ALTERNATIVES, "--recipe", project.recipe, "--seed", seed, "--out", out)))
    assert done.returncode == 0, done.stderr
    plans: list[dict[str, Any]] = json.loads(out.read_text())
    return plans


def run(project: Project, plan: dict[str, Any]) -> dict[int, float]:
    file: Path = project.folder / "candidate.json"
    file.write_text(plan["plan"])
    words = ["finetune", project.recipe, *plan["overrides"], f"train.micro_batch_size={plan['micro']}"]
    done = ended(project.begin(first=script(FORCED, file, *words)))
    assert done.returncode == 0, done.stderr
    return project.losses()


@pytest.mark.slow
def test_the_chosen_plan_and_its_rivals_run_as_they_are(new_project: NewProject) -> None:
    project = new_project(changes=CHANGES)
    plans = alternatives(project, seed=7)
    drawn_again = alternatives(project, seed=7, larger=True)  # the process is never of quite the same size
    assert [[plan[key] for key in ("name", "choice", "overrides")] for plan in plans] == [
        [plan[key] for key in ("name", "choice", "overrides")] for plan in drawn_again
    ]
    assert plans[0]["name"] == "chosen" and len(plans) > 4
    names = [plan["name"] for plan in plans]
    assert {"all on the ssd", "half the micro-batch", "double the micro-batch"} <= set(names)
    assert len({plan["plan"] for plan in plans}) == len(plans)
    by_name = dict(zip(names, plans, strict=True))
    chosen = run(project, plans[0])
    drawn = next(plan for plan in plans if plan["name"].startswith("drawn"))
    assert run(project, drawn) == run(project, by_name["all on the ssd"]) == chosen  # where things rest changes no bit
    assert run(project, by_name["half the micro-batch"]) != chosen
