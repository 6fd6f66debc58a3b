"""Opens preallocated files as one address space, striped over the paths, read and written without the page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .failures import failure_error
from .handle import Handle
from .native import ffi, lib


class Store(Handle):
    """Holds open files. Use `Store.open`. This class opens, syncs and closes them; the daemon reads and writes."""

    def __init__(self, native: Any, paths: tuple[Path, ...], stripe: int) -> None:
        super().__init__(native, lib.fy_store_close, "store", hint="stop the daemon that uses it first")
        self.paths = paths
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
    ) -> Store:
        """Opens the store over `paths`: one file each, `size` bytes together, `stripe` bytes to each file in turn.

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
        return cls(out[0], tuple(paths), stripe)

    def sync(self) -> None:
        """Returns when the data of every file is on stable storage and the file can be found by its path."""
        why = ffi.new("fy_failure *")
        code = lib.fy_store_sync(self.handle, why)
        if code:
            raise failure_error(why, paths=self.paths, code=code)
