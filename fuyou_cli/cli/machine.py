"""The machine for a plan: as `fuyou bench` measured and kept it, else assumed. Nothing is measured here."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import MiB, in_steps
from fuyou_cli.machine import drives, probe
from fuyou_cli.machine.profile import assumed_hardware, core_count, cpu_name, read_profile, usable_memory, write_profile
from fuyou_cli.spec.hardware import Drive, HardwareProfile, merged_rates

from .console import write_status

PROCESS_STEP = 16 * MiB  # model, tokenizer and rows of a small model's plan add 5 to 12 MiB to the libraries


def profile_path(*directories: Path, device: str) -> Path:
    """Where the profile of this machine's `device` with the drives behind `directories` is kept between runs.

    Machines may share a home folder, and a number of a drive means nothing on another one: whatever a rate depends on is
    in the name."""
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fuyou"
    drives_there = sorted({probe.existing(directory).stat().st_dev for directory in directories})
    computes_on = "cpu" if device == "emulated" else device
    about = (platform.node(), cpu_name(), core_count(), computes_on, *drives_there)
    return base / f"profile-{hashlib.sha256(repr(about).encode()).hexdigest()[:12]}.json"


def corrected_path(profile: Path) -> Path:
    """Where rates as runs showed them are kept beside the measured `profile`."""
    return profile.with_name(f"runs-{profile.name}")


def hardware_for(*directories: Path, device: str, calibrated: bool = False) -> HardwareProfile:
    """For a store striped over `directories`: the kept profile of this machine with memory and disk as they are now; without
    one, rates are assumed and the profile says so (`fuyou bench` measures them). `calibrated`: as the latest run showed
    them."""
    path = profile_path(*directories, device=device)
    name, memory = _device_facts(device)
    profile = _kept(corrected_path(path), said=False) if calibrated else None
    if calibrated and profile is None:
        _note("--calibrated: no run has shown this machine's rates since it was last measured: nothing is corrected")
    profile = profile or _kept(path)
    if profile is None or (name is not None and profile.device_name != name):  # another card than was measured
        profile = assumed_hardware(*directories, device=device, device_name=name, device_memory=memory)
        profile = replace(profile, process_bytes=0)  # known, if nothing else is
    device_free = _device_free(device, memory or profile.device_memory)  # its driver is part of the process from here on
    (pinnable, why), (memlock, memlock_why) = probe.pinnable(), probe.memlock()
    return replace(
        profile,
        device=device,
        device_free=device_free,
        cores=core_count(),
        ram_total=probe.memory_limit(),
        ram_available=usable_memory(),
        process_bytes=steady_process(probe.process_bytes(), measured=profile.process_bytes),
        disk_free=probe.striped_space(*directories),
        pinnable=pinnable,
        pinnable_why=why,
        memlock=memlock,
        memlock_why=memlock_why,
        drives=_with_wear(profile.drives, drives.drives_under(*directories)),
    )


def steady_process(now: int, *, measured: int) -> int:
    """Bytes of a process as a plan takes them: at least `now`, and the same for every plan of a run. Two processes that did
    the same differ by one or two MiB, and a plan file made twice is to be the same file. `measured`: what a process of
    `fuyou bench` had loaded, 0 where none has run."""
    start = measured + PROCESS_STEP  # so that no edge of the steps is near what a plan's process has
    return start + max(0, -(-(now - start) // PROCESS_STEP)) * PROCESS_STEP


def is_measured(*directories: Path, device: str) -> bool:
    """Whether `hardware_for` would know this machine by a kept profile."""
    profile = _kept(profile_path(*directories, device=device), said=False)
    name, _ = _device_facts(device)
    return profile is not None and (name is None or profile.device_name == name)


def why_not_kept(*directories: Path, device: str) -> str | None:
    """Why what is measured here could not be kept; None where it can be."""
    folder = profile_path(*directories, device=device).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _with_wear(kept: tuple[Drive, ...], now: tuple[Drive, ...]) -> tuple[Drive, ...]:
    """The drives as they are; what only `fuyou bench` could ask them (it takes a second) as it was then."""
    if [drive.model for drive in kept] != [drive.model for drive in now]:
        return now
    return tuple(_as_worn(old, new) for old, new in zip(kept, now, strict=True))


def _as_worn(old: Drive, new: Drive) -> Drive:
    used, percent = max(old.used_bytes, new.used_bytes), max(old.percent_used, new.percent_used)
    return replace(new, used_bytes=used, percent_used=percent)


def _kept(path: Path, *, said: bool = True) -> HardwareProfile | None:
    """What `fuyou bench` left there. It is advice: what cannot be read is said, and stands in nobody's way."""
    try:
        return read_profile(path) if path.exists() else None
    except UsageError as error:
        if said:
            _note(f"{error.message}; rates are assumed (`fuyou bench` replaces it)")
        return None


