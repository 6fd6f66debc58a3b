"""Measures copies: within the host's memory, and to and from a device, each way alone and both at once; and sums in a GPU's
memory.

A step downloads gradients and boundaries while it uploads weights; both share the bus and the host's memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fuyou_cli.core.units import MiB

from .findings import Findings, Rate, each, found, mean_seconds, rate_of, seconds_of

if TYPE_CHECKING:
    import torch

    from fuyou_cli.engine.devices.base import Device, Event

COPIED = 256 * MiB
HOST_COPIED = 64 * MiB  # bytes of one copy: larger than the caches
SUMMED = 64 * MiB  # gradients of one sum: several times what a GPU's cache holds
SUM_SECONDS = 0.05  # of one repeat
PIECES = 8  # of a copy; pieces of both ways are submitted in turns
LEAST = 0.1  # of the rate alone; less than that is a copy engine that does one way after the other


def measure_memory(*, repeats: int) -> Findings:
    """Measures bytes read and written per second by all compute threads, on pages that exist and on new ones.

    The kernel must clear new pages first. The tensor of a whole batch has new pages, because every visit makes it again.
    """
    import torch

    from fuyou_cli.engine.host_memory import whole_batch

    source, there = torch.ones(HOST_COPIED, dtype=torch.uint8), torch.ones(HOST_COPIED, dtype=torch.uint8)
    note = f"{HOST_COPIED >> 20} MiB, {torch.get_num_threads()} threads"

    def rate(name: str, target: Callable[[], torch.Tensor]) -> Rate:
        taken = [seconds_of(partial(target().copy_, source)) for _ in range(1 + repeats)][1:]
        return rate_of(name, "B/s", each(2.0 * HOST_COPIED, taken), note)

    new = rate("copy to new pages", lambda: whole_batch((HOST_COPIED,), torch.uint8))
    return found(host_copy=rate("copy", lambda: there), host_fresh=new)


def measure_sums(device: torch.device, *, repeats: int, count: int = SUMMED) -> Findings:
    """Measures bytes/s of a GPU's own memory: it adds `count` gradients in bfloat16 to a sum in float32, as each micro-batch
    does."""
    import torch

    gradients = torch.ones(count, dtype=torch.bfloat16, device=device)
    total = torch.zeros(count, dtype=torch.float32, device=device)
    add = partial(total.add_, gradients)
    moved = float(gradients.nbytes + 2 * total.nbytes)
    taken = [mean_seconds(add, SUM_SECONDS, device) for _ in range(1 + repeats)][1:]
    return found(device_memory_rate=rate_of("GPU memory", "B/s", each(moved, taken), "sums of gradients"))


def measure_copies(device: Device, *, repeats: int, size: int = COPIED) -> Findings:
    """Measures bytes/s to the device and back: each way alone, then each while the other runs."""
    import torch

    hosts = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    for host in hosts:  # pinned like a run's arena; memory that torch pins itself would stay pinned after measuring
        device.pin(host)
    there = [device.empty(size) for _ in range(2)]
    piece = size // PIECES

    def part(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor[number * piece : (number + 1) * piece]

    def up(number: int) -> Event:
        return device.upload(part(hosts[0], number), part(there[0], number))

    def down(number: int) -> Event:
        return device.download(part(there[1], number), part(hosts[1], number))

    _seconds(up, down)  # a first time, not counted
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
    """Times the arrival of the last piece of each way; the pieces are submitted in turns."""
    begin = time.perf_counter()
    last = [[way(number) for way in ways] for number in range(PIECES)][-1]
    ends: dict[int, float] = {}
    while len(ends) < len(ways):
        for number, event in enumerate(last):
            if number not in ends and event.done():
                ends[number] = time.perf_counter() - begin
    return [ends[number] for number in range(len(ways))]


def at_once(size: int, ends: Sequence[float], alone: tuple[float, float]) -> tuple[float, float]:
    """Computes bytes/s while both copies ran: each of `size` bytes, begun together, they took `ends` seconds."""
    first = min(ends)  # then the slower one copied its rest at its rate alone
    slow = [(size - (end - first) * rate) / first for end, rate in zip(ends, alone, strict=True)]
    return min(alone[0], max(LEAST * alone[0], slow[0])), min(alone[1], max(LEAST * alone[1], slow[1]))
