"""What the GPU tier brings, clipped: plans of the paper's settings with and without it, priced by the same costs.

Without it, plans do what they could before it was built: tensors of the whole batch pass through the host, weights may rest on
the GPU but no states, boundaries or outputs, a step is one sweep, and no first backward measures the norm. The search is that
of today, not of then."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest import mock

from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import SearchResult, search_timed
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .ours import CLIPPED, Case, plan_of

GAIN, SETTINGS = 1.05, 20  # asked: so much faster in so many settings
SAME = 0.9999  # a plan that is no slower; steps are simulated, and rounded


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Tokens per second of a setting."""

    model: str
    batch: int
    where: str
    without: float
    tokens: float

    @property
    def ratio(self) -> float:
        return self.tokens / self.without


def without_tier(model: ModelSpec, request: PlanRequest) -> PlanRequest:
    """Returns the request for a plan that has of the GPU's memory what compute and weights take."""
    nothing = tuple(() for _ in model.stages)
    kept_there = nothing if request.kept_there is None else request.kept_there
    return replace(request, batch_on_device=False, device_states=(), kept_there=kept_there, sweeps=1, norm_first=False)


def _search(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> tuple[SearchResult, Plan]:
    return search_timed(model, hardware, without_tier(model, request))


def gain_of(case: Case) -> Gain:
    """Plans a setting twice. Raises SystemExit if one of the plans does not fit."""
    clipped, tokens = replace(case, settings=(CLIPPED,)), dict[bool, float]()
    for limited in (True, False):
        with mock.patch("fuyou_cli.planner.run_planner.search_timed", _search) if limited else nullcontext():
            found = plan_of(clipped, alone=True)
        if found.problem:
            raise SystemExit(f"{case.model}, {case.where}: {found.problem}")
        tokens[limited] = found.tokens
    return Gain(model=case.model, batch=case.batch, where=case.where, without=tokens[True], tokens=tokens[False])


def gains(cases: Sequence[Case], say: Callable[[str], None]) -> Iterator[Gain]:
    """Returns the gains in the order of the cases. Plans them with a process per core."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(gain_of, cases):
            say(f"planned twice: {found.model}, {found.batch} sequences, {found.where}")
            yield found


def holds(found: Sequence[Gain]) -> bool:
    """Tells whether enough settings gain enough, and none is slower."""
    return sum(gain.ratio >= GAIN for gain in found) >= SETTINGS and all(gain.ratio >= SAME for gain in found)
