"""Tests that `fuyou clean` removes what a manifest names and cannot be talked into more."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from fuyou_cli.cli import stores
from fuyou_cli.cli.stores import run_clean
from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.training.run_log import JsonlLog
from fuyou_cli.training.state.manifest import BEFORE, BESIDE, NAME, VERSION
from fuyou_cli.training.state.store_folders import find_manifests, name_of_run, of_rank, read_store

TEMPLATES = "additional_chat_templates"


def make_store(folder: Path, *, files: list[Path], version: int = VERSION, **extra: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"fuyou_store": version, "files": [str(file) for file in files], **extra}))
    return manifest


def make_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 8192)
    return path


def make_part(folder: Path, *, first: Path, run: str = "r1") -> Path:
    part = make_file(folder / "part.json")
    part.write_text(json.dumps({"fuyou_part": 1, "run": run, "index": 1, "count": 2, "first": str(first)}))
    return part


def test_named_files_go_and_everything_else_stays(tmp_path, fuyou):
    home = tmp_path / "a" / "run"
    one, two = make_file(home / "store.bin"), make_file(tmp_path / "b" / "run" / "store.bin")
    part = make_part(two.parent, first=home)
    other = make_file(home / "notes.txt")
    manifest = make_store(home, files=[one, two], parts=[str(part)], run="r1")
    done = fuyou("clean", tmp_path / "a", "--yes")
    assert done.returncode == 0
    assert f"{one}  (8,192 bytes)" in done.stdout
    assert not one.exists() and not two.exists() and not part.exists() and not manifest.exists()
    assert other.exists() and (tmp_path / "b" / "run").is_dir()


@pytest.mark.parametrize("place", ["out/store", "drive"])
def test_the_store_of_an_output_folder_wherever_it_is(tmp_path, capsys, place):
    """All of its ranks'; not that of the output folder that it is a copy of."""
    out = tmp_path / "out"
    homes = [tmp_path / place / f"{name_of_run(out)}{of_rank(rank, 2)}" for rank in range(2)]
    for home in homes:
        make_store(home, files=[make_file(home / "store.bin")])
    out.mkdir(exist_ok=True)
    with JsonlLog(out / "log.jsonl") as log:
        log.write("plan", {"store": str(homes[0])})
    shutil.copytree(out, tmp_path / "copy", ignore=shutil.ignore_patterns("store"))
    with pytest.raises(UsageError, match=f"{homes[0]} is of a run with another output_dir") as told:
        run_clean(tmp_path / "copy", yes=True)
    assert "fuyou clean" not in str(told.value.hint) and all((home / NAME).exists() for home in homes)
    run_clean(out, yes=True)
    assert not any(path.is_file() for home in homes for path in home.glob("*")) and (out / "log.jsonl").exists()


def test_without_a_terminal_it_does_not_guess(tmp_path, fuyou):
    one = make_file(tmp_path / "run" / "store.bin")
    make_store(tmp_path / "run", files=[one])
    done = fuyou("clean", tmp_path)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert one.exists()


@pytest.mark.parametrize(("named", "version"), [(".", 1), ("run", VERSION)], ids=["an older version", "the store itself"])
def test_other_stores_go_too_and_files_that_are_gone_are_counted(tmp_path, capsys, named, version):
    one = make_file(tmp_path / "run" / "store.bin")
    make_store(tmp_path / "run", files=[one, tmp_path / "run" / "part.json"], version=version)
    run_clean(tmp_path / named, yes=True)
    assert not one.exists() and "1 named files are gone already" in capsys.readouterr().out


def test_a_copy_removes_nothing_of_what_it_was_copied_from(tmp_path, capsys):
    one = make_file(tmp_path / "run" / "store.bin")
    manifest = make_store(tmp_path / "run", files=[one])
    copy = make_file(tmp_path / "backup" / "run" / "store.bin")
    (copy.parent / NAME).write_text(manifest.read_text())
    with pytest.raises(FuyouError, match="1 of 1 stores were not removed"):
        run_clean(tmp_path / "backup", yes=True)
    assert "a copy, or moved: what it names is in" in capsys.readouterr().err
    assert one.exists() and copy.exists() and manifest.exists()


@pytest.mark.parametrize(("first", "run"), [("c", "r1"), ("a", "r2"), ("a", None)])
def test_folders_of_another_store_are_left_alone(tmp_path, capsys, first, run):
    """Keeps folders of the store's name, with files that are called as its own are."""
    home = tmp_path / "a" / "run"
    one, two = make_file(home / "store.bin"), make_file(tmp_path / "b" / "run" / "store.bin")
    if run is not None:
        make_part(two.parent, first=tmp_path / first / "run", run=run)
    make_store(home, files=[one, two], run="r1")
    with pytest.raises(FuyouError, match="1 of 1 stores were not removed"):
        run_clean(home, yes=True)
    assert "no part.json beside it says that it belongs to this store" in capsys.readouterr().err
    assert one.exists() and two.exists()


