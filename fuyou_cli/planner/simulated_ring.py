"""Simulates the steps of several ranks that train one model together.

Every rank has a machine and a clock of its own. Visits run in the order that all ranks share, so whatever a visit waits for was
sent by one that has run. What crosses does so as in `engine/link`: a rank takes a visit's micro-batches one by one, and posts
for them when the visit before has its weights, for sums of a head's pieces when all that it sent has left; it sends a
micro-batch when what it sent of it before has left; a message moves once both sides are ready for it. A head and a norm in one
visit each wait as they do there. Once in a step all ranks meet.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..spec.hardware import HardwareProfile, Network
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .ring import NOTHING, OTHER_RANKS, Boundary, Exchange, bytes_per_token, exchanges, of_pieces
from .schedule import Schedule, Visit, plan_schedule
from .simulate import STEPS, Before, SimulatedRun, Timeline, begun

_MOST_PARTS = 16  # in which a boundary crosses, if it has more micro-batches
_MEETING = 1e-3  # seconds in which a rank's Python tells and learns what a step found, beside the messages


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """A rank's view of the model, its part of a machine, and its plan."""

    model: ModelSpec
    hardware: HardwareProfile
    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class RingTimeline:
    """Describes one steady-state step of all ranks. `sent`: bytes of boundaries that each rank sends; `link_seconds`: in which
    the busiest direction of any box's link carries them."""

    step_seconds: float
    ranks: tuple[Timeline, ...]
    sent: tuple[int, ...]
    link_seconds: float


def simulate_ring(ranks: Sequence[RankPlan], network: Network, *, steps: int = STEPS) -> RingTimeline:
    """Returns the last of `steps` steps, without commits that are more than a step apart."""
    wires = _Wires(network)
    rings = [_Rank(number, one, wires) for number, one in enumerate(ranks)]
    wires.ranks = rings
    for _ in range(1, steps):
        _step(rings)
    before, begin, busy = [Before(one.run) for one in rings], rings[0].met, dict(wires.busy)
    sent = [one.sent for one in rings]
    forward = _step(rings)
    timeline = RingTimeline(
        step_seconds=rings[0].met - begin,
        ranks=tuple(was.timeline(one.run, seconds) for was, one, seconds in zip(before, rings, forward, strict=True)),
        sent=tuple(one.sent - was for one, was in zip(rings, sent, strict=True)),
        link_seconds=max(
            (seconds - busy.get(port, 0.0) for port, seconds in wires.busy.items() if port[0] == "out"), default=0.0
        ),
    )
    for one in rings:
        one.run.let_go()
    return timeline


def _step(rings: Sequence[_Rank]) -> list[float]:
    """Runs one step of all ranks. Returns the seconds of forward of each."""
    for one in rings:
        one.begin_step()
    in_order = heapq.merge(*([(_order(visit), number) for visit in one.visits] for number, one in enumerate(rings)))
    measured = False
    for order, number in in_order:
        if order[1] and not measured:  # the norm is known before the second backward
            measured = True
            _meet(rings)
        rings[number].visit()
    for one in rings:
        one.run.settle()
    if not measured:
        _meet(rings)
    for one in rings:
        one.end_step()
    return [one.forward for one in rings]


def _order(visit: Visit) -> tuple[int, bool, int, int]:
    """Returns what all ranks' visits are ordered by."""
    phase = ("forward", "logits", "head", "backward").index(visit.phase)
    return visit.sweep, visit.again, phase, visit.stage if phase < 2 else -visit.stage


def _meet(rings: Sequence[_Rank]) -> None:
    """Lets all ranks wait for the last one."""
    wires = rings[0].wires
    for one in rings:
        one.run.settle()
    met = max(one.run.machine.now for one in rings) + _MEETING + 2 * wires.network.latency
    for one in rings:
        one.run.wait_until_time(met, OTHER_RANKS)
        one.met = met


class _Wires:
    """Carries messages. Each box has a port out and one in; between ranks of one box there is a wire for each pair. Messages
    take turns at a port."""

    def __init__(self, network: Network) -> None:
        self.network, self.ranks = network, list[_Rank]()
        self.busy: dict[tuple[str, int, int], float] = {}  # seconds by port
        self._free: dict[tuple[str, int, int], float] = {}  # when it is

    def carry(self, sender: int, receiver: int, size: float, at: float) -> float:
        """Returns when a message has arrived that both sides are ready for at some time."""
        network, (one, other) = self.network, (self.network.box(rank) for rank in (sender, receiver))
        ports = (("within", sender, receiver),) if one == other else (("out", one, 0), ("in", other, 0))
        rate, latency = network.way(sender, receiver)
        begin = max(at + latency, *(self._free.get(port, 0.0) for port in ports))
        for port in ports:
            self._free[port] = begin + size / rate
            self.busy[port] = self.busy.get(port, 0.0) + size / rate
        return begin + size / rate + latency


