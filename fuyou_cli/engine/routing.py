"""Watches where the tokens of a step are sent: keeps their experts from forward to the recompute of backward, compares, counts,
and adds the loss that balances them.

A recompute sends every token where forward did, because it computes the same numbers. Where a device computes others, gradients
would be of other experts than the loss: so the choices are compared, and the step ends with an error. The tokens that differ
are counted where they are computed, and asked for once, at the end of a step. The recompute knows how many rows each expert
has, so it asks the device for nothing.

The auxiliary loss is transformers' own (`load_balancing_loss_func`) over the whole batch and all layers: E * sum(f * p) over
experts, with their share f of the choices and p of the probabilities. f has no gradient, so once forward has counted it, the
gradient of the sums of probabilities is the same for every micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import RecomputeError
from ..planner.memory import kept_choices
from ..spec.plan import MicroBatch
from .anatomy import Anatomy, Installed
from .context import Context
from .devices.base import Device, Squares
from .experts import Route

_LOOK = "with train.deterministic=true a GPU computes the same numbers each time"
Roots = list[tuple[torch.Tensor, torch.Tensor]]  # where backward begins beside a stage's output, with their gradients
Real = tuple[torch.Tensor, torch.Tensor]  # which tokens are no padding, (rows, tokens) bool: in host memory, on the device
RawCounts = list[list[Any]]  # stage, mixture of it, tokens of each expert
Key = tuple[int, int, int]  # stage, mixture of it, micro-batch of a sweep


class RoutedVisit:
    """Implements `Routes` for the mixtures of a stage in one visit. `recompute`: of a backward."""

    def __init__(self, routing: Routing, stage: int, *, recompute: bool) -> None:
        self._routing, self._stage, self._recompute = routing, stage, recompute
        self._number = self._calls = self._tokens = 0
        self._real: torch.Tensor | None = None  # which tokens of this micro-batch are no padding; None: all
        self._sums: list[torch.Tensor] = []  # of the probabilities of this micro-batch

    def begin(self, number: int, part: MicroBatch) -> None:
        self._number, self._calls = number, 0
        self._real, self._tokens = self._routing.real_of(part)
        self._sums.clear()

    def of(self, chosen: torch.Tensor, experts: int) -> Route:
        key = self._stage, self._calls, self._number
        self._calls += 1
        if self._recompute:
            return Route.of(chosen, experts, self._routing.compared(key, chosen))
        if self._real is None:
            route = Route.of(chosen, experts)
            real = route.counts
        else:
            route, real = Route.counted(chosen, experts, self._real)
        self._routing.keep(key, chosen, route.counts, real)
        return route

    def saw(self, balance: Balance, logits: torch.Tensor) -> None:
        if self._recompute:
            self._sums.append(balance.summed(logits, self._real))
        else:
            balance.count(logits, self._real, self._tokens)

    def roots(self) -> Roots:
        """Returns what is differentiated beside the stage's output of this micro-batch."""
        return self._routing.roots(self._sums)


