"""Runs the visits of a step in the schedule's order. What a visit needs is there when it begins, and what it leaves goes on its
way.

A pass enters a visit, asks for the inputs of its micro-batches, installs weights, computes and differentiates, and leaves. It
may wait for three things: weights (a slot, their fetch or update), a boundary (a slot, or the bytes), and gradients (a slot, or
those that rest until their second user). Each wait is summed by cause. A separate device adds copies: those of a stage's
results, and those of weights that will change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ..core.process import Patience
from ..planner.ledgers import Lookahead
from ..planner.schedule import Schedule, Visit, plan_schedule
from ..spec.plan import MicroBatch, even
from .activations import Boundaries
from .anatomy import Installed
from .compute_weights import ComputeWeights
from .context import Context
from .crossings import AfterUpload, Arriving, Crossings, HostInputs
from .devices.base import Moment
from .gradients import GradientSum, GradientSums, HandOver
from .moves import DaemonMoves
from .updates import DeviceStates

if TYPE_CHECKING:
    from .link import Giving, Link  # loads torch.distributed, which one process does not need

BETWEEN_STAGES = 1 << 30  # the stage number of random streams in the model's own forward
INSIDE = 5e-4  # seconds between looks inside a stage's forward: its layers take microseconds, or tenths of a second


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitInterval:
    """When a visit computed, on the monotonic clock (seconds). `phase`: of the visit, or "norm" if it only measures."""

    phase: str
    stage: int
    begin: float
    end: float


class Watcher(Protocol):
    between_micro_batches: Callable[[], None]
    after_visit: Callable[[Visit], None]


def _shown_phase(visit: Visit) -> str:
    return "norm" if visit.measures else "backward" if visit.again else visit.phase


class Visits:
    """Runs everything that moves around compute. The passes compute; they hold nothing from one visit to the next."""

    def __init__(self, context: Context, *, hand_over: HandOver, watcher: Watcher, patience: Patience) -> None:
        self.model, self.plan, self.device = context.model, context.plan, context.device
        self.stages = context.anatomy.stages
        self.schedule = plan_schedule(self.model, self.plan)
        self.states = DeviceStates(context)
        self.moves = DaemonMoves(context, states=self.states, tick=self.tick, patience=patience)
        self.residency, waiting = self.moves.residency, self.moves.waiting
        self.boundaries = Boundaries(context)
        self.lookahead = self._lookahead(self.schedule)
        self.crossings = Crossings(context, waiting=waiting)
        self.weights = ComputeWeights(context, states=self.states, waiting=waiting)
        self.sums = GradientSums(context, residency=self.residency, states=self.states, hand_over=hand_over, waiting=waiting)
        self.step = 0
        self._before = 0  # micro-batches of the step before this sweep
        self._parts: tuple[MicroBatch, ...] = ()  # the micro-batches of this sweep
        self._visited: list[tuple[Visit, float, Moment]] = []
        self._looked = 0.0  # when everything was last moved that could move
        self._inputs_asked = 0.0  # when the visit asked for its inputs
        self._watcher = watcher
        # By identity of the source: masks and positions on the device.
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.link: Link | None = None  # to other ranks

    def _lookahead(self, schedule: Schedule) -> Lookahead:
        return Lookahead(schedule=schedule, residency=self.residency, boundaries=self.boundaries.ledger, tick=self.tick)

    # ---- a step --------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, *, last: bool) -> None:
        """Begins a step. `last`: no step follows, so nothing is prefetched for it."""
        self.step = step
        self.begin_round(last=last)

    def begin_round(self, *, last: bool) -> None:
        """Begins the schedule anew; `last` stops prefetching for the round after it."""
        self._before, self._parts = 0, ()
        self._visited.clear()
        self.lookahead.begin_step(last=last)
        self._shared.clear()
        if self.link is not None:
            self.link.follow(self.schedule)

    @contextmanager
    def following(self, schedule: Schedule) -> Iterator[None]:
        """Follows another schedule inside, between two steps. Nothing may be prefetched for the step to come, nor be left
        prefetched inside but by an error."""
        steps = self.schedule, self.lookahead
        self.schedule, self.lookahead = schedule, self._lookahead(schedule)
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self.schedule, self.lookahead = steps

    def drain(self) -> None:
        """Ends every update and every transfer. Afterwards all stages rest at the same generation."""
        self.sums.settle()  # a sum still under way may begin an update, which is waited for below
        self.lookahead.pause()  # the waits below are for slots, which prefetching would take
        self.weights.settle_all()  # uploads read slots that are given up next
        self.moves.rows.give_up()
        self.lookahead.give_up()  # what was read ahead holds slots that updates below may need
        self.residency.drain()
        self.states.settle()
        self.moves.book_waits()

    def abandon(self) -> None:
        """Forgets the step under way (or what was prefetched for the next). Updates of earlier steps stay due."""
        self.device.synchronize()  # sync: copies under way, because their memory is reused from now on
        self.sums.forget()
        self.lookahead.pause()  # otherwise waiting below would prefetch for the step that is given up
        self.lookahead.forget()
        self.boundaries.forget(self.residency.wait_until)
        self.weights.settle_all()
        self.moves.rows.give_up()
        self.residency.let_go_of_all()

    def look_up(self, rows: Mapping[int, torch.Tensor] | None) -> None:
        """Tells which rows, by stage, the next visits of a table of tokens need; None: all. For tables that are fetched by
        rows."""
        for stage in self.moves.rows.stages:
            self.weights.forget(stage)
        self.moves.rows.tell(rows)

    # ---- a visit -------------------------------------------------------------------------------------------------

    def enter(self, phase: str, stage: int, boundary: torch.Tensor | None = None) -> tuple[Visit, torch.Tensor | None]:
        """Begins the next visit of the schedule. Its weights are ready to compute with (None if it needs none), and `boundary`,
        its input, is stashed for backward. On a separate device the caller must call `inputs` next: `boundary` only has its
        place yet, and is filled as it is uploaded.

        As soon as the visit has its own slots, later work may be prefetched, even while the visit waits for its data. Before
        that, a later visit could take the slot that this one waits for, and both would wait for ever. Gradients are an
        exception: only visits that resume a sum take slots for them ahead of time, and not before this visit has its own.
        """
        visit = self.lookahead.enter(lambda visit: self._stash(visit, boundary))
        if self.link is not None:
            self.link.enter(visit)
        assert (visit.phase, visit.stage) == (phase, stage), (visit, phase, stage)
        span = None if visit.owner is None else self.residency.records[visit.owner].span
        flat = None
        if span is not None:
            assert visit.owner is not None
            flat = self.weights.flat(visit.owner, span, self.residency.records[visit.owner].generation)
        if not self.device.separate:  # elsewhere the next upload waits for the visit's own inputs (`inputs`)
            self.lookahead.on_device()
        return visit, flat

    def _stash(self, visit: Visit, boundary: torch.Tensor | None) -> None:
        assert boundary is not None
        keep = self.boundaries.room if self.fills_by_part(boundary) else self.boundaries.stash
        keep(visit.stage, boundary, self.micro_batches(boundary), self.residency.wait_until)

    def fills_by_part(self, boundary: torch.Tensor) -> bool:
        """Tells whether a boundary is kept micro-batch by micro-batch, because it is not in host memory, or not yet."""
        return self.device.separate or (self.link is not None and self.link.awaits(boundary))

    def parts(self, part: MicroBatch, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns a micro-batch of tensors of the whole batch, once it is there: another rank may still compute it."""
        if self.link is not None:
            for whole in batches:
                self.link.arrived(whole, part)
        return [part.of(whole).contiguous() for whole in batches]

    def gives(self) -> Giving | None:
        """Returns what sends each result of the visit's micro-batches, if another rank needs them."""
        return None if self.link is None else self.link.gives()

    def inputs(self, sources: Iterable[HostInputs], after_upload: AfterUpload = lambda number: None) -> Arriving:
        """Begins to bring the inputs of the visit's micro-batches, when it waits for nothing else. The first goes before the
        next visit's weights."""
        self._inputs_asked = time.monotonic()
        arriving = Arriving(self.crossings, sources, after_upload)
        if self.device.separate:
            self.lookahead.on_device()
        return arriving

    def installed(self, owner: int | None, flat: torch.Tensor | None) -> AbstractContextManager[Installed]:
        """Installs the weights of stage `owner` from `flat` in the model, inside the context. Gives the list of its
        parameters."""
        if owner is None or flat is None:
            return nullcontext(Installed())
        return self.stages[owner].installed(flat)

    @contextmanager
    def learning(self, owner: int | None, flat: torch.Tensor | None, total: GradientSum | None) -> Iterator[Installed]:
        """Does the same, and adds the gradients of the parameters to the sum."""
        with self.installed(owner, flat) as parameters, nullcontext() if total is None else total.collecting(parameters):
            yield parameters

    @contextmanager
    def forward(
        self, stage: int, boundary: torch.Tensor | None = None, *, phase: str = "forward"
    ) -> Iterator[tuple[Visit, Installed]]:
        """Visits a stage without gradients, inside the context: gives the visit, and the parameters in their places."""
        visit, flat = self.enter(phase, stage, boundary)
        with torch.no_grad(), self.installed(visit.owner, flat) as parameters:
            yield visit, parameters
        self.boundaries.seal(stage)
        self.leave(visit)

    @contextmanager
    def backward(self, stage: int) -> Iterator[tuple[Visit, torch.Tensor | None, list[torch.Tensor], GradientSum | None]]:
        """Visits a stage in backward, inside the context: gives the visit, the weights, what forward kept of the input by
        micro-batch, and the sum of the gradients, which is handed over at the end."""
        visit, flat = self.enter("backward", stage)
        kept = self.boundaries.take(stage, self.residency.wait_until) if visit.take else []
        total = self.sums.open(stage, resume=visit.resume)
        yield visit, flat, kept, total
        if visit.take:  # a backward that measures the norm is followed by one that needs the input again
            (self.boundaries.leave if visit.measures else self.boundaries.drop)(stage)
        self.sums.end(visit, stage, total)
        self.leave(visit)

    def leave(self, visit: Visit) -> None:
        """Ends the visit after its compute was submitted."""
        self._visited.append(
            (visit, self._inputs_asked, self.device.mark())
        )  # read at the step's end: to ask now would wait for the device
        if self.crossings.computing is not None:
            self.crossings.computing.leave(_shown_phase(visit), visit.stage)
        if visit.owner is not None:
            self.weights.note_compute(visit.owner)
            # The release lets a fetch or an update overwrite the slot, which the upload may still read.
            self.weights.settle(visit.owner)
        # A sum that is on its way down holds the span itself (`GradientSums`), so the visit need not.
        self.residency.release(visit)
        self._watcher.after_visit(visit)
        self.tick()

    def intervals(self) -> list[VisitInterval]:
        """Returns when the device computed each visit of the step; each begins when the one before ends. May wait for the last
        visit; the stalls of the step are known then."""
        self.moves.book_waits()
        found, over = list[VisitInterval](), 0.0
        for visit, begin, ended in self._visited:
            begin, over = max(begin, over), ended()
            found.append(VisitInterval(phase=_shown_phase(visit), stage=visit.stage, begin=begin, end=max(begin, over)))
        return found

    # ---- groups and micro-batches -------------------------------------------------------------------------------------------

    def begin_sweep(self, parts: Sequence[MicroBatch], before: int, lane_ends: tuple[int, ...] = ()) -> None:
        """Begins a sweep over these micro-batches. `before`: how many of the step came before; `lane_ends`: of its lanes."""
        self.divide(parts)
        self.sums.lane_ends = lane_ends
        self._before = before
        self._shared.clear()  # the model's own forward makes new masks and positions

    def divide(self, parts: Sequence[MicroBatch]) -> None:
        """Tells the micro-batches of the rows to come. Rows count from that of the first."""
        self._parts = tuple(part.after(parts[0].first) for part in parts)

    def micro_batches(self, whole: torch.Tensor) -> tuple[MicroBatch, ...]:
        """Cuts the rows of a sweep, (rows, tokens, ...), in order; or one row, if all share it."""
        rows, width = whole.shape[:2]
        if self._parts and rows == self._parts[-1].end:
            return self._parts
        return even(rows, self.plan.numerics.micro_batch_size, width)

    def between(self) -> None:
        """Looks for finished work between micro-batches, and lets the watcher stop the step."""
        self.tick()
        self._watcher.between_micro_batches()

    def seed(self, stage: int, micro_batch: int) -> None:
        """Seeds the device for dropout, the same in forward and recompute. `micro_batch`: its number within the sweep."""
        self.device.seed(random_stream(self.plan.numerics.seed, self.step, stage, self._before + micro_batch))

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        """Returns `value` on the device, copied once per step. Its source is kept too, so that its identity stays unique."""
        if id(value) not in self._shared:
            self._shared[id(value)] = (value, self.device.upload_now(value))
        return self._shared[id(value)][1]

    def tick(self) -> None:
        """Moves everything that can move. Called whenever something may have finished. Never waits."""
        self._looked = time.monotonic()
        # What ends frees slots, so prefetching comes last and takes them in the same call.
        self.residency.advance()
        self.states.look()
        self.boundaries.advance()
        self.sums.advance()
        self.lookahead.advance(self._begin_upload)

    def inside(self, *_: object) -> None:
        """Does the same after a layer inside a stage's forward, unless it was just done."""
        if time.monotonic() - self._looked >= INSIDE:
            self.tick()

    def _begin_upload(self, visit: Visit, next_step: bool) -> None:
        if not self.device.separate:
            return
        if visit.sweep and visit.resume:  # a later sweep goes on with the sum, which goes up before the weights
            self.sums.begin(visit.stage if visit.owner is None else visit.owner)
        if visit.owner is None:
            return
        record = self.residency.records[visit.owner]
        trained = self.model.stages[visit.owner].trained > 0
        if next_step and trained and record.generation < self.step:  # this step's update is still to come
            return
        # Weights go up early only if nothing will change them before the visit: no fetch and no update, begun or due.
        if record.span is not None and not record.fetches and record.update is None and record.due is None:
            self.weights.begin(visit.owner, record.span, record.generation)


def backpropagate(
    y: torch.Tensor, grad_y: torch.Tensor | None, leaves: Sequence[torch.Tensor],
    more_roots: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:  # fmt: skip
    """Runs backward from `y` to those of `leaves` that require a gradient. `more_roots`: other tensors that it begins at, each
    with its gradient."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    roots, gradients = [y, *(root for root, _ in more_roots)], [grad_y, *(gradient for _, gradient in more_roots)]
    torch.autograd.backward(roots, gradients, inputs=wanted)


def random_stream(seed: int, *place: int) -> int:
    """Mixes a seed from the run's seed and a place: step, stage, micro-batch."""
    mixed = seed & 0xFFFFFFFF
    for part in place:
        mixed = (mixed * 6364136223846793005 + part + 1442695040888963407) & (2**64 - 1)
        mixed ^= mixed >> 29
    return mixed >> 1
