"""Measures copies within the host's memory, and to and from a device with memory of its own: each way alone, and both at once.

A step downloads gradients and boundaries while it uploads weights, and the two share the bus and the host's memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fuyou_cli.core.units import MiB

from .findings import Found, Rate, each, found, rate_of, seconds_of

if TYPE_CHECKING:
    import torch

    from fuyou_cli.engine.devices.base import Device, Event

COPIED = 256 * MiB
HOST_COPIED = 64 * MiB  # of one copy: larger than the caches
PIECES = 8  # that a copy is submitted in, turn about with the other way's
LEAST = 0.1  # of the rate alone: less is no rate but a copy engine that does one thing after the other


def measure_memory(*, repeats: int, size: int = HOST_COPIED) -> Found:
    """Measures bytes read and written per second by all threads of compute, to pages that are there and to new ones.

    The kernel has yet to clear new pages, as of a whole batch's tensor, which every visit makes anew."""
    import torch

    from fuyou_cli.engine.host_memory import whole_batch

    source, there = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    note = f"{size >> 20} MiB, {torch.get_num_threads()} threads"

    def rate(name: str, target: Callable[[], torch.Tensor]) -> Rate:
        taken = [seconds_of(partial(target().copy_, source)) for _ in range(1 + repeats)][1:]
        return rate_of(name, "B/s", each(2.0 * size, taken), note)

    new = rate("copy to new pages", lambda: whole_batch((size,), torch.uint8))
    return found(host_copy=rate("copy", lambda: there), host_fresh=new)


def measure_gpu_copies(*, repeats: int) -> Found:
    """Measures copies to this machine's GPU and back."""
    from fuyou_cli.engine.devices import open_device

    device = open_device("cuda")
    try:
        return measure_copies(device, repeats=repeats)
    finally:
        device.close()


def measure_copies(device: Device, *, repeats: int, size: int = COPIED) -> Found:
    """Measures bytes/s to the device and back, each alone, then each while the other is under way."""
    import torch

    hosts = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    for host in hosts:  # as a run pins its arena; what torch pins itself would stay pinned after a run has measured
        device.pin(host)
    there = [device.empty(size) for _ in range(2)]
    piece = size // PIECES

    def part(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor[number * piece : (number + 1) * piece]

    def up(number: int) -> Event:
        return device.upload(part(hosts[0], number), part(there[0], number))

    def down(number: int) -> Event:
        return device.download(part(there[1], number), part(hosts[1], number))

    _seconds(up, down)  # once, not counted
    alone = [each(float(size), [_seconds(way)[0] for _ in range(repeats)]) for way in (up, down)]
    middle = statistics.median(alone[0]), statistics.median(alone[1])
    both = [at_once(size, _seconds(up, down), middle) for _ in range(repeats)]
    return found(
        h2d=rate_of("host to GPU", "B/s", alone[0], "pinned"),
        d2h=rate_of("GPU to host", "B/s", alone[1], "pinned"),
        h2d_mixed=rate_of("host to GPU while copying back", "B/s", [rates[0] for rates in both], "pinned"),
        d2h_mixed=rate_of("GPU to host while copying there", "B/s", [rates[1] for rates in both], "pinned"),
    )


def _seconds(*ways: Callable[[int], Event]) -> list[float]:
    """Times the arrival of the last piece of each way, all of them submitted turn about."""
    begin = time.perf_counter()
    last = [[way(number) for way in ways] for number in range(PIECES)][-1]
    ends: dict[int, float] = {}
    while len(ends) < len(ways):
        for number, event in enumerate(last):
            if number not in ends and event.done():
                ends[number] = time.perf_counter() - begin
    return [ends[number] for number in range(len(ways))]


def at_once(size: int, ends: Sequence[float], alone: tuple[float, float]) -> tuple[float, float]:
    """Computes bytes/s, while both were under way, of two copies of `size` begun together that took `ends` seconds."""
    first = min(ends)  # what the slower one had left then, it copied at its rate alone
    slow = [(size - (end - first) * rate) / first for end, rate in zip(ends, alone, strict=True)]
    return min(alone[0], max(LEAST * alone[0], slow[0])), min(alone[1], max(LEAST * alone[1], slow[1]))
