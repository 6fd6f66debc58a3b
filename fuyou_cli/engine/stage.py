"""A stage at run time: its parameters appear as views of whatever memory holds its weights now, and disappear again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..spec.model import StageSpec
from .anatomy import Anatomy, Slotted


class Stage:
    """One stage of the model. Between visits its parameters are the skeleton's meta parameters."""

    def __init__(self, anatomy: Anatomy, spec: StageSpec) -> None:
        self.spec = spec
        self.module = anatomy.modules[spec.index]
        self.slotted: tuple[Slotted, ...] = anatomy.parameters[spec.index]

    @contextmanager
    def installed(self, flat: torch.Tensor, *, trainable: bool) -> Iterator[list[nn.Parameter]]:
        """Inside, every place that reads one of the stage's parameters sees a view of `flat` (1-D, spec.params elements)."""
        replaced: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        parameters: list[nn.Parameter] = []
        try:
            for slotted in self.slotted:
                tensor = slotted.spec
                view = flat[tensor.offset : tensor.offset + tensor.numel].view(tensor.shape)
                parameter = nn.Parameter(view, requires_grad=trainable)
                parameters.append(parameter)
                for holder, attribute in slotted.places:
                    replaced.append((holder, attribute, holder._parameters[attribute]))
                    holder._parameters[attribute] = parameter
            yield parameters
        finally:
            for holder, attribute, skeleton in replaced:
                holder._parameters[attribute] = skeleton
