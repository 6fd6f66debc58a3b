"""Goal: a run takes over no folder, file or state that is not its own, and leaves what it refuses as it was. Method: folders,
manifests and files are changed behind the run's back, before it begins again."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training import run as runs
from fuyou_cli.training.prepare import run_directories
from fuyou_cli.training.run import Run
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state import resume
from fuyou_cli.training.state.kept_companions import keep_companions
from fuyou_cli.training.state.manifest import Manifest, StoredStage
from fuyou_cli.training.state.store_folders import is_written, read_store

from .conftest import NewProject, Project, WholeOf
from .running import STEPS, loaded_run, manifest_of, run_of, store_of, train


def _keep_companions(run: Run) -> None:
    found = run.planned
    keep_companions(
        run.store.paths[0].parent, found.recipe.tokenizer, model_dir=found.model_dir, tokenizer_dir=found.tokenizer_dir
    )


class _Killed(BaseException):
    """Stands for what no code of a run looks for."""


def _kill(run: str, folders: list[Path]) -> None:
    raise _Killed


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---- folders and files -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("open_to_all")
@pytest.mark.parametrize("there", [False, True], ids=["new", "there"])
def test_what_a_run_writes_is_nobody_elses_to_read(there: bool, new_project: NewProject) -> None:
    drives = ["a", "b"]
    project = new_project(changes={"train.max_steps": 2})
    project.write_recipe({"train.max_steps": 2, "offload.dir": [str(project.folder / name) for name in drives]})
    folders = run_directories(load_recipe(project.recipe).recipe)
    for folder in folders if there else ():
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    seen: set[str] = set()

    def look(run: Run) -> None:
        _keep_companions(run)
        for folder in folders:
            assert _mode(folder) == 0o700
            for path in folder.rglob("*"):
                with suppress(FileNotFoundError):  # a commit beside this renames its files
                    assert _mode(path) == (0o700 if path.is_dir() else 0o600), path
                seen.add(path.name)

    train(project, look)
    assert seen >= {"store.bin", "part.json", "manifest.json", "losses.bin", "spare", "companions", "config.json"}


def test_a_folder_that_is_a_link_is_refused(new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": 2})
    (directory,) = run_directories(load_recipe(project.recipe).recipe)
    elsewhere = project.folder / "elsewhere"
    elsewhere.mkdir(0o755)
    directory.parent.mkdir(parents=True)
    directory.symlink_to(elsewhere)
    with pytest.raises(UsageError, match="is a symbolic link"):
        train(project)
    assert list(elsewhere.iterdir()) == [] and _mode(elsewhere) == 0o755


def test_a_manifest_names_what_the_run_wrote_alone(stopped: Project) -> None:
    folder = store_of(stopped)
    kept = folder / manifests.COMPANIONS
    kept.mkdir()
    (kept / "notes.md").write_text("mine")
    (kept / "folder.json").mkdir()
    with loaded_run(stopped) as run:
        _keep_companions(run)
        run.train(lambda report: None)
    now = manifest_of(stopped)
    named = [Path(name) for name in (*now.files, *now.parts, *now.companions)]
    assert kept / "config.json" in named and not {kept / "notes.md", kept / "folder.json"} & set(named)
    assert all(map(is_written, named)) and read_store(folder / manifests.NAME).refused == ()


# ---- states ----------------------------------------------------------------------------------------------------------


def _empty(like: StoredStage) -> StoredStage:
    """Makes a stage of no parameters, which a manifest may have."""
    return replace(like, name="extra", params=0, weights=None, remainder=None, momentum=None, variance=None, tensors=())


def _moved(stage: StoredStage, by: int) -> StoredStage:
    assert stage.weights is not None
    return replace(stage, weights=replace(stage.weights, offset=stage.weights.offset + by))


CHANGES: dict[str, Callable[[Manifest], tuple[StoredStage, ...]]] = {
    "one more": lambda was: (*was.stages, _empty(was.stages[0])),
    "none but the first": lambda was: was.stages[:1],
    "another name": lambda was: (replace(was.stages[0], name="another"), *was.stages[1:]),
    "another place": lambda was: (_moved(was.stages[0], 4096), *was.stages[1:]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_stages_that_are_not_the_models_are_refused_untouched(change: str, stopped: Project) -> None:
    """Refuses before the store is opened, which would make its file longer and nobody else's."""
    was, folder = manifest_of(stopped), store_of(stopped)
    manifests.write(folder, replace(was, stages=CHANGES[change](was)))
    store = folder / "store.bin"
    store.chmod(0o644)
    before = store.read_bytes(), _mode(folder)
    with pytest.raises(UsageError, match=r"is not where" if "place" in change else r"manifest\.json: its \d+ stages"):
        train(stopped)
    assert (store.read_bytes(), _mode(folder)) == before and _mode(store) == 0o644


def test_stages_of_the_state_before_are_looked_at_as_well(stopped: Project, tmp_path: Path) -> None:
    was, folder = manifest_of(stopped), store_of(stopped)
    older = manifests.read(folder, manifests.BEFORE)
    assert older is not None
    manifests.write(tmp_path, replace(older, stages=CHANGES["one more"](older)))
    shutil.copyfile(tmp_path / manifests.NAME, folder / manifests.BEFORE)
    extent = next(stage.weights for stage in was.stages if stage.weights is not None)
    with Path(was.files[0]).open("r+b") as store:
        store.seek(extent.offset)
        flipped = store.read(1)[0] ^ 1
        store.seek(extent.offset)
        store.write(bytes([flipped]))
    with run_of(stopped) as run, pytest.raises(UsageError, match=r"stages do not match the"):
        run.load(lambda count: None)


def test_a_run_killed_before_its_part_file_owns_what_its_manifest_names(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch, whole: WholeOf
) -> None:
    """Checks it also where a file system says of room that was set aside that it holds data."""
    expected = whole().losses
    monkeypatch.setattr(resume, "_holds_data", lambda file: True)
    project = new_project("killed", {"train.max_steps": STEPS})
    with monkeypatch.context() as killed, run_of(project) as run, pytest.raises(_Killed):
        killed.setattr(runs, "write_parts", _kill)
        run.load(lambda count: None)
    folder = store_of(project)
    assert (folder / "store.bin").exists()
    (folder / "part.json").unlink()  # which versions before wrote after the manifest
    loading = manifest_of(project)
    manifests.write(folder, replace(loading, files=("/nowhere/store.bin",)))
    with pytest.raises(UsageError, match=r"store\.bin holds data that does not belong to any known run"):
        train(project)
    manifests.write(folder, loading)
    assert train(project)[0] == expected