@pytest.mark.parametrize("started_over", [False, True])
def test_a_run_that_was_killed_as_it_began_has_no_part_files_or_those_of_the_one_before(started_over, tmp_path):
    home = tmp_path / "a" / "run"
    one, two = make_file(home / "store.bin"), make_file(tmp_path / "b" / "run" / "store.bin")
    if started_over:
        make_part(two.parent, first=home, run="before")
    make_store(home, files=[one, two], run="r1", state="loading")
    run_clean(home, yes=True)
    assert not one.exists() and not two.exists()


def test_a_drive_that_is_not_mounted_is_waited_for(tmp_path, capsys):
    home, away = tmp_path / "a" / "run", tmp_path / "b" / "run"
    one, two = make_file(home / "store.bin"), make_file(away / "store.bin")
    part = make_part(away, first=home)
    manifest = make_store(home, files=[one, two], parts=[str(part)], run="r1")
    away.rename(tmp_path / "unmounted")
    with pytest.raises(FuyouError, match="1 of 1 stores were not removed"):
        run_clean(home, yes=True)
    assert "mount its drive" in capsys.readouterr().err and one.exists() and manifest.exists()
    (tmp_path / "unmounted").rename(away)
    two.unlink()  # as where removing them was interrupted
    part.unlink()
    run_clean(home, yes=True)
    assert not one.exists() and not manifest.exists()


def _link(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "store.bin"
    link.symlink_to(tmp_path / "precious" / "data")
    return link


def _folder_link(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run").symlink_to(tmp_path / "precious")
    return tmp_path / "other" / "run" / "data"


def _hard_link(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "store.bin").hardlink_to(tmp_path / "precious" / "data")
    return tmp_path / "run" / "store.bin"


def _link_to_templates(tmp_path: Path) -> Path:
    make_file(tmp_path / "precious" / "rag.jinja")
    (tmp_path / "run" / "companions").mkdir(parents=True)
    (tmp_path / "run" / "companions" / TEMPLATES).symlink_to(tmp_path / "precious")
    return tmp_path / "run" / "companions" / TEMPLATES / "rag.jinja"


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (lambda tmp: tmp / "precious" / "data", "not in a folder named run"),
        (lambda tmp: tmp / "run" / ".." / "precious" / "data", "absolute"),
        (lambda tmp: Path("precious/data"), "absolute"),
        (_link, "symbolic link"),
        (_folder_link, "not in a folder named run"),
        (_hard_link, "hard link"),
        (lambda tmp: (tmp / "run" / "spare").mkdir(parents=True) or tmp / "run" / "spare", "not a file"),
        (lambda tmp: make_file(tmp / "run" / "thesis.txt"), "not a file name that a run uses"),
        (lambda tmp: make_file(tmp / "b" / "run" / "thesis.txt"), "not a file name that a run uses"),
        (lambda tmp: make_file(tmp / "run" / "companions" / "diary.txt"), "not a file name that a run uses"),
        (lambda tmp: make_file(tmp / "run" / "companions" / TEMPLATES / "diary.txt"), "not a file name that a run uses"),
        (lambda tmp: make_file(tmp / "run" / TEMPLATES / "store.bin"), "not in a folder named run"),
        (_link_to_templates, "not in a folder named run"),
        (lambda tmp: make_file(tmp / "b" / "run" / "manifest.json"), "not a file name that a run uses"),
    ],
)
def test_a_store_that_names_something_else_is_left_whole(tmp_path, capsys, named, why):
    precious = make_file(tmp_path / "precious" / "data")
    wrong = named(tmp_path)
    honest = make_file(tmp_path / "run" / "part.json")
    manifest = make_store(tmp_path / "run", files=[honest, wrong])
    with pytest.raises(FuyouError, match="1 of 1 stores were not removed"):
        run_clean(tmp_path, yes=True)
    assert why in capsys.readouterr().err
    assert precious.exists() and honest.exists() and manifest.exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"fuyou_store": VERSION + 1, "files": []}),
        '{"fuyou_store": true, "files": []}',
        json.dumps({"fuyou_store": VERSION}),
        "[" * 9999,
    ],
)
def test_other_manifests_are_not_ours(tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text(content)
    with pytest.raises(FuyouError):
        run_clean(tmp_path, yes=True)
    assert (tmp_path / "run" / "manifest.json").exists()


def test_a_running_store_is_not_touched(tmp_path, capsys):
    one, two = make_file(tmp_path / "run" / "store.bin"), make_file(tmp_path / "run" / "part.json")
    make_store(tmp_path / "run", files=[one, two])
    with two.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FuyouError, match="in use by a running fuyou"):
            run_clean(tmp_path, yes=True)
    assert one.exists() and two.exists()


def test_nothing_to_clean(tmp_path):
    with pytest.raises(UsageError, match="no store under"):
        run_clean(tmp_path, yes=True)


