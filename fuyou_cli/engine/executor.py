"""Runs one training step. The model's own forward drives visits in the schedule's order, the head turns back, the calls are
walked in reverse for the backward visits, and every stage's gradients go to its update.

`visits` moves everything around compute, `passes` compute a visit, `activations` keep things between forward and backward, and
`streamed` connects the model's forward to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..core.errors import NumericsError, RecomputeError
from ..core.process import SILENT, Patience
from ..planner.schedule import Visit
from ..spec.model import ModelSpec
from ..spec.plan import MicroBatch, Plan, even
from ..swap.daemon import SwapDaemon
from .activations import open_activations
from .anatomy import Anatomy
from .attention import AttentionSeen, Documents
from .compiled import CompiledBlocks
from .context import Context, HostMemory
from .devices.base import Device
from .gradients import LOOK, squared_norm
from .head import HeadPasses
from .loss import IGNORED, shifted
from .passes import EmbeddingPasses, RangedPasses
from .routing import Routing
from .streamed import Call, Divided, StreamedModel
from .updates import Optimizer, Scalars
from .visits import BETWEEN_STAGES, VisitInterval, Visits

if TYPE_CHECKING:
    from .among_ranks import AmongRanks
    from .ranks import Ranks
    from .replicas import Replicas


@dataclass(kw_only=True, slots=True)
class StepOutcome:
    loss: float
    grad_norm: float | None
    label_tokens: int
    skipped: str = ""  # why the step updates nothing
    sent: dict[str, tuple[int, ...]] | None = None  # tokens of each expert (`Routing.counts`)
    aux_loss: float | None = None  # that balances them (`Routing.aux_loss`)
    intervals: list[VisitInterval] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLanes:
    """Says which rows of a step are computed here, where it has lanes. `parts`: their micro-batches, counted from their first
    row; `before`: how many of the step come before; `ends`: the micro-batch behind each lane."""

    rows: slice
    parts: tuple[MicroBatch, ...]
    before: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, lanes: Sequence[tuple[MicroBatch, ...]], chosen: range) -> OwnLanes:
        """Returns some of a step's lanes."""
        own = [part for lane in chosen for part in lanes[lane]]
        first = own[0].first
        return cls(
            rows=slice(first, own[-1].end),
            parts=tuple(part.after(first) for part in own),
            before=sum(len(lane) for lane in lanes[: chosen.start]),
            ends=tuple(accumulate(len(lanes[lane]) for lane in chosen)),
        )


class StepAbandoned(Exception):
    """Says, between micro-batches, that a step is given up before any of it was applied."""


