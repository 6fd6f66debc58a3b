"""Makes control groups of version 1 and 2: a hard memory limit and a disk held at fixed rates, for one command at a time.

Version 1 has a hierarchy per controller (a folder in each), version 2 one for all (a single folder). This needs root, or a
delegated group on version 2. Without either, LimitsUnavailable says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fuyou_cli.core import probe
from fuyou_cli.core.disk import existing
from fuyou_cli.core.probe import OwnGroup

ROOT = Path("/")
REMOVAL_SECONDS = 3.0  # how long the kernel may take to let go of a group whose processes have ended
ADVICE = "run as root, or on cgroup v2 under systemd-run --user --scope -p Delegate=yes"
CONTROLLERS = {"memory": {1: "memory", 2: "memory"}, "disk": {1: "blkio", 2: "io"}}


class LimitsUnavailable(Exception):
    """Says that this machine or user cannot set a limit, and what would help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """Holds the bytes per second that a group may read from and write to one device ("254:0")."""

    device: str
    read: int
    write: int


# ---- what is mounted ----------------------------------------------------------------------------------------------


def tree_for(kind: str, root: Path = ROOT) -> OwnGroup:
    """Returns this process's group in the tree that controls `kind` (memory or disk). Each controller is in one tree only, also
    where both versions are mounted. Raises LimitsUnavailable."""
    for version, controller in CONTROLLERS[kind].items():
        for own in probe.own_groups(controller, root):
            if own.version == version and (version == 1 or controller in _words(own.top / "cgroup.controllers")):
                return own
    raise LimitsUnavailable(f"no control group tree for {kind} is mounted under /sys/fs/cgroup")


def parents(tree: OwnGroup) -> list[Path]:
    """Lists where a group may be made, best first: at the top, where nothing above limits it; on version 2 also below this
    process's own group, which is what a delegated user has."""
    is_inside = tree.version == 2 and tree.folder != tree.top and tree.folder.is_dir() and ".." not in tree.folder.parts
    return [tree.top, tree.folder] if is_inside else [tree.top]


def device_of(path: Path, root: Path = ROOT) -> str:
    """Returns the whole disk that holds `path`, as major:minor. Raises LimitsUnavailable for a file system without one."""
    number = existing(path).stat().st_dev
    if os.major(number) == 0:  # btrfs, overlay and others number themselves: ask what they were mounted from
        mount = probe.mount_of(path, root)
        source = Path(mount.source) if mount else Path()
        if not source.is_block_device():
            raise LimitsUnavailable(f"{path} is not on a disk of its own ({mount.kind if mount else 'unknown'})")
        number = source.stat().st_rdev
    return whole_disk(f"{os.major(number)}:{os.minor(number)}", root)


def whole_disk(device: str, root: Path = ROOT) -> str:
    """Returns a partition's disk, and any other device itself: rates are held per disk."""
    entry = (root / "sys/dev/block" / device).resolve()
    if (entry / "partition").exists():
        return (entry.parent / "dev").read_text().strip()
    return device


# ---- a group ------------------------------------------------------------------------------------------------------


