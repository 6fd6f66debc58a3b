"""One training step: the model's own forward drives visits in the schedule's order; around each, weights, boundaries
and gradients move as the plan says.

The executor may wait for four things: a visit's weights (a slot, their fetch or update), its boundary (a slot, or the
bytes), gradients (a slot, or those that rest until their second user), and at the end what is still under way. Each wait is
summed by cause. A device with memory of its own adds copies: those of a stage's results, and of weights about to change;
micro-batches cross to it and back while their neighbours compute (`crossings`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..core.errors import NumericsError
from ..core.patience import SILENT, Patience
from ..planner.lookahead import Lookahead
from ..planner.schedule import Visit, plan_schedule
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from ..swap.daemon import SwapDaemon
from .anatomy import Anatomy
from .boundaries import Boundaries
from .calls import one_row_masks
from .compute_weights import ComputeWeights
from .crossings import Arriving, Crossings, Gathering, Source
from .devices.base import Device
from .embedding import is_lookup, is_plain
from .embedding_passes import backward_in_pieces, embedding_backward, forward_in_pieces
from .gradients import LOOK, GradientSum, squared_norm
from .head import IGNORED, Head, shifted
from .head_passes import run_head
from .host_memory import HostMemory
from .host_work import HostWork
from .kept_outputs import KeptOutputs
from .moves import DaemonMoves
from .stage import Stage
from .streamed import Call, StreamedStage, streamed_forward
from .sums import GradientSums
from .updates import Optimizer, Scalars
from .vocabulary import scales_rows

_CHOREOGRAPHY = 1 << 30  # stands for "between the stages" where a random stream needs a stage number


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """When a visit computed, on the monotonic clock (seconds)."""

    phase: str
    stage: int
    begin: float
    end: float


@dataclass(kw_only=True, slots=True)
class StepOutcome:
    loss: float
    grad_norm: float | None
    label_tokens: int
    skipped: str = ""  # why nothing is updated
    intervals: list[Interval] = field(default_factory=list)


class StepAbandoned(Exception):
    """Raised between micro-batches to give up a step of which nothing has been applied."""


class Executor:
    """Owns the stages of one model and runs steps. Close it to give the model its own forwards back."""

    def __init__(
        self,
        *,
        anatomy: Anatomy,
        model: ModelSpec,
        plan: Plan,
        daemon: SwapDaemon,
        memory: HostMemory,
        device: Device,
        optimizer: Optimizer,
        patience: Patience = SILENT,
    ) -> None:
        self.anatomy, self.model, self.plan = anatomy, model, plan
        self.device, self.memory, self.optimizer = device, memory, optimizer
        self.host_work = HostWork()
        self.stages = [Stage(anatomy, spec) for spec in model.stages]
        self.schedule = plan_schedule(model, plan)
        self.moves = DaemonMoves(model=model, plan=plan, daemon=daemon, tick=self._tick, patience=patience)
        self.residency = self.moves.residency
        at_once = [visit.index for visit in self.schedule.visits if visit.update == "after"]
        self._first_update = min(at_once, default=len(self.schedule.visits))  # the visit whose end begins it
        self.boundaries = Boundaries(model=model, plan=plan, daemon=daemon, memory=memory)
        self.lookahead = Lookahead(
            schedule=self.schedule, residency=self.residency, boundaries=self.boundaries.ledger, tick=self._tick
        )
        waiting = self.moves.waiting
        self.outputs = KeptOutputs(
            model=model, plan=plan, boundaries=self.boundaries, memory=memory, device=device, waiting=waiting
        )
        self.crossings = Crossings(plan=plan, memory=memory, device=device, waiting=waiting, host_work=self.host_work)
        self.weights = ComputeWeights(model=model, plan=plan, memory=memory, device=device, waiting=waiting)
        self.head = Head(anatomy.model)
        self.between_micro_batches: Callable[[], None] = lambda: None
        self.after_visit: Callable[[Visit], None] = lambda visit: None
        self.may_skip = False  # whether a step whose numbers are not finite goes on, to update nothing in the end
        self.skipped = 0  # steps so far that did: AdamW counts the others
        self.reached: set[str] = set()  # tensors that have had a gradient other than zero
        self.sums = GradientSums(
            model=model,
            plan=plan,
            residency=self.residency,
            memory=memory,
            device=device,
            hand_over=self._hand_over,
            waiting=self.moves.waiting,
        )
        self._anchor = torch.zeros((), requires_grad=True)
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity: masks and positions on the device
        self._head_gradient: torch.Tensor | None = None  # on its way from the head to the last stage's backward
        self._replaced: list[torch.nn.Module] = []
        self._looking: list[RemovableHandle] = []
        cut = [stage.index for stage in model.stages if stage.kind == "embedding" and stage.vocabulary is not None]
        self.scaled_lookups = {  # whose gradients are sums of rows too; found before their forwards are replaced
            stage.index
            for stage, module in zip(model.stages, anatomy.modules, strict=True)
            if stage.kind == "embedding" and is_lookup(module) and not is_plain(module) and scales_rows(module)
        }
        self._pieces = {cut[0]: cut} if cut else {}  # of the embedding, by the stage that its forward is called as
        self._squares: dict[int, float] = {}
        self._updating = False  # an update of the step under way has begun
        self._step, self._scalars = 0, Scalars(optimizer=optimizer, lr=0.0, step=1)
        self._outcome = StepOutcome(loss=0.0, grad_norm=None, label_tokens=0)
        self._replace_forwards()

    # ---- life ----------------------------------------------------------------------------------------------------

    def _replace_forwards(self) -> None:
        for stage in self.stages:
            if stage.module is None or stage.module in self._replaced:
                continue
            original = type(stage.module).forward.__get__(stage.module)
            stage.module.forward = streamed_forward(
                stage.spec.index, stage.spec.name, original, self, self._anchor, self.device.torch_device
            )
            self._replaced.append(stage.module)
            # A visit of one micro-batch is long: what its prefetches were fetched for, such as updates, is begun inside it.
            self._looking += stage.call_inside(self._tick)
            if self.device.separate:
                for module in stage.module.modules():
                    for name, value in module._buffers.items():
                        module._buffers[name] = None if value is None else value.to(self.device.torch_device)

    def close(self) -> None:
        for module in self._replaced:
            module.__dict__.pop("forward", None)
        self._replaced.clear()
        for handle in self._looking:
            handle.remove()
        self._looking.clear()

    # ---- a step --------------------------------------------------------------------------------------------------

    def step(self, input_ids: torch.Tensor, labels: torch.Tensor, *, step: int, lr: float, last: bool = False) -> StepOutcome:
        """Forward, backward, and every update accepted, or due in the next forward where it is deferred.

        input_ids, labels: (batch, tokens) int64 in host memory; labels hold -100 where nothing is learnt. Step counts
        from 1. `last` stops prefetching for a step that will not come.
        """
        assert not self.may_skip or self.plan.clip_grad_norm is not None
        self._step, self._squares, self._updating = step, {}, False
        self.lookahead.begin_step(last=last)
        self._shared.clear()
        self._scalars = Scalars(optimizer=self.optimizer, lr=lr, step=step - self.skipped)
        self._outcome = StepOutcome(loss=0.0, grad_norm=None, label_tokens=0)
        self.device.seed(self._stream(_CHOREOGRAPHY, 0))
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)
        with one_row_masks(self.anatomy.model):
            hidden = self.anatomy.base(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
        edge, output = get_gradient_edge(hidden), [hidden.detach()]
        del hidden  # whole-batch tensors are let go of as soon as they were used: each is as large as a boundary
        targets = shifted(labels)
        self._outcome.label_tokens = int((targets != IGNORED).sum())
        self._outcome.loss, gradient = run_head(self, output.pop(), targets, label_tokens=self._outcome.label_tokens)
        if isinstance(edge.node, StreamedStage._backward_cls):
            # autograd would hold it until the last stage is done: a stage takes it directly, autograd gets its shape
            self._head_gradient, gradient = gradient, gradient.new_zeros(()).expand(gradient.shape)
        torch.autograd.backward([edge], [gradient])
        del gradient
        self.sums.settle()
        self._decide_updates()
        return self._outcome

    def drain(self) -> None:
        """Every update is done and every transfer over: the stages rest at the same generation."""
        self.sums.settle()
        self.lookahead.pause()
        self.weights.settle_all()
        self.lookahead.give_up()
        self.residency.drain()

    def may_abandon(self) -> bool:
        """Whether the step under way can be given up: no update of it has begun, nor will one at the end of this visit."""
        return self.lookahead.cursor < self._first_update

    def abandon(self) -> None:
        """Forgets the step under way (or what was prefetched for the next). Updates of earlier steps stay due."""
        self.device.synchronize()  # sync: copies of what was under way, whose memory is used for something else from now on
        self.sums.forget()
        self._head_gradient = None
        self.lookahead.pause()
        self.lookahead.forget()
        self.outputs.forget()
        self.boundaries.ledger.forget(self.residency.wait_until)
        self.weights.settle_all()
        self.residency.let_go_of_all()

    def _decide_updates(self) -> None:
        """All deferred gradients rest, and their squares are known: the clipping factor, then updates in the next forward."""
        if self._outcome.skipped:
            self.skipped += 1
            self.residency.update_later(replace(self._scalars, skipped=True))
            return
        scale, limit = 1.0, self.plan.clip_grad_norm
        if limit is not None:
            norm = sum(self._squares[stage] for stage in sorted(self._squares)) ** 0.5
            self._outcome.grad_norm = norm
            scale = min(1.0, limit / (norm + 1e-6))
        self.residency.update_later(replace(self._scalars, gradient_scale=scale))

    def _hand_over(self, stage: int, gradients: torch.Tensor, squares: list[float]) -> None:
        """The stage's gradients are complete and in host memory: they rest, or its update starts. `squares`: of each tensor."""
        total = self._looked_at(stage, gradients, squares)
        if not self.plan.stages[stage].deferred:
            self._updating = True
            self.residency.update_now(stage, self._scalars)
            return
        self._squares[stage] = total
        self.residency.rest_gradients(stage)

    def _looked_at(self, stage: int, gradients: torch.Tensor, squares: list[float]) -> float:
        """The sum of squares. Also of gradients that no norm is asked for: those that are not finite would be found in the
        weights otherwise, wherever they began."""
        try:
            return squared_norm(
                self.model.stages[stage],
                squares,
                gradients,
                dtype=self.plan.numerics.accumulate_dtype,
                step=self._step,
                changed=self._updating,
                reached=self.reached,
            )
        except NumericsError as error:
            self._refuse(error)
            return 0.0

    def check_loss(self, loss: float, stage: int) -> None:
        """Called with the loss of the whole step, computed by `stage`, before any of its updates may begin."""
        if not math.isfinite(loss):
            name = self.model.stages[stage].name
            self._refuse(NumericsError(f"step {self._step}: the loss ({name}) is {loss}", hint=LOOK, changed=False))

    def _refuse(self, error: NumericsError) -> None:
        """The step ends here; or at its end, with nothing updated, where it may be skipped."""
        if not self.may_skip:
            raise error
        self._outcome.skipped = self._outcome.skipped or error.message

    # ---- visits --------------------------------------------------------------------------------------------------

    def enter(self, phase: str, stage: int, boundary: torch.Tensor | None = None) -> tuple[Visit, torch.Tensor | None]:
        """The next visit of the schedule, its weights ready to compute with (None when it needs none), and `boundary`, its
        input, stashed where backward will want it. On a device with memory of its own `inputs` has to follow: `boundary` has
        its place only, and is put there as it goes up.

        As soon as the visit has its own slots what comes next may be prefetched, also while it waits for what its slots are
        to hold: until then a visit behind it could take the slot it waits for, and wait for it in turn. Gradients are an
        exception: only visits that resume a sum take slots for them ahead of time, and not before this one has its own.
        """
        visit = self.lookahead.enter(lambda visit: self._stash(visit, boundary))
        assert (visit.phase, visit.stage) == (phase, stage), (visit, phase, stage)
        span = None if visit.owner is None else self.residency.records[visit.owner].span
        flat = None
        if span is not None:
            assert visit.owner is not None
            flat = self.weights.flat(visit.owner, span, self.residency.records[visit.owner].generation)
        if not self.device.separate:
            self.lookahead.on_device()
        return visit, flat

    def inputs(self, sources: Iterable[Source], beside: Callable[[int], None] = lambda number: None) -> Arriving:
        """What the visit's micro-batches compute with. The first is on its way before the next visit's weights may be: they
        would keep it waiting."""
        arriving = self.crossings.into(sources, beside)
        if self.device.separate:
            self.lookahead.on_device()
        return arriving

    def _stash(self, visit: Visit, boundary: torch.Tensor | None) -> None:
        assert boundary is not None
        keep = self.boundaries.room if self.device.separate else self.boundaries.stash
        keep(visit.stage, boundary, self.residency.wait_until)

    def leave(self, visit: Visit, begin: float) -> None:
        self._outcome.intervals.append(Interval(phase=visit.phase, stage=visit.stage, begin=begin, end=time.monotonic()))
        if visit.owner is not None:
            self.weights.computed(visit.owner)
            self.weights.settle(visit.owner)
        self.residency.release(visit)
        self.after_visit(visit)
        self._tick()

    def _tick(self) -> None:
        """Called whenever something may have finished: moves everything that can move, never waits."""
        self.residency.advance()
        self.boundaries.ledger.advance()
        self.sums.advance()
        self.lookahead.advance(self._begin_upload)

    def _begin_upload(self, visit: Visit, next_step: bool) -> None:
        if not self.device.separate or visit.owner is None:
            return
        record = self.residency.records[visit.owner]
        if next_step and record.generation < self._step:  # this step's update is still to come
            return
        if record.span is not None and record.fetch is None and record.update is None and record.due is None:
            self.weights.begin(visit.owner, record.span, record.generation)

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        """`value` on the device, copied once per step. Its source is kept too, so that its identity stays its own."""
        if id(value) not in self._shared:
            self._shared[id(value)] = (value, value.to(self.device.torch_device))
        return self._shared[id(value)][1]

    # ---- passes (called by the streamed stages) --------------------------------------------------------------------

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """The stage's output for the whole batch. x: (batch, tokens, ...) in host memory."""
        if call.stage in self._pieces:
            return forward_in_pieces(self, self._pieces[call.stage], call, x)
        visit, flat = self.enter("forward", call.stage, x)
        begin = time.monotonic()
        state = self.device.random_state()
        with torch.no_grad(), self.installed(call.stage, flat, trainable=self.outputs.keeps(call.stage)):
            y = self._forward_parts(call, x, stash=visit.stash and self.device.separate)
        self.device.restore_random_state(state)
        self.outputs.settle()
        self.boundaries.seal(call.stage)
        self.leave(visit, begin)
        return y

    def looks_up(self, stage: int) -> bool:
        """Whether the stage is a table whose rows are looked up, and scaled at most: so it can be used by micro-batch."""
        return stage in self.scaled_lookups or is_plain(self.stages[stage].module)

    def _forward_parts(self, call: Call, x: torch.Tensor, *, stash: bool) -> torch.Tensor:
        """`stash`: the boundary goes to its place by micro-batch, from the device: the host copies nothing."""
        y = Gathering(self.crossings, x.shape[0])
        if not x.is_floating_point() and not (self.device.separate and self.looks_up(call.stage)):
            # ids may be shared by all rows; where memory is the host's, a lookup of the whole batch is its result
            (ids,) = self.inputs([lambda: [x]]).take()
            self.device.seed(self._stream(call.stage, 0))
            y.put(slice(None), call.run(ids))
            return y.settled()
        parts = self.micro_batches(x.shape[0])

        arriving = self.inputs(partial(lambda rows: [x[rows]], rows) for rows in parts)
        for number, rows in enumerate(parts):
            (part,) = arriving.take()
            if stash:
                y.leaving.keep(part, self.boundaries.rows(call.stage, number))
            self.device.seed(self._stream(call.stage, number))
            y.put(rows, self._run(call, part, number))
            if len(parts) > 1:
                self.between()
        return y.settled()

    def _run(self, call: Call, x: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Forward of one micro-batch, of which no graph stays."""
        if not self.outputs.keeps(call.stage):
            y: torch.Tensor = call.run(x)
            return y
        with self.outputs.keeping(call.stage, micro_batch):
            y = call.run(x.detach().requires_grad_(True))
        return y.detach()

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the stage's input for the whole batch (None for ids); the stage's own gradients are summed."""
        if self._head_gradient is not None:
            grad_y, self._head_gradient = self._head_gradient, None
        if call.stage in self._pieces:
            assert ids is not None
            backward_in_pieces(self, self._pieces[call.stage], call, ids, grad_y)
            return None
        visit, flat = self.enter("backward", call.stage)
        boundary = self.boundaries.take(call.stage, self.residency.wait_until) if visit.take else []
        total = self.sums.open(call.stage)
        begin = time.monotonic()
        if ids is not None:
            embedding_backward(self, call, ids, grad_y, flat, total)
            grad_x = None
        else:
            grad_x = self._backward_parts(call, boundary, grad_y, flat, total)
        if visit.take:
            self.boundaries.drop(call.stage)
        self.sums.close(call.stage, total)
        self.leave(visit, begin)
        return grad_x

    def _backward_parts(
        self, call: Call, x: list[torch.Tensor], grad_y: torch.Tensor, flat: torch.Tensor | None, total: GradientSum | None
    ) -> torch.Tensor:
        """x: the boundary by micro-batch."""
        parts = self.micro_batches(grad_y.shape[0])
        sources = (partial(lambda number, rows: [x[number], grad_y[rows]], *each) for each in enumerate(parts))
        arriving = self.inputs(sources, beside=partial(self.outputs.begin, call.stage))
        grad_x = Gathering(self.crossings, grad_y.shape[0])
        for number, rows in enumerate(parts):
            part, grad = arriving.take()
            part = part.detach().requires_grad_(True)
            self.device.seed(self._stream(call.stage, number))
            with torch.enable_grad(), self.installed(call.stage, flat, trainable=True) as parameters:
                with self.outputs.recomputing(call.stage, number, flat):
                    y = call.run(part)
                self.differentiate(y, grad, [part, *parameters], total)
            del y, grad
            assert part.grad is not None
            grad_x.put(rows, part.grad)
            if len(parts) > 1:
                self.between()
        return grad_x.settled()

    # ---- pieces of a pass ------------------------------------------------------------------------------------------

    def differentiate(
        self, y: torch.Tensor, grad_y: torch.Tensor | None, leaves: list[torch.Tensor], total: GradientSum | None
    ) -> None:
        """Backward from `y` to `leaves`; gradients of parameters among them go to the sum."""
        parameters: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
        if total is None:
            torch.autograd.backward([y], None if grad_y is None else [grad_y], inputs=leaves)
            return
        with total.collecting(parameters):
            torch.autograd.backward([y], None if grad_y is None else [grad_y], inputs=leaves)

    def installed(self, owner: int | None, flat: torch.Tensor | None, *, trainable: bool) -> Any:
        """Inside, the model sees the weights of stage `owner` in `flat`; gives the list of its parameters."""
        if owner is None or flat is None:
            return _Nothing()
        return self.stages[owner].installed(flat, trainable=trainable)

    def micro_batches(self, rows: int) -> list[slice]:
        """Cuts of the step's batch, in order."""
        size = self.plan.numerics.micro_batch_size
        return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]

    def between(self) -> None:
        """Between micro-batches: look around, and let the caller stop."""
        self._tick()
        self.between_micro_batches()

    def _stream(self, stage: int, micro_batch: int) -> int:
        """A seed for dropout, from (seed, step, stage, micro-batch): the same in forward and recompute."""
        mixed = self.plan.numerics.seed & 0xFFFFFFFF
        for part in (self._step, stage, micro_batch):
            mixed = (mixed * 6364136223846793005 + part + 1442695040888963407) & (2**64 - 1)
            mixed ^= mixed >> 29
        return mixed >> 1


class _Nothing:
    """No weights to install."""

    def __enter__(self) -> list[torch.nn.Parameter]:
        return []

    def __exit__(self, *_: object) -> None:
        return None
