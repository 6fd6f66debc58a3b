"""Keeps the ledgers of a step: where each stage's weights, gradients and boundary are, and what is on its way. Walks through
the visits by them, and prefetches for the next ones (`Lookahead`).

A ledger moves no bytes and reads no clock. Its runner does: the executor with the swap daemon, or the simulator with rates. So
both follow the same rules. One thread uses them, and looks for finished requests whenever it waits and between micro-batches
(`advance`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from ..core.units import align_up
from ..spec.model import ModelSpec
from ..spec.plan import Plan, Span, StagePlan
from .boundary_layout import RECORD_ALIGN
from .schedule import Schedule, Visit

FETCH_PRIORITY = 0  # before any update: compute waits for it
UPDATE_PRIORITY = 1 << 16  # plus what `update_priority` says
IN_RAM_PRIORITY = 1 << 17  # of updates in backward without traffic to the store but that of commits
_BOUNDARY_WRITE_PRIORITY = 1  # after weights that compute waits for, before updates: the write frees a slot

WaitUntil = Callable[[Callable[[], bool], str], None]

FOREVER = 1 << 62  # a turn that is never reached: nothing waits for it


# Stands for the span of weights that rest only on the device; the ledger tracks these as well.
ON_DEVICE = Span(offset=0, size=0)


class Transfers(Protocol):
    """Moves bytes between arena and store, both named by offsets. Every submit returns a ticket."""

    def read(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int: ...

    def write(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int: ...

    def poll(self, ticket: int) -> object | None:
        """Returns the request's result, once; None while it is under way."""
        ...


class Runner(Protocol):
    """Runs the step that the ledger keeps track of: for real (the executor) or on a virtual machine (the simulator)."""

    def update(self, record: Record) -> int:
        """Starts AdamW for the record's stage with what is `due`. Returns its ticket."""
        ...

    def end_update(self, record: Record, result: Any) -> None:
        """Takes note that the update has ended. Raises if the step cannot go on."""
        ...

    def join(self, record: Record) -> None:
        """Copies trained weights from their own home in RAM into the record's slot, in front of the frozen ones."""
        ...

    def complete_generation(self, generation: int) -> None:
        """Takes note that every stage has reached this generation, which will be committed. No stage goes on before it is
        durable."""
        ...

    def durable(self, stage: int) -> int:
        """Returns the turn at which the newest manifest names the stage. Raises if committing failed."""
        ...

    def wait(self, condition: Callable[[], bool], cause: str) -> None:
        """Returns when `condition()` is true; meanwhile moves everything that can move. The time that compute waits is a stall
        of `cause`."""
        ...


@dataclass(slots=True)
class Record:
    """Holds what is known of one stage. Fetches and an update are never under way together, unless trained weights have
    a home of their own."""

    stage: int
    generation: int = 0  # generation of the weights, once `update` has finished
    turn: int = 0  # which place of the stage's pair this generation rests in
    sums: Any = None  # checksums of what was written there; the runner's type
    zero_moments: bool = True  # momentum and variance were never written
    zero_remainder: bool = True
    span: Span | None = None  # where the weights are in the arena
    slotted: bool = False  # the span is a slot, not a home
    fetches: list[int] = field(default_factory=list)  # tickets, one for each bank
    update: int | None = None
    due: Any = None  # what a deferred update needs (the runner's type); it runs before the next visit computes
    held: int = 0  # visits, prefetches and downloads that need the span
    kept: bool = False  # the schedule keeps the span for the stage's next visit
    gradient_slot: Span | None = None  # freed when the update has finished
    gradient_write: int | None = None  # ticket of gradients being written to the ssd
    gradient_read: int | None = None  # ticket of gradients being read back, to continue their sum
    # "resting" after `rest_gradients`, "resumed" once their sum continues
    gradients: Literal["summed", "resting", "resumed"] = "summed"


