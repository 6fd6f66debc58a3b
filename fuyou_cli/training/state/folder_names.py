"""The names that a run gives to what it writes in its folders. `fuyou clean` removes nothing that is called otherwise, and of
what is called so only what lies in a folder of the store (cli/clean.py)."""

from __future__ import annotations

from pathlib import Path

from .. import losses
from .companions import is_kept
from .manifest import BESIDE, COMPANIONS
from .parts import NEW_PART, PART_FILE

STORE = "store.bin"
SPARE = "spare"
_FILES = frozenset((STORE, SPARE, PART_FILE, NEW_PART, losses.NAME, *BESIDE))


def is_written(path: Path) -> bool:
    """Whether a file of a run can be called so: in its folder, or in the folder of its companions there."""
    return is_kept(path.name) if path.parent.name == COMPANIONS else path.name in _FILES
