"""Finds the tensors of safetensors files, and reads them with little memory.

A file is: eight bytes with the header's length, the header (JSON), then the data. Checkpoints come from strangers. Before
anything is read of one, the safetensors library checks the header against the file's length, and checks that the tensors cover
the data without gap or overlap.

pread reads data straight into its tensor, or through one piece of fixed size where the dtype changes. The page cache is told at
once to drop it: a model larger than memory must not push everything else out while it is imported.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from fuyou_cli.core.disk import unusable
from fuyou_cli.core.errors import UnreadableError, UsageError
from fuyou_cli.core.json_files import shown
from fuyou_cli.core.paths import read_plain
from fuyou_cli.core.units import MiB
from fuyou_cli.spec.packed_tensors import Quantised

if TYPE_CHECKING:
    import torch

# ---- headers ----------------------------------------------------------------------------------------------------------

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


# ---- data -------------------------------------------------------------------------------------------------------------

PIECE = 16 * MiB  # bytes of the file per read
FLOATS = ("float32", "bfloat16", "float16")
SAMPLES = 4  # places of a tensor that go into its mark; its beginning and its end are two of them
SAMPLE = 1024  # bytes of each


class TensorReader:
    """Owns one open file (the last one read) and one piece of memory, made when the first conversion needs it.

    Ask for tensors in the order of their files: that is fastest. Use it from one thread only.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._descriptor, self._direct = -1, False
        self._refusing = set[Path]()  # files that open for O_DIRECT and then refuse to be read so
        self._piece: torch.Tensor | None = None  # uint8[PIECE]
        self.bytes_read = 0  # so far

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """Reads one whole tensor, in the file's dtype and shape, into new memory."""
        import torch

        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        self._read_bytes(entry, 0, _bytes_of(tensor))
        return tensor

    def read_into(self, entry: TensorEntry, destination: torch.Tensor, *, first_element: int = 0) -> None:
        """Fills `destination` (contiguous, in host memory) with the tensor's elements from `first_element` on.

        Values are converted between float32, bfloat16 and float16 as torch does. A finite value that the destination cannot
        hold is a UsageError. Other dtypes must be equal.
        """
        import torch

        count = destination.numel()
        if not destination.is_contiguous() or destination.device.type != "cpu":
            raise ValueError(f"{entry.name}: the destination is not contiguous host memory")
        if first_element < 0 or first_element + count > entry.numel:
            raise ValueError(f"{entry.name}: elements {first_element} to {first_element + count} of {entry.numel}")
        item_size = BYTES_PER_ELEMENT[entry.dtype]
        source_dtype = getattr(torch, entry.dtype)
        flat = destination.detach().reshape(-1)
        if source_dtype == destination.dtype:
            self._read_bytes(entry, first_element * item_size, _bytes_of(flat))
            return
        wanted = str(destination.dtype).removeprefix("torch.")
        if entry.dtype not in FLOATS or wanted not in FLOATS:
            raise UsageError(f"{entry.file}: tensor {shown(entry.name)} is {entry.dtype} and cannot become {wanted}")
        if self._piece is None:
            self._piece = torch.empty(PIECE, dtype=torch.uint8)
        step = PIECE // item_size
        for begin in range(0, count, step):
            length = min(step, count - begin)
            piece = self._piece[: length * item_size]
            self._read_bytes(entry, (first_element + begin) * item_size, _bytes_of(piece))
            values = piece.view(source_dtype)
            part = flat[begin : begin + length]
            part.copy_(values)
            # float32 holds every value of the other two; each of those may be too narrow.
            if destination.dtype == torch.float32:
                continue
            too_large = part.isinf()
            if bool(too_large.any()) and bool(values[too_large].isfinite().any()):
                raise UsageError(
                    f"{entry.file}: tensor {shown(entry.name)} has values too large for {wanted}",
                    hint="train with dtype: float32 or bfloat16",
                )

    def equal(self, first: TensorEntry, second: TensorEntry) -> bool:
        """Whether two tensors of the files have equal dtype, shape and bytes. Needs two pieces of memory."""
        return (first.dtype, first.shape) == (second.dtype, second.shape) and all(
            self.read_some(first, begin, PIECE // 2) == self.read_some(second, begin, PIECE // 2)
            for begin in range(0, first.nbytes, PIECE // 2)
        )

    def read_some(self, entry: TensorEntry, begin: int, most: int) -> bytes:
        """Reads at most `most` bytes of the tensor from byte `begin` on, unconverted."""
        content = bytearray(min(most, entry.nbytes - begin))
        self._read_bytes(entry, begin, memoryview(content))
        return bytes(content)

    def read_pages(self, file: Path, begin: int, end: int, destination: memoryview) -> None:
        """Fills `destination`, which begins at a page of memory, with the file's bytes from `begin` to `end`, both in whole
        pages but for the end of the file. They do not pass the page cache where the file system can do that."""
        self._open(file, direct=file not in self._refusing)
        self._fill(f"what is read at {begin}", begin, end, end, destination)

    def _open(self, file: Path, *, direct: bool = False) -> None:
        if (self._file, self._direct) == (file, direct):
            return
        self.close()
        try:
            self._descriptor = _opened(file, direct=direct)
        except OSError as error:
            raise unusable(f"{file}: cannot be opened: {error.strerror}", error) from error
        self._file, self._direct = file, direct

    def close(self) -> None:
        """Closes the open file. The next read opens it again."""
        if self._descriptor >= 0:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # drops what was read ahead, too
            os.close(self._descriptor)
        self._descriptor, self._file = -1, None

    def _read_bytes(self, entry: TensorEntry, offset: int, destination: memoryview) -> None:
        """Fills `destination` with the tensor's bytes from `offset` on. Raises UsageError if the file ends first."""
        self._open(entry.file)
        begin = entry.begin + offset
        self._fill(f"tensor {shown(entry.name)}", begin, begin + len(destination), entry.end, destination)

    def _fill(self, what: str, position: int, end: int, whole: int, destination: memoryview) -> None:
        """Fills `destination` with the open file's bytes from `position` to `end`, of what ends at `whole`. Raises UsageError
        if the file ends first."""
        done = 0
        while position < end:
            part = destination[done : done + PIECE]
            try:
                got = os.preadv(self._descriptor, [part], position)
            except OSError as error:
                if self._direct and error.errno == errno.EINVAL and self._file is not None:
                    self._refusing.add(self._file)
                    self._open(self._file)
                    continue
                failed = f"reading {len(part)} bytes at {position} failed: {error.strerror}"
                raise unusable(f"{self._file}: {what}: {failed}", error) from error
            if got == 0:
                raise UsageError(
                    f"{self._file}: is too short: {what} ends at byte {whole}, the file at {position}",
                    hint="the file changed while it was read: download it again",
                )
            done += got
            self.bytes_read += got
            position += got
            # From the start of the file: pages that a call before could not drop yet are dropped now.
            os.posix_fadvise(self._descriptor, 0, position, os.POSIX_FADV_DONTNEED)


def _opened(file: Path, *, direct: bool) -> int:
    """Opens a file to read; past the page cache if `direct` and if its file system can do that."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    if direct:
        try:
            return os.open(file, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(file, flags)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous host tensor as a writable view."""
    import torch

    if tensor.numel() == 0:
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def weights_mark(entries: Mapping[str, TensorEntry]) -> str:
    """Returns a digest of every tensor's name, dtype, shape and some of its bytes: a few small reads, however large the model.

    Checkpoints of different training differ in it. A copied, moved or resharded checkpoint keeps it. Raises UsageError where a
    file cannot be read.
    """
    digest = hashlib.sha256()
    with TensorReader() as reader:
        parts = [(name, part) for name, entry in sorted(entries.items()) for part in (entry, *entry.parts)]
        for name, entry in parts:
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            if entry.scales is not None and entry.scales.mean:
                digest.update(repr(entry.scales.mean).encode())
            for place in range(SAMPLES):
                begin = (entry.nbytes - min(SAMPLE, entry.nbytes)) * place // (SAMPLES - 1)
                digest.update(reader.read_some(entry, begin, SAMPLE))
    return digest.hexdigest()
