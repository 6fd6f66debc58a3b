"""The group that the quickstart's training is held in: where it is made, and that it holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fuyou_cli.core.units import MiB
from fuyou_cli.quickstart import demonstration as memory_group
from fuyou_cli.quickstart.demonstration import run_limited


def _machine(root: Path, mount: str, groups: str) -> Path:
    """Makes a root with one hierarchy mounted at /sys/fs/cgroup, and this process in a group below it."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mount)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "sys/fs/cgroup/user.slice/run.scope").mkdir(parents=True)
    return root


def test_on_version_two_a_sibling_is_tried_before_the_top(tmp_path: Path) -> None:
    root = _machine(tmp_path, "30 22 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/user.slice/run.scope\n")
    top = root / "sys/fs/cgroup"
    assert memory_group._parents(root) == [(top / "user.slice/run.scope", 2), (top / "user.slice", 2), (top, 2)]


def test_on_version_one_a_group_of_our_own_comes_first(tmp_path: Path) -> None:
    mount = "30 22 0:30 / /sys/fs/cgroup rw - cgroup cgroup rw,memory\n"
    root = _machine(tmp_path, mount, "4:memory:/user.slice/run.scope\n")
    top = root / "sys/fs/cgroup"
    assert memory_group._parents(root) == [(top / "user.slice/run.scope", 1), (top / "user.slice", 1), (top, 1)]


def test_children_are_allowed_to_hold_memory_once(tmp_path: Path) -> None:
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("cpu pids")
    memory_group._let_children_hold_memory(tmp_path)
    assert control.read_text() == "+memory"
    control.write_text("cpu memory")
    memory_group._let_children_hold_memory(tmp_path)
    assert control.read_text() == "cpu memory"


@pytest.mark.parametrize(
    ("version", "swap", "files"),
    [
        (1, "memory.memsw.limit_in_bytes", {"memory.limit_in_bytes": "77", "memory.memsw.limit_in_bytes": "77"}),
        (1, None, {"memory.limit_in_bytes": "77"}),
        (2, "memory.swap.max", {"memory.max": "77", "memory.swap.max": "0"}),
        (2, None, {"memory.max": "77"}),
    ],
)
def test_swap_is_no_way_out(tmp_path: Path, version: int, swap: str | None, files: dict[str, str]) -> None:
    if swap is not None:
        (tmp_path / swap).write_text("max")
    memory_group._hold(tmp_path, version, 77)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == files


def test_nothing_writable_means_no_group(tmp_path: Path) -> None:
    assert memory_group._make_group(64 * MiB, _machine(tmp_path, "", "")) is None


@pytest.mark.parametrize(("wanted", "killed"), [(16, False), (512, True)])
def test_the_kernel_ends_who_takes_more(wanted: int, killed: bool) -> None:
    code = f"import sys; data = bytearray({wanted} << 20); sys.exit(len(data) >> 20 == {wanted})"
    ended = run_limited([sys.executable, "-S", "-c", code], 128 * MiB, environment=dict(os.environ))
    if not ended.enforced:
        pytest.skip("no memory group can be made here")
    assert ended.code == (-9 if killed else 1)
