"""Loads one data set with `datasets` in its own process: `python -m fuyou_cli.data.set_worker`.

The request is one JSON object on stdin: path, name, split, revision, and a folder `out`. The reply is {"files"} or
{"error", "hint"}. Rows stay in the library's own cache, memory-mapped. A part of a split has no files of its own, so
it is copied to `out`. With `listing` the files are only named; with `file` and `commit` that file is fetched into `out`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from fuyou_cli.core.disk import FULL
from fuyou_cli.core.errors import UsageError, pip_install

from .data_files import kind_of_rows
from .sandbox import BYTES, LibraryErrors, limit_memory, too_large

_OLDEST = 4  # earlier versions run code from a data set
_LONGEST = 600  # characters of an error
_MOST = 4 * BYTES  # the library holds some files whole
# Settings that say nothing of how a file is read.
_OF_EVERY_SET = {"name", "version", "data_dir", "data_files", "description", "features"}
_KINDS = {"Json": "json", "Csv": "csv", "Text": "text", "Parquet": "columns", "Arrow": "columns"}  # by the library's readers
_INSTALL = pip_install(f"datasets>={_OLDEST}")


def load(request: dict[str, Any]) -> dict[str, Any]:
    """Loads the set, names its files or fetches one, and returns the reply."""
    try:
        with LibraryErrors(UsageError):
            if "file" in request:
                return {"files": [_downloaded(request)]}
            try:
                import datasets  # type: ignore[import-untyped,unused-ignore]
            except ImportError:
                return {"error": "data sets of the hub, subsets and slices need the library `datasets`", "hint": _INSTALL}
            if int(datasets.__version__.split(".")[0]) < _OLDEST:
                return {"error": f"`datasets` {datasets.__version__} is too old", "hint": _INSTALL}
            if request["listing"]:
                return {"files": _listed(datasets, request)}
            rows = datasets.load_dataset(request["path"], request["name"], split=request["split"], revision=request["revision"])
            if not any(character in request["split"] for character in "[+"):
                return {"files": [file["filename"] for file in rows.cache_files]}
            rows.save_to_disk(request["out"])
            return {"files": sorted(map(str, Path(request["out"]).glob("*.arrow")))}
    except MemoryError:
        return {"error": too_large("loading it"), "kind": "usage"}
    except UsageError as error:  # all lines of the library's text: the second says what the set has
        said = " ".join(str(error.__cause__).split())[:_LONGEST] or error.message
        return {"error": said, "kind": "disk" if _is_full(error) else "usage"}


def _is_full(error: BaseException | None) -> bool:
    """Tells whether a full disk is the cause of an error."""
    while error is not None and not (isinstance(error, OSError) and error.errno in FULL):
        error = error.__cause__ or error.__context__
    return error is not None


def _listed(datasets: Any, request: dict[str, Any]) -> list[str]:
    """Names the files of a split: paths, or hf:/datasets/OWNER/NAME@COMMIT/FILE. Raises ValueError where the set's README says
    how to read them, such as a separator: nobody would hear of it."""
    config = datasets.load_dataset_builder(request["path"], request["name"], revision=request["revision"]).config
    usual, files = type(config)(), config.data_files
    asked = {field.name for field in fields(config)} - _OF_EVERY_SET
    if said := sorted(name for name in asked if getattr(config, name) != getattr(usual, name)):
        raise ValueError(f"its README sets {', '.join(said)}, which dataset.streaming does not follow: set it to false")
    if request["split"] not in files:
        raise ValueError(f'Unknown split "{request["split"]}". Should be one of {list(files)}.')
    found = [str(file).replace("hf://", "hf:/", 1) for file in files[request["split"]]]
    reader = type(config).__name__.removesuffix("Config")
    if strange := [file for file in found if kind_of_rows(Path(file)) not in (None, _KINDS.get(reader))]:
        raise ValueError(f"it reads {Path(strange[0]).name} as {reader}, which dataset.streaming does not: set it to false")
    return found


def _downloaded(request: dict[str, Any]) -> str:
    import huggingface_hub

    return str(
        huggingface_hub.hf_hub_download(
            request["path"], request["file"], repo_type="dataset", revision=request["commit"], local_dir=request["out"]
        )
    )


def main() -> None:
    """Serves one request. What the library prints goes to standard error."""
    reply_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process of a job; the run decides
    limit_memory(_MOST)
    with reply_to:
        json.dump(load(json.load(sys.stdin)), reply_to)


if __name__ == "__main__":
    main()
