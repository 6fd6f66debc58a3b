"""Rows of one data file, each with its place ("train.jsonl:17"), read as a stream with bounded memory.

Cells of a CSV file are read as the text they are, and JSON line by line: readers that guess a type per column turn text that
looks like a date into a date, refuse a file because of a column nobody asked for, and name no line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError

from .json_rows import LARGEST_ROW, Placed, bounded_lines, check_size, json_rows
from .sandbox import reason

KINDS = {".jsonl": "json", ".json": "json", ".txt": "text", ".csv": "csv", ".parquet": "columns", ".arrow": "columns"}
PIECE_CHARS = 1 << 16  # a document is tokenised in pieces of this size: offsets cost ~100 bytes per character
_ROWS_AT_ONCE = 256


def read_rows(file: Path) -> Iterator[Placed]:
    """Yields place and row of every record of a JSON, CSV, Parquet or Arrow file; of a .txt file every paragraph, as `text`.

    Raises UsageError naming the file and the line."""
    if file.stat().st_size == 0:
        raise UsageError(f"{file}: the file is empty")
    readers = {"json": json_rows, "csv": _csv_rows, "text": _paragraphs, "columns": _columnar_rows}
    try:
        yield from readers[KINDS[file.suffix.lower()]](file)
    except UnicodeDecodeError as error:
        raise UsageError(f"{first_bad_line(file)}: not UTF-8 text: {error.reason}") from error


def first_bad_line(file: Path) -> str:
    """Finds file:line of the first line that is not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{file}:{number}"
    return str(file)


def _csv_rows(file: Path) -> Iterator[Placed]:
    """Yields records at the lines where they begin: a quoted cell may hold line breaks."""
    csv.field_size_limit(LARGEST_ROW)
    begin, held, ended = 1, 0, False

    def lines() -> Iterator[str]:
        nonlocal held, ended
        for line in bounded_lines(file, newline=""):
            held += len(line)
            check_size(held, f"{file}:{begin}")
            yield line
        ended = True

    records = csv.reader(lines())
    names: list[str] = []
    try:
        for cells in records:
            if ended:
                raise UsageError(f"{file}:{begin}: a quoted cell is never closed")
            if cells and not names:
                names = cells
                if len(set(names)) != len(names):
                    raise UsageError(f"{file}:{begin}: a column name occurs twice")
            elif cells:
                if len(cells) != len(names):
                    raise UsageError(f"{file}:{begin}: {len(cells)} cells, but the header has {len(names)}")
                yield f"{file}:{begin}", dict(zip(names, cells, strict=True))
            begin, held = records.line_num + 1, 0
    except csv.Error as error:
        raise UsageError(f"{file}:{begin}: not readable as csv: {error}") from error


def _columnar_rows(file: Path) -> Iterator[Placed]:
    from pyarrow import ArrowException  # type: ignore[import-untyped,unused-ignore]

    number = 0
    try:
        for batch in _record_batches(file):
            batch.validate(full=True)
            for begin in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for row in batch.slice(begin, _ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield f"{file}: row {number}", row
    except (ArrowException, ValueError, LookupError, TypeError, OSError) as error:  # damaged, or of a type that Python lacks
        raise UsageError(f"{file}: not readable as {file.suffix[1:].lower()}: {reason(error)}") from error


def _record_batches(file: Path) -> Iterator[Any]:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,unused-ignore]

    with file.open("rb") as stream:
        if file.suffix.lower() == ".parquet":
            yield from ParquetFile(stream).iter_batches(batch_size=_ROWS_AT_ONCE)
            return
        try:
            yield from pa.ipc.open_stream(stream)
        except (OSError, pa.ArrowInvalid):
            reader = pa.ipc.open_file(stream)
            yield from map(reader.get_batch, range(reader.num_record_batches))


def _paragraphs(file: Path) -> Iterator[Placed]:
    """Yields what stands between empty lines, as text."""
    number, size = 0, 0
    waiting: list[str] = []

    def row() -> Iterator[Placed]:
        nonlocal number
        text = "".join(waiting).removesuffix("\n\n")
        number += bool(text)
        if text.strip():
            yield f"{file}: paragraph {number}", {"text": text}

    for line in bounded_lines(file):
        size += len(line)
        check_size(size, f"{file}: paragraph {number + 1}")
        waiting.append(line)
        if line == "\n" and len(waiting) > 1:
            yield from row()
            waiting, size = [], 0
    yield from row()


def read_document(file: Path) -> Iterator[tuple[str, bool, bool]]:
    """Yields a .txt file as one document, in pieces (text, begins, ends)."""
    try:
        with file.open(encoding="utf-8-sig") as stream:
            yield from pieces_of(iter(lambda: stream.readline(LARGEST_ROW), ""))
    except UnicodeDecodeError as error:
        raise UsageError(f"{first_bad_line(file)}: not UTF-8 text: {error.reason}") from error


def pieces_of(parts: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yields the parts' text in pieces (text, begins, ends) of at most 3 * PIECE_CHARS.

    It is cut between parts, and inside a long one after a line break, else before a space, else anywhere. A tokenizer may see
    the text around a cut differently: one place in tens of thousands of characters."""
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
    """Finds where to end a piece of at least a half and at most the whole of PIECE_CHARS."""
    least, most = begin + PIECE_CHARS // 2, begin + PIECE_CHARS
    line = text.rfind("\n", least, most)
    if line >= 0 and text[line + 1] != "\n":  # line breaks in a row are often one token
        return line + 1
    space = text.rfind(" ", least, most)
    return space if space >= 0 else most
