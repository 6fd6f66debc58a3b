"""Runs whose rows hold several documents apart: what the same documents give as rows of their own, stopped or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe

from .conftest import NewProject, Project
from .running import assert_same_exports, interrupt, planned, prepared_run, stop, train
from .test_evaluation import evaluated


def changes(llama: Path, packing: str | bool, *, batch: int, micro: int = 1, **more: Any) -> dict[str, Any]:
    """Takes a few documents; the batch is all there are, so that every step learns from the same ones."""
    entry = {"path": str(llama.parent / "rows.jsonl"), "format": "text", "max_samples": 10}
    return {
        "model.name_or_path": str(llama), "dataset.train": [entry], "dataset.max_seq_len": 64, "dataset.packing": packing,
        "precision.compute": "float32", "train.max_steps": 4, "train.batch_size": batch, "train.micro_batch_size": micro,
        **more,
    }  # fmt: skip


def packed_rows(project: Project, llama: Path) -> int:
    project.write_recipe(changes(llama, "isolated", batch=1))
    rows = prepared_run(project).rows
    documents = [len(rows.documents(row) or ()) for row in range(len(rows))]
    assert sum(documents) == 10 and max(documents) > 2
    return len(rows)


def test_the_losses_of_documents_in_rows_of_their_own(new_project: NewProject, llama: Path) -> None:
    """Compares training and evaluation, where nothing is packed."""
    evals = {"dataset.eval": [{"path": str(llama.parent / "rows.jsonl"), "format": "text"}], "eval": {"every_steps": 2}}
    project, found = new_project("packed"), []
    count = packed_rows(project, llama)
    for packing, batch in (("isolated", count), (False, 10)):
        project = new_project(str(packing), changes(llama, packing, batch=batch, **evals))
        losses, reports = evaluated(project)
        found.append([*losses, *(report.loss for report in reports)])
    ours, theirs = found
    assert len(ours) == 4 + 3 and len(set(ours)) == len(ours)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_stopped_and_resumed_is_the_same_run(new_project: NewProject, llama: Path, tmp_path: Path) -> None:
    asked = changes(llama, "isolated", batch=2)
    whole, broken = new_project("whole", asked), new_project("broken", asked)
    expected, store = train(whole)
    stop(broken, interrupt(2, "backward"))
    losses, resumed = train(broken)
    assert losses == expected
    assert_same_exports(resumed, store, tmp_path)


def test_a_model_that_would_mix_documents_is_refused_by_name(new_project: NewProject) -> None:
    """Makes a plan all the same: it shows why the model cannot be trained so."""
    project = new_project(changes={"dataset.packing": "isolated"})
    why = r"^dataset.packing: isolated: GPT2LMHeadModel cannot keep documents apart: it looks positions up in a table \(wpe\)"
    with pytest.raises(UsageError, match=why) as refused:
        prepared_run(project)
    assert refused.value.hint == "use dataset.packing: concat, or false"
    assert planned(load_recipe(project.recipe).recipe).refusal == refused.value.message
