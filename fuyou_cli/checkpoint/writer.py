"""Writes a model directory that `from_pretrained` loads, and never holds more than one piece of it in memory.

The directory appears complete or not at all: everything is written under a temporary name beside it, made durable, read back,
and moved to its place in one step. A directory that fuyou did not write is never replaced. Data is flushed to the disk every 64
MiB and dropped from the page cache: gigabytes of dirty pages would stall a slow disk and fill a memory cgroup.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fuyou_cli.core.disk import failed_writing, sync_directory
from fuyou_cli.core.errors import FuyouError, OutOfSpaceError, UsageError
from fuyou_cli.core.paths import pieces
from fuyou_cli.core.units import MiB, align_up, gb

from .files import ADAPTER_NAME, INDEX_NAME, SINGLE_NAME, TEMPLATE_FOLDER, is_companion, name_list, open_checkpoint
from .reader import BYTES_PER_ELEMENT, DTYPES, METADATA, NAME_LIMIT, parse_file

# ---- the directory ---------------------------------------------------------------------------------------------------


_WRITER = {"written_by": "fuyou"}
_COMPANIONS = "companions"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def mark(companions: Iterable[str]) -> dict[str, str]:
    """Returns the metadata for every safetensors file that we write: that it is ours, and which files are beside it."""
    return {**_WRITER, _COMPANIONS: json.dumps(sorted(companions))}


class PartialDirectory:
    """Owns a directory under construction, named .<target>.partial beside its target. It is removed if nothing is published.

    It is locked while in use. So the leftover of a killed run can be told from what another run is writing.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.partial"
        self._descriptor = -1
        self._published = False

    def __enter__(self) -> PartialDirectory:
        refuse_foreign(self.target)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_files(self.path)
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise UsageError(
                    f"{self.target}: another process is writing a model there",
                    hint="wait for it to finish, or choose another output directory",
                ) from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if not self._published:
                _remove_directory(self.path)
        finally:
            os.close(self._descriptor)

    def publish(self) -> None:
        """Gives the directory its final name. Removes what was there before, if we wrote it."""
        refuse_foreign(self.target)  # checked again: writing may have taken an hour
        old = None
        if self.target.is_dir() and any(self.target.iterdir()):
            old = _exchange(self.path, self.target)
        else:
            self.path.rename(self.target)
        self._published = True
        sync_directory(self.target.parent)  # otherwise a power cut could leave the old name on what is removed next
        if old:
            _remove_directory(old)
            sync_directory(self.target.parent)


def refuse_foreign(directory: Path) -> None:
    """Raises UsageError unless the directory is absent, empty, or holds only a model or an adapter that we wrote."""
    try:
        names = _names(directory)
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise UsageError(f"{directory}: is a file", hint="choose another output directory") from error
    if not names:
        return
    ours: set[str] = set()
    for name in names:
        if _is_weights(name):
            ours |= _claimed(directory / name)
    foreign = [name for name in names if name not in ours or not stat.S_ISREG((directory / name).lstat().st_mode)]
    if foreign:
        raise UsageError(
            f"{directory}: holds files that fuyou did not write: {name_list(foreign)}",
            hint="choose a new or empty output directory; nothing was changed",
        )


def _names(directory: Path) -> list[str]:
    """Lists what is in a directory; in place of its folder of templates, what that holds, as `FOLDER/NAME`."""
    names = {file.name for file in directory.iterdir()}
    if _has_templates(directory):
        names -= {TEMPLATE_FOLDER}
        names |= {f"{TEMPLATE_FOLDER}/{file.name}" for file in (directory / TEMPLATE_FOLDER).iterdir()}
    return sorted(names)


def _has_templates(directory: Path) -> bool:
    """Whether there is a folder of templates, and not a link to one."""
    folder = directory / TEMPLATE_FOLDER
    return folder.is_dir() and not folder.is_symlink()


def _is_weights(name: str) -> bool:
    return name in (SINGLE_NAME, ADAPTER_NAME) or (name.startswith("model-") and name.endswith(".safetensors"))


def _claimed(file: Path) -> set[str]:
    """Reads which names in its directory a weights file says we wrote; none if it is damaged or not ours."""
    try:
        metadata = parse_file(file).metadata
        companions = json.loads(metadata.get(_COMPANIONS, "[]"))
    except (UsageError, ValueError, RecursionError):
        return set()
    if not _WRITER.items() <= metadata.items() or not isinstance(companions, list):
        return set()
    return {file.name, *(name for name in companions if isinstance(name, str))}


def _remove_files(directory: Path) -> None:
    """Removes the files that we write, with the folder of templates, and no others. An unfinished shard has no valid header
    yet, so names decide."""
    names = _names(directory)
    foreign = [name for name in names if not (_is_weights(name) or name == INDEX_NAME or is_companion(name))]
    if foreign:
        raise UsageError(
            f"{directory}: holds files that fuyou did not write: {name_list(foreign)}", hint="move that directory away"
        )
    for name in names:
        (directory / name).unlink()
    if _has_templates(directory):
        (directory / TEMPLATE_FOLDER).rmdir()


def _remove_directory(directory: Path) -> None:
    _remove_files(directory)
    directory.rmdir()


