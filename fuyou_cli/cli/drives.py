"""What a folder's drive can do and is: direct I/O and its alignment, model, wear, and whether io_uring may be used."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .probe import existing

_ALIGNMENTS = (512, 4096)  # bytes, tried in this order
_SYS_IO_URING_SETUP = 425  # the same number on every architecture but alpha
_IO_URING_PARAMS = 120  # bytes of struct io_uring_params
_NVME_ADMIN = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD
_GET_LOG_PAGE, _SMART_LOG, _SMART_BYTES = 0x02, 0x02, 512


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectIo:
    """`alignment` in bytes when O_DIRECT works in a folder, else why not."""

    alignment: int | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wear:
    percent_used: int  # of the rated endurance, may exceed 100
    written: int  # bytes, over the drive's life


def direct_io(folder: Path) -> DirectIo:
    """Tried with a small file that is gone afterwards."""
    try:
        with tempfile.NamedTemporaryFile(dir=existing(folder), prefix=".fuyou-probe-") as file:
            try:
                direct = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            except OSError as error:
                return DirectIo(alignment=None, reason=f"the file system refuses O_DIRECT ({error.strerror})")
            try:
                return _alignment(direct)
            finally:
                os.close(direct)
    except OSError as error:
        return DirectIo(alignment=None, reason=f"nothing can be written there ({error.strerror})")


def _alignment(direct: int) -> DirectIo:
    reason = ""
    with mmap.mmap(-1, 8192) as memory:
        for alignment in _ALIGNMENTS:
            # the second block, so that offset and size are multiples of nothing larger
            with memoryview(memory) as whole, whole[alignment : 2 * alignment] as block:
                try:
                    if os.pwrite(direct, block, alignment) == alignment:
                        return DirectIo(alignment=alignment)
                except OSError as error:
                    reason = error.strerror or "refused"
    return DirectIo(alignment=None, reason=f"direct writes fail ({reason})")


def io_uring_refusal() -> str | None:
    """None when this process may use io_uring, else why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS)
    ring = libc.syscall(_SYS_IO_URING_SETUP, 4, parameters)
    if ring >= 0:
        os.close(ring)
        return None
    code = ctypes.get_errno()
    if code == errno.ENOSYS:
        return "this kernel has none, or the container's seccomp profile hides it"
    if code in (errno.EPERM, errno.EACCES):
        return "forbidden: a container's seccomp profile, or the sysctl kernel.io_uring_disabled"
    if code == errno.ENOMEM:
        return "the locked-memory limit is too small for its queues"
    return os.strerror(code)


def block_device(folder: Path, sysfs: Path = Path("/sys")) -> Path | None:
    """The whole drive under a folder, as its folder in /sys: through partitions and device-mapper layers. None where
    the file system has no drive of its own (tmpfs, overlay, network)."""
    number = existing(folder).stat().st_dev
    device = sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    for _ in range(8):
        if not device.exists():
            return None
        device = device.resolve()
        slaves = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
        if (device / "partition").exists():
            device = device.parent
        elif slaves:
            device = slaves[0]
        else:
            return device
    return None


def drive_model(device: Path) -> str | None:
    for name in ("device/model", "device/name"):
        try:
            return " ".join((device / name).read_text().split()) or None
        except OSError:
            continue
    return None


def nvme_wear(device: Path, dev: Path = Path("/dev")) -> Wear | None:
    """From the drive's own log; None where it is no NVMe drive or the log may not be read (it takes root)."""
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
            fcntl.ioctl(drive, _NVME_ADMIN, bytearray(command))
    except OSError:
        return None
    return parse_smart(log.raw)


def parse_smart(log: bytes) -> Wear:
    """The SMART log page of the NVMe specification: units of 1000 blocks of 512 bytes."""
    return Wear(percent_used=log[5], written=int.from_bytes(log[48:64], "little") * 512_000)
