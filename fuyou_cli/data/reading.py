"""Rows of one data file, each with its place ("train.jsonl:17"), read as a stream.

Text, CSV, Parquet and Arrow are read with the datasets library. JSON lines are parsed here, one by one, without it: its
columnar JSON reader guesses one type per column, turns text that looks like a date into a date, refuses a file because of a
column nobody asked for, and names no line. CSV cells are read as the text they are, for the same reason. Nothing is copied to
a disk cache.
"""

from __future__ import annotations

import csv
import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError

from .json_rows import first_bad_line, json_array, json_lines
from .sources import KINDS
from .told import reason

PIECE_CHARS = 1 << 16  # a document is tokenised in pieces of this size: offsets cost ~100 bytes per character

_OF_LIBRARIES = (LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
Placed = tuple[str, dict[str, Any]]


def read_rows(file: Path) -> Iterator[Placed]:
    """Place and row of every record of a JSON, CSV, Parquet or Arrow file; of a .txt file every paragraph, as `text`.

    Raises UsageError naming the file and the line."""
    kind = KINDS[file.suffix.lower()]
    if kind == "json":
        yield from _json_rows(file)
    elif kind == "text":
        for number, row in enumerate(_stream("text", file, sample_by="paragraph"), start=1):
            if row["text"].strip():
                yield f"{file}: paragraph {number}", row
    elif kind == "csv":
        yield from _csv_rows(file)
    else:
        for number, row in enumerate(_stream(kind, file), start=1):
            yield f"{file}: row {number}", row


def read_document(file: Path) -> Iterator[tuple[str, bool, bool]]:
    """A .txt file as one document, in pieces (text, begins, ends)."""
    yield from pieces_of(row["text"] for row in _stream("text", file, keep_linebreaks=True))


def pieces_of(parts: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """The parts' text in pieces (text, begins, ends) of at most 3 * PIECE_CHARS, cut between parts, and inside a long one
    after a line break, else before a space, else anywhere. A tokenizer may see the text around a cut differently: one
    place in tens of thousands of characters."""
    waiting: list[str] = []
    size, begins = 0, True
    for part in _shortened(parts):
        if size >= PIECE_CHARS:
            yield "".join(waiting), begins, False
            waiting, size, begins = [], 0, False
        waiting.append(part)
        size += len(part)
    yield "".join(waiting), begins, True


def _shortened(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        begin = 0
        while len(part) - begin >= 2 * PIECE_CHARS:
            end = _place_to_cut(part, begin)
            yield part[begin:end]
            begin = end
        yield part[begin:]


def _place_to_cut(text: str, begin: int) -> int:
    """Where to end a piece of at least a half and at most the whole of PIECE_CHARS."""
    least, most = begin + PIECE_CHARS // 2, begin + PIECE_CHARS
    line = text.rfind("\n", least, most)
    if line >= 0 and text[line + 1] != "\n":  # line breaks in a row are often one token
        return line + 1
    space = text.rfind(" ", least, most)
    return space if space >= 0 else most


def _stream(kind: str, file: Path, **options: Any) -> Iterator[dict[str, Any]]:
    import datasets  # 0.8 s, 84 MiB: in the worker only
    from pyarrow import ArrowException  # type: ignore[import-untyped,unused-ignore]

    if file.stat().st_size == 0:
        raise UsageError(f"{file}: the file is empty")
    if "::" in str(file):
        raise UsageError(f"{file}: :: in its name means a chain of archives to the datasets library", hint="rename it")
    if kind in ("text", "csv"):
        options["encoding"] = "utf-8-sig"  # with or without a byte order mark
    try:
        rows = datasets.load_dataset(kind, data_files=[glob.escape(str(file))], split="train", streaming=True, **options)
        yield from rows
    except UnicodeDecodeError as error:
        raise UsageError(f"{first_bad_line(file)}: not UTF-8 text: {error.reason}") from error
    except ArrowException as error:
        raise UsageError(f"{file}: not readable as {kind}: {_first_line(error)}") from error
    except ValueError as error:  # pandas' parser error names the line itself
        raise UsageError(f"{file}: not readable as {kind}: {_first_line(error)}") from error
    except _OF_LIBRARIES as error:  # over a null character in a column's name, say
        raise UsageError(f"{file}: not readable as {kind}: {reason(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _json_rows(file: Path) -> Iterator[Placed]:
    """One object per line, or one array of objects."""
    with file.open("rb") as stream:
        head = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        yield from json_array(file)
        return
    if file.suffix.lower() == ".json" and head.split(b"\n", 1)[0].strip() == b"{":
        raise UsageError(
            f"{file}:1: one object spread over several lines",
            hint="write one object per line (JSON lines), or an array of objects",
        )
    if file.stat().st_size == 0:
        raise UsageError(f"{file}: the file is empty")
    yield from json_lines(file)


def _csv_rows(file: Path) -> Iterator[Placed]:
    """Places are lines where records begin, found by reading beside the library: a quoted cell may hold line breaks."""
    import datasets

    csv.field_size_limit(1 << 30)  # the default refuses cells of 128 KiB
    with file.open(encoding="utf-8-sig", newline="", errors="replace") as text:
        records = csv.reader(text)
        names = next(records, [])
        if len(set(names)) != len(names):
            raise UsageError(f"{file}:1: a column name occurs twice")
        features = datasets.Features({name: datasets.Value("string") for name in names})
        for row in _stream("csv", file, features=features, na_filter=False):
            begin = records.line_num + 1
            while not (cells := next(records, names)):  # blank lines are no records to either reader
                begin = records.line_num + 1
            if len(cells) != len(names):
                raise UsageError(f"{file}:{begin}: {len(cells)} cells, but the header has {len(names)}")
            yield f"{file}:{begin}", row
