"""Tells what is known of this machine: its memory, cores and drives, its rates as `fuyou bench` measured and kept them or as
they are assumed, and where each rate comes from."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from fuyou_cli.core import disk, probe
from fuyou_cli.core.disk import existing
from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.json_files import WrongData, from_json, read_object
from fuyou_cli.core.paths import keep_file, kept_folder, machine_id, remove_left
from fuyou_cli.core.probe import file_system_of
from fuyou_cli.core.units import GiB, MiB, duration, gb, in_steps
from fuyou_cli.recipe.schema import Limit, MemoryLimit
from fuyou_cli.spec.hardware import BURST_RATES, ON_PROCESSOR, SUSTAINED_RATES, Drive, HardwareProfile, merged_rates

from .measure.timing import Unit, are_busy, cores_now

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe

FILE_KEYS = ("schema_version", "memlock", "memlock_why")  # keys of profile files alone, old versions too

GIVEN = "given in "  # + a file: the source of its figures
Origin = Literal["measured", "given", "specification", "assumption"]
_ORDER: tuple[Origin, ...] = ("measured", "given", "specification", "assumption")  # the best known first


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a profile that are shown together."""

    what: str
    keys: tuple[str, ...]  # of the profile
    unit: Unit
    measured_by: str  # a function of `measure/`, or the option of `fuyou bench` that asks for it
    assumed: tuple[float, ...]  # where nothing was measured, by key: no plan can do without; empty: it may stay unknown


# Everything that has a rate. A plan counts what is unknown as free, or estimates it from another.
RATES = (
    Rates("compute", ("matmul_flops",), "FLOP/s", "whole.measure_matmul, compute.measure_layers", (40e9,)),  # of a core
    Rates("compute of stages", ("stage_rates",), "FLOP/s", "compute.measure_layers, compute.measure_recipe", ()),
    Rates("store read, write", BURST_RATES[:2], "B/s", "store_rates.measure_store", (2.0e9, 1.2e9)),  # one NVMe
    Rates("store, both at once", BURST_RATES[2:], "B/s", "store_rates.measure_store", (1.2e9, 0.8e9)),
    Rates("store, sustained", SUSTAINED_RATES, "B/s", "--sustained: store_rates.measure_sustained", ()),
    Rates("AdamW, one thread", ("adamw",), "B/s", "memory_rates.measure_adamw", (10e9,)),
    Rates("to GPU, back", ("h2d", "d2h"), "B/s", "memory_rates.measure_copies", (12e9, 12e9)),
    Rates("GPU memory", ("device_memory_rate",), "B/s", "memory_rates.measure_sums", ()),
    Rates("DRAM", ("dram",), "B/s", "memory_rates.measure_dram", ()),
)
ASSUMED: dict[str, Any] = {key: rate for rates in RATES for key, rate in zip(rates.keys, rates.assumed, strict=False)}
ASSUMED_GPU_FLOPS = 100e12
ASSUMED_PROCESS = 450 * MiB
ASSUMED_GPU_PROCESS = 2 * GiB  # more than on the CPU: CUDA's libraries
# What a process takes more than one that was measured before it computed on a GPU. Seen on an H100: 307 to 530 MB.
LATER_ON_A_GPU = 576 * MiB


def core_count() -> int:
    """Returns the cores that this process may run on, or that its control groups give it the time of, whichever is less."""
    allowed, quota = len(os.sched_getaffinity(0)), probe.cpu_quota()
    return allowed if quota is None else max(1, min(allowed, ceil(quota)))


def cpu_name() -> str:
    """Returns the processor's name."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.machine()
    match = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def card() -> tuple[str, int]:
    """Returns the name and the memory of the CUDA device that torch computes on."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.name, properties.total_memory


