"""Stores that somebody else made: a manifest whose digest is right and whose values are not, part files, what `clean` is told.

Nothing is believed for being well-formed: what cannot be is refused by name, exit code 2, before anything is opened."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from proof.parsers import manifest, with_digest

from fuyou_cli.core import json_files
from fuyou_cli.core.errors import FuyouError, UnreadableError, UsageError
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import find_saved_store, find_store
from fuyou_cli.training.state.manifest import Evaluated, Manifest, RankShare, StoredStage
from fuyou_cli.training.state.saver import Saver
from fuyou_cli.training.state.store_folders import (
    LOSSES,
    PART_FILE,
    missing_file,
    part_size,
    read_losses,
    read_part,
    read_store,
    write_losses,
)

Change = Callable[[dict[str, Any]], object]


def _written(folder: Path, change: Change) -> Path:
    """Writes a manifest that has been changed, its digest made anew."""
    manifests.write(folder, manifest())
    path = folder / manifests.NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_bytes(with_digest(json.dumps(content).encode()))
    return path


def _set(*way: Any) -> Change:
    """The last of `way` at the place that the others name."""

    def change(content: Any) -> None:
        *path, key, value = way
        for part in path:
            content = content[part]
        content[key] = value

    return change


STAGE: tuple[Any, ...] = ("stages", 0)
TENSOR: tuple[Any, ...] = (*STAGE, "tensors", 0)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    manifests.write(tmp_path, manifest())
    assert manifests.read(tmp_path) == manifest()
    _written(tmp_path, lambda content: None)
    assert manifests.read(tmp_path) == manifest()
    assert manifest().stages[0].momentum is not None and manifest().stages[0].momentum.sum > 1 << 63


def test_the_state_before_is_of_the_same_run(tmp_path: Path) -> None:
    """A folder that another run has taken over may still hold what that one committed."""
    newest = replace(manifest(), step=manifest().step + 1)
    for older, is_of_it in ((manifest(), True), (replace(manifest(), run="another"), False)):
        manifests.write(tmp_path, older)
        manifests.write(tmp_path, newest, keep=True)
        assert manifests.before(tmp_path, newest) == (older if is_of_it else None)


def test_an_evaluation_keeps_the_state_before(tmp_path: Path) -> None:
    """It names the extents of the commit of its step again. A damaged one of these is only in the state before whole."""
    older = manifest()
    updated = replace(older.stages[0], generation=older.step + 1, turn=older.stages[0].turn + 1)
    newest = replace(older, step=older.step + 1, stages=(updated, *older.stages[1:]), evaluated=None)
    evaluated = replace(newest, evaluated=Evaluated(step=newest.step, best=1.0, best_step=newest.step, worse=0))
    commits = SimpleNamespace(last=None)
    saver = SimpleNamespace(folder=tmp_path, commits=commits, standing=SimpleNamespace(losses=[1.0] * newest.step))
    for commits.last, written in ((None, older), (older, newest), (newest, evaluated)):
        Saver._write(cast(Any, saver), written)
    assert manifests.read(tmp_path) == evaluated and manifests.before(tmp_path, evaluated) == older


def _in_version(version: int, **said: object) -> Change:
    """Has a manifest say what one of this version does."""

    def change(content: dict[str, Any]) -> None:
        content.update({"fuyou_store": version, "mode": "in_place", "keep": 1, "due": None} | said)
        for stage in content["stages"]:
            stage["gradients"] = None

    return change


def test_the_version_before_is_read(tmp_path: Path) -> None:
    _written(tmp_path, _in_version(7))
    assert manifests.read(tmp_path) == manifest()


@pytest.mark.parametrize(
    ("said", "name"), [({"mode": "redo"}, "redo"), ({"keep": 2}, "snapshot with the last 2 states")], ids=["redo", "snapshot"]
)
def test_a_store_of_another_mode_is_refused_by_name(said: dict[str, object], name: str, tmp_path: Path) -> None:
    path = _written(tmp_path, _in_version(7, **said))
    (tmp_path / manifests.BEFORE).write_bytes(path.read_bytes())
    for read in (manifests.read, manifests.newest):
        with pytest.raises(UsageError, match=f"is of a store of checkpoint.mode {name}, which this version") as refused:
            read(tmp_path)
        assert "checkpoint.resume=never" in str(refused.value.hint)
        assert not isinstance(refused.value, manifests.DamagedManifest)


@pytest.mark.parametrize("version", [5, 6])
def test_versions_before_are_read(version: int, tmp_path: Path) -> None:
    """They lack the keys that came later. In the first, every parameter was trained, and no stage said so."""
    later = {kind: {item.name for item in fields(kind) if item.default is not MISSING} for kind in (Manifest, StoredStage)}
    whole = manifest()

    def before(content: dict[str, Any]) -> None:
        _in_version(version)(content)
        for key in later[Manifest] & set(content):
            del content[key]
        for stage in content["stages"]:
            for key in (*later[StoredStage], *(("trained", "frozen") if version == 5 else ())):
                del stage[key]

    _written(tmp_path, before)
    found = manifests.read(tmp_path)
    assert found is not None and found.stages == whole.stages
    assert found == replace(whole, **{item.name: item.default for item in fields(Manifest) if item.name in later[Manifest]})


@pytest.mark.parametrize(("owner", "limit"), [(manifests, "LARGEST"), (json_files, "MOST_VALUES")])
def test_what_could_not_be_read_again_is_not_written(
    owner: object, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests.write(tmp_path, manifest())
    with monkeypatch.context() as less:
        less.setattr(owner, limit, 100)
        with pytest.raises(FuyouError, match="more than fuyou can read back") as refused:
            manifests.write(tmp_path, replace(manifest(), skipped=0, skipped_in_row=0), keep=True)
    assert refused.value.hint and [path.name for path in tmp_path.iterdir()] == [manifests.NAME]
    assert manifests.read(tmp_path) == manifest()


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """Spells its bytes as halves of characters in the manifest; they are the folder's again when it is read."""
    named = os.fsdecode(b"/nowhere/\xff\xfe/store.bin")
    _written(tmp_path, _set("files", [named]))
    found = manifests.read(tmp_path)
    assert found is not None and os.fsencode(found.files[0]) == b"/nowhere/\xff\xfe/store.bin"


