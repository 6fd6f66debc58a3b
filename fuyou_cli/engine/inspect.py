"""`inspect(anatomy, ...)`: the ModelSpec of a skeleton at one batch shape, without weights and without computing.

Every stage is run forward and backward on fake tensors of one micro-batch; a dispatch mode follows which storages are
alive, so that the peak of what a stage allocates beside its weights is known in advance (what kernels allocate inside is
not).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..core.heap import MAPPED, alive, worked_on
from ..spec.model import ModelSpec, OperatorSpec, StageSpec
from .anatomy import Anatomy
from .calls import StageCall, only_refusals, stage_calls
from .head import Head, Part, TokenLoss, pieces
from .operator_trace import OperatorTrace, SavedBytes, unseen_expert_flops
from .skeleton import TORCH_DTYPE
from .stage import Stage
from .streamed import boundary_of

_aten = torch.ops.aten
_WITHOUT_ROOM = {
    _aten._log_softmax, _aten._log_softmax_backward_data, _aten.nll_loss_forward, _aten.nll_loss_backward, _aten._to_copy,
    _aten.empty_like,
}  # fmt: skip
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx", "training")


class _LiveBytes(TorchDispatchMode):
    """Bytes that storages created inside and still alive are charged; `peak` is their maximum, `mapped_peak` that of the
    storages the allocator maps on their own. `held` were there before."""

    def __init__(self, *held: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self._mapped = 0
        self.peak: int = 0
        self.mapped_peak: int = 0
        self._known: set[int] = {tensor.untyped_storage()._cdata for tensor in held}

    def _taken(self, size: int, mapped: int) -> None:
        self.live += size
        self._mapped += mapped
        self.mapped_peak = max(self.mapped_peak, self._mapped)

    def _dropped(self, key: int, size: int, mapped: int = 0) -> None:
        self.live -= size
        self._mapped -= mapped
        self._known.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    self._known.add(key)
                    size = alive(storage.nbytes())
                    mapped = size if storage.nbytes() >= MAPPED else 0
                    self._taken(size, mapped)
                    weakref.finalize(storage, self._dropped, key, size, mapped)
        self.peak = max(self.peak, self.live + _beside(func, (args, kwargs, out)))
        return out


def _beside(func: Any, values: object) -> int:
    """Bytes that a kernel takes for itself while it works on these. A pointwise one takes none, nor do those of the loss."""
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
    """Bytes charged for what is alive at most; `mapped`: for blocks that are mapped on their own."""

    total: int
    mapped: int

    @classmethod
    def of(cls, size: int, blocks: int = 1) -> _Peak:
        """Of so many blocks of `size` bytes."""
        taken = blocks * alive(size)
        return cls(taken, taken if size >= MAPPED else 0)


@dataclass(frozen=True, slots=True)
class _Cost:
    forward: _Peak
    backward: _Peak
    flops: float
    operators: tuple[OperatorSpec, ...] = ()
    unneeded: tuple[OperatorSpec, ...] = ()
    activation_bytes: int = 0


def inspect(anatomy: Anatomy, *, dtype: str, micro_batch_size: int, max_seq_len: int, head_chunk_tokens: int) -> ModelSpec:
    """The specification at micro-batches of (micro_batch_size, max_seq_len)."""
    model = anatomy.model
    text = model.config.get_text_config()
    shape = (micro_batch_size, max_seq_len)
    with only_refusals(model, shape=shape):
        costs = _costs(anatomy, dtype=dtype, shape=shape, head_chunk_tokens=head_chunk_tokens)
    stages = tuple(
        StageSpec(
            index=index,
            kind=kind,
            name=anatomy.names[index],
            params=anatomy.params[index],
            tensors=tuple(slotted.spec for slotted in anatomy.parameters[index]),
            forward_flops=costs[index].flops,
            forward_peak=costs[index].forward.total,
            backward_peak=costs[index].backward.total,
            forward_mapped=costs[index].forward.mapped,
            backward_mapped=costs[index].backward.mapped,
            vocabulary=anatomy.vocabulary[index],
            operators=costs[index].operators,
            unneeded=costs[index].unneeded,
            activation_bytes=costs[index].activation_bytes,
        )
        for index, kind in enumerate(anatomy.kinds)
    )
    return ModelSpec(
        architecture=type(model).__name__,
        compute_dtype="bfloat16" if dtype == "bfloat16" else "float32",
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        stages=stages,
        tied_head=anatomy.tied_head,
        boundary_bytes_per_token=text.hidden_size * TORCH_DTYPE[dtype].itemsize,
        choreography_bytes_per_token=_choreography(anatomy, text.hidden_size * TORCH_DTYPE[dtype].itemsize),
    )


def _choreography(anatomy: Anatomy, boundary: int) -> int:
    """What the model's own forward keeps between stages for its own backward, per token: sums of several embeddings and
    dropout on them keep a boundary-sized tensor and its mask."""
    embeddings = {id(m) for m, kind in zip(anatomy.modules, anatomy.kinds, strict=True) if kind == "embedding"}
    return boundary * (2 if len(embeddings) > 1 else 1)


def _costs(anatomy: Anatomy, *, dtype: str, shape: tuple[int, int], head_chunk_tokens: int) -> list[_Cost]:
    """One entry per stage; blocks of the same shapes are run once."""
    stages = {m: name for m, name in zip(anatomy.modules, anatomy.names, strict=True) if m is not None}
    calls = {call.module: call for call in stage_calls(anatomy.model, stages, shape=shape)}
    seen: dict[object, _Cost] = {}
    costs: list[_Cost] = []
    for index, kind in enumerate(anatomy.kinds):
        slotted = anatomy.parameters[index]
        shapes = tuple(item.spec.shape for item in anatomy.parameters[anatomy.owner(index)])
        key = (kind, type(anatomy.modules[index]), shapes, _layer_type(anatomy, index), _settings(anatomy, index))
        if key not in seen:
            if kind == "head" and anatomy.vocabulary[index] is not None:
                seen[key] = _head_piece_cost(anatomy, index, dtype=dtype, shape=shape, chunk=head_chunk_tokens)
            elif kind == "head":
                seen[key] = _head_cost(anatomy, index, dtype=dtype, shape=shape, chunk=head_chunk_tokens)
            elif kind == "embedding":
                rows = shape[0] * shape[1] * (slotted[0].spec.shape[-1]) * TORCH_DTYPE[dtype].itemsize
                seen[key] = _Cost(_Peak.of(rows), _Peak.of(rows, 3), 0.0)
            else:
                module = anatomy.modules[index]
                assert module is not None
                seen[key] = _stage_cost(anatomy, index, calls[module], dtype=dtype)
        costs.append(seen[key])
    return costs


def _layer_type(anatomy: Anatomy, index: int) -> object:
    """Models alternating attention types have blocks of equal shapes and unequal masks."""
    module = anatomy.modules[index]
    for holder in (module, getattr(module, "self_attn", None)):
        for attribute in ("attention_type", "layer_type", "sliding_window"):
            value = getattr(holder, attribute, None)
            if isinstance(value, (str, int)):
                return value
    return None


def _settings(anatomy: Anatomy, index: int) -> object:
    """What blocks alike in class and shapes may still differ in: the classes of their modules and plain attributes of those,
    but their number."""
    module = anatomy.modules[index]
    plain = (bool, int, float, str)
    if module is None or anatomy.kinds[index] != "block":
        return ()
    parts = dict(module.named_modules())
    return tuple((name, type(part)) for name, part in parts.items()), tuple(
        (name, key, value)
        for name, part in parts.items()
        for key, value in sorted(vars(part).items())
        if isinstance(value, plain) and key not in _NUMBERS
    )


def _stage_cost(anatomy: Anatomy, index: int, call: StageCall, *, dtype: str) -> _Cost:
    with call.mode:
        x = call.x.detach()
        flat = torch.empty(anatomy.params[index], dtype=TORCH_DTYPE[dtype])

        def run(value: torch.Tensor) -> torch.Tensor:
            return boundary_of(call.run(value), call.name)

        forward = _peak(anatomy, index, flat, lambda parameters: run(x), trainable=False)

        def both(parameters: list[nn.Parameter]) -> None:
            leaf = x.clone().requires_grad_(True)
            y = run(leaf)
            _backward(y, torch.empty_like(y), [leaf, *parameters])

        backward = _peak(anatomy, index, flat, both, trainable=True)
        trace, saved = _look(anatomy, index, flat, call)
    flops = trace.flops + unseen_expert_flops(trace, x.shape[:-1].numel(), anatomy.model.config.get_text_config())
    if anatomy.kinds[index] != "block":
        return _Cost(forward, backward, flops)
    unneeded = trace.unneeded if _is_librarys(anatomy) else ()
    kept = tuple(operator for operator in trace.found if operator not in unneeded)
    return _Cost(forward, backward, flops, kept, unneeded, saved)


def _is_librarys(anatomy: Anatomy) -> bool:
    """Whether the model's code is transformers' own: others' may keep for backward what no hook of autograd sees."""
    return type(anatomy.model).__module__.startswith("transformers.")


