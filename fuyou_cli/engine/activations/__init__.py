"""Defines what backward gets from each stage's forward: its input (`recompute`), or outputs of operators as well (`outputs`).
These are stored with the input (`swap`) or stay in the device's memory (`keep`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ...spec.model import ModelSpec
from ...spec.plan import Plan
from ..boundaries import Boundaries
from ..devices.base import Device
from ..host_memory import HostMemory
from ..moves import Waiting
from .keep import keep_places
from .outputs import KeptOutputs, Leaving, Place
from .recompute import Recompute, Run
from .swap import Swap


class Activations(Protocol):
    """Defines what happens between forward and backward of one stage."""

    def forward(self, run: Run, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Returns `run(x)` without a graph, and keeps what backward needs. `parameters`: the stage's, as installed."""

    def begin(self, micro_batch: int) -> None:
        """Starts uploading what one micro-batch kept to a separate device. Its backward comes soon."""

    def again(
        self, run: Run, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        """Returns `run(x)` with its graph, for backward. `flat`: the stage's weights; None: it has none."""

    def forget(self) -> None:
        """Gives up a step. No copy may be under way."""


def open_activations(
    *, model: ModelSpec, plan: Plan, boundaries: Boundaries, memory: HostMemory, device: Device, waiting: Waiting
) -> list[Activations]:
    """Returns the activations that the plan chose for each stage."""
    leaving: Leaving = []
    kept_there = keep_places(model, plan, device)

    def of(stage: int) -> Activations:
        with_boundary: Place = Swap(stage, boundaries=boundaries, memory=memory, device=device)
        places = dict.fromkeys(plan.stages[stage].kept, with_boundary) | kept_there[stage]
        if not places:
            return Recompute(model.stages[stage], as_backward=device.separate and model.stages[stage].kind == "block")
        return KeptOutputs(
            model.stages[stage], places,
            began=boundaries.awaits, waiting=waiting, leaving=leaving, separate=device.separate,
        )  # fmt: skip

    return [of(stage.index) for stage in model.stages]
