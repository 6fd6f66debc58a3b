"""Knows every name that a run gives to a file in its folders: `fuyou clean` removes no other."""

from __future__ import annotations

from pathlib import Path

from .. import losses
from .kept_companions import is_kept
from .manifest import BESIDE, COMPANIONS
from .parts import NEW_PART, PART_FILE, SPARE, STORE_FILE

_FILES = frozenset((STORE_FILE, SPARE, PART_FILE, NEW_PART, losses.NAME, *BESIDE))


def is_written(path: Path) -> bool:
    """Tells whether a file of a run can be called so: in its folder, or in the folder of its companions there."""
    return is_kept(path.name) if path.parent.name == COMPANIONS else path.name in _FILES
