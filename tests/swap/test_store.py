"""What the store refuses, reads of a checkpoint's files, and what is compared with what was written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuyou_cli.core.errors import ModelFileError, SwapError, UsageError
from fuyou_cli.spec.model import PAGE, SOURCES_AT, SourceFile
from fuyou_cli.spec.plan import Span
from fuyou_cli.swap import kernels
from fuyou_cli.swap.daemon import DaemonOptions, Home, Move, Result, Segment, SwapDaemon, Update, Written
from fuyou_cli.swap.native import failure_error, ffi, lib
from fuyou_cli.swap.store import Arena, Store
from tests.damage import flip

from .conftest import CHUNK, MIB, Machine

# ---- failures --------------------------------------------------------------------------------------------------------
# Goal: what the library refuses reaches a person as a file, a reason and a remedy. Method: its own failure records.


def _hint(operation: int, code: int) -> str:
    why = ffi.new("fy_failure *", {"operation": operation, "error": -code, "file": 1})
    error = failure_error(why, paths=[Path("/a/store.bin"), Path("/b/store.bin")])
    assert errno.errorcode[code] in str(error)
    assert ("/b/store.bin" in str(error)) == (operation == lib.FY_OP_OPEN)
    return error.hint or ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ELOOP, "symbolic link"),
        (errno.EPERM, "another user"),
        (errno.EINVAL, "not a regular file"),
        (errno.EACCES, "permissions"),
        (errno.ENOENT, "mounted"),
        (errno.EBUSY, "another process"),
    ],
)
def test_a_file_that_cannot_be_opened_says_what_to_do(code: int, said: str) -> None:
    assert said in _hint(lib.FY_OP_OPEN, code)


@pytest.mark.parametrize(
    ("operation", "code", "said"),
    [
        (lib.FY_OP_ALLOCATE, errno.EPERM, "lsattr"),
        (lib.FY_OP_ALLOCATE, errno.EDQUOT, "quota"),
        (lib.FY_OP_ALLOCATE, errno.ENOSPC, "free space"),
        (lib.FY_OP_OPEN, errno.ENOLCK, "lock service"),
        (lib.FY_OP_OPEN, errno.ENOTCONN, "mount it again"),
        (lib.FY_OP_WRITE, errno.EDQUOT, "quota"),
        (lib.FY_OP_READ, errno.ENODEV, "plug it in"),
        (lib.FY_OP_SETUP, errno.EAGAIN, "ulimit -u"),
        (lib.FY_OP_READ, errno.EAGAIN, "dmesg"),
    ],
)
def test_the_remedy_is_that_of_the_failure(operation: int, code: int, said: str) -> None:
    why = ffi.new("fy_failure *", {"operation": operation, "error": -code})
    error = failure_error(why, paths=[Path("/a/store.bin")])
    assert said in (error.hint or "")
    assert error.exit_code == (4 if code in (errno.ENOSPC, errno.EDQUOT) else 1)


def test_a_forked_child_is_not_told_about_files() -> None:
    """Tells nothing, as EPERM means two things; only opening looks at who owns a file."""
    assert "forked child" in _hint(lib.FY_OP_SETUP, errno.EPERM)


# ---- sources ---------------------------------------------------------------------------------------------------------
# Tests files of others behind a store: read as they are, told apart from what they were, never written.


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


# ---- written ---------------------------------------------------------------------------------------------------------
# Tests that what is read is compared with what was written there.


Build = Callable[..., Machine]
PARAMS = 3 * CHUNK + 2048
PLACES = {"remainder": (1, 2), "momentum": (2, 4), "variance": (3, 4), "gradients": (4, 4)}  # MiB; bytes per parameter


def _put(m: Machine, store_offset: int, size: int, seed: int) -> None:
    m.array(0, np.uint8, size)[:] = np.random.default_rng(seed).integers(0, 60, size, dtype=np.uint8)
    m.daemon.wait(m.daemon.write(0, store_offset, size, label=7))


@pytest.mark.parametrize("files", [1, 3])
def test_what_is_not_as_it_was_written_is_named(files: int, machine: Build) -> None:
    m = machine(files=files, data_sums=True)
    m.daemon.label_names[7] = "block 3"
    _put(m, 2 * MIB, MIB, seed=1)
    m.daemon.wait(m.daemon.read(4 * MIB, 2 * MIB, MIB, label=7))
    flip(m.store.paths[0], 33 // files * (64 << 10))  # a stripe of the first file, in the span
    with pytest.raises(SwapError, match=f"reading block 3: bytes {2 * MIB} to {3 * MIB} of the store, in ") as caught:
        m.daemon.wait(m.daemon.read(4 * MIB, 2 * MIB, MIB, label=7))
    assert all(str(path) in caught.value.message for path in m.store.paths)
    assert "are not what was written there" in caught.value.message and "dmesg" in str(caught.value.hint)
    _put(m, 2 * MIB, MIB, seed=2)
    m.daemon.wait(m.daemon.read(4 * MIB, 2 * MIB, MIB, label=7))


def test_nothing_is_known_of_what_nobody_wrote_or_of_a_part(machine: Build) -> None:
    m = machine(data_sums=True)
    m.daemon.wait(m.daemon.read(0, 8 * MIB, MIB))
    _put(m, 2 * MIB, MIB, seed=1)
    flip(m.store.paths[0], 2 * MIB + 5000)
    m.daemon.wait(m.daemon.read(0, 2 * MIB, MIB // 2))


def test_what_others_wrote_is_compared_too(machine: Build) -> None:
    m = machine(data_sums=True)
    assert m.daemon.written is not None
    _put(m, 0, MIB, seed=1)
    data = m.array(0, np.uint8, MIB).copy()
    m.daemon.written.expect(Span(offset=0, size=MIB), kernels.checksum(data))
    m.daemon.wait(m.daemon.read(0, 0, MIB))
    m.daemon.written.expect(Span(offset=0, size=MIB), kernels.checksum(data) ^ 1)
    with pytest.raises(SwapError, match="are not what was written"):
        m.daemon.wait(m.daemon.read(0, 0, MIB))


def test_a_read_that_failed_changes_nothing_a_write_that_failed_leaves_nothing_known(machine: Build) -> None:
    span = Span(offset=0, size=4096)
    written = Written(machine().store, name=str)
    result = Result(*[0] * len(Result._fields))
    written.expect(span, 5)
    written.begin(1, Move("read", span, 3))
    written.fail(1)
    written.begin(2, Move("read", span, 3))
    with pytest.raises(SwapError, match=r"reading 3: bytes 0 to 4096 of the store, in \S+, are not"):
        written.end(2, result._replace(data_sum=6))
    written.begin(3, Move("write", span, 3))
    written.fail(3)
    written.begin(4, Move("read", span, 3))
    written.end(4, result._replace(data_sum=6))


def test_without_sums_nothing_is_compared(machine: Build) -> None:
    m = machine()
    assert m.daemon.written is None
    _put(m, 2 * MIB, MIB, seed=1)
    flip(m.store.paths[0], 2 * MIB)
    assert m.daemon.wait(m.daemon.read(0, 2 * MIB, MIB)).data_sum == 0


def _update(m: Machine) -> Update:
    """Updates states and gradients on the store, to other places."""
    for seed, (place, item) in enumerate(PLACES.values()):
        _put(m, place * MIB, PARAMS * item, seed=seed)
    m.array(8 * MIB, np.uint16, PARAMS)[:] = 0x3C00
    homes: dict[str, Any] = {
        name: Home(source=PLACES[name][0] * MIB, target=(PLACES[name][0] + 8) * MIB)
        for name in ("remainder", "momentum", "variance")
    }
    return Update(
        params=PARAMS, weights_dtype="bfloat16", gradients_dtype="float32", weights=8 * MIB, weights_target=8 * MIB,
        gradients_source=PLACES["gradients"][0] * MIB, lr=1e-3, beta1=0.9, beta2=0.95, epsilon=1e-8, step=2, label=7,
        segments=(Segment(first=0, count=PARAMS, weight_decay=0.1),), **homes,
    )  # fmt: skip


def test_an_update_compares_every_tensor_that_it_reads(machine: Build) -> None:
    m = machine(data_sums=True)
    m.daemon.label_names[7] = "block 3"
    update = _update(m)
    m.daemon.wait(m.daemon.update(update))
    back = replace(
        update,
        **{name: Home(source=getattr(update, name).target, target=getattr(update, name).source) for name in list(PLACES)[:3]},
    )
    m.daemon.wait(m.daemon.update(back))  # what an update wrote is known as well
    weights = m.daemon.read(0, 8 * MIB, PARAMS * 2)
    m.daemon.wait(weights)
    for name, (place, item) in PLACES.items():
        update = _update(m)
        byte = place * MIB + (PARAMS - 1) * item
        flip(m.store.paths[0], byte)
        with pytest.raises(SwapError, match=f"reading {name} of block 3: bytes {place * MIB} to "):
            m.daemon.wait(m.daemon.update(update))
