"""Tests losses of held-out rows between the steps of a run, as transformers computes them, beside training that does not
notice."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every

from fuyou_cli.core.errors import Interrupted, UsageError
from fuyou_cli.training.evaluation import after
from fuyou_cli.training.report import EvalReport
from fuyou_cli.training.run import Run
from fuyou_cli.training.state.manifest import Evaluated

from .conftest import CommandIn, NewProject, Project, WholeOf
from .running import STEPS, loaded_run, manifest_of, prepared_run, train

EXACT = {"train.max_steps": STEPS, "precision.compute": "float32"}
TEXTS = [f"held out row {number}: {'the quick brown fox ' * (number % 4)}jumps" for number in range(7)]


def with_sets(project: Project, changes: dict[str, Any]) -> list[Path]:
    """Makes two sets: seven rows, which is no multiple of a batch, and one."""
    files = [project.folder / "held-out.jsonl", project.folder / "one.jsonl"]
    for file, texts in zip(files, (TEXTS, TEXTS[-1:]), strict=True):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sets = [{"path": str(file), "format": "text"} for file in files]
    project.write_recipe({**changes, "dataset.eval": sets, "eval": {"every_steps": 2}})
    return files


def evaluated(project: Project, on_step: Callable[[Any], None] = lambda report: None) -> tuple[list[float], list[EvalReport]]:
    found: list[EvalReport] = []
    with loaded_run(project) as run:
        run.train(on_step, found.append)
        return run.losses, found


@torch.no_grad()
def in_memory(model_dir: Path, ready: Any, name: str) -> float:
    """The mean loss per label token of transformers' own forward."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows, total, count = ready.evaluated[name], 0.0, 0
    for index in range(len(rows)):
        ids = torch.from_numpy(rows.tokens(index).astype("int64"))[None]
        labels = ids.masked_fill(torch.from_numpy(rows.mask(index) == 0)[None], -100)
        counting = int((labels[:, 1:] != -100).sum())
        total, count = total + counting * float(model(input_ids=ids, labels=labels).loss), count + counting
    return total / count


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("clip", every(2, [0.5, None]), ids=["clipped", "unclipped"])
def test_beside_training(clip: float | None, new_project: NewProject, whole: WholeOf, command: CommandIn) -> None:
    changes = {**EXACT, "train.clip_grad_norm": clip}
    project = new_project(changes=changes)
    with_sets(project, changes)
    code, _, err = command(project)("finetune", "recipe.yaml")
    assert code == 0, err
    records = [json.loads(line) for line in (project.out / "log.jsonl").read_text().splitlines()]
    found = [record for record in records if record["event"] == "eval"]
    assert [(record["step"], record["name"]) for record in found] == [
        (step, name) for step in (0, 2, 4, 6) for name in ("held-out", "one")
    ]
    assert list(project.losses().values()) == whole(changes).losses
    assert [record["rows"] for record in found[:2]] == [7, 1]
    assert all(record["perplexity"] == math.exp(record["loss"]) for record in found)
    assert len({record["loss"] for record in found}) == len(found)  # each of other weights or rows
    ready = prepared_run(project)
    for begin, model in ((0, project.materials / "model"), (-2, project.out / "model")):
        for record in found[begin : begin + 2 or None]:
            assert record["loss"] == pytest.approx(in_memory(model, ready, record["name"]), rel=1e-6)
    assert err.count("eval at step 2  held-out  loss ") == 1


