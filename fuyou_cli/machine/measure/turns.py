"""Times actions in turns and leaves out the turns that other programs disturbed.

The speed of a shared machine changes within seconds, and a plan needs the ratio of two rates, so all actions take short turns.
The time of a turn is the mean of its repeats. The rate is the median over the quiet turns, because a report compares the
prediction with the median of a run's steps. Where hardly any is quiet, it is that of each action's fastest turn: a thread that
waits for a core that others use makes all threads wait, and the median is several times too slow.

A GPU's clock is low when it is idle, rises, and falls again after seconds of work. So a GPU works before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..background_load import BackgroundLoad
from .findings import Rate, Unit, mean_seconds, rate_of, seconds_of

if TYPE_CHECKING:
    import torch

TURNS = 12  # about, where a repeat is short
LEAST = 3  # quiet turns that are enough for a median
DISTURBED = 0.1  # cores that others use in a turn; above it all compute threads wait for the one that shares its core
CLOCK = 0.04  # CPU-seconds by which the system's counters may be wrong
PATIENCE = 1.5  # times the seconds asked for, at most, while turns are disturbed


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """Describes one thing that is timed. `share`: of the time of all."""

    name: str
    run: Callable[[], object]
    amount: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Holds the mean seconds of a repeat of each action in one turn, and the cores that others used meanwhile."""

    seconds: tuple[float, ...]
    others: float

    @property
    def is_quiet(self) -> bool:
        """Tells whether compute had the cores for itself."""
        return self.others <= DISTURBED


def in_turns(actions: Sequence[Action], device: torch.device, seconds: float) -> list[Turn]:
    """Times all actions in turns, after one repeat of each that is not counted, on a GPU after `seconds` of turns that are not.
    Ends when quiet turns have taken `seconds`, or all turns PATIENCE times that. There are two turns at least, unless one takes
    twice the time."""
    for action in actions:
        seconds_of(action.run, device)  # a GPU is done with it before anything is counted
    turns: list[Turn] = []
    whole = sum(action.share for action in actions)
    times = [seconds * action.share / whole / TURNS for action in actions]
    settled = time.perf_counter() + seconds
    while device.type == "cuda" and time.perf_counter() < settled:
        _turn(actions, times, device)
    begin, quiet, passed = time.perf_counter(), 0.0, 0.0
    while (quiet < seconds and passed < PATIENCE * seconds) or (len(turns) < 2 and passed < 2 * seconds):
        turns.append(_turn(actions, times, device))
        taken = time.perf_counter() - begin - passed
        passed += taken
        quiet += taken * turns[-1].is_quiet
    return turns


def _turn(actions: Sequence[Action], times: Sequence[float], device: torch.device) -> Turn:
    begin, others = time.perf_counter(), BackgroundLoad()
    means = tuple(mean_seconds(action.run, own, device) for action, own in zip(actions, times, strict=True))
    if device.type == "cuda":  # which others' use of the processor does not slow down
        return Turn(seconds=means, others=0.0)
    return Turn(seconds=means, others=max(0.0, others.cores() - CLOCK / (time.perf_counter() - begin)))


def counted(turns: Sequence[Turn]) -> list[Turn]:
    """Returns the quiet turns, or all where fewer than LEAST are quiet."""
    quiet = [turn for turn in turns if turn.is_quiet]
    return quiet if len(quiet) >= min(LEAST, len(turns)) else list(turns)


def rates_of(actions: Sequence[Action], turns: Sequence[Turn], unit: Unit, note: str) -> list[Rate]:
    """Computes the rate of each action: the median of these turns (of the fastest, if some are disturbed), and their range."""
    found = [
        rate_of(action.name, unit, [action.amount / turn.seconds[place] for turn in turns], note)
        for place, action in enumerate(actions)
    ]
    return found if all(turn.is_quiet for turn in turns) else [replace(rate, value=rate.high) for rate in found]


def left_out(turns: Sequence[Turn]) -> str:
    """Tells how many turns were disturbed; nothing where none was."""
    loud = sum(not turn.is_quiet for turn in turns)
    return f", {loud} of {len(turns)} turns disturbed by other programs" if loud else ""
