"""Shows a run's history on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fuyou_cli.training.run_log import History

from .plots import show_loss, show_timeline
from .report_rows import COLUMNS, EVALUATED, EXPERTS, about, evaluations, experts, memory, samples, series_of, store, wear
from .summary import show_compared
from .theme import column, heading, pairs, ruled, say, show, symbols

_SHOWN = 240  # characters of a prompt or a text


def show_report(console: Console, history: History) -> None:
    """Prints the log's figures: figures over the steps, predictions next to measurements, memory, the ssd, one step."""
    heading(console, "Run", str(history.log))
    pairs(console, about(history))
    show_loss(console, history.report.losses, first_step=history.steps[0].step)
    heading(console, "Over the steps")
    _table(console, COLUMNS, [series.row for series in series_of(history)])
    if history.evaluations:
        heading(console, "Evaluations", "mean loss of held-out tokens")
        _table(console, EVALUATED, evaluations(history))
    if rows := experts(history):
        assert history.sent is not None
        heading(console, "Experts", f"their shares of the tokens of step {history.sent.step:,}")
        _table(console, EXPERTS, rows)
    if history.samples:
        _samples(console, history)
    if history.report.compared:
        show_compared(console, history.report)
    if rows := memory(history):
        heading(console, "Memory", "as planned")
        _table(console, ("tier", "what", "size", "share"), rows)
    heading(console, "The ssd")
    pairs(console, [*store(history), *wear(history)])
    show_timeline(console, history.report.timeline)


def _samples(console: Console, history: History) -> None:
    """Prints the first and the last text of each prompt; the page and the log have all."""
    heading(console, "Samples", "the likeliest tokens after fixed prompts, first and last")
    for prompt, rows in samples(history):
        say(console, _short(prompt), indent=2)
        shown = rows[:1] if len(rows) == 1 else [rows[0], rows[-1]]
        pairs(console, [(step, _short(text)) for step, text in shown], indent=4)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _table(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints names on the left, figures on the right; the last column may hold text."""
    content, names = ruled(symbols(console)), 1 if len(titles) > 4 else 2
    for number, title in enumerate(titles):
        column(content, title, right=number >= names, wrap=number == names - 1)
    for row in rows:
        content.add_row(*map(Text, row))
    show(console, content, indent=2)
