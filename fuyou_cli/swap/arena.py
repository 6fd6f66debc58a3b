"""Host memory that everything the daemon moves lives in, named by offsets."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from .failures import refusal_error
from .native import ffi, lib


class Arena:
    """`size` bytes of anonymous memory, advised to huge pages, not inherited by forked children.

    Pages are taken when first touched. Views die with the arena: nothing may touch one after `close`.
    """

    def __init__(self, size: int) -> None:
        out = ffi.new("fy_arena **")
        code = lib.fy_arena_create(size, out)
        if code:
            raise refusal_error(f"cannot map {size} bytes of host memory", code)
        self._handle: Any = out[0]
        self.size = size
        self._base = lib.fy_arena_base(self._handle)

    @property
    def handle(self) -> Any:
        """The library's arena, for the daemon."""
        if self._handle is None:
            raise ValueError("the arena is closed")
        return self._handle

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes [offset, offset + size), writable, without a copy."""
        if self._handle is None:
            raise ValueError("the arena is closed")
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes {offset} to {offset + size} are outside the arena of {self.size}")
        return memoryview(ffi.buffer(ffi.cast("char *", self._base) + offset, size))

    def close(self) -> None:
        """Unmaps. Twice is fine; an arena that a daemon still uses is refused."""
        if self._handle is None:
            return
        code = lib.fy_arena_destroy(self._handle)
        if code:
            raise refusal_error("the arena cannot be closed", code, "stop the daemon that uses it first")
        self._handle = None

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
