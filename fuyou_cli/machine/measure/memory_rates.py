"""Measures what moves bytes through the host's memory: AdamW, alone and beside a training step; copies, also to a device and
back; and all of them with the store at once."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core.units import GiB, MiB, gb
from fuyou_cli.swap.daemon import SwapDaemon
from fuyou_cli.swap.store import Arena

from .store_rates import LEAST_SPAN, REQUEST, new_store
from .timing import Findings, Rate, each, findings, mean_seconds, rate_of, repeated, seconds_of

if TYPE_CHECKING:
    import torch

    from fuyou_cli.engine.devices.base import Device, Event


# ---- the update ------------------------------------------------------------------------------------------------------


ADAMW_BYTES_PER_PARAMETER = 26  # bfloat16: 14 read, 12 written
ADAMW_PARAMETERS = 1 << 23  # per thread: 117 MB, larger than the caches
ADAMW_PASSES = 4  # one repeat
ADAMW_MEMORY = GiB // 2  # bytes of all threads together; more on a machine with more memory
ADAMW_MOST_MEMORY = 2 * GiB
ARENA_PER_PARAMETER = 14

Share = Callable[[], object]


def measure_adamw(cores: int, *, repeats: int, available: int = 0) -> Findings:
    """Measures bytes/s of 1, 2, 4, ... threads together, running the update's own kernel, on as many as memory allows."""
    memory = max(ADAMW_MEMORY, min(ADAMW_MOST_MEMORY, available // 16))
    each_needs = ADAMW_PARAMETERS * ARENA_PER_PARAMETER
    powers = [1 << power for power in range(max(1, cores).bit_length())]
    counts = [count for count in powers if count == 1 or count * each_needs <= memory]
    rates: dict[int, Rate] = {}
    with shares_of(counts[-1]) as shares, ThreadPoolExecutor(counts[-1]) as pool:
        for count in counts:
            seconds = _passes(pool, shares[:count], repeats)
            amount = float(ADAMW_PASSES) * count * ADAMW_PARAMETERS * ADAMW_BYTES_PER_PARAMETER
            rates[count] = rate_of(f"AdamW, {count} thread{'s' * (count > 1)}", "B/s", each(amount, seconds))
    figures = {"adamw": tuple((count, rate.value) for count, rate in rates.items())}
    return Findings(figures=figures, rates=tuple(rates.values()))


@contextmanager
def shares_of(threads: int) -> Iterator[list[Share]]:
    """Makes an update for each of so many threads, in memory that is freed at the end."""
    with Arena(threads * ADAMW_PARAMETERS * ARENA_PER_PARAMETER) as arena:
        shares = [_share(arena.view, number) for number in range(threads)]
        try:
            yield shares
        finally:
            shares.clear()


def _passes(pool: ThreadPoolExecutor, shares: list[Share], repeats: int) -> list[float]:
    """Times each repeat. A first pass is not counted."""

    def work(passes: int) -> None:
        for _ in range(passes):
            for done in [pool.submit(share) for share in shares]:
                done.result()

    work(1)
    return [seconds_of(partial(work, ADAMW_PASSES)) for _ in range(repeats)]


def measure_shared(step: Callable[[], object], flops: float, *, seconds: float, note: str) -> Findings:
    """Measures what share of their rates an update thread and a step of `flops` keep when both run, `seconds` each."""
    amount = float(ADAMW_PARAMETERS * ADAMW_BYTES_PER_PARAMETER)
    with Arena(ADAMW_PARAMETERS * ARENA_PER_PARAMETER) as arena:
        share = _share(arena.view, 0)
        for warm in (step, share):
            warm()
        steps = each(flops, repeated(step, seconds))
        updates = each(amount, repeated(share, seconds / 2))
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            updating = pool.submit(_until, over, share)
            try:
                steps_beside = each(flops, repeated(step, seconds))
            finally:
                over.set()
            updates_beside = each(amount, updating.result())
    rates = (
        rate_of("training step", "FLOP/s", steps, note),
        rate_of("training step, AdamW beside", "FLOP/s", steps_beside, note),
        rate_of("AdamW, a training step beside", "B/s", updates_beside),
    )
    figures = {"shared_compute": _kept(steps_beside, steps), "shared_adamw": _kept(updates_beside, updates)}
    return Findings(figures=figures, rates=rates)


def _kept(shared: list[float], alone: list[float]) -> float:
    return min(1.0, statistics.harmonic_mean(shared) / statistics.harmonic_mean(alone))


def _until(over: threading.Event, action: Callable[[], object]) -> list[float]:
    """Times each turn until `over`; at least one."""
    seconds = [seconds_of(action)]
    while not over.is_set():
        seconds.append(seconds_of(action))
    return seconds


def _share(view: Callable[[int, int], memoryview], number: int) -> Share:
    """Makes one thread's update over its own part of the arena, with gradients filled in."""
    import torch

    from fuyou_cli.swap import kernels
    from fuyou_cli.swap.native import Segment, Update

    count = ADAMW_PARAMETERS
    base, places = number * count * ARENA_PER_PARAMETER, {}
    for name, item in (("momentum", 4), ("variance", 4), ("weights", 2), ("remainder", 2), ("gradients", 2)):
        places[name] = view(base, count * item)
        base += count * item
    torch.frombuffer(places["gradients"], dtype=torch.bfloat16).fill_(0.5)
    update = Update(
        params=count, weights_dtype="bfloat16", gradients_dtype="bfloat16", weights=0, lr=1e-3, beta1=0.9, beta2=0.95,
        epsilon=1e-8, step=1, segments=(Segment(first=0, count=count, weight_decay=0.1),),
    )  # fmt: skip
    return lambda: kernels.adamw(update, **places)


# ---- copies ----------------------------------------------------------------------------------------------------------


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

    from fuyou_cli.engine.context import whole_batch

    source, target_bytes = torch.ones(HOST_COPIED, dtype=torch.uint8), torch.ones(HOST_COPIED, dtype=torch.uint8)
    note = f"{HOST_COPIED >> 20} MiB, {torch.get_num_threads()} threads"

    def rate(name: str, target: Callable[[], torch.Tensor]) -> Rate:
        seconds = [seconds_of(partial(target().copy_, source)) for _ in range(1 + repeats)][1:]
        return rate_of(name, "B/s", each(2.0 * HOST_COPIED, seconds), note)

    new = rate("copy to new pages", lambda: whole_batch((HOST_COPIED,), torch.uint8))
    return findings(host_copy=rate("copy", lambda: target_bytes), host_fresh=new)


def measure_sums(device: torch.device, *, repeats: int, count: int = SUMMED) -> Findings:
    """Measures bytes/s of a GPU's own memory: it adds `count` gradients in bfloat16 to a sum in float32, as each micro-batch
    does."""
    import torch

    gradients = torch.ones(count, dtype=torch.bfloat16, device=device)
    total = torch.zeros(count, dtype=torch.float32, device=device)
    add = partial(total.add_, gradients)
    moved = float(gradients.nbytes + 2 * total.nbytes)
    seconds = [mean_seconds(add, SUM_SECONDS, device) for _ in range(1 + repeats)][1:]
    return findings(device_memory_rate=rate_of("GPU memory", "B/s", each(moved, seconds), "sums of gradients"))


def measure_copies(device: Device, *, repeats: int, size: int = COPIED) -> Findings:
    """Measures bytes/s to the device and back: each way alone, then each while the other runs."""
    import torch

    hosts = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    for host in hosts:  # pinned like a run's arena; memory that torch pins itself would stay pinned after measuring
        device.pin(host)
    on_device = [device.empty(size) for _ in range(2)]
    piece = size // PIECES

    def part(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor[number * piece : (number + 1) * piece]

    def up(number: int) -> Event:
        return device.upload(part(hosts[0], number), part(on_device[0], number))

    def down(number: int) -> Event:
        return device.download(part(on_device[1], number), part(hosts[1], number))

    _seconds(up, down)  # a first time, not counted
    alone = [each(float(size), [_seconds(way)[0] for _ in range(repeats)]) for way in (up, down)]
    middle = statistics.median(alone[0]), statistics.median(alone[1])
    mixed = [at_once(size, _seconds(up, down), middle) for _ in range(repeats)]
    return findings(
        h2d=rate_of("host to GPU", "B/s", alone[0], "pinned"),
        d2h=rate_of("GPU to host", "B/s", alone[1], "pinned"),
        h2d_mixed=rate_of("host to GPU while copying back", "B/s", [rates[0] for rates in mixed], "pinned"),
        d2h_mixed=rate_of("GPU to host while copying there", "B/s", [rates[1] for rates in mixed], "pinned"),
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


# ---- everything at once ----------------------------------------------------------------------------------------------


COPIED_AT_ONCE, READ_AT_ONCE = 64 * MiB, 4 * REQUEST  # bytes of a copy and of a read
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
        findings = together(movers, best=best, seconds=seconds, turns=turns)
    return findings + Findings(written_bytes=LEAST_SPAN)


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
    """Whether the memory is a limit, from the rates of each turn. If it is, the profile gets the most that was moved at
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

    hosts = [torch.zeros(COPIED_AT_ONCE, dtype=torch.uint8) for _ in range(2)]
    for host in hosts:
        device.pin(host)
    on_device = [device.empty(COPIED_AT_ONCE) for _ in range(2)]

    def up() -> int:
        device.upload(hosts[0], on_device[0]).synchronize()
        return COPIED_AT_ONCE

    def down() -> int:
        device.download(on_device[1], hosts[1]).synchronize()
        return COPIED_AT_ONCE

    yield {"copies both ways": [up, down]}
