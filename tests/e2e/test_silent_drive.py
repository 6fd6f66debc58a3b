"""Tests that whoever waits for a drive that does not answer says what for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.state.at_rest import saved_store, verify_store

from .conftest import NewProject, Project
from .running import run_of, store_of


def _said(heard: list[str], begin: str) -> str:
    return next((said for said in [*heard] if said.startswith(begin)), "")


def test_a_flush_that_does_not_come_back_is_named(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds a flush back in the middle of a step, and where the run ends, until it has been named."""
    in_step, at_the_end = (
        "waiting for commit of the step before (step 3, ",
        "waiting for the commit of step 4 (after step 4) for ",
    )
    monkeypatch.setattr("fuyou_cli.core.process.FIRST", 0.05)
    changes = {"train.max_steps": 4, "train.clip_grad_norm": None, "offload.defer_updates": 0}
    project, heard = new_project(changes=changes), list[str]()
    with run_of(project, announce=heard.append) as run:
        run.load(lambda count: None)
        flush, flushed = run.store.sync, list[int]()

        def late() -> None:
            flushed.append(run.step)
            awaited = {3: in_step, 5: at_the_end}.get(len(flushed))  # of steps 0 to 4
            while awaited is not None and not _said(heard, awaited):
                time.sleep(0.01)
            flush()

        run.saver.commits._flush = late
        run.train(lambda report: None)
    assert all("nothing was read, written or updated for" in _said(heard, awaited) for awaited in (in_step, at_the_end))


def test_a_store_that_is_verified_or_exported_is_named(
    stopped: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets no time at all as too long, so that every drive is silent."""
    monkeypatch.setattr("fuyou_cli.core.process.FIRST", 0.0)
    monkeypatch.setattr("fuyou_cli.swap.daemon._SLICE_NS", 0)
    store, heard = store_of(stopped), list[str]()
    verify_store(saved_store(store), say=heard.append)
    assert heard and all(said.startswith(f"waiting for the store ({store}) for ") for said in heard)
    heard.clear()
    export_store(saved_store(store), tmp_path / "model", dtype="float32", max_shard_size=1 << 30, say=heard.append)
    assert heard and all(said.startswith(f"waiting for the store ({store}) for ") for said in heard)
