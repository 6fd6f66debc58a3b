"""Lets the processes of one run tell each other small things: what a step gathers, what rank 0 decides.

Values are sent as JSON, which keeps every float exactly, and which cannot run code. Boundaries of stages go by `link`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import PeerLost

_FIRST = 4096  # bytes of the first message, with the length of the whole: most values fit
_LENGTH = 8  # bytes of that length
_IN_FIRST = _FIRST - _LENGTH
_TAGS = 2  # of the first message, and of the remainder
FIRST_TAG = 16  # of boundaries


class Ranks:
    """This process among those of a run. `group`: a gloo group of torch.distributed that all of them are in, and in which one
    thread of each gathers; None: the default one. `hosts`: by rank, for messages."""

    def __init__(self, group: dist.ProcessGroup | None = None, hosts: Sequence[str] | None = None) -> None:
        assert dist.is_initialized()
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.sent = 0  # bytes
        self.hosts: tuple[str, ...] = tuple(hosts or ("?",) * self.size)
        if hosts is None:
            self.hosts = tuple(self.gather(socket.gethostname()))

    def gather(self, value: Any) -> list[Any]:
        """Returns what every rank gave, by rank. `value`: of JSON. Raises PeerLost."""
        data = json.dumps(value).encode()
        first = torch.zeros(_FIRST, dtype=torch.uint8)
        first[:_LENGTH] = torch.tensor([len(data)]).view(torch.uint8)
        begin, remainder = data[:_IN_FIRST], data[_IN_FIRST:]
        first[_LENGTH : _LENGTH + len(begin)] = _bytes(begin)
        others = [rank for rank in range(self.size) if rank != self.rank]
        firsts = {rank: torch.empty(_FIRST, dtype=torch.uint8) for rank in others}
        self.exchange({rank: first for rank in others}, firsts, tag=0)
        sizes = {rank: int(message[:_LENGTH].view(torch.int64)) for rank, message in firsts.items()}
        remainders = {
            rank: torch.empty(size - _IN_FIRST, dtype=torch.uint8) for rank, size in sizes.items() if size > _IN_FIRST
        }
        self.exchange({rank: _bytes(remainder) for rank in others} if remainder else {}, remainders, tag=1)
        values = {self.rank: value}
        for rank, size in sizes.items():
            parts = [firsts[rank][_LENGTH : _LENGTH + min(size, _IN_FIRST)]]
            parts += [remainders[rank]] if rank in remainders else []
            values[rank] = json.loads(b"".join(part.numpy().tobytes() for part in parts))
        return [values[rank] for rank in range(self.size)]

    def share(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Fills a tensor in host memory with that of rank `root`, and returns it. Raises PeerLost."""
        try:
            dist.broadcast(tensor, group=self.group, group_src=root)
        except RuntimeError as error:
            raise self.lost(root if root != self.rank else (root + 1) % self.size, error) from error
        return tensor

    def lost(self, peer: int, error: Exception) -> PeerLost:
        """Returns the error for a rank that no longer answers."""
        return PeerLost(peer, self.hosts[peer], str(error))

    def exchange(self, out: dict[int, torch.Tensor], into: dict[int, torch.Tensor], *, tag: int) -> None:
        """Sends to each rank, and receives from each. Raises PeerLost."""
        assert tag < _TAGS
        works: list[tuple[int, Any]] = []
        messages: list[tuple[int, torch.Tensor, Callable[..., Any], str]]
        messages = [(peer, target, dist.irecv, "group_src") for peer, target in into.items()]
        messages += [(peer, source, dist.isend, "group_dst") for peer, source in out.items()]
        for peer, data, begin, keyword in messages:
            try:
                works.append((peer, begin(data, group=self.group, tag=tag, **{keyword: peer})))
            except RuntimeError as error:
                raise self.lost(peer, error) from error
        self.sent += sum(source.nbytes for source in out.values())
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.lost(peer, error) from error


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
