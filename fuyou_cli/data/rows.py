"""Tokenised rows on disk: made once by the worker, found again by what they depend on, mapped into the trainer.

A directory `<fingerprint>` below the caller's `cache_dir` holds tokens.bin (int32), mask.bin (uint8: 1 = the label
carries loss), offsets.npy (int64 [rows + 1]) and summary.json. It appears whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fuyou_cli
from fuyou_cli.core.errors import FuyouError, OutOfSpaceError, UsageError
from fuyou_cli.core.plain_files import read_plain
from fuyou_cli.core.units import MiB

from . import bounded
from .json_rows import first_bad_line
from .preview import Pieces
from .sources import Source, content_of, find_sources, tokenizer_content

LAYOUT_VERSION = 3  # raise when the same data and options would give other rows
_LARGEST_TEMPLATE = 4 * MiB
OVERLONG = ("truncate", "drop", "split", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """What the data became. `formats` pairs every path of the recipe with its format; `preview` is one decoded sample
    as (text, carries loss) pieces."""

    rows: int
    tokens: int
    label_tokens: int  # labels that carry loss, first tokens of rows excluded
    samples: int
    truncated: int
    dropped: int
    split: int
    without_loss: int
    run_together: int
    longest_row: int
    highest_token_id: int
    pad_id: int
    digest: str  # of every row: what a run goes on with, whatever made it
    formats: tuple[tuple[str, str], ...]
    preview: Pieces
    special: int
    special_example: str

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know before these rows are learnt from, one sentence each."""
        found = []
        if self.run_together:
            found.append(
                f"in {self.run_together:,} of {self.samples:,} samples no white space parts prompt and completion; nothing is "
                "put between them (if they should be apart, end the prompts in a space or a line break)"
            )
        if self.special:
            what = "sample contains" if self.special == 1 else "samples contain"
            found.append(
                f"{self.special:,} {what} special tokens as text, e.g. {self.special_example}; they are learnt from as "
                "these tokens, not as their letters (write them otherwise where that is not meant)"
            )
        return tuple(found)


