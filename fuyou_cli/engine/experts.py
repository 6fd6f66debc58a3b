"""Computes the routed experts of a mixture: tokens sorted by their experts, then one product after the other for each expert.

Every experts module of transformers calls `routed` (`use_in`). Its matrices are not autograd leaves: they are read as views of
the stage's weights (`Bank`), and each one's gradient goes straight into the stage's sum. So no dense gradient of all experts
is ever made, and an expert's matrix can rest and be read under the name that files have for it.

An adapter adds (x A') B' of each expert's rows to a product (`LowRank`). A and B are matrices of experts like any other.

Exactness: experts come in ascending order, rows of one expert in the order of tokens; indices are unique, so that no sum
depends on the order of threads. In bfloat16 on a processor rows are multiplied in pieces of few sizes, filled with zeros: the
library keeps compiled code for each shape, and memory must not depend on where tokens are sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..core.units import align_up
from ..spec.model import ExpertWork

NAME = "fuyou"
ROWS = 64  # pieces have a multiple of these
MOST_ROWS = 512  # in the largest piece
_PRODUCTS = ("gate_up_proj", "up_proj", "down_proj")
BANK = "_fuyou_bank"  # the attribute of an experts module that holds its weights
LOW_RANK = "_fuyou_low_rank"  # the one that holds what an adapter adds to it
_LOW_RANK = re.compile(rf"({'|'.join(_PRODUCTS)})_lora_[AB]\d+")  # parameters that hold an adapter's matrices


def is_experts(module: nn.Module) -> bool:
    """Whether transformers lets this module's experts be computed by a function of somebody else."""
    return {"has_gate", "has_bias", "is_transposed", "is_concatenated"} <= vars(module).keys()


def use_in(model: PreTrainedModel) -> None:
    """Has the model's experts computed here. A model without any is left as it is."""
    if any(map(is_experts, model.modules())):
        ALL_EXPERTS_FUNCTIONS.register(NAME, routed)
        model.set_experts_implementation(NAME)


# ---- where the matrices are ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Describes one expert's part of a module's parameter, as a file names it."""

    expert: int
    part: int  # of those that lie one below the other in the parameter: gate, up


@dataclass(frozen=True, slots=True)
class Tensor:
    """Describes a tensor of a stage that holds a matrix of one expert, or of all."""

    index: int  # among the stage's tensors
    offset: int  # elements within the stage
    shape: tuple[int, ...]
    trained: bool
    place: ExpertPart | None  # None: the whole parameter, of all experts
    transposed: bool = False  # its matrices lie the other way round than those of the module's parameter


@dataclass(frozen=True, slots=True)
class Matrices:
    """Describes one product of a module: a matrix of each expert and part. Without `turned` a matrix is (outputs, inputs)."""

    experts: int
    inputs: int
    sizes: tuple[int, ...]  # outputs of each part
    turned: bool
    offsets: tuple[int, ...]  # elements within the stage, of each matrix: part by part, then by expert
    tensors: tuple[tuple[int, int], ...]  # the same: the tensor, and elements of it before the matrix
    trained: tuple[bool, ...]
    biases: tuple[int, int] | None = None  # tensor and elements within the stage, of what is added: (experts, outputs)
    trains_biases: bool = False

    @classmethod
    def of(cls, tensors: Sequence[Tensor], biases: Tensor | None, *, turned: bool) -> Matrices:
        """Lays out the product of these tensors: one of all experts, or one of each expert and part."""
        first = tensors[0]
        if first.place is None:
            experts, rows, columns = first.shape
            outputs, inputs = (columns, rows) if turned else (rows, columns)
            sizes: tuple[int, ...] = (outputs,)
            begins = [rows * columns * expert for expert in range(experts)]
            offsets, at = [first.offset + begin for begin in begins], [(first.index, begin) for begin in begins]
            trained = [first.trained] * experts
        else:
            ordered = sorted(tensors, key=_by_part)
            experts = 1 + max(_by_part(tensor)[1] for tensor in tensors)
            sizes, inputs = tuple([tensor.shape[0] for tensor in ordered[::experts]]), first.shape[1]
            offsets, at = [tensor.offset for tensor in ordered], [(tensor.index, 0) for tensor in ordered]
            trained = [tensor.trained for tensor in ordered]
        return cls(
            experts=experts, inputs=inputs, sizes=sizes, turned=turned != first.transposed, offsets=tuple(offsets),
            tensors=tuple(at), trained=tuple(trained), biases=None if biases is None else (biases.index, biases.offset),
            trains_biases=biases is not None and biases.trained,
        )  # fmt: skip

    @property
    def learns(self) -> bool:
        """Whether backward has a gradient to hand over."""
        return any(self.trained) or self.trains_biases


