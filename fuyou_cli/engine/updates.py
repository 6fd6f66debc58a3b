"""From a stage and a step to one update request: homes, segments, scalars. And the learning rate of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..spec.model import Dtype, ModelSpec, StageSpec
from ..spec.plan import Span, StagePlan, StateTensor
from ..swap.daemon import Home, Result, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """AdamW as the recipe asks for it."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Linear warmup, then constant, linear, cosine or wsd (constant, then linear decay over the last `decay_steps`)."""

    name: str
    peak: float
    warmup_steps: int
    total_steps: int
    min_ratio: float
    decay_steps: int = 0

    def at(self, step: int) -> float:
        """The rate of step `step` (1 for the first)."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, progress)
        if self.name == "constant":
            factor = 1.0
        elif self.name == "linear":
            factor = 1.0 - (1.0 - self.min_ratio) * progress
        elif self.name == "cosine":
            factor = self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            into_decay = step - (self.total_steps - self.decay_steps)
            decayed = max(0.0, into_decay / self.decay_steps) if self.decay_steps else 0.0
            factor = 1.0 - (1.0 - self.min_ratio) * min(1.0, decayed)
        return self.peak * factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalars:
    """What one step's AdamW needs besides tensors."""

    optimizer: Optimizer
    lr: float
    step: int  # 1 for the first: bias corrections
    gradient_scale: float = 1.0  # the clipping factor
    skipped: bool = False  # every value stays as it is, and is this step's


def build_update(
    *,
    stage: StageSpec,
    plan: StagePlan,
    model: ModelSpec,
    accumulate_dtype: Dtype,
    turns: tuple[int, int],
    copied: bool,
    zero_moments: bool,
    zero_remainder: bool,
    weights: Span,
    gradients: Span | None,
    scalars: Scalars,
    priority: int,
) -> tuple[dict[str, Any], list[Segment]]:
    """The fields of an `Update` and its segments. `turns`: of the stage's ring, whose places are read and written; `copied`:
    what rests in RAM is written too. `gradients` is the slot they were summed in; None when they rest in their RAM home or
    on the ssd."""
    source, target = turns

    def offset(tensor: StateTensor, turn: int) -> int | None:
        extent = plan.extent(tensor, turn)
        return None if extent is None else extent.offset

    def home(tensor: StateTensor, ram: Span | None, *, zero: bool) -> Home:
        new = offset(tensor, target)
        if ram is not None and new is not None:
            return Home(arena=ram.offset, source=None, target=new if copied else None)
        return Home(arena=None, source=None if zero else offset(tensor, source), target=new)

    summed_in = gradients if gradients is not None else plan.gradients_ram
    optimizer = scalars.optimizer
    fields: dict[str, Any] = dict(
        params=stage.params,
        weights_dtype=model.compute_dtype,
        gradients_dtype=accumulate_dtype,
        weights=weights.offset,
        weights_target=offset("weights", target) if plan.weights == "ssd" or copied else None,
        gradients=None if summed_in is None else summed_in.offset,
        gradients_source=plan.gradients_extent.offset if summed_in is None and plan.gradients_extent else None,
        remainder=home("remainder", plan.remainder_ram, zero=zero_remainder),
        momentum=home("momentum", plan.momentum_ram, zero=zero_moments),
        variance=home("variance", plan.variance_ram, zero=zero_moments),
        lr=scalars.lr,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.epsilon,
        gradient_scale=scalars.gradient_scale,
        step=scalars.step,
        priority=priority,
        label=stage.index,
    )
    # Parameters of no segment keep every value they have: a step that is skipped moves the same bytes as any other, so that
    # what rests where, and what is committed when, is the same as well.
    return fields, [] if scalars.skipped else segments_of(stage, weight_decay=optimizer.weight_decay)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Of one stage as it rests on the store (`kernels.checksum`); None where a tensor is not there in this generation."""

    weights: int | None = None
    remainder: int | None = None
    momentum: int | None = None
    variance: int | None = None


def sums_of(result: Result, plan: StagePlan, *, copied: bool) -> Sums:
    """What an update wrote. `copied`: also of what rests in RAM."""
    states = copied or plan.states == "ssd"
    return Sums(
        weights=result.weights_sum if copied or plan.weights == "ssd" else None,
        remainder=result.remainder_sum if states and plan.remainder_at is not None else None,
        momentum=result.momentum_sum if states else None,
        variance=result.variance_sum if states else None,
    )


def segments_of(stage: StageSpec, *, weight_decay: float) -> list[Segment]:
    """Runs of parameters with the same settings. Padding between tensors joins a run: its gradients are zero, so that
    its weights and moments stay zero."""
    segments: list[Segment] = []
    for tensor in stage.tensors:
        decay = weight_decay if tensor.decay else 0.0
        if segments and segments[-1].weight_decay == decay:
            first = segments[-1].first
            segments[-1] = Segment(first=first, count=tensor.offset + tensor.numel - first, weight_decay=decay)
        else:
            segments.append(Segment(first=tensor.offset, count=tensor.numel, weight_decay=decay))
    return segments
