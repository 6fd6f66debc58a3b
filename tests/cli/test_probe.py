"""Tests machine readings, on this machine and on trees laid out like other machines' /proc and /sys."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fuyou_cli.cli import doctor
from fuyou_cli.core import disk, probe
from fuyou_cli.machine import profile
from fuyou_cli.machine.profile import core_count, rated_bytes

from .conftest import environment, tree, with_drive

GIB = 1 << 30

MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\n"
V2_MOUNT = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def test_no_limit_is_physical_memory(tmp_path):
    root = tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user\n", "proc/self/mountinfo": V2_MOUNT,
                           "sys/fs/cgroup/user/memory.max": "max\n"})  # fmt: skip
    assert probe.memory_limit(root) == 16 * GIB
    assert probe.memory_available(root) == 12 * GIB
    assert probe.cgroup_limits(root) == []


def test_the_tightest_limit_above_a_v2_cgroup_counts_and_page_cache_is_free(tmp_path):
    root = tree(tmp_path, {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user/job\n", "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/user/job/memory.max": f"{8 * GIB}\n", "sys/fs/cgroup/user/job/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user/memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n",
    })  # fmt: skip
    assert probe.memory_limit(root) == 4 * GIB
    assert probe.memory_available(root) == 4 * GIB - (3 * GIB - GIB - GIB // 2)


def test_v1_inside_a_container_whose_own_cgroup_is_mounted_at_the_top(tmp_path):
    mount = V1_MOUNT.replace("0:32 / ", "0:32 /docker/abc ")
    root = tree(tmp_path, {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "5:memory:/docker/abc\n0::/\n", "proc/self/mountinfo": mount,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 4}\ntotal_active_file 0\n",
    })  # fmt: skip
    (group,) = probe.cgroup_limits(root)
    assert (group.version, group.limit, group.in_use) == (1, 2 * GIB, GIB - GIB // 4)


def test_v1_unlimited_is_no_limit(tmp_path):
    root = tree(tmp_path, {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "5:memory:/\n", "proc/self/mountinfo": V1_MOUNT,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    })  # fmt: skip
    assert probe.memory_limit(root) == 16 * GIB


def test_a_group_that_is_slowed_down_above_a_size_has_no_more(tmp_path):
    root = tree(tmp_path, {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user/job\n", "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/user/job/memory.max": f"{8 * GIB}\n", "sys/fs/cgroup/user/job/memory.high": f"{6 * GIB}\n",
        "sys/fs/cgroup/user/job/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/user/memory.max": "max\n", "sys/fs/cgroup/user/memory.high": f"{7 * GIB}\n",
    })  # fmt: skip
    assert [group.limit for group in probe.cgroup_limits(root)] == [6 * GIB, 7 * GIB]
    assert (probe.memory_limit(root), probe.memory_available(root)) == (6 * GIB, 5 * GIB)
    tree(root, {"sys/fs/cgroup/user/job/memory.high": "max\n", "sys/fs/cgroup/user/memory.high": "max\n"})
    assert probe.memory_limit(root) == 8 * GIB


V1_CPU_MOUNT = "34 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2_CPU = {"proc/self/cgroup": "0::/user/job\n", "proc/self/mountinfo": V2_MOUNT}
V1_CPU = {"proc/self/cgroup": "3:cpu,cpuacct:/job\n4:cpuset:/\n", "proc/self/mountinfo": V1_CPU_MOUNT}
OWN_V1 = "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_"


@pytest.mark.parametrize(
    ("files", "quota", "cores"),
    [
        ({}, None, 64),
        ({**V2_CPU, "sys/fs/cgroup/user/job/cpu.max": "max 100000\n"}, None, 64),
        ({**V2_CPU, "sys/fs/cgroup/user/job/cpu.max": "200000 100000\n"}, 2.0, 2),  # docker's --cpus=2
        ({**V2_CPU, "sys/fs/cgroup/user/job/cpu.max": "max 100000\n", "sys/fs/cgroup/user/cpu.max": "250000 100000\n"}, 2.5, 3),
        ({**V2_CPU, "sys/fs/cgroup/user/job/cpu.max": "10000 100000\n"}, 0.1, 1),
        ({**V2_CPU, "sys/fs/cgroup/user/job/cpu.max": "9900000 100000\n"}, 99.0, 64),  # of what may be run on
        ({**V2_CPU, "sys/fs/cgroup/user/job/cpu.max": "\n"}, None, 64),
        ({**V1_CPU, f"{OWN_V1}quota_us": "-1\n", f"{OWN_V1}period_us": "100000\n"}, None, 64),
        ({**V1_CPU, f"{OWN_V1}quota_us": "150000\n", f"{OWN_V1}period_us": "50000\n"}, 3.0, 3),
        ({**V1_CPU, f"{OWN_V1}quota_us": "150000\n"}, None, 64),
    ],
)
def test_cores_are_what_a_quota_gives_the_time_of(files, quota, cores, tmp_path, monkeypatch):
    root, ask = tree(tmp_path, files), probe.cpu_quota
    assert ask(root) == quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(probe, "cpu_quota", lambda: ask(root))
    assert core_count() == cores


def test_a_system_without_any_of_these_files(tmp_path):
    assert probe.memory_limit(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert probe.mount_of(tmp_path, tmp_path) is None
    assert probe.process_bytes(tmp_path) == 0


def test_this_machine():
    assert 0 < probe.memory_available() <= probe.memory_limit() <= probe.physical_memory()
    mount = probe.mount_of(Path("/proc/self"))
    assert mount is not None and mount.kind == "proc"


def test_a_real_limit_is_seen_by_a_process_inside_it():
    """Runs in a memory cgroup made for this test; where none can be made, the trees above have to do."""
    limit = 512 << 20
    mount = next((mount for mount in probe.mounts() if probe._governs(mount, "memory", 1)), None)
    folder = mount.point / f"fuyou-test-{os.getpid()}" if mount is not None else None
    try:
        if folder is None:
            pytest.skip("no cgroup v1 memory controller")
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        enter = "import sys; open(sys.argv[1], 'w').write('0')"
        code = f"{enter}; from fuyou_cli.core import probe; print(probe.memory_limit())"
        command = [sys.executable, "-c", code, str(folder / "cgroup.procs")]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        assert int(done.stdout) == limit
    finally:
        folder.rmdir()


TOUCHING = """
import ctypes
from fuyou_cli.core import disk, probe
before = probe.process_bytes()
block = ctypes.create_string_buffer(64 << 20)
ctypes.memset(block, 1, len(block))
print(probe.process_bytes() - before)
"""


def test_process_bytes_counts_what_is_touched():
    """Runs in a process of its own: elsewhere others may take and give back memory meanwhile."""
    done = subprocess.run([sys.executable, "-c", TOUCHING], env=environment(), capture_output=True, text=True, check=True)
    assert 63 << 20 <= int(done.stdout) <= 72 << 20


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path):
    assert disk.free_space(tmp_path / "a" / "b") > 0
    assert disk.existing(tmp_path / "a" / "b") == tmp_path


def test_wsl_is_recognised_by_its_kernel(tmp_path):
    assert probe.is_wsl(tree(tmp_path / "w", {"proc/sys/kernel/osrelease": "5.15.90.1-microsoft-standard-WSL2\n"}))
    assert not probe.is_wsl(tree(tmp_path / "l", {"proc/sys/kernel/osrelease": "6.8.0-45-generic\n"}))


def test_a_partition_leads_to_its_drive(tmp_path):
    number = tmp_path.stat().st_dev
    drive = tmp_path / "sys" / "devices" / "nvme0n1"
    tree(drive, {"device/model": "Some Drive   2TB \n", "nvme0n1p2/partition": "2\n"})
    link = tmp_path / "sys" / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(drive / "nvme0n1p2")
    (device,) = profile.block_devices(tmp_path, tmp_path / "sys")
    assert device == drive
    assert profile.drive_model(device) == "Some Drive 2TB"
    assert profile.nvme_wear(device, tmp_path) is None


def test_a_smart_log_page():
    log = bytearray(512)
    log[5] = 37
    log[48:64] = (2_000_000).to_bytes(16, "little")
    assert profile.parse_smart(bytes(log)) == profile.Wear(percent_used=37, written=1_024_000_000_000)


def test_every_drive_of_a_raid(tmp_path):
    """Puts a file system on a volume over two partitions of two drives, and a third drive taken whole."""
    number = tmp_path.stat().st_dev
    sysfs = tmp_path / "sys"
    for name, model, sectors in (
        ("nvme0n1", "Samsung SSD 990 PRO 2TB", 3907029168),
        ("nvme1n1", "Nobody knows", 8),
        ("sdc", "", 16),
    ):
        tree(sysfs / "devices" / name, {"device/model": f"{model}  \n", "size": f"{sectors}\n", f"{name}p1/partition": "1\n"})
    for volume, below in (("dm-0", "md0"), ("md0", "nvme0n1/nvme0n1p1 nvme1n1/nvme1n1p1 sdc")):
        slaves = sysfs / "devices" / volume / "slaves"
        slaves.mkdir(parents=True)
        for layer in below.split():
            (slaves / Path(layer).name).symlink_to(sysfs / "devices" / layer)
    link = sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(sysfs / "devices" / "dm-0")
    found = profile.drives_under(tmp_path, tmp_path / "new", sysfs=sysfs)
    assert [(drive.model, drive.capacity, drive.rated_bytes) for drive in found] == [
        ("Samsung SSD 990 PRO 2TB", 2_000_398_934_016, 1200 * 10**12), ("Nobody knows", 4096, 0), ("", 8192, 0),
    ]  # fmt: skip
    assert profile.drives_under(tmp_path, sysfs=tmp_path / "no sysfs") == ()


@pytest.mark.parametrize(
    ("model", "capacity", "rated"),
    [
        ("Samsung SSD 990 PRO 1TB", 1_000_204_886_016, 600), ("SAMSUNG MZQL23T8HCLS-00A07", 3_840_755_982_336, 7008),
        ("WD_BLACK SN850X 4000GB", 4_000_787_030_016, 2400), ("SOLIDIGM SSDPF2KX038TZ", 3_840_755_982_336, 7008),
        ("CT2000T700SSD3", 2_000_398_934_016, 1200), ("Samsung SSD 970 PRO 1TB", 1_024_209_543_168, 0),
        ("WD_BLACK SN850XE", 10**12, 0), ("", 10**12, 0),
    ],
)  # fmt: skip
def test_what_a_drive_is_rated_for(model, capacity, rated):
    assert rated_bytes(model, capacity) == rated * 10**12


@pytest.mark.parametrize(("status", "wear"), [(0, profile.Wear(percent_used=0, written=0)), (2, None)])
def test_a_drives_no_is_no_empty_log(status, wear, tmp_path, monkeypatch):
    """The ioctl of a command that the drive refuses succeeds, with the drive's own status."""
    tree(tmp_path, {"nvme0n1": ""})
    monkeypatch.setattr("fcntl.ioctl", lambda file, number, command: status)
    assert profile.nvme_wear(tmp_path / "sys" / "nvme0n1", tmp_path) == wear


