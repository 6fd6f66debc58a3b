"""Goal: what the library refuses reaches a person as a file, a reason and a remedy. Method: its own failure records."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fuyou_cli.swap.failures import failure_error
from fuyou_cli.swap.native import ffi, lib


def _hint(operation: int, code: int) -> str:
    why = ffi.new("fy_failure *", {"operation": operation, "error": -code, "file": 1})
    error = failure_error(why, paths=[Path("/a/store.bin"), Path("/b/store.bin")])
    assert errno.errorcode[code] in str(error)
    assert ("/b/store.bin" in str(error)) == (operation == lib.FY_OP_OPEN)
    return error.hint or ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ELOOP, "symbolic link"),
        (errno.EPERM, "another user"),
        (errno.EINVAL, "not a regular file"),
        (errno.EACCES, "permissions"),
        (errno.ENOENT, "mounted"),
        (errno.EBUSY, "another process"),
    ],
)
def test_a_file_that_cannot_be_opened_says_what_to_do(code: int, said: str) -> None:
    assert said in _hint(lib.FY_OP_OPEN, code)


@pytest.mark.parametrize(
    ("operation", "code", "said"),
    [
        (lib.FY_OP_ALLOCATE, errno.EPERM, "lsattr"),
        (lib.FY_OP_ALLOCATE, errno.EDQUOT, "quota"),
        (lib.FY_OP_ALLOCATE, errno.ENOSPC, "free space"),
        (lib.FY_OP_OPEN, errno.ENOLCK, "lock service"),
        (lib.FY_OP_OPEN, errno.ENOTCONN, "mount it again"),
        (lib.FY_OP_WRITE, errno.EDQUOT, "quota"),
        (lib.FY_OP_READ, errno.ENODEV, "plug it in"),
        (lib.FY_OP_SETUP, errno.EAGAIN, "ulimit -u"),
        (lib.FY_OP_READ, errno.EAGAIN, "dmesg"),
    ],
)
def test_the_remedy_is_that_of_the_failure(operation: int, code: int, said: str) -> None:
    why = ffi.new("fy_failure *", {"operation": operation, "error": -code})
    error = failure_error(why, paths=[Path("/a/store.bin")])
    assert said in (error.hint or "")
    assert error.exit_code == (4 if code in (errno.ENOSPC, errno.EDQUOT) else 1)


def test_a_forked_child_is_not_told_about_files() -> None:
    """Tells nothing, as EPERM means two things; only opening looks at who owns a file."""
    assert "forked child" in _hint(lib.FY_OP_SETUP, errno.EPERM)