def _by_part(tensor: Tensor) -> tuple[int, int]:
    assert tensor.place is not None
    return tensor.place.part, tensor.place.expert


ExpertsLayout = tuple[nn.Module, Mapping[str, Matrices]]  # an experts module, and its products by the parameter's name


def laid_out(tensors: Mapping[tuple[nn.Module, str], Sequence[Tensor]]) -> tuple[ExpertsLayout, ...]:
    """Returns the layouts of the experts modules of a stage. tensors: by module and parameter."""
    by_module: dict[nn.Module, dict[str, Matrices]] = {}
    for (module, name), of_parameter in tensors.items():
        if name in _PRODUCTS:
            (biases,) = tensors.get((module, f"{name}_bias"), (None,))
            by_module.setdefault(module, {})[name] = Matrices.of(of_parameter, biases, turned=bool(module.is_transposed))
        elif _LOW_RANK.fullmatch(name):
            by_module.setdefault(module, {})[name] = Matrices.of(of_parameter, None, turned=False)
    return tuple(by_module.items())


class Sink(Protocol):
    """Takes the gradients of a stage's tensors (`gradients.GradientSum`)."""

    def add_product(self, index: int, first: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds the matrix left x right to the elements of tensor `index` from `first` on."""
        ...

    def add_part(self, index: int, first: int, gradient: torch.Tensor) -> None: ...


class Routes(Protocol):
    """Says where the tokens of a module go, and keeps or compares it (`routing`)."""

    def of(self, chosen: torch.Tensor, experts: int) -> Route:
        """Returns the route of these choices, as `Route.of` does."""
        ...


@dataclass(slots=True)
class Bank:
    """The weights of one experts module during a visit. `anchor`: makes autograd run the products that learn, also where
    nothing below them does; None: none of them learns."""

    products: Mapping[str, Matrices]
    flat: torch.Tensor
    anchor: nn.Parameter | None = field(init=False)
    sink: Sink | None = None
    routes: Routes | None = None  # None: nothing is kept

    def __post_init__(self) -> None:
        learns = any(product.learns for product in self.products.values())
        self.anchor = nn.Parameter(self.flat.new_zeros(())) if learns else None

    @property
    def first(self) -> str:
        return "gate_up_proj" if "gate_up_proj" in self.products else "up_proj"

    @property
    def experts(self) -> int:
        return self.products[self.first].experts


@dataclass(slots=True)
class Noting:
    """Stands for the experts of a block that are stages of their own (`ranges`): notes what its forward sends to them, and
    returns zeros."""

    experts: int
    routes: Routes | None = None
    sink: Sink | None = None
    anchor: None = None
    sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def note(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.routes is not None:
            with torch.no_grad():
                self.routes.of(chosen, self.experts)
        self.sent = hidden, chosen, weights
        return torch.zeros_like(hidden)

    def pop_sent(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sent, self.sent = self.sent, None
        assert sent is not None, "a block did not call its experts"
        return sent


def place(module: nn.Module, bank: Bank | Noting | None) -> None:
    """Gives an experts module its weights, or takes them away."""
    if bank is None:
        vars(module).pop(BANK, None)
    else:
        vars(module)[BANK] = bank


def _bank_of(module: nn.Module) -> Bank:
    bank: Bank | None = vars(module).get(BANK)
    if bank is not None:
        return bank
    # On fake tensors nothing but shapes is read.
    tensors, weights = dict[tuple[nn.Module, str], list[Tensor]](), dict(module._parameters)
    for name, weight in weights.items():
        assert isinstance(weight, FakeTensor), f"{type(module).__name__} has no weights"
        tensors[module, name] = [Tensor(0, 0, tuple(weight.shape), False, None)]
    (_, products), *_ = laid_out(tensors)
    return Bank(products, next(iter(weights.values())))  # type: ignore[arg-type]


# ---- the function --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """Says in which order tokens go to experts. `order`: of each sorted row, its number among all choices of all tokens;
    `counts`: rows of each expert (empty on fake tensors, where nobody knows). Rows after these are of no expert."""

    order: torch.Tensor
    inverse: torch.Tensor
    counts: Sequence[int]

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int, counts: Sequence[int] | None = None) -> Route:
        """chosen: (tokens, experts of a token), a number past the last expert for none. `counts`: if they are known."""
        route, values = cls._sorted(chosen)
        if counts is None:
            fake = isinstance(chosen, FakeTensor)
            counts = () if fake else _between(_ends(values, experts).tolist())  # sync: shapes depend on it
        return replace(route, counts=counts)

    @classmethod
    def counted(cls, chosen: torch.Tensor, experts: int, real: torch.Tensor) -> tuple[Route, list[int]]:
        """Does the same, and returns how many rows of each expert are of tokens that are `real` (one bool each)."""
        route, values = cls._sorted(chosen)
        ends, so_far = _ends(values, experts), real[route.order // chosen.shape[-1]].cumsum(0)
        of_real = torch.where(ends > 0, so_far[(ends - 1).clamp(min=0)], 0)
        every, of_real = torch.stack([ends, of_real]).tolist()  # sync: as in `of`
        return replace(route, counts=_between(every)), _between(of_real)

    @classmethod
    def _sorted(cls, chosen: torch.Tensor) -> tuple[Route, torch.Tensor]:
        values, order = torch.sort(chosen.reshape(-1), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return cls(order, inverse, ()), values


def _ends(values: torch.Tensor, experts: int) -> torch.Tensor:
    """Returns the end of each expert's rows among sorted choices."""
    return torch.searchsorted(values, torch.arange(experts, device=values.device, dtype=values.dtype), right=True)


def _between(ends: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in zip((0, *ends), ends, strict=False)]


def routed(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Computes what an experts module adds to each token. hidden: (tokens, width); chosen, weights: (tokens, experts of a
    token). The weighted outputs of a token are summed in the order of its choices."""
    if isinstance(noting := vars(module).get(BANK), Noting):
        return noting.note(hidden, chosen, weights)
    bank, choices = _bank_of(module), chosen.shape[-1]
    with torch.no_grad():
        route = (Route if bank.routes is None else bank.routes).of(chosen, bank.experts)
    shares = _rows(weights.reshape(-1, 1), route.order, route.inverse)
    y = outputs(module, bank, lambda: _rows(hidden, route.order, route.inverse, choices), shares, route)
    y = _rows(y, route.inverse, route.order).view(*chosen.shape, -1)
    return y.sum(1).to(hidden.dtype)


def outputs(
    module: Any, bank: Bank, rows: Callable[[], torch.Tensor], shares: torch.Tensor, route: Route
) -> torch.Tensor:  # fmt: skip
    """Returns the weighted outputs of experts for sorted rows. `shares`: the weight of each row, (rows, 1)."""
    added: LowRank | None = vars(module).get(LOW_RANK)
    # Made here and without a name, they end with the first product, not with the last one. Where dynamo sees every frame,
    # whoever calls a function holds its arguments until it returns.
    x = _adapted(rows(), bank, bank.first, route, added)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    if getattr(module, "has_post_expert_norm", False):
        normed: torch.Tensor = module.post_expert_norm(_adapted(x, bank, "down_proj", route, added)) * shares
        return normed
    # Weighted before the last product, whose outputs no backward reads then: it is not computed again.
    return _adapted((x * shares).to(x.dtype), bank, "down_proj", route, added, shares)


def _rows(source: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, repeats: int = 1) -> torch.Tensor:
    rows: torch.Tensor = _Rows.apply(source, order, inverse, repeats)  # type: ignore[no-untyped-call]
    return rows


class _Rows(torch.autograd.Function):
    """Sorts rows: row n of the result is row order[n] // repeats of the source. `inverse` is the inverse of `order`. The
    gradient of a row that goes to several places is summed in their order, not in that of threads."""

    saves_by_hooks = True  # nothing that backward reads is kept elsewhere (`inspect`)

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, repeats: int) -> torch.Tensor:
        ctx.inverse, ctx.repeats = inverse, repeats
        return source.index_select(0, order if repeats == 1 else order // repeats)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_source = grad.index_select(0, ctx.inverse)
        if ctx.repeats > 1:
            grad_source = grad_source.view(-1, ctx.repeats, *grad.shape[1:]).sum(1)
        return grad_source, None, None, None


def _product(x: torch.Tensor, bank: Bank, name: str, route: Route, shares: torch.Tensor | None = None) -> torch.Tensor:
    of = bank.products[name]
    shares = None if of.biases is None else shares
    product: torch.Tensor = _Product.apply(x, shares, bank.anchor if of.learns else None, bank, of, route.counts)  # type: ignore[no-untyped-call]
    return product


def _adapted(
    x: torch.Tensor, bank: Bank, name: str, route: Route, added: LowRank | None, shares: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the product, with what an adapter adds. `shares`: of each row, what its bias is multiplied with."""
    out = _product(x, bank, name, route, shares)
    if added is None:
        return out
    parts = [_product(_product(x, bank, a, route), bank, b, route) for a, b in added.pairs[name]]
    total: torch.Tensor = _Sum.apply(out, added.scaling, *parts)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """Adds scaled columns in place, part by part, so that nothing as wide as a product is made for it."""

    saves_by_hooks = True

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, scaling: float, *parts: torch.Tensor) -> torch.Tensor:
        ctx.scaling, ctx.sizes = scaling, [part.shape[1] for part in parts]
        ctx.mark_dirty(out)
        for columns, part in zip(out.split(ctx.sizes, 1), parts, strict=True):
            columns.add_(part, alpha=scaling)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, *(columns * ctx.scaling for columns in grad.split(ctx.sizes, 1))


class _Product(torch.autograd.Function):
    saves_by_hooks = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shares: torch.Tensor | None, anchor: torch.Tensor | None, bank: Bank, of: Matrices,
        counts: Sequence[int],
    ) -> torch.Tensor:  # fmt: skip
        ctx.bank, ctx.of, ctx.counts = bank, of, counts
        ctx.save_for_backward(x if any(of.trained) else None, shares)
        biases = -1 if of.biases is None else of.biases[1]
        shape = of.offsets, counts, of.sizes, of.inputs, of.turned
        out: torch.Tensor = torch.ops.fuyou.experts(x, bank.flat, *shape, biases, shares)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of, bank, (x, shares) = ctx.of, ctx.bank, ctx.saved_tensors
        grad, grad_x, of_shares = grad.contiguous(), None, None
        if x is not None:
            _add_gradients(bank.sink, of, ctx.counts, x, grad)
        if of.trains_biases and bank.sink is not None:
            for expert, begin, count in _groups(ctx.counts):
                rows = grad[begin : begin + count]
                added = rows.sum(0) if shares is None else (rows * shares[begin : begin + count]).sum(0)
                bank.sink.add_part(of.biases[0], expert * grad.shape[1], added)
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.fuyou.experts_back(grad, bank.flat, of.offsets, ctx.counts, of.sizes, of.inputs, of.turned)
        if ctx.needs_input_grad[1]:
            of_shares = shares.new_zeros(shares.shape)
            for expert, begin, count in _groups(ctx.counts):
                of_shares[begin : begin + count, 0] = grad[begin : begin + count] @ _bias(bank.flat, of.biases[1], expert, grad)
        return grad_x, of_shares, None, None, None, None


