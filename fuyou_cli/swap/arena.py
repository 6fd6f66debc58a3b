"""Maps the host memory that the daemon reads into and writes from. Spans in it are named by offsets."""

from __future__ import annotations

from .failures import refusal_error
from .handle import Handle
from .native import ffi, lib


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
