"""`fuyou clean` removes what a manifest names and cannot be talked into more."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from fuyou_cli.cli.clean import find_manifests, read_store, run_clean
from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.training.manifest import VERSION


def make_store(folder: Path, *, files: list[Path], version: int = VERSION, **extra: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"fuyou_store": version, "files": [str(file) for file in files], **extra}))
    return manifest


def make_file(path: Path, size: int = 8192) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def test_named_files_go_and_everything_else_stays(tmp_path, fuyou):
    one = make_file(tmp_path / "a" / "run" / "store.0")
    two = make_file(tmp_path / "b" / "run" / "store.1")
    other = make_file(tmp_path / "a" / "run" / "notes.txt")
    manifest = make_store(tmp_path / "a" / "run", files=[one, two])
    done = fuyou("clean", tmp_path / "a", "--yes")
    assert done.returncode == 0
    assert f"{one}  (8,192 bytes)" in done.stdout
    assert "16,384 bytes" in done.stdout
    assert not one.exists() and not two.exists() and not manifest.exists()
    assert other.exists() and (tmp_path / "b" / "run").is_dir()


def test_without_a_terminal_it_does_not_guess(tmp_path, fuyou):
    one = make_file(tmp_path / "run" / "store.0")
    make_store(tmp_path / "run", files=[one])
    done = fuyou("clean", tmp_path)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert one.exists()


def test_stores_of_older_versions_go_too(tmp_path, capsys):
    one = make_file(tmp_path / "run" / "store.0")
    make_store(tmp_path / "run", files=[one], version=1)
    run_clean(tmp_path, yes=True)
    assert not one.exists()


def test_a_store_itself_may_be_named(tmp_path, capsys):
    one = make_file(tmp_path / "run" / "store.0")
    make_store(tmp_path / "run", files=[one])
    run_clean(tmp_path / "run", yes=True)
    assert not one.exists()


def test_files_that_are_gone_are_counted_not_missed(tmp_path, capsys):
    make_store(tmp_path / "run", files=[tmp_path / "run" / "store.0"])
    run_clean(tmp_path, yes=True)
    assert "1 named files are gone already" in capsys.readouterr().out


def _link(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "store.0"
    link.symlink_to(tmp_path / "precious" / "data")
    return link


def _folder_link(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run").symlink_to(tmp_path / "precious")
    return tmp_path / "other" / "run" / "data"


def _hard_link(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "store.0").hardlink_to(tmp_path / "precious" / "data")
    return tmp_path / "run" / "store.0"


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (lambda tmp: tmp / "precious" / "data", "not in a folder named run"),
        (lambda tmp: tmp / "run" / ".." / "precious" / "data", "absolute"),
        (lambda tmp: Path("precious/data"), "absolute"),
        (_link, "symbolic link"),
        (_folder_link, "not in a folder named run"),
        (_hard_link, "hard link"),
        (lambda tmp: (tmp / "run" / "sub").mkdir(parents=True) or tmp / "run" / "sub", "not a file"),
    ],
)
def test_a_store_that_names_something_else_is_left_whole(tmp_path, capsys, named, why):
    precious = make_file(tmp_path / "precious" / "data")
    wrong = named(tmp_path)
    honest = make_file(tmp_path / "run" / "store.1")
    manifest = make_store(tmp_path / "run", files=[honest, wrong])
    with pytest.raises(FuyouError, match="1 of 1 stores were left"):
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
    one, two = make_file(tmp_path / "run" / "store.0"), make_file(tmp_path / "run" / "store.1")
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
    one = tmp_path / "run" / "store.0"
    one.parent.mkdir()
    with one.open("wb") as file:
        file.truncate(1 << 30)  # a hole takes nothing
    make_store(tmp_path / "run", files=[one])
    store = read_store(find_manifests(tmp_path)[0])
    assert (store.files[0].size, store.files[0].taken < 1 << 20) == (1 << 30, True)