@dataclass(slots=True)
class CommitLedger:
    """Knows which generations a run commits, and therefore which places of the store may be overwritten: `base`, where the run
    begins (0, or what it resumes from), and each `every`-th (None: no other until the run ends).

    A committed generation is named by a manifest on stable storage. The update to it moves its stage to the other place of its
    pair (`spec.plan.ExtentPair`), as soon as its last committed generation is durable. Generations between commits are updated
    in place. What was committed last is never touched."""

    every: int | None
    base: int = 0

    def is_named(self, generation: int) -> bool:
        """Whether a manifest names this generation before the run continues from it."""
        return generation == self.base or self.is_written(generation)

    def is_written(self, generation: int) -> bool:
        """Whether the update to this generation also writes what rests in RAM."""
        return self.every is not None and generation % self.every == 0

    def next_turn(self, turn: int, generation: int) -> int:
        """Returns the turn of the generation after this one."""
        return turn + 1 if self.is_named(generation) else turn


class Residency:
    """Fetches, updates and releases weights as the schedule asks. `stalls` sums what compute waited for, by cause.

    The weights of a stage carry the number of the step whose update they contain. A visit gets exactly the generation it asks
    for, or waits for it; nothing else waits."""

    def __init__(self, *, model: ModelSpec, plan: Plan, transfers: Transfers, runner: Runner) -> None:
        self.model, self.plan, self.transfers, self._runner = model, plan, transfers, runner
        self.records = [Record(stage=stage.index) for stage in model.stages]
        self.free_weights = [list(slots.weight_slots) for slots in plan.slot_classes]
        self.free_gradients = [list(slots.gradient_slots) for slots in plan.slot_classes]
        self.commits = CommitLedger(every=plan.commit_every)
        self.stalls: dict[str, float] = {}
        self._owners = sum(stage.trained > 0 for stage in model.stages)
        self._reached: dict[int, int] = {}  # generation -> stages that have come to it, while some have not
        self.moving: set[int] = set()  # stages with something under way or due; only these are looked at
        for record, stage in zip(self.records, plan.stages, strict=True):
            record.span = ON_DEVICE if stage.updated_on_device else stage.weights_ram

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], cause: str) -> None:
        """Returns when `condition()` is true; meanwhile everything keeps moving. The time is a stall of `cause`."""
        self.advance()
        if not condition():
            self._runner.wait(condition, cause)

    def add_stall(self, cause: str, seconds: float) -> None:
        """Notes a stall that this ledger did not see itself."""
        if seconds > 0:
            self.stalls[cause] = self.stalls.get(cause, 0.0) + seconds

    def advance(self) -> None:
        """Notices what has finished and starts what has become possible. Never waits."""
        if not self.moving:
            return
        for stage in sorted(self.moving):
            record = self.records[stage]
            self._advance(record)
            if record.update is None and not _has_work(record) and not (record.due is not None and self._has_home(record)):
                self.moving.discard(stage)

    def _advance(self, record: Record) -> None:
        if record.gradient_write is not None and self.transfers.poll(record.gradient_write) is not None:
            record.gradient_write = None
            self._free_gradient_slot(record)
        if record.gradient_read is not None and self.transfers.poll(record.gradient_read) is not None:
            record.gradient_read = None
        if record.fetches:
            record.fetches = [fetch for fetch in record.fetches if self.transfers.poll(fetch) is None]
            self._join(record)
            self._free_if_idle(record)  # the visit that asked for them may have let go meanwhile
        if record.update is not None:
            result = self.transfers.poll(record.update)
            if result is not None:
                self._finish_update(record, result)
        if record.due is not None and self._may_update(record):
            self._submit_due(record)

    # ---- weights -------------------------------------------------------------------------------------------------

    def try_prefetch(self, visit: Visit) -> bool:
        """Starts what `visit` needs if a slot is free now. Returns False if nothing was started; the caller tries again
        later."""
        record = self._computed_with(visit)
        if record is None:
            return True
        if record.span is None and not self._take_slot(record):
            return False
        self.hold(record)
        record.kept = False  # from here on the holder keeps the span
        return True

    def _computed_with(self, visit: Visit) -> Record | None:
        """Returns the stage whose weights the visit needs, or None if it needs none."""
        return None if visit.owner is None or not self.model.stages[visit.owner].params else self.records[visit.owner]

    def needs_slot(self, visit: Visit) -> bool:
        """Whether the visit computes with weights that rest on the ssd."""
        record = self._computed_with(visit)
        return record is not None and self.plan.stages[record.stage].weights == "ssd"

    def in_slot(self, visit: Visit) -> bool:
        """Whether a slot holds, or is to hold, the weights of the visit's stage."""
        return visit.owner is not None and self.records[visit.owner].slotted

    def take_slot(self, visit: Visit) -> None:
        """Gives the visit a span for its weights. If they are missing, their transfer has started."""
        if visit.owner is not None:
            kind = self.model.stages[visit.owner].kind
            self.wait_until(lambda: self.try_prefetch(visit), f"a slot for the weights of the {kind}")

    def acquire(self, visit: Visit) -> Span | None:
        """Returns the span with the weights of the right generation for this visit."""
        record = self._computed_with(visit)
        if record is None:
            return None
        kind = self.model.stages[record.stage].kind
        self.wait_until(lambda: not record.fetches, f"weights of the {kind}")
        self.wait_until(lambda: self.is_current(record.stage), f"update of the {kind}")
        return record.span

    def is_current(self, stage: int) -> bool:
        """Whether no update of the stage is due or under way."""
        record = self.records[stage]
        return record.due is None and record.update is None

    def release(self, visit: Visit) -> None:
        """Ends the visit. A kept span stays for the next visit's prefetch."""
        record = self._computed_with(visit)
        if record is not None:
            record.kept = visit.keep
            self.let_go(record)

    def hold(self, record: Record) -> None:
        """Adds one holder of the span. An update that is due may start now."""
        record.held += 1
        self.moving.add(record.stage)

    def let_go(self, record: Record) -> None:
        """Removes one holder of the span."""
        record.held -= 1
        self._free_if_idle(record)

    def _take_slot(self, record: Record) -> bool:
        plan = self.plan.stages[record.stage]
        free = self.free_weights[plan.slot_class]
        if not free:
            return False
        record.span = free.pop()
        record.slotted = True
        self.moving.add(record.stage)
        for place, extent in plan.fetched(record.turn):
            to = record.span.offset + place
            size = plan.looked_up or extent.size
            fetch = self.transfers.read(to, extent.offset, size, priority=FETCH_PRIORITY, label=record.stage)
            record.fetches.append(fetch)
        return True

    def _join(self, record: Record) -> None:
        """Copies trained weights from their own home into the slot, once the frozen ones are there and no update is to come."""
        is_whole = record.slotted and not record.fetches and record.update is None and record.due is None
        if is_whole and self._has_home(record):
            self._runner.join(record)

    def _has_home(self, record: Record) -> bool:
        return self.plan.stages[record.stage].trained_ram is not None

    def _free_if_idle(self, record: Record) -> None:
        updating = record.update is not None and not self._has_home(record)
        # A fetch writes into the slot and an update reads it, whoever has let go: requests are never called back.
        needed = record.held or record.kept or updating or record.fetches
        if record.slotted and not needed:
            assert record.span is not None
            self.free_weights[self.plan.stages[record.stage].slot_class].append(record.span)
            record.span, record.slotted = None, False

    # ---- gradients -----------------------------------------------------------------------------------------------

    def acquire_gradients(self, stage: int) -> Span:
        """Returns where the gradients of `stage` are summed: their home in RAM, or a slot."""
        record, plan = self.records[stage], self.plan.stages[stage]
        record.gradients = "summed"
        if (home := _gradients_home(plan)) is not None:
            return home
        if record.gradient_slot is None:
            free = self.free_gradients[plan.slot_class]
            self.wait_until(lambda: bool(free), "a slot for gradients")
            record.gradient_slot = free.pop()
        return record.gradient_slot

    def rest_gradients(self, stage: int) -> None:
        """Sends gradients to their home, where they stay until a deferred update or until their sum is resumed."""
        record, plan = self.records[stage], self.plan.stages[stage]
        record.gradients = "resting"
        if plan.gradients_extent is None or record.gradient_slot is None:
            return
        self.moving.add(stage)
        # Behind fetches, which compute waits for, and before updates: the write frees a slot that backward waits for.
        slot, extent = record.gradient_slot, plan.gradients_extent
        record.gradient_write = self.transfers.write(
            slot.offset, extent.offset, extent.size, priority=FETCH_PRIORITY + 1, label=stage
        )

    def try_resume_gradients(self, stage: int) -> bool:
        """Starts reading resting gradients back, to continue their sum. Returns False if they do not rest yet, or if no slot is
        free."""
        record, plan = self.records[stage], self.plan.stages[stage]
        if record.gradients == "resumed":
            return True
        # Not while they are written: requests run beside each other, and a read might overtake the write.
        if record.gradients == "summed" or record.gradient_write is not None:
            return False
        if _gradients_home(plan) is None:
            free = self.free_gradients[plan.slot_class]
            if not free:
                return False
            extent = plan.gradients_extent
            assert extent is not None
            record.gradient_slot = slot = free.pop()
            self.moving.add(stage)
            record.gradient_read = self.transfers.read(
                slot.offset, extent.offset, extent.size, priority=FETCH_PRIORITY, label=stage
            )
        record.gradients = "resumed"
        return True

    def resume_gradients(self, stage: int) -> Span:
        """Returns the span of gradients that rested, to continue their sum, once they are there. `try_resume_gradients` has
        started reading them."""
        record, plan = self.records[stage], self.plan.stages[stage]
        assert record.gradients == "resumed"
        self.wait_until(lambda: record.gradient_read is None, f"gradients of the {self.model.stages[stage].kind}")
        span = _gradients_home(plan) or record.gradient_slot
        assert span is not None
        return span

    def drop_gradients(self, stage: int) -> None:
        """Gives up gradients that nothing needs but their squares."""
        self._free_gradient_slot(self.records[stage])

    def _free_gradient_slot(self, record: Record) -> None:
        if record.gradient_slot is not None:
            self.free_gradients[self.plan.stages[record.stage].slot_class].append(record.gradient_slot)
            record.gradient_slot = None

    # ---- updates -------------------------------------------------------------------------------------------------

    def update_now(self, stage: int, due: object) -> None:
        """Starts AdamW with complete gradients, once nothing that it overwrites is needed after a crash."""
        record = self.records[stage]
        if not self._may_follow(record):
            self.wait_until(lambda: self._may_follow(record), "commit of the step before")
        record.due = due
        self._submit_due(record)

    def update_later(self, due: object) -> None:
        """Defers the update of every such stage to its first visit in the next step, or to `drain`."""
        for record, stage in zip(self.records, self.model.stages, strict=True):
            if stage.trained and self.plan.stages[stage.index].deferred:
                record.due = due
                self.moving.add(record.stage)

    def _may_update(self, record: Record) -> bool:
        in_slot = record.held > 0 and record.span is not None and not record.fetches
        return (
            (in_slot or self._has_home(record))
            and record.update is None
            and record.gradient_write is None
            and self._may_follow(record)
        )

    def _may_follow(self, record: Record) -> bool:
        """Whether what the record's update overwrites is no longer needed."""
        return not self.commits.is_named(record.generation) or self._runner.durable(record.stage) >= record.turn

    def _submit_due(self, record: Record) -> None:
        self.moving.add(record.stage)
        record.update = self._runner.update(record)
        record.due = None

    def _finish_update(self, record: Record, result: object) -> None:
        record.update = None
        self._runner.end_update(record, result)
        record.turn = self.commits.next_turn(record.turn, record.generation)
        record.generation += 1
        record.zero_moments = record.zero_remainder = False
        self._reach(record.generation)
        self._join(record)
        self._free_gradient_slot(record)
        self._free_if_idle(record)

    def _reach(self, generation: int) -> None:
        """Notes that one more stage has reached this generation."""
        self._reached[generation] = self._reached.get(generation, 0) + 1
        if self._reached[generation] < self._owners:
            return
        del self._reached[generation]
        if self.commits.is_named(generation):
            self._runner.complete_generation(generation)

    def let_go_of_all(self) -> None:
        """Forgets a step that was given up: no visit needs a span or its gradients any more. Updates that are due or under way
        go on."""
        self.wait_until(
            lambda: all(
                not record.fetches and record.gradient_write is None and record.gradient_read is None for record in self.records
            ),
            "transfers of a step given up",
        )
        for record in self.records:
            record.held, record.kept = 0, False
            if record.update is None:
                self._free_gradient_slot(record)
            self._free_if_idle(record)

    def drain(self) -> None:
        """Waits until every update that is due or under way has finished and every slot is free again."""
        for record in self.records:
            record.kept = False
            self._free_if_idle(record)
        for record in self.records:
            if record.due is None:
                continue
            if record.span is None and not self._has_home(record):
                self.wait_until(partial(self._take_slot, record), "a slot for the weights")
            self.hold(record)
            self.wait_until(partial(self.is_current, record.stage), "updates at the end")
            self.let_go(record)
        self.wait_until(
            lambda: all(
                record.update is None and not record.fetches and record.gradient_write is None for record in self.records
            ),
            "updates at the end",
        )


