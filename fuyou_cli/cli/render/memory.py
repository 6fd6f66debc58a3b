"""Memory of a plan as time goes on: the peak of every phase, and over one simulated step what of each tier is in use."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuyou_cli.core.units import brief, gib
from fuyou_cli.planner.phases import evaluation_peak, phase_peaks
from fuyou_cli.planner.timeline import Held, Timeline
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan, Tier

from .theme import Symbols, bar, column, heading, percent, ruled, say, show

TIER_TITLE: dict[Tier, str] = {"gpu": "GPU", "cpu": "RAM", "ssd": "SSD"}
_CHART, _NARROW = 24, 8  # columns
_WIDE = 96  # of the console, from which the chart is long
MOST_POINTS = 200  # of a curve as data


def show_phase_peaks(console: Console, plan: Plan, shapes: Symbols) -> None:
    """RAM of the whole process, phase by phase."""
    heading(console, "RAM peak per phase", f"whole process, budget {gib(plan.cpu_budget)}")
    content = Table.grid(padding=(0, 2, 0, 0))
    for right in (False, True, True, False):
        column(content, right=right)
    for phase, peak in phase_peaks(plan).items():
        over = peak > plan.cpu_budget
        drawn = Text(bar(peak / plan.cpu_budget if plan.cpu_budget else 1, 24, shapes), style="red" if over else "cyan")
        if over:
            drawn.append("  over budget")
        content.add_row(Text(phase), gib(peak), percent(peak, plan.cpu_budget), drawn)
    show(console, content, indent=2)


def with_evaluation(plan: Plan, model: ModelSpec) -> dict[str, int]:
    """Peaks by phase in the order of a run, evaluation behind training."""
    peaks = {}
    for phase, peak in phase_peaks(plan).items():
        peaks[phase] = peak
        if phase == "train":
            peaks["eval"] = evaluation_peak(plan, model)
    return peaks


def show_memory(console: Console, plan: Plan, model: ModelSpec, step: Timeline, shapes: Symbols) -> None:
    """One row per tier of a step whose memory was looked at."""
    heading(console, "Memory over one step", "what holds something of what is planned; darker is more")
    content = ruled(shapes)
    for title in ("tier", "planned", "peak", "at"):
        column(content, title, right=title in ("planned", "peak"))
    column(content)
    for tier in tiers(plan):
        planned, highest = planned_for(plan, tier), step.peak(tier)
        if highest is None:
            continue
        at = f"{brief(highest.at - step.begin)}, {during(step, model, highest)}"
        levels = curve(step, tier, _CHART if console.width >= _WIDE else _NARROW)
        content.add_row(TIER_TITLE[tier], gib(planned), gib(highest.total(tier)), Text(at), _shaded(levels, planned, shapes))
    show(console, content, indent=2)
    say(console, "A run takes what is planned of RAM before its first step.", style="dim", indent=2)


def tiers(plan: Plan) -> tuple[Tier, ...]:
    return ("cpu", "ssd") if plan.device == "cpu" else ("gpu", "cpu", "ssd")


def planned_for(plan: Plan, tier: Tier) -> int:
    """The sum of the plan's lines."""
    return sum(line.size for line in plan.memory if line.tier == tier)


def during(step: Timeline, model: ModelSpec, moment: Held) -> str:
    """The visit that computes then, or is about to."""
    visits = [done for done in step.work if done.parts[0][0] == "compute" and done.end > moment.at]
    return f"{visits[0].what} of {model.stages[visits[0].stage].name}" if visits else "at the end"


def curve(step: Timeline, tier: Tier, points: int) -> list[int]:
    """The most bytes held in each of so many equal parts of the step."""
    held = [0] * points
    ends = [*(moment.at for moment in step.memory[1:]), step.begin + step.step_seconds]
    for moment, end in zip(step.memory, ends, strict=True):
        first, last = (int((at - step.begin) / step.step_seconds * points) for at in (moment.at, end))
        for place in range(max(first, 0), min(last, points - 1) + 1):
            held[place] = max(held[place], moment.total(tier))
    return held


def memory_json(plan: Plan, model: ModelSpec, step: Timeline) -> dict[str, object]:
    """By tier: planned and peak bytes, the second of the peak and what was held then by kind, and the curve."""
    data: dict[str, object] = {}
    for tier in tiers(plan):
        highest = step.peak(tier)
        if highest is None:
            continue
        data[tier] = {
            "planned": planned_for(plan, tier),
            "peak": highest.total(tier),
            "at": highest.at - step.begin,
            "during": during(step, model, highest),
            "held": {what: size for (where, what), size in highest.held.items() if where == tier and size},
            "curve": curve(step, tier, min(MOST_POINTS, len(step.memory))),
        }
    return data


def _shaded(levels: Sequence[int], planned: int, shapes: Symbols) -> Text:
    top = len(shapes.shades) - 1
    return Text("".join(shapes.shades[round(level / planned * top) if planned else 0] for level in levels), style="cyan")
