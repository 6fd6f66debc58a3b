"""Finds the rows of data sets that the `datasets` library reads: sets of the hub, subsets, slices of a split.

`set_worker` fetches them once, in its own process, into the library's cache (a slice: into fuyou's). A record says where they
are. The network is used only if that cache has no answer, and never for a folder.

With `dataset.streaming` only the names of the set's files are asked for: it may be larger than the disk. A file of the hub is
called `hf:/datasets/OWNER/NAME@COMMIT/FILE`, is fetched when it is read, and is removed afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import DataSpaceError, FuyouError, OutOfSpaceError, UsageError
from fuyou_cli.core.paths import expanded, is_file, kept_folder

from .data_files import kind_of_rows
from .locked_folders import scratch_in

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import DatasetEntry

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{,95}/[A-Za-z0-9][\w.-]{,95}")
_REMOTE = re.compile(r"hf:/datasets/(?P<set>[^/]+/[^/@]+)@(?P<commit>[^/]+)/(?P<file>.+)")
_RECORD, _LISTED = "files.json", "listed.json"
_ELSEWHERE = "set the environment variable XDG_CACHE_HOME to another folder"
Say = Callable[[str], None]


def unsaid(text: str) -> None:
    """Tells nobody."""


def is_named(entry: DatasetEntry) -> bool:
    """Tells whether an entry is read through `datasets`. Raises UsageError for a subset or a slice of plain files, and
    for a revision of what is on this disk."""
    if is_on_hub(entry.path):
        return True
    if entry.revision is not None:
        raise UsageError(f"dataset.train: {entry.path}: revision works only for data sets of the hub", hint="remove it")
    if entry.name is None and not re.search(r"[\[+]", entry.split):
        return False
    here = expanded(entry.path, key="dataset.train")
    if is_file(here) or "*" in entry.path:
        what = "a slice of a split" if entry.name is None else "a subset (name)"
        hint = "remove it; max_samples takes the first rows of a file"
        raise UsageError(f"dataset.train: {entry.path}: {what} works only for data sets of the hub and for folders", hint=hint)
    return here.is_dir()


def is_on_hub(path: str) -> bool:
    """Tells whether a path names a data set of the hub: owner/name, without a file or folder of that name and without a data
    file's suffix."""
    here = Path(path)
    return _HUB_NAME.fullmatch(path) is not None and kind_of_rows(here) is None and not here.exists()


def is_remote(file: Path) -> bool:
    """Tells whether a file is one of the hub, to be fetched when it is read. A name that leads out of its folder is none: what
    is fetched is removed later."""
    return _REMOTE.fullmatch(str(file)) is not None and ".." not in file.parts


def fetched(entry: DatasetEntry, *, streamed: bool = False) -> tuple[Path, ...]:
    """Returns the files with the entry's rows, or with `streamed` their names; none if they are not known or are gone."""
    try:
        files = json.loads((_folder(entry) / (_LISTED if streamed else _RECORD)).read_text(encoding="utf-8"))
        found = tuple(map(Path, files))
    except (OSError, ValueError, TypeError):
        return ()
    return found if all(is_remote(file) or is_file(file) for file in found) else ()


