"""Reads and checks the header of a safetensors file.

A file is: eight bytes with the header's length, the header (JSON), then the data. Checkpoints are downloaded from
strangers, so nothing in a header is believed before it is checked, and no input costs more memory than a small multiple
of the header itself: the JSON is scanned token by token for exactly the one shape the format allows, which has a fixed
depth. A general JSON parser would build whatever nesting and lists the file asks for.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuyou_cli.core.disk import remedy
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import shown

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
NAME_LIMIT = 1024  # characters
METADATA = "__metadata__"  # what stands among the tensors and is none
DIMENSION_LIMIT = 64  # dimensions of a tensor that torch can hold
SIZE_LIMIT = (1 << 63) - 1  # elements or bytes; what a signed file offset can address

# Name in the file -> (our name, bytes per element). Formats below one byte have no whole element to address.
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
BYTES_PER_ELEMENT: dict[str, int] = dict(DTYPES.values())

# Possessive quantifiers: a string of many megabytes must not leave a backtracking record per character.
_TOKEN = re.compile(
    r"""[ \t\n\r]*+(?:
        (?P<string>"(?:[^"\\\x00-\x1f]++|\\.)*+")
      | (?P<integer>-?(?:0|[1-9][0-9]{0,18}+)(?![0-9.eE]))
      | (?P<mark>[{}\[\]:,])
      | (?P<end>\Z)
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a file. `begin` and `end` are byte offsets from the start of the file; `name` is its key there."""

    name: str
    file: Path
    dtype: str  # torch's word: "float32", "bfloat16", ...
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return (self.end - self.begin) // BYTES_PER_ELEMENT[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    entries: dict[str, TensorEntry]  # by key
    metadata: dict[str, str]


def _why(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def parse_file(path: Path) -> Header:
    """Tensors (in data order) and metadata of a safetensors file, everything checked against the file's true length.

    Raises UsageError naming file and tensor.
    """
    try:
        # Without O_NONBLOCK opening a pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise UsageError(f"{shown(str(path))}: cannot be opened: {_why(error)}", hint=remedy(error)) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(path, "is not a regular file")
        raw = _header_bytes(descriptor, path, status.st_size)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {_why(error)}", hint=remedy(error)) from error
    finally:
        os.close(descriptor)
    data_begin = 8 + len(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(path, f"its header is not valid UTF-8 at byte {error.start}") from error
    del raw
    entries, metadata = _HeaderScan(text, path, data_begin).run()
    return Header(entries=_tiled(entries, path, data_begin, status.st_size), metadata=metadata)


def _refusal(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path}: {what}",
        hint="The file is damaged, incomplete or not a safetensors file: fetch or export it again.",
    )


def _header_bytes(descriptor: int, path: Path, file_size: int) -> bytes:
    prefix = _pread_exactly(descriptor, 8, 0)
    if len(prefix) < 8:
        raise _refusal(path, f"has {file_size} bytes, too few for a safetensors header")
    length = int.from_bytes(prefix, "little")
    if length > HEADER_LIMIT:
        raise _refusal(path, f"says its header has {length} bytes; the format allows {HEADER_LIMIT}")
    if 8 + length > file_size:
        raise _refusal(path, f"is truncated: its header alone ends at byte {8 + length}, the file has {file_size}")
    raw = _pread_exactly(descriptor, length, 8)
    if len(raw) < length:
        raise _refusal(path, f"is truncated: its header has {length} bytes, {len(raw)} could be read")
    return raw


def _pread_exactly(descriptor: int, count: int, offset: int) -> bytes:
    """`count` bytes, or fewer where the file ends."""
    parts: list[bytes] = []
    while count > 0:
        part = os.pread(descriptor, count, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)


def _tiled(entries: dict[str, TensorEntry], path: Path, data_begin: int, file_size: int) -> dict[str, TensorEntry]:
    """The entries in data order, once it is sure that they cover the data without hole or overlap, to the last byte."""
    ordered = sorted(entries.values(), key=lambda entry: (entry.begin, entry.end))
    position = data_begin
    for entry in ordered:
        if entry.begin != position:
            flaw = "a hole before it" if entry.begin > position else "it overlaps another tensor"
            raise _refusal(
                path,
                f"tensor {shown(entry.name)}: its data begins at byte {entry.begin - data_begin}, "
                f"expected {position - data_begin}: {flaw}",
            )
        position = entry.end
        if position > file_size:
            raise _refusal(path, f"is truncated: tensor {shown(entry.name)} ends at byte {position}, the file has {file_size}")
    if position != file_size:
        raise _refusal(path, f"has {file_size - position} bytes after the last tensor")
    return {entry.name: entry for entry in ordered}


class _HeaderScan:
    """One pass over the header's text. Owns the position; refuses at the first token that does not belong."""

    def __init__(self, text: str, path: Path, data_begin: int) -> None:
        self.text = text
        self.path = path
        self.data_begin = data_begin
        self.position = 0
        self.tensor: str | None = None  # being read, for messages

    def run(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        entries: dict[str, TensorEntry] = {}
        metadata: dict[str, str] | None = None
        for name in self._keys(limit=NAME_LIMIT):
            if name == METADATA:
                if metadata is not None:
                    raise self._refusal("has two __metadata__ entries")
                metadata = self._metadata()
                continue
            if name in entries:
                raise self._refusal(f"names tensor {shown(name)} twice")
            self.tensor = name
            entries[name] = self._entry(name)
            self.tensor = None
        if self._next()[0] != "end":
            raise self._refusal("its header goes on after the closing brace")
        return entries, metadata or {}

    def _refusal(self, what: str) -> UsageError:
        return _refusal(self.path, what if self.tensor is None else f"tensor {shown(self.tensor)}: {what}")

    def _next(self) -> tuple[str, str]:
        match = _TOKEN.match(self.text, self.position)
        if match is None or match.lastgroup is None:
            raise self._refusal(f"its header is not valid JSON at character {self.position}")
        self.position = match.end()
        return match.lastgroup, match[match.lastgroup]

    def _mark(self, allowed: str) -> str:
        begin = self.position
        kind, token = self._next()
        if kind != "mark" or token not in allowed:
            wanted = " or ".join(allowed)
            raise self._refusal(f"its header has {shown(token)} at character {begin} where {wanted} belongs")
        return token

    def _string(self, limit: int) -> str:
        begin = self.position
        kind, token = self._next()
        if kind != "string":
            raise self._refusal(f"its header has {shown(token)} at character {begin} where a string belongs")
        if len(token) > limit + 2:
            raise self._refusal(f"its header has a string of {len(token) - 2} characters at character {begin}")
        if "\\" not in token:
            return token[1:-1]
        try:
            text: str = json.loads(token)
            text.encode("utf-8")  # an escaped half of a surrogate pair is not text
        except ValueError as error:
            raise self._refusal(f"its header has a wrong escape in the string at character {begin}") from error
        return text

    def _integer(self, what: str) -> int:
        kind, token = self._next()
        if kind != "integer":
            raise self._refusal(f"{what} holds {shown(token)}, which is not a whole number")
        value = int(token)
        if not 0 <= value <= SIZE_LIMIT:
            raise self._refusal(f"{what} holds {value}, which is negative or too large")
        return value

    def _keys(self, limit: int) -> Iterator[str]:
        """The keys of an object, each handed out when its value is next in the text."""
        self._mark("{")
        begin = self.position
        if self._next() == ("mark", "}"):
            return
        self.position = begin
        while True:
            key = self._string(limit)
            self._mark(":")
            yield key
            if self._mark(",}") == "}":
                return

    def _integers(self, what: str, limit: int) -> list[int]:
        self._mark("[")
        begin = self.position
        if self._next() == ("mark", "]"):
            return []
        self.position = begin
        values: list[int] = []
        while True:
            if len(values) == limit:
                raise self._refusal(f"{what} has more than {limit} numbers")
            values.append(self._integer(what))
            if self._mark(",]") == "]":
                return values

    def _metadata(self) -> dict[str, str]:
        metadata: dict[str, str] = {}
        for key in self._keys(limit=HEADER_LIMIT):
            if key in metadata:
                raise self._refusal(f"has metadata {shown(key)} twice")
            metadata[key] = self._string(HEADER_LIMIT)
        return metadata

    def _entry(self, name: str) -> TensorEntry:
        dtype: str | None = None
        shape: list[int] | None = None
        span: list[int] | None = None
        for key in self._keys(limit=NAME_LIMIT):
            if key == "dtype" and dtype is None:
                dtype = self._string(NAME_LIMIT)
            elif key == "shape" and shape is None:
                shape = self._integers("its shape", DIMENSION_LIMIT)
            elif key == "data_offsets" and span is None:
                span = self._integers("its data_offsets", 2)
            else:
                raise self._refusal(f"has {shown(key)} twice or unexpectedly")
        if dtype is None or shape is None or span is None or len(span) != 2:
            raise self._refusal("lacks one of dtype, shape and two data_offsets")
        if dtype not in DTYPES:
            raise self._refusal(f"has dtype {shown(dtype)}, which is not supported")
        word, item_size = DTYPES[dtype]
        begin, end = span
        size = self._checked_size(shape, item_size)
        if end < begin or end > SIZE_LIMIT - self.data_begin or end - begin != size:
            raise self._refusal(f"shape {shape} of {word} takes {size} bytes, its data_offsets are {span}")
        return TensorEntry(
            name=name,
            file=self.path,
            dtype=word,
            shape=tuple(shape),
            begin=self.data_begin + begin,
            end=self.data_begin + end,
        )

    def _checked_size(self, shape: list[int], item_size: int) -> int:
        """Bytes of a tensor. Zero dimensions do not excuse the others: torch multiplies those too for strides."""
        product = item_size
        for dimension in shape:
            product *= max(dimension, 1)
            if product > SIZE_LIMIT:
                raise self._refusal(f"shape {shape} is larger than any file")
        return 0 if 0 in shape else product
