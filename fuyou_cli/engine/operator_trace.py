"""Finds what a stage's forward consists of, on fake tensors: operators whose outputs can be kept, those whose outputs backward
never reads, and FLOPs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..core.units import align_up
from ..planner.boundary_layout import DEVICE_ALIGN, OUTPUT_ALIGN, SUMMARY_TOKENS
from ..spec.model import ExpertWork, OperatorSpec, TensorSpec
from .activations.operators import Operators, factors, is_attention, name_of
from .experts import Route, work_of

_FLAT_PRODUCTS = ("mm", "addmm", "experts")
# Operators whose results do not depend on the values of their arguments.
_SHAPE_ONLY = ("empty", "zeros", "ones", "new_empty", "new_zeros", "new_ones")


class OperatorTrace(Operators):
    """Traces one forward of `x`. `flat` holds the stage's weights, laid out as `tensors`; `names` are their names within the
    stage."""

    def __init__(self, x: torch.Tensor, flat: torch.Tensor, tensors: tuple[TensorSpec, ...], names: tuple[str, ...]) -> None:
        super().__init__()
        self.flops = 0.0  # of all operators
        self.expert_work: ExpertWork | None = None
        self.choices = self.experts = 0  # that a token is sent to, of all mixtures; in one of them at most
        self.found: list[OperatorSpec] = []
        self._weights = flat.untyped_storage()  # held, so that no other storage gets its address
        self._influence = _Influence()
        self._input, self._saved = x.untyped_storage(), dict[int, Any]()  # storages, by address
        # By storage (held, so that no other gets its address): indexes in `found`.
        self._outputs: dict[int, tuple[Any, int]] = {}
        self.tensors, self.names = tensors, names

    @property
    def unneeded(self) -> tuple[OperatorSpec, ...]:
        """Returns the products with a weight for which autograd saved nothing that depends on their value."""
        needed = self._influence.needed
        return tuple(o for o in self.found if o.index not in needed and o.weight >= 0 and o.kind in _FLAT_PRODUCTS)

    def needs_all(self) -> None:
        """Notes that it is not known what backward reads."""
        self._influence.needed |= {operator.index for operator in self.found}
        self._saved.clear()

    def of(self, chosen: torch.Tensor, experts: int) -> Route:
        """Notes a mixture, whose experts ask for their route here."""
        self.choices, self.experts = self.choices + chosen.shape[-1], max(self.experts, experts)
        return Route.of(chosen, experts)

    def saved(self, tensor: torch.Tensor) -> None:
        """Notes that autograd saves `tensor` for backward."""
        self._influence.look_at(tensor)
        self._saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes of what autograd saved beside weights and input, as a device's allocator rounds them; 0 if it is
        not known what backward reads."""
        brought = (self._weights._cdata, self._input._cdata)
        return sum(align_up(storage.nbytes(), DEVICE_ALIGN) for key, storage in self._saved.items() if key not in brought)

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        flops, weight, offset = self._work(func, args)
        out = func(*args, **kwargs)
        self._influence.pass_on((args, kwargs), out, by=index)
        name = f"{kind} {weight.removesuffix('.weight')}" if weight else kind
        size = _attention_bytes(args[0], out) if kind == "attention" else _bytes(out)
        self._outputs |= {leaf.untyped_storage()._cdata: (leaf.untyped_storage(), len(self.found)) for leaf in _tensors(out)}
        self.found.append(OperatorSpec(index=index, name=name, flops=flops, bytes=size, weight=offset))
        return out

    def beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._work(func, args)
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._overwrites(_tensors((args, kwargs)))
        if not name_of(func).startswith(_SHAPE_ONLY):
            written = (args, kwargs) if func._schema.is_mutable else ()
            self._influence.pass_on((args, kwargs), (out, written))
        return out

    def _overwrites(self, tensors: list[torch.Tensor]) -> None:
        """Notes that an operator writes into some of these tensors."""
        for tensor in tensors:
            _, place = self._outputs.get(tensor.untyped_storage()._cdata, (None, None))
            if place is not None:
                self.found[place] = replace(self.found[place], overwritten=True)

    def _work(self, func: Any, args: Any) -> tuple[float, str, int]:
        """Returns the FLOPs of one operator, the weight it uses, and where that weight begins ("" and -1 for none). A product
        of two activations is attention; a causal mask leaves half of its scores."""
        weight, offset = "", -1
        if is_attention(func):
            query, key, value = args[:3]
            flops = float(query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
        elif (routed := work_of(func, args)) is not None:
            work, offset = routed
            flops = work.flops
            tensor = next(n for n, tensor in enumerate(self.tensors) if tensor.offset == offset)
            weight = re.sub(r"\.\d+\.", ".", self.names[tensor])  # of all experts, not of the first one
            work = replace(work, frozen_flops=flops if self.tensors[tensor].frozen else 0.0)
            self.expert_work = work if self.expert_work is None else self.expert_work + work
        elif (pair := factors(func, args)) is not None:
            left, right = pair
            weight, offset = max(self._weight(left), self._weight(right), key=lambda found: found[1])
            flops = (2.0 if weight else 1.0) * left.numel() * right.shape[-1]
        else:
            return 0.0, "", -1
        self.flops += flops
        return flops, weight, offset

    def _weight(self, factor: torch.Tensor) -> tuple[str, int]:
        """Returns the weight that `factor` is a view of, and where it begins; "" and -1 for activations."""
        if factor.untyped_storage()._cdata != self._weights._cdata:
            return "", -1
        at = int(factor.storage_offset())
        name = next(n for n, t in zip(self.names, self.tensors, strict=True) if t.offset <= at < t.offset + t.numel)
        return name, at


class _Influence:
    """Tracks which operators the values in a storage depend on, and which of them a saved tensor depends on."""

    def __init__(self) -> None:
        self.needed: set[int] = set()
        self._of: dict[int, tuple[Any, frozenset[int]]] = {}  # by storage, held so that no other gets its address

    def pass_on(self, given: Any, made: Any, *, by: int | None = None) -> None:
        """Notes that an operator made `made` from `given`, or wrote into it."""
        passed = frozenset().union(*(self._on(leaf) for leaf in _tensors(given)), () if by is None else (by,))
        for leaf in _tensors(made):
            storage = leaf.untyped_storage()
            self._of[storage._cdata] = (storage, self._on(leaf) | passed)

    def look_at(self, tensor: torch.Tensor) -> None:
        self.needed |= self._on(tensor)

    def _on(self, tensor: torch.Tensor) -> frozenset[int]:
        return self._of.get(tensor.untyped_storage()._cdata, (None, frozenset()))[1]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _bytes(out: torch.Tensor) -> int:
    return out.numel() * out.element_size()


def _attention_bytes(query: torch.Tensor, outputs: Any) -> int:
    """Returns the bytes of the output and, per head and token, of the float32 log-sum-exp that backward needs on any device."""
    summaries = 4 * query.shape[:-2].numel() * align_up(query.shape[-2], SUMMARY_TOKENS)
    return align_up(_bytes(outputs[0]), OUTPUT_ALIGN) + summaries
