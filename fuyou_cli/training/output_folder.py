"""Claims a run's `output_dir` for one run at a time, and notes results of an earlier run in it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import UsageError
from .prepare import Planned
from .run_log import holds_a_run, read_logged_plan
from .state.places import check_same_drive

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
