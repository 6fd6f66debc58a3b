"""Writes a run's history as one self-contained HTML page: no network, no script, light or dark as the system is. Text from
the log is escaped. The template is report.html."""

from __future__ import annotations

import math
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fuyou_cli.core.printable import printable
from fuyou_cli.core.units import brief, gb, gib
from fuyou_cli.training.run_log import History

from .charts import line_svg, shares_svg, timeline_svg
from .report_screen import (
    COLUMNS,
    EVALUATED,
    EXPERTS,
    about,
    compared_rows,
    evaluations,
    experts,
    memory,
    samples,
    series_of,
    store,
    typical,
    verdict,
    wear,
)
from .theme import speed

_TEMPLATE = Path(__file__).with_name("report.html")


def page(history: History) -> str:
    """Returns the page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_shown)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    report, series = history.report, series_of(history)
    first, charted = history.steps[0].step, series if history.steps[1:] else []
    last = f"Step {history.steps[-1].step:,}"
    timeline = timeline_svg(report.timeline, title=last, stalls=report.timeline_stalls) if report.timeline else ""
    return template.render(
        model=history.plan.model,
        log=str(history.log),
        tiles=_tiles(history),
        about=about(history),
        charts=[(item.name, item.note, Markup(line_svg(item, first_step=first))) for item in charted],
        columns=COLUMNS,
        over=[item.row for item in series],
        evaluated=EVALUATED,
        evaluations=evaluations(history),
        mixtures=EXPERTS,
        experts=[(row, Markup(shares_svg(counts))) for row, counts in _drawn(history)],
        sent_in=history.sent.step if history.sent is not None else 0,
        samples=samples(history),
        compared=compared_rows(report),
        typical=typical(report).removeprefix("of one step, "),
        verdict=verdict(report),
        memory=memory(history),
        ssd=[*store(history), *wear(history)],
        timeline=Markup(timeline),
    )


def _drawn(history: History) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Returns the row of each mixture with the tokens of its experts."""
    sent = {} if history.sent is None else history.sent.sent
    return list(zip(experts(history), filter(None, sent.values()), strict=True))


def _shown(value: object) -> object:
    """Spells out control characters of text from a log, but for newlines."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _tiles(history: History) -> list[tuple[str, str]]:
    """Returns the most wanted figures."""
    report, known = history.report, [step.loss for step in history.steps if math.isfinite(step.loss)]
    return [
        ("loss of the last step", f"{known[-1]:.4f}" if known else "?"),
        ("loss of the first step", f"{known[0]:.4f}" if known else "?"),
        ("tokens per second", speed(report.tokens_per_second)),
        ("one step", brief(report.step_seconds)),
        (f"peak RAM, {gib(report.ram_budget)} allowed", gib(report.ram_peak)),
        ("written to the ssd", gb(report.written_total)),
    ]