class Rows:
    """Memory-mapped rows: the pages are the file's, not the process's. `paths` are those of the recipe now: rows found
    again may have been made from files of other names."""

    def __init__(self, directory: Path, *, paths: Sequence[str] | None = None) -> None:
        self.directory = directory
        self.fingerprint = directory.name
        try:
            self.summary = _read_summary(directory / "summary.json", paths)
            self._tokens: NDArray[np.int32] = np.memmap(directory / "tokens.bin", np.int32, mode="r")
            self._mask: NDArray[np.uint8] = np.memmap(directory / "mask.bin", np.uint8, mode="r")
            self._offsets: NDArray[np.int64] = np.load(directory / "offsets.npy", mmap_mode="r")
            sizes = (len(self._offsets) - 1, int(self._offsets[-1]), len(self._tokens), len(self._mask))
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise _damaged(directory) from error
        if sizes != (self.summary.rows, *[self.summary.tokens] * 3):
            raise _damaged(directory)

    def __len__(self) -> int:
        return self.summary.rows

    def length(self, index: int) -> int:
        """Tokens of row `index`."""
        begin, end = self._bounds(index)
        return end - begin

    def tokens(self, index: int) -> NDArray[np.int32]:
        """int32 [n], read-only."""
        begin, end = self._bounds(index)
        return self._tokens[begin:end]

    def mask(self, index: int) -> NDArray[np.uint8]:
        """uint8 [n], read-only: 1 where the token, as a label, carries loss."""
        begin, end = self._bounds(index)
        return self._mask[begin:end]

    def _bounds(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return int(self._offsets[index]), int(self._offsets[index + 1])


def _read_summary(file: Path, paths: Sequence[str] | None) -> DataSummary:
    found = json.loads(file.read_text(encoding="utf-8"))
    found["formats"] = tuple(
        (f"source {number + 1}" if paths is None else paths[number], name) for number, name in found["formats"]
    )
    found["preview"] = tuple((text, learnt) for text, learnt in found["preview"])
    return DataSummary(**found)


def _damaged(directory: Path) -> UsageError:
    return UsageError(f"the tokenised data in {directory} is damaged", hint="remove that directory and start again")


def prepare(
    *, dataset: object, tokenizer_dir: Path, chat_template: Path | None, pad_token: str | None, cache_dir: Path
) -> Rows:
    """The rows of `dataset` (the recipe's section), tokenised now or found from an earlier run.

    Call it before the arena is mapped: it starts a process. Raises UsageError for data that cannot be used."""
    sources, request = _asked(dataset, tokenizer_dir, chat_template, pad_token)
    final = cache_dir / _fingerprint(request, sources, tokenizer_dir)
    if not final.is_dir():
        with _scratch(cache_dir) as scratch:
            out = Path(scratch, "rows")
            out.mkdir()
            workers = int(getattr(dataset, "num_workers", 0) or 1)
            _serve({**request, "out": str(out)}, scratch=Path(scratch), workers=workers)
            _put_in_place(out, final)
    return Rows(final, paths=[source.path for source in sources])


def find(
    *, dataset: object, tokenizer_dir: Path, chat_template: Path | None, pad_token: str | None, cache_dir: Path
) -> Rows | None:
    """The same where they are there already; nothing is started, nothing written."""
    sources, request = _asked(dataset, tokenizer_dir, chat_template, pad_token)
    final = cache_dir / _fingerprint(request, sources, tokenizer_dir)
    return Rows(final, paths=[source.path for source in sources]) if final.is_dir() else None


def size_of(dataset: object) -> int:
    """Bytes of the files that `dataset` names."""
    return sum(file.stat().st_size for source in find_sources(dataset) for file in source.files)


def _asked(
    dataset: object, tokenizer_dir: Path, chat_template: Path | None, pad_token: str | None
) -> tuple[tuple[Source, ...], dict[str, Any]]:
    options, sources = _options(dataset), find_sources(dataset)
    return sources, _request(sources, tokenizer_dir, _read_template(chat_template), pad_token) | options


def _scratch(cache_dir: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=cache_dir, prefix=".rows-")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        hint = "name a folder that can be written in dataset.cache_dir (without it, the output directory is used)"
        raise UsageError(f"dataset.cache_dir: {cache_dir} cannot be written: {error.strerror}", hint=hint) from error


def _put_in_place(out: Path, final: Path) -> None:
    try:
        out.rename(final)
    except OSError:
        if not final.is_dir():  # otherwise another run made the same rows meanwhile
            raise


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = read_plain(path, limit=_LARGEST_TEMPLATE + 1).decode()
    except OSError as error:
        raise UsageError(f"tokenizer.chat_template: {path}: {error.strerror}", hint="name a .jinja file") from error
    except UnicodeDecodeError as error:
        place = first_bad_line(path)
        hint = "save it as UTF-8"
        raise UsageError(f"tokenizer.chat_template: {place}: not UTF-8 text: {error.reason}", hint=hint) from error
    if len(text) > _LARGEST_TEMPLATE:
        most = f"{_LARGEST_TEMPLATE // MiB} MiB"
        raise UsageError(f"tokenizer.chat_template: {path}: more than {most}, which no template is", hint="name a .jinja file")
    return text


def _options(dataset: object) -> dict[str, Any]:
    """The section's options that shape rows. Raises UsageError for a value that is unknown or not built yet."""
    packing = getattr(dataset, "packing", False) or False
    if packing not in (False, "concat"):
        raise UsageError(f"dataset.packing: {packing} is not built yet", hint="use false or concat")
    overlong = getattr(dataset, "overlong", "truncate")
    if overlong not in OVERLONG:
        raise UsageError(f"dataset.overlong: {overlong} is unknown", hint=f"use one of {', '.join(OVERLONG)}")
    max_seq_len = int(getattr(dataset, "max_seq_len", 0))
    if max_seq_len < 2:
        raise UsageError(f"dataset.max_seq_len: {max_seq_len} leaves nothing to predict", hint="use at least 2")
    loss_on = getattr(dataset, "loss_on", "auto")
    return {"packing": packing, "overlong": overlong, "max_seq_len": max_seq_len, "loss_on": loss_on}


def _request(sources: tuple[Source, ...], tokenizer_dir: Path, template: str | None, pad_token: str | None) -> dict[str, Any]:
    return {
        "sources": [
            {
                "path": source.path,
                "files": [str(file) for file in source.files],
                "format": source.format,
                "columns": source.columns,
                "max_samples": source.max_samples,
            }
            for source in sources
        ],
        "tokenizer_dir": str(tokenizer_dir),
        "chat_template": template,
        "pad_token": pad_token,
    }


def _fingerprint(request: dict[str, Any], sources: tuple[Source, ...], tokenizer_dir: Path) -> str:
    """32 hexadecimal digits of everything the rows depend on: contents, options, library versions. Not where the files
    are or when they changed."""
    described = {name: value for name, value in request.items() if name not in ("sources", "tokenizer_dir")}
    described["layout"] = LAYOUT_VERSION
    described["libraries"] = {name: _version(name) for name in ("datasets", "tokenizers", "transformers")}
    described["tokenizer"] = tokenizer_content(tokenizer_dir)
    described["sources"] = [
        {
            "contents": [(file.suffix.lower(), content_of(file)) for file in source.files],
            "format": source.format,
            "columns": source.columns,
            "max_samples": source.max_samples,
        }
        for source in sources
    ]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


def _version(library: str) -> str:
    """Empty where it is not installed: JSON lines are read without the datasets library."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _serve(request: dict[str, Any], *, scratch: Path, workers: int) -> None:
    """Runs the worker to its end. Its errors for people come back as UsageError with the same words."""
    package_root = str(Path(fuyou_cli.__file__).resolve().parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH")))),
        "HF_DATASETS_CACHE": str(scratch / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "USE_TORCH": "0",
        "TOKENIZERS_PARALLELISM": "true",
        "RAYON_NUM_THREADS": str(min(workers, os.cpu_count() or 1)),
    }
    # -P: a file datasets.py in the current directory must not stand in for the library.
    command = [sys.executable, "-P", "-m", "fuyou_cli.data.worker"]
    at = scratch / "at"
    watched = {**request, "watch": {"at": str(at), "seconds": bounded.TEMPLATE_SECONDS}}
    done = subprocess.run(command, input=json.dumps(watched), env=environment, capture_output=True, text=True)
    if done.returncode == -bounded.OVERDUE:
        raise UsageError(
            f"{bounded.said(at)} takes more than {bounded.TEMPLATE_SECONDS:g} s over this conversation",
            hint="mend the template (tokenizer.chat_template names another), or leave the row out; a conversation of thousands "
            "of turns takes a fraction of that with {% generation %} marks in the template, or dataset.loss_on: last_assistant",
        )
    if done.returncode < 0:
        raise FuyouError(
            f"reading the data was ended by signal {-done.returncode}",
            hint="signal 9 usually means that memory ran out" if done.returncode == -9 else None,
        )
    try:
        reply = json.loads(done.stdout)
    except ValueError:  # it did not get as far as its first line
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        reply = {"error": last, "hint": None, "kind": "unforeseen", "trace": done.stderr}
    if "error" in reply:
        raise _told(reply)


def _told(reply: dict[str, Any]) -> FuyouError:
    """The worker's error as it would have been raised here."""
    if reply["kind"] == "unforeseen":
        told = f"reading the data failed: {reply['error']}"
        if os.environ.get("FUYOU_DEBUG", "") in ("", "0"):
            return FuyouError(told, hint="set FUYOU_DEBUG=1 to see the traceback")
        return FuyouError(f"{told}\n{reply['trace'].strip()}")
    kind = OutOfSpaceError if reply["kind"] == "space" else UsageError
    return kind(reply["error"], hint=reply["hint"])