class Routing:
    """Watches the mixtures of one model. Close it to remove its hooks."""

    def __init__(self, context: Context) -> None:
        model, plan, device, network = context.model, context.plan, context.device, context.anatomy.model
        self._model, self._device, numerics = model, device, plan.numerics
        self._mixtures = [stage for stage in model.stages if stage.choices]
        self._first_choice, end = dict[int, int](), 0  # where the choices of each stage's micro-batches lie
        for stage in self._mixtures:
            if stage.goes_back:
                self._first_choice[stage.index], end = end, end + kept_choices(stage, plan.group)
        self._room = plan.group.micro_batch_tokens  # tokens of a micro-batch, at most
        self._chosen = device.empty(2 * end).view(torch.int16) if end else None
        shape = len(self._first_choice), numerics.micro_batches
        self._differ = torch.zeros(shape, dtype=torch.int32, device=device.torch_device)  # tokens, by stage and micro-batch
        self._forward_choices: dict[Key, tuple[torch.Tensor, Sequence[int]]] = {}  # choices, and rows of each expert
        self._sent: dict[tuple[int, int], NDArray[np.int64]] = {}  # tokens of each expert, by stage and mixture of it
        self._step = self._before = 0  # micro-batches of the step before this sweep
        self._real: Real | None = None  # of this sweep; None: no token is padding
        self._visit: RoutedVisit | None = None
        self._balance: Balance | None = None
        if coefficient := numerics.router_aux_loss:
            assert plan.sweeps == 1, plan.sweeps
            self._balance = Balance(network, coefficient, device)
        self._hooks = [] if self._balance is None else [each.register_forward_hook(self._saw) for each in routers(network)]

    def close(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    # ---- a step --------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        self._step = step
        if self._balance is not None:
            self._balance.begin()
        if not self._mixtures:
            return
        self._sent.clear()
        self._forward_choices.clear()
        self._differ.zero_()

    def begin_sweep(self, before: int, real: Real | None) -> None:
        """Begins a sweep. `before`: micro-batches of the step before it; `real`: of its rows."""
        self._before, self._real = before, real

    def check(self, *, changed: bool) -> None:
        """Raises RecomputeError if a recompute so far chose other experts than its forward. Waits for the device. `changed`: an
        update of the step has begun."""
        if not self._forward_choices:
            return
        found, micro_batches = self._device.numbers(self._differ).result(), self._differ.shape[1]
        for place, tokens in enumerate(found):
            if tokens:
                name, number = self._model.stages[list(self._first_choice)[place // micro_batches]].name, place % micro_batches
                what = f"sends {int(tokens)} tokens of micro-batch {number + 1} to other experts in backward than in forward"
                raise RecomputeError(f"step {self._step}: {name} {what}", hint=_LOOK, changed=changed)

    def counts(self) -> dict[str, tuple[int, ...]] | None:
        """Returns how many tokens of the step each expert got, padding not counted, by mixture in running order; None: the
        model has none."""
        if not self._mixtures:
            return None
        return self.named_counts(self.raw_counts())

    def raw_counts(self) -> RawCounts:
        """Returns for other ranks how many tokens of the step each expert got, by stage and mixture of it."""
        return [[stage, mixture, counts.tolist()] for (stage, mixture), counts in self._sent.items()]

    def named_counts(self, raw: RawCounts) -> dict[str, tuple[int, ...]]:
        """Returns such counts by mixture in running order."""
        several = {stage for stage, mixture, _ in raw if mixture}
        return {
            f"{self._model.stages[stage].name}{f' {mixture + 1}' if stage in several else ''}": tuple(counts)
            for stage, mixture, counts in sorted(raw)
        }

    def aux_loss(self) -> float | None:
        """Returns the step's auxiliary loss, without its coefficient; None: there is none. Waits for the device."""
        return None if self._balance is None else self._balance.loss().result()[0]

    def share(self, gather: Callable[[Any], list[Any]]) -> None:
        """Adds up what forward counted for the auxiliary loss on all ranks, which backward needs."""
        if self._balance is not None:
            self._balance.add_up(gather)

    # ---- a visit -------------------------------------------------------------------------------------------------

    @contextmanager
    def visit(self, stage: int, parameters: Installed, *, recompute: bool) -> Iterator[RoutedVisit | None]:
        """Watches the mixtures of a stage, inside; None if it has none. `parameters`: of the stage, as installed."""
        if not parameters.banks:
            yield None
            return
        self._visit = visit = RoutedVisit(self, stage, recompute=recompute)
        for bank in parameters.banks:
            bank.routes = visit
        try:
            yield visit
        finally:
            self._visit = None

    def real_of(self, part: MicroBatch) -> tuple[torch.Tensor | None, int]:
        """Returns which tokens of a micro-batch are no padding (None: all), and how many."""
        if self._real is None:
            return None, part.tokens
        host, on_device = self._real
        return part.of(on_device).reshape(-1), int(part.of(host).sum())

    def keep(self, key: Key, chosen: torch.Tensor, counts: Sequence[int], real: Sequence[int]) -> None:
        """Takes what forward chose. `counts`: rows of each expert; `real`: those that are no padding."""
        stage, mixture, number = key
        sent = self._sent.setdefault((stage, mixture), np.zeros(len(counts), np.int64))
        sent += np.array(real, np.int64)
        if stage in self._first_choice:
            assert self._chosen is not None
            begin = self._first_choice[stage] + number * self._model.stages[stage].choices * self._room
            begin += sum(self._forward_choices[stage, before, number][0].numel() for before in range(mixture))
            place = self._chosen[begin : begin + chosen.numel()].view(chosen.shape)
            place.copy_(chosen)
            self._forward_choices[key] = place, counts

    def compared(self, key: Key, chosen: torch.Tensor) -> Sequence[int]:
        """Counts the tokens that a recompute sends elsewhere. Returns the rows of each expert in forward."""
        stage, _, number = key
        of_forward, counts = self._forward_choices[key]
        differing = (of_forward != chosen.to(of_forward.dtype)).any(-1).sum(dtype=torch.int32)
        place = self._differ[list(self._first_choice).index(stage), self._before + number]
        torch.maximum(place, differing, out=place)
        return counts

    # ---- the auxiliary loss --------------------------------------------------------------------------------------

    def _saw(self, router: nn.Module, args: Any, output: Any) -> None:
        if self._visit is not None and self._balance is not None:
            self._visit.saw(self._balance, output[self._balance.place] if isinstance(output, tuple) else output)

    def roots(self, sums: Sequence[torch.Tensor]) -> Roots:
        """Returns sums of probabilities with their gradients."""
        return [] if self._balance is None else [(each, self._balance.slope()) for each in sums]


class Balance:
    def __init__(self, model: PreTrainedModel, coefficient: float, device: Device) -> None:
        self.place = _recorder(model).index  # of the logits in what a router returns
        self._experts, self._choices, self._coefficient, self._device = *_sizes(model), coefficient, device
        self._counts = torch.zeros(self._experts, dtype=torch.int64, device=device.torch_device)
        self._sums = torch.zeros(self._experts, dtype=torch.float64, device=device.torch_device)  # of probabilities
        self._rows = 0  # tokens of all layers, padding not counted
        self._slope: torch.Tensor | None = None

    def begin(self) -> None:
        self._counts.zero_()
        self._sums.zero_()
        self._rows, self._slope = 0, None

    def add_up(self, gather: Callable[[Any], list[Any]]) -> None:
        """Adds up all ranks' counts, and sums in their order."""
        found = gather([self._rows, self._counts.tolist(), self._sums.tolist()])
        rows, counts, sums = zip(*found, strict=True)
        self._rows = sum(rows)
        self._counts.copy_(torch.tensor(counts).sum(0))
        self._sums.copy_(torch.tensor(sums, dtype=torch.float64).sum(0))

    @torch.no_grad()
    def count(self, logits: torch.Tensor, real: torch.Tensor | None, tokens: int) -> None:
        """Adds a router's micro-batch. logits: (tokens, experts); `tokens`: how many are real."""
        logits = logits.detach()
        chosen = torch.topk(logits.softmax(-1), self._choices, dim=-1).indices
        ones = torch.ones_like(chosen) if real is None else real.to(torch.int64).unsqueeze(1).expand_as(chosen)
        self._counts.scatter_add_(0, chosen.reshape(-1), ones.reshape(-1))
        self._sums += self.summed(logits, real)
        self._rows += tokens

    def summed(self, logits: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        found = logits.softmax(-1).float()
        return (found if real is None else found * real.unsqueeze(1)).sum(0)

    def slope(self) -> torch.Tensor:
        """Returns the gradient of every sum of probabilities, once forward has counted all choices."""
        if self._slope is None:
            self._slope = (self._counts.double() * (self._coefficient * self._experts / self._rows**2)).float()
        return self._slope

    def loss(self) -> Squares:
        """Asks for the loss of the step, without its coefficient."""
        return self._device.numbers((self._counts * self._sums).sum() * (self._experts / self._rows**2))


def _recorder(model: PreTrainedModel) -> Any:
    """Returns what says where transformers takes a router's logits: the model, or the text part of one that also takes images.
    None: nothing says so."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    said = ((getattr(part, "_can_record_outputs", None) or {}).get("router_logits") for part in parts)
    return next((found for found in said if isinstance(getattr(found, "target_class", None), type)), None)


def routers(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Returns the routers whose logits the auxiliary loss of transformers is of, each with its name."""
    recorder = _recorder(model)
    if recorder is None:
        return {}
    named = model.named_modules()
    return {
        module: name
        for name, module in named
        if isinstance(module, recorder.target_class) and (recorder.layer_name is None or recorder.layer_name in name)
    }


def _sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Returns how many experts a mixture has, and how many of them a token is sent to, as the auxiliary loss has it; 0 if the
    model has none."""
    has_one, text = hasattr(sys.modules.get(type(model).__module__), "load_balancing_loss_func"), model.config.get_text_config()
    experts, choices = (getattr(model, name, getattr(text, name, None)) for name in ("num_experts", "num_experts_per_tok"))
    return (experts, choices) if has_one and isinstance(experts, int) and isinstance(choices, int) else (0, 0)


def without_aux_loss(anatomy: Anatomy) -> str:
    """Says why a model cannot be trained with the auxiliary loss; empty if it can."""
    model = anatomy.model
    kind, found = type(model).__name__, routers(model)
    if not anatomy.has_experts:
        return f"{kind} has no routed experts"
    if not found or not _sizes(model)[0]:
        return f"transformers has no auxiliary loss for {kind}"
    inside = {part: name for router, name in found.items() for part in router.modules()}
    for stage in anatomy.stages:
        for slotted in stage.parameters:
            holder = slotted.places[0][0]
            if slotted.spec.frozen and holder in inside:
                return f"{inside[holder]} is a router that does not learn"
    return ""
