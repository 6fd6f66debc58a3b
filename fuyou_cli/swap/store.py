"""Maps the host memory that the daemon moves bytes in, and opens the preallocated files that it moves them to: one address
space, striped over the paths, read and written without the page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuyou_cli.core.units import align_up
from fuyou_cli.spec.model import PAGE, SOURCES_AT, SourceFile
from fuyou_cli.spec.plan import Span

from .native import Handle, failure_error, ffi, lib, refusal_error


class Arena(Handle):
    """Maps `size` bytes of anonymous memory, with huge pages where the kernel gives them. Forked children do not inherit it.

    Pages are allocated when first touched. Views become invalid when the arena closes: touch none after `close`. `close` is
    refused while a daemon uses the arena.
    """

    def __init__(self, size: int) -> None:
        out = ffi.new("fy_arena **")
        code = lib.fy_arena_create(size, out)
        if code:
            raise refusal_error(f"cannot map {size} bytes of host memory", code)
        super().__init__(out[0], lib.fy_arena_destroy, "arena", hint="stop the daemon that uses it first")
        self.size = size
        self._base = lib.fy_arena_base(out[0])

    def view(self, offset: int, size: int) -> memoryview:
        """Returns the bytes [offset, offset + size) as a writable view, without a copy."""
        assert self.handle
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes {offset} to {offset + size} are outside the arena of {self.size}")
        return memoryview(ffi.buffer(ffi.cast("char *", self._base) + offset, size))


# ---- store -----------------------------------------------------------------------------------------------------------


class Store(Handle):
    """Open files. Use `Store.open`. This class opens, syncs and closes them; the daemon reads and writes."""

    def __init__(self, native: Any, paths: tuple[Path, ...], stripe: int) -> None:
        super().__init__(native, lib.fy_store_close, "store", hint="stop the daemon that uses it first")
        self.paths = paths
        self.sources: tuple[SourceFile, ...] = ()
        self.stripe = stripe
        self.size: int = lib.fy_store_size(native)
        self.alignment: int = lib.fy_store_alignment(native)
        self.direct = bool(lib.fy_store_is_direct(native))

    @classmethod
    def open(
        cls,
        paths: Sequence[Path],
        *,
        stripe: int,
        size: int,
        create: bool = False,
        buffered: bool = False,
        read_only: bool = False,
        sources: Sequence[SourceFile] = (),
    ) -> Store:
        """Opens the store over `paths`: one file each, `size` bytes together, `stripe` bytes to each file in turn.

        `sources`: files of a checkpoint that are read as well, from `SOURCES_AT` on, if they are still the same.

        `create` preallocates the files. Without it they must exist with the right size. `read_only` never changes them and lets
        others read at the same time. `buffered` uses the page cache; so does every store on a file system without direct I/O
        (see `direct`). Raises FuyouError naming the file.
        """
        names = [ffi.new("char[]", os.fsencode(path)) for path in paths]
        out, why = ffi.new("fy_store **"), ffi.new("fy_failure *")
        flags = (lib.FY_STORE_CREATE if create else 0) | (lib.FY_STORE_BUFFERED if buffered else 0)
        flags |= lib.FY_STORE_READ_ONLY if read_only else 0
        code = lib.fy_store_open(ffi.new("char *[]", names), len(names), stripe, size, flags, out, why)
        if code:
            raise failure_error(why, paths=list(paths), code=code)
        store = cls(out[0], tuple(paths), stripe)
        try:
            store.attach(sources)
        except BaseException:
            store.close()
            raise
        return store

    @property
    def files(self) -> tuple[Path, ...]:
        """Returns the paths of all files that it reads, in the order of a failure's index."""
        return (*self.paths, *(Path(source.path) for source in self.sources))

    def attach(self, sources: Sequence[SourceFile]) -> None:
        """Adds files of a checkpoint to read, before a daemon uses the store. Raises UsageError for a file that has changed."""
        for source in sources:
            self.sources = (*self.sources, source)
            path, why = os.fsencode(os.path.realpath(source.path)), ffi.new("fy_failure *")
            self._check(lib.fy_store_attach(self.handle, path, source.size, source.changed, why), why)

    def check_sources(self) -> None:
        """Raises SwapError where a source has changed since it was opened, or cannot be found by its path."""
        why = ffi.new("fy_failure *")
        self._check(lib.fy_store_check_sources(self.handle, why), why)

    def not_as_before(self, span: Span, *, total: int, wanted: int) -> str:
        """Returns the error text for a span that has another checksum than it had when it was written, or first read."""
        if span.offset < SOURCES_AT:
            return not_as_written(self.paths, self.stripe, span, total=total, wanted=wanted)
        begin, place, file = SOURCES_AT, "", ""
        for source in self.sources:
            if span.offset >= begin:
                first = span.offset - begin
                place, file = f"bytes {first} to {first + span.size} of {source.path}", source.path
            begin += align_up(source.size, PAGE)
        sums = f"(checksum {total:016x}, expected {wanted:016x})"
        why = f"the model's file {file} has other content than before, or its drive fails"
        return f"{place} are not what was read there before {sums}: {why}"

    def _check(self, code: int, why: Any) -> None:
        if code:
            raise failure_error(why, paths=self.files, sources_from=len(self.paths), code=code)

    def sync(self) -> None:
        """Returns when the data of every file is on stable storage and the file can be found by its path. Raises SwapError
        also for a source that has changed."""
        why = ffi.new("fy_failure *")
        self._check(lib.fy_store_sync(self.handle, why), why)


def not_as_written(files: Sequence[Path | str], stripe: int, span: Span, *, total: int, wanted: int) -> str:
    """Returns the error text for a span that has this checksum."""
    first, last = span.offset // stripe, (span.offset + span.size - 1) // stripe
    numbers = sorted({block % len(files) for block in range(first, min(last, first + len(files)) + 1)})
    where = ", ".join(str(files[number]) for number in numbers)
    which = f"bytes {span.offset} to {span.offset + span.size} of the store"
    return f"{which}, in {where}, are not what was written there (checksum {total:016x}, expected {wanted:016x})"
