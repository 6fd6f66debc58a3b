"""Builds one update request for a stage and a step: homes, segments, scalars."""

from __future__ import annotations

from dataclasses import dataclass

from ..planner.ledgers import Record, update_priority
from ..spec.model import StageSpec, StateLayout
from ..spec.plan import Numerics, Span, StagePlan, StateTensor
from ..swap.daemon import Home, Result, Segment, Update


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Describes the optimizer as the recipe asks for it. Lion has no epsilon."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalars:
    """What one step's updates need besides tensors."""

    optimizer: Optimizer
    lr: float
    step: int  # 1 for the first step, for bias corrections
    gradient_scale: float = 1.0  # the clipping factor
    skipped: bool = False  # every value stays as it is and counts as this step's


def build_update(
    record: Record, stage: StageSpec, plan: StagePlan, *, numerics: Numerics, layout: StateLayout, target: int, copied: bool
) -> Update:
    """Returns the request for the update of one stage, whose `record.due` holds its `Scalars`. `target`: the place of the
    stage's pair to write; `copied`: also write what rests in RAM."""
    at = plan.trained_ram or record.span
    assert at is not None
    scalars: Scalars = record.due
    optimizer, summed_in = scalars.optimizer, record.gradient_slot or plan.gradients_ram  # neither: gradients rest on the ssd

    def offset(tensor: StateTensor, turn: int) -> int | None:
        extent = plan.extent(tensor, turn)
        return None if extent is None else extent.offset

    def home(tensor: StateTensor, ram: Span | None, *, zero: bool) -> Home:
        new = offset(tensor, target)
        if ram is not None and new is not None:
            return Home(arena=ram.offset, source=None, target=new if copied else None)
        return Home(arena=None, source=None if zero else offset(tensor, record.turn), target=new)

    return Update(
        params=stage.trained,
        weights_dtype=layout.weights,
        gradients_dtype=numerics.accumulate_dtype,
        states_dtype=layout.dtype,
        rule=layout.rule,
        weights=at.offset,
        weights_target=offset("weights", target) if plan.writes_weights or copied else None,
        gradients=None if summed_in is None else summed_in.offset,
        gradients_source=plan.gradients_extent.offset if summed_in is None and plan.gradients_extent else None,
        remainder=home("remainder", plan.remainder_ram, zero=record.zero_remainder),
        momentum=home("momentum", plan.momentum_ram, zero=record.zero_moments),
        variance=home("variance", plan.variance_ram, zero=record.zero_moments),
        lr=scalars.lr,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.epsilon,
        gradient_scale=scalars.gradient_scale,
        step=scalars.step,
        priority=update_priority(plan),
        label=stage.index,
        seed=numerics.seed,
        # Parameters outside all segments keep their values. So a skipped step moves the same bytes as any other, and homes and
        # commits stay the same.
        segments=[] if scalars.skipped else segments_of(stage, weight_decay=optimizer.weight_decay),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Checksums of one stage as it rests on the store (`kernels.checksum`). A sum is None if that tensor is not there in
    this generation."""

    weights: int | None = None
    frozen: int | None = None
    remainder: int | None = None
    momentum: int | None = None
    variance: int | None = None


def sums_of(result: Result, plan: StagePlan, before: Sums | None, *, copied: bool) -> Sums:
    """Returns the checksums of what an update wrote, and of what it left as it was `before`. `copied`: also of what rests in
    RAM."""
    states = copied or plan.states == "ssd"
    return Sums(
        weights=result.weights_sum if copied or plan.writes_weights else None,
        frozen=None if before is None else before.frozen,
        remainder=result.remainder_sum if states and plan.remainder_at is not None else None,
        momentum=result.momentum_sum if states else None,
        variance=result.variance_sum if states and plan.variance_at is not None else None,
    )


def segments_of(stage: StageSpec, *, weight_decay: float) -> list[Segment]:
    """Joins consecutive trained parameters with the same settings. Padding is part of a segment: its gradients are zero, so its
    weights stay zero."""
    segments: list[Segment] = []
    for tensor in stage.trained_tensors:
        decay = weight_decay if tensor.decay else 0.0
        if segments and segments[-1].weight_decay == decay:
            first = segments[-1].first
            segments[-1] = Segment(first=first, count=tensor.offset + tensor.numel - first, weight_decay=decay)
        else:
            segments.append(Segment(first=tensor.offset, count=tensor.numel, weight_decay=decay))
    return segments
