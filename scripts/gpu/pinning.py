"""How long it takes to pin an arena, and what copies from it reach."""

from __future__ import annotations

import time

from proof.verdicts import Row, missing, reported

from fuyou_cli.core import probe
from fuyou_cli.core.units import MiB, gib

SPARE = 1.3  # times its size must be available: a machine that swaps measures its drive
COPIED = 256 * MiB
COPIES = 4


def pin(size: int, device_name: str) -> Row:
    """An arena of `size` bytes pinned as a run does it, which has touched none of it before, and copied from and back."""
    what = f"pinning {gib(size)}"
    available = probe.memory_available()
    if available < SPARE * size:
        return missing(what, "pinned", f"skipped: {gib(available)} of memory are available")
    import torch

    from fuyou_cli.engine.context import HostMemory
    from fuyou_cli.engine.devices import open_device
    from fuyou_cli.swap.store import Arena

    with Arena(size) as arena:
        memory = HostMemory(arena)
        whole = torch.frombuffer(arena.view(0, arena.size), dtype=torch.uint8)
        device = open_device(device_name)
        try:
            began = time.perf_counter()
            device.pin(whole)
            seconds = time.perf_counter() - began
            began = time.perf_counter()
            memory.take()
            touched = time.perf_counter() - began
            up, down = _rates(device, whole)
        finally:
            device.close()
            del whole
    told = "nothing: this device pins nothing" if device_name != "cuda" else f"{size / seconds / 1e9:.1f} GB/s"
    note = f"{told}; pages touched afterwards in {touched:.2f} s; copies up {up / 1e9:.1f}, down {down / 1e9:.1f} GB/s"
    return reported(
        what, f"{seconds:.3f} s", note=note, values={"seconds": seconds, "touched": touched, "up": up, "down": down}
    )


def _rates(device, host) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Bytes/s up and down, of the first bytes of `host`, the best of a few."""
    size = min(COPIED, host.numel())
    there = device.empty(size)
    best = []
    for way in (lambda: device.upload(host[:size], there), lambda: device.download(there, host[:size])):
        way().synchronize()
        seconds = []
        for _ in range(COPIES):
            began = time.perf_counter()
            way().synchronize()
            seconds.append(time.perf_counter() - began)
        best.append(size / min(seconds))
    return best[0], best[1]
