"""Maps the host memory that everything the daemon moves lives in, named by offsets."""

from __future__ import annotations

from .failures import refusal_error
from .handle import Handle
from .native import ffi, lib


class Arena(Handle):
    """Maps `size` bytes of anonymous memory, advised to huge pages, not inherited by forked children.

    Pages are taken when first touched. Views die with the arena: nothing may touch one after `close`, which is refused while a
    daemon uses it.
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
        """Returns bytes [offset, offset + size), writable, without a copy."""
        assert self.handle
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes {offset} to {offset + size} are outside the arena of {self.size}")
        return memoryview(ffi.buffer(ffi.cast("char *", self._base) + offset, size))
