"""The residency ledger: which stage's weights are where, of which generation, and what is on its way.

One record per stage. Weights of a stage carry the number of the step whose update they contain; a visit gets exactly
the generation it asks for or waits for it, and nothing else waits. Only the training thread uses the ledger: it looks
for finished requests whenever it waits and between micro-batches (`advance`), which never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn

from ..core.errors import NumericsError
from ..planner.schedule import Visit
from ..spec.model import ITEM_SIZE, ModelSpec
from ..spec.plan import Plan, Span
from ..swap.daemon import Result, SwapDaemon, Update
from .updates import Scalars, build_update

FETCH_PRIORITY = 0  # before any update: compute waits for it
UPDATE_PRIORITY = 1 << 16  # plus the stage's place in the next forward
_FIRST_POLL_SECONDS, _POLL_SECONDS = 50e-6, 0.002  # a wait looks around often at first, then less often


@dataclass(slots=True)
class Record:
    """One stage. At most one of `fetch` and `update` is under way."""

    stage: int
    generation: int = 0  # of the weights, once `update` has finished
    zero_moments: bool = True  # momentum and variance were never written
    zero_remainder: bool = True
    span: Span | None = None  # where the weights are in the arena
    slotted: bool = False  # span is a slot, not a home
    fetch: int | None = None
    update: int | None = None
    due: Scalars | None = None  # a deferred update to run before the next visit's compute
    held: int = 0  # visits, prefetches and downloads that need the span
    kept: bool = False  # the schedule keeps the span for the stage's next visit
    gradient_slot: Span | None = None  # freed when the update has finished
    gradient_write: int | None = None  # gradients on their way to rest on the ssd
    gradient_read: int | None = None  # and back, to be summed on
    gradients: Literal["summed", "resting", "resumed"] = "summed"  # at home since `rest_gradients`; wanted back since


class Residency:
    """Fetches, updates and releases weights as the schedule asks. `stalls` sums what compute waited for, by cause."""

    def __init__(self, *, model: ModelSpec, plan: Plan, daemon: SwapDaemon, tick: Callable[[], None]) -> None:
        self.model, self.plan, self.daemon, self._tick = model, plan, daemon, tick
        self.item = ITEM_SIZE[model.compute_dtype]
        self.records = [Record(stage=stage.index) for stage in model.stages]
        self.free_weights = [list(slots.weight_slots) for slots in plan.slot_classes]
        self.free_gradients = [list(slots.gradient_slots) for slots in plan.slot_classes]
        self.stalls: dict[str, float] = {}
        for record, stage in zip(self.records, plan.stages, strict=True):
            if stage.weights_ram is not None:
                record.span = stage.weights_ram

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait_until(self, done: Callable[[], bool], cause: str) -> None:
        """Returns when `done()`; meanwhile keeps the ledger moving. The time is a stall of `cause`."""
        self.advance()
        if done():
            return
        begin = time.perf_counter()
        pause = _FIRST_POLL_SECONDS
        while not done():
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)
            self._tick()
        self.stalls[cause] = self.stalls.get(cause, 0.0) + time.perf_counter() - begin

    def advance(self) -> None:
        """Notices what has finished and starts what has become possible. Never waits."""
        for record in self.records:
            if record.gradient_write is not None and self.daemon.poll(record.gradient_write) is not None:
                record.gradient_write = None
                self._free_gradient_slot(record)
            if record.gradient_read is not None and self.daemon.poll(record.gradient_read) is not None:
                record.gradient_read = None
            if record.fetch is not None and self.daemon.poll(record.fetch) is not None:
                record.fetch = None
                self._free_if_idle(record)  # who asked for it may have let go meanwhile
            if record.update is not None:
                result = self.daemon.poll(record.update)
                if result is not None:
                    self._finish_update(record, result)
            if record.due is not None and self._may_update(record):
                self._submit_due(record)

    # ---- weights -------------------------------------------------------------------------------------------------

    def try_prefetch(self, visit: Visit) -> bool:
        """Starts what `visit` needs, if a slot is free now. False: nothing was started, try later."""
        if visit.owner is None or self.model.stages[visit.owner].params == 0:
            return True
        record = self.records[visit.owner]
        if record.span is None and not self._take_slot(record):
            return False
        record.held += 1
        record.kept = False
        return True

    def take_slot(self, visit: Visit) -> None:
        """The visit has a span for its weights, and what is missing there is on its way."""
        if visit.owner is not None:
            kind = self.model.stages[visit.owner].kind
            self.wait_until(lambda: self.try_prefetch(visit), f"a slot for the weights of the {kind}")

    def acquire(self, visit: Visit) -> Span | None:
        """The span holding the weights this visit computes with, of the right generation."""
        if visit.owner is None or self.model.stages[visit.owner].params == 0:
            return None
        record, kind = self.records[visit.owner], self.model.stages[visit.owner].kind
        self.wait_until(lambda: record.fetch is None, f"weights of the {kind}")
        self.wait_until(lambda: self.is_current(record.stage), f"update of the {kind}")
        return record.span

    def is_current(self, stage: int) -> bool:
        """Whether no update of the stage is due or under way."""
        record = self.records[stage]
        return record.due is None and record.update is None

    def release(self, visit: Visit) -> None:
        """The visit is over. A kept span stays for the next visit's prefetch."""
        if visit.owner is None or self.model.stages[visit.owner].params == 0:
            return
        record = self.records[visit.owner]
        record.kept = visit.keep
        self.let_go(record)

    def let_go(self, record: Record) -> None:
        """One need of the span less."""
        record.held -= 1
        self._free_if_idle(record)

    def _take_slot(self, record: Record) -> bool:
        plan = self.plan.stages[record.stage]
        free = self.free_weights[plan.slot_class]
        if not free:
            return False
        record.span = free.pop()
        record.slotted = True
        extent = plan.weights_extents[record.generation % 2]
        record.fetch = self.daemon.read(
            record.span.offset, extent.offset, extent.size, priority=FETCH_PRIORITY, label=record.stage
        )
        return True

    def _free_if_idle(self, record: Record) -> None:
        needed = record.held or record.kept or record.update is not None or record.fetch is not None
        if record.slotted and not needed:
            assert record.span is not None
            self.free_weights[self.plan.stages[record.stage].slot_class].append(record.span)
            record.span, record.slotted = None, False

    # ---- gradients -----------------------------------------------------------------------------------------------

    def acquire_gradients(self, stage: int) -> Span:
        """Where the gradients of `stage` are summed: their home in RAM, or a slot."""
        record, plan = self.records[stage], self.plan.stages[stage]
        record.gradients = "summed"
        if plan.gradients_ram is not None:
            return plan.gradients_ram
        if record.gradient_slot is None:
            free = self.free_gradients[plan.slot_class]
            self.wait_until(lambda: bool(free), "a slot for gradients")
            record.gradient_slot = free.pop()
        return record.gradient_slot

    def rest_gradients(self, stage: int) -> None:
        """Gradients go to their home: until a deferred update, or until their sum is resumed."""
        record, plan = self.records[stage], self.plan.stages[stage]
        record.gradients = "resting"
        if plan.gradients_extent is None or record.gradient_slot is None:
            return
        record.gradient_write = self.daemon.write(
            record.gradient_slot.offset,
            plan.gradients_extent.offset,
            plan.gradients_extent.size,
            priority=FETCH_PRIORITY + 1,
            label=stage,
        )

    def try_resume_gradients(self, stage: int) -> bool:
        """Starts bringing gradients that rest back to where they are summed. False: they do not rest yet, or no slot is
        free; try later."""
        record, plan = self.records[stage], self.plan.stages[stage]
        if record.gradients == "resumed":
            return True
        if record.gradients == "summed" or record.gradient_write is not None:
            return False
        if plan.gradients_ram is None:
            free = self.free_gradients[plan.slot_class]
            if not free:
                return False
            assert plan.gradients_extent is not None
            record.gradient_slot = free.pop()
            record.gradient_read = self.daemon.read(
                record.gradient_slot.offset,
                plan.gradients_extent.offset,
                plan.gradients_extent.size,
                priority=FETCH_PRIORITY,
                label=stage,
            )
        record.gradients = "resumed"
        return True

    def resume_gradients(self, stage: int) -> Span:
        """Where gradients that rested are again, to be summed on. They are wanted back already."""
        record, plan = self.records[stage], self.plan.stages[stage]
        assert record.gradients == "resumed"
        self.wait_until(lambda: record.gradient_read is None, f"gradients of the {self.model.stages[stage].kind}")
        span = plan.gradients_ram if plan.gradients_ram is not None else record.gradient_slot
        assert span is not None
        return span

    def _free_gradient_slot(self, record: Record) -> None:
        if record.gradient_slot is not None:
            self.free_gradients[self.plan.stages[record.stage].slot_class].append(record.gradient_slot)
            record.gradient_slot = None

    # ---- updates -------------------------------------------------------------------------------------------------

    def update_now(self, stage: int, scalars: Scalars) -> None:
        """The stage's gradients are complete and its weights are in RAM; AdamW starts in the daemon."""
        record = self.records[stage]
        record.due = scalars
        self._submit_due(record)

    def update_later(self, scalars: Scalars) -> None:
        """Every stage whose update is deferred gets it before its first visit of the next step (or when drained)."""
        for record, stage in zip(self.records, self.model.stages, strict=True):
            if stage.params and self.plan.stages[stage.index].deferred:
                record.due = scalars

    def _may_update(self, record: Record) -> bool:
        return (
            record.held > 0
            and record.span is not None
            and record.fetch is None
            and record.update is None
            and record.gradient_write is None
        )

    def _submit_due(self, record: Record) -> None:
        assert record.due is not None and record.span is not None
        request, segments = build_update(
            stage=self.model.stages[record.stage],
            plan=self.plan.stages[record.stage],
            model=self.model,
            accumulate_dtype=self.plan.numerics.accumulate_dtype,
            generation=record.generation,
            zero_moments=record.zero_moments,
            zero_remainder=record.zero_remainder,
            weights=record.span,
            gradients=record.gradient_slot,
            scalars=record.due,
            priority=UPDATE_PRIORITY + record.stage,
        )
        record.update = self.daemon.update(Update(**request, segments=segments))
        record.due = None

    def _finish_update(self, record: Record, result: Result) -> None:
        record.update = None
        if result.nonfinite:
            self._refuse_weights(record, result)
        record.generation += 1
        record.zero_moments = False
        record.zero_remainder = False
        self._free_gradient_slot(record)
        self._free_if_idle(record)

    def _refuse_weights(self, record: Record, result: Result) -> NoReturn:
        """Names where it began: backward reaches the last stages first, whatever order their updates finish in."""
        found = {record.stage: result.nonfinite}
        for other in self.records:
            if other.update is not None:
                found[other.stage] = self.daemon.wait(other.update).nonfinite
                other.update = None
        stage = max(stage for stage, count in found.items() if count)
        name = self.model.stages[stage].name
        raise NumericsError(
            f"step {record.generation + 1}: {found[stage]} weights of {name} are not finite after the update",
            hint="lower optimizer.lr, or set train.clip_grad_norm, which sees gradients before anything is updated",
            changed=True,
        )

    def let_go_of_all(self) -> None:
        """A step was given up: nobody needs a span or its gradients. Updates due or under way go on."""
        self.wait_until(
            lambda: all(
                record.fetch is None and record.gradient_write is None and record.gradient_read is None
                for record in self.records
            ),
            "transfers of a step given up",
        )
        for record in self.records:
            record.held, record.kept = 0, False
            if record.update is None:
                self._free_gradient_slot(record)
            self._free_if_idle(record)

    def drain(self) -> None:
        """Every update that is due or under way has finished; every slot is free again."""
        for record in self.records:
            record.kept = False
            self._free_if_idle(record)
        for record in self.records:
            if record.due is None:
                continue
            if record.span is None:
                self.wait_until(partial(self._take_slot, record), "a slot for the weights")
            record.held += 1
            self.wait_until(partial(self.is_current, record.stage), "updates at the end")
            self.let_go(record)
        self.wait_until(
            lambda: all(
                record.update is None and record.fetch is None and record.gradient_write is None for record in self.records
            ),
            "updates at the end",
        )
