"""Tells what is known of this machine without measuring: memory, cores and drives, with assumed rates."""

from __future__ import annotations

import os
import platform
import re
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fuyou_cli.core import disk, probe
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import GiB, MiB, in_steps
from fuyou_cli.recipe.schema import Limit, MemoryLimit
from fuyou_cli.spec.hardware import HardwareProfile

from . import drives

FILE_KEYS = ("schema_version", "memlock", "memlock_why")  # keys of profile files alone, old versions too

ASSUMED_FLOPS_PER_CORE, ASSUMED_GPU_FLOPS = 40e9, 100e12
ASSUMED_STORE: dict[str, Any] = {
    "store_read": 2.0e9,
    "store_write": 1.2e9,
    "store_read_mixed": 1.2e9,
    "store_write_mixed": 0.8e9,
}  # one NVMe
ASSUMED_ADAMW, ASSUMED_PCIE = 10e9, 12e9
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
    found = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def card() -> tuple[str, int]:
    """Returns the name and the memory of the CUDA device that torch computes on."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.name, properties.total_memory


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
        "drives": drives.drives_under(*directories),
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
        matmul_flops=ASSUMED_GPU_FLOPS if on_gpu else ASSUMED_FLOPS_PER_CORE * facts["cores"],
        adamw=((1, ASSUMED_ADAMW),),
        h2d=ASSUMED_PCIE if device_memory else 0.0,
        d2h=ASSUMED_PCIE if device_memory else 0.0,
        measured="assumed",
        name=platform.node(),
        sources=("assumption, not measured",),
        **ASSUMED_STORE,
        **facts,
    )


def budget_of(text: str, *, key: str) -> int:
    """Returns the bytes that the whole process may take. Raises UsageError that names `key`."""
    try:
        limit = TypeAdapter[MemoryLimit](Limit).validate_python(text)
    except ValidationError as error:
        raise UsageError(f"{key}: {error.errors()[0]['msg']}") from None
    return limit.resolve(total=probe.memory_limit(), auto=int(usable_memory() * 0.9))
