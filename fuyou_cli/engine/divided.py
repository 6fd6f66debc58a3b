"""Divides a batch into micro-batches of unlike length, and finds how the model's own forward calls its stages for each.

Positions and masks depend on the length of a row. The model's own forward runs on the whole batch, for what it does between
stages. For a micro-batch that is shorter it runs once more with the stages left out, on one row of zeros, and only the
arguments that it gives its stages are kept. Positions of padding repeat the last one, so that code that looks for the longest
position finds that of the micro-batch's longest row (rope types longrope and dynamic).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..spec.micro_batch import MicroBatch
from .calls import Made, StageCall, one_row_masks, own_forward, stage_calls
from .documents import Documents
from .module_state import ModuleState
from .row_lengths import turns

Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Divided:
    """Describes a batch, or a sweep's share of one. `documents`: of every row, if the model keeps them apart; `step`: of
    `documents.attended`; `calls`: of the stages for each micro-batch, None for one that is computed as the whole is."""

    parts: tuple[MicroBatch, ...]
    documents: Documents | None = None
    step: int = 0
    calls: tuple[Sequence[StageCall] | None, ...] = ()

    def runs(self, number: int, call: StageCall, run_of: Callable[[StageCall], Run]) -> Sequence[Run] | None:
        """Returns what computes each micro-batch of one call of a stage. `number`: of the call in the forward; `call`: as the
        whole batch has it."""
        if self.documents is not None:
            of_rows = (self.documents[part.rows] for part in self.parts)
            return [run_of(replace(call, documents=documents, document_step=self.step)) for documents in of_rows]
        if not any(self.calls):
            return None
        whole = run_of(call)
        # A compiled block's call is the one of the whole batch.
        shorter = (None if calls is None else replace(calls[number], original=call.original) for calls in self.calls)
        return [whole if other is None else run_of(other) for other in shorter]


class CallsByLength:
    """Finds how a model's own forward calls its stages for rows of any length."""

    def __init__(self, model: PreTrainedModel, modules: Mapping[nn.Module, str], state: ModuleState) -> None:
        """`modules`: the stages, whose own forwards may be replaced; `state`: of what lies between them."""
        self.model, self._modules, self._state = model, modules, state
        self._by_length = bool(turns(model))
        self._made: list[Made] = []  # what each call returns

    def of(
        self, parts: Sequence[MicroBatch], width: int, placed: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> tuple[Sequence[StageCall] | None, ...]:
        """Returns the calls of each micro-batch; None for one that is as wide as the whole batch, `width` tokens, if its
        longest row does not matter. `placed`: brings a tensor to where stages compute; `device`: where the model's own forward
        computes."""
        found: dict[tuple[int, int], list[StageCall]] = {}
        calls: list[Sequence[StageCall] | None] = []
        for part in parts:
            if part.width == width and not self._by_length:
                calls.append(None)
                continue
            key = part.width, part.longest if self._by_length else part.width
            if key not in found:
                found[key] = [call.placed(placed) for call in self._called(*key, device)]
            calls.append(found[key])
        return tuple(calls)

    def _called(self, width: int, longest: int, device: torch.device) -> list[StageCall]:
        if not self._made:
            self._made = self._outputs()
        calls: list[StageCall] = []

        def left_out(module: nn.Module, name: str) -> Callable[..., Any]:
            original = own_forward(module)

            def forward(*args: Any, **kwargs: Any) -> Any:
                call, x = StageCall.split(name, original, args, kwargs)
                calls.append(call)
                return self._made[len(calls) - 1].like(x, name)

            return forward

        self._state.put_back()
        ids = torch.zeros(1, width, dtype=torch.long, device=device)
        positions = torch.arange(width, device=device).clamp(max=longest - 1).unsqueeze(0)
        with torch.no_grad(), one_row_masks(self.model), _instead(self._modules, left_out):
            self.model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
        return calls

    def _outputs(self) -> list[Made]:
        """Finds what each call returns, on fake tensors."""
        made: list[Made] = []
        with _instead(self._modules, lambda module, name: own_forward(module)):
            stage_calls(self.model, self._modules, shape=(1, 3), made=made)
        return made


@contextmanager
def _instead(modules: Mapping[nn.Module, str], forward_of: Callable[[nn.Module, str], Callable[..., Any]]) -> Iterator[None]:
    """Gives modules other forwards inside the context, and then those that they had on the instance."""
    before = {module: module.__dict__.get("forward") for module in modules}
    for module, name in modules.items():
        module.__dict__["forward"] = forward_of(module, name)
    try:
        yield
    finally:
        for module, forward in before.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
