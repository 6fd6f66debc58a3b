"""Resolves paths as people write them in a recipe. Every error names the recipe's key."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .disk import remedy, unreadable
from .errors import UsageError


def expanded(path: str | Path, *, key: str) -> Path:
    """Replaces ~ and ~user in a path. Raises UsageError if there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # pathlib raises only this for an unknown user
        raise UsageError(
            f"{key}: {path}: {error}", hint="write the full path, or ./~... for a name that begins with ~"
        ) from None


def is_same_folder(one: str | Path, other: str | Path) -> bool:
    """Tells whether both are the same folder, through links or mounted in two places."""
    try:
        return os.path.realpath(one) == os.path.realpath(other) or Path(one).samefile(other)
    except (OSError, ValueError):
        return False


def is_file(path: str | Path) -> bool:
    """Tells whether a file exists. Returns False for an impossible name, for which pathlib raises."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def folder(path: str | Path, *, key: str) -> Path:
    """Expands the path of a folder that exists or will be made. Raises UsageError if a file is in its place."""
    whole = expanded(path, key=key)
    try:
        for place in (whole, *whole.parents):
            if place.is_dir():
                break
            if os.path.lexists(place):
                what = "a file" if place.exists() else "a link to nothing"
                raise UsageError(f"{key}: {path}: {place} is {what}, not a folder", hint="name a folder, or a new one")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.ENAMETOOLONG):  # its drive, which may hold a saved run
            raise unreadable(f"{key}: {path}", error) from None
        raise UsageError(f"{key}: {path}: {error.strerror}", hint=remedy(error) or "name a folder that can be used") from None
    return whole


def kept_folder() -> Path:
    """Returns the folder where fuyou keeps what it can find out again: outside of any run, for one user."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fuyou"


def machine_id() -> str:
    """Returns what stays the same for this installation, whatever its host name, and differs in machines that share a home
    folder. Empty in most containers."""
    try:
        return Path("/etc/machine-id").read_text(errors="replace").strip()
    except OSError:
        return ""
