"""The end of a run: what was promised beside what happened."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.units import brief, duration, gb, gib
from fuyou_cli.training.report import Compared, RunReport

from .loss_plot import show_loss
from .theme import column, heading, pairs, ruled, say, show, speed, symbols, tera
from .timeline import show_timeline, waiting


def show_summary(console: Console, report: RunReport) -> None:
    """Predicted beside measured, the run in figures, then the loss and the last step's timeline."""
    shapes = symbols(console)
    heading(console, f"{report.steps} step{'s' * (report.steps != 1)} in {duration(report.seconds)}")
    arrow = f" {shapes.arrow} "
    pairs(
        console,
        [
            ("loss", f"{report.first_loss:.4f}{arrow}{report.last_loss:.4f}"),
            ("speed", f"{speed(report.tokens_per_second)} tokens/s, {tera(report.tflops * 1e12)} TFLOPS (6N)"),
            ("waiting", f"{waiting(report.stalls)}, in all steps together"),
            ("written", f"{gb(report.written_total)} to the ssd"),
            ("output", report.output_dir),
        ],
    )
    _compared(console, report)
    show_loss(console, report.losses, first_step=1)
    show_timeline(console, report.timeline)


def _compared(console: Console, report: RunReport) -> None:
    shapes = symbols(console)
    note = _typical(report) + ("; the plan's rates were assumed" if report.assumed else "")
    heading(console, "Predicted and measured", note)
    content = ruled(shapes)
    column(content, "what", wrap=True)
    for title in ("predicted", "measured", "difference"):
        column(content, title, right=True)
    for line in report.compared:
        shown = gib if line.what.startswith("peak ") else gb if line.unit == "bytes" else brief
        content.add_row(Text(line.what), shown(line.predicted), shown(line.measured), _difference(line))
    show(console, content, indent=2)
    over = report.ram_peak > report.ram_budget
    verdict = "over the budget of" if over else "within the budget of"
    say(
        console,
        Text(f"Peak RAM is {verdict} {gib(report.ram_budget)}.", style="red" if over else ""),
        indent=2,
    )
    if report.assumed:
        say(console, "`fuyou bench RECIPE` measures what the next plan of it is made with.", style="dim", indent=2)


def _typical(report: RunReport) -> str:
    """Which steps the figures are of."""
    first = report.steps - report.settled if report.settled else min(1, report.steps - 1)
    without = "" if first < 1 else " without the first" if first == 1 else f" without the first {first}"
    return f"of one step, medians{without}"


def _difference(line: Compared) -> str:
    share = line.difference
    if share is None:
        return "not predicted"
    if share >= 10:  # rates that were assumed, say: percents say nothing any more
        return f"{1 + share:,.0f} times"
    return "0%" if share == 0 else f"{100 * share:+.1f}%"
