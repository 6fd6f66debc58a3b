"""What proofs hold a run with and look at it by: control groups, which hold as root, what the kernel's files say, the machine's
speed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from proof import control_groups, watch
from proof.both_sides import _counted
from proof.control_groups import DiskRates, LimitsUnavailable
from proof.watch import Pace

from fuyou_cli.core.probe import OwnGroup

MiB = 1 << 20
HYBRID_MOUNTS = """\
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:30 / /sys/fs/cgroup rw - tmpfs tmpfs rw
31 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:32 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio
33 30 0:33 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
34 30 0:34 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
HYBRID_GROUPS = "9:name=systemd:/\n7:blkio:/\n4:memory:/session/one\n0::/\n"
UNIFIED_MOUNTS = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def machine(root: Path, mounts: str, groups: str, files: dict[str, str]) -> Path:
    """Copies somebody else's /proc and /sys."""
    for name, text in {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def hybrid(root: Path) -> Path:
    files = {"sys/fs/cgroup/memory/session/one/cgroup.procs": "", "sys/fs/cgroup/blkio/cgroup.procs": ""}
    return machine(root, HYBRID_MOUNTS, HYBRID_GROUPS, {**files, "sys/fs/cgroup/unified/cgroup.controllers": ""})


def unified(root: Path, own: str = "/user.slice/run.scope") -> Path:
    files = {
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids",
        f"sys/fs/cgroup{own}/cgroup.controllers": "memory pids",
    }
    return machine(root, UNIFIED_MOUNTS, f"0::{own}\n", files)


def test_both_versions_mounted_each_controller_is_found_where_it_is(tmp_path: Path) -> None:
    root = hybrid(tmp_path)
    memory, disk = control_groups.tree_for("memory", root), control_groups.tree_for("disk", root)
    assert (memory.version, memory.top) == (1, root / "sys/fs/cgroup/memory")
    assert memory.folder == root / "sys/fs/cgroup/memory/session/one"
    assert (disk.version, disk.top) == (1, root / "sys/fs/cgroup/blkio")


def test_version_two_alone_serves_both(tmp_path: Path) -> None:
    root = unified(tmp_path)
    memory, disk = control_groups.tree_for("memory", root), control_groups.tree_for("disk", root)
    assert memory == disk
    assert (memory.version, memory.folder) == (2, root / "sys/fs/cgroup/user.slice/run.scope")


def test_without_a_tree_the_missing_controller_is_named(tmp_path: Path) -> None:
    root = machine(tmp_path, "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n", "", {})
    with pytest.raises(LimitsUnavailable, match="disk"):
        control_groups.tree_for("disk", root)


def test_groups_go_to_the_top_and_on_version_two_else_below_our_own(tmp_path: Path) -> None:
    top, own = tmp_path, tmp_path / "own"
    own.mkdir()
    assert control_groups.parents(OwnGroup(version=1, top=top, folder=own)) == [top]
    assert control_groups.parents(OwnGroup(version=2, top=top, folder=own)) == [top, own]
    assert control_groups.parents(OwnGroup(version=2, top=top, folder=top)) == [top]
    assert control_groups.parents(OwnGroup(version=2, top=top, folder=top / "unseen")) == [top]


def test_version_two_asks_for_controllers_that_children_lack(tmp_path: Path) -> None:
    root = unified(tmp_path, own="/mine")
    control = root / "sys/fs/cgroup/cgroup.subtree_control"
    control.write_text("memory pids")
    rates = DiskRates(device="8:0", read=7, write=9)
    with control_groups.group(memory=64 * MiB, name="made", root=root) as made:
        assert made.folders == [root / "sys/fs/cgroup/made"]
        assert control.read_text() == "memory pids"  # nothing was missing
        assert (made.memory / "memory.max").read_text() == str(64 * MiB)
        (made.memory / "memory.max").unlink()  # a real group's files vanish with it
    assert not (root / "sys/fs/cgroup/made").exists()
    with control_groups.group(disk=rates, name="made", root=root) as made:
        assert control.read_text() == "+io"
        assert len(made.folders) == 1
        assert (made.memory / "io.max").read_text() == "8:0 rbps=7 wbps=9"
        (made.memory / "io.max").unlink()


def test_version_one_makes_a_folder_per_controller(tmp_path: Path) -> None:
    root = hybrid(tmp_path)
    with control_groups.group(memory=5 * MiB, disk=DiskRates(device="254:0", read=6, write=4), name="g", root=root) as made:
        assert made.folders == [root / "sys/fs/cgroup/memory/g", root / "sys/fs/cgroup/blkio/g"]
        assert (made.folders[0] / "memory.limit_in_bytes").read_text() == str(5 * MiB)
        assert (made.folders[1] / "blkio.throttle.read_bps_device").read_text() == "254:0 6"
        assert (made.folders[1] / "blkio.throttle.write_bps_device").read_text() == "254:0 4"
        for file in [path for folder in made.folders for path in folder.iterdir()]:
            file.unlink()
    assert not made.folders[0].exists() and not made.folders[1].exists()


def test_kernel_memory_with_and_without_the_kernels_own_sum() -> None:
    assert control_groups.kernel_of_stat("anon 5\nfile 7\nkernel 400\nslab 300\n") == 400
    assert control_groups.kernel_of_stat("anon 5\nkernel_stack 1\npagetables 20\nslab 300\nsock 4000\n") == 4321


def test_a_partition_belongs_to_its_disk(tmp_path: Path) -> None:
    disk = tmp_path / "sys/devices/sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (disk / "sda1/partition").write_text("1\n")
    links = tmp_path / "sys/dev/block"
    links.mkdir(parents=True)
    (links / "8:0").symlink_to(disk)
    (links / "8:1").symlink_to(disk / "sda1")
    assert control_groups.whole_disk("8:1", tmp_path) == "8:0"
    assert control_groups.whole_disk("8:0", tmp_path) == "8:0"


def test_status_lines_become_bytes() -> None:
    fields = watch.status_fields("Name:\tpython\nRssAnon:\t    1234 kB\nVmPTE:\t      8 kB\nThreads:\t3\n")
    assert fields == {"RssAnon": 1234 * 1024, "VmPTE": 8 * 1024}


def test_lines_are_counted_once_and_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = watch.LineCounter(path)
    assert lines.new() == []
    with path.open("wb", buffering=0) as file:
        file.write(b'{"a":1}\n{"b"')
        assert lines.new() == [b'{"a":1}']
        assert lines.new() == []
        file.write(b":2}\n")
        assert lines.new() == [b'{"b":2}']


def test_memory_of_a_tree_counts_what_a_child_holds() -> None:
    script = "held = bytearray(64 << 20); held[::4096] = b'x' * len(held[::4096]); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert child.pid in watch.tree_of(os.getpid())
        anonymous, tables = watch.memory_of([child.pid])
        assert 64 * MiB <= anonymous <= 96 * MiB and tables > 0
    finally:
        child.communicate(b"\n")
    assert watch.memory_of([child.pid]) == (0, 0)


@pytest.fixture
def needs_groups() -> None:
    try:
        with control_groups.group(name=f"fuyou-proof-test-{os.getpid()}"):
            pass
    except LimitsUnavailable as error:
        pytest.skip(f"no control groups for this user: {error}")
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")


@pytest.mark.usefixtures("needs_groups")
def test_a_process_that_takes_more_than_its_group_is_killed_and_counted() -> None:
    hungry = "held = bytearray(256 << 20); held[::4096] = b'x' * len(held[::4096])"
    modest = "held = bytearray(16 << 20); held[::4096] = b'x' * len(held[::4096])"
    with control_groups.group(memory=96 * MiB, name=f"fuyou-proof-test-{os.getpid()}") as made:
        fine = subprocess.run([sys.executable, "-c", modest], preexec_fn=made.enter)
        assert (fine.returncode, made.kills()) == (0, 0)
        killed = subprocess.run([sys.executable, "-c", hungry], preexec_fn=made.enter)
        assert (killed.returncode, made.kills()) == (-9, 1)
        assert made.pids() == []
    assert not any(folder.exists() for folder in made.folders)


@pytest.mark.usefixtures("needs_groups")
def test_a_held_disk_takes_its_time(tmp_path: Path) -> None:
    try:
        rates = DiskRates(device=control_groups.device_of(tmp_path), read=16_000_000, write=16_000_000)
        with control_groups.group(disk=rates, name=f"fuyou-proof-test-{os.getpid()}") as made:
            command = ["dd", "if=/dev/zero", f"of={tmp_path / 'file'}", "bs=1M", "count=16", "oflag=direct"]
            begin = time.monotonic()
            done = subprocess.run(command, preexec_fn=made.enter, capture_output=True)
            seconds = time.monotonic() - begin
    except LimitsUnavailable as error:
        pytest.skip(f"no disk to hold: {error}")
    if done.returncode != 0:
        pytest.skip(f"direct writes do not work on this file system: {done.stderr.decode(errors='replace')}")
    assert seconds >= 16 * MiB / 16e6 * 0.8


# ---- the machine's speed -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_speed_is_that_of_the_looks_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PAUSE", 0.01)
    with Pace() as machine:
        now = time.monotonic()
        while len(machine._looks) < 5:
            time.sleep(0.01)
        assert machine.speed(0.0, now + 60) > 0
        assert machine.speed(0.0, 1e-9) == 0.0
        machine._looks[:] = [(1.0, 0.5), (2.0, 0.25), (3.0, 0.75), (4.0, 9.0)]
        assert machine.speed(2.0, 3.0) == pytest.approx(2.0)
        process = machine._process
    assert process.returncode is not None and not machine._hearing.is_alive()


def test_steps_that_do_not_count_are_left_out() -> None:
    ends = [10.0, 20.0, 30.0, 40.0]
    assert _counted(ends, 2) == (20.0, 40.0) and _counted(ends, 0) == (0.0, 40.0)