def test_a_value_changed_behind_its_digest_is_damage(tmp_path: Path) -> None:
    manifests.write(tmp_path, manifest())
    path = tmp_path / manifests.NAME
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    with pytest.raises(manifests.DamagedManifest, match="its digest does not match its content"):
        manifests.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("step", 3.0), "step: expected a whole number"),
        (_set("step", 1 << 63), "step: must be at most 9223372036854775807"),
        (_set("state", "half"), "state: expected 'loading' or 'committed'"),
        (_set("surprise", 1), "surprise: unknown key"),
        (_set("x\x1b[2J", 1), r"'x\x1b[2J': unknown key"),
        (lambda content: content.pop("stripe"), "stripe: missing"),
        (_set("stripe", 4097), "stripe: Input should be a multiple of 4096, got 4097"),
        (_set("files", [7]), "files[0]: expected text"),
        (_set("numerics", {}), "numerics.compute_dtype: missing"),
        (lambda content: content.update({f"k{key}": 1 for key in range(200_000)}), "the whole: has 200,0"),
        (_set(*STAGE, "weights", "offset", -4096), "stages[0].weights.offset: must be at least 0"),
        (_set(*STAGE, "momentum", "sum", 1 << 64), "stages[0].momentum.sum: must be at most 18446744073709551615"),
        (_set(*STAGE, "tensors", [{}]), "stages[0].tensors[0].name: missing"),
        (_set(*TENSOR, "shape", [1 << 62] * 100_000), "stages[0].tensors[0].shape: expected 64 values, got 1"),
        (_set(*TENSOR, "stored_as", ""), "stages[0].tensors[0].stored_as: must not be empty"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_value_of_another_kind_is_refused_behind_a_right_digest(tmp_path: Path, change: Change, words: str) -> None:
    path = _written(tmp_path, change)
    with pytest.raises(UsageError) as refused:
        manifests.read(tmp_path)
    assert refused.value.message.startswith(f"{path} is damaged: {words}") and refused.value.hint
    assert [entry.name for entry in tmp_path.iterdir()] == [manifests.NAME]


@pytest.mark.parametrize("version", [None, 0, str(manifests.VERSION), float(manifests.VERSION), True, manifests.VERSION + 1])
def test_other_versions(tmp_path: Path, version: object) -> None:
    _written(tmp_path, _set("fuyou_store", version))
    with pytest.raises(UsageError, match="is not a manifest of version"):
        manifests.read(tmp_path)


def test_a_manifest_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / manifests.NAME)
    with pytest.raises(UsageError, match=", not a plain file"):
        manifests.read(tmp_path)
    with pytest.raises(UsageError, match=", not a plain file"):
        manifests.newest(tmp_path)
    assert ", not a plain file" in read_store(tmp_path / manifests.NAME).refused[0]


