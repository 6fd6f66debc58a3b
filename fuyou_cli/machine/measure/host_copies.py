"""Measures the host's memory: copies by all threads of compute, to pages that are there and to pages that are new."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fuyou_cli.core.units import MiB

from .findings import Found, Rate, each, found, rate_of

if TYPE_CHECKING:
    import torch

COPIED = 64 * MiB  # of one copy: larger than the caches


def measure_memory(*, repeats: int, size: int = COPIED) -> Found:
    """Measures bytes read and written per second: where the target's pages are there, and where the kernel has yet to clear
    each of them, as of a whole batch's tensor, which every visit makes anew."""
    import torch

    from fuyou_cli.engine.host_memory import whole_batch

    source, there = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    note = f"{size >> 20} MiB, {torch.get_num_threads()} threads"

    def rate(name: str, target: Callable[[], torch.Tensor]) -> Rate:
        taken = [_copy_seconds(source, target()) for _ in range(1 + repeats)][1:]
        return rate_of(name, "B/s", each(2.0 * size, taken), note)

    new = rate("copy to new pages", lambda: whole_batch((size,), torch.uint8))
    return found(host_copy=rate("copy", lambda: there), host_fresh=new)


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin
