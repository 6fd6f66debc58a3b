"""Tells whether the checkpoint's files are those that a run has read.

A file that has only another time of change, as a copy has, is read and compared with the checksums in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.disk import status_of
from ...core.errors import ModelFileError, UsageError
from ...core.units import align_up, gb
from ...spec.model import PAGE, SOURCES_AT, SourceFile
from ...spec.plan import Span
from ...swap.daemon import SwapDaemon
from ...swap.store import Arena
from .extent_checks import Progress, checksum_of
from .stored import Manifest, StoredExtent


def files_now(saved: Manifest) -> tuple[SourceFile, ...]:
    """Returns the files as they are now. Raises UsageError for one that is gone or of another size, and for one with another
    time of change if its content cannot be compared."""
    found = []
    for source, problem, now in _looked_at(saved):
        if problem:
            status_of(source.path)  # raises UnreadableError where its drive or a permission is in the way
        if problem and (now is None or not saved.knows_pieces):
            raise UsageError(
                f"frozen weights of this store are in the model's file {source.path}: {problem}",
                hint=f"{how_to_put_back(source, timed=not saved.knows_pieces)}. An adapter alone can be exported without it",
            )
        found.append(now or source)
    return tuple(found)


def files_there(saved: Manifest) -> tuple[SourceFile, ...]:
    """Returns the files that may have their content, as they are now."""
    return tuple(now for _, _, now in _looked_at(saved) if now is not None)


def changed_files(saved: Manifest) -> list[str]:
    """Lists the files that are there and are not as they were."""
    return [source.path for source, problem, _ in _looked_at(saved) if problem and Path(source.path).exists()]


def _looked_at(saved: Manifest) -> Iterator[tuple[SourceFile, str, SourceFile | None]]:
    """Yields every file, what is wrong with it, and what it is now if it may have its content."""
    for source in saved.sources:
        try:
            status = Path(source.path).stat()
        except OSError as error:
            yield source, error.strerror or "it cannot be read", None
            continue
        is_like_it = status.st_size == source.size and status.st_mtime_ns >= 0
        now = replace(source, changed=status.st_mtime_ns) if is_like_it else None
        yield source, "" if now == source else "it has changed", now


def file_of(saved: Manifest, piece: StoredExtent) -> SourceFile:
    """Returns the file that a piece is of."""
    return next(file for file, begin in reversed([*_begins(saved.sources)]) if begin <= piece.offset)


def other_content(file: SourceFile) -> ModelFileError:
    """Makes the error for a file whose content the run did not read."""
    return ModelFileError(f"{file.path}: its content is not what the saved run has read")


def how_to_put_back(source: SourceFile, *, timed: bool) -> str:
    """Says how a file becomes what it was. `timed`: its time of change counts too, and a copy of it has another."""
    seconds, rest = divmod(source.changed, 10**9)
    touched = f", then `touch -d @{seconds}.{rest:09} {source.path}`" if timed else ""
    return f"put the file back as it was ({source.size:,} bytes){touched}"


def to_compare(saved: Manifest, now: Sequence[SourceFile]) -> int:
    """Returns the bytes that `compare` reads."""
    return sum(extent.size for _, extents in _touched(saved, now) for extent in extents)


def compare(
    saved: Manifest,
    now: Sequence[SourceFile],
    daemon: SwapDaemon,
    arena: Arena,
    window: Span,
    *,
    progress: Progress = lambda size: None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Compares what a run reads of files with another time of change. Raises ModelFileError where it is not what it was.

    `window`: a span of the arena that nobody else uses meanwhile."""
    for file, extents in _touched(saved, now):
        say(f"{file.path} has another time of change: comparing {gb(_covered(file, extents))} with what was read before")
        if not _is_as_read(extents, daemon, arena, window, progress):
            raise other_content(file)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCheck:
    """Tells what comparing a file of the checkpoint showed. `same`: bytes that are what was read before. `changed`: others are
    not. `unknown`: why not all of its frozen weights could be compared."""

    path: str
    same: int
    changed: bool = False
    unknown: str = ""


def to_check(saved: Manifest) -> int:
    """Returns the bytes that `checked_files` reads."""
    there = {file.path for file in files_there(saved)}
    return sum(extent.size for file, _, extents in _read_of(saved) if file.path in there for extent in extents)


def checked_files(
    saved: Manifest, there: Sequence[SourceFile], daemon: SwapDaemon, arena: Arena, window: Span, progress: Progress
) -> Iterator[FileCheck]:
    """Compares what a run has read of each file with what it holds now, whatever its time of change. `there`: the files that
    the daemon's store reads from, in their order."""
    begins = {file.path: begin for file, begin in _begins(there)}
    for (source, begin, extents), (_, problem, _) in zip(_read_of(saved), _looked_at(saved), strict=True):
        if source.path not in begins:
            yield FileCheck(path=source.path, same=0, unknown=problem)
            continue
        moved = [replace(extent, offset=extent.offset - begin + begins[source.path]) for extent in extents]
        is_same = _is_as_read(moved, daemon, arena, window, progress)
        unknown = "" if saved.knows_pieces else "the saved state has no checksums of all that its run reads of it"
        same = _covered(source, extents) if is_same else 0
        yield FileCheck(path=source.path, same=same, changed=not is_same, unknown=unknown)


def _is_as_read(extents: Sequence[StoredExtent], daemon: SwapDaemon, arena: Arena, window: Span, progress: Progress) -> bool:
    """Tells whether all of it is what was read before. What is not must show in two reads."""
    for extent in extents:
        if all(checksum_of(extent, daemon, arena, window) != extent.sum for _ in range(2)):
            return False
        progress(extent.size)
    return True


def _covered(file: SourceFile, extents: Sequence[StoredExtent]) -> int:
    """Returns the bytes of a file that lie in at least one extent: neighbours share a page, and the last one ends behind it."""
    end, total = 0, 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        total += max(0, extent.offset + extent.size - max(end, extent.offset))
        end = max(end, extent.offset + extent.size)
    return min(total, file.size)


def _touched(saved: Manifest, now: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, list[StoredExtent]]]:
    """Yields the files with another time of change, and what is read of each."""
    for (was, _, extents), file in zip(_read_of(saved), now, strict=True):
        if was.changed != file.changed:
            yield file, extents


def _read_of(saved: Manifest) -> Iterator[tuple[SourceFile, int, list[StoredExtent]]]:
    """Yields every file, where it begins, and what is known of it."""
    for file, begin in _begins(saved.sources):
        end = begin + align_up(file.size, PAGE)
        yield file, begin, [e for stage in saved.stages for e in stage.summed_pieces if begin <= e.offset < end]


def _begins(files: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, int]]:
    """Yields where each file begins in the address space of a store that reads from them."""
    begin = SOURCES_AT
    for file in files:
        yield file, begin
        begin += align_up(file.size, PAGE)
