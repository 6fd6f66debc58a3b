"""Describes a model for planning, as a ModelSpec, whether or not the engine can train it.

`fuyou plan` answers for causal language models whose blocks can be found and whose forward can be traced. If `dissect` refuses
a model, its stages are outlined and their costs estimated, and the plan shows the refusal.

A model that can be trained is inspected at one batch shape, without weights and without computing. Every stage runs forward and
backward on fake tensors of one micro-batch. A dispatch mode tracks which storages are alive, so the peak of what a stage
allocates beside its weights is known in advance. What kernels allocate inside is not.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.errors import UsageError
from ..core.process import MAPPED, alive, worked_on
from ..core.units import align_up
from ..planner.boundary_layout import DEVICE_ALIGN, OUTPUT_ALIGN, SUMMARY_TOKENS
from ..spec.model import Dtype, ExpertWork, ModelSpec, OperatorSpec, StageSpec, TensorSpec
from ..spec.plan import whole_rows
from .anatomy import Anatomy, Installed, Stage, dissect, kept_apart_if_possible, outline, with_frozen_work
from .anatomy import isolated as kept_apart
from .calls import Between, StageCall, only_refusals, stage_calls, tracing
from .cutting import Sent, add_outputs, differentiate, is_lookup, is_plain, scales_rows
from .experts import Route, work_of
from .loss import Head, TokenLoss, TokenPart, pieces
from .operators import DEVICE_OF, Operators, device_of, factors, is_attention, name_of
from .skeleton import EXPERT_KEYS, TORCH_DTYPE, setting, stays_float32

_aten = torch.ops.aten
_WITHOUT_ROOM = {
    _aten._log_softmax, _aten._log_softmax_backward_data, _aten.nll_loss_forward, _aten.nll_loss_backward, _aten._to_copy,
    _aten.empty_like,
}  # fmt: skip
_OPERATORS = 4  # that a range runs for one product of an expert: it gathers and adds rows expert by expert, too
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx", "training")


@dataclass(frozen=True, slots=True)
class Short:
    """Describes rows that a longer row of a recurrent block is cut into. Such a block makes some tensors for all of a row, and
    others token by token: these are as much larger here as there are more rows, and `longer` times as many in the long row."""

    rows: int
    tokens: int  # a prime number, which the size of a tensor that is made token by token is no multiple of
    longer: int

    @classmethod
    def of(cls, shape: tuple[int, int], sizes: Iterable[int]) -> Short | None:
        """Cuts rows of `shape`. `sizes`: of the model. None: they are short already."""
        rows, tokens = shape
        for short in sorted((17, 19, 23, 29), key=lambda prime: -tokens % prime):
            longer = -(-tokens // short)
            if longer > 1 and all(size % short for size in (rows, longer, *sizes)):
                return cls(rows * longer, short, longer)
        return None

    def charged(self, size: int) -> tuple[int, int]:
        """Returns the bytes of a storage in the long row, and how many of them there are."""
        return (size, 1) if size % self.tokens == 0 else (size // self.longer, self.longer)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes charged for storages that were created inside and are still alive. `peak` is their maximum,
    `mapped_peak` that of the storages that the allocator maps separately. `held` existed before."""

    def __init__(self, *held: torch.Tensor, short: Short | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._short = short
        self.live = self._mapped = 0
        self.peak: int = 0
        self.mapped_peak: int = 0
        self._seen: set[int] = {tensor.untyped_storage()._cdata for tensor in held}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `fake_mode`

    def _add(self, size: int, mapped: int) -> None:
        self.live += size
        self._mapped += mapped
        self.mapped_peak = max(self.mapped_peak, self._mapped)

    def _drop(self, key: int, size: int, mapped: int = 0) -> None:
        self.live -= size
        self._mapped -= mapped
        self._seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:
            return device_of(*args)
        out = func(*args, **(kwargs or {}))
        for value in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self._seen:
                    self._seen.add(key)
                    each, number = (storage.nbytes(), 1) if self._short is None else self._short.charged(storage.nbytes())
                    size = number * alive(each)
                    mapped = size if each >= MAPPED else 0
                    self._add(size, mapped)
                    weakref.finalize(storage, self._drop, key, size, mapped)
        self.peak = max(self.peak, self.live + _kernel_room(func, (args, kwargs, out)))
        return out


def _kernel_room(func: Any, values: object) -> int:
    """Returns the bytes that a kernel takes for itself while it works on these tensors. Pointwise kernels and the loss take
    none."""
    if func.is_view or torch.Tag.pointwise in func.tags or func.overloadpacket in _WITHOUT_ROOM:
        return 0
    sizes = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor)
    }
    return sum(worked_on(size) - alive(size) for size in sizes.values())


