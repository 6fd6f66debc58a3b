"""Tests files of others behind a store: read as they are, told apart from what they were, never written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fuyou_cli.core.errors import ModelFileError, SwapError, UsageError
from fuyou_cli.spec.model import PAGE, SOURCES_AT, SourceFile
from fuyou_cli.swap.arena import Arena
from fuyou_cli.swap.daemon import DaemonOptions, SwapDaemon
from fuyou_cli.swap.store import Store

SIZE = 10 * PAGE + 777


@pytest.fixture
def source(tmp_path: Path) -> SourceFile:
    """Makes a file of random bytes, by a link as in the hub's cache."""
    file = tmp_path / "blob"
    file.write_bytes(np.random.default_rng(1).bytes(SIZE))
    (tmp_path / "model.safetensors").symlink_to(file)
    return described(tmp_path / "model.safetensors")


def described(path: Path) -> SourceFile:
    return SourceFile(path=str(path), size=path.stat().st_size, changed=path.stat().st_mtime_ns, header="")


@pytest.fixture
def opened(tmp_path: Path, source: SourceFile) -> Iterator[tuple[Arena, Store, SwapDaemon]]:
    with (
        Arena(1 << 21) as arena,
        Store.open([tmp_path / "store.bin"], stripe=PAGE, size=PAGE, create=True, sources=[source, source]) as store,
        SwapDaemon(arena, store, DaemonOptions(data_sums=True, update_threads=0), label_names={3: "layers.3"}) as daemon,
    ):
        yield arena, store, daemon


def test_pages_of_a_file_are_read_and_counted(opened: tuple[Arena, Store, SwapDaemon], source: SourceFile) -> None:
    arena, _, daemon = opened
    second = SOURCES_AT + 11 * PAGE
    daemon.wait(daemon.read(0, second + 8 * PAGE, 3 * PAGE))
    assert bytes(arena.view(0, 3 * PAGE)) == Path(source.path).read_bytes()[8 * PAGE :].ljust(3 * PAGE, b"\0")
    assert daemon.counters().read_bytes == 3 * PAGE
    with pytest.raises(SwapError, match=r"the write of layers\.3 was refused"):
        daemon.write(0, SOURCES_AT, PAGE, label=3)


def test_later_reads_are_compared_with_the_first(opened: tuple[Arena, Store, SwapDaemon], source: SourceFile) -> None:
    _, _, daemon = opened
    for place in (0, 2 * PAGE, 0):
        daemon.wait(daemon.read(0, SOURCES_AT + place, 2 * PAGE, label=3))
    with Path(source.path).open("r+b") as file:
        file.seek(PAGE + 5)
        file.write(b"!")
    with pytest.raises(ModelFileError, match=rf"reading layers\.3: bytes 0 to 8192 of {source.path} are not what was read"):
        daemon.wait(daemon.read(0, SOURCES_AT, 2 * PAGE, label=3))


def test_a_file_that_changes_is_named(opened: tuple[Arena, Store, SwapDaemon], source: SourceFile) -> None:
    _, store, daemon = opened
    store.sync()
    os.truncate(source.path, SIZE - PAGE)
    for name_it in (store.sync, store.check_sources, lambda: daemon.wait(daemon.read(0, SOURCES_AT, 11 * PAGE, label=3))):
        with pytest.raises(UsageError, match=f"{source.path}.*has changed, or is gone") as caught:
            name_it()
        assert "as it was" in (caught.value.hint or "")


def test_a_file_that_is_not_the_one_meant_is_refused(tmp_path: Path, source: SourceFile) -> None:
    os.utime(source.path, ns=(0, source.changed + 1))
    with pytest.raises(UsageError, match=f"{source.path}.*has changed"):
        Store.open([tmp_path / "store.bin"], stripe=PAGE, size=PAGE, create=True, sources=[source])
    with Store.open([tmp_path / "store.bin"], stripe=PAGE, size=PAGE, sources=[described(tmp_path / "blob")]) as store:
        store.check_sources()
        (tmp_path / "blob").unlink()
        with pytest.raises(UsageError, match="has changed, or is gone"):
            store.check_sources()
