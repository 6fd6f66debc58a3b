"""Tests what lies in a run's `output_dir`, and who else is at it."""

from __future__ import annotations

import os

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.run_folders import claimed

from .conftest import NewProject
from .running import train


def test_two_runs_do_not_share_one(new_project: NewProject) -> None:
    """Refuses it also with stores of their own: either run would set the other's log aside, and write its model over."""
    project = new_project()
    with claimed(project.out, say=print):
        with pytest.raises(UsageError, match="another run uses"), claimed(project.out, say=print):
            pass
        refused = project.fuyou("finetune", project.recipe, f"offload.dir={project.folder}/elsewhere")
        assert refused.returncode == 2 and f"error: output_dir: another run uses {project.out}" in refused.stderr
        assert not any(project.out.iterdir()) and not (project.folder / "elsewhere").exists()
    with claimed(project.out, say=print):
        pass


def test_a_run_that_does_not_find_the_earlier_one_says_so(new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": 3, "export.at_end": False})
    _, store = train(project)
    (project.out / "log.jsonl").parent.mkdir(exist_ok=True)
    (project.out / "log.jsonl").write_text("{}\n")
    elsewhere = f"offload.dir={project.folder}/elsewhere"
    anew = project.fuyou("finetune", project.recipe, elsewhere)
    said = " ".join(anew.stderr.split())
    assert anew.returncode == 0 and "log.jsonl belongs to an earlier run that has no saved state in" in said
    assert (project.out / "log.jsonl.1").read_text() == "{}\n" and store.is_dir()
    again = project.fuyou("finetune", project.recipe, elsewhere)
    assert again.returncode == 0 and "belongs to an earlier run" not in again.stderr


@pytest.mark.parametrize("name", ["timeline.svg", "log.jsonl"])
def test_what_would_be_waited_for_or_followed_is_refused_first(name: str, new_project: NewProject) -> None:
    """Refuses the drawing too, which is the last thing that a run writes before its export."""
    project = new_project()
    project.out.mkdir()
    os.mkfifo(project.out / name)
    for _ in range(2):
        refused = project.fuyou("finetune", project.recipe)
        assert refused.returncode == 2 and f"{name} is not a regular file" in " ".join(refused.stderr.split())
        (project.out / name).unlink()
        (project.out / name).symlink_to(project.recipe)
