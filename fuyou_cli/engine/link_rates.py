"""Measures what connects boxes, over the group that their ranks pass boundaries by: the slowest way between neighbours counts.

All ranks call it at once, so each link is as busy both ways as in a step. It takes about a second on a slow link.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..spec.hardware import MEASURED_NAME, Network
from .ranks import Ranks

_ROUNDS = 9  # of small messages
_PARTS = 8  # in which bytes are sent; the first one is not timed
_FIRST, _MOST = 64 << 10, 32 << 20  # bytes of a round, each twice those before
_LONG_ENOUGH = 0.3  # seconds of a round that tells a rate


def measured_network(ranks: Ranks, network: Network) -> Network:
    """Returns the network with the rate and the latency that were measured, the same on every rank. Boxes that are alone have
    no link. Raises PeerLost."""
    if network.boxes == 1:
        return network
    each, last = network.ranks_per_box, network.ranks_per_box - 1
    box, place = divmod(ranks.rank, each)
    to = (box + 1) % network.boxes * each if place == last else None
    source = (box - 1) % network.boxes * each + last if place == 0 else None
    latency = max(ranks.gather(_latency(ranks, to, source)))
    size, rate = _FIRST, 0.0
    while size <= _MOST:
        seconds = max(ranks.gather(_seconds(ranks, to, source, size // _PARTS)))
        rate, size = (size - size // _PARTS) / seconds, 2 * size
        if seconds >= _LONG_ENOUGH:
            break
    return replace(network, link=rate, latency=latency, link_name=MEASURED_NAME)


def _latency(ranks: Ranks, to: int | None, source: int | None) -> float:
    """Returns half the seconds of a small message: each takes one way to be asked for, and one to come (`Network.seconds`)."""
    seconds = []
    for _ in range(_ROUNDS):
        out = {} if to is None else {to: torch.zeros(1, dtype=torch.uint8)}
        into = {} if source is None else {source: torch.zeros(1, dtype=torch.uint8)}
        begin = time.perf_counter()
        ranks.exchange(out, into, tag=0)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]) / 2 if to is not None or source is not None else 0.0


def _seconds(ranks: Ranks, to: int | None, source: int | None, size: int) -> float:
    """Returns the seconds in which all parts of `size` bytes but the first have come."""
    data, began = torch.zeros(size, dtype=torch.uint8), time.perf_counter()
    parts = [torch.empty(size, dtype=torch.uint8) for _ in range(_PARTS if source is not None else 0)]
    try:
        coming: list[Any] = [dist.irecv(part, group=ranks.group, group_src=source, tag=0) for part in parts]
        going: list[Any] = [
            dist.isend(data, group=ranks.group, group_dst=to, tag=0) for _ in range(_PARTS if to is not None else 0)
        ]
        came = list[float]()
        for number, work in enumerate(coming):
            work.wait()
            came += [time.perf_counter()] if number in (0, _PARTS - 1) else []
        for work in going:
            work.wait()
    except RuntimeError as error:
        peer = source if source is not None else to
        assert peer is not None
        raise ranks.lost(peer, error) from error
    return _passed(began, *came) if coming else 0.0


def _passed(began: float, first: float, last: float) -> float:
    """Returns the seconds in which parts have come, by the times when this rank saw the first and the last one. A busy box may
    run it late: then it sees the first one when all are there, and half of the whole time counts."""
    return max(last - first, (last - began) / 2)
