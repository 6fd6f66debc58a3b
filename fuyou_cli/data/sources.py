"""Finds the files that the recipe's paths mean, and checks their first rows.

Runs in the trainer before the worker starts, with no library but numpy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.disk import unusable
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import find_object
from fuyou_cli.core.paths import expanded
from fuyou_cli.core.safe_files import kind_of

from .data_files import BESIDE, KINDS, PACKED, kind_of_rows, suffixes
from .formats import RowError, choose_format, loss_target, mapping_hint
from .named_sets import Say, fetch, fetched, is_named, is_remote
from .reading import read_rows

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import DatasetEntry, DatasetSection

NAMES_SHOWN = 4
_LARGEST_STATE = 1 << 24  # bytes of state.json
_KNOWN_KINDS = f"known suffixes: {', '.join(KINDS)}; after those of text, JSON and CSV also {', '.join(PACKED)}"
_SPLIT_WORDS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """Holds one entry of `dataset.train` with the files found for it."""

    entry: DatasetEntry
    files: tuple[Path, ...]  # none: the data set is not fetched yet
    skipped: tuple[Path, ...]  # data files of the directory that belong to other splits or are none of the set's

    @property
    def asked(self) -> dict[str, Any]:
        """Returns it as part of a request. In a text file of a set, every line is a row, as for `datasets`."""
        by_line = is_named(self.entry) and self._has_text
        options = self.entry.model_dump(include={"format", "columns", "max_samples"})
        return {"files": list(map(str, self.files)), **options, **({"by_line": True} if by_line else {})}

    @property
    def _has_text(self) -> bool:
        return any(kind_of_rows(file) == "text" for file in self.files)

    @property
    def has_paragraphs(self) -> bool:
        """Tells whether it has .txt files that are not read line by line."""
        return self._has_text and not is_named(self.entry)

    @property
    def choice(self) -> str | None:
        """Tells which files were taken and which were not, if the path alone does not show it."""
        if is_named(self.entry):
            name = "" if self.entry.name is None else f", subset {self.entry.name}"
            many = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
            when = f"{many} in {self.files[0].parent}" if self.files else "fetched when a run begins"
            if any(map(is_remote, self.files)):
                when = f"{many} of the hub, each fetched when it is read"
            at = "" if self.entry.revision is None else f"@{self.entry.revision}"
            return f"{self.entry.path}{at}{name}, split {self.entry.split}: {when}"
        if not self.skipped and self.files == (expanded(self.entry.path, key="dataset.train"),):
            return None
        taken = f"{self.entry.path}: {len(self.files)} file{'s' * (len(self.files) != 1)} taken ({_names(self.files)})"
        cached = tuple(file for file in self.skipped if not _is_saved(file))
        others = tuple(file for file in self.skipped if file not in cached)
        for files, why in ((others, f"not of split {self.entry.split}"), (cached, "left by `datasets` beside the set")):
            taken += f", {len(files)} skipped, {why} ({_names(files)})" if files else ""
        return taken


def is_read_whole(dataset: DatasetSection) -> bool:
    """Tells whether a .txt file is one document, which rows are cut from; otherwise each of its paragraphs is a sample, as
    where some are held back."""
    return dataset.packing == "concat" and dataset.overlong in ("truncate", "split") and not dataset.eval_fraction


class MissingDataError(UsageError):
    """Says that there is no data at a path. A plan can do without it, a run cannot."""


def _names(files: tuple[Path, ...]) -> str:
    more = len(files) - NAMES_SHOWN
    return ", ".join(file.name for file in files[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def locate(path: str, split: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Finds the data files of a file, directory or glob, sorted, and the files it skipped.

    In a directory where file names tell the split, only those of `split` are taken. Raises UsageError naming the path.
    """
    here = expanded(path, key="dataset.train")
    try:
        present = _present(path, here)
        saved = present if here.is_file() else [file for file in present if _is_saved(file)]
        found = _of_split({file: file.relative_to(here) for file in saved}, split, path) if here.is_dir() else saved
        what = "" if found or not here.exists() else kind_of(here.stat().st_mode)
    except OSError as error:  # a folder that may not be read, a name too long
        raise unusable(f"dataset.train: {path}: {error.strerror}", error, hint="give a path that can be read") from error
    except ValueError as error:  # pathlib's, of a pattern
        raise UsageError(f"dataset.train: {path} is not a valid glob: {error}", hint="write it as data/**/*.jsonl") from error
    if what and not here.is_dir():
        raise UsageError(f"dataset.train: {path}: it is {what}, not a plain file", hint="write the rows to a file")
    if not found:
        hint = "name an existing file, directory or glob, or a data set of the hub (owner/name)"
        raise MissingDataError(f"dataset.train: no data files at {path}", hint=f"{hint}. {_KNOWN_KINDS}")
    return tuple(sorted(found)), tuple(sorted(set(present) - set(found)))


