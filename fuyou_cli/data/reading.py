"""Reads the rows of a data file as a stream with bounded memory, each with its place ("train.jsonl:17").

These readers are fuyou's own, because those of `datasets` change what is learnt: JSON text "2024-01-01" becomes a time, the CSV
cell 3.50 a number and NA a null, and a bad row is named by neither file nor line. Here CSV cells stay text, JSON is read line
by line, and columns that are not used are never a reason to refuse a file.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from fuyou_cli.core.disk import unusable
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import parsed

from .formats import Chat, RowError, Texts, read_example
from .sandbox import reason

KINDS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".txt": "text", ".csv": "csv",
    ".parquet": "columns", ".arrow": "columns",
}  # fmt: skip
PACKED = (".gz", ".zst", ".bz2", ".xz")  # may follow the other suffixes, such as .jsonl.gz; column files are compressed inside
BESIDE = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # of `datasets`: files without rows
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


def suffixes(file: Path) -> tuple[str, str]:
    """Returns the suffixes of a file's name, such as (".jsonl", ".gz"). The second is empty if the file is not compressed."""
    packing = file.suffix.lower()
    if packing not in PACKED:
        return packing, ""
    return Path(file.stem).suffix.lower(), packing


def kind_of_rows(file: Path) -> str | None:
    """Returns how the rows of a file are read: json, text, csv or columns. None for an unknown suffix."""
    suffix, packing = suffixes(file)
    kind = KINDS.get(suffix)
    return None if packing and kind == "columns" else kind


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Names a file in what the system says as it is read, which has no name. Raises UsageError."""
    try:
        yield
    except OSError as error:
        if not error.errno:  # a library's own, of what is in the file
            raise
        raise unusable(f"{file}: cannot be read: {error.strerror}", error) from error


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Opens a file and returns its bytes, decompressed. Raises UsageError if they cannot be read or decompressed."""
    packing = suffixes(file)[1]
    try:
        with naming(file), _stream(file, packing) as stream:
            yield stream
    except _DAMAGED as error:
        if not packing:
            raise
        raise UsageError(f"{file}: not valid {packing[1:]}: {reason(error)}", hint="is the file complete?") from error


def _stream(file: Path, packing: str) -> Any:
    if packing == ".zst":
        import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

        return pa.input_stream(str(file), compression="zstd")
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers[packing](file, "rb") if packing else file.open("rb")


# ---- rows ------------------------------------------------------------------------------------------------------------


LARGEST_ROW = 1 << 24  # most characters of a file held at once
PlacedRow = tuple[str, dict[str, Any]]  # "train.jsonl:17" and the row
_CHUNK = 1 << 18
_SPACE = re.compile(r"[ \t\r\n]*")
_POSITION = re.compile(r": line \d+ column (\d+) \(char \d+\)$")
_TORN = 16  # characters: longest word or escape that the end of the buffer may cut in two
_ENDS = json.JSONDecoder(parse_int=str, parse_float=str)  # finds where an element ends; too long numbers are refused later
PIECE_CHARS = 1 << 16  # characters in a piece of a document; tokenising needs ~100 bytes for each
_ROWS_AT_ONCE = 256
_NO_TYPE = (ValueError, LookupError, TypeError, OverflowError, ImportError, NotImplementedError)  # where Python has no type


def read_rows(file: Path, *, skipped: int = 0, by_line: bool = False) -> Iterator[PlacedRow]:
    """Yields place and row of every record of a JSON, CSV, Parquet or Arrow file; of a text file every paragraph, or every line
    as `datasets` does, as `text`. The first `skipped` are left out; lines of JSON are not even parsed then.

    Raises UsageError naming the file and the line.
    """
    if file.stat().st_size == 0:
        raise UsageError(f"{file}: the file is empty", hint="name another file, or remove it where a folder is read")
    readers = {"csv": _csv_rows, "text": _text_lines if by_line else _paragraphs, "columns": _columnar_rows}
    with _utf8_only(file):
        if (kind := kind_of_rows(file) or "") == "json":
            yield from _json_rows(file, skipped)
        else:
            yield from islice(readers[kind](file), skipped, None)


