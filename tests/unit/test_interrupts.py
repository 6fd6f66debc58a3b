"""Tests that signals that come while something is opened are handled once it is open."""

from __future__ import annotations

import signal
import threading

import pytest

from fuyou_cli.core.process import uninterrupted


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