@cache
def _note(text: str) -> None:
    """Once, however often a run looks at the machine."""
    write_status(f"note: {text}")


def keep(profile: HardwareProfile, *directories: Path) -> HardwareProfile:
    """Remembers a measured profile for the plans to come, with what earlier measurements of the same machine know beside
    it: rates of other stages, and those of sustained writing. Returns what is kept."""
    path = profile_path(*directories, device=profile.device)
    before = _kept(path, said=False)  # what cannot be read is replaced now
    if before is not None and before.device_name == profile.device_name:
        profile = _joined(before, profile)
    _write(profile, path)
    with suppress(OSError):
        corrected_path(path).unlink()  # corrected what was measured before
    return profile


def keep_corrected(profile: HardwareProfile, *directories: Path, instead_of: HardwareProfile) -> None:
    """Remembers rates as a run showed them, for plans that ask for them: `instead_of` those that the run was planned with,
    unless the machine was measured anew meanwhile."""
    path = profile_path(*directories, device=profile.device)
    kept = (_kept(file, said=False) for file in (path, corrected_path(path)))
    known = [found for found in kept if found is not None]
    if instead_of.digest() not in {found.digest() for found in known}:
        return
    today = datetime.date.today().isoformat()
    measured = f"{profile.measured.partition(',')[0]}, corrected by a run of {today}"
    # A run's process is what was measured and more: kept, the next run's would be larger by as much again.
    corrected = replace(profile, measured=measured, process_bytes=known[0].process_bytes)
    _write(corrected, corrected_path(path))


def _write(profile: HardwareProfile, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_profile(profile, path)
    except OSError as error:
        write_status(f"note: the profile could not be kept in {path}: {error.strerror}")


def _joined(before: HardwareProfile, found: HardwareProfile) -> HardwareProfile:
    joined = replace(found, stage_rates=merged_rates(before.stage_rates, found.stage_rates))
    if found.sustained_write or found.steady_bytes:
        return joined
    return replace(
        joined,
        sustained_write=before.sustained_write,
        sustained_read_mixed=before.sustained_read_mixed,
        sustained_write_mixed=before.sustained_write_mixed,
        burst_bytes=before.burst_bytes,
        steady_bytes=before.steady_bytes,
    )


def _device_facts(device: str) -> tuple[str | None, int]:
    if device != "cuda":
        return None, 0
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "offload.device: cuda, but no CUDA device is usable by this torch build",
            hint="run `fuyou doctor`, or set offload.device=cpu",
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.name, properties.total_memory


def _device_free(device: str, memory: int) -> int:
    """Bytes of the device's `memory` that this process may have. In steps, as memory of the host. Asked of CUDA and not of
    NVML: the context that is made for it takes some of both memories, which a plan has to know of."""
    if device != "cuda":
        return 0
    from fuyou_cli.engine.devices.cuda import free_memory

    return max(1, in_steps(min(free_memory(), memory), memory))  # 0 would be: not known
