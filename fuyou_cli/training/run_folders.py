"""Claims a run's folders for one run at a time: its `output_dir`, and those of its store, which it checks, locks and opens."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..core.disk import status_of
from ..core.errors import UnreadableError, UsageError
from ..core.paths import own_folder
from ..swap.store import Store
from .length import check_loading
from .prepare import Planned
from .run_log import holds_a_run, read_logged_plan
from .state import manifest as manifests
from .state.resume import check_same_stages, check_same_store, check_stages, check_still_new
from .state.store_folders import STORE_FILE, begin_parts, check_same_drive, check_space, discard_parts

_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EBADF)  # EBADF: NFS, for a folder


@contextmanager
def claimed(out: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Makes the folder if needed, and locks it for the length of the context, so that two runs never mix their logs and
    models. A file system without folder locks is accepted. Raises UsageError if another run has the lock."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"output_dir: another run uses {out}", hint="wait until it ends, or give this run its own output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            say(f"note: {out} cannot be locked ({error.strerror}): make sure that no other run uses it")
        yield
    finally:
        os.close(descriptor)


def note_of_an_earlier_run(planned: Planned) -> str | None:
    """Returns a note if a new run starts where an earlier one wrote its log and nobody asked to start over: the saved state
    is not where this recipe looks for it. Raises UsageError if the earlier one's store was there, on another drive."""
    log = Path(planned.recipe.output_dir).expanduser() / "log.jsonl"
    begins = planned.manifest is None and planned.recipe.checkpoint.resume != "never"
    if not begins or not holds_a_run(log):
        return None
    check_same_drive(planned.directories[0], _store_was_on(log, planned.directories[0]))
    return (
        f"note: {log} belongs to an earlier run that has no saved state in {planned.directories[0]}. This run starts "
        "at step 1 and keeps the old log beside its own. To resume the old run, stop now and set its offload.dir"
    )


def _store_was_on(log: Path, directory: Path) -> tuple[str, ...]:
    """Returns what a log says of the file system of a run's store, if its folder was this one."""
    try:
        promised = read_logged_plan(log)
    except UsageError:  # not the log of a run
        return ()
    return promised.store_on if promised.store == str(directory.absolute()) else ()


# ---- the folders of a store -------------------------------------------------------------------------------------------


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
        if planned.manifest is not None and planned.moves:
            check_same_stages(planned.manifest, planned.model)
        elif planned.manifest is not None:
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
        if planned.manifest is None or planned.moves:
            self._unnamed = begin_parts(self._run, planned.directories)
        try:
            opened = Store.open(self._paths, stripe=io.stripe, size=planned.plan.store_size, create=True)
        except BaseException:
            self._remove_unnamed(held=False)
            raise
        store = closing.enter_context(opened)
        closing.callback(self._remove_unnamed, held=True)
        store.attach(planned.model.sources)
        if planned.is_copy:  # nobody goes on from it: it goes with this process, however that ends
            self._unnamed = self._paths
            self._remove_unnamed(held=True)
            for directory in planned.directories:
                with suppress(OSError):
                    directory.rmdir()
        elif planned.saved is not None:
            planned.saved.check_current()
        elif planned.recipe.checkpoint.resume != "never":
            check_still_new(self._first)
        return store

    def keep(self) -> None:
        """Keeps the store's files from now on: a manifest names them, or will do so next."""
        self._unnamed.clear()

    def _remove_unnamed(self, *, held: bool) -> None:
        """Removes store files that this run made but never loaded into, while they are locked (`held`: by the open store). No
        manifest says whose they are.

        If there is a manifest beside them, another run has made them meanwhile; if one is locked, another run has it.
        """
        # the reason the run ended matters more; what cannot be removed stays
        with suppress(OSError, UnreadableError), ExitStack() as locked:
            if self._unnamed and status_of(self._first / manifests.NAME, follow=False) is None:
                for path in self._unnamed if not held else ():
                    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    locked.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                discard_parts(self._unnamed)
