"""Where the data is: paths of the recipe to files, and what the tokenised rows depend on.

Runs in the trainer before the worker starts: standard library only.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import expanded
from fuyou_cli.core.plain_files import kind_of

KINDS = {".jsonl": "json", ".json": "json", ".txt": "text", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
TOKENIZER_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
TEMPLATE_FOLDER = "additional_chat_templates"  # the one folder that is part of a tokenizer
NAMES_SHOWN = 4
_SPLIT_WORDS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One entry of `dataset.train`, its files found."""

    path: str
    split: str
    files: tuple[Path, ...]
    skipped: tuple[Path, ...]  # data files of the directory that are not of the split
    format: str
    columns: dict[str, str]
    max_samples: int | None

    @property
    def choice(self) -> str | None:
        """Which files were taken and which were not, where the path alone does not say it."""
        if not self.skipped and self.files == (expanded(self.path, key="dataset.train"),):
            return None
        taken = f"{self.path}: {len(self.files)} file{'s' * (len(self.files) != 1)} taken ({_names(self.files)})"
        if not self.skipped:
            return taken
        return f"{taken}, {len(self.skipped)} skipped as not of split {self.split} ({_names(self.skipped)})"


class MissingDataError(UsageError):
    """There is no data at a path. A plan does not need it; a run does."""


def _names(files: tuple[Path, ...]) -> str:
    more = len(files) - NAMES_SHOWN
    return ", ".join(file.name for file in files[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def locate(path: str, split: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The data files of a file, a directory or a glob, sorted, and those passed over. In a directory where names of files
    say their split, only those of `split` are taken. Raises UsageError naming the path."""
    here = expanded(path, key="dataset.train")
    try:
        return _found(path, here, split)
    except OSError as error:  # a folder that may not be read, a name too long
        raise UsageError(f"dataset.train: {path}: {error.strerror}", hint="give a path that can be read") from error
    except ValueError as error:  # pathlib's, of a pattern
        raise UsageError(f"dataset.train: {path} is no glob: {error}", hint="write it as data/**/*.jsonl") from error


def _found(path: str, here: Path, split: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    passed = list[Path]()
    if here.is_file():
        found = [here]
        if here.suffix.lower() not in KINDS:
            raise UsageError(f"{path}: unknown kind of file {here.suffix or '(no suffix)'}", hint=_known_kinds())
    elif here.is_dir():
        inside = (file for file in here.rglob("*") if not any(part[0] == "." for part in file.relative_to(here).parts))
        present = [file for file in inside if file.is_file() and file.suffix.lower() in KINDS]
        found = _of_split(present, split, path)
        passed = [file for file in present if file not in set(found)]
    else:
        matches = Path(here.anchor).glob(str(here.relative_to(here.anchor)))
        found = [file for file in matches if file.is_file() and file.suffix.lower() in KINDS]
    if not found and (here.is_fifo() or here.is_socket() or here.is_char_device() or here.is_block_device()):
        what = kind_of(here.stat().st_mode)
        raise UsageError(f"dataset.train: {path}: it is {what}, not a plain file", hint="write the rows to a file")
    if not found:
        hint = "give an existing file, directory or glob; data sets of the hub must be downloaded first"
        raise MissingDataError(f"dataset.train: no data files at {path}", hint=f"{hint}. {_known_kinds()}")
    return tuple(sorted(found)), tuple(sorted(passed))


def _of_split(files: list[Path], split: str, path: str) -> list[Path]:
    """Those whose names say `split`; all of them where no name says anything."""
    named = {file: _split_in_name(file) for file in files}
    if split in _SPLIT_WORDS:
        chosen = [file for file, name in named.items() if name == _SPLIT_WORDS[split]]
    else:  # such as train_sft: only names that hold all of it
        whole = re.compile(rf"(?<![a-z0-9]){re.escape(split.lower())}(?![a-z0-9])")
        chosen = [file for file in files if whole.search(file.stem.lower())]
    if chosen or not any(named.values()):
        return chosen or files
    present = ", ".join(sorted({name for name in named.values() if name}))
    raise UsageError(f"dataset.train: {path} has no files of split {split}", hint=f"its splits are: {present}")


def _split_in_name(file: Path) -> str | None:
    words = re.split(r"[^a-z]+", file.stem.lower())
    return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)


def _known_kinds() -> str:
    return f"files end in {', '.join(KINDS)}"


def find_sources(dataset: object) -> tuple[Source, ...]:
    """The entries of `dataset.train` with their files. Raises UsageError for what is missing or not built yet."""
    entries = getattr(dataset, "train", None) or ()
    if not entries:
        raise UsageError("dataset.train is empty", hint="name at least one file, directory or glob")
    sources = []
    for entry in entries:
        split = getattr(entry, "split", None) or "train"
        if getattr(entry, "name", None) is not None:
            raise UsageError("dataset.train.name: hub subsets are not built yet", hint="point path at local files")
        if getattr(entry, "weight", 1.0) != 1.0:
            raise UsageError("dataset.train.weight: mixing by weight is not built yet", hint="leave it at 1.0")
        if not re.fullmatch(r"[\w.-]+", split):
            hint = "name one split; use max_samples for a part of it"
            raise UsageError(f"dataset.train.split: {split}: parts and sums of splits are not built yet", hint=hint)
        max_samples = getattr(entry, "max_samples", None)
        if max_samples is not None and max_samples < 1:
            raise UsageError(f"dataset.train.max_samples: {max_samples} leaves no data", hint="null takes all")
        files, skipped = locate(str(entry.path), split)
        sources.append(
            Source(
                path=str(entry.path),
                split=split,
                files=files,
                skipped=skipped,
                format=getattr(entry, "format", "auto"),
                columns=dict(getattr(entry, "columns", None) or {}),
                max_samples=max_samples,
            )
        )
    return tuple(sources)


def content_of(file: Path) -> str:
    """The SHA-256 of a file. Content alone: a copied or touched file gives the same rows."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tokenizer_content(tokenizer_dir: Path) -> dict[str, str]:
    """Name to SHA-256 of every file beside the weights that may shape the tokens. Folders are not looked into: a run may
    write into one below its model."""
    if not tokenizer_dir.is_dir():
        raise UsageError(f"tokenizer: {tokenizer_dir} is not a directory")
    files = [*tokenizer_dir.iterdir(), *(tokenizer_dir / TEMPLATE_FOLDER).glob("*.jinja")]
    kept = sorted(
        file for file in files if file.suffix in TOKENIZER_SUFFIXES and not file.name.endswith(".index.json") and file.is_file()
    )
    return {str(file.relative_to(tokenizer_dir)): content_of(file) for file in kept}