def _exchange(new: Path, target: Path) -> Path:
    """Swaps two directories and returns the old one's new path."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        result = libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE)
        if result == 0:
            return new
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code), str(target))
    # A file system without exchange: for an instant only the old model exists, under its second name.
    old = target.parent / f".{target.name}.replaced"
    with suppress(FileNotFoundError):  # one that was killed here has left it
        _remove_directory(old)
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    return old


# ---- its files -------------------------------------------------------------------------------------------------------


PIECE = 16 * MiB  # most bytes asked of `read` at a time
SYNC_EVERY = 64 * MiB  # bytes written between two syncs
FILE_SLACK = 4096  # bytes a file may take on disk beyond its length

_FILE_WORD = {word: name for name, (word, _) in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutTensor:
    """Describes one tensor to write. `dtype` is torch's name: "float32", "bfloat16", ..."""

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
    single: str = SINGLE_NAME,
    companions: Mapping[str, bytes | Path] | None = None,
    progress: Callable[[int, int], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Writes `tensors` as safetensors shards of at most `max_shard_size` bytes, or as one file `single` if they fit, and
    `companions` beside them. Returns the paths of the shards.

    `read(tensor, first_element, count)` returns the bytes of elements [first, first + count), at most 16 MiB, valid until its
    next call. It is called in the order of the files. `progress` gets the bytes written and the bytes in all. `check` is called
    when all are written; if it raises, the old directory stays. An existing directory is replaced only if it is empty or holds
    only what this function writes. Raises UsageError (somebody else's directory), OutOfSpaceError (needed and available),
    FuyouError (I/O).
    """
    texts = dict(companions or {})
    ours = mark([*texts, INDEX_NAME])
    shards = _plan_shards(tensors, max_shard_size, {**metadata, **ours, "format": "pt"}, single)
    if len(shards) > 1:
        texts[INDEX_NAME] = _index(shards)
    target = Path(os.path.realpath(directory))
    try:
        with PartialDirectory(target) as partial:
            _check_space(target, shards, texts)
            for name, text in texts.items():
                (partial.path / name).parent.mkdir(exist_ok=True)  # of a chat template that has a name
                sum(_write(partial.path / name, map(memoryview, pieces(text))))
            done, total = 0, sum(shard.nbytes for shard in shards)
            for shard in shards:
                for written in _write(partial.path / shard.name, _content(shard, read)):
                    done += written
                    if progress is not None:
                        progress(done, total)
            for folder in {(partial.path / name).parent for name in texts} | {partial.path}:
                sync_directory(folder)
            _verify(partial.path, tensors, single)
            check()
            partial.publish()
    except OSError as error:
        raise _io_error(target, error) from error
    return [directory / shard.name for shard in shards]


def _plan_shards(tensors: Sequence[OutTensor], max_shard_size: int, metadata: dict[str, str], single: str) -> list[_Shard]:
    """Cuts the tensors into shards, in the order given. A shard is closed before the tensor that would make it too large."""
    if max_shard_size <= 0:
        raise UsageError(f"max_shard_size is {max_shard_size}", hint="write a positive size such as 5GB")
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
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)] if count > 1 else [single]
    return [_shard(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _shard(name: str, tensors: list[OutTensor], metadata: dict[str, str]) -> _Shard:
    # Wide dtypes first: then every tensor begins at a multiple of its element size.
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
            f"{target}: the model takes {gb(needed)}, but only {gb(available)} are free there",
            hint="free some space or choose an output directory on another disk",
        )


def _write(path: Path, parts: Iterable[memoryview]) -> Iterator[int]:
    """Writes a file from front to back and yields the bytes of each part. At the end all of it is on the disk."""
    unsynced = 0
    with path.open("xb", buffering=0) as file:
        for part in parts:
            unwritten = part
            while unwritten:
                written = os.write(file.fileno(), unwritten)
                unwritten = unwritten[written:]
                unsynced += written
            if unsynced >= SYNC_EVERY:
                _settle(file.fileno())
                unsynced = 0
            yield len(part)
        _settle(file.fileno())


def _settle(descriptor: int) -> None:
    os.fdatasync(descriptor)  # waits for the disk: only clean pages can be dropped
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _content(shard: _Shard, read: Read) -> Iterator[memoryview]:
    yield memoryview(shard.header)
    for tensor in shard.tensors:
        item_size = BYTES_PER_ELEMENT[tensor.dtype]
        for first in range(0, tensor.numel, PIECE // item_size):
            count = min(PIECE // item_size, tensor.numel - first)
            data = read(tensor, first, count).cast("B")
            if len(data) != count * item_size:
                raise FuyouError(
                    f"{shard.name}: {tensor.name}: elements {first} to {first + count} take {count * item_size} bytes, "
                    f"{len(data)} were given"
                )
            yield data


def _verify(directory: Path, tensors: Sequence[OutTensor], single: str) -> None:
    """Reads every header back and checks the file's length and its tensors."""
    alone = directory / single
    entries = parse_file(alone).entries if alone.is_file() else open_checkpoint(directory).entries
    written = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    if written != {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}:
        raise FuyouError(f"{directory}: the written files do not read back as they were written")


def _io_error(target: Path, error: OSError) -> FuyouError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        hint = "choose an output directory that you can write to"
        return UsageError(f"{target}: writing the model failed: {error.strerror}", hint=hint)
    return failed_writing(target, error)
