"""Finds the tensors of a safetensors file: the place of their bytes, their dtype and shape.

A file is: eight bytes with the header's length, the header (JSON), then the data. Checkpoints come from strangers. Before it
returns anything, the safetensors library checks the header against the file's length, and checks that the tensors cover the
data without gap or overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from fuyou_cli.core.disk import unusable
from fuyou_cli.core.errors import UnreadableError, UsageError
from fuyou_cli.core.json_files import shown
from fuyou_cli.core.paths import read_plain
from fuyou_cli.spec.packed_tensors import Quantised

NAME_LIMIT = 1024  # characters
METADATA = "__metadata__"  # a key of the header that names no tensor

# Name in the file -> (our name, bytes per element). Formats below one byte are left out: no element has its own address.
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
    """Describes one tensor of a file. `begin` and `end` are byte offsets from the start of the file; `name` is its key
    there, or would be were it not quantised."""

    name: str
    file: Path
    dtype: str  # torch's name: "float32", "bfloat16", ...; of a quantised tensor its format
    shape: tuple[int, ...]
    begin: int
    end: int
    scales: Scales | None = None  # of a quantised tensor, whose codes these bytes are

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """Returns where the scales of a quantised tensor are."""
        parts = () if self.scales is None else (self.scales.maxima, self.scales.outer)
        return tuple(part for part in parts if part is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Says where the scales of a quantised tensor are (see `spec/packed_tensors`). They may be in another file, those of fp8 in
    bfloat16."""

    kind: Quantised
    maxima: TensorEntry
    outer: TensorEntry | None = None  # of nf4_double
    mean: float = 0.0  # of nf4_double


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The tensors and the metadata of one file."""

    entries: dict[str, TensorEntry]  # by key, in the order of the data
    metadata: dict[str, str]


def parse_file(path: Path) -> Header:
    """Reads tensors and metadata of a safetensors file. Raises UsageError naming the file, and the tensor if one is wrong."""
    from safetensors import SafetensorError, safe_open

    try:
        begin = 8 + int.from_bytes(read_plain(path, limit=8), "little")
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            described = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
    except SafetensorError as error:
        if isinstance(failed := unusable(f"{shown(str(path))}: cannot be read", error), UnreadableError):
            raise failed from error
        raise _refusal(path, f"is not a valid safetensors file: {ascii(str(error)[:300])[1:-1]}") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        why = getattr(error, "strerror", None) or error
        raise unusable(f"{shown(str(path))}: cannot be read: {why}", error) from error
    entries = dict[str, TensorEntry]()
    for name, dtype, shape in described:
        if len(name) > NAME_LIMIT:
            raise _refusal(path, f"the name of tensor {shown(name)} has {len(name)} characters, more than {NAME_LIMIT}")
        if dtype not in DTYPES:
            raise _refusal(path, f"tensor {shown(name)} has dtype {shown(dtype)}, which is not supported")
        word, item_size = DTYPES[dtype]
        end = begin + item_size * prod(shape)
        entries[name] = TensorEntry(name=name, file=path, dtype=word, shape=shape, begin=begin, end=end)
        begin = end
    return Header(entries=entries, metadata=metadata)


def _refusal(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path}: {what}", hint="the file is damaged, incomplete or of another format: download or export it again"
    )
