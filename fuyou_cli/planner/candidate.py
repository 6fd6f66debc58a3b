"""Defines `Candidate`, one set of values for the planner's knobs, and `Family`, the candidates that a search looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..spec.model import ModelSpec
from .boundary_layout import every_operator
from .fill import SHARES, TURN, may_fill
from .memory import bytes_left
from .plan_request import PlanRequest

_PIPELINES = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (3, 6), (4, 8))  # (lookahead, gradient slots), least memory first
_USUAL = (2, 2)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_FEWER = (0.8, 0.5, 0.9, 0.65, 0.3, 0.85, 0.95, 0.75, 0.7, 0.6, 0.4)  # values of `Candidate.copied`; of a large model the first
# A value of `Candidate.activations`: keep no outputs, because copying some takes longer than computing them again.
NONE_KEPT = -1.0


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Candidate:
    """One set of values for the planner's knobs. Fixed rules (`place`) derive from it which stages' tensors are in RAM."""

    lookahead: int
    gradient_slots: int
    # Share of the spare RAM that goes to optimizer states before weights (weights save more traffic per byte).
    states: float = 0.0
    defer: bool = False  # updates wait for the next forward; ignored with clipping
    # Share of the spare RAM that goes to outputs of operators first; they also get what is left at the end.
    activations: float = 0.0
    swap: float = 0.0  # share of the outputs' bytes that rest with boundaries on the ssd
    sweeps: int = 1  # sweeps per step, unless the request sets them
    norm_first: bool = False  # a first backward measures the norm, unless the request says so
    free_pages: bool = False  # RAM is left for the heap's free pages (`memory.free_pages`)
    kept_there: float = 0.0  # share of the device's spare memory that goes to outputs that stay there, before weights
    there: float = 0.0  # share of the device's spare memory that goes to whole stages (weights, gradients, states), or `TURN`
    copied: float = 1.0  # share of the outputs' bytes that RAM may get, the most FLOPs saved per byte first


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Describes all combinations of these values. Each knob's values are sorted by size, but for -1, which is no share."""

    pipelines: tuple[tuple[int, int], ...]
    states: tuple[float, ...]
    defer: tuple[bool, ...]
    activations: tuple[float, ...]
    swap: tuple[float, ...]
    kept_there: tuple[float, ...] = (0.0,)
    there: tuple[float, ...] = (0.0,)
    fewer: tuple[float, ...] = ()  # other values of `Candidate.copied`

    def __iter__(self) -> Iterator[Candidate]:
        """Yields every combination but those with fewer copies."""
        shares = product(self.states, self.defer, self.activations, self.swap, self.kept_there, self.there)
        for (ahead, slots), (states, defer, activations, swap, kept_there, there) in product(self.pipelines, shares):
            yield Candidate(
                lookahead=ahead, gradient_slots=slots, states=states, defer=defer, activations=activations, swap=swap,
                kept_there=kept_there, there=there,
            )  # fmt: skip

    def corners(self) -> Iterator[Candidate]:
        """Yields a few candidates that differ much, with a medium lookahead and number of gradient slots."""
        bare = self.bare(_USUAL if _USUAL in self.pipelines else self.pipelines[len(self.pipelines) // 2])
        ends = (dict.fromkeys((values[0], values[-1])) for values in (self.states, self.defer, self.activations, self.swap))
        for states, defer, activations, swap in product(*ends):
            yield replace(
                bare, states=states, defer=bool(defer), activations=activations, swap=swap, kept_there=self.kept_there[-1]
            )
        for there in self.there[1:]:
            yield replace(bare, there=there)

    def bare(self, pipeline: tuple[int, int]) -> Candidate:
        """Returns the candidate that keeps and defers nothing unless the recipe asks for it, and fills RAM in the usual
        order."""
        return next(iter(replace(self, pipelines=(pipeline,))))


def pipelines(request: PlanRequest, *, stages: int) -> list[tuple[int, int]]:
    """Lists (lookahead, gradient slots) for a plan without a search: the usual pair, then those that take less memory."""
    if request.lookahead is not None:
        lookahead = min(request.lookahead, stages)
        return [(lookahead, 2), (lookahead, 1)]
    return [(2, 2), (1, 2), (1, 1)]


def family(model: ModelSpec, request: PlanRequest) -> Family:
    """Returns the family. A knob has one value if the recipe sets it, or if it cannot matter."""
    stages = len(model.stages)
    if request.lookahead is not None:
        in_flight = tuple((min(request.lookahead, stages), slots) for slots in (1, 2, 3, 4, 6, 8))
    else:
        in_flight = tuple(pair for pair in _PIPELINES if pair[0] <= max(1, stages))
    # Deferring an update writes its gradients to the ssd: 2 to 4 bytes more per parameter, only to balance the work.
    may_defer = (request.clip_grad_norm is None or request.norm_first) and request.defer is None and request.gradients != "ssd"
    can_keep = request.kept is None and any(stage.operators for stage in model.stages)
    can_move = can_keep and any(every_operator(model))
    shares = _SHARES if request.boundaries is None else (0.0,)
    return Family(
        pipelines=in_flight,
        states=_SHARES if request.states is None and request.weights is None else (0.0,),
        defer=(False, True) if may_defer else (request.defer or False,),
        activations=(NONE_KEPT, *shares) if can_move and request.boundaries not in ("ssd", "gpu") else (0.0,),
        swap=_SHARES if can_move and request.boundaries not in ("cpu", "gpu") else (0.0,),
        kept_there=(0.0, 1.0) if can_keep and request.kept_there is None and bytes_left(model, request) else (0.0,),
        there=(SHARES[0], TURN, *SHARES[1:]) if may_fill(model, request) else (0.0,),
        fewer=_FEWER if can_move and request.device != "cpu" and request.boundaries not in ("ssd", "gpu") else (),
    )


def may_measure_first(model: ModelSpec, request: PlanRequest) -> bool:
    """Whether a step may have a first backward that only measures the norm, so that the second one's updates need not
    wait. It may not if gradients rest for other reasons too, if parameters are frozen, or if a model's code writes into an
    output, which both backwards may be given."""
    return (
        request.clip_grad_norm is not None
        and not request.is_swept
        and request.gradients is None
        and request.defer is None
        and not any(model.has_two_users(stage.index) for stage in model.stages)
        and not any(operator.overwritten for stage in model.stages for operator in stage.operators)
        and not model.frozen_parameters
    )


def sweep_counts(model: ModelSpec, request: PlanRequest) -> tuple[int, ...]:
    """Returns the numbers of sweeps that the planner may choose. Each divides a step's micro-batches and is at least twice the
    one before."""
    if request.sweeps is not None or request.norm_first or not model.may_sweep:
        return (1,)
    if request.numerics.lanes > 1:  # their sums under way would have to rest between sweeps
        return (1,)
    if request.numerics.router_aux_loss:  # whose slope is known once all rows were forward
        return (1,)
    micro_batches, counts = request.numerics.micro_batches, [1]
    if request.numerics.batch_size % request.numerics.micro_batch_size:
        return (1,)
    for count in range(2, micro_batches + 1):
        if micro_batches % count == 0 and count >= 2 * counts[-1]:
            counts.append(count)
    return tuple(counts)
