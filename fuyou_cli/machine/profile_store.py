"""Keeps this machine's profiles for plans, as `fuyou bench` measured them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from fuyou_cli.core import probe
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import read_object
from fuyou_cli.core.paths import kept_folder, machine_id
from fuyou_cli.core.probe import file_system_of
from fuyou_cli.core.typed import WrongData, from_json
from fuyou_cli.core.units import MiB, in_steps
from fuyou_cli.spec.hardware import ON_PROCESSOR, SUSTAINED_RATES, HardwareProfile, merged_rates, wrong_rates

from .background_load import are_busy
from .profile import FILE_KEYS, LATER_ON_A_GPU, assumed_hardware, card, core_count, cpu_name, facts_now

SCHEMA_VERSION = 2
PROCESS_STEP = 16 * MiB  # beside the libraries, a small model's plan holds 5 to 12 MiB: model, tokenizer and rows
_LARGEST_FILE = 16 << 20  # bytes

Say = Callable[[str], None]


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Writes the profile as JSON, for planning elsewhere or later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.{os.getpid()}")  # renamed when complete: nobody reads half of it
    try:
        whole.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(profile)}, indent=2) + "\n")
        whole.replace(path)
    except OSError:
        whole.unlink(missing_ok=True)
        raise


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
        wrong: tuple[str, ...] = tuple(wrong_rates(profile, sizes=False))  # without sizes: the disk may have been full
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


def _joined(before: HardwareProfile, found: HardwareProfile) -> HardwareProfile:
    # Rates measured beside busy programs stay until the machine is quiet, also for shapes that are not measured now.
    outdated = are_busy(before.others_cores) and not are_busy(found.others_cores)
    rates = () if outdated else before.stage_rates
    joined = replace(found, stage_rates=merged_rates(rates, found.stage_rates))
    if found.sustained_write or found.steady_bytes:
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
