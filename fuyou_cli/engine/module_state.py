"""Keeps what modules hold between forwards as it was: buffers, plain attributes, and what lies in these.

Some modules remember things of a forward: rotary embeddings frequencies and the longest row so far, recurrent blocks their
state. A trace on fake tensors must leave none of it behind (`tracing`), and a forward must not depend on the ones before it
(`ModuleState.put_back`). Parameters, hooks, replaced forwards and the mode (training or not) are others' business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..core.errors import UsageError
from .experts import BANK

_COPIED = 1 << 16  # bytes of a tensor of which a copy is kept, so that what is written into it can be undone
_MISSING = object()
_NOT_STATE = {*vars(nn.Module()), "forward", BANK} - {"_buffers"}
_SHARED = (PreTrainedConfig, GenerationConfig)  # by all modules of a model; forwards read them
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_WITHOUT_PARTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_LEAVES = (*_WITHOUT_PARTS, *_CODE)


class ModuleState:
    """Remembers what modules hold at the time it is made.

    Make it while the model is as loaded, after its buffers were placed on their device. `without`: modules that are left out,
    with all that is under them. `writes`: tensors may be written into (not so on fake tensors).
    """

    def __init__(self, root: nn.Module, *, name: str = "", without: Container[nn.Module] = (), writes: bool = True) -> None:
        self._holders: list[tuple[str, dict[Any, Any] | list[Any] | deque[Any] | set[Any], Any, bool]] = []
        self._tensors: dict[int, tuple[str, torch.Tensor, int, torch.Tensor | None]] = {}
        self._seen: set[int] = set()
        self._kept: list[object] = []  # what `_seen` holds the addresses of
        self._without, self._writes = without, writes
        self._look(name or type(root).__name__, root)
        self._seen.clear()
        self._kept.clear()

    def put_back(self) -> list[str]:
        """Gives everything back what it held, and returns the names of what had changed. Raises UsageError for a tensor that
        was written into and is too large to have a copy."""
        changed: list[str] = []
        for name, holder, before, is_module in self._holders:
            if isinstance(holder, dict):
                changed += _put_back_items(name, holder, before, is_module)
            elif isinstance(holder, (list, deque)):
                if len(holder) != len(before) or any(map(_differs, holder, before)):
                    holder.clear()
                    holder.extend(before)
                    changed.append(name)
            elif holder != before:
                holder.clear()
                holder.update(before)
                changed.append(name)
        for key, (name, tensor, version, copy) in self._tensors.items():
            if tensor._version == version:
                continue
            if copy is None:
                raise UsageError(f"{name}: a forward writes into this tensor, and fuyou does not undo that; it is too large")
            with torch.no_grad():
                tensor.copy_(copy)
            self._tensors[key] = name, tensor, tensor._version, copy
            changed.append(name)
        return changed

    def _look(self, name: str, value: Any) -> None:
        """Remembers what `value` holds, if it can change."""
        if isinstance(value, (*_WITHOUT_PARTS, *_CODE, *_SHARED)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            self._note(name, value)
        elif isinstance(value, nn.Module):
            if value not in self._without:
                self._look_into_module(name, value)
        elif isinstance(value, dict):
            self._hold(name, value, dict(value))
        elif isinstance(value, (list, deque, set)):
            self._holders.append((name, value, value.copy(), False))
            self._look_at_all(name, enumerate(value))
        elif isinstance(value, (tuple, frozenset)):
            self._look_at_all(name, enumerate(value))
        elif isinstance(value, partial):
            self._look_at_all(name, enumerate((*value.args, *value.keywords.values())))
        elif hasattr(value, "__dict__"):
            self._hold(name, vars(value), dict(vars(value)))

    def _look_into_module(self, name: str, module: nn.Module) -> None:
        own = {key: value for key, value in vars(module).items() if key not in _NOT_STATE and key != "_buffers"}
        self._hold(name, vars(module), own, is_module=True)
        self._hold(name, module._buffers, dict(module._buffers))
        self._look_at_all(name, module._modules.items())

    def _hold(self, name: str, holder: dict[Any, Any], before: dict[Any, Any], *, is_module: bool = False) -> None:
        self._holders.append((name, holder, before, is_module))
        self._look_at_all(name, before.items())

    def _look_at_all(self, name: str, parts: Any) -> None:
        for key, value in list(parts):
            self._look(f"{name}.{key}", value)

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        if not self._writes or isinstance(tensor, (FakeTensor, nn.Parameter)) or tensor.is_meta or tensor.is_inference():
            return
        copy = tensor.detach().clone() if tensor.nbytes <= _COPIED else None
        self._tensors[id(tensor)] = name, tensor, tensor._version, copy


def _differs(now: Any, before: Any) -> bool:
    """Tells values apart by identity, and plain values by what they say."""
    if now is before:
        return False
    return not (type(now) is type(before) and isinstance(before, _WITHOUT_PARTS) and bool(now == before))


def _put_back_items(name: str, holder: dict[Any, Any], before: dict[Any, Any], is_module: bool) -> Iterator[str]:
    """Makes `holder` hold what was in it before; yields the names of items that differed. Of a module's attributes, those that
    are no state are left alone."""
    for key, value in before.items():
        now = holder.get(key, _MISSING)
        if now is not value and _differs(now, value):
            holder[key] = value
            yield f"{name}.{key}"
    if len(holder) > len(before):
        left = _NOT_STATE | {"_buffers"} if is_module else ()
        for key in [key for key in holder if key not in before and key not in left]:
            del holder[key]
            yield f"{name}.{key}"


# ---- traces ----------------------------------------------------------------------------------------------------------


@contextmanager
def tracing(root: nn.Module, *, mode: FakeTensorMode | None = None, length: int | None = None) -> Iterator[FakeTensorMode]:
    """Runs forwards of `root` on fake tensors inside the context, and leaves nothing of them behind: no fake tensor, and no
    number that a module took from one. Every trace goes through here. Parameters are put back by whoever replaced them.

    `mode`: of an earlier trace, whose tensors are used again. `length`: tokens of the rows, for code that reads the last
    position: rotary embeddings choose frequencies by it. Raises UsageError if a fake tensor stays.
    """
    state = ModuleState(root, writes=False)
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, LastPosition(length):
            yield mode
    finally:
        state.put_back()
        check_no_fakes(root)


class LastPosition(TorchFunctionMode):
    """Tells the largest of some positions, because a fake tensor has no values. Positions are whole numbers, as many in a row
    as there are tokens."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self._length = length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._length is not None and func in (torch.max, torch.Tensor.max) and len(args) == 1 and not kwargs:
            (of,) = args
            if of.dtype == torch.long and of.dim() and 1 <= of.shape[-1] <= self._length:
                return torch.tensor(self._length - 1, device=of.device)
        return func(*args, **(kwargs or {}))


