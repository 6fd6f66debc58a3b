"""Runs `fuyou doctor`: checks what a run depends on, software, memory and the drive, and prints one line for each, with the fix
if it is not right. Needs no extension."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fuyou_cli import __version__
from fuyou_cli.core import disk, probe
from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.json_files import one_line
from fuyou_cli.core.paths import scratch_folder
from fuyou_cli.core.units import MiB, gb, gib
from fuyou_cli.engine.processor import slow_bfloat16
from fuyou_cli.machine import profile

from .console import result_console, write_json
from .render.theme import column, show

_OLDEST = {"torch": (2, 10), "transformers": (5, 17)}
_REMEDY = {"torch": "pip install 'torch>=2.10'", "transformers": "pip install 'transformers>=5.17,<5.24'"}
_ROOM = 10 * 10**9  # bytes of disk: with less, even a small run hardly fits
_LEAST_MEMORY = 768 * MiB  # interpreter, torch and the slots of a small model
_COLOUR = {"ok": "green", "note": "yellow", "problem": "bold red"}
_REMOTE = ("nfs", "nfs4", "cifs", "9p", "drvfs", "virtiofs", "vboxsf")


@dataclass(frozen=True, slots=True)
class Check:
    """A finding and what to do about it. `is_problem` means that a run will fail."""

    name: str
    found: str
    advice: str = ""
    is_problem: bool = False

    @property
    def status(self) -> str:
        return "problem" if self.is_problem else "note" if self.advice else "ok"

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "found": self.found, "advice": self.advice}


def examine(folder: Path) -> Iterator[Check]:
    """Yields every check in this order: software, memory, drive."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Check("python", f"{platform.python_version()}, {system}, {os.cpu_count()} cores")
    yield _package("torch")
    yield _package("transformers")
    yield from _gpu()
    yield _extension()
    yield from _memory()
    yield from _drive(folder)
    if probe.is_wsl():
        advice = "keep stores in the Linux file system, not under /mnt/c; raise `memory` in .wslconfig if RAM is short"
        yield Check("wsl", "running under WSL2", advice)


def _package(name: str) -> Check:
    """Reads a package's version without importing it. torch is imported, for its build, which takes a second or two."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "not installed", _REMEDY[name], is_problem=True)
    if _numbers(version.split("+")[0])[:2] < _OLDEST[name]:
        return Check(name, f"{version} is too old", _REMEDY[name], is_problem=True)
    if name != "torch":
        return Check(name, version)
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return Check("torch", f"{version} does not import: {error}", "reinstall it", is_problem=True)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    shown = f"{version}, {build}, {torch.get_num_threads()} threads"
    slow = slow_bfloat16("bfloat16", "cpu")
    return Check("torch", shown, f"{slow}: to train on it, add precision.compute=float32" if slow else "")


def _gpu() -> Iterator[Check]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield _without_driver(str(error))
        return
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        knows = _cuda_version(pynvml.nvmlSystemGetCudaDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            shown = f"{pynvml.nvmlDeviceGetName(handle)}, {_memory_of(handle)}, driver {driver} for CUDA {knows}"
            yield _gpu_check(index, shown, knows, sys.modules.get("torch"))
        yield from _kernel(sys.modules.get("torch"))
    except pynvml.NVMLError as error:
        yield Check("gpu", f"cannot be queried: {error}", "check whether nvidia-smi works")
    finally:
        pynvml.nvmlShutdown()


def _memory_of(handle: Any) -> str:
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:  # of a card without memory of its own, or of a part that may not be asked
        return f"memory not known ({error})"
    return f"{gib(memory.free)} of {gib(memory.total)} free"


def _without_driver(reason: str, root: Path = probe.ROOT) -> Check:
    if profile.has_nvidia_card(root / "sys"):
        advice = "install NVIDIA's driver (nvidia-smi then lists the card); device cpu works without one"
        return Check("gpu", f"found, but without a driver ({reason})", advice)
    return Check("gpu", f"none ({reason}); device cpu works without one")


def _gpu_check(index: int, shown: str, knows: str, torch: Any) -> Check:
    """Judges a GPU. `knows` is the newest CUDA that the driver runs; `torch` is the module, None if it cannot be imported."""
    built = torch.version.cuda if torch is not None else None
    if torch is not None and torch.cuda.is_available():
        advice = ""
    elif built is None:
        advice = "this torch cannot use it: install a CUDA build of torch to train on the GPU"
    elif _numbers(built) > _numbers(knows):
        advice = f"torch is built for CUDA {built}, which needs a newer driver; or install a torch for CUDA {knows}"
    else:
        advice = "torch does not find it: check CUDA_VISIBLE_DEVICES, and whether nvidia-smi works"
    return Check(f"gpu {index}", shown, advice)


def _kernel(torch: Any) -> Iterator[Check]:
    """Whether stages that rest on the GPU are updated by one kernel (`engine/devices/gpu_kernels`)."""
    if torch is None or not torch.version.cuda:
        return
    try:
        version = importlib.metadata.version("cuda-bindings")
        yield Check("updates on the GPU", f"one kernel, compiled by cuda-bindings {version}")
    except importlib.metadata.PackageNotFoundError:
        advice = "pip install cuda-bindings, of the version of torch's CUDA: they are several times faster then"
        yield Check("updates on the GPU", "tensor operations", advice)


def _cuda_version(number: int) -> str:
    """Formats NVML's 12040 as "12.4"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _extension() -> Check:
    remedy = "build it: scripts/quickstart does, or `pip install .` with liburing-dev and cmake"
    try:
        kernels = importlib.import_module("fuyou_cli.swap.kernels")
    except FuyouError as error:  # it has its own message, with a hint for a checkout or an installation
        return Check("native extension", error.message, error.hint or remedy, is_problem=True)
    except (ImportError, OSError) as error:
        return Check("native extension", f"does not load: {error}", remedy, is_problem=True)
    without = "built without io_uring: install liburing-dev and build again; threads are used until then"
    return Check("native extension", str(kernels.build_info()), "" if kernels.has_io_uring() else without)


