"""Tests that what is read is compared with what was written there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fuyou_cli.core.errors import SwapError
from fuyou_cli.spec.plan import Span
from fuyou_cli.swap import kernels
from fuyou_cli.swap.daemon import Home, Result, Segment, Update
from fuyou_cli.swap.written import Move, Written
from tests.damage import flip

from .conftest import CHUNK, MIB, Machine

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
