"""Runs `fuyou doctor`: prints one line for each thing that a run depends on, with the fix if it is not right. Needs no
extension."""

from __future__ import annotations

import os
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fuyou_cli import __version__
from fuyou_cli.core.json_files import one_line
from fuyou_cli.machine.checks import examine

from .console import result_console, write_json
from .render.theme import column, show

_COLOUR = {"ok": "green", "note": "yellow", "problem": "bold red"}


def run_doctor(directory: Path | None, *, json_output: bool) -> bool:
    """Prints the checks, and returns whether none is a problem."""
    checks = list(examine(directory or Path(os.environ.get("FUYOU_OFFLOAD_DIR") or ".")))
    fine = not any(check.is_problem for check in checks)
    if json_output:
        write_json({"ok": fine, "fuyou": __version__, "checks": [check.as_dict() for check in checks]})
        return fine
    grid = Table.grid(padding=(0, 2, 0, 0))
    column(grid)
    column(grid)
    column(grid, wrap=True)
    for check in checks:
        grid.add_row(Text(check.status, _COLOUR[check.status]), check.name, Text(one_line(check.found)))
        if check.advice:
            grid.add_row("", "", Text(one_line(f"-> {check.advice}")))
    show(result_console(), grid)
    return fine
