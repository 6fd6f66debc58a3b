"""Numbers the operators of a stage's forward whose outputs can be kept. The numbers are the same wherever the forward runs.

The operators are matrix products, those with all experts of a mixture (one operator, see `experts`) and attention, in running
order. Attention always counts as one operator. If it runs as
several (no fused kernel on the device, or documents of a row that are kept apart) or draws random numbers (dropout), its output
is not kept, and the other numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..attention import ATTENTIONS
from ..documents import attention_apart
from ..experts import is_product

_aten = torch.ops.aten
_FACTORS = {  # operator -> indexes of the two factors among its arguments
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (1, 2),
}
_INTO = {  # operator -> its variant that writes into given memory
    _aten.mm.default: _aten.mm.out,
    _aten.addmm.default: _aten.addmm.out,
    _aten.bmm.default: _aten.bmm.out,
    _aten.baddbmm.default: _aten.baddbmm.out,
}
_ATTENTION = frozenset(
    f"_scaled_dot_product_{kernel}"
    for kernel in (
        "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
        "fused_attention_overrideable",
    )
)  # fmt: skip


def name_of(func: Any) -> str:
    """Returns the operator's name without namespace and overload."""
    name: str = func.overloadpacket.__name__
    return name


def factors(func: Any, args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the two matrices that `func` multiplies. Returns None if it is no product, or only one of a column and a row (no
    real work)."""
    places = _FACTORS.get(func)
    if places is None:
        return None
    left, right = (args[place] for place in places)
    return (left, right) if left.shape[-1] > 1 else None


def product_of(func: Any, args: Sequence[Any]) -> tuple[torch.dtype, torch.Size, tuple[int, ...]] | None:
    """Returns the dtype, shape and strides of what the product `func` returns. Returns None if `func` is no product."""
    places = _FACTORS.get(func)
    if places is None:
        return None
    left, right = (args[place] for place in places)
    *others, columns = shape = torch.Size((*left.shape[:-1], right.shape[-1]))
    stride = (columns, 1) if len(others) == 1 else (others[-1] * columns, columns, 1)
    return left.dtype, shape, stride


def product_into(func: Any, args: Sequence[Any], kwargs: Any, there: torch.Tensor) -> torch.Tensor:
    """Returns what the product `func` returns, computed in `there`."""
    product: torch.Tensor = _INTO[func](*args, **kwargs, out=there)
    return product


def is_exact(function: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Tells whether a call is attention whose result is exactly repeatable: it draws no random numbers."""
    if function not in ATTENTIONS:
        return False
    return not kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)


def is_attention(func: Any) -> bool:
    return name_of(func) in _ATTENTION


class Operators(TorchDispatchMode):
    """Numbers the operators of a forward that runs inside the mode. Subclasses decide what is done with them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = 0
        self._attention = _AttentionCalls()

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Handles a numbered operator and returns its result. `kind`: "attention", or the name of the product."""
        return func(*args, **kwargs)

    def beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handles any other operator and returns its result."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self._kind(func, args)
        if kind is None:
            return self.beside(func, args, kwargs)
        self._products += kind != "attention"  # attention is counted when its call begins
        return self.operator(self._products + self._attention.calls - 1, kind, func, args, kwargs)

    def _kind(self, func: Any, args: Any) -> str | None:
        if self._attention.inside == "exact" and is_attention(func):
            return "attention"
        if self._attention.inside == "no" and (is_product(func) or factors(func, args) is not None):
            return name_of(func)
        return None

    def __enter__(self) -> Any:
        self._attention.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._attention.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


class _AttentionCalls(TorchFunctionMode):
    """Counts calls of attention. `inside`: in one whose result is exactly repeatable, or in one that is not kept: with dropout,
    or document by document."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.inside: Literal["no", "exact", "not kept"] = "no"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in ATTENTIONS and func is not attention_apart:
            return func(*args, **kwargs)
        self.calls += 1
        self.inside = "exact" if is_exact(func, args, kwargs) else "not kept"
        try:
            return func(*args, **kwargs)
        finally:
            self.inside = "no"