@dataclass(frozen=True, slots=True)
class _Peak:
    """The most bytes charged for live storages; `mapped`: those of blocks that are mapped separately."""

    total: int
    mapped: int

    @classmethod
    def of(cls, size: int, blocks: int = 1) -> _Peak:
        charged = blocks * alive(size)
        return cls(charged, charged if size >= MAPPED else 0)


Roots = Sequence[tuple[torch.Tensor, torch.Tensor]]  # where backward begins beside an output, with their gradients
_Costs = dict[str, Any]  # fields of a StageSpec, by name


def _costs(flops: float, forward: _Peak, backward: _Peak, **more: object) -> _Costs:
    peaks = {"forward_peak": forward.total, "forward_mapped": forward.mapped}
    return {"forward_flops": flops, **peaks, "backward_peak": backward.total, "backward_mapped": backward.mapped, **more}


def inspect(
    anatomy: Anatomy, *, dtype: str, micro_batch_size: int, max_seq_len: int, head_chunk_tokens: int, short: Short | None = None
) -> ModelSpec:
    """Returns the model's specification at micro-batches of (micro_batch_size, max_seq_len). `short`: rows that its blocks are
    traced in instead."""
    shape, text = (micro_batch_size, max_seq_len), anatomy.model.config.get_text_config()
    between = Between()
    with only_refusals(anatomy.model, shape=shape):
        costs, widest, sent = _all_costs(
            anatomy, between, dtype=dtype, shape=shape, head_chunk_tokens=head_chunk_tokens, short=short
        )
    embeddings = {stage.module for stage in anatomy.stages if stage.kind == "embedding"}
    boundary = max(text.hidden_size, widest) * TORCH_DTYPE[dtype].itemsize
    compute_dtype: Dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    model = ModelSpec(
        architecture=type(anatomy.model).__name__,
        compute_dtype=compute_dtype,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        stages=tuple(
            stage.specified(
                index,
                dtype=compute_dtype,
                looked_up=_is_looked_up(anatomy, stage),
                weights_in_backward=stage.kind != "embedding" or not _is_by_row(stage),
                **costs[index],
            )
            for index, stage in enumerate(anatomy.stages)
        ),
        tied_head=anatomy.tied_head,
        sources=anatomy.sources,
        imported_because=anatomy.imported_because,
        boundary_bytes_per_token=boundary,
        sent_bytes_per_token=sent * TORCH_DTYPE[dtype].itemsize,
        # If several embeddings are added, or dropout follows, the model's own backward keeps a boundary and a mask.
        choreography_bytes_per_token=boundary * (2 if len(embeddings) > 1 else 1),
        draws_between=between.draws,
        may_sweep=not (anatomy.tied_head or between.draws or len(embeddings) > 1) and all(map(_is_by_row, anatomy.stages)),
    )
    return with_frozen_work(model, tokens=micro_batch_size * max_seq_len)


def _is_by_row(stage: Stage) -> bool:
    """Whether the gradients of an embedding are summed micro-batch by micro-batch, like those of all other stages."""
    return stage.kind != "embedding" or stage.vocabulary is not None or _is_table(stage.module)


