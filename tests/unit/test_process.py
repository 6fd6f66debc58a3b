"""What is changed of this process: its heap, its collector, its signals; and what a long wait says."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator

import pytest

from fuyou_cli.core.process import BESIDE, HELD, HOLES, MAPPED, Patience, alive, held, uncollected, uninterrupted, worked_on
from fuyou_cli.core.units import MiB

# ---- heap ------------------------------------------------------------------------------------------------------------
# Tests what blocks of memory are charged with.


@pytest.mark.parametrize("size", [0, 1, MiB, MAPPED - 1])
def test_a_block_in_the_heap_brings_its_part_of_the_holes(size: int) -> None:
    assert worked_on(size) == alive(size) == int(size * (1 + HOLES)) >= held(size) == int(size * (1 + HELD)) >= size


@pytest.mark.parametrize("size", [MAPPED, 10 * MAPPED + 1])
def test_a_mapped_block_is_itself_and_what_works_on_it(size: int) -> None:
    assert alive(size) == held(size) == size
    assert worked_on(size) == int(size * (1 + BESIDE)) > size


# ---- collector -------------------------------------------------------------------------------------------------------
# core/process.py: the cycle collector stays off where it only takes time, and does not make up for it afterwards.


MANY = 50_000  # more than any threshold


@pytest.fixture
def thawed() -> Iterator[None]:
    """Begins like a command: what these tests' process froze would keep `uncollected` from moving anything."""
    gc.unfreeze()
    gc.collect()
    yield
    gc.freeze()


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


@pytest.mark.usefixtures("thawed")
def test_what_was_made_meanwhile_is_not_looked_at_right_after() -> None:
    before = _collections()
    with uncollected():
        assert not gc.isenabled()
        made = [[number] for number in range(MANY)]
    made += [[number] for number in range(10)]
    assert _collections() == before
    assert gc.isenabled() and not gc.get_freeze_count()


@pytest.mark.usefixtures("thawed")
def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


# ---- interrupts ------------------------------------------------------------------------------------------------------
# Tests that signals that come while something is opened are handled once it is open.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_comes_at_the_end(number: signal.Signals) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before, done = signal.signal(number, interrupt), False
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(number)
            done = True
        assert done and signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_changes_no_handler() -> None:
    seen = list[bool]()

    def run() -> None:
        handler = signal.getsignal(signal.SIGINT)
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT) is handler)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]


# ---- patience --------------------------------------------------------------------------------------------------------
# Tests that long waits without any progress say what is waited for; those that move say nothing, however long they are.


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _waited(seconds: int, *, moving_until: int = 0) -> list[tuple[int, str]]:
    """Returns when (seconds from the wait's begin) what was said."""
    clock, heard, moved = Clock(), list[tuple[int, str]](), [0]
    patience = Patience(
        lambda text: heard.append((int(clock.now - 100), text)), progress=lambda: moved[0], where=lambda: "step 7", clock=clock
    )
    waiting = patience.waiting("update of the block")
    for second in range(1, seconds + 1):
        clock.now = 100.0 + second
        moved[0] += second <= moving_until
        waiting.look()
        waiting.look()  # as often as anybody likes
    return heard


def test_silence_is_told_at_growing_intervals() -> None:
    heard = _waited(300)
    assert [second for second, _ in heard] == [31, 61, 121, 241]  # the first look was after one second
    assert heard[0][1] == (
        "waiting for update of the block (step 7) for 31.0 s;\nnothing was read, written or updated for 30.0 s"
    )


def test_whatever_moves_starts_the_silence_anew() -> None:
    assert _waited(300, moving_until=290) == []
    assert [second for second, _ in _waited(130, moving_until=45)] == [75, 105]


def test_a_short_wait_never_looks() -> None:
    looked: list[int] = []
    clock = Clock()
    waiting = Patience(lambda text: None, progress=lambda: looked.append(1), clock=clock).waiting("a slot")
    for _ in range(1000):
        clock.now += 1e-4
        waiting.look()
    assert looked == []