class Executor:
    """Runs steps of one model. Close it to give the model its own forwards back."""

    def __init__(
        self, *, anatomy: Anatomy, model: ModelSpec, plan: Plan, daemon: SwapDaemon, memory: HostMemory, device: Device,
        optimizer: Optimizer, patience: Patience = SILENT, compiled: CompiledBlocks | None = None,
        between_micro_batches: Callable[[], None] = lambda: None, after_visit: Callable[[Visit], None] = lambda visit: None,
        ranks: Ranks | None = None, replicas: Replicas | None = None,
    ) -> None:  # fmt: skip
        """`ranks`: those that compute the stages which are `away` in `model`; None: there are none. `replicas`: those that
        compute the other lanes of a step; None: all are computed here."""
        self.anatomy, self.model, self.plan, self.device, self.optimizer = anatomy, model, plan, device, optimizer
        self.between_micro_batches, self.after_visit = between_micro_batches, after_visit
        context = Context(anatomy=anatomy, model=model, plan=plan, daemon=daemon, memory=memory, device=device)
        self.visits = visits = Visits(context, hand_over=self._hand_over, watcher=self, patience=patience)
        self.shared = visits.shared
        self.activations = open_activations(context, boundaries=visits.boundaries, waiting=visits.moves.waiting)
        self.compiled = compiled
        if compiled is not None:
            self.activations = compiled.activations(context, self.activations)
        self.routing = Routing(context)
        self.blocks = RangedPasses(visits, self.activations, self.routing)
        self.embeddings = EmbeddingPasses(visits, self.activations, anatomy.model.get_input_embeddings())
        self.head = HeadPasses(visits, anatomy.model, self._check_loss)
        self.may_skip = False  # a step whose numbers are not finite goes on and updates nothing
        self.skipped = 0  # steps so far that updated nothing; AdamW does not count them
        # The kernel that computes attention; a compiler that traces blocks would trace this as well.
        self.attention = AttentionSeen()
        self._sees_attention = compiled is None
        self.reached: set[str] = set()  # tensors that have had a gradient other than zero
        at_once = [visit.index for visit in visits.schedule.visits if visit.update == "after"]
        self._first_update = min(at_once, default=len(visits.schedule.visits))  # the visit at whose end the first update begins
        self._updating = self._measures = False  # in this step: an update has begun, backward only measures the norm so far
        self._squares: dict[int, float] = {}
        self._squares_by_tensor: dict[int, list[float]] = {}  # of the tensors of each stage, where ranges of experts are stages
        self._scalars = Scalars(optimizer=optimizer, lr=0.0, step=1)
        self._outcome = StepOutcome(loss=0.0, grad_norm=None, label_tokens=0)
        inside = None if device.separate else visits.inside
        self.among = None if ranks is None else self._join(ranks)
        self.replicas = visits.sums.replicas = replicas
        if replicas is not None:
            assert not device.separate and plan.numerics.lanes % replicas.ranks.size == 0 and plan.sweeps == 1
            self.head.of_all = replicas.losses
        self.streamed = StreamedModel(
            anatomy, self, device.torch_device, inside, on_device=plan.batch_on_device, compiled=compiled,
            made=None if self.among is None else self.among.made,
        )  # fmt: skip
        if self.among is not None:
            self.streamed.tape.trace_input = self.among.trace_input

    def _join(self, ranks: Ranks) -> AmongRanks:
        from .among_ranks import AmongRanks  # loads torch.distributed, which one process does not need

        return AmongRanks(ranks, self.visits, self.anatomy)

    def close(self) -> None:
        if self.among is not None:
            self.among.link.close()
        if self.replicas is not None:
            self.replicas.close()
        self.routing.close()
        self.streamed.close()
        self.visits.states.close()
        self.visits.weights.close()

    # ---- a step --------------------------------------------------------------------------------------------------

    def step(
        self, input_ids: torch.Tensor, labels: torch.Tensor, *, step: int, lr: float, last: bool = False,
        documents: Documents | None = None, sweeps: Sequence[tuple[MicroBatch, ...]] | None = None,
        real: torch.Tensor | None = None,
    ) -> StepOutcome:  # fmt: skip
        """Runs forward, backward, and every update, or defers updates to the next forward.

        input_ids, labels: (rows, tokens) int64 in host memory; labels hold -100 for tokens without loss. Step counts from 1.
        `last`: no step follows, so nothing is prefetched for it. `documents`: of the rows, if the anatomy keeps them apart;
        None: each row is one. `sweeps`: the micro-batches of each sweep, or of each lane where there are several, in the order
        of their rows; None: all rows are computed whole, `micro_batch_size` of them at once. `real`: which tokens are no
        padding, (rows, tokens) bool in host memory; None: all. Only mixtures ask for it. Replicas are given all rows, and
        compute those of their lanes.
        """
        assert not self.may_skip or self.plan.clip_grad_norm is not None
        self._squares, self._updating, self._measures = {}, False, self.plan.norm_first
        self._squares_by_tensor.clear()
        self._scalars = Scalars(optimizer=self.optimizer, lr=lr, step=step - self.skipped)
        self._outcome = StepOutcome(loss=0.0, grad_norm=None, label_tokens=0)
        self.visits.begin_step(step, last=last)
        self.routing.begin_step(step)
        label_tokens, before, lane_ends = int((shifted(labels) != IGNORED).sum()), 0, tuple[int, ...]()
        if self.plan.numerics.lanes > 1:
            lanes = self._groups(input_ids, self.plan.numerics.lanes, sweeps)
            own = OwnLanes.of(lanes, range(len(lanes)) if self.replicas is None else self.replicas.lanes(len(lanes)))
            rows, before, lane_ends, sweeps = own.rows, own.before, own.ends, (own.parts,)
            input_ids, labels = input_ids[rows], labels[rows]
            documents, real = documents and documents[rows], None if real is None else real[rows]
        real_on_device = None if real is None or not self.anatomy.has_experts else self.device.upload_now(real)
        self._outcome.label_tokens = label_tokens
        self.head.begin_step(label_tokens)
        # before anything else is submitted, because such a copy waits for all of it
        targets = self.head.place_targets(shifted(labels))
        shares = self._groups(input_ids, self.plan.sweeps, sweeps)
        self.visits.divide([part for parts in shares for part in parts])
        divided = [self._divided(parts, input_ids.shape[1], documents) for parts in shares]
        self.visits.seed(BETWEEN_STAGES, 0)
        input_ids, positions = self.embeddings.place_ids(input_ids, torch.arange(input_ids.shape[1]).unsqueeze(0))
        for parts, share in zip(shares, divided, strict=True):
            rows = slice(parts[0].first, parts[-1].end)
            self.visits.begin_sweep(parts, before, lane_ends)
            if self.among is not None:
                self.among.link.begin_sweep(tuple(part.after(parts[0].first) for part in parts), input_ids.shape[1])
            self.routing.begin_sweep(
                before, None if real_on_device is None or real is None else (real[rows], real_on_device[rows])
            )
            self._sweep(input_ids[rows], positions, targets[rows], share)
            before += len(parts)
        if self.plan.norm_first:
            self.routing.check(changed=self._updating)
        else:
            self._settle()
        self.visits.sums.settle()
        if self.among is not None:
            self.among.link.settle()
        elif self.replicas is not None:
            if self.anatomy.has_experts:
                self._outcome.sent = self.routing.named_counts(self.replicas.counts(self.routing.raw_counts()))
        else:
            self._outcome.sent = self.routing.counts()
        self._outcome.aux_loss = self.routing.aux_loss()
        self._outcome.intervals = self.visits.intervals()
        self.skipped += bool(self._outcome.skipped)
        self.visits.residency.update_later(self._scalars)
        return self._outcome

    def _groups(
        self, ids: torch.Tensor, count: int, groups: Sequence[tuple[MicroBatch, ...]] | None
    ) -> Sequence[tuple[MicroBatch, ...]]:
        """Returns the micro-batches of so many groups of rows. `groups`: those given; None: each has as many rows."""
        if groups is None:
            rows, width = ids.shape
            assert rows % count == 0, (rows, count)
            parts = even(rows // count, self.plan.numerics.micro_batch_size, width)
            groups = [tuple(part.after(-begin) for part in parts) for begin in range(0, rows, rows // count)]
        assert len(groups) == count, (len(groups), count)
        return groups

    def _divided(self, parts: tuple[MicroBatch, ...], width: int, documents: Documents | None) -> Divided:
        first, end = parts[0].first, parts[-1].end
        of_rows = None if documents is None else documents[first:end]
        own = tuple(part.after(first) for part in parts)
        return self.streamed.divided(own, of_rows, width, step=self.plan.numerics.document_step)

    def _sweep(self, input_ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor, divided: Divided) -> None:
        seeing = self.attention if self._sees_attention else nullcontext()
        self._sees_attention = False  # attention is the same in every step
        with seeing:
            hidden = self.streamed.hidden(input_ids, positions, divided)
        edge, output = get_gradient_edge(hidden), [hidden.detach()]
        if self.among is not None:
            self.among.turn(edge, output[0])
            self.routing.share(self.among.ranks.gather)
        del hidden  # free tensors of all rows as soon as they were used: each is as large as a boundary
        if self.plan.norm_first:
            self._run_backward(edge, output, targets, measures=True)
            self._settle()
            self._measures = False
        self._run_backward(edge, output, targets)

    def _run_backward(
        self, edge: GradientEdge, hidden: list[torch.Tensor], targets: torch.Tensor, *, measures: bool = False
    ) -> None:
        """Runs the head and the backward of a sweep. `hidden`: its last hidden state, in a list that gives it up when nothing
        needs it any more. `measures`: both run once more, and now they only measure the norm."""
        last = hidden[0] if measures else hidden.pop()
        gradient = self.head.run(last, targets)
        del last
        self.streamed.tape.hand_on(edge, gradient, retain=measures)
        del gradient
        self.streamed.tape.backward(retain=measures)

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """Returns a stage's output for the whole batch. x: (batch, tokens, ...), ids or a boundary, in host memory, or on the
        device if the plan has the batch there."""
        passes = self.blocks if x.is_floating_point() else self.embeddings
        return passes.forward(call, x) if self.among is None else self.among.forward(passes, call, x)

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient of the stage's input for the whole batch; None where nobody wants it."""
        if not self.model.stages[self.blocks.first_in_backward(call.stage)].goes_back:
            return None
        passes = self.blocks if ids is None else self.embeddings
        return passes.backward(call, ids, grad_y) if self.among is None else self.among.backward(passes, call, ids, grad_y)

    def drain(self) -> None:
        """Ends every update and every transfer. Afterwards all stages rest at the same generation."""
        self.visits.drain()

    def may_abandon(self) -> bool:
        """Whether the step under way can be given up: no update of it has begun, and none begins at the end of this
        visit. Ranks give up no step: what one computed, others wait for."""
        return self.among is None and self.replicas is None and self.visits.lookahead.cursor < self._first_update

    def abandon(self) -> None:
        """Forgets the step under way (or what was prefetched for the next). Updates of earlier steps stay due."""
        self.forget_calls()
        self.visits.abandon()
        for activations in self.activations:
            activations.forget()

    def forget_calls(self) -> None:
        self.streamed.tape.forget()

    # ---- updates -------------------------------------------------------------------------------------------------

    def _hand_over(self, stage: int, gradients: torch.Tensor, squares: list[float] | None) -> None:
        """Sends the stage's complete gradients to rest, or starts its update. `squares`: one sum per tensor; None: they were
        measured before."""
        self.head.settle()  # a loss that is not finite explains such gradients, and nothing may be updated by them
        if squares is not None:
            if self.model.has_ranges:
                self._squares_by_tensor[stage] = squares
            self._squares[stage] = self._squared(stage, gradients, squares)
        if self._measures:
            return
        if self.plan.stages[stage].deferred:
            self.visits.residency.rest_gradients(stage)
        else:
            self._updating = True
            self.visits.residency.update_now(stage, self._scalars)

    def _squared(self, stage: int, gradients: torch.Tensor, squares: list[float]) -> float:
        """Returns the sum of a stage's squares. It is looked at without clipping too: otherwise NaN or Inf would be found only
        in the weights, without its origin."""
        try:
            return squared_norm(
                self.model.stages[stage], squares, gradients, step=self.visits.step, changed=self._updating,
                reached=self.reached,
            )  # fmt: skip
        except NumericsError as error:
            self._refuse(error, stage)
            return 0.0

    def _check_loss(self, loss: float, stage: int) -> None:
        if not math.isfinite(loss):
            name = self.model.stages[stage].name
            self._refuse(
                NumericsError(f"step {self.visits.step}: the loss ({name}) is {loss}", hint=LOOK, changed=False), stage
            )

    def _refuse(self, error: NumericsError, stage: int) -> None:
        """Ends the step here with an error. A step that may be skipped goes on to its end and updates nothing. Among ranks a
        step goes on until all have met, unless it has updates before."""
        if not self.may_skip and (self.among is None or self.plan.clip_grad_norm is None):
            raise error
        if self.among is not None:
            self.among.refuse(error, stage)
        self._outcome.skipped = self._outcome.skipped or error.message

    def _settle(self) -> None:
        """Waits until all gradients were squared and the loss is known. They decide what the updates to come do."""
        self.visits.sums.settle()
        if self.among is None:
            self.routing.check(changed=self._updating)
            self.head.settle()
            self._outcome.loss = self.head.loss
        else:
            self._meet(self.among)
        limit = self.plan.clip_grad_norm
        if self._outcome.skipped:
            self._scalars = replace(self._scalars, skipped=True)
        elif limit is not None:
            # Of a block that is cut, exactly: so it does not matter where.
            exact = math.fsum(square for squares in self._squares_by_tensor.values() for square in squares)
            norm = (exact or sum(self._squares[stage] for stage in sorted(self._squares))) ** 0.5
            self._outcome.grad_norm = norm
            self._scalars = replace(self._scalars, gradient_scale=min(1.0, limit / (norm + 1e-6)))

    def _meet(self, among: AmongRanks) -> None:
        """Tells the other ranks what this one found in the step, and takes what they did. Raises what any of them refused."""
        try:
            self.routing.check(changed=self._updating)
            self.head.settle()
        except RecomputeError as error:
            among.refuse(error, 0)
        totals = among.meet(
            loss=self.head.loss, squares=self._squares, by_tensor=self._squares_by_tensor, sent=self.routing.raw_counts(),
            changed=self._updating, may_skip=self.may_skip,
        )  # fmt: skip
        self._outcome.loss, self._squares = totals.loss, totals.squares
        self._squares_by_tensor = {-1: totals.by_tensor}
        self._outcome.skipped = totals.skipped
        self._outcome.sent = self.routing.named_counts(totals.sent) if self.anatomy.has_experts else None
