"""What is shown as memory now is never above the peak beside it."""

from __future__ import annotations

import itertools

from fuyou_cli.training.run import MemoryWatch


def test_a_look_feeds_the_peak() -> None:
    sizes = itertools.chain([5, 9, 7], itertools.repeat(1))
    watch = MemoryWatch(lambda: next(sizes))  # its thread is not started
    assert (watch.look(), watch.peak) == (9, 9)
    assert (watch.look(), watch.peak) == (7, 9)
