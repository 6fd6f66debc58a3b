"""Hardware profiles that are not measured: assumed for this machine, or read from a file. Imports neither torch nor the
native extension."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict
from math import ceil
from pathlib import Path

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import read_object
from fuyou_cli.core.units import GiB, MiB, in_steps
from fuyou_cli.spec.hardware import HardwareProfile, wrong_rates

from . import drives, probe
from .typed_data import Reading

SCHEMA_VERSION = 2
_LARGEST_FILE = 16 << 20  # bytes

# What `assumed_hardware` takes for granted: a plain server with one NVMe drive.
ASSUMED_FLOPS_PER_CORE = 40e9
ASSUMED_GPU_FLOPS = 100e12
ASSUMED_READ, ASSUMED_WRITE = 2.0e9, 1.2e9
ASSUMED_READ_MIXED, ASSUMED_WRITE_MIXED = 1.2e9, 0.8e9
ASSUMED_ADAMW = 10e9
ASSUMED_PCIE = 12e9
ASSUMED_PROCESS = 450 * MiB
ASSUMED_GPU_PROCESS = 2 * GiB  # more, for the libraries of CUDA


def core_count() -> int:
    """Cores this process may run on, or as many as its control groups give it the time of: more threads than that would be
    stopped in the middle of each other's work."""
    allowed, quota = len(os.sched_getaffinity(0)), probe.cpu_quota()
    return allowed if quota is None else max(1, min(allowed, ceil(quota)))


def cpu_name() -> str:
    """The processor's name for people."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def usable_memory() -> int:
    """Bytes this process may have in all: what is free and what it holds already, within its control groups' limits. In steps,
    so that a little more or less of it makes the same plan."""
    most = probe.memory_limit()
    return in_steps(min(probe.memory_available() + probe.process_bytes(), most), most)


def assumed_hardware(
    *directories: Path,
    device: str = "cpu",
    device_name: str | None = None,
    device_memory: int = 0,
) -> HardwareProfile:
    """This machine's memory and disk with assumed rates: for planning without measuring. `measured` says so."""
    cores = core_count()
    on_gpu = device == "cuda"
    places = directories or (Path(),)
    pinnable, why = probe.pinnable()
    memlock, memlock_why = probe.memlock()
    return HardwareProfile(
        device=device,
        device_name=device_name or cpu_name(),
        cores=cores,
        ram_total=probe.memory_limit(),
        ram_available=usable_memory(),
        process_bytes=ASSUMED_PROCESS + (ASSUMED_GPU_PROCESS if on_gpu else 0),
        device_memory=device_memory,
        disk_free=probe.striped_space(*places),
        matmul_flops=ASSUMED_GPU_FLOPS if on_gpu else ASSUMED_FLOPS_PER_CORE * cores,
        store_read=ASSUMED_READ,
        store_write=ASSUMED_WRITE,
        store_read_mixed=ASSUMED_READ_MIXED,
        store_write_mixed=ASSUMED_WRITE_MIXED,
        adamw=((1, ASSUMED_ADAMW),),
        h2d=ASSUMED_PCIE if device_memory else 0.0,
        d2h=ASSUMED_PCIE if device_memory else 0.0,
        measured="assumed",
        pinnable=pinnable,
        pinnable_why=why,
        memlock=memlock,
        memlock_why=memlock_why,
        drives=drives.drives_under(*places),
        name=platform.node(),
    )


def described(text: str | Path) -> HardwareProfile:
    """A machine one does not have, for planning: shipped parts by name (`rtx4090,2xgen4,128GiB`), or a file. Raises
    UsageError with everything that is wrong, and what is shipped where a name is unknown."""
    from .described import profile_from

    return profile_from(text, process_bytes=(ASSUMED_PROCESS, ASSUMED_PROCESS + ASSUMED_GPU_PROCESS))


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """The profile as JSON, for planning elsewhere or later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.{os.getpid()}")  # nobody ever reads half of one
    try:
        whole.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(profile)}, indent=2) + "\n")
        whole.replace(path)
    except OSError:
        whole.unlink(missing_ok=True)
        raise


def read_profile(path: Path) -> HardwareProfile:
    """A profile written by `write_profile` or by hand. Raises UsageError naming what is missing or wrong."""
    try:
        data = read_object(path, limit=_LARGEST_FILE)
    except UsageError as error:
        raise UsageError(f"cannot read the hardware profile {error.message}", hint="make one: fuyou bench") from None
    if data.pop("schema_version", None) != SCHEMA_VERSION:
        raise UsageError(f"{path} is not a hardware profile of version {SCHEMA_VERSION}", hint="make one: fuyou bench")
    reading = Reading(written=False)
    values = reading.fields_of(HardwareProfile, data)
    if reading.problems:
        raise UsageError(f"{path}: {'; '.join(reading.problems)}", hint="make a new one: fuyou bench")
    profile = HardwareProfile(**values)
    if wrong := wrong_rates(profile, sizes=False):  # a disk may have been full
        raise UsageError(f"{path}: {'; '.join(wrong)}", hint="make a new one: fuyou bench")
    return profile
