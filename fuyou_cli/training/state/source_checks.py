"""Tells whether the checkpoint's files are those that a run has read.

A file that has only another time of change, as a copy has, is read and compared with the checksums in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...core.errors import UsageError
from ...core.units import align_up, gb
from ...spec.model import PAGE, SOURCES_AT, SourceFile
from ...spec.plan import Span
from ...swap.arena import Arena
from ...swap.daemon import SwapDaemon
from .extent_checks import Progress, checksum_of
from .stored import Manifest, StoredExtent


def files_now(saved: Manifest) -> tuple[SourceFile, ...]:
    """Returns the files as they are now. Raises UsageError for one that is gone or of another size, and for one with another
    time of change if its content cannot be compared."""
    found = []
    for source, problem, now in _looked_at(saved):
        if problem and (now is None or not saved.knows_pieces):
            raise UsageError(
                f"frozen weights of this store are in the model's file {source.path}: {problem}",
                hint=f"{how_to_put_back(source)}. An adapter alone can be exported without it",
            )
        found.append(now or source)
    return tuple(found)


def changed_files(saved: Manifest) -> Iterator[tuple[SourceFile, str]]:
    """Yields the files that are not as they were, and what is wrong with each."""
    return ((source, problem) for source, problem, _ in _looked_at(saved) if problem)


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


def how_to_put_back(source: SourceFile) -> str:
    """Says how a file becomes what it was: a copy of it has another time of change."""
    seconds, rest = divmod(source.changed, 10**9)
    return f"put the file back as it was ({source.size:,} bytes), then `touch -d @{seconds}.{rest:09} {source.path}`"


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
    """Compares what a run reads of files with another time of change. Raises UsageError where it is not what it was.

    `window`: a span of the arena that nobody else uses meanwhile."""
    for file, extents in _touched(saved, now):
        say(f"{file.path} has another time of change: comparing {gb(sum(e.size for e in extents))} with what was read before")
        for extent in extents:
            if all(checksum_of(extent, daemon, arena, window) != extent.sum for _ in range(2)):
                raise UsageError(
                    f"{file.path}: its content is not what the saved run has read",
                    hint="put the file back as it was, or start over with checkpoint.resume=never",
                )
            progress(extent.size)


def _touched(saved: Manifest, now: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, list[StoredExtent]]]:
    """Yields the files with another time of change, and what is read of each."""
    begin = SOURCES_AT
    for was, file in zip(saved.sources, now, strict=True):
        end = begin + align_up(was.size, PAGE)
        if was.changed != file.changed:
            yield file, [e for stage in saved.stages for e in stage.summed_pieces if begin <= e.offset < end]
        begin = end