@contextmanager
def _text(file: Path, *, newline: str | None = None, encoding: str = "utf-8-sig") -> Iterator[io.TextIOWrapper]:
    """Opens a text file, decompressed, with or without a byte order mark."""
    with opened(file) as stream, io.TextIOWrapper(stream, encoding=encoding, newline=newline) as text:
        yield text


@contextmanager
def _utf8_only(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UsageError(f"{first_bad_line(file)}: not UTF-8 text: {error.reason}") from error


def first_bad_line(file: Path) -> str:
    """Returns file:line of the first line that is not UTF-8."""
    with opened(file) as stream:
        for number, line in enumerate(iter(stream.readline, b""), start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{file}:{number}"
    return str(file)


def _json_rows(file: Path, skipped: int) -> Iterator[PlacedRow]:
    """Yields the rows of a file with one object per line, or with one array. Raises UsageError with file and line."""
    with opened(file) as stream:
        head = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        with _text(file, newline="") as text:
            yield from islice(_JsonArray(file, text.read).rows(), skipped, None)
        return
    if suffixes(file)[0] == ".json" and head.split(b"\n", 1)[0].strip() == b"{":
        raise UsageError(
            f"{file}:1: an object spans several lines", hint="write one object per line (JSON lines), or an array of objects"
        )
    rows = ((number, line) for number, line in enumerate(_lines(file), start=1) if line.strip())
    for number, line in islice(rows, skipped, None):
        yield f"{file}:{number}", _json_row(line.removesuffix("\n"), f"{file}:{number}")


def _lines(file: Path, **options: Any) -> Iterator[str]:
    """Yields the lines of a text file. Raises UsageError for a line that is too long for a row."""
    with _text(file, **options) as stream:
        number = 1
        while line := stream.readline(LARGEST_ROW + 1):
            _check_size(len(line), f"{file}:{number}")
            yield line
            number += 1


def _check_size(characters: int, place: str) -> None:
    """Raises UsageError at `place` for more characters than a row may have."""
    if characters > LARGEST_ROW:
        hint = "cut it into several rows; with dataset.packing: concat a .txt file may have any length"
        raise UsageError(f"{place}: a row has more than {LARGEST_ROW:,} characters", hint=hint)


def _json_row(text: str, place: str) -> dict[str, Any]:
    """Reads `text` as an object. Raises UsageError at `place`: not JSON, not an object, or text that no tokenizer takes."""
    try:
        row = parsed(text, finite=False)
    except UsageError as error:
        why = _POSITION.sub(r" (column \1)", error.message)  # the line is in `place`
        raise UsageError(f"{place}: {why}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{place}: not a JSON object but {type(row).__name__}", hint="every row must be an object: {...}")
    return row


class _JsonArray:
    """Reads a file with one array, and holds no more of it than the largest element needs. `_at` is the parsed position."""

    def __init__(self, file: Path, read: Callable[[int], str]) -> None:
        self._file, self._read = file, read
        self._text, self._at, self._line = "", 0, 1

    def rows(self) -> Iterator[PlacedRow]:
        self._expect("[")
        if self._next() != "]":
            yield self._element()
            while self._next() == ",":
                self._at += 1
                yield self._element()
        self._expect("]")
        if self._next():
            raise self._error("Extra data", self._at)

    def _next(self) -> str:
        """Returns the next character that is not white space; "" at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._advance(space.end() if space else self._at)
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise self._error(f"Expecting '{character}'" + " or ','" * (character == "]"), self._at)
        self._at += 1

    def _element(self) -> PlacedRow:
        self._next()
        place = f"{self._file}:{self._line}"
        while True:
            try:
                _, end = _ENDS.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                torn = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _TORN
                if not (torn and self._more()):
                    raise self._error(error.msg, error.pos) from None
            except RecursionError:
                raise UsageError(f"{place}: not valid JSON: nested too deeply") from None
            else:
                text = self._text[self._at : end]
                self._advance(end)
                return place, _json_row(text, place)

    def _more(self) -> bool:
        """Reads as much again as is left. So a large element is not decoded from its start too often."""
        left = len(self._text) - self._at
        _check_size(left, f"{self._file}:{self._line}")
        chunk = self._read(max(_CHUNK, left))
        self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)

    def _advance(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to

    def _error(self, what: str, at: int) -> UsageError:
        line, column = self._line + self._text.count("\n", self._at, at), at - self._text.rfind("\n", 0, at)
        return UsageError(f"{self._file}:{line}: not valid JSON: {what} (column {column})")


def _csv_rows(file: Path) -> Iterator[PlacedRow]:
    """Yields each record with the line where it begins: a quoted cell may hold line breaks."""
    csv.field_size_limit(LARGEST_ROW)
    begin, held, ended = 1, 0, False

    def lines() -> Iterator[str]:
        nonlocal held, ended
        for line in _lines(file, newline=""):
            held += len(line)
            _check_size(held, f"{file}:{begin}")
            yield line
        ended = True

    records = csv.reader(lines())
    names: list[str] = []
    try:
        for cells in records:
            if ended:
                raise UsageError(f"{file}:{begin}: a quoted cell has no closing quote")
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
        raise UsageError(f"{file}:{begin}: not valid csv: {error}") from error


def _columnar_rows(file: Path) -> Iterator[PlacedRow]:
    from pyarrow import ArrowException  # type: ignore[import-untyped,unused-ignore]

    number = 0
    try:
        for batch in _record_batches(file):
            batch.validate(full=True)
            for begin in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for row in _as_python(batch.slice(begin, _ROWS_AT_ONCE)):
                    number += 1
                    yield f"{file}: row {number}", row
    except MemoryError:  # which one of Arrow's is too
        raise
    except (ArrowException, ValueError, LookupError, TypeError, OSError) as error:  # damaged, or with a type that Python lacks
        raise unusable(f"{file}: not valid {file.suffix[1:].lower()}: {reason(error)}", error) from error


def _as_python(batch: Any) -> list[dict[str, Any]]:
    """Returns the rows of a batch. A cell that Python has no type for, such as a time in nanoseconds, stays Arrow's: a column
    that nobody uses is no reason to refuse a file, and whoever uses it refuses its type."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
        return rows
    except _NO_TYPE:
        return [dict(zip(batch.schema.names, map(_cell, row), strict=True)) for row in zip(*batch.columns, strict=True)]


def _cell(value: Any) -> Any:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

    try:
        return value.as_py(maps_as_pydicts="strict")
    except _NO_TYPE:
        if pa.types.is_struct(value.type):
            return {name: _cell(value[name]) for name in value}
        is_list = any(test(value.type) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
        return list(map(_cell, value)) if is_list else value


def _record_batches(file: Path) -> Iterator[Any]:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,unused-ignore]

    with naming(file), file.open("rb") as stream:
        if file.suffix.lower() == ".parquet":
            yield from ParquetFile(stream).iter_batches(batch_size=_ROWS_AT_ONCE)
            return
        try:
            yield from pa.ipc.open_stream(stream)
        except (OSError, pa.ArrowInvalid):
            reader = pa.ipc.open_file(stream)
            yield from map(reader.get_batch, range(reader.num_record_batches))


def _paragraphs(file: Path) -> Iterator[PlacedRow]:
    """Yields the text between empty lines."""
    number, text = 0, ""
    for line in chain(_lines(file), [""]):
        text += line
        _check_size(len(text), f"{file}: paragraph {number + 1}")
        if not line or (line == "\n" and text != "\n"):
            text = text.removesuffix("\n\n")
            number += bool(text)
            if text.strip():
                yield f"{file}: paragraph {number}", {"text": text}
            text = ""


def _text_lines(file: Path) -> Iterator[PlacedRow]:
    """Yields every line, empty ones too. A byte order mark is kept, as by `datasets`."""
    for number, line in enumerate(_lines(file, encoding="utf-8"), start=1):
        yield f"{file}:{number}", {"text": line.removesuffix("\n")}


def read_document(file: Path) -> Iterator[tuple[str, bool, bool]]:
    """Yields a .txt file as one document, in pieces (text, begins, ends)."""
    with _utf8_only(file), _text(file) as stream:
        yield from pieces_of(iter(lambda: stream.readline(LARGEST_ROW), ""))


def pieces_of(parts: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yields the parts' text in pieces (text, begins, ends) of at most 3 * PIECE_CHARS.

    Cuts are between parts; inside a long part after a line break, else before a space, else anywhere. A tokenizer may see the
    text around a cut differently: one place in tens of thousands of characters.
    """
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
    """Finds where to end a piece: after at least half of PIECE_CHARS and at most all of it."""
    least, most = begin + PIECE_CHARS // 2, begin + PIECE_CHARS
    line = text.rfind("\n", least, most)
    if line >= 0 and text[line + 1] != "\n":  # several line breaks are often one token
        return line + 1
    space = text.rfind(" ", least, most)
    return space if space >= 0 else most


# ---- prompts: rows whose answer the model is to write ----------------------------------------------------------------


Prompt = Texts | Chat
_ANSWERS = {"messages": "", "conversations": "", "prompt": "completion", "instruction": "output"}  # column -> of the answer
_FORMATS = {"messages": "messages", "conversations": "sharegpt", "prompt": "prompt_completion", "instruction": "alpaca"}


def read_prompts(file: Path, *, chat: bool) -> list[tuple[str, dict[str, Any], Prompt]]:
    """Returns place, row and prompt of every row of a file. `chat`: a prompt that is a text is a user's message.

    Raises UsageError that names the file, and the line."""
    if not file.is_file() or kind_of_rows(file) is None:
        what = "no such file" if not file.exists() else "not a file of rows"
        raise UsageError(f"{file}: {what}", hint='give a file of lines such as {"prompt": "..."} with the suffix .jsonl')
    prompts = []
    for place, row in read_rows(file):
        try:
            prompts.append((place, row, prompt_of(row, chat=chat)))
        except RowError as error:
            raise UsageError(f"{place}: {error}") from None
    if not prompts:
        raise UsageError(f"{file}: the file has no rows", hint='give lines such as {"prompt": "..."}')
    return prompts


def prompt_of(row: dict[str, Any], *, chat: bool) -> Prompt:
    """Returns the prompt of a row. Raises RowError where it has none."""
    column = next((name for name in _FORMATS if name in row), None)
    if column is None:
        raise RowError(f"the row has none of the columns {', '.join(_FORMATS)}")
    if column == "prompt" and isinstance(row[column], list):  # of messages
        row, column = {"messages": row[column], "tools": row.get("tools")}, "messages"
    answer = _ANSWERS[column]
    example = read_example({**row, answer: ""} if answer else row, _FORMATS[column], {})
    if isinstance(example, Chat):
        messages = example.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise RowError("the conversation has no message to answer")
        return replace(example, messages=messages, unlearnt=frozenset())
    assert isinstance(example, Texts)
    text = "".join(text for text, learnt in example.parts if not learnt)
    return said(text) if chat else written(text)


def as_data(prompt: Prompt) -> dict[str, Any]:
    """Returns a prompt as JSON can hold it; `as_prompt` makes the same of it."""
    names = ("parts", "begins", "ends", "bare") if isinstance(prompt, Texts) else ("messages", "tools", "options")
    return {name: getattr(prompt, name) for name in names}


def as_prompt(fields: dict[str, Any]) -> Prompt:
    return Texts(**fields) if "parts" in fields else Chat(**fields)


def written(text: str) -> Texts:
    """Returns the text that the model goes on writing."""
    return Texts(parts=((text, True),), ends=False)


def said(text: str) -> Chat:
    """Returns the conversation that begins with this message of a user."""
    return Chat(messages=({"role": "user", "content": text},))
