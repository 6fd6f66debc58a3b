"""Measures what the host's memory gives to all that move bytes through it at once: AdamW, the store, copies to a GPU and back.

Each moves alone, then all move at once, in turns. If they are as fast at once as alone, the memory limits none of them, and how
much it could give stays unknown.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core.units import MiB, gb
from fuyou_cli.swap.daemon import SwapDaemon

from .findings import Findings, rate_of
from .store_rates import LEAST_SPAN, new_store
from .streams import REQUEST
from .update_rates import ADAMW_BYTES_PER_PARAMETER, ADAMW_PARAMETERS, shares_of

if TYPE_CHECKING:
    from fuyou_cli.engine.devices.base import Device

COPIED, READ_AT_ONCE = 64 * MiB, 4 * REQUEST  # bytes of a copy and of a read
LIMITS = 0.95  # share of the sum of all rates alone; what is faster at once is not limited by the memory

Mover = Callable[[], int]  # moves some bytes, in milliseconds, and returns how many
Movers = Mapping[str, Sequence[Mover]]  # by name, one for each thread


def measure_dram(*directories: Path, threads: int, best: float, device: Device | None, seconds: float, turns: int) -> Findings:
    """Measures all movers of this machine, `seconds` at a time: AdamW on so many threads, reads of a small store, and copies
    of `device`. `best`: AdamW's best rate, which the memory surely gives."""
    with ExitStack() as stack:
        daemon, _ = stack.enter_context(new_store(directories, LEAST_SPAN))
        daemon.wait(daemon.write(0, 0, LEAST_SPAN))  # a file that was never written is not read from its drive
        adamw = [_updates(share) for share in stack.enter_context(shares_of(threads))]
        movers: dict[str, Sequence[Mover]] = {"AdamW": adamw, "reads": [_reads(daemon, half) for half in range(2)]}
        if device is not None:
            movers |= stack.enter_context(_copies(device))
        found = together(movers, best=best, seconds=seconds, turns=turns)
    return found + Findings(written_bytes=LEAST_SPAN)


def together(movers: Movers, *, best: float, seconds: float, turns: int) -> Findings:
    """Measures the rate of all movers at once, and of each alone, `seconds` each time."""
    alone: dict[str, list[float]] = {name: [] for name in movers}
    at_once: list[float] = []
    for turn in range(turns + 1):  # the first is not counted
        one_by_one = {name: _rate({name: each}, seconds) for name, each in movers.items()}
        every = _rate(movers, seconds)
        if turn:
            at_once.append(every)
            for name, rate in one_by_one.items():
                alone[name].append(rate)
    return judged(alone, at_once, best=best)


def judged(alone: Mapping[str, list[float]], at_once: list[float], *, best: float) -> Findings:
    """Tells whether the memory is a limit, from the rates of each turn. If it is, the profile gets the most that was moved at
    once: other programs can only have made it less."""
    medians = {name: statistics.median(rates) for name, rates in alone.items()}
    named = ", ".join(f"{name} {gb(rate)}/s" for name, rate in medians.items())
    rate = rate_of("memory, all at once", "B/s", at_once, f"alone: {named}")
    if rate.high < LIMITS * sum(medians.values()):
        return Findings(figures={"dram": max(rate.high, best)}, rates=(rate,))
    free = "all that moves bytes is as fast at once as alone: the memory's bandwidth stays unknown and limits no plan"
    return Findings(figures={"dram": 0.0}, rates=(rate,), notes=(free,))


def _rate(movers: Movers, seconds: float) -> float:
    """Returns the bytes per second of all of these at once, each on its own thread."""
    over, every = threading.Event(), [mover for each in movers.values() for mover in each]

    def move(mover: Mover) -> float:
        moved, begin = mover(), time.perf_counter()
        moved = 0  # the first piece brings all threads to work
        while not moved or not over.is_set():
            moved += mover()
        return moved / (time.perf_counter() - begin)

    with ThreadPoolExecutor(len(every)) as pool:
        try:
            moving = [pool.submit(move, mover) for mover in every]
            over.wait(seconds)
        finally:  # an interrupted measurement waits for its threads, which use memory that is freed then
            over.set()
        return sum(each.result() for each in moving)


def _updates(share: Callable[[], object]) -> Mover:
    def move() -> int:
        share()
        return ADAMW_PARAMETERS * ADAMW_BYTES_PER_PARAMETER

    return move


def _reads(daemon: SwapDaemon, half: int) -> Mover:
    """Reads the store request by request, into one half of the arena."""
    size, turns = LEAST_SPAN // 2, count()

    def move() -> int:
        place = next(turns) * READ_AT_ONCE % LEAST_SPAN
        daemon.wait(daemon.read(half * size + place % size, place, READ_AT_ONCE))
        return READ_AT_ONCE

    return move


@contextmanager
def _copies(device: Device) -> Iterator[dict[str, Sequence[Mover]]]:
    """Copies to a device and back, always both ways: what one slows down the other is the bus, not the memory."""
    import torch

    hosts = [torch.zeros(COPIED, dtype=torch.uint8) for _ in range(2)]
    for host in hosts:
        device.pin(host)
    there = [device.empty(COPIED) for _ in range(2)]

    def up() -> int:
        device.upload(hosts[0], there[0]).synchronize()
        return COPIED

    def down() -> int:
        device.download(there[1], hosts[1]).synchronize()
        return COPIED

    yield {"copies both ways": [up, down]}