@pytest.mark.parametrize("read", [manifests.read, manifests.seals, find_saved_store])
def test_a_manifest_whose_bytes_cannot_be_read_now(read: Callable[[Path], object], tmp_path: Path) -> None:
    """Whoever reads them first. What stands for it opens, and then gives no bytes: EIO."""
    (tmp_path / manifests.NAME).symlink_to("/proc/self/mem")
    with pytest.raises(UnreadableError, match=r"manifest\.json: cannot be read: Input/output error"):
        read(tmp_path)


def test_a_file_in_place_of_a_store(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("{}")
    with pytest.raises(UsageError, match="cannot hold a store: it is a file"):
        find_saved_store(file)


@pytest.mark.parametrize(
    ("rank", "count", "stages"), [(1, 2, 1), (1, 10**15, 2), (0, 2, 2), (5, 2, 2)], ids=["stages", "count", "twice", "rank"]
)
def test_shares_that_are_not_of_one_run(rank: int, count: int, stages: int, tmp_path: Path) -> None:
    """One with fewer stages, both of more ranks than a machine could list, twice the same, a rank that is none."""
    folders = tuple(tmp_path / f"run.r{number}of2" for number in range(2))
    for number, (folder, of_rank) in enumerate(zip(folders, (0, rank), strict=True)):
        folder.mkdir()
        share = RankShare(rank=of_rank, count=count, owners=(0, 1), commit=4, folders=tuple(map(str, folders)))
        saved = replace(manifest(), share=share)
        manifests.write(folder, replace(saved, stages=saved.stages[: stages if number else None]))
    with pytest.raises(UsageError, match=r"holds the share of rank 0 of|do not name the same stages"):
        find_store(tmp_path)


def test_states_of_generators_that_none_takes() -> None:
    import torch

    from fuyou_cli.training.state.saver import captured_generators, restore_generators

    cpu = torch.device("cpu")
    good = captured_generators(cpu)
    for wrong in (
        {"python": []}, {"python": [3, "abc", None]}, {"python": [3, [1, 2], None]}, {"python": [3, [10**299] * 625, None]},
        {"numpy": ["PCG64", "00", 0, 0, 0.0]}, {"numpy": ["MT19937", "zz", 0, 0, 0.0]}, {"numpy": 7}, {"torch": "00ff"},
        {"torch": None}, {"torch": ""},
    ):  # fmt: skip
        with pytest.raises(UsageError, match="random generators"):
            restore_generators({**good, **wrong}, cpu)
    with pytest.raises(UsageError, match="random generators"):
        restore_generators({"python": good["python"]}, cpu)
    restore_generators(good, cpu)


def test_losses_of_more_steps_than_there_are(tmp_path: Path) -> None:
    """The file's length is looked at, not what the manifest says is in it."""
    write_losses(tmp_path, [1.0, 2.0])
    found, note = read_losses(tmp_path, 100_000)
    assert found[:2] == [1.0, 2.0] and all(map(math.isnan, found[2:])) and "too short" in note
    (tmp_path / LOSSES).unlink()
    os.mkfifo(tmp_path / LOSSES)
    assert math.isnan(read_losses(tmp_path, 1)[0][0])


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "{", '{"fuyou_part": 2, "run": "a", "index": 0, "count": 1, "first": "/a"}',
        '{"fuyou_part": 1, "run": "a", "index": 0, "count": 1}',
        '{"fuyou_part": 1, "run": 7, "index": 0, "count": 1, "first": "/a"}',
        '{"fuyou_part": 1, "run": "a", "index": 1, "count": 1, "first": "/a"}',
        '{"fuyou_part": 1, "run": "a", "index": -1, "count": 1, "first": "/a"}',
        '{"fuyou_part": 1, "run": "a", "index": 0, "count": 1e0, "first": "/a"}',
        '{"fuyou_part": 1, "run": "a", "index": 0, "count": 1, "first": "a"}',
        '{"fuyou_part": 1, "run": "a", "index": 0, "count": 1, "first": "/a\\u0000"}',
        '{"fuyou_part": 1, "run": "a", "run": "b", "index": 0, "count": 1, "first": "/a"}',
        '{"fuyou_part": 1, "run": "a", "index": 0, "count": 1, "first": "/a", "more": 1}', "[" * 10_000,
        '{"fuyou_part": 1, "run": "' + "a" * (1 << 16) + '", "index": 0, "count": 1, "first": "/a"}',
    ],
)  # fmt: skip
def test_parts_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / PART_FILE).write_text(text)
    assert read_part(tmp_path) is None


