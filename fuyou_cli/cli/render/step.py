"""One optimizer step of a plan: seconds by resource, what compute waits for, speed, and the batch that hides the store."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.break_even import BreakEven
from fuyou_cli.core.units import brief, count, gb
from fuyou_cli.planner.lasting import FastRegion
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .theme import RESOURCE_STYLE, Symbols, bar, column, heading, ordered, pairs, percent, rate, ruled, say, show, tera

WIDE = 96  # columns from which bars are long, and what belongs together is on one line
_CAUSES = 4  # of waiting, told one by one
_NOTHING = 1e-4  # of a step: a wait that is not worth a word


def show_step(
    console: Console,
    plan: Plan,
    model: ModelSpec,
    hardware: HardwareProfile,
    shapes: Symbols,
    *,
    steps: int | None,
    done: int | None = None,
    even: BreakEven | None,
    region: FastRegion | None = None,
) -> None:
    """The simulated step. `steps` that the run has to do, where that is known, and those that are `done` of a saved one;
    `region` of drives that slow down."""
    note = "predicted from assumed rates" if hardware.measured == "assumed" else "predicted"
    note += " at what the drives sustain" if plan.sustained else ""
    heading(console, "One optimizer step", f"{note}; resources work at the same time")
    _resources(console, plan, model, hardware, shapes)
    say(console, _speed(plan, model, shapes), style="bold", indent=2)
    takes = [*_drives(plan, steps, region), *length(plan, steps, done, region)]
    pairs(console, [*_parts(plan, shapes), *takes, *_break_even(even)])


def _resources(console: Console, plan: Plan, model: ModelSpec, hardware: HardwareProfile, shapes: Symbols) -> None:
    predicted, step = plan.predicted, plan.predicted.step_seconds
    content = ruled(shapes)
    column(content, "resource")
    for title in ("work", "rate", "takes", "share"):
        column(content, title, right=True)
    column(content)
    width = 20 if console.width >= WIDE else 6
    for name in ordered(list(predicted.seconds)):
        seconds = predicted.seconds[name]
        work, speed = _work(name, seconds, plan, model, hardware)
        drawn = Text(bar(seconds / step if step > 0 else 0, width, shapes), style=RESOURCE_STYLE.get(name, "blue"))
        if name == predicted.bottleneck:
            drawn.append("  bottleneck", style="bold default")
        content.add_row(Text(name), work, speed, brief(seconds), percent(seconds, step), drawn)
    show(console, content, indent=2)


def _work(name: str, seconds: float, plan: Plan, model: ModelSpec, hardware: HardwareProfile) -> tuple[str, str]:
    """Amount and speed of one resource: floating-point work of compute, bytes of the ssd, parameters of the update. On
    device cpu compute and updates are one resource, the cores."""
    predicted = plan.predicted
    if seconds <= 0:
        return "", ""
    if name in ("compute", "cpu"):
        return f"{tera(predicted.compute_flops)} TFLOP", f"{tera(predicted.compute_flops / seconds)} TFLOPS"
    if name in ("ssd read", "ssd write"):
        moved = predicted.read_per_step if name == "ssd read" else predicted.written_per_step
        return gb(moved), rate(moved / seconds)
    if name == "update":
        return f"{count(model.stored_parameters)} params", f"{count(model.stored_parameters / seconds)} params/s"
    if name in ("h2d", "d2h"):
        speed = hardware.h2d if name == "h2d" else hardware.d2h
        return gb(seconds * speed), rate(speed)
    return "", ""


def _speed(plan: Plan, model: ModelSpec, shapes: Symbols) -> str:
    predicted, step = plan.predicted, plan.predicted.step_seconds
    parts = [f"step {brief(step)}"]
    if step > 0:
        parts.append(tokens_per_second(plan))
        counted = "active parameters" if model.inactive_parameters else "parameters"
        parts.append(f"{tera(predicted.step_flops / step)} TFLOPS (6N: 6 {shapes.times} {counted} {shapes.times} tokens/s)")
    return f" {shapes.dot} ".join([*parts, f"bottleneck: {predicted.bottleneck}"])


def tokens_per_second(plan: Plan) -> str:
    step, tokens = plan.predicted.step_seconds, plan.numerics.batch_size * plan.numerics.max_seq_len
    if step <= 0:
        return ""
    return f"{tokens / step:,.3g} tokens/s" if tokens / step < 1000 else f"{tokens / step:,.0f} tokens/s"


def _parts(plan: Plan, shapes: Symbols) -> list[tuple[str, str]]:
    """Forward and backward, and what compute waits for; nothing of a plan that was not simulated."""
    predicted = plan.predicted
    if not 0 < predicted.forward_seconds < predicted.step_seconds:
        return []
    backward = predicted.step_seconds - predicted.forward_seconds
    timed = f"forward {brief(predicted.forward_seconds)} {shapes.dot} head and backward {brief(backward)}"
    return [("of it", timed), ("waiting", waiting_for(predicted.stalls, predicted.step_seconds))]


def waiting_for(stalls: dict[str, float], step: float) -> str:
    """ "compute waits 1.8 s, 2% of the step: 1.2 s for ..., 0.5 s for ..., less for 2 others"."""
    causes = sorted(((seconds, cause) for cause, seconds in stalls.items() if seconds > _NOTHING * step), reverse=True)
    if not causes:
        return "compute never waits"
    total = sum(stalls.values())
    named = [f"{brief(seconds)} for {cause}" for seconds, cause in causes[:_CAUSES]]
    rest = causes[_CAUSES:]
    if len(rest) == 1:
        named.append(f"{brief(rest[0][0])} for {rest[0][1]}")
    elif rest:
        named.append(f"{brief(sum(seconds for seconds, _ in rest))} for {len(rest)} other things")
    return f"compute waits {brief(total)}, {percent(total, step)} of the step: {', '.join(named)}"


def _drives(plan: Plan, steps: int | None, region: FastRegion | None) -> list[tuple[str, str]]:
    """What a step takes while the drives are as fast as at first, and after that."""
    if region is None:
        return []
    both = f"a step takes {brief(region.first)} at first, then {brief(region.later)}"
    if not region.size:
        return [("drives", f"{both}: how much they take before they slow down is not known")]
    lasts = f"the fast region of {gb(region.size)} takes {_some(region.steps)}, {brief(region.steps * region.first)}"
    if plan.sustained:
        longer = "" if steps else "; how long the run is nobody knows yet: it is planned as one that goes on after that"
        return [("drives", f"{both}: {lasts}; what idle time frees of it is not counted{longer}")]
    within = "the run stays within it; " if steps else ""
    return [("drives", f"{lasts}: {within}past it {f'a step takes {brief(region.later)}' if within else both}")]


def _some(steps: float) -> str:
    return "1 step" if steps == 1 else f"{steps:,.0f} steps" if steps >= 10 else f"{steps:,.2g} steps"


def run_seconds(plan: Plan, steps: int, region: FastRegion | None) -> float:
    """Of all steps; drives that slow down are fast for the first ones."""
    return region.seconds(steps) if plan.sustained and region is not None else steps * plan.predicted.step_seconds


def length(plan: Plan, steps: int | None, done: int | None, region: FastRegion | None) -> list[tuple[str, str]]:
    """Hours of the steps that are to be done, where their number is known."""
    saved = "" if done is None else f"goes on after step {done:,}; "
    if steps == 0:
        return [("run", f"{saved}no step is left to do")]
    if steps is None or plan.predicted.step_seconds <= 0:
        return [("run", saved.removesuffix("; "))] if saved else []
    takes = f"take{'s' * (steps == 1)} {brief(run_seconds(plan, steps, region))}"
    return [("run", f"{saved}{_some(steps)} {takes}, loading and saving not counted")]


def _break_even(even: BreakEven | None) -> list[tuple[str, str]]:
    """From which batch on the store is hidden, and a word where the recipe's is smaller."""
    if even is None:
        return []
    if not even.on_ssd:
        return [("batch", "nothing of a step is on the ssd: no batch waits for it")]
    if even.most is not None:
        smaller = f"hides the store at up to {even.most:,} tokens per step (train.batch_size={even.batch})"
        return [("batch", f"warning: compute waits for the store; it {smaller}, this recipe has {even.now:,}")]
    if even.tokens is None:
        beyond = "; hardly more fits" if even.limited else ""
        tried = f"at every batch that was tried, up to {even.tried:,} tokens per step{beyond}"
        return [("batch", f"warning: compute waits for the store {tried}")]
    known = f"compute hides the store from {even.tokens:,} tokens per step on"
    if even.below:
        return [("batch", f"warning: {known} (train.batch_size={even.batch}); this recipe has {even.now:,}")]
    return [("batch", f"{known}; this recipe has {even.now:,}")]