def _add_gradients(sink: Sink | None, of: Matrices, counts: Sequence[int], x: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds the gradient of every trained matrix to the stage's sum, one after the other."""
    if sink is None:
        assert isinstance(x, FakeTensor), "nobody takes the gradients of experts"
        x.new_empty(max(of.sizes), of.inputs)  # one gradient at a time is alive
        return
    for expert, begin, count in _groups(counts):
        for first, rows, real in _pieces(begin, count, in_one=_in_one_piece(x)):
            some, wanted = _filled(x, first, rows, real), _filled(grad, first, rows, real)
            at = 0
            for part, size in enumerate(of.sizes):
                number = part * of.experts + expert
                if of.trained[number]:
                    columns = wanted[:, at : at + size]
                    pair = (some.t(), columns) if of.turned else (columns.t(), some)
                    sink.add_product(*of.tensors[number], *pair)
                at += size


def _groups(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields the experts that have rows, with their first row and how many there are."""
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, begin, count
        begin += count


def _in_one_piece(x: torch.Tensor) -> bool:
    """Whether an expert's rows are multiplied in one piece: on a GPU, where each product is a launch, and in float32. On
    a processor the library for bfloat16 keeps compiled code for each number of rows."""
    return x.is_cuda or x.dtype == torch.float32


def _pieces(begin: int, count: int, *, in_one: bool = False) -> Iterator[tuple[int, int, int]]:
    """Cuts rows into pieces of few sizes. Yields first row, size, and how many of its rows there are. `in_one`: in one
    piece."""
    if in_one and count:
        yield begin, count, count
        return
    while count:
        real = min(count, MOST_ROWS)
        yield begin, align_up(real, ROWS), real
        begin, count = begin + real, count - real


def _filled(x: torch.Tensor, first: int, rows: int, real: int) -> torch.Tensor:
    """Returns so many rows, the last of them zeros where there are fewer real ones."""
    if real == rows:
        return x[first : first + rows]
    some = x.new_zeros(rows, x.shape[1])
    some[:real] = x[first : first + real]
    return some


def _matrices(
    flat: torch.Tensor, offsets: Sequence[int], inputs: int, sizes: Sequence[int], *, turned: bool
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields the matrices of an expert, part by part, as (inputs, outputs), with the columns that they give."""
    at = 0
    for offset, size in zip(offsets, sizes, strict=True):
        strides = (size, 1) if turned else (1, inputs)
        yield slice(at, at + size), flat.as_strided((inputs, size), strides, flat.storage_offset() + offset)
        at += size


def _bias(flat: torch.Tensor, biases: int, expert: int, like: torch.Tensor) -> torch.Tensor:
    """Returns an expert's bias, as long as a row of `like`."""
    return flat[biases + expert * like.shape[1] :][: like.shape[1]]


def _experts(
    x: torch.Tensor, flat: torch.Tensor, offsets: Sequence[int], counts: Sequence[int], sizes: Sequence[int], inputs: int,
    turned: bool, biases: int, shares: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    experts, out = len(counts), x.new_empty(x.shape[0], sum(sizes))
    for expert, some, results in _by_expert(x, out, counts):
        for columns, weight in _matrices(flat, offsets[expert::experts], inputs, sizes, turned=turned):
            torch.mm(some, weight, out=results[:, columns])
    for expert, begin, count in _groups(counts) if biases >= 0 else ():
        bias = _bias(flat, biases, expert, out)
        out[begin : begin + count] += bias if shares is None else shares[begin : begin + count] * bias
    return out


def _experts_back(
    grad: torch.Tensor, flat: torch.Tensor, offsets: Sequence[int], counts: Sequence[int], sizes: Sequence[int], inputs: int,
    turned: bool,
) -> torch.Tensor:  # fmt: skip
    experts, out = len(counts), grad.new_empty(grad.shape[0], inputs)
    for expert, some, results in _by_expert(grad, out, counts):
        for columns, weight in _matrices(flat, offsets[expert::experts], inputs, sizes, turned=turned):
            if columns.start:
                results.addmm_(some[:, columns], weight.t())
            else:
                torch.mm(some[:, columns], weight.t(), out=results)
    return out


def _by_expert(x: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields every expert that has rows, with a piece of its rows of `x` and where their results go, which lands in `out`. Rows
    of `out` behind all of them are zero."""
    for expert, begin, count in _groups(counts):
        for first, rows, real in _pieces(begin, count, in_one=_in_one_piece(x)):
            results = out[first : first + rows] if real == rows else x.new_empty(rows, out.shape[1])
            yield expert, _filled(x, first, rows, real), results
            if real < rows:
                out[first : first + real] = results[:real]
    out[sum(counts) :] = 0


# As operators of torch, the products of all experts are one call: modes that look at operators see no single product, of which
# there are more or fewer as tokens are sent here or there.
_LIBRARY = torch.library.Library("fuyou", "DEF")
_SHAPES = "int[] offsets, int[] counts, int[] sizes, int inputs, bool turned"
_LIBRARY.define(f"experts(Tensor x, Tensor flat, {_SHAPES}, int biases, Tensor? shares) -> Tensor")
_LIBRARY.define(f"experts_back(Tensor grad, Tensor flat, {_SHAPES}) -> Tensor")
for _kind in ("CPU", "CUDA"):
    _LIBRARY.impl("experts", _experts, _kind)
    _LIBRARY.impl("experts_back", _experts_back, _kind)


def _experts_shape(x: Any, flat: Any, offsets: Any, counts: Any, sizes: Any, *_: Any) -> Any:
    return x.new_empty(x.shape[0], sum(sizes))


def _experts_back_shape(grad: Any, flat: Any, offsets: Any, counts: Any, sizes: Any, inputs: Any, turned: Any) -> Any:
    return grad.new_empty(grad.shape[0], inputs)


torch.library.register_fake("fuyou::experts", _experts_shape, lib=_LIBRARY)
torch.library.register_fake("fuyou::experts_back", _experts_back_shape, lib=_LIBRARY)


def is_product(func: Any) -> bool:
    """Whether an operator is a forward product with all experts."""
    return func is torch.ops.fuyou.experts.default


def first_matrix(args: Sequence[Any]) -> int:
    """Returns the address of the first matrix that such a product multiplies with."""
    address: int = args[1].data_ptr() + args[2][0] * args[1].element_size()
    return address


def outputs_of(args: Sequence[Any]) -> tuple[int, int]:
    """Returns the shape of what such a product returns."""
    return args[0].shape[0], sum(args[4])


def work_of(func: Any, args: Sequence[Any]) -> tuple[ExpertWork, int] | None:
    """Returns the work of an operator that multiplies with experts, and where the first of their matrices begins in the
    stage. None for any other operator."""
    if not is_product(func):
        return None
    x, offsets, sizes, inputs = args[0], args[2], args[4], args[5]
    rows = x.shape[0] * len(sizes) / len(offsets)
    return ExpertWork(flops=2.0 * x.shape[0] * inputs * sum(sizes), rows=rows, products=len(offsets)), offsets[0]


# ---- their names in files ------------------------------------------------------------------------------------------------

NamedPart = tuple[str, tuple[int, ...], ExpertPart]  # name, shape and place


@dataclass(frozen=True, slots=True)
class LowRank:
    """Describes what an adapter adds to an experts module: A (experts, rank, inputs) and B (experts, outputs, rank) for each
    part of a parameter, which are parameters of the module."""

    scaling: float
    pairs: Mapping[str, tuple[tuple[str, str], ...]]  # by parameter: the names of A and B, part by part
    parts: Mapping[str, Sequence[NamedPart]]  # by name of A or B: those of each expert


def add_low_rank(
    module: nn.Module, parts: Mapping[str, Sequence[NamedPart]], rank: int, scaling: float, names: tuple[str, str]
) -> None:
    """Gives an experts module on the meta device A and B for each matrix. `parts`: by parameter, as `named_parts` has them;
    `names`: what stands for `weight` in the names of A and B."""
    pairs: dict[str, tuple[tuple[str, str], ...]] = {}
    added: dict[str, list[NamedPart]] = {}
    for own, places in parts.items():
        like = module._parameters[own]
        assert like is not None
        for name, (outputs, inputs), place in places:
            for kind, shape, end in zip("AB", ((rank, inputs), (outputs, rank)), names, strict=True):
                attribute = f"{own}_lora_{kind}{place.part}"
                added.setdefault(attribute, []).append((name.removesuffix("weight") + end, shape, ExpertPart(place.expert, 0)))
        every = range(1 + max(place.part for *_, place in places))
        pairs[own] = tuple((f"{own}_lora_A{part}", f"{own}_lora_B{part}") for part in every)
        for attribute in (attribute_name for pair in pairs[own] for attribute_name in pair):
            experts = torch.empty(len(added[attribute]), *added[attribute][0][1], dtype=like.dtype, device="meta")
            module.register_parameter(attribute, nn.Parameter(experts))
    vars(module)[LOW_RANK] = LowRank(scaling, pairs, added)


def named_parts(model: PreTrainedModel) -> dict[str, list[NamedPart]]:
    """Returns, by a parameter's name, the tensors that files have for it where they have one for each expert. The names are
    those of today's architecture (`checkpoint.names.architecture_renames`)."""
    if not any(map(is_experts, model.modules())):
        return {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    joins: list[tuple[str, list[str]]] = []  # the end of a parameter's name, and those of its parts
    for conversion in get_model_conversion_mapping(model):
        if not isinstance(conversion, WeightConverter):
            continue
        kinds = [type(operation) for operation in conversion.operations]
        merges = bool(kinds) and kinds[0] is MergeModulelist and conversion.operations[0].dim == 0
        joined = kinds[1:] == [Concatenate] and conversion.operations[1].dim == 1
        if merges and (joined or (len(kinds) == 1 and len(conversion.source_patterns) == 1)):
            joins.append((conversion.target_patterns[0], [source.replace("\\.", ".") for source in conversion.source_patterns]))
    by_name: dict[str, list[NamedPart]] = {}
    for name, module in model.named_modules():
        if is_experts(module) and (added := vars(module).get(LOW_RANK)) is not None:
            by_name |= {f"{name}.{own}": list(added_parts) for own, added_parts in added.parts.items()}
        for own, parameter in module.named_parameters(recurse=False) if is_experts(module) else ():
            for end, parts in joins:
                if f"{name}.{own}".endswith(end):
                    by_name[f"{name}.{own}"] = list(_parts_of(f"{name}.{own}", parameter, end, parts))
    return by_name


def _parts_of(name: str, parameter: torch.Tensor, end: str, parts: Sequence[str]) -> Iterator[NamedPart]:
    experts, rows, columns = parameter.shape
    before = name.removesuffix(end)
    for part, pattern in enumerate(parts):
        for expert in range(experts):
            yield before + pattern.replace("*", str(expert)), (rows // len(parts), columns), ExpertPart(expert, part)
