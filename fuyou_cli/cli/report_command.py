"""Runs `fuyou report`: shows what a run did, from its log."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.run_log import History, find_log, finite, read_history

from .console import result_console, write_json, write_status

if TYPE_CHECKING:
    from fuyou_cli.training.report import RunReport, StepReport


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
    best = history.best
    data = {
        "log": str(history.log),
        "ended": history.ended,
        "failed": history.failed or None,
        "stopped": history.stopped,
        "planned": asdict(history.plan),
        "measured": {name: value for name, value in asdict(report).items() if name not in left_out},
        "compared": [line.as_data() for line in report.compared],
        "evaluations": [asdict(evaluation) for evaluation in history.evaluations],
        "best": None if best is None else {name: getattr(best, name) for name in ("step", "loss", "folder", "problem")},
        "changes": [asdict(change) for change in history.changes],
        "samples": [asdict(sample) for sample in history.samples],
        "steps": [_step(step) for step in history.steps],
        **({} if history.sent is None else {"experts": asdict(history.sent)}),
    }
    return {name: finite(value) for name, value in data.items()}


def _step(step: StepReport) -> dict[str, Any]:
    """Returns a step's figures. Those of mixtures are left out where there is none."""
    names = (
        "step", "loss", "lr", "grad_norm", "batch_tokens", "seconds", "ram_peak", "read_bytes", "written_bytes", "stalls",
        "skipped", "busy",
    )  # fmt: skip
    of_mixtures = {"experts": step.experts and asdict(step.experts), "router_aux_loss": step.router_aux_loss}
    return {name: getattr(step, name) for name in names} | {
        name: value for name, value in of_mixtures.items() if value is not None
    }


def _write_page(path: Path, history: History) -> None:
    from .render.report_page import page

    text = page(history)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="name another file") from None
    write_status(f"wrote {path}")