def update_priority(plan: StagePlan) -> int:
    """Returns the priority of a stage's update. In backward, those with traffic to the store in every step come first: they are
    no faster than the drives, which leaves threads for the others. The other way round the drives would stand still. Deferred
    updates are always wanted soon. An update in backward that frees a slot for gradients goes in order of arrival: a newer one
    of an earlier stage before it would keep backward waiting for the slot."""
    hurries = plan.states == "ssd" or plan.writes_weights or plan.deferred
    frees_slot = not plan.deferred and _gradients_home(plan) is None
    return (UPDATE_PRIORITY if hurries else IN_RAM_PRIORITY) + (0 if frees_slot else plan.stage)


def _gradients_home(plan: StagePlan) -> Span | None:
    """Returns where a stage's gradients are summed if they have a home; None if they take a slot."""
    return ON_DEVICE if plan.updated_on_device else plan.gradients_ram


def _has_work(record: Record) -> bool:
    """Whether a transfer of the record is under way, or an update is due and something holds its span."""
    if record.fetches or record.update is not None or record.gradient_write is not None or record.gradient_read is not None:
        return True
    return record.due is not None and record.held > 0


# ---- boundaries ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class KeptBoundary:
    size: int
    span: Span | None  # None: on the ssd only, or on the device
    sealed: bool = False  # the boundary was complete
    write: int | None = None
    read: int | None = None


