"""Lists keys of the schema whose feature does not exist yet. Whoever builds a feature deletes its row.

Such a key is an error that names the feature. It is never accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..core.typed import show_value
from .diagnostics import Diagnostic, Path


class Unbuilt(NamedTuple):
    """Says that `path` needs `feature` for values that `asks` accepts, and what works today `instead`."""

    path: str  # dotted; * is each entry of a list
    asks: Callable[[Any], bool]
    feature: str
    instead: str


def _one_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: any(item in values for item in (value if isinstance(value, list) else [value]))


def _other_than(*values: object) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in values


_set = _other_than()
UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt("precision.compute", _one_of("float16"), "fp16 with loss scaling", "use bfloat16 or float32"),
    Unbuilt("precision.master", _one_of("bfloat16"), "a bf16 master copy", "leave it float32"),
    Unbuilt(
        "precision.allow_tf32", _other_than(False), "float32 products in TF32",
        "leave it false: float32 is computed in float32",
    ),
    Unbuilt("export.push_to_hub", _set, "uploading", "upload the exported folder yourself"),
    Unbuilt("export.private", _other_than(True), "uploading", "leave it out"),
)  # fmt: skip


def unbuilt_keys(data: dict[str, Any]) -> Iterator[Diagnostic]:
    """Finds every such key in the recipe, also when other keys are wrong."""
    for row in UNBUILT:
        for path, value in written(data, row.path):
            if row.asks(value):
                key = row.path.replace(".*", "")
                shown = key if isinstance(value, (list, dict)) else f"{key}: {show_value(value)}"
                yield Diagnostic(
                    path=path, code="not-built", message=f"`{shown}` is not built yet: {row.feature}", help=row.instead
                )


def written(data: dict[str, Any], dotted: str) -> list[tuple[Path, Any]]:
    """Lists everything written at a path, where `*` stands for each entry of a list."""
    found: list[tuple[Path, Any]] = [((), data)]
    for part in dotted.split("."):
        if part == "*":
            found = [((*path, i), item) for path, at in found if isinstance(at, list) for i, item in enumerate(at)]
        else:
            found = [((*path, part), at[part]) for path, at in found if isinstance(at, dict) and part in at]
    return found


def is_built(path: Path, value: object) -> bool:
    """Tells whether the key at `path` may have `value` today."""
    dotted = ".".join("*" if isinstance(part, int) else part for part in path)
    return not any(row.path == dotted and row.asks(value) for row in UNBUILT)
