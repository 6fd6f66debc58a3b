"""Preallocated files read and written past the page cache: one address space, striped over the paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .failures import failure_error, refusal_error
from .native import ffi, lib


class Store:
    """Open files. Use `Store.open`; the daemon reads and writes, this class only opens, syncs and closes."""

    def __init__(self, handle: Any, paths: tuple[Path, ...], stripe: int) -> None:
        self._handle = handle
        self.paths = paths
        self.stripe = stripe
        self.size: int = lib.fy_store_size(handle)
        self.alignment: int = lib.fy_store_alignment(handle)
        self.direct = bool(lib.fy_store_is_direct(handle))

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
    ) -> Store:
        """The store over `paths` (one file each, `size` bytes together, `stripe` bytes to a file in turn).

        `create` preallocates the files; without it they must exist with the right size. `read_only` leaves them as they are,
        and lets others read them meanwhile. `buffered` goes through the page cache on purpose, as the store does by itself
        where a file system knows no direct I/O (`direct` says).
        """
        names = [ffi.new("char[]", os.fsencode(path)) for path in paths]
        array = ffi.new("char *[]", names)
        out = ffi.new("fy_store **")
        why = ffi.new("fy_failure *")
        flags = (lib.FY_STORE_CREATE if create else 0) | (lib.FY_STORE_BUFFERED if buffered else 0)
        flags |= lib.FY_STORE_READ_ONLY if read_only else 0
        code = lib.fy_store_open(array, len(names), stripe, size, flags, out, why)
        if code:
            raise failure_error(why, paths=list(paths), code=code)
        return cls(out[0], tuple(paths), stripe)

    @property
    def handle(self) -> Any:
        """The library's store, for the daemon."""
        if self._handle is None:
            raise ValueError("the store is closed")
        return self._handle

    def sync(self) -> None:
        """Returns when the data of every file is on stable storage, and found by its path."""
        why = ffi.new("fy_failure *")
        code = lib.fy_store_sync(self.handle, why)
        if code:
            raise failure_error(why, paths=self.paths, code=code)

    def close(self) -> None:
        """Closes the files. Twice is fine; a store that a daemon still uses is refused."""
        if self._handle is None:
            return
        code = lib.fy_store_close(self._handle)
        if code:
            raise refusal_error("the store cannot be closed", code, "stop the daemon that uses it first")
        self._handle = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
