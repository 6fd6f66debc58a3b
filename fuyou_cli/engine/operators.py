"""Numbers the operators of a stage's forward whose outputs can be kept. The numbers are the same wherever the forward runs.

The operators are matrix products, those with all experts of a mixture (one operator, see `experts`) and attention, in running
order. Attention always counts as one operator. If it runs as several (no fused kernel on the device, or documents of a row that
are kept apart) or draws random numbers (dropout), its output is not kept, and the other numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..spec.model import StageSpec
from . import attention
from .attention import ATTENTIONS, SDPA, attention_apart, attention_with_sinks
from .experts import is_product

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


# torch asks for the device of a fake tensor several times for each operator, by an operator: of all that a trace sees, half.
DEVICE_OF = torch.ops.prim.device.default


def device_of(tensor: FakeTensor) -> torch.device:
    return tensor.fake_device


def name_of(func: Any) -> str:
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


def product_into(func: Any, args: Sequence[Any], kwargs: Any, target: torch.Tensor) -> torch.Tensor:
    """Returns what the product `func` returns, computed in `target`."""
    product: torch.Tensor = _INTO[func](*args, **kwargs, out=target)
    return product


def is_exact(function: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a call is attention whose result is exactly repeatable: it draws no random numbers."""
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

    def other_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handled(func, args, kwargs or {})

    def handled(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is DEVICE_OF:
            return device_of(*args)
        kind = self._kind(func, args)
        if kind is None:
            return self.other_operator(func, args, kwargs)
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


# ---- where they rest ----------------------------------------------------------------------------------------------
# Describes where kept outputs rest, and finds the tensors there.

_REMEMBERED = 1024  # views of a stage: its outputs, by micro-batch


@dataclass(frozen=True, slots=True)
class Resting:
    """Describes one tensor of a kept output. It begins `offset` bytes after the output's start."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor, offset: int) -> Resting:
        """Describes a tensor like `value`, without gaps."""
        stride = value.stride() if value.is_contiguous() else torch.empty_like(value, device="meta").stride()
        return cls(offset, value.dtype, value.shape, stride)

    @property
    def end(self) -> int:
        return self.offset + self.shape.numel() * self.dtype.itemsize


class Views:
    """Finds tensors in one memory. `memory`: returns all of it as a flat tensor of a dtype.

    A view is remembered, as the launching thread takes longer to make one.
    """

    def __init__(self, memory: Callable[[torch.dtype], torch.Tensor]) -> None:
        # The function does not refer to `self`: in a cycle, views would hold a device's memory until the collector runs.
        self._view = lru_cache(maxsize=_REMEMBERED)(partial(_made, memory))

    def at(self, begin: int, resting: Resting) -> torch.Tensor:
        """Returns the tensor, where the output's memory begins at byte `begin`. What is written elsewhere into that memory does
        not count as a change of it."""
        return self._view(begin + resting.offset, resting.dtype, resting.shape, resting.stride).data


def _made(
    memory: Callable[[torch.dtype], torch.Tensor], begin: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    return memory(dtype).as_strided(shape, stride, begin // dtype.itemsize)


# ---- calls that compute them --------------------------------------------------------------------------------------
# Hands over those calls of a block's code that compute kept outputs, so that nothing looks at the others.
#
# A mode below autograd (`operators`) sees every operator of a block, and each costs the launching thread microseconds. So only
# the first micro-batch of a shape runs in one, and notes which calls compute what is kept: by the weight that a call gets, or
# because transformers gave the model its function for attention. Later ones look only into those calls (`handing_over`). A
# block that computes an output in another way stays in the mode.

_unsafe_view = torch.ops.aten._unsafe_view.default
_detached = torch.Tensor.detach
_LOOKED_UP = (  # where, by which name, and what
    (nn.functional, "scaled_dot_product_attention", SDPA),
    (attention, "computed_with_sinks", attention_with_sinks),
)
ATTENTION = -1  # stands for the number of whatever attention computes


@dataclass(slots=True)
class HandedCall:
    """Describes a call that was handed over. `operator`: the one whose weight it gets, or ATTENTION; `address`: of the weight;
    `args`: if there are only positional ones; `run`: makes the call."""

    operator: int
    address: int
    func: Any
    args: Any
    run: Callable[[], Any]


CallHandler = Callable[[HandedCall], Any]  # returns what the call returns
OperatorWeights = Mapping[int, nn.Parameter]  # by operator


@dataclass(frozen=True, slots=True)
class KeptCalls:
    """Tells how a stage's forward computes kept outputs. `functions`: the one that computes an operator with its weight;
    `attention`: the operator that is attention; `as_returned`: how outputs rest that are what the call returns."""

    functions: dict[int, Any]
    attention: int | None
    as_returned: dict[int, Resting]


class Watched(nn.Parameter):
    """Is a weight whose calls are handed over: torch asks the class of an argument before it runs a function. Parameters are of
    this class while a forward runs."""

    handed: tuple[CallHandler, int, int]  # and the operator, and the address

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run: Any = partial(nn.Parameter.__torch_function__, func, types, args, kwargs or {})
        for given in args:
            if type(given) is Watched:
                hand_over, operator, address = given.handed
                return hand_over(HandedCall(operator, address, func, () if kwargs else args, run))
        return run()


def is_linear(handed: HandedCall) -> bool:
    args = handed.args
    return handed.func is nn.functional.linear and (len(args) == 2 or (len(args) == 3 and args[2] is None))


def linear_inside(mode: AbstractContextManager[Any], args: Any) -> torch.Tensor:
    """Returns what torch's linear function without a bias returns for `args`, by the same operators. Only the product runs in
    `mode`: every other operator there would cost microseconds."""
    product: torch.Tensor = nn.Parameter.__torch_function__(_multiply, (), (mode, args[0], args[1]), {})
    return product


def _multiply(mode: AbstractContextManager[Any], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    is_flat = x.dim() == 2
    flat, turned = x if is_flat else x.reshape(-1, x.shape[-1]), weight.t()
    with mode:
        product = torch.mm(flat, turned)
    out: torch.Tensor = product if is_flat else _unsafe_view(product, (*x.shape[:-1], product.shape[-1]))
    return out


def linear_into(args: Any, target: torch.Tensor) -> torch.Tensor:
    """Returns what torch's linear function without a bias returns for `args`, computed in `target`: the same product, and a
    result that wants a gradient."""
    x, weight = args[0], args[1]
    turned = nn.Parameter.__torch_function__(_detached, (), (weight,), {}).t()
    torch.mm(x.detach().reshape(-1, x.shape[-1]), turned, out=target)
    out: torch.Tensor = _unsafe_view(target.requires_grad_(True), (*x.shape[:-1], target.shape[-1]))
    return out


@contextmanager
def handing_over(hand_over: CallHandler, weights: OperatorWeights, *, attention: bool) -> Iterator[None]:
    """Hands over the calls that get one of `weights`, inside the context, and with `attention` those of attention."""
    choose = ALL_ATTENTION_FUNCTIONS.get_interface

    def chosen(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attend = choose(name, default)
        return lambda *args, **kwargs: hand_over(HandedCall(ATTENTION, 0, attend, (), partial(attend, *args, **kwargs)))

    try:
        for operator, weight in weights.items():
            weight.handed = (hand_over, operator, weight.data_ptr())  # type: ignore[attr-defined]
            weight.__class__ = Watched
        if attention:
            ALL_ATTENTION_FUNCTIONS.get_interface = chosen
        yield
    finally:
        if attention:
            ALL_ATTENTION_FUNCTIONS.__dict__.pop("get_interface", None)  # `documents` may have taken it away
        for weight in weights.values():
            weight.__class__ = nn.Parameter
            weight.__dict__.pop("handed", None)


def numbers_of(stage: StageSpec, operators: Sequence[int]) -> dict[int, int] | None:
    """Returns, by operator, the number of the parameter that is its weight. Returns None if a weight is a part of a parameter,
    or of two operators, and if experts compute what is kept or spared: no call of theirs gets a parameter."""
    at = {tensor.offset: number for number, tensor in enumerate(stage.tensors)}
    every = (*stage.operators, *stage.unneeded)
    wanted = [spec for spec in every if spec.weight >= 0 and (spec.index in operators or spec in stage.unneeded)]
    found = {spec.index: at[spec.weight] for spec in wanted if spec.weight in at}
    used = [spec.weight for spec in every if spec.weight >= 0]
    alone = all(used.count(spec.weight) == 1 and spec.kind != "experts" for spec in wanted)
    return found if alone and len(found) == len(wanted) else None


class Notes:
    """Notes which calls compute the outputs that a mode adds to `outputs`. `last`: returns where the newest output was computed
    (address and elements)."""

    def __init__(self, outputs: Mapping[int, object], last: Callable[[], tuple[int, int]]) -> None:
        self._outputs, self._last = outputs, last
        self._functions: dict[int, Any] = {}
        self._attention: list[int] = []
        self._as_returned: dict[int, Resting] = {}
        self._is_clear = True

    def hand_over(self, handed: HandedCall) -> Any:
        operator, before, seen = handed.operator, len(self._outputs), list[torch.Tensor]()
        with InAttention(nullcontext(), seen.append) if operator == ATTENTION else nullcontext():
            out = handed.run()
        made = list(self._outputs)[before:]
        if operator == ATTENTION:
            self._attention += made
            self._is_clear = self._is_clear and len(made) <= min(1, len(seen))
        elif made == [operator]:
            self._functions[operator] = handed.func
            if isinstance(out, torch.Tensor) and out.is_contiguous() and (out.data_ptr(), out.numel()) == self._last():
                self._as_returned[operator] = Resting(0, out.dtype, out.shape, out.stride())
        else:
            self._is_clear = self._is_clear and not made and self._functions.get(operator) is not handed.func
        return out

    def calls(self) -> KeptCalls | None:
        """Returns what was noted. Returns None if the calls do not tell every output, each by one call."""
        noted = [*self._functions, *self._attention]
        if not self._is_clear or len(self._attention) > 1 or sorted(noted) != sorted(self._outputs):
            return None
        return KeptCalls(self._functions, next(iter(self._attention), None), self._as_returned)


class Only(TorchDispatchMode):
    """Hands one operator to a mode that numbers operators, inside a call that is known to compute it."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = operators
        self._index, self._weight = -1, 0

    def of(self, index: int, address: int) -> Only:
        """Returns the mode for operator `index`: the product with the weight at `address`, or attention (0)."""
        self._index, self._weight = index, address
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._weight:
            if is_attention(func):
                return self._operators.operator(self._index, "attention", func, args, kwargs)
        elif (pair := factors(func, args)) is not None and self._weight in (pair[0].data_ptr(), pair[1].data_ptr()):
            return self._operators.operator(self._index, name_of(func), func, args, kwargs)
        return func(*args, **kwargs)


class InAttention:
    """Runs torch's attention, or that with sinks, in a mode inside the context, which is a call of the function that
    transformers gave to a model: this looks it up by its name. A mode that sees every function would cost microseconds for
    each. `seen` gets results. Where somebody else has put a function of that name, it stays."""

    def __init__(self, mode: AbstractContextManager[Any], seen: Callable[[torch.Tensor], None] = lambda _: None) -> None:
        self._mode, self._seen = mode, seen
        self._replaced: list[tuple[Any, str, Any]] = []

    def _attend(self, attention: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_exact(attention, args, kwargs):
            return attention(*args, **kwargs)
        with self._mode:
            out = attention(*args, **kwargs)
        self._seen(out)
        return out

    def __enter__(self) -> None:
        self._replaced = [(home, name, own) for home, name, own in _LOOKED_UP if getattr(home, name) is own]
        for home, name, own in self._replaced:
            setattr(home, name, partial(self._attend, own))

    def __exit__(self, *_: object) -> None:
        for home, name, own in self._replaced:
            setattr(home, name, own)
