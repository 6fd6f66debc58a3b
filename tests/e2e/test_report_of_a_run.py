"""Tests `fuyou report` of a real run: its figures are the log's, and it has a timeline and what was predicted."""

from __future__ import annotations

import json

from .conftest import NewProject


def test_a_run_can_be_looked_at_afterwards(new_project: NewProject) -> None:
    project = new_project()
    ran = project.fuyou("finetune", project.recipe)
    assert ran.returncode == 0, ran.stderr
    shown = project.fuyou("report", project.out)
    assert shown.returncode == 0 and "6 of 6: all steps are done" in shown.stdout, shown.stderr
    assert "Predicted and measured" in shown.stdout and "One step" in shown.stdout
    told = json.loads(project.fuyou("report", project.recipe, "--json", "--html", "run.html").stdout)
    assert {step["step"]: step["loss"] for step in told["steps"]} == project.losses()
    assert told["ended"] and {line["what"] for line in told["compared"]} >= {"peak RAM", "step", "ssd read", "ssd written"}
    assert told["measured"]["written_total"] >= sum(step["written_bytes"] for step in told["steps"]) > 0
    page = (project.folder / "run.html").read_text()
    assert "The last step" in page and "compute" in page
