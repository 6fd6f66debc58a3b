"""Goal: what the daemon moves and updates is what was asked, on both backends, and what fails says so. Method: real
files, compared byte for byte; updates compared with the kernel on plain memory, bit for bit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fuyou_cli.core.errors import SwapError
from fuyou_cli.swap import kernels
from fuyou_cli.swap.daemon import DaemonOptions, Home, Segment, SwapDaemon, Update
from fuyou_cli.swap.store import Arena, Store

from . import adamw_reference as reference
from .conftest import CHUNK, MIB, Machine

Build = Callable[..., Machine]


@pytest.mark.parametrize("files", [1, 3])
def test_what_is_written_is_read_back(machine: Build, files: int) -> None:
    m = machine(files)
    assert m.store.size == 32 * MIB
    data = np.random.default_rng(1).integers(0, 256, 5 * MIB, dtype=np.uint8)
    m.put(4096, 3 * MIB + 4096, data)
    m.array(4096, np.uint8, data.size)[:] = 0
    np.testing.assert_array_equal(m.get(8 * MIB, 3 * MIB + 4096, np.uint8, data.size), data)


def test_counters_and_events_tell_what_happened(machine: Build) -> None:
    m = machine()
    before = time.monotonic_ns()
    for label in range(3):
        m.daemon.wait(m.daemon.write(0, label * MIB, MIB, label=label))
    m.daemon.wait(m.daemon.read(0, MIB, 512 << 10, label=9))
    counters = m.daemon.counters()
    assert (counters.written_bytes, counters.read_bytes) == (3 * MIB, 512 << 10)
    assert counters.writes == 3 * 4 and counters.reads == 2, "blocks of 256 KiB, in stripes of 64 KiB of one file"
    assert counters.in_flight == counters.queued == 0
    assert counters.write_busy_ns > 0 and counters.read_busy_ns > 0
    events = m.daemon.events()
    assert [(e.operation, e.label, e.bytes) for e in events] == [
        ("write", 0, MIB), ("write", 1, MIB), ("write", 2, MIB), ("read", 9, 512 << 10),
    ]  # fmt: skip
    assert all(before < e.begin_ns < e.end_ns < time.monotonic_ns() for e in events)
    assert m.daemon.events() == [] and m.daemon.events_dropped == 0


def test_small_reads_that_follow_each_other_are_one_event(machine: Build) -> None:
    """They are the rows of a table: thousands in a step."""
    m = machine()
    tickets = [m.daemon.read(at * 8192, at * 8192, 8192, label=4) for at in range(30)]
    for ticket in tickets:
        m.daemon.wait(ticket)
    m.daemon.wait(m.daemon.read(0, 0, 4096, label=5))
    events = m.daemon.events()
    assert [e.label for e in events] == [4] * (len(events) - 1) + [5] and 2 <= len(events) < 10
    assert sum(e.bytes for e in events) == 30 * 8192 + 4096
    assert all(e.begin_ns < e.end_ns for e in events)


def test_data_sums_are_checksums_of_the_span(machine: Build) -> None:
    m = machine(data_sums=True)
    data = np.random.default_rng(2).integers(0, 256, MIB, dtype=np.uint8)
    m.array(0, np.uint8, MIB)[:] = data
    assert m.daemon.wait(m.daemon.write(0, MIB, MIB)).data_sum == kernels.checksum(data)
    assert m.daemon.wait(m.daemon.read(2 * MIB, MIB, MIB)).data_sum == kernels.checksum(data)


def test_many_threads_submit_and_wait(machine: Build) -> None:
    m = machine(files=2, requests=16)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            base, place = number * MIB, number * 4 * MIB
            for turn in range(8):
                m.array(base, np.uint32, MIB // 4)[:] = number * 1000 + turn
                m.daemon.wait(m.daemon.write(base, place, MIB, priority=turn))
                m.array(base, np.uint32, MIB // 4)[:] = 0
                m.daemon.wait(m.daemon.read(base, place, MIB))
                assert np.all(m.array(base, np.uint32, MIB // 4) == number * 1000 + turn)
        except BaseException as error:  # brought to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# ---- updates ----

PARAMS = 2048 * 41  # six chunks, the last one short
SEGMENTS = (
    Segment(first=0, count=CHUNK + 77, weight_decay=0.1),
    Segment(first=CHUNK + 77, count=900, weight_decay=0.0, frozen=True),
    Segment(first=CHUNK + 1024, count=PARAMS - CHUNK - 2048, weight_decay=0.0, lr_scale=0.5),
)


def expected_update(update: Update, state: reference.State, gradients: np.ndarray) -> dict[str, np.ndarray]:
    weights, remainder = state.split()
    arrays = {"momentum": state.momentum, "variance": state.variance}
    if update.weights_dtype == "bfloat16":
        arrays |= {"weights": weights, "remainder": remainder}
    else:
        arrays |= {"weights": state.master}
    assert kernels.adamw(update, gradients=gradients, **arrays) == 0
    return arrays


@pytest.mark.parametrize("weights_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gradients_dtype", ["bfloat16", "float32"])
def test_an_update_from_store_to_store_equals_the_kernel(machine: Build, weights_dtype: str, gradients_dtype: str) -> None:
    """All states in one extent of the store, new ones in another, as a training run alternates them."""
    m = machine(files=2)
    state = reference.random_state(PARAMS, seed=3)
    gradients = reference.random_gradients(PARAMS, 4, gradients_dtype)
    remainder = state.split()[1]
    m.put(0, 1 * MIB, remainder)
    m.put(0, 2 * MIB, state.momentum)
    m.put(0, 3 * MIB, state.variance)
    m.put(0, 4 * MIB, gradients)
    weights = state.split()[0] if weights_dtype == "bfloat16" else state.master
    m.array(MIB, weights.dtype.type, PARAMS)[:] = weights
    update = Update(
        params=PARAMS, weights_dtype=weights_dtype, gradients_dtype=gradients_dtype, weights=MIB,  # type: ignore[arg-type]
        weights_target=11 * MIB, gradients_source=4 * MIB, remainder=Home(source=1 * MIB, target=12 * MIB),
        momentum=Home(source=2 * MIB, target=13 * MIB), variance=Home(source=3 * MIB, target=14 * MIB),
        lr=1e-3, beta1=0.9, beta2=0.95, epsilon=1e-8, gradient_scale=0.25, step=7, segments=SEGMENTS,
    )  # fmt: skip
    result = m.daemon.wait(m.daemon.update(update))
    expected = expected_update(update, state, gradients)
    assert result.nonfinite == 0
    np.testing.assert_array_equal(m.array(MIB, weights.dtype.type, PARAMS), expected["weights"])
    places = {"weights": 11 * MIB, "remainder": 12 * MIB, "momentum": 13 * MIB, "variance": 14 * MIB}
    for name, values in expected.items():
        written = m.get(8 * MIB, places[name], values.dtype.type, PARAMS)
        np.testing.assert_array_equal(written.view(np.uint16), values.view(np.uint16), err_msg=name)
        assert getattr(result, f"{name}_sum") == kernels.checksum(values), name
    assert m.daemon.counters().update_params == PARAMS


@pytest.mark.parametrize("update_threads", [1, 3])
def test_states_in_ram_and_states_never_written(machine: Build, update_threads: int) -> None:
    """Takes a first step: zero moments, not read from anywhere; the remainder rests in RAM and is updated in place."""
    m = machine(update_threads=update_threads)
    state = reference.random_state(PARAMS, seed=5)
    state.momentum[:], state.variance[:] = 0, 0
    gradients = reference.random_gradients(PARAMS, 6, "float32")
    weights, remainder = state.split()
    m.array(0, np.uint16, PARAMS)[:] = weights
    m.array(MIB, np.int16, PARAMS)[:] = remainder
    m.array(2 * MIB, np.float32, PARAMS)[:] = gradients
    update = Update(
        params=PARAMS, weights_dtype="bfloat16", gradients_dtype="float32", weights=0, gradients=2 * MIB,
        remainder=Home(arena=MIB), momentum=Home(target=0), variance=Home(target=MIB),
        lr=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, step=1, segments=SEGMENTS,
    )  # fmt: skip
    read_before = m.daemon.counters().read_bytes
    m.daemon.wait(m.daemon.update(update))
    assert m.daemon.counters().read_bytes == read_before, "nothing is read for states that were never written"
    expected = expected_update(update, state, gradients)
    np.testing.assert_array_equal(m.array(0, np.uint16, PARAMS), expected["weights"])
    np.testing.assert_array_equal(m.array(MIB, np.int16, PARAMS), expected["remainder"])
    np.testing.assert_array_equal(m.get(8 * MIB, 0, np.float32, PARAMS), expected["momentum"])
    np.testing.assert_array_equal(m.get(8 * MIB, MIB, np.float32, PARAMS), expected["variance"])


# ---- what fails ----


def test_a_truncated_file_fails_by_stage_file_and_place(machine: Build, tmp_path: Path) -> None:
    m = machine()
    m.daemon.label_names[4] = "block 4"
    os.truncate(tmp_path / "part0.bin", 2 * MIB)
    ticket = m.daemon.read(0, 2 * MIB - MIB // 4, MIB // 2, label=4)  # a block that is there, and one that is not
    with pytest.raises(SwapError) as caught:
        m.daemon.wait(ticket)
    message = str(caught.value)
    assert "reading block 4 failed" in message and "part0.bin at byte 2097152" in message and "ENODATA" in message
    assert caught.value.hint is not None and "too short" in caught.value.hint
    m.daemon.wait(m.daemon.read(0, 0, MIB))  # the rest goes on


def test_a_ticket_is_spent_once(machine: Build) -> None:
    m = machine()
    ticket = m.daemon.write(0, 0, MIB)
    m.daemon.wait(ticket)
    for call in (m.daemon.wait, m.daemon.poll):
        with pytest.raises(ValueError, match="already collected"):
            call(ticket)


def test_poll_waits_for_nothing(machine: Build) -> None:
    m = machine()
    ticket = m.daemon.write(0, 0, 8 * MIB)
    result = m.daemon.poll(ticket)
    while result is None:
        time.sleep(1e-3)
        result = m.daemon.poll(ticket)
    assert result.nonfinite == 0


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ((0, 0, 100), "EINVAL"),
        ((100, 0, 4096), "EINVAL"),
        ((0, 32 * MIB, 4096), "ERANGE"),
        ((1 << 40, 0, 4096), "ERANGE"),
        ((16 * MIB, 0, 4096), "EINVAL"),  # the scratch is the daemon's
    ],
)
def test_requests_out_of_bounds_are_refused(machine: Build, request_: tuple[int, int, int], text: str) -> None:
    m = machine()
    for submit in (m.daemon.read, m.daemon.write):
        with pytest.raises(SwapError, match=text):
            submit(*request_)


def test_more_requests_than_agreed_are_refused(machine: Build) -> None:
    m = machine(requests=2)
    tickets = [m.daemon.write(0, 0, 4096), m.daemon.write(4096, 4096, 4096)]
    with pytest.raises(SwapError, match="EAGAIN"):
        m.daemon.write(8192, 8192, 4096)
    for ticket in tickets:
        m.daemon.wait(ticket)
    m.daemon.wait(m.daemon.write(8192, 8192, 4096))


def test_thousands_of_requests_may_be_open(machine: Build) -> None:
    m = machine(requests=DaemonOptions().requests)
    for ticket in [m.daemon.read(0, 0, 4096) for _ in range(4096)]:
        m.daemon.wait(ticket)


def test_a_forked_child_is_refused(machine: Build) -> None:
    """The child's exit status says what it saw; it must not hang, crash or move a byte."""
    m = machine()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            m.daemon.write(0, 0, 4096)
        except SwapError as error:
            status = 0 if "EPERM" in str(error) else 2
        os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    m.daemon.wait(m.daemon.write(0, 0, 4096))


