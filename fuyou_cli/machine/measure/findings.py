"""Holds the results of a measurement: rates with their spread for people, and figures for the machine's profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fuyou_cli.spec.hardware import StageRate
from fuyou_cli.spec.model import Dtype

if TYPE_CHECKING:
    import torch

Unit = Literal["FLOP/s", "B/s"]

LAUNCHES = 5
DTYPES: tuple[Dtype, Dtype] = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Holds one measured rate: the median of the repeats (of a store: the settled rate), their range, and what was measured."""

    name: str
    unit: Unit
    value: float
    low: float
    high: float
    repeats: int
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Holds the results. `figures` are those of the profile, by key."""

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


def found(**rates: Rate) -> Findings:
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
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        taken.append(seconds_of(action, device))
    return taken


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
    taken = []
    for _ in range(1 + LAUNCHES):
        taken.append(seconds_of(action))
        seconds_of(lambda: None, device)  # until the device has finished
    return min(taken[1:])


def mean_seconds(action: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Returns the mean of the repeats of about `seconds`; at least one. A GPU is waited for only after the last of them: in a
    run, too, the next launch does not wait for the last one to end."""
    if device.type != "cuda":
        return statistics.fmean(repeated(action, seconds, device))
    repeats = repeats_in(seconds, seconds_of(action, device))

    def together() -> None:
        for _ in range(repeats):
            action()

    return seconds_of(together, device) / repeats


def repeats_in(seconds: float, one: float) -> int:
    """Returns how many repeats of `one` seconds each take about `seconds`; at least one."""
    return max(1, round(seconds / max(one, 1e-6)))
