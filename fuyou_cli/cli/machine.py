"""The machine for a plan: as `fuyou bench` measured and kept it, else assumed. Nothing is measured here."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from fuyou_cli.spec.hardware import HardwareProfile

from . import probe
from .console import write_status
from .profile import assumed_hardware, read_profile, usable_memory, write_profile


def profile_path(directory: Path) -> Path:
    """Where the profile of the drive behind `directory` is kept between runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fuyou"
    device = probe.existing(directory).stat().st_dev
    return base / f"profile-{hashlib.sha256(str(device).encode()).hexdigest()[:12]}.json"


def hardware_for(directory: Path, *, device: str) -> HardwareProfile:
    """The kept profile of this machine with memory and disk as they are now; without one, rates are assumed and the
    profile says so (`fuyou bench` measures them)."""
    path = profile_path(directory)
    profile = read_profile(path) if path.exists() else None
    if profile is None or profile.device != ("cpu" if device == "emulated" else device):
        name, memory = _device_facts(device)
        profile = assumed_hardware(directory, device=device, device_name=name, device_memory=memory)
    return replace(
        profile,
        device=device,
        ram_available=usable_memory(),
        process_bytes=probe.process_bytes(),
        disk_free=probe.free_space(directory),
    )


def keep(profile: HardwareProfile, directory: Path) -> None:
    """Remembers a measured profile for the plans to come."""
    path = profile_path(directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_profile(profile, path)
    except OSError as error:
        write_status(f"note: the profile could not be kept in {path}: {error.strerror}")


def _device_facts(device: str) -> tuple[str | None, int]:
    if device != "cuda":
        return None, 0
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.name, properties.total_memory
