"""Gives the values that an adapter's parameters begin with, stage after stage, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from .adapter_names import is_added, lora_names
from .injection import initial_values, initial_values_of_experts, lora_layers
from .merging import LoraWeights

# Yields a parameter of the base model as 1-D pieces of the compute dtype, from its beginning.
Pieces = Callable[[str], Iterator[torch.Tensor]]


class FirstValues:
    """Gives the values after `torch.manual_seed(seed)` of the adapter in `model`, as peft would make them."""

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self._layers = dict(lora_layers(model))
        self._drawn = initial_values(model, seed=seed)
        self._of_experts = initial_values_of_experts(model, seed=seed)
        self._held: dict[str, torch.Tensor] = {}  # drawn before they were asked for

    def of(self, names: Iterable[str], pieces: Pieces) -> dict[str, torch.Tensor]:
        """Returns the values of those of `names` that the adapter has. Each can be asked for once.

        They are drawn in the order of the model's modules. So names are best asked for in this order."""
        added = {name for name in names if is_added(name)}
        found: dict[str, torch.Tensor] = {}
        for layer in self._layers:
            a, b, magnitude = lora_names(layer)
            if a in added:
                found |= {a: self._take(a, self._drawn), b: self._take(b, self._drawn)}
            if magnitude in added:
                found[magnitude] = self._norms(layer, found[a], found[b], pieces)
        return found | {name: self._take(name, self._of_experts) for name in sorted(added - found.keys())}

    def _take(self, name: str, drawn: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
        while name not in self._held:
            one, value = next(drawn)
            self._held[one] = value
        return self._held.pop(name)

    def _norms(self, layer: str, a: torch.Tensor, b: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        """Returns the norms of the weights of each output, which DoRA's magnitudes begin as. Nothing is added to them yet: B is
        zero."""
        lora = LoraWeights(a=a.float(), b=b.float(), scaling=1.0, transposed=self._layers[layer].fan_in_fan_out)
        return lora.output_norms(pieces(f"{layer}.base_layer.weight")).to(a.dtype)
