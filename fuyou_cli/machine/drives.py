"""Finds a folder's drives: models, capacity, wear and endurance. Also tells whether this process may use io_uring."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fuyou_cli.core.disk import existing
from fuyou_cli.core.units import gb
from fuyou_cli.spec.hardware import Drive

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
