"""Tests `fuyou verify` as a person runs it: what it says of a whole store, of damage, and of one that a run uses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.training.run import Run
from fuyou_cli.training.state.at_rest import verify_store
from tests.damage import flip

from .conftest import Project
from .running import manifest_of, store_of, train


def test_a_whole_store(stopped: Project) -> None:
    done = stopped.fuyou("verify", stopped.out / "store")
    extents = sum(len(stage.extents()) for stage in manifest_of(stopped).stages)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(f"state after step 2: {extents} extents, ")
    assert "the state before it, after step 1: " in done.stdout and "all checksums match" in done.stdout


def test_damage_is_named(stopped: Project) -> None:
    saved = manifest_of(stopped)
    extent = saved.stages[2].variance
    assert extent is not None
    flip(Path(saved.files[0]), extent.offset + extent.size - 1)
    done = stopped.fuyou("verify", store_of(stopped))
    assert done.returncode == 1
    assert f"variance of {saved.stages[2].name}: bytes {extent.offset} to {extent.offset + extent.size}" in done.stdout
    assert saved.files[0] in done.stdout and "continues from the state after step 1, which is intact" in done.stdout
    data = json.loads(stopped.fuyou("verify", store_of(stopped), "--json").stdout)
    assert [(state["step"], state["older"], len(state["damages"])) for state in data["states"]] == [(2, False, 1), (1, True, 0)]
    assert data["states"][0]["damages"][0]["tensor"] == "variance"


def test_a_store_in_use_and_none_at_all(stopped: Project, tmp_path: Path) -> None:
    looked: list[bool] = []

    def look(run: Run) -> None:
        if not looked:  # who comes waits a second for whoever was killed to be gone
            with pytest.raises(FuyouError, match="is in use by a running fuyou"):
                verify_store(store_of(stopped))
            looked.append(True)

    train(stopped, look)
    assert looked
    refused = stopped.fuyou("verify", tmp_path)
    assert refused.returncode == 2 and f"there is no store in {tmp_path}" in refused.stderr


def test_a_copy_is_not_taken_for_the_store_whose_files_it_names(stopped: Project, tmp_path: Path) -> None:
    """Refuses it even where it is the copy that is damaged: nobody would read it."""
    store, copy = store_of(stopped), tmp_path / "backup" / store_of(stopped).name
    shutil.copytree(store, copy)
    (copy / "store.bin").write_bytes(b"")
    for words in (
        ("verify", copy),
        ("export", copy, tmp_path / "model"),
        ("finetune", stopped.recipe, f"checkpoint.resume={copy}"),
    ):
        done = stopped.fuyou(*words)
        assert done.returncode == 2 and f"{copy} is a copy of the store in {store}" in " ".join(done.stderr.split()), (
            done.stderr
        )
    assert not (tmp_path / "model").exists() and manifest_of(stopped).step == 2


def test_verifying_changes_nothing(stopped: Project) -> None:
    store = store_of(stopped)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in store.iterdir() if path.is_file()}
    assert stopped.fuyou("verify", store).returncode == 0
    assert before == {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in store.iterdir() if path.is_file()}
