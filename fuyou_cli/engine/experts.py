"""Which parameters one token does not reach: those of the experts that a mixture does not send it to.

transformers keeps the routed experts of a block in a module named `experts`, as tensors with one slice per expert or as a
list of modules; shared experts have other names. How many there are, and how many a token is sent to, is in the
configuration. Where either is missing, every parameter counts as active.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from ..spec.model import TensorSpec
from .skeleton import setting

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Experts of a block, and how many of them one token is sent to. A dense model has one."""

    experts: int
    chosen: int

    @classmethod
    def of(cls, text: PreTrainedConfig) -> Mixture:
        experts, chosen = _first(text, _EXPERTS), _first(text, _CHOSEN)
        return cls(experts=experts, chosen=chosen) if 0 < chosen < experts else cls(experts=1, chosen=1)

    def is_routed(self, tensor: TensorSpec) -> bool:
        return self.is_fused(tensor) or _below_experts(tensor).partition(".")[0].isdigit()

    def is_fused(self, tensor: TensorSpec) -> bool:
        """Whether `tensor` holds all experts, one slice each: a matrix of each, or a bias by its place."""
        of_each = len(tensor.shape) > 2 or bool(_below_experts(tensor))
        return self.experts > 1 and of_each and tensor.shape[0] == self.experts

    def inactive(self, tensors: Iterable[TensorSpec]) -> int:
        """Elements (padding aside) of a stage's `tensors` that the computation of one token leaves out."""
        routed = sum(tensor.numel for tensor in tensors if self.is_routed(tensor))
        return routed * (self.experts - self.chosen) // self.experts


def _below_experts(tensor: TensorSpec) -> str:
    """The tensor's name within a module named `experts`; empty elsewhere."""
    return f".{tensor.name}".partition(".experts.")[2]


def _first(text: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """The first of these that the configuration has as a number; 0 without any."""
    values = [setting(text, name) for name in names]
    return next((value for value in values if isinstance(value, int)), 0)