def _is_looked_up(anatomy: Anatomy, stage: Stage) -> bool:
    """Whether a stage is frozen and holds only rows that are looked up by token, whole or cut."""
    if anatomy.tied_head or stage.module is not anatomy.model.get_input_embeddings() or not _is_table(stage.module):
        return False
    return len(stage.parameters) == 1 and stage.params == stage.frozen


def _is_table(module: nn.Module | None) -> bool:
    return is_plain(module) or (is_lookup(module) and scales_rows(module))


def _all_costs(
    anatomy: Anatomy, between: Between, *, dtype: str, shape: tuple[int, int], head_chunk_tokens: int, short: Short | None
) -> tuple[list[_Costs], int, int]:
    """Finds the costs of every stage, and the elements of a token's widest boundary: some blocks pass several streams on. Then
    those of what a block sends to its experts where these are stages of their own. Equal blocks run once."""
    rows = shape if short is None else (short.rows, short.tokens)
    found = stage_calls(anatomy.model, anatomy.modules(), shape=rows, between=between, isolated=anatomy.isolated, reuse=True)
    calls = {call.name: (call, x) for call, x in found}
    seen: dict[object, _Costs] = {}
    costs: list[_Costs] = []
    sent: dict[object, Sent] = {}
    to_experts: Sent | None = None  # by the last block that was cut
    for index, stage in enumerate(anatomy.stages):
        shapes = tuple((tensor.shape, tensor.frozen, tensor.quantised) for tensor in anatomy.owner(index).tensors)
        key = (stage.kind, type(stage.module), shapes, _settings(stage))
        if key not in seen:
            if stage.kind == "head":
                seen[key] = _head_cost(anatomy, index, dtype=dtype, shape=shape, chunk=head_chunk_tokens)
            elif stage.kind == "embedding":
                size = shape[0] * shape[1] * stage.tensors[0].shape[-1] * TORCH_DTYPE[dtype].itemsize
                seen[key] = _costs(0.0, _Peak.of(size), _Peak.of(size, 3))
            elif stage.expert_range is not None:
                assert to_experts is not None
                seen[key] = _range_cost(stage, to_experts, dtype=dtype)
            else:
                seen[key] = _stage_cost(anatomy, stage, *calls[stage.name], dtype=dtype, short=short)
                if stage.cut is not None:
                    sent[key] = _sent(stage, *calls[stage.name], dtype=dtype)
        if stage.cut is not None:
            to_experts = sent[key]
        costs.append(seen[key])
    widest = max((prod(x.shape[2:]) for _, x in found if x.is_floating_point()), default=0)
    return costs, widest, max((one.columns for one in sent.values()), default=0)


def _settings(stage: Stage) -> object:
    """Returns what blocks of one class and shape may still differ in: the classes and plain attributes of their modules."""
    plain = (bool, int, float, str)
    if stage.module is None or stage.kind != "block":
        return ()
    parts = dict(stage.module.named_modules())
    return tuple((name, type(part)) for name, part in parts.items()), tuple(
        (name, key, value)
        for name, part in parts.items()
        for key, value in sorted(vars(part).items())
        if isinstance(value, plain) and key not in _NUMBERS
    )