def _present(path: str, here: Path) -> list[Path]:
    if here.is_file():
        if kind_of_rows(here) is None:
            raise UsageError(f"{path}: unknown file suffix {''.join(suffixes(here)) or '(none)'}", hint=_KNOWN_KINDS)
        return [here]
    if here.is_dir():
        files = (file for file in here.rglob("*") if not any(part[0] == "." for part in file.relative_to(here).parts))
    else:
        files = Path(here.anchor).glob(str(here.relative_to(here.anchor)))
    return [file for file in files if file.is_file() and kind_of_rows(file) is not None and file.name not in BESIDE]


def _is_saved(file: Path) -> bool:
    """Tells whether a file in a folder of the library `datasets` holds rows of the set: results of its later calls, such as
    `map` and `shuffle`, lie beside them. Raises UsageError for a set saved as a selection of rows."""
    if file.suffix.lower() != ".arrow":
        return True
    state = find_object(file.parent / "state.json", limit=_LARGEST_STATE) or {}
    if state.get("_indices_data_files"):
        hint = "load and save it with a newer `datasets`"
        raise UsageError(f"{file.parent}: the set is saved as a selection of rows, which is not supported", hint=hint)
    if isinstance(named := state.get("_data_files"), list):
        return file.name in [one.get("filename") for one in named if isinstance(one, dict)]
    described = any((file.parent / name).is_file() for name in BESIDE)
    return not (described and file.name.startswith("cache-"))


def _of_split(files: dict[Path, Path], split: str, path: str) -> list[Path]:
    """Selects the files whose name, or folder below `path`, says `split`; all of them if no name says a split.

    `files` maps each to its place below `path`.
    """
    named = {file: _split_in_name(place) for file, place in files.items()}
    if split in _SPLIT_WORDS:
        chosen = [file for file, name in named.items() if name == _SPLIT_WORDS[split]]
    else:  # such as train_sft: only names that contain all of it
        whole = re.compile(rf"(?<![a-z0-9]){re.escape(split.lower())}(?![a-z0-9])")
        chosen = [file for file, place in files.items() if any(whole.search(name) for name in _names_in(place))]
    if chosen or not any(named.values()):
        return chosen or list(files)
    present = ", ".join(sorted({name for name in named.values() if name}))
    raise UsageError(f"dataset.train: {path} has no files of split {split}", hint=f"its splits are: {present}")


def _names_in(place: Path) -> list[str]:
    """Lists the file's own name, then those of its folders, the nearest first."""
    return [place.stem.lower(), *reversed([part.lower() for part in place.parent.parts])]


def _split_in_name(place: Path) -> str | None:
    words = (word for name in _names_in(place) for word in re.split(r"[^a-z]+", name))
    return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)


def find_sources(dataset: DatasetSection, *, fetching: Say | None = None) -> tuple[Source, ...]:
    """Finds the files of the entries of `dataset.train`. Downloads missing data sets of the hub if it can say so by `fetching`.

    Raises UsageError, or MissingDataError if there are no files.
    """
    sources = tuple(_source(entry, fetching, dataset.streaming) for entry in dataset.train)
    for source in sources:
        if not source.files:
            raise MissingDataError(f"dataset.train: {source.entry.path} is not fetched yet", hint="`fuyou finetune` fetches it")
    return sources


def size_of(dataset: DatasetSection) -> int:
    """Returns the bytes of the files that `dataset` names."""
    return sum(file.stat().st_size for source in find_sources(dataset) for file in source.files)


def _source(entry: DatasetEntry, fetching: Say | None, streamed: bool) -> Source:
    if is_named(entry):
        files = fetched(entry, streamed=streamed) if fetching is None else fetch(entry, fetching, streamed=streamed)
        return Source(entry, files, ())
    return Source(entry, *locate(entry.path, entry.split))


def look(dataset: DatasetSection) -> tuple[Source, ...]:
    """Finds the sources, and checks the first row of each in milliseconds, before anything is fetched.

    Raises MissingDataError if there are no files. Raises UsageError if the row cannot be read, has no known format, or a format
    that `loss_on` does not fit. Parquet, Arrow and zst files are left to the worker, because their library is large; so are
    data sets and files that are not fetched yet.
    """
    sources = tuple(_source(entry, None, dataset.streaming) for entry in dataset.train)
    for source in sources:
        file = source.files[0] if source.files else Path()
        if kind_of_rows(file) in ("json", "csv") and suffixes(file)[1] != ".zst" and not is_remote(file):
            for place, row in read_rows(file):
                try:
                    loss_target(dataset.loss_on, choose_format(source.entry.format, frozenset(row), source.entry.columns))
                except RowError as error:
                    raise UsageError(f"{place}: {error}", hint=mapping_hint(row)) from error
                break
    return sources
