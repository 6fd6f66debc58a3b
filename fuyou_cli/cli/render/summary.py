"""The end of a run: what was promised beside what happened."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.units import duration, gb, gib
from fuyou_cli.training.report import RunReport

from .loss_plot import show_loss
from .theme import column, heading, pairs, ruled, say, show, symbols, tera
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
            ("speed", f"{report.tokens_per_second:,.4g} tokens/s, {tera(report.tflops * 1e12)} TFLOPS (6N)"),
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
    heading(console, "Predicted and measured")
    content = ruled(shapes)
    column(content, "what", wrap=True)
    for title in ("predicted", "measured", "difference"):
        column(content, title, right=True)
    rows = (
        ("peak RAM", gib(report.ram_predicted), gib(report.ram_peak), report.ram_predicted, report.ram_peak),
        (
            "seconds per step (median)",
            duration(report.step_predicted),
            duration(report.step_seconds),
            report.step_predicted,
            report.step_seconds,
        ),
        (
            "ssd read per step",
            gb(report.read_predicted),
            gb(report.read_per_step),
            report.read_predicted,
            report.read_per_step,
        ),
        (
            "ssd written per step",
            gb(report.written_predicted),
            gb(report.written_per_step),
            report.written_predicted,
            report.written_per_step,
        ),
    )
    for what, promised, happened, predicted, measured in rows:
        content.add_row(what, promised, happened, _difference(predicted, measured))
    show(console, content, indent=2)
    over = report.ram_peak > report.ram_budget
    verdict = "over the budget of" if over else "within the budget of"
    say(
        console,
        Text(f"Peak RAM is {verdict} {gib(report.ram_budget)}.", style="red" if over else ""),
        indent=2,
    )


def _difference(predicted: float, measured: float) -> str:
    if predicted == measured:
        return "0%"
    if predicted <= 0:
        return "not predicted"
    return f"{100 * (measured / predicted - 1):+.1f}%"
