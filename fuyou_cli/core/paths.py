"""Resolves paths as people write them in a recipe. Every error names the recipe's key."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UsageError


def expanded(path: str | Path, *, key: str) -> Path:
    """Replaces ~ and ~user in a path. Raises UsageError where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # all that pathlib says about a user nobody knows
        raise UsageError(f"{key}: {path}: {error}", hint="write the path in full, or ./~... for such a name") from None


def is_same_folder(one: str | Path, other: str | Path) -> bool:
    """Tells whether both are one folder: by their names, links followed, or mounted in two places."""
    try:
        return os.path.realpath(one) == os.path.realpath(other) or Path(one).samefile(other)
    except (OSError, ValueError):
        return False


def is_file(path: str | Path) -> bool:
    """Tells whether a file is there; false also for a name that no file can have, over which pathlib raises."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def folder(path: str | Path, *, key: str) -> Path:
    """Expands a path that is a folder or will be made one. Raises UsageError where a file stands in its way."""
    whole = expanded(path, key=key)
    try:
        for place in (whole, *whole.parents):
            if place.is_dir():
                break
            if os.path.lexists(place):
                what = "a file" if place.exists() else "a link to nothing"
                raise UsageError(f"{key}: {path}: {place} is {what}, not a folder", hint="name a folder, or a new one")
    except OSError as error:  # a folder that may not be looked into, a name too long
        raise UsageError(f"{key}: {path}: {error.strerror}", hint="name a folder that can be used") from None
    return whole
