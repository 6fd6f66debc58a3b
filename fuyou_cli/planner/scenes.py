"""Describes the state in which a simulated visit begins, in terms that come again, and puts the ledgers into such a state.

A stage is named by its place among those described, which are in their order in the model. One in sight is also counted from
the visit's own; where the others are does not matter yet. Generations are counted from the step's, tickets are the places of
their jobs, and slots are only counted. What is left of each job is kept to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec.plan import Span
from .device import There
from .imagined import Imagined
from .ledgers import IN_RAM_PRIORITY, UPDATE_PRIORITY, KeptBoundary, update_priority
from .records import ON_DEVICE, Record
from .schedule import Visit

_DONE = -1  # instead of the place of a job that is done
_NO_STAGE = -1  # of a copy that nothing needs any more
_NOWHERE, _SLOT, _HOME = range(3)  # where weights or a boundary are

StageState = tuple[Any, ...]  # of one stage: its class, its record, its boundary, its weights on the device


@dataclass(frozen=True, slots=True)
class Scene:
    """Describes the state in which a visit begins. A job is named by its place in `jobs`, a stage by its place in `stages`."""

    stages: tuple[tuple[int | None, StageState], ...]  # each in sight with its distance from the visit's stage
    jobs: tuple[tuple[Any, ...], ...]  # (parts, share left, stage, priority)
    downloads: tuple[tuple[int, int, bool], ...]  # of gradients: (job, stage, whether the sum then rests)
    sums_up: tuple[tuple[int, int], ...]  # of gradients: (stage, job)
    streamed: tuple[int, ...]  # stages on the device, in the order of their last use
    started: tuple[int, ...]  # visits that were prefetched for
    free: tuple[int, ...]  # slots, by class


class Scenery:
    """Looks at the ledgers of one simulation, and sets them up. `number` gives equal things equal numbers."""

    def __init__(self, run: Imagined, number: Callable[[Hashable], int]) -> None:
        self._run, self._ledger, self._boundaries, self._machine = run, run.residency, run.boundaries, run.machine
        self._count = len(run.lookahead.visits)
        self._resumed = {visit.stage if visit.owner is None else visit.owner for visit in run.lookahead.visits if visit.resume}
        self._classes = [number(self._stage_class(stage)) for stage in range(len(run.model.stages))]

    # ---- what does not change --------------------------------------------------------------------------------------

    def _stage_class(self, stage: int) -> Hashable:
        """Returns all that a simulation asks of a stage, and of its plan."""
        spec, plan, costs = self._run.model.stages[stage], self._run.plan.stages[stage], self._run.costs
        spans = (plan.weights_ram, plan.trained_ram, plan.gradients_ram, plan.gradients_extent, plan.boundary_extent)
        return (
            spec.kind, spec.expert_range and (spec.expert_range[0] == 0, spec.is_last_range), spec.params > 0,
            spec.trained, spec.weight_bytes, spec.trained_weight_bytes, spec.state_bytes,
            plan.weights, plan.states, plan.boundary, plan.slot_class, plan.deferred, bool(plan.kept),
            *(None if span is None else span.size for span in (*spans, plan.boundary_ram)),
            costs.update_seconds(plan), costs.device_update_seconds(plan),
            tuple(extent.size for _, extent in plan.fetched(0)), plan.looked_up,
        )  # fmt: skip

    def visit_class(self, visit: Visit) -> Hashable:
        """Returns all that a simulation asks of a visit beside its stages."""
        run = self._run
        return (
            self._classes[visit.stage], None if visit.owner is None else self._classes[visit.owner],
            visit.phase, visit.keep, visit.stash, visit.take, visit.sum_gradients, visit.rest, visit.resume, visit.sweep > 0,
            visit.measures,
            run.compute_seconds(visit), run.crossing(visit),
        )  # fmt: skip

    # ---- looking ---------------------------------------------------------------------------------------------------

    def look(self, index: int, base: int, stages: Sequence[int], in_sight: Collection[int]) -> Scene:
        """Describes these stages, and all that is under way, when the visit of this index begins, whose stage is `base`."""
        run, jobs = self._run, self._machine.jobs
        places = {job.ticket: place for place, job in enumerate(jobs)}
        name = {stage: place for place, stage in enumerate(stages)}
        return Scene(
            stages=tuple([(stage - base if stage in in_sight else None, self.state(stage, places)) for stage in stages]),
            jobs=tuple([(job.parts, job.left, name.get(job.stage), _kind(job.order[0])) for job in jobs]),
            downloads=tuple([(places.get(ticket, _DONE), name[stage], rests) for ticket, stage, rests in run.after]),
            sums_up=tuple([(name[stage], places.get(ticket, _DONE)) for stage, ticket in run.sums_up.items()]),
            streamed=() if run.device is None else tuple([name[stage] for stage in run.device.streamed]),
            started=tuple(sorted([(place - index) % self._count for place in run.lookahead.started])),
            free=tuple(map(len, (*self._ledger.free_weights, *self._ledger.free_gradients, self._boundaries.free))),
        )

    def state(self, stage: int, places: Mapping[int, int]) -> StageState:
        """Describes one stage. `places`: of jobs, by ticket."""
        record, kept = self._ledger.records[stage], self._boundaries.kept.get(stage)

        def job(ticket: int | None) -> int | None:
            return None if ticket is None else places.get(ticket, _DONE)

        of_record = (
            record.generation - self._run.generation if self._run.model.stages[stage].trained else 0,
            _NOWHERE if record.span is None else _SLOT if record.slotted else _HOME,
            tuple(map(job, record.fetches)), job(record.update), record.due is not None, record.held, record.kept,
            record.gradient_slot is not None, job(record.gradient_write), job(record.gradient_read),
            record.gradients if stage in self._resumed else "summed", stage in self._ledger.moving,
        )  # fmt: skip
        of_boundary = None
        if kept is not None:
            moves = stage in self._boundaries.moving
            of_boundary = (self._where(stage, kept), kept.sealed, job(kept.write), job(kept.read), moves)
        return self._classes[stage], of_record, of_boundary, self._there(record, job)

    def _where(self, stage: int, kept: KeptBoundary) -> int:
        return _NOWHERE if kept.span is None else _SLOT if self._run.plan.stages[stage].boundary_ram is None else _HOME

    def _there(self, record: Record, job: Callable[[int | None], int | None]) -> tuple[int, int | None] | None:
        """Describes the weights on the device: their generation beside the record's, and their copy. Old ones with a home there
        are as good as none."""
        device = self._run.device
        there = None if device is None else device.there(record.stage)
        if device is None or there is None:
            return None
        age, copy = there.generation - record.generation, job(there.ticket)
        return None if age and copy == _DONE and record.stage in device.resting else (age, copy)

    def is_at_rest(self, stage: int) -> bool:
        """Tells whether nothing of the stage is under way or takes a slot."""
        record, kept, device = self._ledger.records[stage], self._boundaries.kept.get(stage), self._run.device
        if record.held or record.slotted or record.gradient_slot is not None or stage in self._ledger.moving:
            return False
        if kept is not None and (stage in self._boundaries.moving or self._where(stage, kept) == _SLOT):
            return False
        if stage in self._run.sums_up:
            return False
        if device is None or stage in device.streamed:
            return device is None
        there = device.resting.get(stage)
        return there is None or self._machine.is_done(there.ticket)

    # ---- setting up ------------------------------------------------------------------------------------------------

    def set_up(self, scene: Scene, index: int, stages: Sequence[int]) -> None:
        """Makes the ledgers stand as the scene of these stages says when the visit of this index begins."""
        run, ledger, boundaries = self._run, self._ledger, self._boundaries
        jobs = [
            (parts, left, _NO_STAGE, kind) if name is None else (parts, left, stages[name], self._priority(kind, stages[name]))
            for parts, left, name, kind in scene.jobs
        ]
        tickets = self._machine.begin_with(jobs)

        def ticket(job: int) -> int:
            return self._machine.ended() if job == _DONE else tickets[job]

        slots = run.plan.slot_classes
        ledger.free_weights[:] = [list(some.weight_slots) for some in slots]
        ledger.free_gradients[:] = [list(some.gradient_slots) for some in slots]
        boundaries.free[:] = run.plan.boundary_slots
        if run.device is not None:  # in their order; what is there comes with the stages
            run.device.streamed.clear()
            run.device.streamed.update((stages[name], There(0, _DONE)) for name in scene.streamed)
        for stage, (_, state) in zip(stages, scene.stages, strict=True):
            self._put(stage, state, ticket)
        run.after[:] = [(ticket(job), stages[name], rests) for job, name, rests in scene.downloads]
        run.sums_up = {stages[name]: ticket(job) for name, job in scene.sums_up}
        run.lookahead.stand_before(index, {(index + place) % self._count for place in scene.started})
        free = (*ledger.free_weights, *ledger.free_gradients, boundaries.free)
        assert tuple(map(len, free)) == scene.free

    def _priority(self, kind: int, stage: int) -> int:
        """Returns the priority of a job of this stage."""
        return kind if kind < UPDATE_PRIORITY else update_priority(self._run.plan.stages[stage])

    def lay_to_rest(self, stage: int, state: StageState) -> None:
        """Puts one stage into a state at rest."""
        if self._run.device is not None:
            self._run.device.streamed.pop(stage, None)
        self._put(stage, state, lambda job: self._machine.ended())

    def _put(self, stage: int, state: StageState, ticket_of: Callable[[int], int]) -> None:
        _, of_record, of_boundary, of_device = state
        run, plan, record = self._run, self._run.plan.stages[stage], self._ledger.records[stage]

        def ticket(job: int | None) -> int | None:
            return None if job is None else ticket_of(job)

        generation, where, fetches, update, due, held, kept, has_sum, write, read, gradients, moves = of_record
        if run.model.stages[stage].trained:
            record.generation = run.generation + generation
        record.span = self._weights_in(stage, where)
        record.slotted, record.held, record.kept, record.due = where == _SLOT, held, kept, True if due else None
        record.fetches, record.update = [ticket_of(job) for job in fetches], ticket(update)
        record.gradient_slot = self._ledger.free_gradients[plan.slot_class].pop() if has_sum else None
        record.gradient_write, record.gradient_read, record.gradients = ticket(write), ticket(read), gradients
        (self._ledger.moving.add if moves else self._ledger.moving.discard)(stage)
        self._put_boundary(stage, of_boundary, ticket)
        if run.device is not None:
            run.device.put(
                stage, None if of_device is None else There(record.generation + of_device[0], ticket_of(of_device[1]))
            )

    def _weights_in(self, stage: int, where: int) -> Span | None:
        plan = self._run.plan.stages[stage]
        if where == _SLOT:
            return self._ledger.free_weights[plan.slot_class].pop()
        return None if where == _NOWHERE else ON_DEVICE if plan.updated_there else plan.weights_ram

    def _put_boundary(self, stage: int, state: Any, ticket: Callable[[int | None], int | None]) -> None:
        ledger = self._boundaries
        ledger.moving.discard(stage)
        ledger.kept.pop(stage, None)
        if state is None:
            return
        where, sealed, write, read, moves = state
        span = None if where == _NOWHERE else self._run.plan.stages[stage].boundary_ram if where == _HOME else ledger.free.pop()
        ledger.stashed(stage, span, self._run.kept_bytes(stage))
        kept = ledger.kept[stage]
        kept.sealed, kept.write, kept.read = sealed, ticket(write), ticket(read)
        if moves:
            ledger.moving.add(stage)


def _kind(priority: int) -> int:
    """Returns the priority without the stage, which that of some updates contains."""
    return min(priority, IN_RAM_PRIORITY if priority >= IN_RAM_PRIORITY else UPDATE_PRIORITY)
