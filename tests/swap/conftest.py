"""Makes a small machine: an arena, a store over real files, a daemon on each backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from fuyou_cli.core.errors import SwapError
from fuyou_cli.swap import kernels
from fuyou_cli.swap.daemon import DaemonOptions, SwapDaemon
from fuyou_cli.swap.store import Arena, Store

MIB = 1 << 20
CHUNK = 16384


class Machine:
    """Holds them; `scratch` begins where the arena's free part ends."""

    def __init__(self, stack: ExitStack, folder: Path, files: int, **options: object) -> None:
        scratch = kernels.scratch_size(CHUNK, 3)
        self.free = 16 * MIB
        self.arena = stack.enter_context(Arena(self.free + scratch))
        paths = [folder / f"part{i}.bin" for i in range(files)]
        self.store = stack.enter_context(Store.open(paths, stripe=64 << 10, size=32 * MIB, create=True))
        settings: dict[str, object] = dict(
            read_depth=4, write_depth=4, update_threads=2, requests=64, chunk_params=CHUNK, block_size=256 << 10,
            scratch_offset=self.free, scratch_size=scratch,
        )  # fmt: skip
        settings.update(options)
        self.daemon = stack.enter_context(
            SwapDaemon(self.arena, self.store, DaemonOptions(**settings))  # type: ignore[arg-type]
        )

    def array(self, offset: int, dtype: type, count: int) -> np.ndarray:
        return np.frombuffer(self.arena.view(offset, count * np.dtype(dtype).itemsize), dtype)

    def put(self, arena_offset: int, store_offset: int, values: np.ndarray) -> None:
        """Writes `values` to the store, padded by whatever follows in the arena."""
        self.array(arena_offset, values.dtype.type, values.size)[:] = values
        self.daemon.wait(self.daemon.write(arena_offset, store_offset, -(-values.nbytes // 4096) * 4096))

    def get(self, arena_offset: int, store_offset: int, dtype: type, count: int) -> np.ndarray:
        size = -(-count * np.dtype(dtype).itemsize // 4096) * 4096
        self.daemon.wait(self.daemon.read(arena_offset, store_offset, size))
        return self.array(arena_offset, dtype, count).copy()


@pytest.fixture(params=["io_uring", "threads"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both backends; io_uring is skipped only where the kernel refuses it."""
    if request.param == "io_uring":
        probe = tmp_path / "probe"
        probe.mkdir()
        with ExitStack() as stack:
            try:
                Machine(stack, probe, 1, backend="io_uring")
            except SwapError as error:
                pytest.skip(f"this machine refuses io_uring: {error}")
    return str(request.param)


@pytest.fixture
def machine(backend: str, tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Builds machines that are torn down in reverse at the end of the test."""
    with ExitStack() as stack:

        def build(files: int = 1, **options: object) -> Machine:
            return Machine(stack, tmp_path, files, **{"backend": backend, **options})

        yield build