class Group:
    """Holds the folders of one group: its limits, its processes and what the kernel says of them."""

    def __init__(self, memory: tuple[int, Path], disk: tuple[int, Path] | None) -> None:
        self.version, self.memory = memory
        self.disk = disk
        self.folders = [self.memory] + ([disk[1]] if disk is not None and disk[1] != self.memory else [])

    def hold_memory(self, limit: int) -> None:
        """Allows at most `limit` bytes, swap included."""
        if self.version == 1:
            (self.memory / "memory.limit_in_bytes").write_text(str(limit))
            with_swap = self.memory / "memory.memsw.limit_in_bytes"
            if with_swap.exists():
                with_swap.write_text(str(limit))
            return
        (self.memory / "memory.max").write_text(str(limit))
        swap = self.memory / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")

    def hold_disk(self, rates: DiskRates) -> None:
        assert self.disk is not None
        version, folder = self.disk
        for name, line in throttle_lines(version, rates):
            (folder / name).write_text(line)

    def enter(self) -> None:
        """Puts the calling process into the group. A child calls it between fork and exec, so nothing is allocated twice."""
        for folder in self.folders:
            file = os.open(folder / "cgroup.procs", os.O_WRONLY)
            os.write(file, b"0")
            os.close(file)

    def pids(self) -> list[int]:
        return [int(word) for word in _words(self.memory / "cgroup.procs")]

    def kernel_bytes(self) -> int:
        """Returns what the kernel holds for the group: page tables, stacks, slabs."""
        if self.version == 1:
            words = _words(self.memory / "memory.kmem.usage_in_bytes")
            return int(words[0]) if words else 0
        return kernel_of_stat((self.memory / "memory.stat").read_text())

    def peak_with_files(self) -> int:
        """Returns the kernel's own maximum, page cache included; 0 if it keeps none."""
        words = _words(self.memory / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"))
        return int(words[0]) if words else 0

    def kills(self) -> int:
        """Returns how many processes of the group were killed for memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return numbers_of((self.memory / name).read_text()).get("oom_kill", 0)


def throttle_lines(version: int, rates: DiskRates) -> list[tuple[str, str]]:
    """Returns (file, text) pairs that hold a device at these rates."""
    if version == 1:
        return [
            ("blkio.throttle.read_bps_device", f"{rates.device} {rates.read}"),
            ("blkio.throttle.write_bps_device", f"{rates.device} {rates.write}"),
        ]
    return [("io.max", f"{rates.device} rbps={rates.read} wbps={rates.write}")]


def kernel_of_stat(text: str) -> int:
    """Returns the kernel bytes of version 2's memory.stat, which has no sum before Linux 5.18."""
    numbers = numbers_of(text)
    if "kernel" in numbers:
        return numbers["kernel"]
    return sum(numbers.get(name, 0) for name in ("kernel_stack", "pagetables", "percpu", "slab", "sock"))


def numbers_of(text: str) -> dict[str, int]:
    """Returns the lines of the form `name number`."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


@contextmanager
def group(
    *, memory: int | None = None, disk: DiskRates | None = None, name: str | None = None, root: Path = ROOT
) -> Iterator[Group]:
    """Makes a group with these limits and removes it at the end. Raises LimitsUnavailable with what would help."""
    made: dict[Path, Path] = {}  # top of a tree -> the group's folder in it
    try:
        try:
            one = _open_group(made, with_disk=disk is not None, name=name or f"fuyou-proof-{os.getpid()}", root=root)
            if memory is not None:
                one.hold_memory(memory)
            if disk is not None:
                one.hold_disk(disk)
        except PermissionError as error:
            raise LimitsUnavailable(f"{error.filename}: {error.strerror}; {ADVICE}") from error
        yield one
    finally:
        for folder in made.values():
            _remove(folder)


def _open_group(made: dict[Path, Path], *, with_disk: bool, name: str, root: Path) -> Group:
    trees = {kind: tree_for(kind, root) for kind in (("memory", "disk") if with_disk else ("memory",))}
    for tree in trees.values():
        if tree.top not in made:
            wanted = {CONTROLLERS[kind][tree.version] for kind, other in trees.items() if other.top == tree.top}
            made[tree.top] = _make(tree, wanted, name)
    places = {kind: (tree.version, made[tree.top]) for kind, tree in trees.items()}
    return Group(places["memory"], places.get("disk"))


def _make(tree: OwnGroup, controllers: set[str], name: str) -> Path:
    """Makes the folder of a new group that has `controllers`, at the first place that allows it."""
    refusals = []
    for parent in parents(tree):
        folder = parent / name
        try:
            if tree.version == 2:
                missing = controllers - set(_words(parent / "cgroup.subtree_control"))
                if missing:
                    (parent / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in sorted(missing)))
            _remove(folder)  # left behind by a script that was killed, with its limits
            folder.mkdir()
            return folder
        except OSError as error:  # not ours to write, or (EBUSY) a group with processes of its own
            refusals.append(f"{parent}: {error.strerror}")
    raise LimitsUnavailable(f"no group for {', '.join(sorted(controllers))}: {'; '.join(refusals)}; {ADVICE}")


def _remove(folder: Path) -> None:
    """Removes an empty group; the kernel needs a moment after its last process."""
    until = time.monotonic() + REMOVAL_SECONDS
    while folder.exists():
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
            time.sleep(0.05)


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().split()
    return []
