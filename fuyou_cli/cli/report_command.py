"""Runs `fuyou report`: shows what a run did, from its log."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.history import History, Step, find_log, read_history

from .console import result_console, write_json, write_status

if TYPE_CHECKING:
    from fuyou_cli.training.report import RunReport


def run_report(source: Path, *, json_output: bool, html: Path | None) -> None:
    """Shows a run's log. With `html`, writes a page to that file instead."""
    history = read_history(find_log(source))
    if json_output:
        write_json(_as_data(history))
    if html is not None:
        _write_page(html, history)
    elif not json_output:
        from .render.report_screen import show_report

        show_report(result_console(), history)


def _as_data(history: History) -> dict[str, Any]:
    report: RunReport = history.report
    left_out = ("losses", "timeline", "timeline_stalls", "compared", "waits", "update_cpu")
    return {
        "log": str(history.log),
        "ended": history.ended,
        "failed": history.failed or None,
        "stopped": history.stopped,
        "planned": asdict(history.promised),
        "measured": {name: value for name, value in asdict(report).items() if name not in left_out},
        "compared": [{**asdict(line), "what": line.what.strip(), "difference": line.difference} for line in report.compared],
        "evaluations": [asdict(one) for one in history.evaluations],
        "best": None if history.best is None else asdict(history.best),
        "changes": [asdict(one) for one in history.changes],
        "samples": [asdict(one) for one in history.samples],
        "steps": [_step(step) for step in history.steps],
        **({} if history.sent is None else {"experts": asdict(history.sent)}),
    }


def _step(step: Step) -> dict[str, Any]:
    """Returns a step's figures. Those of mixtures are left out where there is none."""
    found = asdict(step)
    return {name: value for name, value in found.items() if name not in ("experts", "router_aux_loss") or value is not None}


def _write_page(path: Path, history: History) -> None:
    from .render.report_page import page

    text = page(history)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="name another file") from None
    write_status(f"wrote {path}")
