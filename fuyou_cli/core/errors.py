"""Defines the errors that a person may see: what happened, where, and what to do.

The command line maps the class to an exit code in one place; nothing below it exits or prints."""

from __future__ import annotations


class FuyouError(Exception):
    """Carries a message and a remedy. `exit_code` follows the table in the README."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(FuyouError):
    """Says that the recipe, an argument, the data or the checkpoint is not usable as given. Nothing was written."""

    exit_code = 2


class PlanError(FuyouError):
    """Says that the run does not fit the memory or the disk it was given."""

    exit_code = 3


class OutOfSpaceError(FuyouError):
    """Says that memory or disk ran out during the run."""

    exit_code = 4


class DeviceMemoryError(OutOfSpaceError):
    """Says that a device's own memory ran out. The host's and the store are as they were."""


class SwapError(FuyouError):
    """Says that the store or the daemon failed: an I/O error, a short file, a wrong checksum. `code`: the errno, or 0."""

    def __init__(self, message: str, *, hint: str | None = None, code: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class NumericsError(FuyouError):
    """Says that a loss, gradient or weight is NaN or Inf. `changed`: an update may have spread it to weights or states."""

    def __init__(self, message: str, *, hint: str | None = None, changed: bool) -> None:
        super().__init__(message, hint=hint)
        self.changed = changed


class Interrupted(FuyouError):
    """Says that the run was stopped on request, and what is saved. `lost`: something trained is not."""

    exit_code = 130

    def __init__(self, message: str, *, hint: str | None = None, lost: bool = False) -> None:
        super().__init__(message, hint=hint)
        if lost:
            self.exit_code = FuyouError.exit_code