def _memory() -> Iterator[Check]:
    if hidden := probe.hidden_by_proc():
        yield Check("proc", hidden, "mount it: mount -t proc proc /proc; until then set offload.max_memory.cpu by hand")
    yield Check("ram", f"{gib(probe.physical_memory())}, {gib(probe.memory_available())} available")
    groups = probe.cgroup_limits()
    yield from map(_group, groups) if groups else [Check("cgroup limit", "none")]
    yield _pinned()


def _group(group: probe.CgroupMemory) -> Check:
    shown = f"{gib(group.limit)} (v{group.version}, {group.path}), {gib(group.in_use)} in use"
    if group.limit < _LEAST_MEMORY:
        advice = f"a run needs at least about {gib(_LEAST_MEMORY)}: raise the group's limit, or start outside the group"
        return Check("cgroup limit", shown, advice)
    return Check("cgroup limit", f"{shown}; max_memory.cpu: auto stays below it")


def _pinned(root: Path = probe.ROOT) -> Check:
    """Tells how much RAM a GPU's driver may hold. It limits a run's arena."""
    size, why = probe.pinnable(root)
    wsl = "a run with a GPU keeps its arena below that (max_memory.cpu: auto does); raise `memory` in .wslconfig"
    return Check("pinned memory", f"{gib(size)} at most: {why}", wsl if probe.is_wsl(root) else "")


def _drive(folder: Path) -> Iterator[Check]:
    place = disk.existing(folder)
    if not place.is_dir():
        yield Check("store folder", f"{place} is not a folder", "name a folder (--dir)", is_problem=True)
        return
    mount = probe.mount_of(place)
    kind = mount.kind if mount is not None else "unknown"
    advice = ""
    if kind in probe.IN_MEMORY:
        advice = "this is memory, not a drive: a store here saves nothing"
    elif kind in _REMOTE or kind.startswith("fuse"):
        advice = "not a local drive: slow, and O_DIRECT may not be direct"
    yield Check("store folder", f"{place} ({kind})", advice)
    free = disk.free_space(place)
    remedy = "little space: use another folder (--dir, FUYOU_OFFLOAD_DIR); `fuyou clean` frees old stores"
    yield Check("free space", gb(free), remedy if free < _ROOM else "")
    yield from _store_io(place)
    yield from _drives(place)


def _store_io(place: Path) -> Iterator[Check]:
    """Opens a small store there and starts a daemon, as a run would."""
    try:
        daemon, store = (importlib.import_module(f"fuyou_cli.swap.{name}") for name in ("daemon", "store"))
    except (FuyouError, ImportError, OSError):  # `_extension` reports it
        return
    remedy = "use a folder on a local drive (ext4 or xfs)"
    try:
        with (
            scratch_folder(place) as inside,
            store.Arena(MiB) as memory,
            store.Store.open([inside / "store.bin"], stripe=MiB, size=MiB, create=True) as opened,
            daemon.SwapDaemon(memory, opened, daemon.DaemonOptions(update_threads=0)) as running,
        ):
            direct, backend, description = opened.direct, running.backend, running.description
    except FuyouError as error:
        yield Check("O_DIRECT", error.message, error.hint or remedy, is_problem=True)
        return
    refused = "the file system refuses it: the page cache is used"
    yield Check("O_DIRECT", "works") if direct else Check("O_DIRECT", refused, remedy)
    refusal = profile.io_uring_refusal() or "this build or this process cannot use it"
    yield Check("store I/O", description, "" if backend == "io_uring" else f"threads take more CPU; io_uring: {refusal}")


def _drives(place: Path, sysfs: Path = Path("/sys")) -> Iterator[Check]:
    """Yields every drive under the folder, with the life that is left."""
    devices = profile.block_devices(place, sysfs)
    if not devices:
        yield Check("drive", "unknown: the file system hides it")
    for device in devices:
        drive, advice = profile.drive_at(device), ""
        used = max(drive.used_bytes / drive.rated_bytes if drive.rated_bytes else 0.0, drive.percent_used / 100)
        if drive.model and profile.is_hard_disk(device):  # most virtual drives claim to be hard disks, but have no model
            advice = "the kernel reports a hard disk, which makes a step wait for minutes: use an NVMe drive"
        elif used >= profile.NEARLY_WORN:
            advice = "near the end of its rated life: training writes terabytes, `fuyou plan` shows how many"
        yield Check("drive", f"{device.name}, {drive.model or 'model unknown'}, {profile.endurance(drive)}", advice)


def run_doctor(directory: Path | None, *, json_output: bool) -> bool:
    """Prints the checks, and returns whether none is a problem."""
    checks = list(examine(directory or Path(os.environ.get("FUYOU_OFFLOAD_DIR") or ".")))
    fine = not any(check.is_problem for check in checks)
    if json_output:
        write_json({"ok": fine, "fuyou": __version__, "checks": [check.as_dict() for check in checks]})
        return fine
    grid = Table.grid(padding=(0, 2, 0, 0))
    column(grid)
    column(grid)
    column(grid, wrap=True)
    for check in checks:
        grid.add_row(Text(check.status, _COLOUR[check.status]), check.name, Text(one_line(check.found)))
        if check.advice:
            grid.add_row("", "", Text(one_line(f"-> {check.advice}")))
    show(result_console(), grid)
    return fine
