"""Passes boundaries of stages, and their gradients, between the ranks of a run.

Every rank runs the model's own forward. Where it calls a stage that another rank computes, this rank either receives the
output, if it computes the next stage, or goes on with zeros that nobody reads. What is received comes by micro-batch into
one tensor of the whole batch, and compute waits for each when it needs it. Receives are posted when the visit before begins.
What is sent is held until it has left.

A micro-batch passes through the stages one after the other. So where one arrives for a visit, what the visit before gave of it
has been received: all visits send out of one tensor of the whole batch, and none waits for its place in it. The sum in which
pieces of a head gather the hidden state's gradient is received where it was sent from: such a visit posts for itself alone.

All ranks do the same visits in one order, in which every message goes from a visit to the next one. So whatever the earliest
unfinished visit waits for has been sent or will be, and no owner map makes ranks wait for each other for ever
(`tests/planner/test_ring.py` replays many).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import UsageError
from ..planner.ring import NOTHING, SEEN, Boundary, Exchange, calls, exchanges, has_hidden, of_pieces
from ..planner.schedule import Schedule, Visit
from ..spec.model import ModelSpec
from ..spec.plan import MicroBatch
from .anatomy import Anatomy
from .calls import TRIED, Made, stage_calls
from .ranks import FIRST_TAG, Ranks

WaitUntil = Callable[[Callable[[], bool], str], None]
Lend = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(eq=False, slots=True)
class _Ticket:
    """Messages of one micro-batch under way. `left`: how many; `is_over` raises their error."""

    ranks: Ranks
    peer: int
    left: int
    error: Exception | None = None

    def is_over(self) -> bool:
        if self.error is not None:
            raise self.ranks.lost(self.peer, self.error)
        return not self.left


class _InOrder:
    """Waits for messages in order, on a thread: gloo tells that one is over only to who waits for it."""

    def __init__(self, name: str) -> None:
        self._messages: queue.SimpleQueue[tuple[Any, _Ticket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Any, ticket: _Ticket) -> None:
        self._messages.put((work, ticket))

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            work, ticket = message
            try:
                work.wait()
                ticket.left -= 1
            except RuntimeError as error:
                ticket.error = error
            del work, message  # they hold the message's memory

    def close(self) -> None:
        """Lets the thread end after what it waits for. It is not waited for: a peer may never answer."""
        self._messages.put(None)


def made_by(anatomy: Anatomy, model: ModelSpec) -> dict[int, Made]:
    """Finds what each call of a stage returns, by stage, on fake tensors."""
    made: list[Made] = []
    stage_calls(anatomy.model, anatomy.modules(), shape=(1, TRIED[1]), made=made)
    stages = [call[0] for call in calls(model) if model.stages[call[0]].kind != "head"]
    if len(stages) != len(made):
        what = f"{model.architecture} calls its {len(stages)} stages {len(made)} times"
        raise UsageError(what, hint="start one rank: the stages of this model cannot be shared out")
    return dict(zip(stages, made, strict=True))


@dataclass(eq=False, slots=True)
class Incoming:
    """What is received for one visit: tensors of the whole batch, and of each a message for each micro-batch, which lies at the
    beginning of its rows, closely, until it is spread over them."""

    boundary: Boundary
    wholes: tuple[torch.Tensor, ...]
    parts: tuple[MicroBatch, ...]
    tickets: list[_Ticket] = field(default_factory=list)
    spread: int = 0  # micro-batches in their places
    _numbers: dict[MicroBatch, int] = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = {part: number for number, part in enumerate(self.parts)}

    def count_up_to(self, part: MicroBatch) -> int:
        """Returns how many micro-batches there are up to this one; 0 if it is none of them."""
        return self._numbers.get(part, -1) + 1

    def place(self, number: int) -> None:
        """Spreads a micro-batch over its rows. Padding is zero."""
        part = self.parts[number]
        for whole in self.wholes:
            if part.width < whole.shape[1]:
                values = _closely(whole, part).clone()
                whole[part.rows].zero_()
                part.of(whole).copy_(values)


def _closely(whole: torch.Tensor, part: MicroBatch) -> torch.Tensor:
    """Returns where the values of a micro-batch arrive."""
    rows = whole[part.rows]
    shape = (part.end - part.first, part.width, *rows.shape[2:])
    return rows.reshape(-1)[: torch.Size(shape).numel()].view(shape)


class Link:
    """Passes boundaries for one executor. `lend`: gives memory for a whole batch; `made`: what the calls of stages return, by
    stage; `received_bytes`, `sent_bytes`: of boundaries so far."""

    def __init__(self, ranks: Ranks, model: ModelSpec, made: dict[int, Made], *, lend: Lend, wait_until: WaitUntil) -> None:
        self.ranks, self._model, self._made, self._lend, self._wait_until = ranks, model, made, lend, wait_until
        self.received_bytes = self.sent_bytes = 0
        order = [call[0] for call in calls(model)]
        self._last = next(before for before, after in pairwise(order) if model.stages[after].kind == "head")
        self._next = dict(pairwise(order))
        self._before = {after: before for before, after in pairwise(order)}
        self._direct: set[int] = set()  # stages whose output is the next one's input as it is
        self._traced: set[int] = set()  # stages whose inputs were followed to the stages that they come from
        self._exchanges: tuple[Exchange, ...] = ()
        self._visits: tuple[Visit, ...] = ()
        self._parts: tuple[MicroBatch, ...] = ()  # of the sweep
        self._shape = (0, 0)  # its rows and tokens
        self._cursor = -1
        self._incoming: dict[int, Incoming] = {}  # by the visit that takes it
        self._by_memory: dict[int, Incoming] = {}  # of the visit under way and the next, by address
        self._outgoing: torch.Tensor | None = None  # the whole batch that visits send out of
        self._leaving: dict[int, _Ticket] = {}  # what was sent last of each micro-batch, by its number
        self._sent = 0  # micro-batches of what the visit under way gives
        self._receiver, self._sender = _InOrder("fuyou-receiving"), _InOrder("fuyou-sending")

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()

    # ---- a schedule ----------------------------------------------------------------------------------------------

    def follow(self, schedule: Schedule) -> None:
        """Begins a schedule anew."""
        self._visits, self._exchanges = schedule.visits, exchanges(self._model, schedule)
        self._cursor = -1
        self._incoming.clear()
        self._by_memory.clear()

    def pause(self) -> None:
        """Lets visits pass, until the next schedule begins, between which nothing crosses."""
        self._exchanges = ()

    def begin_sweep(self, parts: tuple[MicroBatch, ...], width: int) -> None:
        """Begins a sweep over these micro-batches, of rows of `width` tokens."""
        if parts != self._parts:
            self.settle()
        self._parts, self._shape = parts, (parts[-1].end, width)

    def enter(self, visit: Visit) -> None:
        """Begins a visit, and posts what the next one takes."""
        self._incoming.pop(self._cursor, None)
        self._cursor, self._sent = visit.index, 0
        current = self._incoming.get(self._cursor)
        self._by_memory.clear()
        if current is not None:
            self._expect(current)
        takes = self._of(ahead := self._cursor + 1).takes
        sums = takes is not None and takes.backward and of_pieces(self._model, takes)
        if takes is not None and not sums and self._visits[ahead].sweep == visit.sweep:
            self._receive(ahead)

    def _of(self, index: int) -> Exchange:
        return self._exchanges[index] if 0 <= index < len(self._exchanges) else NOTHING

    # ---- receiving -----------------------------------------------------------------------------------------------

    def awaited(self, stage: int, *, backward: bool) -> torch.Tensor | None:
        """Returns the whole batch that the next visit takes, whose micro-batches may still be on their way (`arrived`); None if
        the next visit takes no output of `stage`, or no gradient of it."""
        takes = self._of(self._cursor + 1).takes
        if takes is None or (takes.stage, takes.backward) != (stage, backward):
            return None
        (whole,) = self._expect(self._receive(self._cursor + 1)).wholes
        if not backward and stage not in self._direct:
            self.all_arrived(whole)
        return whole.detach()  # autograd gives what a call returns a graph

    def awaited_by_piece(self, sums: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns what the next visit, of a piece of the head, takes from the rank of another one, for the whole batch: the
        hidden state if it is not here yet, and what was seen of each token (rows, tokens, `SEEN`); in backward that, and the
        `sums` themselves, into which their values come. Nothing if it takes nothing from there."""
        takes = self._of(self._cursor + 1).takes
        if takes is None or not of_pieces(self._model, takes):
            return ()
        return self._expect(self._receive(self._cursor + 1, sums)).wholes

    def _expect(self, incoming: Incoming) -> Incoming:
        self._by_memory.update((whole.data_ptr(), incoming) for whole in incoming.wholes)
        return incoming

    def _receive(self, index: int, sums: torch.Tensor | None = None) -> Incoming:
        if index in self._incoming:
            return self._incoming[index]
        boundary = self._exchanges[index].takes
        assert boundary is not None
        self._incoming[index] = incoming = Incoming(boundary, self._room(boundary, sums), self._parts)
        for number, part in enumerate(self._parts):
            if sums is not None:
                self.wait_left(number)
            ticket = _Ticket(self.ranks, boundary.peer, len(incoming.wholes))
            incoming.tickets.append(ticket)
            for target in (_closely(whole, part) for whole in incoming.wholes):
                try:
                    work = dist.irecv(target, group=self.ranks.group, group_src=boundary.peer, tag=_tag(boundary))
                except RuntimeError as error:
                    raise self.ranks.lost(boundary.peer, error) from error
                self._receiver.put(work, ticket)
                self.received_bytes += target.nbytes
        return incoming

    def _room(self, boundary: Boundary, sums: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Returns memory for what is received, for the whole batch."""
        of_head = of_pieces(self._model, boundary)
        seen = [torch.empty((*self._shape, SEEN), dtype=torch.float32)] if of_head else []
        if sums is not None:
            return *seen, sums
        if of_head and not has_hidden(self._model, boundary):
            return tuple(seen)
        made = self._made[self._last if of_head else boundary.stage]
        return self._lend((*self._shape, made.size), made.dtype), *seen

    def awaits(self, whole: torch.Tensor) -> bool:
        """Tells whether the whole batch comes from another rank."""
        return bool(self._by_memory) and whole.data_ptr() in self._by_memory

    def arrived(self, whole: torch.Tensor, part: MicroBatch) -> None:
        """Waits until a micro-batch of the whole batch is there, if it comes from another rank."""
        incoming = self._by_memory.get(whole.data_ptr())
        if incoming is not None:
            self._wait(incoming, incoming.count_up_to(part))

    def all_arrived(self, whole: torch.Tensor) -> None:
        incoming = self._by_memory.get(whole.data_ptr())
        if incoming is not None:
            self._wait(incoming, len(incoming.parts))

    def _wait(self, incoming: Incoming, count: int) -> None:
        for number in range(incoming.spread, count):
            self._wait_until(incoming.tickets[number].is_over, f"boundary of rank {incoming.boundary.peer}")
            incoming.place(number)
            incoming.spread = number + 1

    # ---- sending -------------------------------------------------------------------------------------------------

    def gives(self) -> Giving | None:
        """Returns what sends the micro-batches of what the visit under way gives; None if it gives nothing, or if the model
        computes something before it is another rank's."""
        boundary = self._of(self._cursor).gives
        if boundary is None:
            return None
        if boundary.backward and boundary.stage not in self._direct and not of_pieces(self._model, boundary):
            return None
        return Giving(self, boundary)

    def outgoing(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the whole batch that visits send out of. A micro-batch has left it after `wait_left`."""
        if self._outgoing is None or (tuple(self._outgoing.shape), self._outgoing.dtype) != (shape, dtype):
            self.settle()
            self._outgoing = self._lend(shape, dtype)
        return self._outgoing

    def send_out_of(self, whole: torch.Tensor) -> None:
        """Has visits from this one on send out of `whole`, which nobody else reads once it is sent."""
        self._outgoing = whole

    def wait_left(self, number: int) -> None:
        """Waits until what was sent last of a micro-batch has left."""
        ticket = self._leaving.pop(number, None)
        if ticket is not None:
            self._wait_until(ticket.is_over, f"boundary to rank {ticket.peer}")

    def give_whole(self, stage: int, whole: torch.Tensor, *, backward: bool) -> bool:
        """Sends what the visit under way gives of `stage`, unless its micro-batches were sent one by one. Returns whether it
        gives that."""
        boundary = self._of(self._cursor).gives
        if boundary is None or (boundary.stage, boundary.backward) != (stage, backward):
            return False
        for part in self._parts[self._sent :]:
            self.send(boundary, part.of(whole))
        return True

    def send(self, boundary: Boundary, *parts: torch.Tensor) -> None:
        """Sends the next micro-batch of what the visit under way gives."""
        self.wait_left(self._sent)
        ticket = _Ticket(self.ranks, boundary.peer, len(parts))
        for part in (part.detach().contiguous() for part in parts):
            try:
                work = dist.isend(part, group=self.ranks.group, group_dst=boundary.peer, tag=_tag(boundary))
            except RuntimeError as error:
                raise self.ranks.lost(boundary.peer, error) from error
            self._sender.put(work, ticket)
            self.sent_bytes += part.nbytes
        self._leaving[self._sent] = ticket
        self._sent += 1

    def settle(self) -> None:
        """Waits until everything sent has left, and gives its memory up."""
        for number in sorted(self._leaving):
            self.wait_left(number)
        self._outgoing = None

    # ---- stages of other ranks -----------------------------------------------------------------------------------

    def follows_here(self, stage: int) -> bool:
        """Tells whether this rank computes what the model calls after `stage`."""
        return stage in self._next and self._model.owners[self._next[stage]] == self.ranks.rank

    def zeros(self, stage: int, like: torch.Tensor) -> torch.Tensor:
        """Returns what stands for a stage's output, or its gradient: nobody reads it. `like`: rows and tokens come first."""
        made = self._made[stage]
        return torch.zeros((), dtype=made.dtype, device=like.device).expand(*like.shape[:2], made.size)

    def zeros_before(self, stage: int, like: torch.Tensor) -> torch.Tensor | None:
        """Returns what stands for the gradient of a stage's input; None for ids."""
        before = self._before.get(stage)
        is_first = before is None or self._model.stages[stage].kind == "embedding"
        return None if is_first or before is None else self.zeros(before, like)

    def note_sources(self, stage: int, sources: Sequence[int], *, direct: bool) -> None:
        """Notes the stages of whose outputs the model makes the input of a stage. `direct`: it is one's output as it is. Raises
        UsageError if another rank has what it needs."""
        before, owners = self._before.get(stage), self._model.owners
        if before is None or stage in self._traced:
            return
        self._traced.add(stage)
        for source in sources:
            if source != before and len(set(owners[source : stage + 1])) > 1:
                one, other = self._model.stages[source].name, self._model.stages[stage].name
                raise UsageError(
                    f"{self._model.architecture} uses the output of {one} again for {other}, which another rank may compute",
                    hint="start one rank: the stages of this model cannot be shared out",
                )
        if direct:
            self._direct.add(before)

    def knows_sources(self, stage: int) -> bool:
        return stage in self._traced


class Giving:
    """Sends what one visit gives, micro-batch by micro-batch, out of one tensor of the whole batch."""

    def __init__(self, link: Link, boundary: Boundary) -> None:
        self._link, self._boundary = link, boundary
        self._placed = 0  # micro-batches that were given their place

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns that tensor. `wait_for_place` comes before each of its micro-batches is written."""
        return self._link.outgoing(shape, dtype)

    def wait_for_place(self) -> None:
        self._link.wait_left(self._placed)
        self._placed += 1

    def send_out_of(self, whole: torch.Tensor) -> None:
        self._link.send_out_of(whole)

    @property
    def has_hidden(self) -> bool:
        """Tells whether a head's piece gives the hidden state, too."""
        return has_hidden(self._link._model, self._boundary)

    def __call__(self, *parts: torch.Tensor) -> None:
        self._link.send(self._boundary, *parts)


def _tag(boundary: Boundary) -> int:
    """Returns the tag of a boundary's micro-batches. gloo keeps messages of one tag in order (`tests/engine/test_ranks.py`)."""
    return FIRST_TAG + 2 * boundary.stage + boundary.backward
