"""Tests that long waits without any progress say what is waited for; those that move say nothing, however long they are."""

from __future__ import annotations

from fuyou_cli.core.patience import Patience


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