def test_how_worn_a_drive_says_it_is(tmp_path, monkeypatch):
    """Keeps it of a drive whose rating nobody knows, and doctor says it."""
    monkeypatch.setattr(profile, "nvme_wear", lambda device: profile.Wear(percent_used=95, written=7 * 512_000))
    sysfs = with_drive(tmp_path, {"device/model": "No Name\n", "size": "8\n"})
    (drive,) = profile.drives_under(tmp_path, sysfs=sysfs)
    assert (drive.rated_bytes, drive.percent_used, drive.used_bytes) == (0, 95, 7 * 512_000)
    assert profile.nearly_worn((drive, replace(drive, percent_used=89))) == [
        "No Name reports that 95 % of its endurance is used"
    ]
    (check,) = doctor._drives(tmp_path, sysfs)
    assert check.status == "note" and "95% of its endurance used" in check.found


def test_what_may_be_pinned(tmp_path):
    plain = tree(tmp_path / "a", {"proc/meminfo": MEMINFO, "proc/sys/kernel/osrelease": "6.8.0-45-generic\n"})
    assert probe.pinnable(plain) == (16 * GIB, "all of RAM")
    wsl = tree(tmp_path / "b", {"proc/meminfo": MEMINFO, "proc/sys/kernel/osrelease": "5.15-microsoft-standard-WSL2\n"})
    assert probe.pinnable(wsl)[0] == 8 * GIB and "WSL" in probe.pinnable(wsl)[1]
    found = [doctor._pinned(root) for root in (plain, wsl)]
    assert [(check.status, check.found) for check in found] == [
        ("ok", "16.00 GiB at most: all of RAM"), ("note", "8.00 GiB at most: WSL lets half of RAM be pinned"),
    ]  # fmt: skip
    assert "arena" in found[1].advice
    bound = tree(tmp_path / "c", {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "5:memory:/\n", "proc/self/mountinfo": V1_MOUNT,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
    })  # fmt: skip
    assert probe.pinnable(bound)[0] == 3 * GIB and "control group" in probe.pinnable(bound)[1]