class BoundaryLedger:
    """Keeps track of boundaries: where each stage's input is between forward and backward, and what is being moved.

    Forward uses `room`, `place` and `seal`; backward uses `ready`; `drop` ends a stage's backward."""

    def __init__(self, *, plan: Plan, transfers: Transfers) -> None:
        self.plan, self.transfers = plan, transfers
        self.free = list(plan.boundary_slots)
        self.kept: dict[int, KeptBoundary] = {}
        self.moving: set[int] = set()

    def advance(self) -> None:
        """Notices finished transfers. A boundary that was written frees its slot. Never waits."""
        for stage in sorted(self.moving):
            kept = self.kept[stage]
            if kept.write is not None and self.transfers.poll(kept.write) is not None:
                kept.write = None
                assert kept.span is not None
                self.free.append(kept.span)
                kept.span = None
            if kept.read is not None and self.transfers.poll(kept.read) is not None:
                kept.read = None
            if kept.write is None and kept.read is None:
                self.moving.discard(stage)

    def room(self, stage: int, wait_until: WaitUntil) -> Span | None:
        """Returns where the boundary goes: to its home in RAM, or into a slot. None: it stays on the device."""
        span = self.plan.stages[stage].boundary_ram
        if span is None and self.plan.stages[stage].boundary == "ssd":
            wait_until(lambda: bool(self.free), "a slot for a boundary")
            span = self.free.pop()
        return span

    def place(self, stage: int, span: Span | None, size: int) -> None:
        """Notes that the boundary's `size` bytes belong in `span`. The bytes are there when `seal` is called."""
        self.kept[stage] = KeptBoundary(size=align_up(size, RECORD_ALIGN), span=span)

    def seal(self, stage: int) -> None:
        """Notes that the boundary is complete. Starts writing it if its home is on the ssd."""
        plan, kept = self.plan.stages[stage], self.kept[stage]
        kept.sealed = True
        if plan.boundary_extent is not None:
            self.moving.add(stage)
            kept.write = self.transfers.write(
                self.span_of(stage).offset,
                plan.boundary_extent.offset,
                kept.size,
                priority=_BOUNDARY_WRITE_PRIORITY,
                label=stage,
            )

    def try_prefetch(self, stage: int) -> bool:
        """Starts reading a boundary from the ssd. Returns False if no slot is free, or if the boundary is still being copied or
        written."""
        kept = self.kept[stage]
        if not kept.sealed or kept.write is not None:
            return False
        extent = self.plan.stages[stage].boundary_extent
        if kept.span is not None or extent is None:
            return True
        if not self.free:
            return False
        kept.span = self.free.pop()
        self.moving.add(stage)
        kept.read = self.transfers.read(kept.span.offset, extent.offset, kept.size, priority=FETCH_PRIORITY, label=stage)
        return True

    def ready(self, stage: int, wait_until: WaitUntil) -> None:
        """Waits until the boundary is in memory again. It stays there until it is dropped."""
        wait_until(lambda: self.try_prefetch(stage) and self.kept[stage].read is None, "a boundary")

    def span_of(self, stage: int) -> Span:
        """Returns the boundary's span in the arena. Valid between `place` and `seal`, and between `ready` and `drop`."""
        span = self.kept[stage].span
        assert span is not None
        return span

    def drop(self, stage: int) -> None:
        """Frees the boundary: nothing needs it any more."""
        kept = self.kept.pop(stage)
        if self.plan.stages[stage].boundary_ram is None and kept.span is not None:
            self.free.append(kept.span)

    def leave(self, stage: int) -> None:
        """Ends a backward that another follows. A boundary from the ssd gives up its slot, and is read again."""
        kept = self.kept[stage]
        if self.plan.stages[stage].boundary_extent is not None:
            assert kept.span is not None
            self.free.append(kept.span)
            kept.span = None

    def forget(self, wait_until: WaitUntil) -> None:
        """Drops every boundary, after waiting for all transfers."""
        wait_until(lambda: all(kept.write is None and kept.read is None for kept in self.kept.values()), "boundaries")
        for stage in list(self.kept):
            self.drop(stage)


