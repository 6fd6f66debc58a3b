"""Defines the errors that a user may see: what happened, where, and what to do.

The command line maps each class to an exit code in one place. Nothing below it exits or prints.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

NO_THREADS = "this user may have no more threads and processes: raise `ulimit -u`, or pids.max of the control group"


def pip_install(what: str) -> str:
    """Returns the command that installs something for the Python that runs fuyou, which may not be the shell's."""
    pip = shutil.which("pip")
    own = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return f'{"pip" if own else f"{sys.executable} -m pip"} install "{what}"'


class FuyouError(Exception):
    """Carries a message and a remedy. `exit_code` follows the table in the README."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(FuyouError):
    """Reports a recipe, argument, data or checkpoint that cannot be used as given. Nothing was written."""

    exit_code = 2


class ModelFileError(UsageError):
    """Reports a file of the checkpoint that is no longer what the run has read of it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="put the file back as it was, or start over with checkpoint.resume=never")


class UnreadableError(UsageError):
    """Reports a file that cannot be read now: its drive or a permission is in the way. It may be whole, so nothing takes its
    place, and no hint offers to give it up."""

    exit_code = 1


class DataError(UsageError):
    """Reports data that cannot be used, found while a run trains on what came before it."""


class PlanError(FuyouError):
    """Reports a run that does not fit its memory or disk."""

    exit_code = 3


class OutOfSpaceError(FuyouError):
    """Reports that memory or disk ran out during the run."""

    exit_code = 4


class DeviceMemoryError(OutOfSpaceError):
    """Reports that a device's own memory ran out. Host memory and store are unharmed."""


class DataSpaceError(OutOfSpaceError):
    """Reports that memory or disk ran out where data is read and tokenised. The state of a run is unharmed."""


class SwapError(FuyouError):
    """Reports a failure of the store or the daemon: an I/O error, a short file, a wrong checksum. `code`: the errno, or 0."""

    def __init__(self, message: str, *, hint: str | None = None, code: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class DamagedStateError(SwapError):
    """Reports a saved run of which no state is whole."""


class PeerLost(FuyouError):
    """Reports a rank of the run that ended or can no longer be reached. What all ranks have committed is safe."""

    def __init__(self, rank: int, host: str, what: str) -> None:
        reason = what.strip().splitlines()[0] if what.strip() else "no answer"
        hint = f"see why rank {rank} ended, then start all ranks again: they go on from the last commit"
        super().__init__(f"rank {rank} on {host} was lost ({reason})", hint=hint)
        self.rank, self.host = rank, host


class NumericsError(FuyouError):
    """Reports a loss, gradient or weight that is NaN or Inf. `changed`: an update may have spread it to weights or states."""

    def __init__(self, message: str, *, hint: str | None = None, changed: bool) -> None:
        super().__init__(message, hint=hint)
        self.changed = changed


class RecomputeError(FuyouError):
    """Reports a recompute that took another way than its forward. `changed`: as in `NumericsError`."""

    def __init__(self, message: str, *, hint: str | None = None, changed: bool) -> None:
        super().__init__(message, hint=hint)
        self.changed = changed


class Interrupted(FuyouError):
    """Reports that the run was stopped on request, and what is saved. `lost`: more than one finished step, so it
    exits with 1."""

    exit_code = 130

    def __init__(self, message: str, *, hint: str | None = None, lost: bool = False) -> None:
        super().__init__(message, hint=hint)
        if lost:
            self.exit_code = FuyouError.exit_code
