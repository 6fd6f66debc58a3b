"""Paths as people write them in a recipe."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import UsageError


def expanded(path: str | Path, *, key: str) -> Path:
    """The path with ~ and ~user replaced. Raises UsageError naming the recipe's `key` where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # all that pathlib says about a user nobody knows
        raise UsageError(f"{key}: {path}: {error}", hint="write the path in full, or ./~... for such a name") from None
