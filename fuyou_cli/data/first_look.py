"""What can be said of the data in milliseconds, before anything is fetched: are the files there, does their first row fit.

Standard library only. What cannot be seen at a glance (an array, a Parquet file, a broken line) is left to the worker.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from fuyou_cli.core.errors import UsageError

from .formats import RowError, choose_format, loss_target, mapping_hint
from .sources import KINDS, Source, find_sources

_GLANCE = 1 << 20  # characters of a first line, at most


def look(dataset: object) -> tuple[Source, ...]:
    """The sources of `dataset` (the recipe's section). Raises MissingDataError where there are no files, UsageError where the
    first row of a source is of no format, or of one that `loss_on` means nothing for."""
    sources = find_sources(dataset)
    for source in sources:
        columns = _columns(source.files[0])
        if columns is None:
            continue
        try:
            loss_target(getattr(dataset, "loss_on", "auto"), choose_format(source.format, columns, source.columns))
        except RowError as error:
            raise UsageError(f"{source.files[0]}:1: {error}", hint=mapping_hint(columns)) from error
    return sources


def _columns(file: Path) -> frozenset[str] | None:
    """The columns of the first line, None where it does not tell."""
    kind = KINDS[file.suffix.lower()]
    if kind not in ("json", "csv"):
        return None
    with file.open(encoding="utf-8-sig", errors="replace") as stream:
        line = stream.readline(_GLANCE)
    if kind == "csv":
        try:
            return frozenset(next(csv.reader([line]), ())) or None
        except csv.Error:  # a cell of more than 128 KiB, which the worker takes
            return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return frozenset(row) if isinstance(row, dict) else None
