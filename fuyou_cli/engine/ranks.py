"""Lets the processes of one run tell each other small things: what a step gathers, what rank 0 decides. And lets rank 0 ask
the others for bytes that they have, one piece after the other.

Values are sent as JSON, which keeps every float exactly, and which cannot run code. Boundaries of stages go by `link`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist

from ..core.errors import FuyouError, PeerLost, SwapError
from ..core.process import in_thread

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
        first, remainder = _packed(value)
        others = [rank for rank in range(self.size) if rank != self.rank]
        firsts = {rank: torch.empty(_FIRST, dtype=torch.uint8) for rank in others}
        self.exchange({rank: first for rank in others}, firsts, tag=0)
        remainders = {rank: _room_of_remainder(message) for rank, message in firsts.items()}
        self.exchange(
            {rank: remainder for rank in others if remainder.numel()},
            {rank: room for rank, room in remainders.items() if room.numel()},
            tag=1,
        )
        values = {rank: _unpacked(message, remainders[rank]) for rank, message in firsts.items()}
        return [value if rank == self.rank else values[rank] for rank in range(self.size)]

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

    # ---- one rank asks the others ---------------------------------------------------------------------------------

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Lets this rank ask the others inside, which are inside `answer`, and tells them how that ended."""
        yield
        for peer in range(self.size):
            if peer != self.rank:
                self._send(peer, None)

    def ask(self, peer: int, question: Any) -> memoryview:
        """Returns the bytes that a rank answers with. `question`: of JSON, not None. Raises PeerLost, or SwapError where the
        rank cannot answer."""
        self._send(peer, question)
        answer = self._receive(peer)
        if "failed" in answer:
            error = SwapError(f"rank {peer} on {self.hosts[peer]}: {answer['failed']}", hint=answer["hint"])
            error.exit_code = answer["code"]
            raise error
        data = torch.empty(answer["size"], dtype=torch.uint8)
        if data.numel():
            self.exchange({}, {peer: data}, tag=1)
        content = data.numpy().data
        if crc32(content) != answer["sum"]:
            raise SwapError(f"what rank {peer} on {self.hosts[peer]} has sent did not arrive as it was", hint="try again")
        return content

    def answer(self, give: Callable[[Any], Buffer], *, asker: int = 0) -> None:
        """Answers what a rank asks, by what `give` returns, until that has asked all. An error of `give` ends both. Raises
        PeerLost."""
        # in a thread: a signal must end a wait that may be long
        while (question := in_thread(lambda: self._receive(asker))) is not None:
            try:
                data = memoryview(give(question)).cast("B")
                data = memoryview(bytearray(data)) if data.readonly else data  # torch takes no other
            except FuyouError as error:
                self._send(asker, {"failed": error.message, "hint": error.hint, "code": error.exit_code})
                raise
            self._send(asker, {"size": len(data), "sum": crc32(data)})
            if data:
                self.exchange({asker: torch.frombuffer(data, dtype=torch.uint8)}, {}, tag=1)

    def _send(self, peer: int, value: Any) -> None:
        first, remainder = _packed(value)
        self.exchange({peer: first}, {}, tag=0)
        if remainder.numel():
            self.exchange({peer: remainder}, {}, tag=1)

    def _receive(self, peer: int) -> Any:
        first = torch.empty(_FIRST, dtype=torch.uint8)
        self.exchange({}, {peer: first}, tag=0)
        remainder = _room_of_remainder(first)
        if remainder.numel():
            self.exchange({}, {peer: remainder}, tag=1)
        return _unpacked(first, remainder)


# ---- values as messages ------------------------------------------------------------------------------------------------


def _packed(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first message, and the remainder, which is empty where the first has all."""
    data = json.dumps(value).encode()
    first = torch.zeros(_FIRST, dtype=torch.uint8)
    first[:_LENGTH] = torch.tensor([len(data)]).view(torch.uint8)
    first[_LENGTH : _LENGTH + len(data)] = _bytes(data[:_IN_FIRST])
    return first, _bytes(data[_IN_FIRST:])


def _size(first: torch.Tensor) -> int:
    return int(first[:_LENGTH].view(torch.int64))


def _room_of_remainder(first: torch.Tensor) -> torch.Tensor:
    return torch.empty(max(0, _size(first) - _IN_FIRST), dtype=torch.uint8)


def _unpacked(first: torch.Tensor, remainder: torch.Tensor) -> Any:
    begin = first[_LENGTH : _LENGTH + min(_size(first), _IN_FIRST)]
    return json.loads(b"".join(part.numpy().tobytes() for part in (begin, remainder)))


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
