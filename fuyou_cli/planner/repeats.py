"""Skips visits of a simulation that begin as an earlier one did. The result is the same, to the last bit.

What a visit does follows from the state in which it begins and from the visits in sight. Equal blocks bring the same states
again and again. A `Scene` (`scenes`) is such a state in terms that do not depend on where in the model the visit is. The first
visit that begins in a scene is simulated, and what it did is noted: how far the clock went each time, what compute waited for,
the bytes moved, and the scene after it. Later ones only repeat these sums, in the same order.

The ledgers stand still meanwhile. They are put in order before a visit that has to be simulated. A stage is followed from when
it comes into sight until it is at rest: nothing of it is under way, and it holds no slot. Which generations a commit writes
matters only to a visit in which an update begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate

from .imagined import Imagined
from .scenes import Scene, Scenery, StageState
from .schedule import Visit
from .simulated_machine import Resource

_LEAST = 3  # times as many visits as are in sight, at least; else hardly anything comes again


@dataclass(frozen=True, slots=True)
class _Passage:
    """Holds what one visit does. Stages are named by their places in the scene before it."""

    ahead: tuple[float, ...]  # seconds of each advance of the clock
    used: tuple[tuple[Resource, tuple[float, ...]], ...]  # by resource, what is added to the seconds that it is in use
    waits: tuple[tuple[str, int, int], ...]  # why compute waits, from which advance of the clock to which
    read: int
    written: int
    after: int  # number of the scene after it
    names: tuple[tuple[bool, int], ...]  # stages of that scene: (in sight, distance from the next visit's stage or name before)
    left: tuple[tuple[int, StageState], ...]  # stages that come to rest


@dataclass(slots=True)
class Known:
    """Holds what simulations in one setting have found out."""

    numbers: dict[Hashable, int] = field(default_factory=dict)  # of classes of stages, of visits, and of what is in sight
    scenes: dict[Scene, int] = field(default_factory=dict)
    listed: list[Scene] = field(default_factory=list)
    passages: dict[Hashable, _Passage] = field(default_factory=dict)

    def number(self, what: Hashable) -> int:
        return self.numbers.setdefault(what, len(self.numbers))

    def scene(self, scene: Scene) -> int:
        found = self.scenes.setdefault(scene, len(self.listed))
        if found == len(self.listed):
            self.listed.append(scene)
        return found


class Repeats:
    """Runs the visits of a simulation, where only its sums count."""

    def __init__(self, run: Imagined, visits: tuple[Visit, ...]) -> None:
        self._run, self._visits = run, visits
        self._known: Known = run.costs.repeats.setdefault(run.setting, Known())
        self._scenery = Scenery(run, self._known.number)
        self._distance, self._reach = run.plan.lookahead, run.lookahead.reach
        self._used = [{visit.stage} if visit.owner is None else {visit.stage, visit.owner} for visit in visits]
        self._sight, self._near = self._in_sight()
        # By visit, the stages that come into sight when the one after it begins.
        self._coming = [sorted(after - near) for near, after in zip(self._near, self._near[1:] + self._near[:1], strict=True)]
        self._stages: list[int] = []  # the stages followed, in order
        self._resting: dict[int, StageState] = {}  # of stages not followed, the states at rest that are known
        self._left: set[int] = set()  # stages that have come to rest since the ledgers stand where they do
        self._scene: int | None = None  # number of the scene in which the next visit begins; None: nobody has looked
        self._stand = 0  # the visit at whose beginning the ledgers stand
        self._written: Hashable = None

    @classmethod
    def of(cls, run: Imagined, visits: tuple[Visit, ...]) -> Repeats | None:
        """Returns None for a step of too few visits."""
        return cls(run, visits) if len(visits) >= _LEAST * (run.lookahead.reach + 2) else None

    def begin_step(self) -> None:
        """Follows all stages again: anything may have happened to them between two steps."""
        self._scene, self._stand, self._stages = None, 0, list(range(len(self._run.model.stages)))
        self._resting.clear()
        is_written, generation = self._run.residency.commits.is_written, self._run.generation
        self._written = tuple(is_written(generation + more) for more in (-1, 0, 1))  # updates to these may run in the step

    def visit(self, index: int) -> Visit:
        """Runs the next visit, which has this index."""
        if self._scene is None:
            self._follow(index)
            self._scene = self._look(index)
        key, passages = (self._scene, self._sight[index], self._arriving(index)), self._known.passages
        passage = passages.get(key) or passages.get((*key, self._written))
        if passage is None:
            self.catch_up(index)
            updates, before = self._run.updates, self._stages
            passage = self._noted(index)
            passages[key if self._run.updates == updates else (*key, self._written)] = passage
            self._stand = index + 1
        else:
            self._repeat(passage)
            before, base = self._stages, self._base(index + 1)
            self._stages = [base + place if near else before[place] for near, place in passage.names]
            self._left.update([before[name] for name, _ in passage.left])
        for name, state in passage.left:
            self._resting[before[name]] = state
        self._scene = passage.after
        return self._visits[index]

    def catch_up(self, index: int) -> None:
        """Makes the ledgers stand where the visit of this index begins; after the last one, where the step ends."""
        if self._stand != index:
            assert self._scene is not None
            for stage in self._left.difference(self._stages):
                self._scenery.lay_to_rest(stage, self._resting[stage])
            self._left.clear()
            self._scenery.set_up(self._known.listed[self._scene], index, self._stages)
            self._stand = index

    def _base(self, index: int) -> int:
        return self._visits[index % len(self._visits)].stage

    def _look(self, index: int) -> int:
        return self._known.scene(self._scenery.look(index, self._base(index), self._stages, self._stages_near(index)))

    # ---- which stages count ----------------------------------------------------------------------------------------

    def _in_sight(self) -> tuple[list[int], list[set[int]]]:
        """Returns, by visit, a number for all that is in sight of it and of the next one, and the stages in its own sight.

        Beyond the lookahead only those visits count that may fetch weights, and none of the next step."""
        visits, count, number = self._visits, len(self._visits), self._known.number
        seen_as = [(number(self._scenery.visit_class(visit)), visit.stage, visit.owner) for visit in visits]
        fetching = [visit.index for visit in visits if self._run.residency.needs_slot(visit)]
        sights, near = [], []
        for index in range(count):
            far = index + self._distance + 1  # the first beyond the lookahead
            fetches = fetching[bisect_left(fetching, far) : bisect_left(fetching, index + self._reach + 2)]
            seen: list[object] = [place - index for place in fetches]
            base = visits[index].stage  # from which stages and owners are counted
            for place in (*range(index, far + 1), *fetches):
                kind, stage, owner = seen_as[place % count]
                seen.append((kind, stage - base, None if owner is None else owner - base, place >= count))
            sights.append(number(tuple(seen)))
            in_sight = (*range(index, far), *(place for place in fetches if place <= index + self._reach))
            near.append(set().union(*[self._used[place % count] for place in in_sight]))
        return sights, near

    def _follow(self, index: int) -> None:
        """Follows the stages in sight of a visit, and of those followed so far the ones that are not at rest."""
        busy = {stage for stage in self._stages if not self._scenery.is_at_rest(stage)}
        self._stages = sorted(busy | self._stages_near(index))

    def _arriving(self, index: int) -> tuple[int | StageState, ...]:
        """Returns the stages that come into sight when the visit after this one begins: their names, or states at rest."""
        found, stages, resting = list[int | StageState](), self._stages, self._resting
        for stage in self._coming[index]:
            place = bisect_left(stages, stage)
            if place < len(stages) and stages[place] == stage:
                found.append(place)
                continue
            if stage not in resting:
                resting[stage] = self._scenery.state(stage, {})
            found.append(resting[stage])
        return tuple(found)

    def _stages_near(self, index: int) -> set[int]:
        return self._near[index % len(self._near)]

    # ---- what a visit does -----------------------------------------------------------------------------------------

    def _repeat(self, passage: _Passage) -> None:
        run, machine = self._run, self._run.machine
        times = list(accumulate(passage.ahead, initial=machine.now))
        machine.now = times[-1]
        for name, used in passage.used:
            total = machine.in_use.get(name, 0.0)
            for seconds in used:
                total += seconds
            machine.in_use[name] = total
        for cause, first, last in passage.waits:
            run.residency.stalled(cause, times[last] - times[first])
        run.moved_in += passage.read
        run.moved_out += passage.written

    def _noted(self, index: int) -> _Passage:
        """Simulates the visit and notes what it does."""
        run, before = self._run, self._stages
        read, written = run.moved_in, run.moved_out
        run.machine.noted, run.waits = [], []
        run.visit()
        noted, run.machine.noted = run.machine.noted, None
        used: dict[Resource, list[float]] = {}
        for _, shares in noted:
            for name, seconds in shares:
                used.setdefault(name, []).append(seconds)
        self._follow(index + 1)
        names = {stage: name for name, stage in enumerate(before)}
        near, base = self._stages_near(index + 1), self._base(index + 1)
        left = sorted(set(before) - set(self._stages))
        return _Passage(
            ahead=tuple(ahead for ahead, _ in noted),
            used=tuple((name, tuple(seconds)) for name, seconds in used.items()),
            waits=tuple(run.waits),
            read=run.moved_in - read,
            written=run.moved_out - written,
            after=self._look(index + 1),
            names=tuple((True, stage - base) if stage in near else (False, names[stage]) for stage in self._stages),
            left=tuple((names[stage], self._scenery.state(stage, {})) for stage in left),
        )
