"""Sums gradients of adapters over ranks that all compute the whole model, each for its lanes of micro-batches.

Frozen weights, which each rank reads from files or memory of its own, never cross. Gradients do: each rank adds up a slice of
every rank's sum in the binary tree of lanes, and gives it to all. So gradients, their norm and the updates have the same bits
on every rank, and for every number of ranks that divides the lanes. It goes on beside the backward of the stages below.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch

from .devices.base import Event
from .ranks import Ranks


class Reduction(Event):
    """Marks the moment at which a sum is that of all ranks."""

    def __init__(self, summed: Future[None]) -> None:
        self._summed = summed

    def synchronize(self) -> None:
        self._summed.result()

    def done(self) -> bool:
        return self._summed.done()


class Replicas:
    """This rank among those that compute the whole model. `ranks`: by which a step meets; `exchange`: by which gradients go, of
    a group of its own, as another thread sends and receives them."""

    def __init__(self, ranks: Ranks, exchange: Ranks) -> None:
        self.ranks, self._exchange = ranks, exchange
        # one thread: all ranks exchange the stages' sums in the order of backward
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fuyou-replicas")

    @property
    def sent(self) -> int:
        """Returns the bytes of gradients sent so far."""
        return self._exchange.sent

    def close(self) -> None:
        """Lets the thread end after what it waits for. It is not waited for: a peer may never answer."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def lanes(self, count: int) -> range:
        """Returns the lanes of so many that this rank computes: a subtree."""
        each = count // self.ranks.size
        return range(self.ranks.rank * each, (self.ranks.rank + 1) * each)

    def losses(self, own: list[float]) -> list[float]:
        """Returns the losses of the pieces of all ranks, in the order of lanes. Raises PeerLost."""
        return [loss for losses in self.ranks.gather(own) for loss in losses]

    def counts(self, own: list[list[Any]]) -> list[list[Any]]:
        """Returns how many tokens each expert got on all ranks (`Routing.raw_counts`)."""
        sums: dict[tuple[int, int], list[int]] = {}
        for stage, mixture, counts in (one for of_rank in self.ranks.gather(own) for one in of_rank):
            before = sums.get((stage, mixture), [0] * len(counts))
            sums[stage, mixture] = [a + b for a, b in zip(before, counts, strict=True)]
        return [[*place, counts] for place, counts in sums.items()]

    def begin(self, flat: torch.Tensor) -> Reduction:
        """Begins to add to a sum (1-D, in host memory) those of all ranks. Nothing else may use it until that is done."""
        return Reduction(self._thread.submit(self._sum, flat))

    def _sum(self, flat: torch.Tensor) -> None:
        ranks = self._exchange
        ends = [flat.numel() * rank // ranks.size for rank in range(ranks.size + 1)]
        slices = [flat[begin:end] for begin, end in pairwise(ends)]
        own = slices[ranks.rank]
        others = {rank: part for rank, part in enumerate(slices) if rank != ranks.rank and part.numel()}
        came = {rank: torch.empty_like(own) for rank in range(ranks.size) if rank != ranks.rank and own.numel()}
        ranks.exchange(others, came, tag=0)
        if own.numel():
            own.copy_(in_tree([came.get(rank, own) for rank in range(ranks.size)]))
        ranks.exchange(dict.fromkeys(came, own), others, tag=1)


def in_tree(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adds neighbours, then neighbours among what that gives, and so on. There are 1, 2, 4 ... of them."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