def _stage_cost(anatomy: Anatomy, stage: Stage, call: StageCall, x: torch.Tensor, *, dtype: str, short: Short | None) -> _Costs:
    assert isinstance(x, FakeTensor) and stage.module is not None
    with tracing(stage.module, mode=x.fake_mode, length=x.shape[1]):
        x = x.detach()
        flat = torch.empty(stage.params, dtype=TORCH_DTYPE[dtype])

        def run_forward(parameters: Installed) -> None:
            y = call.run(x)
            if stage.cut is not None:
                Sent.by(parameters).packed(x.shape[0])
            del y

        forward = _peak(stage, flat, run_forward, gradients=False, short=short)

        def run_both(parameters: Installed) -> None:
            leaf = x.clone().requires_grad_(True)
            y = call.run(leaf)
            more_roots = [] if stage.cut is None else _roots(parameters, x.shape[:2])
            _backward(y, torch.empty_like(y), [leaf, *parameters], more_roots)

        backward = _peak(stage, flat, run_both, gradients=True, short=short)
        trace = _look(stage, flat, call, x)
    routed = {"choices": trace.choices, "experts": trace.experts, "expert_work": trace.expert_work}
    if stage.kind != "block" or short is not None:  # operators of short rows are not those of a long one
        return _costs(trace.flops, forward, backward, **routed)
    # other code than transformers' own may keep tensors for backward that no autograd hook sees
    is_known = type(anatomy.model).__module__.startswith("transformers.")
    unneeded, saved = (trace.unneeded, trace.saved_bytes) if is_known else ((), 0)
    kept = tuple(operator for operator in trace.found if operator not in unneeded)
    more = {"operators": kept, "unneeded": unneeded, "graph_bytes": saved}
    return _costs(trace.flops, forward, backward, **routed, **more)


def _look(stage: Stage, flat: torch.Tensor, call: StageCall, x: torch.Tensor) -> OperatorTrace:
    """Finds the operators of one forward as it is recomputed for backward, and which of them backward reads."""
    leaf = x.clone().requires_grad_(True)
    names = tuple(tensor.name.partition(f"{call.name}.")[2] for tensor in stage.tensors)
    trace = OperatorTrace(leaf, flat, stage.tensors, names)
    hooks = torch.autograd.graph.saved_tensors_hooks(trace.saved, lambda unsaved: unsaved)
    with stage.installed(flat) as parameters, torch.enable_grad(), hooks, trace:
        for bank in parameters.banks:
            bank.routes = trace
        y = call.run(leaf)
        more_roots = [root for root, _ in _roots(parameters, x.shape[:2])] if stage.cut is not None else []
    if _has_own_backward(y, *more_roots):
        trace.needs_all()
    return trace


def _has_own_backward(*roots: torch.Tensor) -> bool:
    """Whether some function on the way to `roots` was written in Python. Its backward may read anything, unless it says
    that autograd's hooks see all of it (`saves_by_hooks`)."""
    waiting, seen = [root.grad_fn for root in roots], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            function: Any = type(node)._forward_cls
            if not getattr(function, "saves_by_hooks", False):
                return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