def test_stopping_with_work_under_way_drains(machine: Build) -> None:
    m = machine()
    for place in range(8):
        m.daemon.write(0, place * MIB, MIB)
    m.daemon.close()
    m.daemon.close()
    with pytest.raises(ValueError, match="the swap daemon is closed"):
        m.daemon.write(0, 0, 4096)


# ---- store and arena ----


def test_a_store_opens_again_with_its_data(machine: Build, tmp_path: Path) -> None:
    m = machine(files=2)
    data = np.arange(MIB // 4, dtype=np.uint32)
    m.put(0, MIB, data)
    m.store.sync()
    m.daemon.close()
    m.store.close()
    paths = [tmp_path / "part0.bin", tmp_path / "part1.bin"]
    with (
        Store.open(paths, stripe=64 << 10, size=32 * MIB) as again,
        SwapDaemon(m.arena, again, DaemonOptions(backend="threads")) as daemon,
    ):
        m.array(0, np.uint32, data.size)[:] = 0
        daemon.wait(daemon.read(0, MIB, MIB))
        np.testing.assert_array_equal(m.array(0, np.uint32, data.size), data)


def test_store_errors_name_the_file(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "a.bin"
    with pytest.raises(SwapError, match=r"opening failed: .*nowhere/a\.bin.*ENOENT"):
        Store.open([missing], stripe=65536, size=MIB, create=True)
    with Store.open([tmp_path / "a.bin"], stripe=65536, size=MIB, create=True) as store:
        assert store.alignment == 4096
        with pytest.raises(SwapError, match="EBUSY") as caught:
            Store.open([tmp_path / "a.bin"], stripe=65536, size=MIB)
        assert caught.value.hint is not None and "another process" in caught.value.hint
    with pytest.raises(SwapError, match=r"a\.bin.*ENODATA"):
        Store.open([tmp_path / "a.bin"], stripe=65536, size=2 * MIB)


def test_arena_and_store_stay_while_a_daemon_uses_them(machine: Build) -> None:
    m = machine()
    for owned in (m.arena, m.store):
        with pytest.raises(SwapError, match="EBUSY"):
            owned.close()


def test_arena_views_are_bounded_and_writable() -> None:
    with Arena(MIB) as arena:
        arena.view(MIB - 4, 4)[:] = b"last"
        assert bytes(arena.view(MIB - 4, 4)) == b"last"
        for offset, size in ((MIB - 4, 5), (-1, 1), (0, MIB + 1)):
            with pytest.raises(ValueError, match="outside"):
                arena.view(offset, size)
    with pytest.raises(ValueError, match="closed"):
        arena.view(0, 1)
