"""Lists keys that fuyou had once, and values that it no longer takes. One that says what fuyou does anyway is accepted with a
note; any other is an error that says what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .diagnostics import Diagnostic, spelt
from .unbuilt import written


class Removed(NamedTuple):
    """Says what became of the key at `path`: of all its values, or of `values` only if the key is still there."""

    path: str  # dotted; * is each entry of a list
    same: tuple[object, ...]  # values that ask for what fuyou does now
    why: Mapping[object, str] | str  # what became of it, by value or for all
    instead: Mapping[object, str] | str
    values: tuple[object, ...] | None = None


_INT8 = (
    "delete the key: two extents of everything take 24 bytes per parameter on the drives (bfloat16), or 12.3 with "
    "`optimizer.state_dtype: int8`"
)
_COPIES = "delete the key: `checkpoint.commit_every_steps` sets the interval; `fuyou export` and `eval.keep_best` keep copies"

REMOVED: tuple[Removed, ...] = (
    Removed(
        "checkpoint.mode", ("auto", "in_place"),
        {"redo": "a store always keeps two extents of everything", "snapshot": "a store keeps its last two states"},
        {"redo": _INT8, "snapshot": _COPIES},
    ),
    Removed("checkpoint.snapshot_every_steps", (None,), "stores of snapshots are gone", _COPIES),
    Removed("checkpoint.keep_last", (2,), "a store keeps its last two states", _COPIES),
)  # fmt: skip

REMOVED_KEYS = frozenset(row.path for row in REMOVED if row.values is None)


def take_removed(data: dict[str, Any]) -> tuple[list[Diagnostic], list[Diagnostic]]:
    """Takes what is gone out of a recipe's data. Returns notes, and errors."""
    notes, errors = [], []
    for row in REMOVED:
        for path, value in written(data, row.path):
            if row.values is not None and value not in row.values:
                continue
            section: Any = data
            for part in path[:-1]:
                section = section[part]
            del section[path[-1]]
            shown = f"{row.path.replace('.*', '')}: {spelt(value)}"
            if value in row.same:
                what = f"`{shown}` has no effect any more, as fuyou always does that: delete the key"
                notes.append(Diagnostic(path=path, code="removed", message=what))
                continue
            why, instead = (_of(value, text) for text in (row.why, row.instead))
            errors.append(Diagnostic(path=path, code="removed", message=f"`{shown}` is gone: {why}", help=instead))
    return notes, errors


def _of(value: object, texts: Mapping[object, str] | str) -> str:
    """Returns the text for a value. One that the key never had gets the first."""
    if isinstance(texts, str):
        return texts
    return next((text for of_value, text in texts.items() if of_value == value), next(iter(texts.values())))
