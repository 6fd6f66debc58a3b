"""A streamed stage: one autograd.Function that hands forward and backward of a stage to the executor.

The model's own forward stays the choreography. Its stages get their `forward` replaced on the instance (undone on
close); what flows between them are whole-batch tensors in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from ..core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a stage's own forward, to be repeated per micro-batch: `run(x)` with the other arguments bound."""

    stage: int
    run: Callable[[torch.Tensor], Any]


class Passes(Protocol):
    """What the executor offers to a streamed stage. Tensors are whole-batch, in host memory."""

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor: ...

    def backward(self, call: Call, x: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None: ...

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, the same for all rows, on the device: one copy for all stages of a step."""
        ...


class StreamedStage(torch.autograd.Function):
    """`anchor` requires grad so that a stage whose input is integer ids has a backward at all."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, call: Call, passes: Passes) -> torch.Tensor:
        ctx.call, ctx.passes = call, passes
        ctx.ids = None if x.is_floating_point() else x
        return passes.forward(call, x)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        return None, ctx.passes.backward(ctx.call, ctx.ids, grad_y), None, None


def streamed_forward(
    stage: int,
    name: str,
    original: Callable[..., Any],
    passes: Passes,
    anchor: torch.Tensor,
    device: torch.device,
) -> Callable[..., Any]:
    """The replacement for one stage's `forward`. The stage's input is its first argument (or `hidden_states`, or the
    ids of an embedding); every other tensor must be the same for all rows."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, key = find_input(args, kwargs, name)
        x = args[0] if key is None else kwargs[key]
        rest = args[1:] if key is None else args
        others = {k: v for k, v in kwargs.items() if k != key}
        check_shared(rest, name)
        check_shared(others, name)
        if device.type != "cpu":
            rest, others = _placed(rest, passes), _placed(others, passes)
        structure: list[Any] = []

        def run(part: torch.Tensor) -> torch.Tensor:
            out = original(part, *rest, **others) if key is None else original(*rest, **{key: part}, **others)
            boundary = boundary_of(out, name)
            structure[:] = [with_boundary(out, None, name)]  # without tensors: they would live until the stage is done
            return boundary

        y = StreamedStage.apply(anchor, x, Call(stage, run), passes)  # type: ignore[no-untyped-call]
        return with_boundary(structure[0], y, name)

    return forward


class NotKept:
    """In the place of what a stage returned beside its boundary, such as attention weights that nobody asked for. It
    would be missing from the gradients, so a model that makes anything of it is refused."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def refuse(self, *_: object) -> NoReturn:
        raise UsageError(f"{self._stage} returns more than its boundary, and the model uses it; fuyou cannot stream it")

    __getattr__ = __getitem__ = __iter__ = __bool__ = __len__ = refuse


def boundary_of(out: Any, name: str) -> torch.Tensor:
    """The hidden state among what a stage returned: the first of a tuple, or all of it."""
    first = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(first, torch.Tensor):
        raise UsageError(f"{name} returns {type(out).__name__}, not a tensor first; fuyou cannot stream it")
    return first


def with_boundary(out: Any, boundary: torch.Tensor | None, name: str) -> Any:
    """What the model's own forward gets for `out`: the same structure around `boundary`, and nothing else in it."""
    if not isinstance(out, tuple):
        return boundary
    return (boundary, *(None if value is None else NotKept(name) for value in out[1:]))


def find_input(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[tuple[Any, ...], dict[str, Any], str | None]:
    """Which argument is the stage's input: None for the first positional one, else a keyword."""
    if isinstance(kwargs.get("position_ids"), torch.Tensor) and name.rsplit(".", 1)[-1] == "embed_positions":
        return args, kwargs, "position_ids"
    if args and isinstance(args[0], torch.Tensor):
        return args, kwargs, None
    for key in ("hidden_states", "input", "input_ids", "x"):
        if isinstance(kwargs.get(key), torch.Tensor):
            return args, kwargs, key
    raise UsageError(f"{name} is called without a tensor fuyou recognises as its input")


def check_shared(value: Any, name: str) -> None:
    """Tensors beside the input (positions, masks) are made once for all rows; one that is cut along the batch, or needs
    a gradient, would be wrong silently, so it is refused."""
    if isinstance(value, dict):
        for item in value.values():
            check_shared(item, name)
    elif isinstance(value, (tuple, list)):
        for item in value:
            check_shared(item, name)
    elif isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise UsageError(f"{name} takes a second tensor that needs a gradient; fuyou cannot stream it")
        per_row = value.dim() >= 2 and value.shape[0] != 1
        if per_row and not (value.dim() == 2 and name.rsplit(".", 1)[-1] == "embed_positions"):
            raise UsageError(f"{name} takes a tensor of shape {tuple(value.shape)} that differs between rows")
    elif isinstance(value, NotKept):
        value.refuse()
    elif value is not None and not isinstance(value, (bool, int, float, str)) and type(value).__name__.endswith("Cache"):
        raise UsageError(f"{name} is called with a cache; fuyou trains with use_cache=False")


def _placed(value: Any, passes: Passes) -> Any:
    """The same arguments with every tensor on the device."""
    if isinstance(value, torch.Tensor):
        return passes.shared(value)
    if isinstance(value, dict):
        return {key: _placed(item, passes) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_placed(item, passes) for item in value)
    return value
