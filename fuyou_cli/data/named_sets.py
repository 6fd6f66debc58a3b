"""Finds the rows of data sets that the `datasets` library reads: sets of the hub, subsets, slices of a split.

`set_worker` fetches them once, in its own process, into the library's cache (a slice: into fuyou's). A record says where they
are. The network is used only if that cache has no answer, and never for a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import expanded, is_file, kept_folder

from .data_files import kind_of_rows

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import DatasetEntry

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{,95}/[A-Za-z0-9][\w.-]{,95}")
_RECORD = "files.json"


def is_named(entry: DatasetEntry) -> bool:
    """Tells whether an entry is read through `datasets`. Raises UsageError for a subset or a slice of plain files."""
    if is_on_hub(entry.path):
        return True
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


def fetched(entry: DatasetEntry) -> tuple[Path, ...]:
    """Returns the files with the entry's rows; none if they were not fetched or are gone."""
    try:
        files = json.loads((_folder(entry) / _RECORD).read_text(encoding="utf-8"))
        found = tuple(map(Path, files))
    except (OSError, ValueError, TypeError):
        return ()
    return found if all(map(is_file, found)) else ()


def fetch(entry: DatasetEntry) -> tuple[Path, ...]:
    """Returns the same files, and fetches them first if needed. Raises UsageError with the library's error text."""
    if found := fetched(entry):
        return found
    folder, here = _folder(entry), expanded(entry.path, key="dataset.train")
    with _room(folder) as rows:
        request = {"path": str(here), "name": entry.name, "split": entry.split, "out": rows}
        reply = _ask(request, offline=True)
        if "error" in reply and not here.is_dir() and os.environ.get("HF_HUB_OFFLINE", "") in ("", "0"):
            reply = _ask(request, offline=False)
        if "error" in reply:
            hint = "check path, `name` and `split`; for a gated set, run `hf auth login` or set HF_TOKEN"
            raise UsageError(f"dataset.train: {entry.path}: {reply['error']}", hint=reply.get("hint") or hint)
        files = [_kept(Path(file), Path(rows), folder) for file in reply["files"]]
        (draft := Path(rows, _RECORD)).write_text(json.dumps(list(map(str, files))), encoding="utf-8")
        draft.replace(folder / _RECORD)
    return tuple(files)


def _room(folder: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder, prefix="rows-")
    except OSError as error:
        hint = "set the environment variable XDG_CACHE_HOME to another folder"
        raise UsageError(f"dataset.train: {folder} cannot be written: {error.strerror}", hint=hint) from error


def _kept(file: Path, rows: Path, folder: Path) -> Path:
    """Moves a file that was copied for us to its final place. Leaves one of the library's own files where it is."""
    return file.replace(folder / file.name) if file.parent == rows else file


def _folder(entry: DatasetEntry) -> Path:
    """Returns the folder of the record: one for each set, subset and split; for a folder, its present content counts too."""
    here = expanded(entry.path, key="dataset.train")
    files = sorted(here.rglob("*")) if here.is_dir() else []
    listed = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]
    key = hashlib.sha256(json.dumps([str(here), entry.name, entry.split, listed]).encode()).hexdigest()[:16]
    return kept_folder() / "sets" / key


def _ask(request: dict[str, Any], *, offline: bool) -> dict[str, Any]:
    package_root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))}
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, "-P", "-m", "fuyou_cli.data.set_worker"]
    done = subprocess.run(command, input=json.dumps(request), env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return {"error": f"the process that reads it ended with {done.returncode}: {said}"}
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply
