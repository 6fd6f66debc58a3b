"""Reads and checks the header of a safetensors file.

A file is: eight bytes with the header's length, the header (JSON), then the data. Checkpoints are downloaded from
strangers, so nothing in a header is believed before it is checked. Memory is bounded by the header's length and by how many
values `core/json_files` takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fuyou_cli.core.disk import remedy
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import parsed, shown
from fuyou_cli.core.plain_files import read_plain

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
NAME_LIMIT = 1024  # characters
METADATA = "__metadata__"  # what stands among the tensors and is none
DIMENSION_LIMIT = 64  # dimensions of a tensor that torch can hold
SIZE_LIMIT = (1 << 63) - 1  # elements or bytes; what a signed file offset can address
_FIELDS = ("dtype", "shape", "data_offsets")

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


def parse_file(path: Path) -> Header:
    """Reads tensors (in data order) and metadata of a safetensors file, everything checked against the file's true length.

    Raises UsageError naming file and tensor.
    """
    try:
        file_size = path.stat().st_size
        length = int.from_bytes(read_plain(path, limit=8), "little")
        raw = read_plain(path, limit=8 + length)[8:] if 8 + length <= file_size and length <= HEADER_LIMIT else b""
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{shown(str(path))}: cannot be read: {why}", hint=remedy(error)) from error
    if file_size < 8:
        raise _refusal(path, f"has {file_size} bytes, too few for a safetensors header")
    if length > HEADER_LIMIT:
        raise _refusal(path, f"says its header has {length} bytes; the format allows {HEADER_LIMIT}")
    if len(raw) < length:
        raise _refusal(path, f"is truncated: its header alone ends at byte {8 + length}, the file has {file_size}")
    table = _table(path, raw)
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _refusal(path, f"its {METADATA} is not an object of strings")
    entries = [_entry(path, name, fields, 8 + length) for name, fields in table.items()]
    return Header(entries=_tiled(entries, path, 8 + length, file_size), metadata=metadata)


def _refusal(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path}: {what}",
        hint="The file is damaged, incomplete or not a safetensors file: fetch or export it again.",
    )


def _table(path: Path, raw: bytes) -> dict[str, object]:
    try:
        table = parsed(raw.decode())
    except UnicodeDecodeError as error:
        raise _refusal(path, f"its header is not valid UTF-8 at byte {error.start}") from error
    except UsageError as error:
        raise _refusal(path, f"its header is {error.message}") from None
    if not isinstance(table, dict):
        raise _refusal(path, "its header is not a JSON object")
    return table


def _entry(path: Path, name: str, fields: object, data_begin: int) -> TensorEntry:
    """Checks what the header says of one tensor."""

    def refusal(what: str) -> UsageError:
        return _refusal(path, f"tensor {shown(name)}: {what}")

    if len(name) > NAME_LIMIT:
        raise refusal(f"its name has {len(name)} characters, more than {NAME_LIMIT}")
    if not isinstance(fields, dict) or fields.keys() != set(_FIELDS):
        raise refusal(f"has {shown(str(fields))} where {', '.join(_FIELDS)} belong")
    dtype, shape, span = (fields[field] for field in _FIELDS)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refusal(f"has dtype {shown(str(dtype))}, which is not supported")
    if not _are_sizes(shape) or len(shape) > DIMENSION_LIMIT:
        raise refusal(f"its shape {shown(str(shape))} is no list of at most {DIMENSION_LIMIT} sizes")
    if not _are_sizes(span) or len(span) != 2:
        raise refusal(f"its data_offsets {shown(str(span))} are not two sizes")
    word, item_size = DTYPES[dtype]
    # Zero dimensions do not excuse the others: torch multiplies those too for strides.
    if item_size * math.prod(max(dimension, 1) for dimension in shape) > SIZE_LIMIT:
        raise refusal(f"shape {shape} is larger than any file")
    begin, end = span
    size = item_size * math.prod(shape)
    if end > SIZE_LIMIT - data_begin or end - begin != size:
        raise refusal(f"shape {shape} of {word} takes {size} bytes, its data_offsets are {span}")
    return TensorEntry(name=name, file=path, dtype=word, shape=tuple(shape), begin=data_begin + begin, end=data_begin + end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= SIZE_LIMIT for item in value)


def _tiled(entries: list[TensorEntry], path: Path, data_begin: int, file_size: int) -> dict[str, TensorEntry]:
    """Orders the entries by their data, and makes sure that they cover it without hole or overlap, to the last byte."""
    ordered = sorted(entries, key=lambda entry: (entry.begin, entry.end))
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