# ---- operators and FLOPs ------------------------------------------------------------------------------------------
# Finds what a stage's forward consists of, on fake tensors: operators whose outputs can be kept, those whose outputs backward
# never reads, and FLOPs.

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
        self._influence = _Influence(self._weights)
        self._input, self._saved = x.untyped_storage(), dict[int, Any]()  # storages, by address
        # By storage (held, so that no other gets its address): indexes in `found`.
        self._outputs: dict[int, tuple[Any, int]] = {}
        self.tensors, self.names = tensors, names

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `fake_mode`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handled(func, args, kwargs or {})

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
        of_weights = not self._influence.pass_on((args, kwargs), out, by=index)
        name = f"{kind} {weight.removesuffix('.weight')}" if weight else kind
        size = _attention_bytes(args[0], out) if kind == "attention" else out.nbytes
        self._outputs |= {leaf.untyped_storage()._cdata: (leaf.untyped_storage(), len(self.found)) for leaf in _tensors(out)}
        self.found.append(OperatorSpec(index=index, name=name, flops=flops, bytes=size, weight=offset, of_weights=of_weights))
        return out

    def other_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._work(func, args)
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            for tensor in _tensors((args, kwargs)):
                _, place = self._outputs.get(tensor.untyped_storage()._cdata, (None, None))
                if place is not None:
                    self.found[place] = replace(self.found[place], overwritten=True)
        if not name_of(func).startswith(_SHAPE_ONLY):
            written = (args, kwargs) if func._schema.is_mutable else ()
            self._influence.pass_on((args, kwargs), (out, written))
        return out

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
    """Tracks which operators the values in a storage depend on, whether on anything but `weights`, and which operators a saved
    tensor depends on."""

    _FROM_OUTSIDE = -1  # stands for the stage's input and what else it was called with

    def __init__(self, weights: Any) -> None:
        self.needed: set[int] = set()
        # By storage, held so that no other gets its address.
        self._of: dict[int, tuple[Any, frozenset[int]]] = {weights._cdata: (weights, frozenset())}

    def pass_on(self, inputs: Any, outputs: Any, *, by: int | None = None) -> bool:
        """Notes that an operator made `outputs` from `inputs`, or wrote into it. Returns whether that is of more than
        weights."""
        passed = frozenset().union(*(self._on(leaf) for leaf in _tensors(inputs)), () if by is None else (by,))
        for leaf in _tensors(outputs):
            storage = leaf.untyped_storage()
            before = self._of.get(storage._cdata, (None, frozenset[int]()))[1]
            self._of[storage._cdata] = (storage, before | passed)
        return self._FROM_OUTSIDE in passed

    def look_at(self, tensor: torch.Tensor) -> None:
        self.needed |= self._on(tensor)

    def _on(self, tensor: torch.Tensor) -> frozenset[int]:
        return self._of.get(tensor.untyped_storage()._cdata, (None, frozenset((self._FROM_OUTSIDE,))))[1]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _attention_bytes(query: torch.Tensor, outputs: Any) -> int:
    """Returns the bytes of the output and, per head and token, of the float32 log-sum-exp that backward needs on any device."""
    summaries = 4 * query.shape[:-2].numel() * align_up(query.shape[-2], SUMMARY_TOKENS)
    return align_up(outputs[0].nbytes, OUTPUT_ALIGN) + summaries


# ---- a block without its experts, and these --------------------------------------------------------------------------------


def _roots(parameters: Installed, shape: tuple[int, ...]) -> Roots:
    """Returns where the backward of such a block begins beside its output."""
    sent = Sent.by(parameters)
    return sent.roots(torch.empty(*shape, sent.hidden.shape[1] + sent.weights.shape[1]))


def _sent(stage: Stage, call: StageCall, x: torch.Tensor, *, dtype: str) -> Sent:
    """Returns what such a block sends to its experts, on fake tensors."""
    assert isinstance(x, FakeTensor) and stage.module is not None
    with tracing(stage.module, mode=x.fake_mode, length=x.shape[1]), torch.no_grad():
        flat = torch.empty(stage.params, dtype=TORCH_DTYPE[dtype])
        with stage.installed(flat) as parameters:
            call.run(x.detach())
        return Sent.by(parameters)


def _range_cost(stage: Stage, sent: Sent, *, dtype: str) -> _Costs:
    """Returns the cost of a range of experts. Peaks are those where all tokens go to one of them, work where they are sent to
    all alike."""
    assert isinstance(sent.hidden, FakeTensor) and stage.module is not None and stage.expert_range is not None
    (tokens, choices), experts = sent.chosen.shape, stage.expert_range[-1]
    with tracing(stage.module, mode=sent.hidden.fake_mode):
        flat, packed = torch.empty(stage.params, dtype=TORCH_DTYPE[dtype]), sent.packed(1)
        width = sent.hidden.shape[1]

        def forward(parameters: Installed) -> None:
            add_outputs(stage, parameters, Sent.of(packed, width, choices), torch.empty(tokens, width))
            torch.empty(tokens, width, dtype=sent.hidden.dtype)

        def run_both(parameters: Installed) -> None:
            grad, sums = torch.empty(tokens, width, dtype=sent.hidden.dtype), torch.empty(tokens, width + choices)
            differentiate(stage, parameters, Sent.of(packed, width, choices), grad, sums)

        peaks = [_peak(stage, flat, run, gradients=False) for run in (forward, run_both)]
    matrices = [tensor for tensor in stage.tensors if tensor.routed and len(tensor.shape) == (2 if tensor.whole is None else 3)]
    of_each = 2.0 * tokens * choices / experts
    flops, frozen = (of_each * sum(t.numel for t in matrices if all_of or t.frozen) for all_of in (True, False))
    launches = _OPERATORS * len(matrices)
    work = ExpertWork(flops=flops, rows=tokens * choices / experts, products=launches, frozen_flops=frozen)
    return _costs(flops, *peaks, expert_work=work)


