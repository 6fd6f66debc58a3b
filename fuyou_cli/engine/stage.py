"""A stage at run time: its parameters appear as views of whatever memory holds its weights now, and disappear again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..spec.model import StageSpec
from .anatomy import Anatomy, Slotted


class Stage:
    """One stage of the model. Between visits its parameters are the skeleton's meta parameters."""

    def __init__(self, anatomy: Anatomy, spec: StageSpec) -> None:
        self.spec = spec
        self.module = anatomy.modules[spec.index]
        self.slotted: tuple[Slotted, ...] = anatomy.parameters[spec.index]

    def call_inside(self, look: Callable[[], None]) -> list[RemovableHandle]:
        """From now on `look` is called inside the stage's forward, after each innermost module, until the handles are removed.
        A stage that is one module alone has no inside."""
        if self.module is None:
            return []
        inside = [part for part in self.module.modules() if part is not self.module and not any(part.children())]
        return [part.register_forward_hook(lambda *_: look()) for part in inside]

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