def test_a_part(tmp_path: Path) -> None:
    assert read_part(tmp_path) is None
    (tmp_path / PART_FILE).write_text('{"fuyou_part": 1, "run": "a", "index": 1, "count": 2, "first": "/a"}')
    found = read_part(tmp_path)
    assert found is not None and (found.run, found.index, found.count, found.first) == ("a", 1, 2, "/a")


def test_files_that_are_shorter_than_the_manifest_says(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.bin", "b.bin")]
    saved = replace(manifest(), files=tuple(paths), store_size=(1 << 22) + 4096)
    assert missing_file(saved) == f"{paths[0]} is missing"
    for index, path in enumerate(paths):
        with Path(path).open("wb") as file:
            file.truncate(part_size(saved.store_size, stripe=saved.stripe, count=2, index=index))
    assert missing_file(saved) == ""
    with Path(paths[1]).open("r+b") as file:
        file.truncate(4095)
    assert missing_file(saved) == f"{paths[1]} has 4,095 bytes, but needs at least 4,096"
    assert "is missing" in missing_file(replace(saved, files=("/" + "x" * 300,)))
    os.mkfifo(tmp_path / "pipe")
    assert "is missing" in missing_file(replace(saved, files=(str(tmp_path / "pipe"),)))


# ---- clean -----------------------------------------------------------------------------------------------------------


def _named(folder: Path, name: str) -> tuple[str, ...]:
    """Tells why `clean` leaves such a store alone."""
    (folder / "run").mkdir(exist_ok=True)
    path = folder / "run" / manifests.NAME
    path.write_text(json.dumps({"fuyou_store": manifests.VERSION, "files": [name]}))
    return read_store(path).refused


def test_names_that_no_file_has_are_refused_too(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name in (
        "/" + "x" * 300 + "/run/store.bin", "/" + "x" * 300 + "/companions/a", str(tmp_path / "run" / ("x" * 300)),
        str(tmp_path / "loop" / "store.bin"), str(tmp_path / "loop" / "companions" / "a"),
        str(tmp_path / "run" / "a\x1b[2J" / "b"), str(tmp_path / "pipe"), "", "/",
    ):  # fmt: skip
        refused = _named(tmp_path, name)
        assert len(refused) == 1 and refused[0].isprintable(), name
    assert _named(tmp_path, str(tmp_path / "run" / "store.bin")) == ()
    path = tmp_path / "run" / manifests.NAME
    path.write_text('{"fuyou_store": 1, "files": [], "files": ["/etc/passwd"]}')
    assert "occurs twice" in read_store(path).refused[0]