def _head_cost(anatomy: Anatomy, index: int, *, dtype: str, shape: tuple[int, int], chunk: int) -> _Costs:
    """Returns the cost of one chunk of tokens. For a whole head: the loss and its gradients at once. For a piece of the
    vocabulary: folding its logits into the loss, and computing them again for the gradients."""
    stage, owner, head = anatomy.stages[index], anatomy.owner(index), Head(anatomy.model)
    width = anatomy.model.get_output_embeddings().in_features
    first, end = stage.vocabulary or (0, anatomy.model.config.get_text_config().vocab_size)
    part = TokenPart(whole_rows(*shape), next(pieces(*shape, chunk)))
    with tracing(anatomy.model, length=shape[1]), head.stubbed():
        flat = torch.empty(owner.params, dtype=TORCH_DTYPE[dtype])
        hidden = torch.empty(*shape, width, dtype=TORCH_DTYPE[dtype])
        tokens = TokenLoss.of(torch.zeros(shape, dtype=torch.long))
        size = [cut.stop for cut in part.cut]
        piece, targets = torch.empty(*size, width, dtype=TORCH_DTYPE[dtype]), torch.zeros(size, dtype=torch.long)

        def fold(parameters: list[nn.Parameter]) -> None:
            tokens.fold(part, head.logits(hidden[part.cut]), first=first)

        def run_both(parameters: list[nn.Parameter]) -> None:
            if stage.vocabulary is None:
                leaf = piece.clone().requires_grad_(True)
                y, slope = head.loss(leaf, targets, normaliser=1), None
            else:
                leaf = hidden[part.cut].clone().requires_grad_(True)
                y = head.logits(leaf)
                slope = tokens.gradient(part, y, first=first, normaliser=1)
            _backward(y, slope, [leaf, *parameters])

        forward = _Peak(0, 0) if stage.vocabulary is None else _peak(owner, flat, fold, gradients=False)
        backward = _peak(owner, flat, run_both, gradients=True)
    larger = _Peak(max(forward.total, backward.total), max(forward.mapped, backward.mapped))
    return _costs(
        2.0 * (end - first) * width * shape[0] * shape[1], larger if stage.vocabulary is None else forward, larger
    )  # fmt: skip