# ---- lookahead -------------------------------------------------------------------------------------------------------
#
# Each visit takes its slots first. Then it starts what the next visits need, in order, as long as slots are free. So a later
# visit never holds a slot that an earlier one waits for. Once a visit has its own slots, prefetching goes on even while it
# waits for its data.

_BEYOND = 6  # visits beyond the lookahead that may be prefetched if slots are free. More made no simulated step faster.


class Lookahead:
    """Runs the current visit and prefetches for the `plan.lookahead` visits after it, also across the end of the step. `tick`
    moves everything that can move and calls `advance`."""

    def __init__(
        self, *, schedule: Schedule, residency: Residency, boundaries: BoundaryLedger, tick: Callable[[], None]
    ) -> None:
        self.visits, self._residency, self._boundaries, self._tick = schedule.visits, residency, boundaries, tick
        self._needs_slot = [residency.needs_slot(visit) for visit in schedule.visits]
        self._distance = residency.plan.lookahead
        self._reach = max(self._distance, min(self._distance + _BEYOND, len(schedule.visits) - 1))
        self.prefetched: set[int] = set()
        self._last_step = False
        self.cursor = -1
        self._beyond = 0  # the first visit beyond the lookahead that is still to be fetched for
        # What the visit under way has: slots for weights and boundary, a slot for gradients, weights on the device.
        self._settled = self._summing = self._uploaded = False

    def begin_step(self, *, last: bool) -> None:
        """Begins a step. `last`: no step follows, so nothing is prefetched for it."""
        self.cursor, self._last_step, self._beyond = -1, last, self._distance

    def enter(self, stash: Callable[[Visit], None]) -> Visit:
        """Returns the next visit once it has its slots and its weights are there. `stash` keeps its input for backward."""
        self.cursor += 1
        self._beyond = self.cursor + self._distance + 1
        visit = self.visits[self.cursor]
        summed = self._owner(visit) if visit.sum_gradients else None
        self._settled, self._summing, self._uploaded = False, summed is None, False
        self._take_slots(visit, stash)
        self._settled = True
        self._tick()
        # Only once the gradients of the last step were used: they may still lie where the new ones will be summed.
        if summed is not None and self._residency.is_current(summed):
            self._take_sum(visit, summed)
        self._residency.acquire(visit)
        if summed is not None and not self._summing:
            self._take_sum(visit, summed)
        return visit

    def on_device(self) -> None:
        """Notes that the visit's weights are where it computes. The next visit's weights may now be uploaded."""
        self._uploaded = True
        self._tick()

    def _take_slots(self, visit: Visit, stash: Callable[[Visit], None]) -> None:
        """Takes the slots for weights and boundary. Their contents are there or on the way."""
        if visit.index in self.prefetched:
            self.prefetched.remove(visit.index)
        else:
            self._residency.take_slot(visit)
        if visit.stash:
            stash(visit)
        if visit.take:
            self._residency.wait_until(lambda: self._boundaries.try_prefetch(visit.stage), "a slot for a boundary")

    def _take_sum(self, visit: Visit, owner: int) -> None:
        """Takes a place for the owner's gradient sum. A resumed sum is already being read."""
        if visit.resume:
            self._residency.wait_until(lambda: self._residency.try_resume_gradients(owner), "a slot for gradients")
        elif self._residency.model.stages[owner].trained:
            self._residency.acquire_gradients(owner)
        self._summing = True

    def advance(self, nearest: Callable[[Visit, bool], None]) -> None:
        """Starts what can be started. Once the weights of the very next visit are being read and the device is ready for them,
        calls `nearest` with that visit and whether it is in the next step."""
        if self._settled and self._start_near(nearest):
            self._fetch_beyond()

    def _start_near(self, nearest: Callable[[Visit, bool], None]) -> bool:
        """Starts what the visits within the lookahead need. Returns whether all of it has started."""
        resuming = self._summing  # so far; a visit that begins a new sum must not lose its slot to a later visit
        count = len(self.visits)
        for ahead in range(1, self._distance + 1):
            index = self.cursor + ahead
            next_step = index >= count
            if next_step:
                if self._last_step:
                    return False
                index -= count
                if index >= count:  # a rank may have fewer visits than it looks ahead
                    break
            visit = self.visits[index]
            if visit.sum_gradients:
                resuming = resuming and visit.resume and self._residency.try_resume_gradients(self._owner(visit))
            if visit.take and visit.stage in self._boundaries.kept and not self._boundaries.try_prefetch(visit.stage):
                return False
            if index in self.prefetched:
                if ahead == 1 and self._uploaded:  # this visit has its span on the device, so the next may take the other
                    nearest(visit, next_step)
                continue
            if not self._residency.try_prefetch(visit):
                return False
            self.prefetched.add(index)
        return True

    def _fetch_beyond(self) -> None:
        """Fetches weights for visits further ahead in the step, in order. Weights that a nearer visit still has in a slot are
        read again later unless the plan keeps them. So a step reads what the plan says, or less where an update still holds
        a slot whose weights are needed again."""
        end = min(self.cursor + self._reach + 1, len(self.visits))
        while self._beyond < end:
            index = self._beyond
            if index not in self.prefetched and self._needs_slot[index]:
                visit = self.visits[index]
                if (visit.fetch and self._residency.in_slot(visit)) or not self._residency.try_prefetch(visit):
                    return
                self.prefetched.add(index)
            self._beyond += 1

    def _owner(self, visit: Visit) -> int:
        """Returns the stage whose gradients the visit sums."""
        return visit.stage if visit.owner is None else visit.owner

    def pause(self) -> None:
        """Starts nothing more until the next visit."""
        self._settled = False

    def give_up(self) -> None:
        """Releases what was started and is no longer needed."""
        for index in sorted(self.prefetched):
            self._residency.release(self.visits[index])
        self.prefetched.clear()

    def forget(self) -> None:
        """Forgets a step that was given up. The caller frees everything it held."""
        self.prefetched.clear()
