"""Times actions, in turns and without those that other programs disturbed, and holds the results of a measurement: rates with
their spread for people, and figures for the machine's profile.

The speed of a shared machine changes within seconds, and a plan needs the ratio of two rates, so all actions take short turns.
The time of a turn is the mean of its repeats. The rate is the median over the quiet turns, because a report compares the
prediction with the median of a run's steps. Where hardly any is quiet, it is that of each action's fastest turn: a thread that
waits for a core that others use makes all threads wait, and the median is several times too slow.

A GPU's clock is low when it is idle, rises, and falls again after seconds of work. So a GPU works before it is timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fuyou_cli.core import probe
from fuyou_cli.spec.hardware import StageRate
from fuyou_cli.spec.model import Dtype

if TYPE_CHECKING:
    import torch


# ---- other programs --------------------------------------------------------------------------------------------------


BUSY_CORES, BUSY_SHARE = 0.4, 0.1  # from here on a note says so: share of all cores, but at least the kernel's own work
LOOK = 1.0  # seconds; the clock counts hundredths


class BackgroundLoad:
    """Counts the cores that others use from now on. A child counts as ours once it has ended."""

    def __init__(self, root: Path = probe.ROOT) -> None:
        self._root = root
        self._began, self._busy, self._own = time.monotonic(), busy_seconds(root), own_seconds()

    def own(self) -> float:
        """Returns the CPU seconds of this process since the start."""
        return own_seconds() - self._own

    def cores(self, own: float | None = None) -> float:
        """Returns the average since the start; 0 if the system does not tell. `own`: CPU seconds that are not others'; None: of
        this process."""
        used = (busy_seconds(self._root) - self._busy) - (self.own() if own is None else own)
        return round(max(0.0, used) / max(time.monotonic() - self._began, 1e-9), 3)


def cores_now() -> float:
    """Returns the cores that others use while this process sleeps."""
    others = BackgroundLoad()
    time.sleep(LOOK)
    return others.cores()


def are_busy(cores: float) -> bool:
    """Whether that is more than the noise of every system."""
    return cores > max(BUSY_CORES, BUSY_SHARE * (os.cpu_count() or 1))


def busy_seconds(root: Path = probe.ROOT) -> float:
    """Returns the CPU seconds of the whole machine so far, with those that a hypervisor gave to other machines."""
    try:
        line = (root / "proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0.0
    ticks = [int(word) for word in line.split()[1:9]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


# ---- results ---------------------------------------------------------------------------------------------------------


Unit = Literal["FLOP/s", "B/s"]

LAUNCHES = 5
DTYPES: tuple[Dtype, Dtype] = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One measured rate: the median of the repeats (of a store: the settled rate), their range, and what was measured."""

    name: str
    unit: Unit
    value: float
    low: float
    high: float
    repeats: int
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The results. `figures` are those of the profile, by key."""

    figures: dict[str, Any] = field(default_factory=dict)
    stage_rates: tuple[StageRate, ...] = ()
    rates: tuple[Rate, ...] = ()
    notes: tuple[str, ...] = ()
    written_bytes: int = 0

    def __add__(self, other: Findings) -> Findings:
        return Findings(
            figures=self.figures | other.figures,
            stage_rates=self.stage_rates + other.stage_rates,
            rates=self.rates + other.rates,
            notes=self.notes + other.notes,
            written_bytes=self.written_bytes + other.written_bytes,
        )


def findings(**rates: Rate) -> Findings:
    """Makes findings from rates, each a figure of the profile by its key."""
    return Findings(figures={key: rate.value for key, rate in rates.items()}, rates=tuple(rates.values()))


def rate_of(name: str, unit: Unit, rates: list[float], note: str = "") -> Rate:
    """Takes the median of the rates of all repeats, and their range."""
    low, high, middle = min(rates), max(rates), statistics.median(rates)
    return Rate(name=name, unit=unit, value=middle, low=low, high=high, repeats=len(rates), note=note)


def each(amount: float, seconds: list[float]) -> list[float]:
    """Returns the rate at which `amount` was done in each of these times."""
    return [amount / taken for taken in seconds]


def repeated(action: Callable[[], object], seconds: float, device: torch.device | None = None) -> list[float]:
    """Times repeats until about `seconds` have passed; at least one."""
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while not durations or time.perf_counter() < end:
        durations.append(seconds_of(action, device))
    return durations


def seconds_of(action: Callable[[], object], device: torch.device | None = None) -> float:
    """Times one repeat; on a `device`, until the device has finished."""
    begin = time.perf_counter()
    action()
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)  # the launch alone takes nearly no time
    return time.perf_counter() - begin


def launch_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Returns the least seconds in which the host submits one repeat to a GPU that has nothing else to do. Returns 0 for a
    processor, which computes it meanwhile."""
    if device.type != "cuda":
        return 0.0
    durations = []
    for _ in range(1 + LAUNCHES):
        durations.append(seconds_of(action))
        seconds_of(lambda: None, device)  # until the device has finished
    return min(durations[1:])


def mean_seconds(action: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Returns the mean of the repeats of about `seconds`; at least one. A GPU is waited for only after the last of them: in a
    run, too, the next launch does not wait for the last one to end."""
    if device.type != "cuda":
        return statistics.fmean(repeated(action, seconds, device))
    repeats = max(1, round(seconds / max(seconds_of(action, device), 1e-6)))

    def together() -> None:
        for _ in range(repeats):
            action()

    return seconds_of(together, device) / repeats


# ---- turns -----------------------------------------------------------------------------------------------------------


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
    """The mean seconds of a repeat of each action in one turn, and the cores that others used meanwhile."""

    seconds: tuple[float, ...]
    others: float

    @property
    def is_quiet(self) -> bool:
        """Whether compute had the cores for itself."""
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
        turn_seconds = time.perf_counter() - begin - passed
        passed += turn_seconds
        quiet += turn_seconds * turns[-1].is_quiet
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
    rates = [
        rate_of(action.name, unit, [action.amount / turn.seconds[place] for turn in turns], note)
        for place, action in enumerate(actions)
    ]
    return rates if all(turn.is_quiet for turn in turns) else [replace(rate, value=rate.high) for rate in rates]


def left_out(turns: Sequence[Turn]) -> str:
    """Tells how many turns were disturbed; nothing where none was."""
    loud = sum(not turn.is_quiet for turn in turns)
    return f", {loud} of {len(turns)} turns disturbed by other programs" if loud else ""
