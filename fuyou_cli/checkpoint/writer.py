"""Writes a model directory that `from_pretrained` loads, without ever holding more than one piece of it.

The directory appears at once and complete, or not at all: everything is written under a temporary name beside it, made
durable, read back, and renamed. Written data is pushed to the disk every 64 MiB and dropped from the page cache,
because neither a memory cgroup nor a slow disk forgives gigabytes of dirty pages.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fuyou_cli.core.disk import sync_directory
from fuyou_cli.core.errors import FuyouError, OutOfSpaceError, UsageError
from fuyou_cli.core.units import MiB, align_up, gb

from .files import INDEX_NAME, SINGLE_NAME, open_checkpoint
from .header import BYTES_PER_ELEMENT, DTYPES, METADATA, NAME_LIMIT
from .placement import PartialDirectory, mark

PIECE = 16 * MiB  # bytes asked of `read` at a time, at most
SYNC_EVERY = 64 * MiB  # bytes written between two syncs
FILE_SLACK = 4096  # bytes a file may take on disk beyond its length

_FILE_WORD = {word: name for name, (word, _) in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutTensor:
    """One tensor to write. `dtype` is torch's word: "float32", "bfloat16", ..."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * BYTES_PER_ELEMENT[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    name: str
    header: bytes
    tensors: tuple[OutTensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


Read = Callable[[OutTensor, int, int], memoryview]


def write_checkpoint(
    directory: Path,
    tensors: Sequence[OutTensor],
    read: Read,
    *,
    max_shard_size: int,
    metadata: Mapping[str, str],
    companions: Mapping[str, bytes | Path] | None = None,
    progress: Callable[[int, int], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Writes `tensors` as safetensors shards of at most `max_shard_size` bytes, and `companions` beside them.

    `read(tensor, first_element, count)` gives the bytes of elements [first, first + count), at most 16 MiB, valid until
    its next call; it is asked in the order of the files. `progress` hears bytes written and bytes in all. `check` is called
    when all are written, and may raise: what was there before still is then. Returns the paths of the shards. A directory
    that exists is replaced only if it is empty or holds nothing but what this function writes. Raises UsageError (somebody
    else's directory), OutOfSpaceError (needed and available), FuyouError (I/O).
    """
    texts = dict(companions or {})
    ours = mark([*texts, INDEX_NAME])
    shards = _plan_shards(tensors, max_shard_size, {**metadata, **ours, "format": "pt"})
    if len(shards) > 1:
        texts[INDEX_NAME] = _index(shards)
    target = Path(os.path.realpath(directory))
    try:
        with PartialDirectory(target) as partial:
            _check_space(target, shards, texts)
            for name, content in texts.items():
                _write_companion(partial.path / name, content)
            done, total = 0, sum(shard.nbytes for shard in shards)
            for shard in shards:
                for written in _write_shard(partial.path / shard.name, shard, read):
                    done += written
                    if progress is not None:
                        progress(done, total)
            sync_directory(partial.path)
            _verify(partial.path, tensors)
            check()
            partial.publish()
    except OSError as error:
        raise _io_error(target, error) from error
    return [directory / shard.name for shard in shards]


def _plan_shards(tensors: Sequence[OutTensor], max_shard_size: int, metadata: dict[str, str]) -> list[_Shard]:
    """Cuts the tensors into shards, in the order given; a shard is closed before the tensor that would exceed its size."""
    if max_shard_size <= 0:
        raise UsageError(f"max_shard_size is {max_shard_size}", hint="Write a positive size such as 5GB.")
    if not 0 < len({tensor.name for tensor in tensors}) == len(tensors):
        raise ValueError("no tensors to write, or two with the same name")
    groups: list[list[OutTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if tensor.name == METADATA or not 0 < len(tensor.name) <= NAME_LIMIT or tensor.dtype not in _FILE_WORD:
            raise ValueError(f"{tensor.name!r} of {tensor.dtype} cannot be written")
        if groups[-1] and size + tensor.nbytes > max_shard_size:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return [_shard(SINGLE_NAME, groups[0], metadata)]
    count = len(groups)
    return [
        _shard(f"model-{number:05d}-of-{count:05d}.safetensors", group, metadata)
        for number, group in enumerate(groups, start=1)
    ]


def _shard(name: str, tensors: list[OutTensor], metadata: dict[str, str]) -> _Shard:
    # Wide dtypes first: then every tensor begins at a multiple of its element size, whatever is mixed.
    ordered = sorted(tensors, key=lambda tensor: -BYTES_PER_ELEMENT[tensor.dtype])
    table: dict[str, object] = {METADATA: metadata}
    offset = 0
    for tensor in ordered:
        table[tensor.name] = {
            "dtype": _FILE_WORD[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(align_up(len(text), 8))
    return _Shard(name=name, header=len(text).to_bytes(8, "little") + text, tensors=tuple(ordered))


def _index(shards: list[_Shard]) -> bytes:
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    index = {
        "metadata": {
            "total_size": sum(tensor.nbytes for tensor in tensors),
            "total_parameters": sum(tensor.numel for tensor in tensors),
        },
        "weight_map": {tensor.name: shard.name for shard in shards for tensor in shard.tensors},
    }
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _check_space(target: Path, shards: list[_Shard], texts: Mapping[str, bytes | Path]) -> None:
    sizes = [shard.nbytes for shard in shards]
    sizes += [len(text) if isinstance(text, bytes) else text.stat().st_size for text in texts.values()]
    needed = sum(align_up(size, FILE_SLACK) + FILE_SLACK for size in sizes)
    status = os.statvfs(target.parent)
    available = status.f_bavail * status.f_frsize
    if needed > available:
        raise OutOfSpaceError(
            f"{target}: the model takes {gb(needed)}, {gb(available)} are free there",
            hint="Free some space or choose an output directory on another disk.",
        )


class _Sequential:
    """A file written from front to back; owns its descriptor and how much of it is not on the disk yet."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._unsynced = 0

    def __enter__(self) -> _Sequential:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
                self._sync()
        finally:
            os.close(self._descriptor)

    def write(self, data: memoryview) -> int:
        rest = data
        while rest:
            written = os.write(self._descriptor, rest)
            rest = rest[written:]
            self._unsynced += written
            if self._unsynced >= SYNC_EVERY:
                self._sync()
        return len(data)

    def _sync(self) -> None:
        os.fdatasync(self._descriptor)  # waits for the disk: pages have to be clean before they can be dropped
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced = 0


def _write_shard(path: Path, shard: _Shard, read: Read) -> Iterator[int]:
    """Writes one shard, and yields how many bytes each write was."""
    with _Sequential(path) as file:
        yield file.write(memoryview(shard.header))
        for tensor in shard.tensors:
            item_size = BYTES_PER_ELEMENT[tensor.dtype]
            for first in range(0, tensor.numel, PIECE // item_size):
                count = min(PIECE // item_size, tensor.numel - first)
                data = read(tensor, first, count).cast("B")
                if len(data) != count * item_size:
                    raise FuyouError(
                        f"{path.name}: {tensor.name}: elements {first} to {first + count} take {count * item_size} "
                        f"bytes, {len(data)} were given",
                    )
                yield file.write(data)


def _write_companion(path: Path, content: bytes | Path) -> None:
    with _Sequential(path) as file:
        if isinstance(content, bytes):
            file.write(memoryview(content))
            return
        with content.open("rb") as source:
            while part := source.read(MiB):
                file.write(memoryview(part))


def _verify(directory: Path, tensors: Sequence[OutTensor]) -> None:
    """Reads every header back: the files have the length and hold the tensors that were asked for."""
    entries = open_checkpoint(directory).entries
    found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    if found != {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}:
        raise FuyouError(f"{directory}: what was written does not read back as it should")


def _io_error(target: Path, error: OSError) -> FuyouError:
    reason = f"{target}: writing the model failed: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(reason, hint="Free some space and export again; nothing was left behind.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return UsageError(reason, hint="Choose an output directory that you may write to.")
    return FuyouError(reason, hint="Check the disk and export again; what was there before is unchanged.")