def take_card(number: int) -> str | None:
    """Makes torch compute on one of the CUDA devices, which processes of a box take in turn, by their `number`. Returns which
    one it is; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.set_device(number % torch.cuda.device_count())
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def usable_memory() -> int:
    """Returns the bytes that this process may have in all, in steps: small differences must not change a plan."""
    most = probe.memory_limit()
    return in_steps(min(probe.memory_available() + probe.process_bytes(), most), most)


def facts_now(*directories: Path) -> dict[str, Any]:
    """Reads what needs no measurement: facts of this machine and of the drives behind `directories`, by keys of the profile."""
    pinnable, why = probe.pinnable()
    return {
        "cores": core_count(),
        "ram_total": probe.memory_limit(),
        "ram_available": usable_memory(),
        "disk_free": disk.striped_space(*directories),
        "drives": drives_under(*directories),
        "pinnable": pinnable,
        "pinnable_why": why,
    }


def assumed_hardware(
    *directories: Path, device: str = "cpu", device_name: str | None = None, device_memory: int = 0
) -> HardwareProfile:
    """Returns this machine's memory and disk with assumed rates; its field `measured` tells that."""
    on_gpu = device == "cuda"
    facts = facts_now(*(directories or (Path(),)))
    return HardwareProfile(
        device=device,
        device_name=device_name or cpu_name(),
        process_bytes=ASSUMED_PROCESS + (ASSUMED_GPU_PROCESS if on_gpu else 0),
        device_memory=device_memory,
        matmul_flops=ASSUMED_GPU_FLOPS if on_gpu else ASSUMED["matmul_flops"] * facts["cores"],
        adamw=((1, ASSUMED["adamw"]),),
        h2d=ASSUMED["h2d"] if device_memory else 0.0,
        d2h=ASSUMED["d2h"] if device_memory else 0.0,
        measured="assumed",
        name=platform.node(),
        sources=("assumption, not measured",),
        **{key: ASSUMED[key] for key in BURST_RATES},
        **facts,
    )


def budget_of(text: str, *, key: str) -> int:
    """Returns the bytes that the whole process may take. Raises UsageError that names `key`."""
    try:
        limit = TypeAdapter[MemoryLimit](Limit).validate_python(text)
    except ValidationError as error:
        raise UsageError(f"{key}: {error.errors()[0]['msg']}") from None
    return limit.resolve(total=probe.memory_limit(), auto=int(usable_memory() * 0.9))


def wrong_figures(profile: HardwareProfile, *, sizes: bool = True) -> list[str]:
    """Lists what is wrong with a profile beyond its types, each line with its key. `sizes`: also checks the machine's sizes."""
    on_gpu = profile.device == "cuda"
    rates = [key for rates in RATES if rates.assumed for key in rates.keys if on_gpu or key not in ("h2d", "d2h")]
    needed = ["cores", *(["ram_total", "disk_free", *(["device_memory"] if on_gpu else [])] if sizes else []), *rates]
    wrong = [f"{key}: must be more than 0" for key in needed if key != "adamw" and not getattr(profile, key)]
    if profile.device not in {*ON_PROCESSOR, "cuda"}:
        wrong.append(f"device: must be cpu or cuda, not {profile.device!r}")
    threads = [count for count, _ in profile.adamw]
    if 1 not in threads or threads != sorted(set(threads)) or not all(rate > 0 for _, rate in profile.adamw):
        wrong.append("adamw: must give a rate for 1 thread, and ascending numbers of threads")
    for key in ("shared_compute", "shared_adamw"):
        if not 0 < getattr(profile, key) <= 1:
            wrong.append(f"{key}: must be a share from 0 to 1")
    for index, rate in enumerate(profile.stage_rates):
        wrong += [
            f"stage_rates[{index}].{key}: must be more than 0"
            for key in ("params", "tokens", "forward", "backward")
            if not getattr(rate, key)
        ]
    return wrong


# ---- the drives of a folder ------------------------------------------------------------------------------------------


_SYS_IO_URING_SETUP = 425  # the same number on every architecture but alpha
_IO_URING_PARAMS = 120  # bytes of struct io_uring_params
_NVME_ADMIN = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD
_NVME_UNIT = 512_000  # bytes: the log counts in 1000 blocks of 512
_SECTOR = 512  # bytes: the unit of /sys, whatever the drive's own sectors are
_DEEPEST = 8  # layers of partitions and volumes
NEARLY_WORN = 0.9  # of a drive's endurance
_GET_LOG_PAGE, _SMART_LOG, _SMART_BYTES = 0x02, 0x02, 512

