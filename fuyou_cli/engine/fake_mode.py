"""A fake mode that remembers what torch's operators return for fake tensors of the same shapes.

torch's own cache takes 0.1 ms for each operator, and misses a part of a tensor that begins elsewhere than the last one. Blocks
that compute in chunks run thousands of operators, on one chunk after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .operators import DEVICE_OF, device_of

_aten = torch.ops.aten
_VIEWS = frozenset(
    (
        _aten.view.default, _aten._unsafe_view.default, _aten.select.int, _aten.slice.Tensor, _aten.transpose.int,
        _aten.t.default, _aten.unsqueeze.default, _aten.expand.default, _aten.permute.default, _aten.squeeze.dim,
        _aten.detach.default,
    )
)  # fmt: skip
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_BY_VALUE = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
_OF_SIZES = frozenset((_aten.select_backward.default, _aten.slice_backward.default))  # their results, not of which part it is


class RememberingMode(FakeTensorMode):
    """Returns the fake tensors that its base does. Views are those of torch's own kernels. Of other operators that return one
    tensor, a new one or an argument, results are remembered."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own, which would keep the same once more

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and each operator would pass two functions more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and not self.in_kernel_invocation:
            return device_of(*args)
        kwargs = kwargs or {}
        if func in _VIEWS and not kwargs and self._is_own(args[0]):
            return self._view(func, *args)
        key, tensors = [func, torch.get_default_dtype()], list[FakeTensor]()
        given = args[:2] if func in _OF_SIZES else args
        if not self._describe(given, key, tensors) or not self._describe(kwargs.items(), key, tensors) or not tensors:
            return super().__torch_dispatch__(func, types, args, kwargs)
        about = tuple(key)
        result = _KNOWN.get(about)
        if result is not None:
            return result.made(self, tensors)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if about not in _KNOWN:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[about] = _Result.of(func, tensors, out)
        return out

    def _view(self, func: Any, of: FakeTensor, *args: Any) -> FakeTensor:
        """Returns a view as torch makes it of a tensor without a device."""
        whole = torch.empty(0, dtype=of.dtype, device="meta")
        whole.set_(of.untyped_storage(), of.storage_offset(), of.shape, of.stride())
        return FakeTensor(self, func(whole, *args), of.fake_device)

    def _is_own(self, value: Any) -> bool:
        return type(value) is FakeTensor and value.fake_mode is self and value.constant is None and not _is_special(value)

    def _describe(self, values: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
        """Adds to `key` what a result depends on. Returns False for arguments that may decide it in another way."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_own(value):
                    return False
                key += (value.shape, value.stride(), value.dtype, value.fake_device, value.requires_grad)
                tensors.append(value)
            elif kind in _PLAIN:
                key += (kind, value)  # as 1 and 1.0 are equal
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(value, key, tensors):
                    return False
            else:
                return False
        return True


@dataclass(frozen=True, slots=True)
class _Result:
    """Describes what an operator returned: the tensor at this place among its arguments, or a new one like this (with an
    allocation of its own)."""

    place: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, func: Any, tensors: list[FakeTensor], out: Any) -> _Result | None:
        """Returns None if it is not known that equal arguments have equal results."""
        if type(out) is not FakeTensor or out.constant is not None or _is_special(out):
            return None
        if func.namespace != "aten" or not _BY_VALUE.isdisjoint(func.tags):
            return None
        place = next((n for n, tensor in enumerate(tensors) if tensor is out), -1)
        result = cls(place, out.shape, out.stride(), out.dtype, out.fake_device)
        is_whole = result._new().untyped_storage().nbytes() == out.untyped_storage().nbytes()
        if place < 0 and (out.requires_grad or out.storage_offset() or not is_whole):
            return None
        shared = any(tensor.untyped_storage()._cdata == out.untyped_storage()._cdata for tensor in tensors)
        return None if place < 0 and shared else result

    def made(self, mode: FakeTensorMode, tensors: list[FakeTensor]) -> FakeTensor:
        return tensors[self.place] if self.place >= 0 else FakeTensor(mode, self._new(), self.device)

    def _new(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_KNOWN: dict[tuple[Any, ...], _Result | None] = {}  # of all modes: a model is traced in several shapes, and often
_MOST_KNOWN = 1 << 14  # some 20 MB


def _is_special(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg()
