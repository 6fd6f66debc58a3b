"""How the chosen plan is held against others: by runs next to each other, not by the fastest of many by chance."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import prove_choice
import pytest
from planner.models import HARDWARE, SPEC, request
from proof.alternatives import NamedPlan, near_the_bound, placed
from proof.both_sides import Case
from proof.setting import Setting
from proof.verdicts import Progress

from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import search
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

CASE = Case(
    shape="50m", budget=1 << 30, steps=prove_choice.STEPS, warm_up=prove_choice.WARM_UP, throttle=(9, 9), timed=True, paced=True
)


def plans(count: int) -> list[dict[str, Any]]:
    return [
        {"name": f"plan {number}", "plan": f"{number}", "overrides": [], "seconds": 1.0, "micro": 1} for number in range(count)
    ]


class Machine:
    """Runs plan `number` in `seconds[number]` of its own time; every run the machine's speed is the next of `speeds`."""

    def __init__(self, seconds: list[float], speeds: list[float]) -> None:
        self.seconds, self.speeds, self.order = seconds, speeds, list[int]()
        self.keys: set[str] = set()

    def run(self, setting: Setting, case: Case) -> dict[str, Any]:
        number = int(case.plan)
        assert case.key not in self.keys, "a run that was measured before would be taken over"
        self.keys.add(case.key)
        speed = self.speeds[len(self.order) % len(self.speeds)]
        self.order.append(number)
        return {"steps": [{"seconds": self.seconds[number] / speed}] * case.steps, "speed": speed, "noisy": False}


def rows(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, turns: int = 3
) -> tuple[str, str, dict[str, list[float]]]:
    """Returns verdict, measured and ratios of the last row."""
    setting = Setting(
        work=tmp_path, shape="50m", micro=1, text=tmp_path, entry={}, text_name="x", progress=Progress(tmp_path / "state"),
        results=tmp_path,
    )  # fmt: skip
    monkeypatch.setattr(prove_choice, "alternatives", lambda setting, case, seed: (plans(len(machine.seconds)), case))
    monkeypatch.setattr(prove_choice, "our_run", machine.run)
    last = prove_choice.case_rows(setting, 1, CASE, 7, turns)[-1]
    return last.verdict, last.measured, cast("dict[str, list[float]]", last.values["ratios"])


def test_the_fastest_others_run_beside_the_chosen_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([10.0, 12.0, 9.9, 11.0, 13.0, 9.8, 14.0, 15.0, 16.0, 17.0, 18.0], [1.0])
    verdict, measured, ratios = rows(machine, tmp_path, monkeypatch)
    assert (verdict, measured) == ("pass", f"{10 / 9.8:.3f}")
    assert ratios == {"plan 5": [pytest.approx(10 / 9.8)] * 3, "plan 2": [pytest.approx(10 / 9.9)] * 3}
    assert machine.order[:13] == [0, 1, 3, 5, 7, 9, 0, 2, 4, 6, 8, 10, 0]
    assert machine.order[13:] == [0, *[5, 0, 2, 0] * 3]


def test_a_plan_that_is_clearly_faster_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, measured, _ = rows(Machine([10.0, *[12.0] * 9, 9.0], [1.0]), tmp_path, monkeypatch)
    assert (verdict, measured) == ("FAIL", f"{10 / 9:.3f}")


def test_a_machine_that_slows_down_favours_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares ten equals, some of them met by a slower machine than others: none of them is faster."""
    slowing = [1.0 - 0.01 * number for number in range(40)]
    verdict, measured, _ = rows(Machine([10.0] * 11, slowing), tmp_path, monkeypatch)
    assert verdict == "pass" and float(measured) == pytest.approx(1.0, abs=0.01)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Stands for what rivals are looked for with, of all that a run is prepared with."""

    model: ModelSpec
    hardware: HardwareProfile
    plan: Plan
    request: PlanRequest


def test_a_rival_has_the_room_that_the_chosen_plan_had() -> None:
    """Gives of the disk what the run may have, not all that is free: the search has no more either."""
    roomy = request(weights="ssd", states="ssd", boundaries="cpu", defer=0.0)
    chosen = search(SPEC, HARDWARE, roomy).best
    prepared = Planned(model=SPEC, hardware=HARDWARE, plan=chosen.plan, request=roomy)
    best = NamedPlan(name="chosen", prepared=cast("Any", prepared), candidate=chosen.candidate)
    assert placed(best, chosen.candidate, "the same") is not None
    assert near_the_bound(best, random.Random(0)) != []
    tight = replace(best, prepared=cast("Any", replace(prepared, request=replace(roomy, ssd_budget=1))))
    assert placed(tight, chosen.candidate, "the same") is None
    assert near_the_bound(tight, random.Random(0)) == []