def _backward(y: torch.Tensor, grad: torch.Tensor | None, leaves: list[torch.Tensor], more_roots: Roots = ()) -> None:
    """Runs backward like the executor: a parameter's gradient is dropped as soon as it exists. `more_roots`: where else it
    begins."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    for leaf in wanted:
        if isinstance(leaf, nn.Parameter):
            leaf.register_post_accumulate_grad_hook(drop)
    roots, gradients = [y, *(root for root, _ in more_roots)], [grad, *(gradient for _, gradient in more_roots)]
    torch.autograd.backward(roots, None if grad is None else gradients, inputs=wanted)


def _peak(
    stage: Stage, flat: torch.Tensor, run: Callable[[Installed], object], *, gradients: bool, short: Short | None = None
) -> _Peak:
    live = LiveBytes(flat, short=short)
    with stage.installed(flat) as parameters, torch.set_grad_enabled(gradients), live:
        run(parameters)
    return _Peak(live.peak, live.mapped_peak)


# ---- a model that can, or cannot, be trained ----------------------------------------------------------------------


_STEPS = 64  # tokens, a whole chunk where blocks without attention compute in chunks
_FEW = 16  # operators per token: one chunk has fewer (xLSTM: 7), a scan has more (Mamba: 34)
_CHOSEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlined:
    """Stages, and why they cannot be trained yet (None if no reason is known)."""

    anatomy: Anatomy
    refusal: str | None


def outlined(
    model: PreTrainedModel, *, strict: bool = False, isolated: bool = False, marked: bool = False
) -> Outlined:  # fmt: skip
    """Finds the stages of any model with blocks, which keep documents of a row apart if the model can. `strict`: raises the
    UsageError if the model cannot be trained. `isolated`: raises it also if the model would mix documents. `marked`: as
    `dissect` has it."""
    try:
        anatomy = dissect(model, marked=marked)
        return Outlined(anatomy=kept_apart(anatomy) if isolated else kept_apart_if_possible(anatomy), refusal=None)
    except UsageError as error:
        if strict:
            raise
        return Outlined(anatomy=outline(model, marked=marked), refusal=error.message)


def specified(
    outlined_model: Outlined, *, dtype: str, micro_batch_size: int, max_seq_len: int, head_chunk_tokens: int
) -> ModelSpec:
    """Returns the model's specification at micro-batches of (micro_batch_size, max_seq_len). Raises UsageError if it cannot be
    traced.

    A block that computes token by token has operators for each, so that tracing a long row takes minutes. The same number of
    tokens is traced in short rows instead, because what such a block keeps grows with the number of tokens and not with their
    distance. None of its operators is kept: those of short rows are not those of a run. Of a model that the engine cannot train
    counts are exact, and the work of its blocks follows rules.
    """
    anatomy, shape = outlined_model.anatomy, (micro_batch_size, max_seq_len)
    try:
        short = None
        if (_is_unrolled if outlined_model.refusal is None else _is_recurrent)(anatomy):
            short = Short.of(shape, {size for parameter in anatomy.model.parameters() for size in parameter.shape})
        model = inspect(
            anatomy, dtype=dtype, micro_batch_size=micro_batch_size, max_seq_len=max_seq_len,
            head_chunk_tokens=head_chunk_tokens, short=short,
        )  # fmt: skip
    except UsageError as error:
        raise UsageError(outlined_model.refusal or error.message, hint=error.hint) from error
    if outlined_model.refusal is not None:
        text, stages = anatomy.model.config.get_text_config(), list(model.stages)
        for layer, stage in enumerate(stage for stage in model.stages if stage.kind == "block"):
            stages[stage.index] = replace(stage, forward_flops=_block_flops(stage, layer, text, shape))
        model = with_frozen_work(replace(model, stages=tuple(stages)), tokens=micro_batch_size * max_seq_len)
    mixture = Mixture.of(anatomy.model.config.get_text_config())
    in_float32 = (  # elements that a bfloat16 model of this family keeps in float32: created so, or listed by its class
        parameter.numel()
        for name, parameter in anatomy.model.named_parameters()
        if parameter.dtype == torch.float32 or stays_float32(anatomy.model, name)
    )
    return replace(
        model,
        inactive_parameters=sum(mixture.inactive(stage.tensors) for stage in model.stages),
        inactive_frozen=sum(mixture.inactive(t for t in stage.tensors if t.frozen) for stage in model.stages),
        float32_parameters=sum(in_float32) if model.compute_dtype == "bfloat16" else 0,
    )


# ---- recurrent blocks ------------------------------------------------------------------------------------------------


def _is_unrolled(anatomy: Anatomy) -> bool:
    """Whether a model without attention has operators for every token of a row."""
    if setting(anatomy.model.config.get_text_config(), "num_attention_heads"):
        return False
    between = Between()
    stage_calls(anatomy.model, anatomy.modules(), shape=(1, _STEPS), between=between)
    return between.operators >= _FEW * _STEPS


def _is_recurrent(anatomy: Anatomy) -> bool:
    """Whether some block may process one token after the other: it has no attention, or a convolution over the last few
    tokens."""
    modules = (module for block in anatomy.modules() for module in block.modules())
    text = anatomy.model.config.get_text_config()
    return not setting(text, "num_attention_heads") or any(isinstance(module, nn.Conv1d) for module in modules)


# ---- work ------------------------------------------------------------------------------------------------------------


def _block_flops(stage: StageSpec, layer: int, text: PreTrainedConfig, shape: tuple[int, int]) -> float:
    """Counts the FLOPs of a block: 2 per token and active parameter. Attention adds 2 per token, earlier token, head, and
    element of a query and of a value."""
    rows, tokens = shape
    active = stage.numel - Mixture.of(text).inactive(stage.tensors)
    attention = rows * tokens * tokens * _attended(text, layer) if _attends(text, layer) else 0
    return float(2 * active * rows * tokens + attention)


def _attends(text: PreTrainedConfig, layer: int) -> bool:
    """Whether a block reads all earlier tokens, by the configuration's list of layer types if it has one."""
    types = getattr(text, "layer_types", None)
    if isinstance(types, (list, tuple)) and layer < len(types):
        return "attention" in types[layer] and not types[layer].startswith("linear")
    return bool(setting(text, "num_attention_heads", layer=layer))


