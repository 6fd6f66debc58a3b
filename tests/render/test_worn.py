"""Drives that say themselves how worn they are, in a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.room import Room
from fuyou_cli.cli.render.plan import show_plan
from fuyou_cli.spec.hardware import Drive, HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

Printer = Callable[..., tuple[Console, Callable[[], str]]]


def test_a_plan_says_which_drive_is_near_its_end(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    """Also of one that nobody knows the rating of."""
    console, printed = printer(120)
    worn, fresh = (Drive(model=f"No Name {percent}", capacity=10**12, percent_used=percent) for percent in (95, 40))
    facts = RunFacts(steps=10)
    show_plan(console, plan, model, replace(hardware, drives=(worn, fresh, worn)), room, verbose=False, facts=facts)
    text = printed()
    assert text.count("warning: No Name 95 says that 95 % of its endurance is used") == 1
    assert "No Name 40" not in text
