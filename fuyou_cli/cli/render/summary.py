"""Shows the end of a run: predictions next to measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.units import brief, duration, gb, gib
from fuyou_cli.training.report import Compared, RunReport

from .plots import show_loss, show_timeline, waiting
from .theme import column, heading, pairs, ruled, say, show, some, speed, symbols, tera


def show_summary(console: Console, report: RunReport) -> None:
    """Prints the run's figures, predictions next to measurements, then the loss and a step's timeline."""
    shapes = symbols(console)
    heading(console, f"{some(report.steps, 'step')} in {duration(report.seconds)}")
    rows = [
        ("loss", from_to(report.losses, shapes.arrow)),
        ("speed", f"{speed(report.tokens_per_second)} tokens/s, {tera(report.tflops * 1e12)} TFLOPS (6N)"),
        ("waiting", f"{waiting(report.stalls)}, over all steps"),
        ("written", f"{gb(report.written_total)} to the ssd"),
        *([("attention", report.attention)] if report.attention else []),
        *([("best", report.best)] if report.best else []),
        ("output", report.output_dir),
    ]
    pairs(console, rows)
    show_compared(console, report)
    show_loss(console, report.losses)
    show_timeline(console, report.timeline)


def from_to(losses: Sequence[float], between: str = "to") -> str:
    """Names the first and the last loss of a run. Those that are not known (NaN) are left out, and steps told instead."""
    known = [(number, loss) for number, loss in enumerate(losses, 1) if not math.isnan(loss)]
    if not known:
        return "not known"
    ends = [
        f"{loss:.4f}" + ("" if number in (1, len(losses)) else f" (step {number})") for number, loss in (known[0], known[-1])
    ]
    return f" {between} ".join(ends)


def show_compared(console: Console, report: RunReport) -> None:
    """Prints a row per figure of the plan, next to the measurement."""
    note = typical(report) + ("; the plan's rates were assumed" if report.assumed else "")
    heading(console, "Predicted and measured", note)
    content = ruled(symbols(console))
    column(content, "what", wrap=True)
    for title in ("predicted", "measured", "difference"):
        column(content, title, right=True)
    for what, *figures in compared_rows(report):
        content.add_row(Text(what), *figures)
    show(console, content, indent=2)
    over = report.ram_peak > report.ram_budget
    say(console, verdict(report), style="red" if over else "", indent=2)
    if report.assumed:
        say(console, "Run `fuyou bench RECIPE` to plan with measured rates next time.", style="dim", indent=2)


def verdict(report: RunReport) -> str:
    """Tells whether the run stayed within its memory budget."""
    over = report.ram_peak > report.ram_budget
    return f"Peak RAM is {'over' if over else 'within'} the budget of {gib(report.ram_budget)}."


def compared_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Returns each figure's name, prediction, measurement and difference."""
    rows = []
    for line in report.compared:
        shown = gib if line.what.startswith("peak ") else gb if line.unit == "bytes" else brief
        rows.append((line.what, shown(line.predicted), shown(line.measured), _difference(line)))
    return rows


def typical(report: RunReport) -> str:
    """Tells which steps the figures come from."""
    first = report.steps - report.settled if report.settled else min(1, report.steps - 1)
    without = "" if first < 1 else " without the first" if first == 1 else f" without the first {first}"
    return f"of one step, medians{without}"


def _difference(line: Compared) -> str:
    share = line.difference
    if share is None:
        return "not predicted"
    if share >= 10:  # such as with assumed rates: then percents are useless
        return f"{1 + share:,.0f} times"
    return "0%" if share == 0 else f"{100 * share:+.1f}%"