def test_stopped_in_an_evaluation(new_project: NewProject, whole: WholeOf) -> None:
    """The step before is saved; the run resumed evaluates there anew, and its losses are those of one never stopped."""
    project = new_project(changes=EXACT)
    with_sets(project, EXACT)
    seen: list[int] = []

    def stop(run: Run) -> None:
        if run.stopping.doing == "evaluating" and run.step == 2 and not seen:
            seen.append(run.step)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=f"stopped after step 2 of {STEPS}"):
        train(project, stop)
    assert seen and manifest_of(project).step == 2
    losses, found = evaluated(project)
    assert losses == whole(EXACT).losses
    assert [report.step for report in found] == [2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("stopped_after", [2, 3])
def test_early_stopping_goes_on_from_where_it_was(stopped_after: int, new_project: NewProject, whole: WholeOf) -> None:
    """Ends the run after two evaluations that are no better, in one process or in two; the next command trains no further."""
    changes = {**EXACT, "train.early_stopping": {"patience": 2, "min_delta": 100.0}}
    project, seen = new_project(changes=changes), list[int]()
    with_sets(project, changes)

    def stop(run: Run) -> None:
        if not seen and (run.stopping.doing == "evaluating") == (run.step % 2 == 0) and run.step == stopped_after:
            seen.append(run.step)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(project, stop)
    assert manifest_of(project).step == stopped_after
    losses, found = evaluated(project)
    assert losses == whole(EXACT).losses[:4]
    saved = manifest_of(project)
    assert saved.step == 4 and saved.evaluated is not None
    first = saved.evaluated.bar  # the loss at the start: min_delta is for patience alone
    assert first is not None and saved.evaluated.best is not None and saved.evaluated.best < first
    assert (saved.evaluated.step, saved.evaluated.worse) == (4, 2) and saved.evaluated.best_step > 0
    assert [report.step for report in found] == [step for step in (2, 4) if step >= stopped_after for _ in range(2)]
    assert evaluated(project) == (losses, [])


def test_losses_of_other_rows_wait_until_they_are_back(new_project: NewProject) -> None:
    """Counts early stopping from the first loss of another first set on, and goes on with the set before when it is back."""
    changes = {**EXACT, "train.early_stopping": {"patience": 2, "min_delta": 100.0}}
    project, said = new_project(changes=changes), list[str]()
    _, one = with_sets(project, changes)
    first = project.recipe.read_text()

    def stop(run: Run) -> None:
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(project, stop)
    before = manifest_of(project).evaluated
    assert before is not None and (before.step, before.worse, before.set_name) == (2, 1, "held-out")
    sets = {"dataset.eval": [{"path": str(one), "format": "text"}], "eval": {"every_steps": 2}}
    project.write_recipe({**changes, **sets})
    losses, _ = train(project, say=said.append)
    found = manifest_of(project).evaluated
    assert len(losses) == STEPS and found is not None and (found.step, found.worse, found.set_name) == (6, 1, "one")
    train(project, say=said.append)
    note = "note: the losses so far are of other rows ('held-out'): early stopping and the best weights start over"
    assert said.count(note) == 1
    project.recipe.write_text(first)
    train(project, say=said.append)
    assert said[-2].endswith("('one'): early stopping goes on from these rows' loss after step 2, the best weights too")
    back, (aside,) = manifest_of(project).evaluated, manifest_of(project).evaluated_before
    assert back is not None and (back.step, back.worse, back.set_name, back.bar) == (6, 2, "held-out", before.bar)
    assert aside == found


def test_what_early_stopping_goes_by() -> None:
    found, seen = None, []
    for step, loss in enumerate([math.nan, 3.0, 2.95, math.inf, 2.8]):
        found = after(found, step, loss, 0.1)
        seen.append((found.best, found.best_step, found.worse, found.bar))
    assert seen == [(None, 0, 1, None), (3.0, 1, 0, 3.0), (2.95, 2, 1, 3.0), (2.95, 2, 2, 3.0), (2.8, 4, 0, 2.8)]
    older = Evaluated(step=2, best=3.0, best_step=1, worse=1)  # of a manifest that knew no other loss
    assert after(older, 3, 2.95, 0.1) == Evaluated(step=3, best=2.95, best_step=3, worse=2, bar=3.0)


def test_rows_held_back_are_evaluated_and_never_trained_on(new_project: NewProject) -> None:
    """Trains a stopped and resumed run on the rows of one never stopped: those held back are the same in each process."""
    held = {**EXACT, "dataset.eval_fraction": 0.1, "dataset.packing": "concat", "eval": {"every_steps": 4}}
    whole, project, seen = new_project("whole", held), new_project(changes=held), list[int]()

    def stop(run: Run) -> None:
        if run.step == 3 and not seen:
            seen.append(run.step)
            os.kill(os.getpid(), signal.SIGINT)

    losses, reports = evaluated(whole)
    ready = prepared_run(whole)
    rows = ready.evaluated["held-back"]
    assert [(report.step, report.rows) for report in reports] == [(step, len(rows)) for step in (0, 4, 6)] and len(rows) == 6
    assert reports[0].loss == pytest.approx(in_memory(whole.materials / "model", ready, "held-back"), rel=1e-6)
    trained = b"".join(ready.rows.tokens(row).tobytes() for row in range(len(ready.rows)))
    assert not any(rows.tokens(row)[1:-1].tobytes() in trained for row in range(len(rows)))
    with pytest.raises(Interrupted):
        train(project, stop)
    resumed, later = evaluated(project)
    assert resumed == losses
    assert [(one.step, one.loss) for one in later] == [(one.step, one.loss) for one in reports[1:]]


def test_a_set_that_is_not_there_is_named(new_project: NewProject) -> None:
    project = new_project(changes={**EXACT, "dataset.eval": [{"path": "nowhere.jsonl"}]})
    with pytest.raises(UsageError, match=r"^dataset.eval: no data files at nowhere.jsonl"):
        prepared_run(project)
