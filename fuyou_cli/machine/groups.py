"""Runs a command in a memory control group of an exact size, if one can be made (cgroup v1 or v2)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fuyou_cli.core import probe


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Tells how the command ended, and whether the kernel enforced the limit."""

    code: int
    enforced: bool


def run_limited(command: Sequence[str], limit: int, *, environment: dict[str, str]) -> Ended:
    """Runs `command` with at most `limit` bytes for all its processes; without a limit if none can be set."""
    group = _make_group(limit)
    if group is not None:
        try:
            join = partial((group / "cgroup.procs").write_text, "0")  # 0: the process that writes it
            process = subprocess.Popen(command, env=environment, preexec_fn=join)
            return Ended(code=_wait(process), enforced=True)
        except subprocess.SubprocessError:  # the group could be made, but not joined
            pass
        finally:
            with suppress(OSError):
                group.rmdir()
    return Ended(code=_wait(subprocess.Popen(command, env=environment)), enforced=False)


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the command gets it too, and saves its state
            continue


def _make_group(limit: int, root: Path = probe.ROOT) -> Path | None:
    """Makes a new group that accepts the limit, swap included; None if that fails."""
    for parent, version in _parents(root):
        group = parent / f"fuyou-{os.getpid()}"
        try:
            if version == 2:
                _let_children_hold_memory(parent)
            group.mkdir()
        except OSError:
            continue
        try:
            _hold(group, version, limit)
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        return group
    return None


def _parents(root: Path) -> list[tuple[Path, int]]:
    """Lists the groups that may hold a new one, with their versions. The nearest come first: then most existing limits still
    hold."""
    # In version 2 only the topmost group may have both processes and children with limits. Ours has this process, so the new
    # group is a sibling.
    groups = probe.own_groups("memory", root)
    places = ((place, own) for own in groups for place in (own.folder, *own.folder.parents))
    return [(place, own.version) for place, own in places if place.is_relative_to(own.top)]


def _let_children_hold_memory(parent: Path) -> None:
    control = parent / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        control.write_text("+memory")


def _hold(group: Path, version: int, limit: int) -> None:
    if version == 2:
        _write_if_there(group / "memory.swap.max", "0")
        (group / "memory.max").write_text(str(limit))
        return
    (group / "memory.limit_in_bytes").write_text(str(limit))
    _write_if_there(group / "memory.memsw.limit_in_bytes", str(limit))


def _write_if_there(file: Path, text: str) -> None:
    """Writes the file if it exists. Swap has its own limit only where the kernel counts it."""
    if file.exists():
        file.write_text(text)
