"""`fuyou doctor`: one line for each thing a run depends on, with what to do where it is not right."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fuyou_cli import __version__
from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.units import MiB, gb, gib
from fuyou_cli.machine import drives, probe
from fuyou_cli.machine.scratch import scratch_folder
from fuyou_cli.spec.hardware import Drive

from .console import styled, write_json, write_result

Status = Literal["ok", "note", "problem"]
_COLOUR = {"ok": "32", "note": "33", "problem": "1;31"}
_OLDEST = {"torch": (2, 10), "transformers": (5, 17)}
_ROOM = 10 * 10**9  # bytes of disk below which even a small run is tight
_LEAST_MEMORY = 768 * MiB  # interpreter, torch and the slots of a small model
_IN_MEMORY = ("tmpfs", "ramfs")
_REMOTE = ("nfs", "nfs4", "cifs", "9p", "drvfs", "fuse.sshfs", "virtiofs", "vboxsf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """`problem`: a run will fail. `note`: it will run, but worth knowing."""

    name: str
    status: Status
    found: str
    advice: str = ""


def run_doctor(directory: Path | None, *, json_output: bool) -> bool:
    """Prints the checks; True when nothing is a problem."""
    folder = directory or Path(os.environ.get("FUYOU_OFFLOAD_DIR") or ".")
    checks = examine(folder)
    fine = not any(check.status == "problem" for check in checks)
    if json_output:
        write_json({"ok": fine, "fuyou": __version__, "checks": [asdict(check) for check in checks]})
        return fine
    width = max(len(check.name) for check in checks)
    for check in checks:
        status = styled(f"{check.status:<7}", _COLOUR[check.status], sys.stdout)
        begin = width + 11
        write_result(check.found, lead=f"{status}  {check.name:<{width}}  ", hang=begin)
        if check.advice:
            write_result(check.advice, lead=f"{'->':>{begin + 2}} ", hang=begin + 3)
    return fine


def examine(folder: Path) -> list[Check]:
    """Lists every check, in the order of the things it is about: software, memory, drive."""
    about: tuple[Callable[[], Iterator[Check]], ...] = (
        _python,
        lambda: _package("torch", "pip install 'torch>=2.10'"),
        lambda: _package("transformers", "pip install 'transformers>=5.17,<5.24'"),
        _gpu,
        _extension,
        _io_uring,
        _memory,
        _memlock,
        lambda: _drive(folder),
        _wsl,
    )
    return [check for section in about for check in section()]


def _python() -> Iterator[Check]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Check(name="python", status="ok", found=f"{platform.python_version()}, {system}, {os.cpu_count()} cores")


def _package(name: str, remedy: str) -> Iterator[Check]:
    """Reads a package's version without importing it; torch is imported for its build, which takes a second or two."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        yield Check(name=name, status="problem", found="not installed", advice=remedy)
        return
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST[name]:
        yield Check(name=name, status="problem", found=f"{version} is too old", advice=remedy)
    elif name == "torch":
        yield _torch_build(version)
    else:
        yield Check(name=name, status="ok", found=version)


def _torch_build(version: str) -> Check:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return Check(name="torch", status="problem", found=f"{version} does not import: {error}", advice="reinstall it")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check(name="torch", status="ok", found=f"{version}, {build}, {torch.get_num_threads()} threads")


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
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            found = f"{name}, {gib(memory.free)} of {gib(memory.total)} free, driver {driver} for CUDA {knows}"
            yield _gpu_check(index, found, knows, sys.modules.get("torch"))
    except pynvml.NVMLError as error:
        yield Check(name="gpu", status="note", found=f"cannot be asked: {error}")
    finally:
        pynvml.nvmlShutdown()