_TB = 10**12
_DAYS = 365 * 5  # days of a warranty, for drives rated by writes per day
# Patterns of model names, and TB that may be written per TB of capacity, from the makers' public data sheets:
# Samsung, Western Digital, Crucial, Kingston, Seagate, Solidigm, Micron, KIOXIA. Makers rate by capacity within a series.
_ENDURANCE: tuple[tuple[str, int], ...] = (
    (r"Samsung SSD (980|990|9100) PRO", 600),  # 600 TBW at 1 TB, 1,200 at 2 TB
    (r"Samsung SSD (970 EVO|980\b|990 EVO|870 EVO)", 600),  # 600 TBW at 1 TB, 1,200 at 2 TB
    (r"Samsung SSD 8[67]0 QVO", 360),  # 360 TBW at 1 TB, 720 at 2 TB
    (r"WD_?BLACK SN(770|850X?|8100)\b", 600),  # 600 TBW at 1 TB, 1,200 at 2 TB
    (r"WDS\d+T\dX0E", 600),  # order numbers of SN770, SN850 and SN850X
    (r"CT\d+(T500|T700|T705|P5P)SSD\d", 600),  # Crucial T500, T700, T705, P5 Plus: 600 TBW at 1 TB, 1,200 at 2 TB
    (r"KINGSTON SKC3000", 800),  # 800 TBW at 1 TB, 1,600 at 2 TB
    (r"Seagate FireCuda 530", 1275),  # 1,275 TBW at 1 TB, 2,550 at 2 TB
    (r"(SOLIDIGM|INTEL) SSDPF2KX", 1 * _DAYS),  # D7-P5510 and P5520: 1 drive write per day
    (r"(SOLIDIGM|INTEL) SSDPF2KE", 3 * _DAYS),  # D7-P5620: 3 drive writes per day
    (r"SAMSUNG MZ(QL2|1L2|WL[JRO])", 1 * _DAYS),  # PM9A3, PM1733, PM1743: 1 drive write per day
    (r"Micron_7450_MTFDK\w+TFR", 1 * _DAYS),  # 7450 PRO: 1 drive write per day
    (r"KCD6\w*LUL", 1 * _DAYS),  # KIOXIA CD6-R: 1 drive write per day
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wear:
    """The wear that a drive reports."""

    percent_used: int  # of the rated endurance, may exceed 100
    written: int  # bytes, over the drive's life


def io_uring_refusal() -> str | None:
    """Tells why this process may not use io_uring; None if it may."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS)
    ring = libc.syscall(_SYS_IO_URING_SETUP, 4, parameters)
    if ring >= 0:
        os.close(ring)
        return None
    code = ctypes.get_errno()
    if code == errno.ENOSYS:
        return "this kernel lacks it, or the container's seccomp profile hides it"
    if code in (errno.EPERM, errno.EACCES):
        return io_uring_forbidden()
    if code == errno.ENOMEM:
        return "the locked-memory limit is too small for its queues"
    return os.strerror(code)


def io_uring_forbidden(root: Path = Path("/")) -> str:
    """Tells who forbids io_uring, and what to do about it."""
    setting = _line(root / "proc/sys/kernel/io_uring_disabled")
    if setting in ("1", "2"):
        whom = "all users" if setting == "2" else "users outside the group kernel.io_uring_group"
        return f"forbidden to {whom} by the sysctl kernel.io_uring_disabled={setting}; root may set it to 0"
    return "forbidden by the container's seccomp profile; start the container with one that allows io_uring_*"


def is_hard_disk(device: Path) -> bool:
    """Whether the drive has turning disks. If the kernel does not tell: no."""
    return _line(device / "queue/rotational") == "1"


def block_devices(folder: Path, sysfs: Path = Path("/sys")) -> list[Path]:
    """Lists every drive under a folder, each as its folder in /sys. Empty for tmpfs, overlay and network folders."""
    number = existing(folder).stat().st_dev
    return list(dict.fromkeys(_whole_drives(sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}", _DEEPEST)))


def _whole_drives(device: Path, depth: int) -> list[Path]:
    if not device.exists() or depth == 0:
        return []
    device = device.resolve()
    if (device / "partition").exists():
        return _whole_drives(device.parent, depth - 1)
    layers = device / "slaves"
    below = sorted(layers.iterdir()) if layers.is_dir() else []
    return [drive for layer in below for drive in _whole_drives(layer, depth - 1)] if below else [device]


def drives_under(*folders: Path, sysfs: Path = Path("/sys")) -> tuple[Drive, ...]:
    """Lists the drives under some folders, each once, with what is known of their endurance."""
    return tuple(drive_at(device) for device in dict.fromkeys(d for folder in folders for d in block_devices(folder, sysfs)))


def rated_bytes(model: str, capacity: int) -> int:
    """Returns the bytes that the maker allows to be written to a drive of this name and capacity (bytes); 0 if unknown."""
    per_tb = next((per_tb for pattern, per_tb in _ENDURANCE if re.match(pattern, model, re.IGNORECASE)), 0)
    return round(per_tb * round(capacity / _TB, 2) * _TB)  # TB as sold: 2.0 for 2,000,398,934,016 bytes


def drive_at(device: Path) -> Drive:
    """Returns what is known of a whole drive, given its folder in /sys."""
    model, size = drive_model(device) or "", _line(device / "size")
    capacity = int(size) * _SECTOR if size.isdecimal() else 0
    wear = nvme_wear(device) or Wear(percent_used=0, written=0)
    rated = rated_bytes(model, capacity)
    return Drive(
        model=model, capacity=capacity, rated_bytes=rated, used_bytes=wear.written, percent_used=wear.percent_used
    )  # fmt: skip


def nearly_worn(drives: Iterable[Drive]) -> list[str]:
    """Lists the drives that report to be near the end of their life or past it, as sentences."""
    worn = (drive for drive in drives if drive.percent_used >= 100 * NEARLY_WORN)
    return [f"{drive.model or 'a drive'} reports that {drive.percent_used} % of its endurance is used" for drive in worn]


def has_nvidia_card(sysfs: Path) -> bool:
    """Whether the PCI bus has a display or compute device of NVIDIA, with a driver or without."""
    devices = sysfs.glob("bus/pci/devices/*")
    return any(_line(device / "vendor") == "0x10de" and _line(device / "class").startswith("0x03") for device in devices)


def _line(file: Path) -> str:
    """Reads a line from a file of the kernel; empty if it cannot be read."""
    try:
        return " ".join(file.read_text().split())
    except OSError:
        return ""


def drive_model(device: Path) -> str | None:
    """Returns the model name that a drive reports."""
    return _line(device / "device/model") or _line(device / "device/name") or None


def nvme_wear(device: Path, dev: Path = Path("/dev")) -> Wear | None:
    """Reads the drive's own log. Returns None if it is not NVMe, or the log cannot be read (reading it needs root)."""
    if not device.name.startswith("nvme"):
        return None
    log = ctypes.create_string_buffer(_SMART_BYTES)
    command = struct.pack(
        "<BBHIIIQQIIIIIIIIII",
        *(_GET_LOG_PAGE, 0, 0, 0xFFFFFFFF, 0, 0, 0, ctypes.addressof(log), 0, _SMART_BYTES),
        *((_SMART_BYTES // 4 - 1) << 16 | _SMART_LOG, 0, 0, 0, 0, 0, 0, 0),
    )
    try:
        with (dev / device.name).open("rb") as drive:
            status = fcntl.ioctl(drive, _NVME_ADMIN, bytearray(command))
    except OSError:
        return None
    return parse_smart(log.raw) if status == 0 else None  # a positive status: the drive refuses, and the log is empty


def parse_smart(log: bytes) -> Wear:
    """Parses the SMART log page of the NVMe specification, which counts units of 1000 blocks of 512 bytes."""
    return Wear(percent_used=log[5], written=int.from_bytes(log[48:64], "little") * _NVME_UNIT)


def endurance(drive: Drive) -> str:
    """Tells a drive's rated writes, and how much of them is used."""
    parts = [f"rated for {gb(drive.rated_bytes)} of writes" if drive.rated_bytes else "rated writes unknown"]
    if drive.percent_used:
        parts.append(f"{drive.percent_used}% of its endurance used")
    parts.append(f"{gb(drive.used_bytes)} written" if drive.used_bytes else "bytes written unknown")
    return ", ".join(parts)


# ---- where rates come from -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedBy:
    """Known rates that are shown together, in FLOPs per second if `flops`, else in bytes per second, and where they come from:
    measured (or published as measured), given in a file, specified, or assumed."""

    what: str
    keys: tuple[str, ...]
    values: tuple[float, ...]
    flops: bool
    origin: Origin
    source: str


def origins_of(hardware: HardwareProfile) -> tuple[RatedBy, ...]:
    """Lists every known rate, in the order of `RATES`."""
    known = []
    for rates in RATES:
        values = tuple(value for key in rates.keys for value in _values(hardware, key))
        if not any(values) or (rates.keys == SUSTAINED_RATES and not hardware.slows_down):
            continue
        sources = dict.fromkeys(hardware.source_of(key) for key in rates.keys)
        origin, source = max(map(_origin, sources), key=_ORDER.index), "; ".join(sources)
        flops = rates.unit == "FLOP/s"
        known.append(RatedBy(what=rates.what, keys=rates.keys, values=values, flops=flops, origin=origin, source=source))
    return tuple(known)


def _values(hardware: HardwareProfile, key: str) -> tuple[float, ...]:
    if key == "adamw":
        return (hardware.adamw_bytes,)
    if key == "stage_rates":
        return tuple(rate.backward for rate in hardware.stage_rates)[:1]
    return (getattr(hardware, key),)


def _origin(source: str) -> Origin:
    if "assumption" in source or "interpolated" in source or source == "nobody says":
        return "assumption"
    if "specification" in source:
        return "specification"
    return "given" if source.startswith(GIVEN) else "measured"


# ---- the profile that is kept ----------------------------------------------------------------------------------------


SCHEMA_VERSION = 2
PROCESS_STEP = 16 * MiB  # beside the libraries, a small model's plan holds 5 to 12 MiB: model, tokenizer and rows
_LARGEST_FILE = 16 << 20  # bytes

Say = Callable[[str], None]


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Writes the profile as JSON, for planning elsewhere or later."""
    keep_file(path, (json.dumps({"schema_version": SCHEMA_VERSION, **asdict(profile)}, indent=2) + "\n").encode())


def read_profile(path: Path) -> HardwareProfile:
    """Reads what `write_profile` or a person wrote. Raises UsageError naming everything that is missing or wrong."""
    try:
        data = read_object(path, limit=_LARGEST_FILE)
    except UsageError as error:
        raise UsageError(f"cannot read the hardware profile {error.message}", hint="make one: fuyou bench") from None
    if data.pop("schema_version", None) != SCHEMA_VERSION:
        raise UsageError(f"{path} is not a hardware profile of version {SCHEMA_VERSION}", hint="make one: fuyou bench")
    try:
        profile = from_json(HardwareProfile, {key: data[key] for key in data if key not in FILE_KEYS}, defaults=True)
        wrong: tuple[str, ...] = tuple(wrong_figures(profile, sizes=False))  # without sizes: the disk may have been full
    except WrongData as error:
        wrong = error.problems
    if wrong:
        raise UsageError(f"{path}: {'; '.join(wrong)}", hint="make a new one: fuyou bench")
    return profile


def profile_path(*directories: Path, device: str) -> Path:
    """Returns the file that keeps the profile of this machine's `device` with the drives behind `directories`."""
    # Machines may share a home folder, and change their name: all that rates depend on counts.
    drives_there = sorted({file_system_of(directory).identity for directory in directories})
    computes_on = "cpu" if device in ON_PROCESSOR else device
    about = (machine_id(), cpu_name(), core_count(), computes_on, *drives_there)
    return kept_folder() / f"profile-{hashlib.sha256(repr(about).encode()).hexdigest()[:12]}.json"


def hardware_for(*directories: Path, device: str, say: Say, unloaded: int = 0) -> HardwareProfile:
    """Returns this machine's kept profile, or assumed rates, with memory and disk as they are now.

    The store is striped over `directories`. `unloaded`: bytes that this process lacks of a run's.
    """
    if hidden := probe.hidden_by_proc():
        _note(say, hidden)
    path = profile_path(*directories, device=device)
    name, memory = _device_facts(device)
    profile = _kept(path, say)
    if profile is None or (name is not None and profile.device_name != name):  # another card than the measured one
        profile = assumed_hardware(*directories, device=device, device_name=name, device_memory=memory)
        profile = replace(profile, process_bytes=0)  # no process was measured
    device_free = _device_free(device, memory or profile.device_memory)  # from here on the process holds its driver
    unloaded += LATER_ON_A_GPU if device == "cuda" else 0
    return replace(
        profile,
        device=device,
        device_free=device_free,
        process_bytes=steady_process(probe.process_bytes() + unloaded, measured=profile.process_bytes),
        **facts_now(*directories),
    )


def steady_process(now: int, *, measured: int) -> int:
    """Rounds the bytes of a process up: two equal processes differ by one or two MiB, and their plans must not.

    `measured` is what a process of `fuyou bench` had loaded; 0 if none has run.
    """
    start = measured + PROCESS_STEP  # so that a plan's process is never near a step's edge
    return start + max(0, -(-(now - start) // PROCESS_STEP)) * PROCESS_STEP


def kept_profile(*directories: Path, device: str) -> HardwareProfile | None:
    """Returns the profile that is kept of this machine as it was measured; None if there is none."""
    profile = _kept(profile_path(*directories, device=device))
    name, _ = _device_facts(device)
    return profile if profile is not None and (name is None or profile.device_name == name) else None


def why_not_kept(*directories: Path, device: str) -> str | None:
    """Tells why a measurement could not be kept here; None if it can be."""
    folder = profile_path(*directories, device=device).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _kept(path: Path, say: Say | None = None) -> HardwareProfile | None:
    """Reads a kept profile. It is only advice: if it cannot be read, `say` tells so and work goes on without."""
    try:
        return read_profile(path) if path.exists() else None
    except UsageError as error:
        if say is not None:
            _note(say, f"{error.message}; rates are assumed (`fuyou bench` replaces it)")
        return None


@cache
def _note(say: Say, text: str) -> None:
    """Says a text once, however often a run looks at the machine."""
    say(f"note: {text}")


def keep(profile: HardwareProfile, *directories: Path, say: Say) -> HardwareProfile:
    """Keeps a measured profile, merged with earlier measurements of the same machine. Returns what is kept."""
    path = profile_path(*directories, device=profile.device)
    before = _kept(path)  # an unreadable one is replaced
    if before is not None and before.device_name == profile.device_name:
        profile = _joined(before, profile)
    _write(profile, path, say)
    return profile


def keep_layers(profile: HardwareProfile, *directories: Path, say: Say) -> HardwareProfile:
    """Adds the rates of recipes' own stages in `profile` to what is kept of this machine. Returns what is kept."""
    path = profile_path(*directories, device=profile.device)
    if (before := _kept(path)) is not None:
        own = tuple(rate for rate in profile.stage_rates if rate.layers)
        profile = replace(before, stage_rates=merged_rates(before.stage_rates, own))
        _write(profile, path, say)
    return profile


def _write(profile: HardwareProfile, path: Path, say: Say) -> None:
    try:
        write_profile(profile, path)
    except OSError as error:
        say(f"note: cannot keep the profile in {path}: {error.strerror}")


def _joined(before: HardwareProfile, measured: HardwareProfile) -> HardwareProfile:
    # Rates measured beside busy programs stay until the machine is quiet, also for shapes that are not measured now.
    outdated = are_busy(before.others_cores) and not are_busy(measured.others_cores)
    rates = () if outdated else before.stage_rates
    joined = replace(measured, stage_rates=merged_rates(rates, measured.stage_rates))
    if measured.sustained_write or measured.steady_bytes:
        return joined
    return replace(joined, **{key: getattr(before, key) for key in (*SUSTAINED_RATES, "burst_bytes", "steady_bytes")})


def _device_facts(device: str) -> tuple[str | None, int]:
    if device != "cuda":
        return None, 0
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "offload.device: cuda, but no CUDA device is usable by this torch build",
            hint="run `fuyou doctor`, or set offload.device=cpu",
        )
    return card()


def _device_free(device: str, memory: int) -> int:
    """Returns the bytes of the device's `memory` that this process may have, in steps like the host's."""
    if device != "cuda":
        return 0
    # CUDA is asked, not NVML: its context takes some of both memories, and a plan has to count that.
    from fuyou_cli.engine.devices.cuda import free_memory

    return max(1, in_steps(min(free_memory(), memory), memory))  # 0 would mean unknown


# ---- measuring a machine before it is planned with -------------------------------------------------------------------


PATIENCE = 300.0  # seconds; the quick bench of a recipe takes a fifth of it


def measure_once(loaded: LoadedRecipe, device: str, *, layers: str = "", say: Callable[[str], None]) -> None:
    """Measures quickly what is not known yet, and keeps it for later plans: this machine and the recipe's drives, or only the
    recipe's `layers` (`StageRate.layers`; empty: none that can be timed).

    A profile measured beside busy programs is replaced as soon as a run finds the machine idle. If measuring fails, says why
    and leaves the known or assumed rates.
    """
    directories = loaded.recipe.offload_directories(os.environ)
    device = "cpu" if device in ON_PROCESSOR else device
    kept = kept_profile(*directories, device=device)
    before = None if kept is None else kept.others_cores
    if whole := before is None or _is_due(before, say):
        once = "once" if before is None else "again"
        what = f"this machine, {once}: about a minute, at most 2 GB written"
        ways = [[str(loaded.path), *loaded.overrides]]
        if len(directories) == 1:  # a model that cannot be trained yet has no stage to measure: measure only the machine
            ways.append(["--dir", str(directories[0])])
    elif kept is not None and layers and not any(rate.layers == layers for rate in kept.stage_rates):
        what = "this model's layers, once: about half a minute"
        ways = [[str(loaded.path), *loaded.overrides, "--layers"]]
    else:
        return
    if why := why_not_kept(*directories, device=device):
        say(f"note: rates are {_known(before)}: new ones cannot be kept ({why}); set XDG_CACHE_HOME to another folder")
        return
    say(f"measuring {what} (offload.measure=false skips it)")
    begin, reason = time.monotonic(), ""
    created = [place for folder in directories for place in (folder, *folder.parents) if not place.exists()]
    for way in ways:
        code, reason = _measured(way, directories)
        _remove_empty(created)
        if not code:
            seconds, files = duration(time.monotonic() - begin), ", and all test files are removed" if whole else ""
            say(f"measured in {seconds}; the rates are kept for later plans{files}")
            now = kept_profile(*directories, device=device)
            if whole and now is not None and are_busy(now.others_cores):
                say(f"note: {_beside(now.others_cores)}: the next run that finds it idle measures again")
            return
        if code != UsageError.exit_code:  # it may have written, and would write again
            break
    say(f"note: {'the machine' if whole else 'the layers'} could not be measured, so rates are {_known(before)}: {reason}")


def _is_due(before: float, say: Callable[[str], None]) -> bool:
    """Whether to repeat a measurement made while other programs used so many cores, and says why or why not."""
    if not are_busy(before):
        return False
    now = cores_now()
    if are_busy(now):
        say(f"note: {_beside(before)}, and use {now:.1f} now: a run that finds it idle measures again")
        return False
    say(f"{_beside(before)}; it is idle now")
    return True


def _beside(cores: float) -> str:
    return f"other programs used {cores:.1f} cores while this machine was measured"


def _known(before: float | None) -> str:
    return "assumed" if before is None else "those measured before"


def _remove_empty(folders: list[Path]) -> None:
    """Removes the folders that measuring made: a plan leaves no folder behind."""
    for place in sorted(set(folders), key=lambda place: len(place.parts), reverse=True):
        with suppress(OSError):  # never made, or in use by now
            place.rmdir()


def _measured(arguments: list[str], directories: Iterable[Path]) -> tuple[int, str]:
    """Runs `fuyou bench` in its own process, because its memory is not part of a run's process. It leaves nothing in
    `directories`, however it ends. Returns the exit code, and the reason if it is not 0."""
    command = [sys.executable, "-m", "fuyou_cli", "bench", *arguments]
    package = str(Path(__file__).resolve().parents[2])  # so that the process runs this very fuyou
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    if "TORCHELASTIC_RUN_ID" in environment and environment.get("OMP_NUM_THREADS") == "1":
        del environment["OMP_NUM_THREADS"]  # torchrun gives each of its processes one thread: the machine has more
    try:
        code, err = _run(command, environment, directories)
    except subprocess.TimeoutExpired:
        return FuyouError.exit_code, f"it took more than {duration(PATIENCE)}"
    except OSError as error:
        return FuyouError.exit_code, str(error)
    return code, _reason(err, code)


def _run(command: list[str], environment: dict[str, str], directories: Iterable[Path]) -> tuple[int, str]:
    """Returns exit code and stderr. Raises TimeoutExpired. Always ends the process and its children, also at Ctrl-C."""
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=null, stdout=null, stderr=pipe, text=True) as child:
        try:
            _, err = child.communicate(timeout=PATIENCE)
        finally:
            child.kill()
            child.wait()
            remove_left(directories, child.pid)
    return child.returncode, err


def _reason(text: str, code: int) -> str:
    """Returns the first line of an error, or what the exit code tells."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    if lines:
        return lines[0].removeprefix("error: ")
    if code == -signal.SIGKILL:
        return "`fuyou bench` was killed, usually because memory ran out"
    return f"`fuyou bench` was ended by signal {-code}" if code < 0 else f"`fuyou bench` failed, exit code {code}"
