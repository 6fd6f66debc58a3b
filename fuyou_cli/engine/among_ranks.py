"""What a step does among several ranks: which stages are computed here, and what all ranks learn before its updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ..core.errors import NumericsError, RecomputeError, UsageError
from ..spec.plan import Plan
from .anatomy import Anatomy
from .link import Link, made_by
from .passes import BlockPasses
from .ranks import Ranks
from .streamed import Call, sources_of
from .visits import Visits

Refusal = NumericsError | RecomputeError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTotals:
    """What all ranks computed in a step. `squares`: by stage; `by_tensor`: has the exact sum of all tensors' squares; `sent`:
    as `Routing.raw_counts`; `skipped`: why the step updates nothing."""

    loss: float
    squares: dict[int, float]
    by_tensor: list[float]
    sent: list[list[Any]]
    skipped: str


class AmongRanks:
    """Runs calls of stages here or leaves them to others, and meets the others once a step. `made`: what calls return."""

    def __init__(self, ranks: Ranks, visits: Visits, anatomy: Anatomy) -> None:
        assert not visits.plan.batch_on_device, "whole batches cross host memory between ranks"
        assert (visits.model.rank, max(visits.model.owners)) == (ranks.rank, ranks.size - 1), (ranks.rank, ranks.size)
        self.ranks, self.model = ranks, visits.model
        self._agree(visits.plan)
        self.made = made_by(anatomy, self.model)
        self.link = visits.link = Link(
            ranks, self.model, self.made, lend=visits.crossings.batches.lend, wait_until=visits.residency.wait_until
        )
        self._refused: tuple[int, Refusal] | None = None  # the first of this step, and its stage

    def _agree(self, plan: Plan) -> None:
        """Raises UsageError if ranks would send each other other messages, or compute other numbers, than they expect."""
        mine = {name: getattr(plan, name) for name in ("sweeps", "norm_first", "clip_grad_norm")}
        mine |= {"numerics": repr(plan.numerics), "owners": list(self.model.owners)}
        first, *others = self.ranks.gather(mine)
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    what = f"{name} is {value} on rank 0 and {other[name]} on rank {rank}"
                    raise UsageError(f"the ranks planned unlike steps: {what}", hint="let one rank choose it for all")

    # ---- calls of stages -----------------------------------------------------------------------------------------

    def forward(self, passes: BlockPasses, call: Call, x: torch.Tensor) -> torch.Tensor:
        """Returns a stage's output. What nobody here reads is zeros that take no memory."""
        link, stage = self.link, call.stage
        if self.model.stages[stage].away:
            awaited = link.awaited(stage, backward=False)
            return link.zeros(stage, x) if awaited is None else awaited
        y = passes.forward(call, x)
        return link.zeros(stage, y) if link.give_whole(stage, y, backward=False) else y

    def backward(self, passes: BlockPasses, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient of a stage's input. `grad_y`: where another rank computes what follows, it comes from there."""
        link, stage = self.link, call.stage
        if self.model.stages[stage].away:
            if link.follows_here(stage):
                link.give_whole(stage, grad_y, backward=True)
            return link.zeros_before(stage, grad_y)
        awaited = link.awaited(stage, backward=True)
        return passes.backward(call, ids, grad_y if awaited is None else awaited)

    def trace_input(self, stage: int, edge: GradientEdge) -> None:
        """Follows a stage's input, once, to the stages that the model takes it from."""
        if not self.link.knows_sources(stage):
            sources, direct = sources_of(edge)
            self.link.note_sources(stage, sources, direct=direct)

    def turn(self, edge: GradientEdge, hidden: torch.Tensor) -> None:
        """Follows the last hidden state to its stages, and waits for it where the head is here and the stage before is not."""
        first = next(stage.index for stage in self.model.stages if stage.kind == "head")
        if not self.link.knows_sources(first):
            self.link.note_sources(first, sources_of(edge)[0], direct=False)
        self.link.all_arrived(hidden)

    # ---- once a step ---------------------------------------------------------------------------------------------

    def refuse(self, error: Refusal, stage: int) -> None:
        """Notes why this step cannot be applied. All ranks learn it when they meet. `stage`: where that was found."""
        self._refused = self._refused or (stage, error)

    def meet(
        self, *, loss: float, squares: Mapping[int, float], by_tensor: Mapping[int, Sequence[float]], sent: list[list[Any]],
        changed: bool, may_skip: bool,
    ) -> StepTotals:  # fmt: skip
        """Returns what all ranks computed. Raises what any of them refused, on all of them, unless the step may be skipped."""
        refused, self._refused = self._refused, None
        mine = {
            "loss": loss,
            "squares": sorted(squares.items()),
            "by_tensor": exact_parts([square for of_rank in by_tensor.values() for square in of_rank]),
            "sent": sent,
            "changed": changed,
            "refused": None if refused is None else [refused[0], *_words(refused[1])],
        }
        of_ranks = self.ranks.gather(mine)
        # As one process would find it: from the head down.
        reasons = sorted(
            (of_rank["refused"] for of_rank in of_ranks if of_rank["refused"] is not None), key=lambda reason: -reason[0]
        )
        if reasons and not (may_skip and all(kind == NumericsError.__name__ for _, kind, _, _ in reasons)):
            _, kind, message, hint = reasons[0]
            error = NumericsError if kind == NumericsError.__name__ else RecomputeError
            raise error(message, hint=hint, changed=any(of_rank["changed"] for of_rank in of_ranks))
        return StepTotals(
            loss=of_ranks[self.model.owners[-1]]["loss"],
            squares={stage: square for of_rank in of_ranks for stage, square in of_rank["squares"]},
            by_tensor=[part for of_rank in of_ranks for part in of_rank["by_tensor"]],
            sent=[count for of_rank in of_ranks for count in of_rank["sent"]],
            skipped=reasons[0][2] if reasons else "",
        )


def _words(error: Refusal) -> list[str | None]:
    return [type(error).__name__, error.message, error.hint]


def exact_parts(values: Sequence[float]) -> list[float]:
    """Returns a few numbers whose exact sum is that of `values`, so that ranks can add up theirs exactly. Of values that are
    not finite there is none."""
    parts: list[float] = []
    if all(map(math.isfinite, values)):
        while (left := math.fsum([*values, *(-part for part in parts)])) != 0.0:
            parts.append(left)
    return parts