def test_sizes_are_what_the_disk_gives_back(tmp_path):
    one = tmp_path / "run" / "store.bin"
    one.parent.mkdir()
    with one.open("wb") as file:
        file.truncate(1 << 30)  # a hole takes nothing
    make_store(tmp_path / "run", files=[one])
    store = read_store(find_manifests(tmp_path)[0])
    assert store.files[0].taken < 1 << 20


@pytest.mark.parametrize("more", [[BEFORE], [".manifest.before.new"], [BEFORE, ".manifest.before.new"]], ids=str)
def test_a_run_killed_as_it_set_its_manifest_aside(tmp_path, capsys, more):
    """The newest manifest has two or three names then."""
    one = make_file(tmp_path / "run" / "store.bin")
    manifest = make_store(tmp_path / "run", files=[one], companions=[str(tmp_path / "run" / name) for name in BESIDE])
    for name in more:
        os.link(manifest, tmp_path / "run" / name)
    run_clean(tmp_path, yes=True)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    "more", [[], ["diary.txt"], ["additional_chat_templates", "mine.jinja"]], ids=["empty", "a file of others", "of templates"]
)
def test_the_folder_of_companions_goes_once_it_is_empty(tmp_path, capsys, more):
    folder = tmp_path / "run" / "companions"
    if more:
        make_file(folder.joinpath(*more))
    companions = [str(make_file(folder / name)) for name in ("config.json", "additional_chat_templates/tool_use.jinja")]
    make_store(tmp_path / "run", files=[make_file(tmp_path / "run" / "store.bin")], companions=companions)
    run_clean(tmp_path, yes=True)
    left = [path.name for path in (tmp_path / "run").rglob("*")]
    assert left == (["companions", *more] if more else [])


def test_another_name_of_a_manifest_is_left(tmp_path, capsys):
    """Keeps what a manifest says under another name, whoever gave it that."""
    one = make_file(tmp_path / "run" / "store.bin")
    manifest = make_store(tmp_path / "run", files=[one])
    said = manifest.read_text()
    os.link(manifest, tmp_path / "mine")
    run_clean(tmp_path, yes=True)
    assert not one.exists() and not manifest.exists() and (tmp_path / "mine").read_text() == said


def _rewritten(folder: Path) -> None:
    make_store(folder, files=[folder / "store.bin"], step=2)


def _gone(folder: Path) -> None:
    (folder / NAME).unlink()


def _file_gone(folder: Path) -> None:
    (folder / "store.bin").unlink()


@pytest.mark.parametrize("change", [_rewritten, _gone, _file_gone])
def test_what_changed_since_it_was_listed_is_left(tmp_path, capsys, monkeypatch, change):
    """Lets a run go on while the question is on the screen."""
    folder = tmp_path / "run"
    for name in ("store.bin", "part.json"):
        make_file(folder / name)
    make_store(folder, files=[folder / "store.bin", folder / "part.json"])
    left: set[str] = set()

    def answer(question: str, **options: object) -> bool:
        change(folder)
        left.update(path.name for path in folder.iterdir())
        return True

    monkeypatch.setattr(stores, "agreed", answer)
    with pytest.raises(FuyouError, match="has changed since it was listed"):
        run_clean(tmp_path, yes=False)
    assert {path.name for path in folder.iterdir()} == left


def _part(folder: Path, first: Path) -> None:
    content = {"fuyou_part": 1, "run": "0" * 16, "index": 1, "count": 2, "first": str(first)}
    (folder / "part.json").write_text(json.dumps(content))


def test_files_that_no_manifest_names_are_shown_and_stay(tmp_path, capsys):
    begun, second, lost = (make_file(tmp_path / name / "store.bin") for name in ("begun", "second", "lost"))
    _part(second.parent, tmp_path / "elsewhere" / "second")
    make_file(lost.parent / BEFORE)
    with pytest.raises(UsageError, match="no store under"):
        run_clean(tmp_path, yes=True)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{begun} (8,192 bytes) not removed, because no {NAME} names it: its run was killed at its start" in said
    assert f"part 2 of 2 of the store in {tmp_path / 'elsewhere' / 'second'}" in said
    assert f"or continues from {BEFORE}" in said
    make_store(tmp_path / "run", files=[make_file(tmp_path / "run" / "store.bin")])
    run_clean(tmp_path, yes=True)
    assert begun.exists() and second.exists() and lost.exists() and not (tmp_path / "run" / "store.bin").exists()


def test_a_file_that_another_drives_manifest_names_is_not_said_to_be_nobodys(tmp_path, capsys):
    two = make_file(tmp_path / "two" / "run" / "store.bin")
    home = tmp_path / "one" / "run"
    make_part(two.parent, first=home)
    make_store(home, files=[make_file(home / "store.bin"), two])
    run_clean(tmp_path / "one", yes=True)
    assert not two.exists() and "not removed" not in capsys.readouterr().err
