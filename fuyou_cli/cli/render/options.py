"""Tables of plans beside the plan: choices that lost, and changes of the recipe that help."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fuyou_cli.advice.compare import Comparison, Row
from fuyou_cli.advice.planning import Outcome
from fuyou_cli.core.units import brief, gb, gib
from fuyou_cli.spec.plan import Plan

from .theme import Symbols, column, heading, ruled, say, show, speed


def show_comparison(console: Console, compared: Comparison, shapes: Symbols) -> None:
    """The plan, and what each other value of a knob would have cost."""
    heading(console, "Other choices", "each planned and simulated: the plan with one thing different")
    content = ruled(shapes)
    column(content, "choice", wrap=True)
    for title in ("step", "tokens/s", "RAM", "ssd a step"):
        column(content, title, right=True)
    column(content, "lost by", wrap=True)
    content.add_row(Text(compared.best.words), *_figures(compared.best.plan), "planned", style="bold")
    content.add_section()
    for row in compared.others:
        content.add_row(Text(row.words), *_figures(row.plan), Text(why_lost(row)))
    show(console, content, indent=2)
    rest = [f"{compared.left_out} more like these are left out"] if compared.left_out else []
    rest += [f"{_values(compared.same)} the same plan"] if compared.same else []
    whole = "all" if compared.complete else "not all"
    rest.append(f"{compared.looked_at:,} of {compared.family:,} choices were placed, {whole} that may be faster looked at")
    say(console, "; ".join(rest) + ".", style="dim", indent=2)


def _values(number: int) -> str:
    return f"{number} other value{'s give' if number != 1 else ' gives'}"


def why_lost(row: Row) -> str:
    """By how much, and what for."""
    if row.plan is None:
        return f"does not fit: {row.why}"
    if row.slower < -0.0005:
        return f"{-row.slower:.1%} faster" + (f": {row.why}" if row.why else ", not found")
    found = "asks for more" if row.slower < 0.0005 else f"{row.slower:.1%} slower"
    return f"{found}: {row.why}" if row.why else found


def show_changes(console: Console, outcomes: Sequence[Outcome], shapes: Symbols, *, tried: int) -> None:
    """Changes that make the run fit, to be pasted behind the command."""
    if not outcomes:
        say(console, f"No change of one or two keys is enough: {tried} plans were made.")
        return
    heading(console, "Changes that help", f"the smallest of each kind, planned again; {tried} plans were made")
    content = ruled(shapes)
    column(content, "add", wrap=True)
    for title in ("step", "tokens/s", "RAM", "ssd a step"):
        column(content, title, right=True)
    for outcome in outcomes:
        content.add_row(Text(" ".join(outcome.overrides)), *_figures(outcome.plan))
    show(console, content, indent=2)
    if worn := [wear.run for outcome in outcomes if (wear := outcome.wear()) is not None and not wear.accepted]:
        which, least = "each of these" if len(outcomes) > 1 else "that", f"{min(worn):.0%}"
        say(console, f"With {which} the run fits; it still writes {least} or more of what a drive is rated for.", indent=2)


def _figures(plan: Plan | None) -> tuple[str, str, str, str]:
    if plan is None:
        return "", "", "", ""
    predicted = plan.predicted
    tokens = plan.numerics.batch_size * plan.numerics.max_seq_len
    per_second = tokens / predicted.step_seconds if predicted.step_seconds > 0 else 0.0
    moved = gb(predicted.read_per_step + predicted.written_per_step)
    return brief(predicted.step_seconds), speed(per_second), gib(predicted.cpu_peak), moved