def fetch(entry: DatasetEntry, say: Say, *, streamed: bool = False) -> tuple[Path, ...]:
    """Returns the same files, and fetches them or their names first if needed, which may take long. Raises UsageError with the
    library's error text."""
    if found := fetched(entry, streamed=streamed):
        return found
    if streamed and re.search(r"[\[+]", entry.split):
        hint = "name a whole split and set max_samples, or set dataset.streaming=false"
        raise UsageError(f"dataset.train: {entry.path}: dataset.streaming reads no slice of a split", hint=hint)
    folder, here = _folder(entry), expanded(entry.path, key="dataset.train")
    with scratch_in(folder, what="dataset.train", hint=_ELSEWHERE) as rows:
        request: dict[str, Any] = {"path": str(here), "name": entry.name, "split": entry.split, "revision": entry.revision}
        request |= {"out": str(rows), "listing": streamed}
        named = entry.revision is not None  # the library's own cache does not know which revision it holds
        reply = {"error": "its revision is not here yet, and HF_HUB_OFFLINE is set"} if named else _ask(request, offline=True)
        if "error" in reply and not here.is_dir() and may_ask():
            say(f"asking the hub for the files of {entry.path}" if streamed else f"fetching the data set {entry.path}")
            reply = _ask(request, offline=False)
        if reply.get("kind") == "disk":
            hint = "free some space, or set HF_HOME (and XDG_CACHE_HOME for slices) to a folder on another disk"
            raise OutOfSpaceError(f"dataset.train: {entry.path}: no room to fetch it: {reply['error']}", hint=hint)
        if "error" in reply:
            hint = "check path, `name`, `split` and `revision`; for a gated set, run `hf auth login` or set HF_TOKEN"
            raise UsageError(f"dataset.train: {entry.path}: {reply['error']}", hint=reply.get("hint") or hint)
        files = [_kept(Path(file), rows, folder) for file in reply["files"]]
        if streamed and (strange := [file.name for file in files if kind_of_rows(file) is None]):
            hint = "set dataset.streaming=false: the library `datasets` may read it"
            raise UsageError(f"dataset.train: {entry.path}: dataset.streaming cannot read {strange[0]}", hint=hint)
        record = _LISTED if streamed else _RECORD
        (draft := rows / record).write_text(json.dumps(list(map(str, files))), encoding="utf-8")
        draft.replace(folder / record)
    return tuple(files)


def may_ask() -> bool:
    """Tells whether the network may be used."""
    return os.environ.get("HF_HUB_OFFLINE", "") in ("", "0")


@contextmanager
def present(file: Path, remote: Mapping[str, Any] | None) -> Iterator[Path]:
    """Gives a file that can be opened. One of the hub is fetched into the folder of `remote`, and removed when it is read; a
    stream that ends before removes the folder. Raises FuyouError if the hub cannot be reached."""
    named = _REMOTE.fullmatch(str(file))
    if named is None or not is_remote(file):
        yield file
        return
    assert remote is not None
    place = Path(remote["folder"], f"{named['set']}@{named['commit']}")
    local = place / named["file"]
    if not local.is_file():
        request = {"path": named["set"], "commit": named["commit"], "file": named["file"], "out": str(place)}
        reply = _ask(request, offline=remote["offline"])
        if reply.get("kind") == "disk":
            raise DataSpaceError(f"{named['set']}: {named['file']}: {reply['error']}")
        if "error" in reply:
            gone = "If the set's owner has replaced its files, name its newest commit as `revision` in dataset.train: a new run"
            hint = f"is the hub reachable? The same command goes on from the last commit. {gone}"
            raise FuyouError(f"{named['set']}: {named['file']}: {reply['error']}", hint=reply.get("hint") or hint)
    yield local
    local.unlink(missing_ok=True)


def _kept(file: Path, rows: Path, folder: Path) -> Path:
    """Moves a file that was copied for us to its final place. Leaves one of the library's own files where it is."""
    return file.replace(folder / file.name) if file.parent == rows else file


def _folder(entry: DatasetEntry) -> Path:
    """Returns the folder of the record: one for each set, revision, subset and split. A folder's present content counts too."""
    here = expanded(entry.path, key="dataset.train")
    files = sorted(here.rglob("*")) if here.is_dir() else []
    listed = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]
    asked = [str(here), entry.name, entry.split, listed] + ([entry.revision] if entry.revision else [])
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    return kept_folder() / "sets" / key


def _ask(request: dict[str, Any], *, offline: bool) -> dict[str, Any]:
    package_root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))}
    environment["HF_HUB_OFFLINE"] = "1" if offline else "0"
    command = [sys.executable, "-P", "-m", "fuyou_cli.data.set_worker"]
    done = subprocess.run(command, input=json.dumps(request), env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return {"error": f"the process that reads it ended with {done.returncode}: {said}"}
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply
