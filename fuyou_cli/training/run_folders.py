"""Claims a run's folders and opens its store: checks whose they are, locks them, and removes what was made for nothing."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from ..core.errors import UsageError
from ..core.paths import own_folder
from ..swap.store import Store
from .length import check_loading
from .prepare import Planned
from .state import manifest as manifests
from .state.parts import STORE_FILE, begin_parts, discard
from .state.resume import check_same_store, check_unchanged
from .state.storage import check_space, check_stages


class RunFolders:
    """Holds the folders of a run's store, one per striped directory."""

    def __init__(self, planned: Planned, run: str) -> None:
        self._planned, self._run = planned, run
        self._first = planned.directories[0]  # where the manifest is
        self._paths = [directory / STORE_FILE for directory in planned.directories]
        self._unnamed: list[Path] = []  # files that this run made and no manifest names yet

    def claim(self) -> None:
        """Checks that a saved run is still the one in the plan, and that the folders have room for the store."""
        planned, plan = self._planned, self._planned.plan
        if planned.manifest is not None:
            check_same_store(planned.manifest, self._paths, stripe=plan.io.stripe)
            check_stages(planned.manifest, planned.model, plan)
        else:
            check_loading(planned.recipe, plan)
        for directory, path in zip(planned.directories, self._paths, strict=True):
            own_folder(directory)
            if path.is_file() and path.stat().st_nlink > 1:
                raise UsageError(f"{path} has a second name (hard link), which would be overwritten", hint="move it away")
        check_space(self._paths, plan.store_size)

    def open_store(self, closing: ExitStack) -> Store:
        """Opens and locks the store until `closing` ends. Only then is its manifest sure to stay as it is."""
        planned, io = self._planned, self._planned.plan.io
        if planned.manifest is None:
            self._unnamed = begin_parts(self._run, planned.directories)
        try:
            opened = Store.open(self._paths, stripe=io.stripe, size=planned.plan.store_size, create=True)
        except BaseException:
            self._remove_unnamed(held=False)
            raise
        store = closing.enter_context(opened)
        closing.callback(self._remove_unnamed, held=True)
        store.attach(planned.model.sources)
        check_unchanged(planned.manifest, self._first, start_over=planned.recipe.checkpoint.resume == "never")
        return store

    def keep(self) -> None:
        """Keeps the store's files from now on: a manifest names them, or will do so next."""
        self._unnamed.clear()

    def _remove_unnamed(self, *, held: bool) -> None:
        """Removes store files that this run made but never loaded into, while they are locked (`held`: by the open store). No
        manifest says whose they are.

        If there is a manifest beside them, another run has made them meanwhile; if one is locked, another run has it.
        """
        with suppress(OSError), ExitStack() as locked:  # the reason the run ended matters more; what cannot be removed stays
            if self._unnamed and _is_missing(self._first / manifests.NAME):
                for path in self._unnamed if not held else ():
                    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    locked.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                discard(self._unnamed)


def _is_missing(path: Path) -> bool:
    """Tells whether `path` does not exist. Raises OSError if this cannot be found out."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    return False