@dataclass(slots=True)
class _Rank:
    """One rank: the link of its run (`simulate.LinkOfVisits`)."""

    number: int
    planned: RankPlan
    wires: _Wires
    sent: int = 0  # bytes
    met: float = 0.0  # when all ranks last met
    forward: float = 0.0  # seconds of the step's forward visits
    run: SimulatedRun = field(init=False)
    visits: tuple[Visit, ...] = field(init=False)
    _exchanges: tuple[Exchange, ...] = field(init=False)
    _exchange: Exchange = NOTHING  # of the visit under way
    _visit: Visit | None = None
    _parts: int = 1
    _posted: dict[int, float] = field(default_factory=dict)  # by visit
    _arrivals: dict[int, list[float]] = field(default_factory=dict)  # by visit
    # By part: to whom it was sent last, and when it is there.
    _leaving: dict[int, tuple[int, float]] = field(default_factory=dict)
    _steps: int = 0

    def __post_init__(self) -> None:
        one = self.planned
        schedule: Schedule = plan_schedule(one.model, one.plan)
        self.run = begun(one.model, one.hardware, one.plan, schedule)
        self.run.link, self.visits = self, schedule.visits
        self._exchanges = exchanges(one.model, schedule)
        self._parts = min(_MOST_PARTS, self.run.costs.micro_batches)

    def begin_step(self) -> None:
        self._steps += 1
        self.run.generation = self._steps
        self.run.lookahead.begin_step(last=False)
        self._posted.clear()
        self._arrivals.clear()
        self.forward = 0.0

    def visit(self) -> None:
        begin = self.run.machine.now
        visit = self.run.visit()
        self._visit = None
        if visit.phase == "forward":
            self.forward += self.run.machine.now - begin
        gives = self._exchange.gives
        if gives is not None and self._leaves_whole(visit, gives):
            for _ in range(self._parts):
                self._send(visit, gives)

    def end_step(self) -> None:
        for part in list(self._leaving):
            self._wait_left(part)
        self.run.residency.update_later(True)

    # ---- a visit (`simulate.LinkOfVisits`) -----------------------------------------------------------------------------------

    def turn(self, visit: Visit) -> None:
        takes = self._exchanges[visit.index].takes
        if takes is None:
            return
        if self._are_sums(visit.index):
            for part in list(self._leaving):
                self._wait_left(part)
        elif visit.phase in ("logits", "head") and not of_pieces(self.planned.model, takes):  # computed from all rows at once
            self._wait(takes, self._arrivals[visit.index][-1])

    def enter(self, visit: Visit) -> int:
        self._visit, self._exchange = visit, self._exchanges[visit.index]
        ahead = visit.index + 1
        if ahead < len(self.visits) and self.visits[ahead].sweep == visit.sweep and not self._are_sums(ahead):
            self._posted[ahead] = self.run.machine.now
        return self._parts if self._exchange != NOTHING else 0

    def before(self, part: int) -> None:
        takes = self._exchange.takes
        if takes is None or self._visit is None:
            return
        # A separate device is given a micro-batch when the next one's upload has begun.
        part = part if self.run.device is None else min(part + 1, self._parts - 1)
        self._wait(takes, self._arrivals[self._visit.index][part])

    def after(self, part: int) -> None:
        gives = self._exchange.gives
        if gives is not None and self._visit is not None and not self._leaves_whole(self._visit, gives):
            self._send(self._visit, gives)

    def _leaves_whole(self, visit: Visit, gives: Boundary) -> bool:
        """Tells whether a visit gives what its last part has completed: a head the gradient of another stage's output."""
        return visit.phase == "head" and not of_pieces(self.planned.model, gives)

    def _are_sums(self, visit: int) -> bool:
        """Tells whether a visit takes what it sends on from the same memory."""
        takes = self._exchanges[visit].takes
        return takes is not None and takes.backward and of_pieces(self.planned.model, takes)

    def _wait(self, takes: Boundary, time: float) -> None:
        self.run.wait_until_time(time, f"boundary of rank {takes.peer}")

    # ---- sending -------------------------------------------------------------------------------------------------------

    def _send(self, visit: Visit, gives: Boundary) -> None:
        """Sends the next part of what a visit gives. All that the receiver does before has run; it is ready once it has posted
        the visit that takes this."""
        peer = self.wires.ranks[gives.peer]
        takes = peer.run.lookahead.cursor + 1
        expected = peer._exchanges[takes].takes
        assert expected is not None and expected.peer == self.number, (visit, gives, expected)
        arrivals = peer._arrivals.setdefault(takes, [])
        self._wait_left(len(arrivals))
        model, boundary = self.planned.model, self.run.costs.boundary
        size = boundary * bytes_per_token(model, gives) / model.boundary_bytes_per_token / self._parts
        at = max(self.run.machine.now + self._down(size), peer.posted(takes))
        arrives = self.wires.carry(self.number, gives.peer, size, at)
        self._leaving[len(arrivals)] = gives.peer, arrives
        arrivals.append(arrives)
        self.sent += int(size)

    def _down(self, size: float) -> float:
        """Returns the seconds in which a part comes down from a separate device."""
        rate = self.run.costs.hardware.d2h
        return size / rate if self.run.device is not None and rate else 0.0

    def posted(self, visit: int) -> float:
        """Returns when what a visit takes was posted: when it is asked for, where the visit before is of another sweep."""
        return self._posted.get(visit, self.run.machine.now)

    def _wait_left(self, part: int) -> None:
        if part in self._leaving:
            peer, arrives = self._leaving.pop(part)
            self.run.wait_until_time(arrives, f"boundary to rank {peer}")
