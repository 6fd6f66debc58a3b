"""`fuyou bench`: measure this machine and print what was found."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console

from fuyou_cli.core.paths import folder

from .console import result_console, status_console
from .machine import keep
from .measure import BenchReport, measure
from .render.bench import bench_json, show_bench


def run_bench(
    directory: Path | None,
    *,
    quick: bool,
    json_output: bool,
    device: str = "auto",
    out: Console | None = None,
    err: Console | None = None,
) -> BenchReport:
    """Measures in `directory` (default: where stores go unless a recipe says, else here) and prints to `out`, as a table or
    as one JSON object.

    The profile is kept for the plans to come. What is being measured appears on `err`, on one line that is gone at the
    end, if that is a terminal.
    """
    out = out or result_console()
    err = err or status_console()
    place = _place(directory)
    if err.is_terminal:
        with err.status("starting", spinner="line") as status:
            report = measure(place, quick=quick, device=device, progress=lambda what: status.update(f"measuring: {what}"))
    else:
        report = measure(place, quick=quick, device=device)
    keep(report.profile, place)
    if json_output:
        out.file.write(json.dumps(bench_json(report), indent=2) + "\n")
    else:
        show_bench(out, report)
    return report


def _place(directory: Path | None) -> Path:
    if directory is not None:
        return folder(directory, key="--dir")
    return folder(os.environ.get("FUYOU_OFFLOAD_DIR") or ".", key="FUYOU_OFFLOAD_DIR")
