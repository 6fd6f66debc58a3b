"""Tells how busy other programs keep the machine during a measurement. Rates measured beside them are too low."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fuyou_cli.core import probe

BUSY_CORES, BUSY_SHARE = 0.4, 0.1  # from here on a note says so: share of all cores, but at least the kernel's own work
LOOK = 1.0  # seconds; the clock counts hundredths


class BackgroundLoad:
    """Counts the cores that others use from now on. A child counts as ours once it has ended."""

    def __init__(self, root: Path = probe.ROOT) -> None:
        self._root = root
        self._began, self._busy, self._own = time.monotonic(), busy_seconds(root), own_seconds()

    def cores(self) -> float:
        """Returns the average since the start; 0 if the system does not tell."""
        used = (busy_seconds(self._root) - self._busy) - (own_seconds() - self._own)
        return round(max(0.0, used) / max(time.monotonic() - self._began, 1e-9), 3)


def cores_now() -> float:
    """Returns the cores that others use while this process sleeps."""
    others = BackgroundLoad()
    time.sleep(LOOK)
    return others.cores()


def are_busy(cores: float) -> bool:
    """Tells whether that is more than the noise of every system."""
    return cores > max(BUSY_CORES, BUSY_SHARE * (os.cpu_count() or 1))


def busy_seconds(root: Path = probe.ROOT) -> float:
    """Returns the CPU seconds of the whole machine so far, with those that a hypervisor gave to other machines."""
    try:
        line = (root / "proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0.0
    ticks = [int(word) for word in line.split()[1:9]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