def check_no_fakes(root: nn.Module) -> None:
    """Raises UsageError, with its name, if a fake tensor is anywhere under `root`."""
    name = next(_fakes(type(root).__name__, root, set()), None)
    if name is not None:
        owner = type(root).__name__ if isinstance(root, PreTrainedModel) else f"a block ({type(root).__name__})"
        raise UsageError(f"{owner} keeps a tensor of an inspection in {name}, so a run would compute with it; not supported")


def _fakes(name: str, value: Any, seen: set[int]) -> Iterator[str]:
    """Yields the names of fake tensors in `value`."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor) or isinstance(value.grad, FakeTensor):
            yield name
        return
    for key, part in _parts_of(value):
        if not isinstance(part, _LEAVES):  # most parts are, in each of a mixture's modules
            yield from _fakes(f"{name}.{key}" if key is not None else name, part, seen)


def _parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Returns what is in a value by name or place; None for what a module keeps its own parts in."""
    if isinstance(value, nn.Module):
        inside = ("_modules", "_parameters", "_buffers")
        return [(None if key in inside else key, part) for key, part in vars(value).items()]
    if isinstance(value, partial):
        return list(enumerate((*value.args, *value.keywords.values())))
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, deque, tuple, set, frozenset)):
        return list(enumerate(value))
    return list(vars(value).items()) if hasattr(value, "__dict__") else []