def _without_driver(reason: str, root: Path = probe.ROOT) -> Check:
    if drives.has_nvidia_card(root / "sys"):
        advice = "install NVIDIA's driver (nvidia-smi then lists the card); device cpu works without one"
        return Check(name="gpu", status="note", found=f"there is one, without a driver ({reason})", advice=advice)
    return Check(name="gpu", status="ok", found=f"none ({reason}); device cpu works without one")


def _gpu_check(index: int, found: str, knows: str, torch: Any) -> Check:
    """Judges a card. `knows`: the newest CUDA that the driver runs; `torch`: the module, None where it does not import."""
    if torch is not None and torch.cuda.is_available():
        return Check(name=f"gpu {index}", status="ok", found=found)
    built = getattr(torch.version, "cuda", None) if torch is not None else None
    if built is None:
        advice = "this torch cannot use it: install a CUDA build of torch to train on the GPU"
    elif _numbers(built) > _numbers(knows):
        advice = f"torch is built for CUDA {built}, which needs a newer driver; or install a torch for CUDA {knows}"
    else:
        advice = "torch does not find it: look at CUDA_VISIBLE_DEVICES, and whether nvidia-smi works here"
    return Check(name=f"gpu {index}", status="note", found=found, advice=advice)


def _cuda_version(number: int) -> str:
    """Spells NVML's 12040 as "12.4"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _extension() -> Iterator[Check]:
    remedy = "build it: scripts/quickstart does, or `pip install .` with liburing-dev and cmake"
    try:
        kernels = importlib.import_module("fuyou_cli.swap.kernels")
    except FuyouError as error:  # its own message, and a hint that knows a checkout from an installation
        yield Check(name="native extension", status="problem", found=error.message, advice=error.hint or remedy)
        return
    except (ImportError, OSError) as error:
        yield Check(name="native extension", status="problem", found=f"does not load: {error}", advice=remedy)
        return
    info = str(kernels.build_info())
    built = kernels.has_io_uring()
    advice = "" if built else "built without io_uring: install liburing-dev and build again; threads are used until then"
    yield Check(name="native extension", status="ok" if built else "note", found=info, advice=advice)


def _io_uring() -> Iterator[Check]:
    refusal = drives.io_uring_refusal()
    if refusal is None:
        yield Check(name="io_uring", status="ok", found="usable")
        return
    yield Check(name="io_uring", status="note", found=refusal, advice="a thread pool is used instead; it takes more CPU")


def _memory() -> Iterator[Check]:
    total, free = probe.physical_memory(), probe.memory_available()
    yield Check(name="ram", status="ok", found=f"{gib(total)}, {gib(free)} available")
    groups = probe.cgroup_limits()
    if not groups:
        yield Check(name="cgroup limit", status="ok", found="none")
    for group in groups:
        yield _group(group)
    yield _pinned()


def _group(group: probe.CgroupMemory) -> Check:
    found = f"{gib(group.limit)} (v{group.version}, {group.path}), {gib(group.in_use)} in use"
    if group.limit < _LEAST_MEMORY:
        advice = f"a run takes {gib(_LEAST_MEMORY)} or so at least: raise the group's limit, or start outside of it"
        return Check(name="cgroup limit", status="note", found=found, advice=advice)
    return Check(name="cgroup limit", status="ok", found=f"{found}; max_memory.cpu: auto stays inside")


def _pinned(root: Path = probe.ROOT) -> Check:
    """Tells what a GPU's driver may hold of RAM, which bounds a run's arena."""
    size, why = probe.pinnable(root)
    advice = ""
    if probe.is_wsl(root):
        advice = "a run with a GPU keeps its arena below that (max_memory.cpu: auto does); raise `memory` in .wslconfig"
    return Check(name="pinned memory", status="note" if advice else "ok", found=f"{gib(size)} at most: {why}", advice=advice)


def _memlock() -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else gib(soft)
    advice = ""
    if not unlimited and soft < 64 * MiB:
        found += ": I/O uses memory that is not registered, which works"
        advice = "`ulimit -l unlimited` (root, or LimitMEMLOCK=infinity) spares a little CPU"
    yield Check(name="memlock", status="ok", found=found, advice=advice)


def _drive(folder: Path) -> Iterator[Check]:
    place = probe.existing(folder)
    if not place.is_dir():
        yield Check(name="store folder", status="problem", found=f"{place} is no folder", advice="name a folder (--dir)")
        return
    mount = probe.mount_of(place)
    kind = mount.kind if mount is not None else "unknown"
    advice = ""
    if kind in _IN_MEMORY:
        advice = "this is memory, not a drive: a store here saves nothing"
    elif kind in _REMOTE or kind.startswith("fuse"):
        advice = "not a local drive: slow, and O_DIRECT may not mean what it says"
    yield Check(name="store folder", status="note" if advice else "ok", found=f"{place} ({kind})", advice=advice)
    free = probe.free_space(place)
    low = free < _ROOM
    remedy = "little room: use another folder (--dir, FUYOU_OFFLOAD_DIR); `fuyou clean` frees old stores"
    yield Check(name="free space", status="note" if low else "ok", found=gb(free), advice=remedy if low else "")
    yield from _direct_io(place)
    yield from _drives(place)


def _direct_io(place: Path) -> Iterator[Check]:
    """Opens a small store there, as a run would."""
    try:
        opened = importlib.import_module("fuyou_cli.swap.store").Store.open
    except (FuyouError, ImportError, OSError):  # `_extension` says so
        return
    remedy = "use a folder on a local drive (ext4 or xfs)"
    try:
        with scratch_folder(place) as inside, opened([inside / "store.bin"], stripe=MiB, size=MiB, create=True) as store:
            direct = store.direct
    except FuyouError as error:
        yield Check(name="O_DIRECT", status="problem", found=error.message, advice=remedy)
        return
    if direct:
        yield Check(name="O_DIRECT", status="ok", found="works")
    else:
        yield Check(name="O_DIRECT", status="note", found="the file system refuses it: the page cache is used", advice=remedy)


def _drives(place: Path, sysfs: Path = Path("/sys")) -> Iterator[Check]:
    """Lists every drive under the folder, and how much of its life is left."""
    devices = drives.block_devices(place, sysfs)
    if not devices:
        yield Check(name="drive", status="ok", found="unknown: the file system hides it")
    for device in devices:
        drive = drives.drive_at(device)
        share = drive.used_bytes / drive.rated_bytes if drive.rated_bytes else 0.0
        used = max(share, drive.percent_used / 100)
        turns = bool(drive.model) and drives.is_hard_disk(device)  # virtual ones, which have no model, are mostly called so
        yield Check(
            name="drive",
            status="note" if used >= drives.NEARLY_WORN or turns else "ok",
            found=f"{device.name}, {drive.model or 'model unknown'}, {_endurance(drive)}",
            advice=_drive_advice(used, turns=turns),
        )


def _endurance(drive: Drive) -> str:
    parts = [f"rated for {gb(drive.rated_bytes)} of writes" if drive.rated_bytes else "rated writes unknown"]
    if drive.percent_used:
        parts.append(f"{drive.percent_used}% of its endurance used")
    parts.append(f"{gb(drive.used_bytes)} written" if drive.used_bytes else "it does not tell what it has written")
    return ", ".join(parts)


def _drive_advice(used: float, *, turns: bool) -> str:
    if turns:
        return "the kernel takes it for a hard disk, on which a step waits for minutes: use an NVMe drive"
    if used < drives.NEARLY_WORN:
        return ""
    return "near the end of its rated life: training writes terabytes, `fuyou plan` says how many"


def _wsl() -> Iterator[Check]:
    if probe.is_wsl():
        advice = "keep stores in the Linux file system, not under /mnt/c; raise `memory` in .wslconfig if RAM is short"
        yield Check(name="wsl", status="note", found="running under WSL2", advice=advice)
