"""Measures the update: AdamW on more and more threads, and beside a training step, as in a run on device cpu."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from fuyou_cli.core.units import GiB
from fuyou_cli.swap.arena import Arena

from .findings import Findings, Rate, each, rate_of, repeated, seconds_of

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
            taken = _passes(pool, shares[:count], repeats)
            amount = float(ADAMW_PASSES) * count * ADAMW_PARAMETERS * ADAMW_BYTES_PER_PARAMETER
            rates[count] = rate_of(f"AdamW, {count} thread{'s' * (count > 1)}", "B/s", each(amount, taken))
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


def _kept(beside: list[float], alone: list[float]) -> float:
    return min(1.0, statistics.harmonic_mean(beside) / statistics.harmonic_mean(alone))


def _until(over: threading.Event, action: Callable[[], object]) -> list[float]:
    """Times each turn until `over`; at least one."""
    taken = [seconds_of(action)]
    while not over.is_set():
        taken.append(seconds_of(action))
    return taken


def _share(view: Callable[[int, int], memoryview], number: int) -> Share:
    """Makes one thread's update over its own part of the arena, with gradients filled in."""
    import torch

    from fuyou_cli.swap import kernels
    from fuyou_cli.swap.requests import Segment, Update

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
