"""Running a command in a memory control group of an exact size, where this machine lets us make one (cgroup v1 or v2)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import probe


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the command ended, and whether the kernel held it to the limit."""

    code: int
    enforced: bool


def run_limited(command: Sequence[str], limit: int, *, environment: dict[str, str]) -> Ended:
    """Runs `command` with at most `limit` bytes for all its processes; without a limit where none can be set."""
    group = _make_group(limit)
    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=None if group is None else _joiner(group))
        while True:
            try:
                return Ended(code=process.wait(), enforced=group is not None)
            except KeyboardInterrupt:  # the command got it as well and saves its state
                continue
    finally:
        if group is not None:
            with suppress(OSError):
                group.rmdir()


def _joiner(group: Path) -> Callable[[], None]:
    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return join


def _make_group(limit: int) -> Path | None:
    """A new group below ours whose limit was accepted, or None."""
    for parent, name in _parents():
        group = parent / f"fuyou-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
            (group / "cgroup.procs").read_text()
            return group
        except OSError:
            with suppress(OSError):
                group.rmdir()
    return None


def _parents() -> list[tuple[Path, str]]:
    """Folders of the groups this process is in that govern memory, with the name of their limit."""
    return [
        (limits.folder, "memory.max" if limits.version == 2 else "memory.limit_in_bytes")
        for limits in probe.own_memory_groups()
    ]
