"""Reads this machine's memory, CPU time, disk and kernel from files below `root`, which may be a copy of another machine's
files."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuyou_cli.core.disk import existing as existing
from fuyou_cli.core.mounts import IN_MEMORY as IN_MEMORY
from fuyou_cli.core.mounts import ROOT as ROOT
from fuyou_cli.core.mounts import Mount
from fuyou_cli.core.mounts import mount_of as mount_of
from fuyou_cli.core.mounts import mounts as mounts

_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupMemory:
    """Holds a memory limit for this process: of its cgroup or of one above."""

    version: int
    path: Path
    limit: int
    in_use: int  # without the page cache, which the kernel frees when needed


def memory_limit(root: Path = ROOT) -> int:
    """Returns the most bytes that this process can have: physical memory or the tightest cgroup limit, whichever is less."""
    return min([physical_memory(root), *(group.limit for group in cgroup_limits(root))])


def memory_available(root: Path = ROOT) -> int:
    """Returns the bytes that can be allocated now without swapping or being killed. Page cache counts as free."""
    free = _kib(root / "proc/meminfo", "MemAvailable").get("MemAvailable") or physical_memory(root)
    return max(0, min([free, *(group.limit - group.in_use for group in cgroup_limits(root))]))


def physical_memory(root: Path = ROOT) -> int:
    return _kib(root / "proc/meminfo", "MemTotal").get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pinnable(root: Path = ROOT) -> tuple[int, str]:
    """Returns the bytes of host memory that a GPU's driver may pin, and what sets that limit. The driver ignores
    RLIMIT_MEMLOCK."""
    limits = [(group.limit, f"the control group {group.path} allows no more") for group in cgroup_limits(root)]
    whole = physical_memory(root)
    limits.append((whole // 2, "WSL lets half of RAM be pinned") if is_wsl(root) else (whole, "all of RAM"))
    return min(limits, key=lambda limit: limit[0])


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns how many cores' time this process's control groups allow; None if they set no limit."""
    groups = own_groups("cpu", root)
    found = (_quota(folder, group.version) for group in groups for folder in _up(group))
    return min((quota for quota in found if quota is not None), default=None)


def _quota(folder: Path, version: int) -> float | None:
    if version == 2:
        quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
    else:
        quota, period = (_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    limited = quota.isdecimal() and period.isdecimal() and int(period)  # neither "max" nor -1
    return int(quota) / int(period) if limited else None


def process_bytes(root: Path = ROOT) -> int:
    """Returns the anonymous memory and page tables of this process: what a memory limit counts, without files. Where this
    machine's kernel does not tell, the most that was ever resident, with files."""
    found = _kib(root / "proc/self/status", "RssAnon", "VmPTE")  # one read: a run asks fifty times a second
    if not found and root == ROOT:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return sum(found.values())


def hidden_by_proc() -> str:
    """Says what cannot be known where /proc is not mounted, or hides this process. Empty where it tells."""
    if _kib(ROOT / "proc/self/status", "RssAnon"):
        return ""
    return (
        "/proc tells nothing of this process (is it mounted?): its memory counts as the most it ever had, and limits of "
        "control groups are not seen"
    )


def highest_bytes(root: Path = ROOT) -> int:
    """Returns the highest value of that since the last call; 0 if the kernel does not tell."""
    found = _kib(root / "proc/self/status", "VmHWM", "RssFile", "RssShmem", "VmPTE")
    try:
        (root / "proc/self/clear_refs").write_text("5")  # proc(5): resets the high-water mark
    except OSError:
        return 0
    highest = found.pop("VmHWM", 0)  # files mapped then but not now count as anonymous memory
    return max(0, highest + found.pop("VmPTE", 0) - sum(found.values()))


def free_space(path: Path) -> int:
    """Returns the bytes that an ordinary user can still write where `path` is or would be. Raises OSError."""
    return shutil.disk_usage(existing(path)).free


def striped_space(*folders: Path) -> int:
    """Returns the bytes that files striped evenly over `folders` can have in all. Raises OSError."""
    systems = [existing(folder).stat().st_dev for folder in folders]
    shares = [free_space(folder) // systems.count(system) for folder, system in zip(folders, systems, strict=True)]
    return min(shares) * len(folders)


def is_wsl(root: Path = ROOT) -> bool:
    return "microsoft" in (_text(root / "proc/sys/kernel/osrelease") or "").lower()


def cgroup_limits(root: Path = ROOT) -> list[CgroupMemory]:
    """Lists every memory limit from this process's cgroup up to the top."""
    found = (_read_group(folder, group.version) for group in own_groups("memory", root) for folder in _up(group))
    return [limit for limit in found if limit is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnGroup:
    """Holds the folder of a cgroup that this process is in, and the top of its hierarchy."""

    version: int
    folder: Path
    top: Path


def own_groups(controller: str, root: Path = ROOT) -> list[OwnGroup]:
    """Lists this process's cgroups of a controller, at most one per version."""
    found = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if hierarchy == "0" and not controllers:
            found += _own_group(root, controller, version=2, path=path)
        elif controller in controllers.split(","):
            found += _own_group(root, controller, version=1, path=path)
    return found


def _own_group(root: Path, controller: str, *, version: int, path: str) -> list[OwnGroup]:
    mount = next((mount for mount in mounts(root) if _governs(mount, controller, version)), None)
    if mount is None:
        return []
    # A container sees its cgroup's path as from outside, but its own folder is mounted at the top.
    inside = path.removeprefix(mount.root) if mount.root != "/" else path
    top = root / mount.point.relative_to("/")
    return [OwnGroup(version=version, folder=top / inside.strip("/"), top=top)]


def _up(group: OwnGroup) -> Iterator[Path]:
    """Lists the group's folder and those above it, to the top: each may set a limit."""
    for folder in (group.folder, *group.folder.parents):
        if not folder.is_relative_to(group.top) or ".." in folder.parts:
            break
        yield folder


def _governs(mount: Mount, controller: str, version: int) -> bool:
    return mount.kind == "cgroup2" if version == 2 else mount.kind == "cgroup" and controller in mount.options.split(",")


def _read_group(folder: Path, version: int) -> CgroupMemory | None:
    # memory.high kills nothing, but slows a process down until it is below again
    limits = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    found = [int(text) for text in (_text(folder / name) or "" for name in limits) if text.isdecimal()]
    limit = min(found, default=_UNLIMITED)
    if limit >= _UNLIMITED:
        return None
    used = _text(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or ""
    prefix = "" if version == 2 else "total_"
    cached = _numbers(folder / "memory.stat", " ", f"{prefix}inactive_file", f"{prefix}active_file")
    in_use = max(0, int(used) - sum(cached.values())) if used.isdecimal() else 0
    return CgroupMemory(version=version, path=folder, limit=limit, in_use=in_use)


def _kib(path: Path, *names: str) -> dict[str, int]:
    """Reads the bytes of lines such as "RssAnon:    1234 kB", all from one read."""
    return {name: 1024 * number for name, number in _numbers(path, ":", *names).items()}


def _numbers(path: Path, separator: str, *names: str) -> dict[str, int]:
    """Reads the first whole number of each line that begins with one of `names` and a separator."""
    lines = (line.partition(separator) for line in (_text(path) or "").splitlines())
    found = ((key, value.split()[:1]) for key, _, value in lines if key in names)
    return {key: int(number[0]) for key, number in found if number and number[0].isdecimal()}


def _text(path: Path) -> str | None:
    """Reads a short file of the kernel; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
