"""Claim a run's `output_dir` for one run at a time, and say where an earlier one's results lie there."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.steps import Planned

from .console import write_status

_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EBADF)  # EBADF: NFS, of a folder


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Make it where there is none, and keep it until this is left: two runs would take each other's log and model away. A
    file system that knows no locks of folders is no reason not to run. Raises UsageError where another run has it."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"output_dir: another run uses {out}", hint="wait until it is over, or give this run an output_dir of its own"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            write_status(f"note: {out} cannot be locked ({error.strerror}): see to it that no other run uses it")
        yield
    finally:
        os.close(descriptor)


def note_of_an_earlier_run(planned: Planned) -> str | None:
    """Return a note for a run that begins where an earlier one wrote its log, though nobody asked it to start over: what was
    saved then is not where this recipe looks for it."""
    log = Path(planned.recipe.output_dir).expanduser() / "log.jsonl"
    begins = planned.manifest is None and planned.recipe.checkpoint.resume != "never"
    if not begins or not log.is_file() or not log.stat().st_size:
        return None
    return (
        f"note: {log} belongs to an earlier run that has no saved state in {planned.directories[0]}. This run starts "
        "at step 1 and keeps that log beside its own. To resume that run instead, stop now and set its offload.dir"
    )
