"""Finds the files that the recipe's paths mean, and checks their first rows. Runs in the trainer before the worker starts.

Sets of the hub, subsets and slices of a split are read by the library `datasets`, in a process of its own
(`python -m fuyou_cli.data.sources`: it takes 140 MiB), once, into the library's cache (a slice: into fuyou's). A record
says where they are. The network is used only if that cache has no answer, and never for a folder.

With `dataset.streaming` only the names of the set's files are asked for: it may be larger than the disk. A file of the hub is
called `hf:/datasets/OWNER/NAME@COMMIT/FILE`, is fetched when it is read, and is removed afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.disk import FULL, unusable
from fuyou_cli.core.errors import DataSpaceError, FuyouError, OutOfSpaceError, UsageError
from fuyou_cli.core.json_files import find_object
from fuyou_cli.core.paths import expanded, is_file, kept_folder, kind_of, scratch_in

from .formats import RowError, choose_format, loss_target, mapping_hint
from .reading import BESIDE, KINDS, PACKED, kind_of_rows, read_rows, suffixes
from .sandbox import BYTES, LibraryErrors, limit_memory, too_large

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
    """One entry of `dataset.train` with the files found for it."""

    entry: DatasetEntry
    files: tuple[Path, ...]  # none: the data set is not fetched yet
    skipped: tuple[Path, ...]  # data files of the directory that belong to other splits or are none of the set's

    @property
    def request(self) -> dict[str, Any]:
        """The part of a worker's request. In a text file of a set, every line is a row, as for `datasets`."""
        by_line = needs_datasets(self.entry) and self._has_text
        options = self.entry.model_dump(include={"format", "columns", "max_samples"})
        return {"files": list(map(str, self.files)), **options, **({"by_line": True} if by_line else {})}

    @property
    def _has_text(self) -> bool:
        return any(kind_of_rows(file) == "text" for file in self.files)

    @property
    def has_paragraphs(self) -> bool:
        """Whether it has .txt files that are not read line by line."""
        return self._has_text and not needs_datasets(self.entry)

    @property
    def choice(self) -> str | None:
        """Tells which files were taken and which were not, if the path alone does not show it."""
        if needs_datasets(self.entry):
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
    """Whether a .txt file is one document, which rows are cut from; otherwise each of its paragraphs is a sample, as
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
    folder = expanded(path, key="dataset.train")
    try:
        present = _present(path, folder)
        saved = present if folder.is_file() else [file for file in present if _is_saved(file)]
        files = _of_split({file: file.relative_to(folder) for file in saved}, split, path) if folder.is_dir() else saved
        what = "" if files or not folder.exists() else kind_of(folder.stat().st_mode)
    except OSError as error:  # a folder that may not be read, a name too long
        raise unusable(f"dataset.train: {path}: {error.strerror}", error, hint="give a path that can be read") from error
    except ValueError as error:  # pathlib's, of a pattern
        raise UsageError(f"dataset.train: {path} is not a valid glob: {error}", hint="write it as data/**/*.jsonl") from error
    if what and not folder.is_dir():
        raise UsageError(f"dataset.train: {path}: it is {what}, not a plain file", hint="write the rows to a file")
    if not files:
        hint = "name an existing file, directory or glob, or a data set of the hub (owner/name)"
        raise MissingDataError(f"dataset.train: no data files at {path}", hint=f"{hint}. {_KNOWN_KINDS}")
    return tuple(sorted(files)), tuple(sorted(set(present) - set(files)))


def _present(path: str, place: Path) -> list[Path]:
    if place.is_file():
        if kind_of_rows(place) is None:
            raise UsageError(f"{path}: unknown file suffix {''.join(suffixes(place)) or '(none)'}", hint=_KNOWN_KINDS)
        return [place]
    if place.is_dir():
        files = (file for file in place.rglob("*") if not any(part[0] == "." for part in file.relative_to(place).parts))
    else:
        files = Path(place.anchor).glob(str(place.relative_to(place.anchor)))
    return [file for file in files if file.is_file() and kind_of_rows(file) is not None and file.name not in BESIDE]


def _is_saved(file: Path) -> bool:
    """Whether a file in a folder of the library `datasets` holds rows of the set: results of its later calls, such as
    `map` and `shuffle`, lie beside them. Raises UsageError for a set saved as a selection of rows."""
    if file.suffix.lower() != ".arrow":
        return True
    state = find_object(file.parent / "state.json", limit=_LARGEST_STATE) or {}
    if state.get("_indices_data_files"):
        hint = "load and save it with a newer `datasets`"
        raise UsageError(f"{file.parent}: the set is saved as a selection of rows, which is not supported", hint=hint)
    if isinstance(named := state.get("_data_files"), list):
        return file.name in [entry.get("filename") for entry in named if isinstance(entry, dict)]
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
    if needs_datasets(entry):
        files = recorded_files(entry, streamed=streamed) if fetching is None else fetch(entry, fetching, streamed=streamed)
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


# ---- sets that `datasets` reads --------------------------------------------------------------------------------------


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{,95}/[A-Za-z0-9][\w.-]{,95}")
_REMOTE = re.compile(r"hf:/datasets/(?P<set>[^/]+/[^/@]+)@(?P<commit>[^/]+)/(?P<file>.+)")
_RECORD, _LISTED = "files.json", "listed.json"
_ELSEWHERE = "set the environment variable XDG_CACHE_HOME to another folder"
Say = Callable[[str], None]


def say_nothing(text: str) -> None:
    """For callers that show no progress."""


def needs_datasets(entry: DatasetEntry) -> bool:
    """Whether an entry is read through `datasets`. Raises UsageError for a subset or a slice of plain files, and
    for a revision of what is on this disk."""
    if is_on_hub(entry.path):
        return True
    if entry.revision is not None:
        raise UsageError(f"dataset.train: {entry.path}: revision works only for data sets of the hub", hint="remove it")
    if entry.name is None and not re.search(r"[\[+]", entry.split):
        return False
    place = expanded(entry.path, key="dataset.train")
    if is_file(place) or "*" in entry.path:
        what = "a slice of a split" if entry.name is None else "a subset (name)"
        hint = "remove it; max_samples takes the first rows of a file"
        raise UsageError(f"dataset.train: {entry.path}: {what} works only for data sets of the hub and for folders", hint=hint)
    return place.is_dir()


def is_on_hub(path: str) -> bool:
    """Whether a path names a data set of the hub: owner/name, without a file or folder of that name and without a data
    file's suffix."""
    place = Path(path)
    return _HUB_NAME.fullmatch(path) is not None and kind_of_rows(place) is None and not place.exists()