def _attended(text: PreTrainedConfig, layer: int) -> int:
    """Returns heads times the elements of a query and of a value. In latent attention the two sizes differ."""

    def size(name: str) -> int:
        return int(setting(text, name, layer=layer) or 0)

    heads = size("num_attention_heads")
    plain = size("head_dim") or (size("hidden_size") // heads if heads else 0)
    latent = size("qk_nope_head_dim") and size("qk_rope_head_dim")
    query = size("qk_nope_head_dim") + size("qk_rope_head_dim") if latent else plain
    return heads * (query + (size("v_head_dim") or plain))


# ---- mixtures of experts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Describes the experts of a block, and how many of them process one token. A dense model has one.

    transformers keeps the routed experts of a block in a module named `experts`, as tensors with one slice per expert or as a
    list of modules. Shared experts have other names. If the configuration does not say how many experts there are and how many
    process a token, every parameter counts as active.
    """

    experts: int
    chosen: int

    @classmethod
    def of(cls, text: PreTrainedConfig) -> Mixture:
        experts, chosen = _first(text, EXPERT_KEYS), _first(text, _CHOSEN_KEYS)
        return cls(experts=experts, chosen=chosen) if 0 < chosen < experts else cls(experts=1, chosen=1)

    def is_routed(self, tensor: TensorSpec) -> bool:
        return tensor.routed or self.is_fused(tensor) or _below_experts(tensor).partition(".")[0].isdigit()

    def is_fused(self, tensor: TensorSpec) -> bool:
        """Whether `tensor` holds all experts, one slice each: a matrix of each, or a bias by its place."""
        of_each = len(tensor.shape) > 2 or bool(_below_experts(tensor))
        return self.experts > 1 and of_each and tensor.shape[0] == self.experts

    def inactive(self, tensors: Iterable[TensorSpec]) -> int:
        """Returns the elements (without padding) of a stage's `tensors` that one token does not use."""
        routed = sum(tensor.numel for tensor in tensors if self.is_routed(tensor))
        return routed * (self.experts - self.chosen) // self.experts


def _below_experts(tensor: TensorSpec) -> str:
    """Returns the tensor's name within a module named `experts`, empty elsewhere."""
    return f".{tensor.name}".partition(".experts.")[2]


def _first(text: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """Returns the first of these keys that the configuration has as a number, or 0."""
    values = [setting(text, name) for name in names]
    return next((value for value in values if isinstance(value, int)), 0)
