"""The first five lines of a plan: whether it fits, its step, what binds it, what it wears, and what to change first."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.room import Room, plan_problems
from fuyou_cli.advice.wear import wear_of
from fuyou_cli.core.printable import one_line
from fuyou_cli.core.units import brief, gib
from fuyou_cli.machine.background_load import are_busy
from fuyou_cli.machine.origins import RatedBy, origins_of
from fuyou_cli.spec.hardware import SUSTAINED_RATES, HardwareProfile
from fuyou_cli.spec.plan import Plan

from .step import run_seconds, tokens_per_second
from .theme import Symbols, pairs, percent, say
from .wear import wear_in_brief, written

_CLOSE = 0.9  # of the busiest resource's seconds: one that is nearly as busy decides as well
_BUSY = 0.9  # of a step: compute that works so much of it leaves little to gain
_DECIDED_BY = {  # resource -> the profile's rates behind it
    "compute": ("matmul_flops", "stage_rates"),
    "cpu": ("matmul_flops", "stage_rates", "adamw"),
    "update": ("adamw",),
    "ssd read": ("store_read", "store_read_mixed"),
    "ssd write": ("store_write", "store_read_mixed"),
    "h2d": ("h2d",),
    "d2h": ("h2d",),
}


def show_answer(console: Console, plan: Plan, hardware: HardwareProfile, room: Room, facts: RunFacts, shapes: Symbols) -> None:
    """Five lines on a console of 100 columns; further reasons why a run does not fit follow."""
    problems = plan_problems(plan, room)
    say(console, _verdict(plan, room, facts, problems))
    wear = wear_of(hardware, written(plan, room, facts))
    worn = wear is not None and not wear.accepted
    rows = [
        ("step", _step(plan, hardware, facts, shapes)),
        ("bottleneck", _bottleneck(plan)),
        ("wear", wear_in_brief(plan, hardware, room, facts)),
        ("first", first_change(plan, hardware, facts, fits=not problems, worn=worn)),
    ]
    pairs(console, rows)
    for problem in problems[1:]:
        say(console, f"also: {problem}")


def _verdict(plan: Plan, room: Room, facts: RunFacts, problems: list[str]) -> Text:
    if problems:
        return Text.assemble(("does not fit", "bold red"), f": {one_line(problems[0])}")
    margin = f"RAM {gib(plan.predicted.cpu_peak)} of {gib(plan.cpu_budget)}"
    if room.gpu is not None:
        margin += f", GPU {gib(plan.predicted.gpu_peak)} of {gib(room.gpu)}"
    fits = Text.assemble(("fits", "bold green"), f": {margin}")
    return fits.append("; cannot be trained yet", "bold red") if facts.refusal else fits


def _step(plan: Plan, hardware: HardwareProfile, facts: RunFacts, shapes: Symbols) -> str:
    seconds = plan.predicted.step_seconds
    known = [hardware.measured] if hardware.measured in ("assumed", "described") else []
    rates = ["sustained"] * plan.sustained + known
    parts = [brief(seconds), tokens_per_second(plan), f"at {', '.join(rates)} rates" if rates else ""]
    if facts.left and seconds > 0:
        some = f"{facts.left:,} step{'s' * (facts.left != 1)}"
        parts.insert(2, f"{some} in {brief(run_seconds(plan, facts.left, facts.region))}")
    return f" {shapes.dot} ".join(filter(None, parts))


def _bottleneck(plan: Plan) -> str:
    predicted = plan.predicted
    name, step = predicted.bottleneck, predicted.step_seconds
    said = f"{name}, {percent(predicted.seconds.get(name, 0.0), step)} of the step"
    waits = sum(predicted.stalls.values())
    if not predicted.stalls:
        return said
    if waits < 0.001 * step:
        return f"{said}; compute hardly waits"
    worst = max(predicted.stalls, key=lambda cause: predicted.stalls[cause])
    who = "it" if name == "compute" else "compute"
    return f"{said}; {who} waits {brief(waits)} ({percent(waits, step)}), most for {worst}"


def first_change(plan: Plan, hardware: HardwareProfile, facts: RunFacts, *, fits: bool, worn: bool) -> str:
    """What helps most, as far as anything is known to; behind it how to run what fits as it is."""
    if facts.changes:
        best = facts.changes[0]
        helps = "spares the drives" if fits else "fits"
        return f"add {' '.join(best.overrides)}: {helps}, a step of {brief(best.plan.predicted.step_seconds)}"
    if facts.changes is not None:
        return f"no change of one or two keys is enough: {facts.tried} plans were made"
    if facts.advice and (worn or not fits):
        return facts.advice
    if not fits:
        return "less per step, or more memory or disk"
    if facts.refusal:
        return f"another model; this one cannot be trained yet: {facts.refusal}"
    if facts.left == 0:
        return "nothing: no step is left to do"
    if any("a run would be refused" in note for note in facts.notes):
        return f"{_faster(plan, hardware, facts)}; a run would still be refused, see the notes below"
    run = f". Run: {facts.command}" if facts.command else ""
    return _faster(plan, hardware, facts) + run


def _faster(plan: Plan, hardware: HardwareProfile, facts: RunFacts) -> str:
    even = facts.even
    if hardware.measured == "assumed":
        return f"measure: `fuyou bench --dir {facts.folder}`"
    if rates := assumptions_that_decide(plan, hardware):
        return f"measure that machine: the rates that decide are assumptions ({'; '.join(rate.what for rate in rates)})"
    if are_busy(hardware.others_cores):
        others = f"others used {hardware.others_cores:.1f} cores while it was measured"
        return f"measure again on an idle machine: `fuyou bench --dir {facts.folder}` ({others})"
    if even is not None and even.below and even.tokens is not None:
        return f"train.batch_size={even.batch}: compute hides the store from {even.tokens:,} tokens per step on"
    if plan.predicted.bottleneck in ("compute", "cpu"):
        busy = plan.predicted.seconds.get(plan.predicted.bottleneck, 0.0) / (plan.predicted.step_seconds or 1.0)
        if busy >= _BUSY:
            return "nothing: compute is busy nearly all the time"
    if even is not None and even.below:
        return "more RAM or faster drives: compute waits for the store at every batch that was tried"
    return "nothing known: `fuyou plan --compare` shows other choices"


def assumptions_that_decide(plan: Plan, hardware: HardwareProfile) -> tuple[RatedBy, ...]:
    """Rates that nobody measured, of the busiest resource of a described machine and of those nearly as busy."""
    if hardware.measured != "described":
        return ()
    seconds = plan.predicted.seconds
    most = max(seconds.values(), default=0.0)
    keys = {key for name, taken in seconds.items() if taken >= _CLOSE * most for key in _DECIDED_BY.get(name, ())}
    if plan.sustained and any(key.startswith("store_") for key in keys):
        keys = {key for key in keys if not key.startswith("store_")} | set(SUSTAINED_RATES)
    return tuple(rate for rate in origins_of(hardware) if rate.origin == "assumption" and keys & set(rate.keys))