def is_remote(file: Path) -> bool:
    """Whether a file is one of the hub, to be fetched when it is read. A name that leads out of its folder is none: what
    is fetched is removed later."""
    return _REMOTE.fullmatch(str(file)) is not None and ".." not in file.parts


def recorded_files(entry: DatasetEntry, *, streamed: bool = False) -> tuple[Path, ...]:
    """Returns the files with the entry's rows, or with `streamed` their names; none if they are not known or are gone."""
    try:
        files = json.loads((_folder(entry) / (_LISTED if streamed else _RECORD)).read_text(encoding="utf-8"))
        recorded = tuple(map(Path, files))
    except (OSError, ValueError, TypeError):
        return ()
    return recorded if all(is_remote(file) or is_file(file) for file in recorded) else ()


def fetch(entry: DatasetEntry, say: Say, *, streamed: bool = False) -> tuple[Path, ...]:
    """Returns the same files, and fetches them or their names first if needed, which may take long. Raises UsageError with the
    library's error text."""
    if recorded := recorded_files(entry, streamed=streamed):
        return recorded
    if streamed and re.search(r"[\[+]", entry.split):
        hint = "name a whole split and set max_samples, or set dataset.streaming=false"
        raise UsageError(f"dataset.train: {entry.path}: dataset.streaming reads no slice of a split", hint=hint)
    folder, place = _folder(entry), expanded(entry.path, key="dataset.train")
    with scratch_in(folder, what="dataset.train", hint=_ELSEWHERE) as rows:
        request: dict[str, Any] = {"path": str(place), "name": entry.name, "split": entry.split, "revision": entry.revision}
        request |= {"out": str(rows), "listing": streamed}
        named = entry.revision is not None  # the library's own cache does not know which revision it holds
        reply = (
            {"error": "its revision is not here yet, and HF_HUB_OFFLINE is set"}
            if named
            else _call_datasets(request, offline=True)
        )
        if "error" in reply and not place.is_dir() and may_ask():
            say(f"asking the hub for the files of {entry.path}" if streamed else f"fetching the data set {entry.path}")
            reply = _call_datasets(request, offline=False)
        if reply.get("kind") == "disk":
            hint = "free some space, or set HF_HOME (and XDG_CACHE_HOME for slices) to a folder on another disk"
            raise OutOfSpaceError(f"dataset.train: {entry.path}: no room to fetch it: {reply['error']}", hint=hint)
        if "error" in reply:
            hint = "check path, `name`, `split` and `revision`; for a gated set, run `hf auth login` or set HF_TOKEN"
            raise UsageError(f"dataset.train: {entry.path}: {reply['error']}", hint=reply.get("hint") or hint)
        named_files = map(Path, reply["files"])  # copied for us, or the library's own
        files = [file.replace(folder / file.name) if file.parent == rows else file for file in named_files]
        if streamed and (strange := [file.name for file in files if kind_of_rows(file) is None]):
            hint = "set dataset.streaming=false: the library `datasets` may read it"
            raise UsageError(f"dataset.train: {entry.path}: dataset.streaming cannot read {strange[0]}", hint=hint)
        record = _LISTED if streamed else _RECORD
        (draft := rows / record).write_text(json.dumps(list(map(str, files))), encoding="utf-8")
        draft.replace(folder / record)
    return tuple(files)


