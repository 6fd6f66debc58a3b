"""What a stage's forward is made of, found on fake tensors: operators whose outputs can be kept, FLOPs, and the bytes that
autograd saves for backward."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from ..core.units import align_up
from ..planner.boundary_layout import OUTPUT_ALIGN
from ..spec.model import OperatorSpec, TensorSpec
from .operators import Operators, factors, is_attention, name_of

_SUMMARY_TOKENS = 32  # kernels round the tokens of attention's log-sum-exp up to this


class OperatorTrace(Operators):
    """Follows one forward of one micro-batch. `flat` holds the stage's weights, laid out as `tensors`; `names` are theirs
    within the stage."""

    def __init__(self, flat: torch.Tensor, tensors: tuple[TensorSpec, ...], names: tuple[str, ...]) -> None:
        super().__init__()
        self.flops = 0.0
        self.found: list[OperatorSpec] = []
        self.multiplied: set[str] = set()  # weights that a product was seen to use
        self._weights = flat.untyped_storage()  # held, so that its address stays its own
        self.tensors, self.names = tensors, names

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        flops, weight = self._work(func, args)
        out = func(*args, **kwargs)
        name = f"{kind} {weight.removesuffix('.weight')}" if weight else kind
        size = _attention_bytes(args[0], out) if kind == "attention" else _bytes(out)
        self.found.append(OperatorSpec(index=index, name=name, flops=flops, bytes=size))
        return out

    def beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._work(func, args)
        return func(*args, **kwargs)

    def _work(self, func: Any, args: Any) -> tuple[float, str]:
        """FLOPs of one operator, and the weight it uses ("" for none). What multiplies two activations is attention: of
        its scores causality leaves half."""
        if is_attention(func):
            query, key, value = args[:3]
            flops = float(query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
            weight = ""
        elif (pair := factors(func, args)) is not None or (pair := _grouped(func, args)) is not None:
            left, right = pair
            weight = self._weight(right) or self._weight(left)
            flops = (2.0 if weight else 1.0) * left.numel() * right.shape[-1]
            self.multiplied.add(weight)
        else:
            return 0.0, ""
        self.flops += flops
        return flops, weight

    def _weight(self, factor: torch.Tensor) -> str:
        """The weight that `factor` is a view of; "" for activations."""
        if factor.untyped_storage()._cdata != self._weights._cdata:
            return ""
        offset = factor.storage_offset()
        return next(n for n, t in zip(self.names, self.tensors, strict=True) if t.offset <= offset < t.offset + t.numel)


def _grouped(func: Any, args: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A product whose rows each use one of several matrices, as those of experts do."""
    return (args[0], args[1]) if name_of(func) == "_grouped_mm" else None


def _bytes(out: torch.Tensor) -> int:
    return out.numel() * out.element_size()


def _attention_bytes(query: torch.Tensor, outputs: Any) -> int:
    """Of the output and, per head and token, the float32 log-sum-exp that its backward needs: on any device."""
    summaries = 4 * query.shape[:-2].numel() * align_up(query.shape[-2], _SUMMARY_TOKENS)
    return align_up(_bytes(outputs[0]), OUTPUT_ALIGN) + summaries


class SavedBytes:
    """Hooks for `torch.autograd.graph.saved_tensors_hooks`: sums the storages that autograd saves, once each. What it saw
    stays alive, so it is for a look of its own."""

    def __init__(self, *excluded: Any) -> None:
        self.total = 0
        leaves = [leaf for leaf in tree_leaves(excluded) if isinstance(leaf, torch.Tensor)]
        self._seen = {leaf.untyped_storage()._cdata: leaf for leaf in leaves}

    def pack(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor
            self.total += storage.nbytes()

    def unpack(self, nothing: None) -> NoReturn:
        raise AssertionError("a look at a forward has no backward")


def unseen_expert_flops(trace: OperatorTrace, tokens: int, config: Any) -> float:
    """Of experts whose products the trace did not show, because the values of tokens choose them: each token uses the
    share of their weights that the configuration names."""
    hidden = [t for n, t in zip(trace.names, trace.tensors, strict=True) if "experts." in n and n not in trace.multiplied]
    weights = sum(tensor.numel for tensor in hidden if len(tensor.shape) >= 2)
    return 2.0 * weights * tokens * _active_share(config)


def _active_share(config: Any) -> float:
    def first(*names: str) -> int:
        found = [value for name in names if isinstance(value := getattr(config, name, None), int)]
        return found[0] if found else 1

    experts = first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return min(1.0, first("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k") / experts)
