"""Shows one optimizer step of a plan: seconds by resource, what compute waits for, and how long the run takes."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.core.units import brief, count, gb
from fuyou_cli.planner.run_planner import FastRegion

from .theme import RESOURCE_STYLE, Symbols, bar, column, heading, ordered, pairs, percent, rate, ruled, show, some, speed, tera

WIDE = 96  # columns; wider consoles get long bars
_CAUSES = 4  # most causes of waiting that are named
_NOTHING = 1e-4  # share of a step; shorter waits are not shown


def show_step(console: Console, facts: RunFacts, shapes: Symbols) -> None:
    """Prints the simulated step: a row per resource, then speed, waits and the length of the run."""
    note = "predicted from assumed rates" if facts.hardware.measured == "assumed" else "predicted"
    note += " with sustained drive rates" if facts.plan.sustained else ""
    heading(console, "One optimizer step", f"{note}; resources overlap")
    predicted, step = facts.plan.predicted, facts.plan.predicted.step_seconds
    content = ruled(shapes)
    column(content, "resource")
    for title in ("work", "rate", "takes", "share"):
        column(content, title, right=True)
    column(content)
    width = 20 if console.width >= WIDE else 6
    for name in ordered(list(predicted.seconds)):
        if name == "dram" and facts.plan.device == "cpu" and name != predicted.bottleneck:
            continue  # compute there moves bytes too, which are not counted
        seconds = predicted.seconds[name]
        drawn = Text(bar(seconds / step if step > 0 else 0, width, shapes), style=RESOURCE_STYLE.get(name, "blue"))
        if name == predicted.bottleneck:
            drawn.append("  bottleneck", style="bold default")
        content.add_row(Text(name), *_work(name, seconds, facts), brief(seconds), percent(seconds, step), drawn)
    show(console, content, indent=2)
    pairs(console, [*_parts(facts, shapes), *_drives(facts), *run_length(facts), *evaluating(facts)])


def _work(name: str, seconds: float, facts: RunFacts) -> tuple[str, str]:
    """Returns amount and rate of one resource. On device cpu, compute and updates share one resource, the cores."""
    predicted, hardware, stored = facts.plan.predicted, facts.hardware, facts.model.updated_parameters
    if seconds <= 0:
        return "", ""
    if name in ("compute", "cpu"):
        return f"{tera(predicted.compute_flops)} TFLOP", f"{tera(predicted.compute_flops / seconds)} TFLOPS"
    if name == "update":
        return f"{count(stored)} params", f"{count(stored / seconds)} params/s"
    moved = {
        "ssd read": predicted.read_per_step,
        "ssd write": predicted.written_per_step,
        "h2d": seconds * hardware.h2d,
        "d2h": seconds * hardware.d2h,
        "dram": seconds * hardware.dram,
    }[name]
    return gb(moved), rate(moved / seconds)


def _parts(facts: RunFacts, shapes: Symbols) -> list[tuple[str, str]]:
    """Returns speed, forward and backward, and what compute waits for; less for a plan that was not simulated."""
    predicted, step = facts.plan.predicted, facts.plan.predicted.step_seconds
    rows = []
    if step > 0:
        counted = "active parameters" if facts.model.inactive_parameters else "parameters"
        six = f"6N: 6 {shapes.times} {counted} {shapes.times} tokens/s"
        six += f", frozen ones 4 {shapes.times}" if facts.model.frozen_parameters else ""
        rows.append(("speed", f"{speed(facts.tokens / step)} tokens/s, {tera(predicted.step_flops / step)} TFLOPS ({six})"))
    if 0 < predicted.forward_seconds < step:
        backward = brief(step - predicted.forward_seconds)
        what = "head and backward, twice:" if facts.plan.norm_first else "head and backward"
        rows.append(("step", f"{brief(step)}: forward {brief(predicted.forward_seconds)}, {what} {backward}"))
        rows.append(("waiting", waiting_for(predicted.stalls, step)))
    return rows


def waiting_for(stalls: dict[str, float], step: float) -> str:
    """Formats waits as "compute waits 1.8 s, 2% of the step: 1.2 s for ..., 0.5 s for ..., 0.1 s for 2 other things"."""
    causes = sorted(((seconds, cause) for cause, seconds in stalls.items() if seconds > _NOTHING * step), reverse=True)
    if not causes:
        return "compute never waits"
    named = [f"{brief(seconds)} for {cause}" for seconds, cause in causes[:_CAUSES]]
    if rest := causes[_CAUSES:]:
        named.append(f"{brief(sum(seconds for seconds, _ in rest))} for {some(len(rest), 'other thing')}")
    total = sum(stalls.values())
    return f"compute waits {brief(total)}, {percent(total, step)} of the step: {', '.join(named)}"


def _drives(facts: RunFacts) -> list[tuple[str, str]]:
    """Tells how long a step takes while the drives keep their first speed, and after that."""
    region = facts.region
    if region is None:
        return []
    both = f"a step takes {brief(region.first)} at first, then {brief(region.later)}"
    if not region.size:
        return [("drives", f"{both}; the point where they slow down is not known")]
    lasts = f"the first {gb(region.size)} of writes ({_lasting(region)}) are fast"
    if facts.plan.sustained:
        unknown = "" if facts.left else "; the run's length is not known, so a long run is planned"
        return [("drives", f"{both}: {lasts}{unknown}")]
    return [("drives", f"{lasts}; {'the run stays within them' if facts.left else both}")]


def _lasting(region: FastRegion) -> str:
    steps = f"{region.steps:,.0f}" if region.steps >= 10 else f"{region.steps:,.2g}"
    return f"{steps} steps, {brief(region.steps * region.first)}"


def evaluating(facts: RunFacts) -> list[tuple[str, str]]:
    """Tells what an evaluation takes, and all of them, as far as that is known; then what samples and the best weights take."""
    rows = _evaluating(facts)
    if facts.best_bytes:
        rows.append(("best", f"{gb(facts.best_bytes)} written to output_dir/best wherever a loss is the lowest so far"))
    if (cost := facts.sampling) is not None:
        most = f"{cost.passes:,} passes over the weights at most, about {brief(cost.seconds)}"
        rows.append(("samples", f"{some(cost.prompts, 'prompt')} at each evaluation: {most}"))
    return rows


def _evaluating(facts: RunFacts) -> list[tuple[str, str]]:
    cost = facts.evaluation
    if cost is None:
        return []
    if cost.seconds is None or cost.rows is None or cost.passes is None:
        return [("evaluating", f"{brief(cost.pass_seconds)} for {some(cost.pass_rows, 'row')}, forward alone")]
    passes = f"{cost.passes:,} pass{'es' * (cost.passes != 1)}"
    each = f"{brief(cost.seconds)} for {some(cost.rows, 'row')} in {passes}, forward alone"
    if cost.times is None or cost.run_share is None:
        return [("evaluating", each)]
    return [("evaluating", f"{each}; {some(cost.times, 'time')}, {percent(cost.run_share, 1.0)} of the run")]


def run_length(facts: RunFacts) -> list[tuple[str, str]]:
    """Tells how long the remaining steps take, if their number is known."""
    saved = "" if facts.done is None else f"resumes after step {facts.done:,}"
    if facts.left is None or facts.run_seconds is None:
        return [("run", saved)] if saved else []
    takes = f"{some(facts.left, 'step')} in {brief(facts.run_seconds)}, loading and saving not counted"
    return [("run", "; ".join(filter(None, (saved, takes if facts.left else "all steps are done"))))]