def may_ask() -> bool:
    """Whether the network may be used."""
    return os.environ.get("HF_HUB_OFFLINE", "") in ("", "0")


@contextmanager
def local_copy(file: Path, remote: Mapping[str, Any] | None) -> Iterator[Path]:
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
        reply = _call_datasets(request, offline=remote["offline"])
        if reply.get("kind") == "disk":
            raise DataSpaceError(f"{named['set']}: {named['file']}: {reply['error']}")
        if "error" in reply:
            gone = "If the set's owner has replaced its files, name its newest commit as `revision` in dataset.train: a new run"
            hint = f"is the hub reachable? The same command goes on from the last commit. {gone}"
            raise FuyouError(f"{named['set']}: {named['file']}: {reply['error']}", hint=reply.get("hint") or hint)
    yield local
    local.unlink(missing_ok=True)


def _folder(entry: DatasetEntry) -> Path:
    """Returns the folder of the record: one for each set, revision, subset and split. A folder's present content counts too."""
    place = expanded(entry.path, key="dataset.train")
    files = sorted(place.rglob("*")) if place.is_dir() else []
    listed = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]
    asked = [str(place), entry.name, entry.split, listed] + ([entry.revision] if entry.revision else [])
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    return kept_folder() / "sets" / key


def _call_datasets(request: dict[str, Any], *, offline: bool) -> dict[str, Any]:
    package_root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))}
    environment["HF_HUB_OFFLINE"] = "1" if offline else "0"
    command = [sys.executable, "-P", "-m", "fuyou_cli.data.sources"]
    done = subprocess.run(command, input=json.dumps(request), env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return {"error": f"the process that reads it ended with {done.returncode}: {last_line}"}
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


# ---- the process that imports `datasets` -----------------------------------------------------------------------------


_LONGEST = 600  # characters of an error
_MOST = 4 * BYTES  # the library holds some files whole
# Settings that say nothing of how a file is read.
_OF_EVERY_SET = {"name", "version", "data_dir", "data_files", "description", "features"}
_KINDS = {"Json": "json", "Csv": "csv", "Text": "text", "Parquet": "columns", "Arrow": "columns"}  # by the library's readers


def load_set(request: dict[str, Any]) -> dict[str, Any]:
    """Loads the set, names its files (`listing`) or fetches one (`file` and `commit`, into `out`), and returns the reply.

    The request has path, name, split, revision, and a folder `out`. The reply is {"files"} or {"error", "hint"}. Rows stay in
    the library's own cache, memory-mapped. A part of a split has no files of its own, so it is copied to `out`."""
    try:
        with LibraryErrors(UsageError):
            if "file" in request:
                return {"files": [_downloaded(request)]}
            import datasets  # type: ignore[import-untyped,unused-ignore]

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
        reason = " ".join(str(error.__cause__).split())[:_LONGEST] or error.message
        return {"error": reason, "kind": "disk" if _is_full(error) else "usage"}


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk is the cause of an error."""
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

    options = {"repo_type": "dataset", "revision": request["commit"], "local_dir": request["out"]}
    return str(huggingface_hub.hf_hub_download(request["path"], request["file"], **options))


def main() -> None:
    """Serves one request. What the library prints goes to standard error."""
    reply_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process of a job; the run decides
    limit_memory(_MOST)
    with reply_to:
        json.dump(load_set(json.load(sys.stdin)), reply_to)


if __name__ == "__main__":
    main()
