"""Tests that what an error quotes of a file is text on the terminal, and nothing else."""

from __future__ import annotations

import pytest

from fuyou_cli.cli.error_screen import report
from fuyou_cli.core.errors import UsageError


def test_what_is_quoted_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(UsageError("a\x1b[2J\x07\r\udc80é\nb\tc", hint="d\x9b")) == 2
    assert capsys.readouterr().err == "error: a\\x1b[2J\\x07\\r\\udc80é\n  b\\tc\n  help: d\\x9b\n"