def _look(anatomy: Anatomy, index: int, flat: torch.Tensor, call: StageCall) -> tuple[OperatorTrace, int]:
    """The operators of one forward as it is recomputed for backward, and the bytes it saves."""
    leaf = call.x.detach().clone().requires_grad_(True)
    names = tuple(slotted.spec.name.partition(f"{call.name}.")[2] for slotted in anatomy.parameters[index])
    trace = OperatorTrace(flat, tuple(slotted.spec for slotted in anatomy.parameters[index]), names)
    saved = SavedBytes(flat, leaf, call.args, call.kwargs)
    stage = Stage(anatomy, _bare(anatomy, index))

    def pack(tensor: torch.Tensor) -> None:
        trace.saved(tensor)
        saved.pack(tensor)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, saved.unpack)
    with stage.installed(flat, trainable=True), torch.enable_grad(), hooks, trace:
        y = boundary_of(call.run(leaf), call.name)
    if _has_own_backward(y):
        trace.needs_all()
    return trace, saved.total


def _has_own_backward(y: torch.Tensor) -> bool:
    """Whether some function on the way to `y` was written in Python, whose backward may look at anything."""
    waiting, seen = [y.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def _head_cost(anatomy: Anatomy, index: int, *, dtype: str, shape: tuple[int, int], chunk: int) -> _Cost:
    """Loss and its gradients for one piece; the head's own parameters or, tied, the embedding's."""
    text = anatomy.model.config.get_text_config()
    head, owner = Head(anatomy.model), anatomy.owner(index)
    output = anatomy.model.get_output_embeddings()
    rows, tokens = next(pieces(*shape, chunk))
    size = (len(range(*rows.indices(shape[0]))), len(range(*tokens.indices(shape[1]))))
    with FakeTensorMode(allow_non_fake_inputs=True):
        flat = torch.empty(anatomy.params[owner], dtype=TORCH_DTYPE[dtype])
        hidden = torch.empty(*size, output.in_features, dtype=TORCH_DTYPE[dtype])
        targets = torch.zeros(size, dtype=torch.long)

        def both(parameters: list[nn.Parameter]) -> None:
            leaf = hidden.clone().requires_grad_(True)
            with head.stubbed():
                loss = head.loss(leaf, targets, normaliser=1)
                _backward(loss, None, [leaf, *parameters])

        peak = _peak(anatomy, owner, flat, both, trainable=True)
    return _Cost(peak, peak, 2.0 * text.vocab_size * output.in_features * shape[0] * shape[1])


def _head_piece_cost(anatomy: Anatomy, index: int, *, dtype: str, shape: tuple[int, int], chunk: int) -> _Cost:
    """Of one piece of the vocabulary: folding its logits of one chunk of tokens; computing them again for the gradients."""
    head, owner = Head(anatomy.model), anatomy.owner(index)
    width = anatomy.model.get_output_embeddings().in_features
    span = anatomy.vocabulary[index]
    assert span is not None
    first, end = span
    part = Part(slice(None), next(pieces(*shape, chunk)))
    with FakeTensorMode(allow_non_fake_inputs=True), head.stubbed():
        flat = torch.empty(anatomy.params[owner], dtype=TORCH_DTYPE[dtype])
        hidden = torch.empty(*shape, width, dtype=TORCH_DTYPE[dtype])
        tokens = TokenLoss.of(torch.zeros(shape, dtype=torch.long))

        def fold(parameters: list[nn.Parameter]) -> None:
            tokens.fold(part, head.logits(hidden[part.cut]), first=first)

        def both(parameters: list[nn.Parameter]) -> None:
            leaf = hidden[part.cut].clone().requires_grad_(True)
            logits = head.logits(leaf)
            _backward(logits, tokens.gradient(part, logits, first=first, normaliser=1), [leaf, *parameters])

        forward = _peak(anatomy, owner, flat, fold, trainable=False)
        backward = _peak(anatomy, owner, flat, both, trainable=True)
    larger = _Peak(max(forward.total, backward.total), max(forward.mapped, backward.mapped))
    return _Cost(forward, larger, 2.0 * (end - first) * width * shape[0] * shape[1])


def _backward(y: torch.Tensor, grad: torch.Tensor | None, leaves: list[torch.Tensor]) -> None:
    """As the executor does it: a parameter's gradient is dropped as soon as it exists."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for leaf in leaves:
        if isinstance(leaf, nn.Parameter):
            leaf.register_post_accumulate_grad_hook(drop)
    torch.autograd.backward([y], None if grad is None else [grad], inputs=leaves)


def _peak(
    anatomy: Anatomy, owner: int, flat: torch.Tensor, run: Callable[[list[nn.Parameter]], object], *, trainable: bool
) -> _Peak:
    stage = Stage(anatomy, _bare(anatomy, owner))
    live = _LiveBytes(flat)
    with stage.installed(flat, trainable=trainable) as parameters, torch.set_grad_enabled(trainable), live:
        run(parameters)
    return _Peak(live.peak, live.mapped_peak)


def _bare(anatomy: Anatomy, index: int) -> StageSpec:
    """Enough of a StageSpec to install parameters with."""
    return StageSpec(
        index=index,
        kind=anatomy.kinds[index],
        name=anatomy.names[index],
        params=anatomy.params[index],
        tensors=tuple(slotted.spec for slotted in anatomy.parameters[index]),
        forward_flops=0.0,
        forward_peak=0,
        backward_peak=0,
    )
