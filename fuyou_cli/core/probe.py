"""Reads this machine's memory, CPU time, mounts and kernel from files below `root`, which may be a copy of another machine's.

File systems are told apart by what stays when they are mounted again. A device number does not: the next file system that is
mounted may get it.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .disk import existing

ROOT = Path("/")
IN_MEMORY = ("tmpfs", "ramfs")
_GET_UUID = 0x80111500  # FS_IOC_GETFSUUID, from Linux 6.9 on
_UUID_ROOM = 17  # bytes of struct fsuuid2: the length, then the UUID
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupMemory:
    """A memory limit for this process: of its cgroup or of one above."""

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
    quotas = (_quota(folder, group.version) for group in groups for folder in _up(group))
    return min((quota for quota in quotas if quota is not None), default=None)


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
    sizes = _kib(root / "proc/self/status", "RssAnon", "VmPTE")  # one read: a run asks fifty times a second
    if not sizes and root == ROOT:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return sum(sizes.values())


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
    sizes = _kib(root / "proc/self/status", "VmHWM", "RssFile", "RssShmem", "VmPTE")
    try:
        (root / "proc/self/clear_refs").write_text("5")  # proc(5): resets the high-water mark
    except OSError:
        return 0
    highest = sizes.pop("VmHWM", 0)  # files mapped then but not now count as anonymous memory
    return max(0, highest + sizes.pop("VmPTE", 0) - sum(sizes.values()))


def is_wsl(root: Path = ROOT) -> bool:
    return "microsoft" in (_text(root / "proc/sys/kernel/osrelease") or "").lower()


def cgroup_limits(root: Path = ROOT) -> list[CgroupMemory]:
    """Lists every memory limit from this process's cgroup up to the top."""
    limits = (_read_group(folder, group.version) for group in own_groups("memory", root) for folder in _up(group))
    return [limit for limit in limits if limit is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnGroup:
    """The folder of a cgroup that this process is in, and the top of its hierarchy."""

    version: int
    folder: Path
    top: Path


def own_groups(controller: str, root: Path = ROOT) -> list[OwnGroup]:
    """Lists this process's cgroups of a controller, at most one per version."""
    own = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if hierarchy == "0" and not controllers:
            own += _own_group(root, controller, version=2, path=path)
        elif controller in controllers.split(","):
            own += _own_group(root, controller, version=1, path=path)
    return own


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
    limits_set = [int(text) for text in (_text(folder / name) or "" for name in limits) if text.isdecimal()]
    limit = min(limits_set, default=_UNLIMITED)
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
    numbers = ((key, value.split()[:1]) for key, _, value in lines if key in names)
    return {key: int(number[0]) for key, number in numbers if number and number[0].isdecimal()}


def _text(path: Path) -> str | None:
    """Reads a short file of the kernel; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    point: Path
    kind: str  # ext4, tmpfs, overlay, 9p ...
    source: str
    root: str  # the part of the file system that is mounted
    options: str


def mounts(root: Path = ROOT) -> list[Mount]:
    """Lists what is mounted, in the order it was; empty without /proc."""
    try:
        text = os.fsdecode((root / "proc/self/mountinfo").read_bytes())
    except OSError:
        return []
    mounted = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if separator and len(left) >= 6 and len(right) >= 2:
            options = right[2] if len(right) > 2 else ""
            mounted.append(
                Mount(
                    point=Path(_unescaped(left[4])), kind=right[0], source=_unescaped(right[1]), root=left[3], options=options
                )
            )
    return mounted


def _unescaped(name: str) -> str:
    """Undoes the kernel's escapes: spaces, tabs, line ends and backslashes are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)


def mount_of(path: Path, root: Path = ROOT) -> Mount | None:
    """Finds the mount that `path` is on: the deepest one that contains it."""
    resolved = existing(path).resolve()
    on = [mount for mount in mounts(root) if resolved.is_relative_to(mount.point)]
    return max(reversed(on), key=lambda mount: len(mount.point.parts), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystemName:
    """Names a file system: `identity` stays the same when it is mounted again, also elsewhere; `told` is for people."""

    identity: str
    told: str


def file_system_of(path: Path) -> FileSystemName:
    """Names the file system that `path` is or would be on. Raises OSError."""
    place = existing(path)
    mount = mount_of(place)
    if mount is None:
        return FileSystemName(identity=f"device {place.stat().st_dev}", told="an unknown file system")
    told = f"{mount.kind} of {mount.source}, mounted at {mount.point}"
    if mount.kind in IN_MEMORY:
        return FileSystemName(identity=f"{mount.kind} at {mount.point}", told=told)
    if not mount.source.startswith("/dev/"):  # on a network, or of a program; the UUID of an overlay changes
        return FileSystemName(identity=f"{mount.kind} of {mount.source} at {mount.point}", told=told)
    return FileSystemName(identity=f"{mount.kind} {_uuid(place) or mount.source}", told=told)


def _uuid(place: Path) -> str:
    """Returns the UUID of the file system on a drive; empty if the kernel does not tell."""
    descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        answer = bytearray(_UUID_ROOM)
        fcntl.ioctl(descriptor, _GET_UUID, answer)
        return str(uuid.UUID(bytes=bytes(answer[1:]))) if any(answer[1:]) else ""
    except OSError:  # an older kernel, or a file system without one
        device = os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)
    return next((link.name for link in sorted(Path("/dev/disk/by-uuid").glob("*")) if _device_number(link) == device), "")


def _device_number(link: Path) -> int | None:
    try:
        status = link.stat()
    except OSError:
        return None
    return status.st_rdev if stat.S_ISBLK(status.st_mode) else None
