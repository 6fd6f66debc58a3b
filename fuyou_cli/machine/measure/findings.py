"""What a measurement finds: rates with their spread for people, and figures for the machine's profile."""

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

DTYPES: tuple[Dtype, Dtype] = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One measured rate: the median of the repeats (of a store: the settled rate of its passes), the range they or stretches of
    them spread over, and what it was measured on."""

    name: str
    unit: Unit
    value: float
    low: float
    high: float
    repeats: int
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was found. `figures` are of the profile, by key."""

    figures: dict[str, Any] = field(default_factory=dict)
    stage_rates: tuple[StageRate, ...] = ()
    rates: tuple[Rate, ...] = ()
    notes: tuple[str, ...] = ()
    written_bytes: int = 0

    def __add__(self, other: Found) -> Found:
        return Found(
            figures=self.figures | other.figures,
            stage_rates=self.stage_rates + other.stage_rates,
            rates=self.rates + other.rates,
            notes=self.notes + other.notes,
            written_bytes=self.written_bytes + other.written_bytes,
        )


def found(**rates: Rate) -> Found:
    """Makes a Found of rates, each a figure of the profile by its key."""
    return Found(figures={key: rate.value for key, rate in rates.items()}, rates=tuple(rates.values()))


def rate_of(
    name: str, unit: Unit, rates: list[float], note: str = "", *, middle: Callable[[list[float]], float] = statistics.median
) -> Rate:
    """Takes the median of the rates of all repeats (or another `middle` of them), and their range."""
    return Rate(
        name=name, unit=unit, value=middle(rates), low=min(rates), high=max(rates), repeats=len(rates), note=note
    )  # fmt: skip


def each(amount: float, seconds: list[float]) -> list[float]:
    """Returns the rate at which `amount` was done in each of these times."""
    return [amount / taken for taken in seconds]


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Times one repeat."""
    import torch

    begin = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the launch alone takes no time
    return time.perf_counter() - begin
