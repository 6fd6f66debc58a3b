"""Updates weights and states that rest on a device, on that device, bit for bit like the library in host memory
(native/src/adamw.c).

On an NVIDIA GPU it is one kernel (`devices/kernels`), elsewhere tensor operations. Every operation has one rounding, in the
library's order. None is fused with another: there is no multiply-add, and no multiplication by a reciprocal in place of a
division (torch does that on a GPU for a divisor on the host). Products, sums, quotients and roots of float32 are rounded alike
everywhere, denormals included.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..planner.device import UPDATE_SCRATCH
from ..swap.daemon import Segment
from .adamw_kernel import Launch, Rounded, adamw_kernel
from .updates import Scalars

_LOST = 0x7F800000 - 0x8000  # bits of a master without the sign; from this value on it is not finite when rounded to bfloat16
_LOST_WIDE = 0x7F800000


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """Holds what one update of a stage reads and writes: 1-D tensors of the same length on the device."""

    weights: torch.Tensor  # bfloat16, or float32 (then they are the masters)
    remainder: torch.Tensor | None  # int16, only with bfloat16 weights
    momentum: torch.Tensor
    variance: torch.Tensor

    def part(self, begin: int, end: int) -> DeviceState:
        """Returns the same for parameters [begin, end)."""
        rest = None if self.remainder is None else self.remainder[begin:end]
        return DeviceState(
            weights=self.weights[begin:end],
            remainder=rest,
            momentum=self.momentum[begin:end],
            variance=self.variance[begin:end],
        )


def rounded_scalars(scalars: Scalars, weight_decay: float) -> Rounded:
    """Returns the scalars of a segment with this weight decay."""
    optimizer, step, lr = scalars.optimizer, scalars.step, scalars.lr
    blend = 1.0 - optimizer.beta1
    from_gradient = abs(blend) >= 0.5
    return Rounded(
        scale=_float(scalars.gradient_scale),
        decay=_float(1.0 - lr * _float(weight_decay)),
        blend=_float(_float(blend) - 1.0) if from_gradient else _float(blend),
        from_gradient=from_gradient,
        beta2=_float(optimizer.beta2),
        one_less_beta2=_float(1.0 - optimizer.beta2),
        correction=_float(math.sqrt(1.0 - optimizer.beta2**step)),
        epsilon=_float(optimizer.epsilon),
        negative_step=_float(-(lr / (1.0 - optimizer.beta1**step))),
    )


class DeviceAdamW:
    """Runs AdamW: as one kernel where there is one for the device (`devices/kernels`), otherwise as tensor operations, chunk by
    chunk in `scratch` (uint8, device memory; four values of 4 bytes for each parameter of a chunk). `fused`: whether to look
    for a kernel."""

    def __init__(self, scratch: torch.Tensor, *, fused: bool = True) -> None:
        self._fused = fused
        self._count = scratch.numel() // (UPDATE_SCRATCH * 4)
        floats = scratch[: self._count * UPDATE_SCRATCH * 4].view(torch.float32)
        self._floats = floats.split(self._count)
        self._divisor = torch.zeros((), device=scratch.device)
        self._worst = torch.zeros((), dtype=torch.int32, device=scratch.device)
        self._kernels: dict[tuple[bool, bool], Launch | None] = {}

    def update(
        self, state: DeviceState, gradients: torch.Tensor, scalars: Scalars, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Updates `state` in place after the compute submitted so far. `gradients`: 1-D, bfloat16 or float32; not changed.
        Parameters outside all segments keep every value. Returns the largest bits of a master without its sign, a 0-D int32
        tensor on the device that is valid until the next call (see `is_lost`)."""
        self._worst.zero_()
        launch = self._kernel(state.remainder is not None, gradients.dtype == torch.bfloat16)
        for segment in segments:
            rounded, end = rounded_scalars(scalars, segment.weight_decay), segment.first + segment.count
            at_once = max(1, segment.count) if launch is not None else self._count
            for begin in range(segment.first, end, at_once):
                part, summed = state.part(begin, min(begin + at_once, end)), gradients[begin : min(begin + at_once, end)]
                if launch is None:
                    self._chunk(part, summed, rounded)
                else:
                    launch(part.weights, part.remainder, part.momentum, part.variance, summed, self._worst, rounded)
        return self._worst

    def _kernel(self, narrow_weights: bool, narrow_gradients: bool) -> Launch | None:
        key = narrow_weights, narrow_gradients
        if self._fused and key not in self._kernels:
            self._kernels[key] = adamw_kernel(
                self._worst.device, narrow_weights=narrow_weights, narrow_gradients=narrow_gradients
            )
        return self._kernels.get(key)

    def _chunk(self, state: DeviceState, gradients: torch.Tensor, k: Rounded) -> None:
        p, g, t, u = (values[: gradients.numel()] for values in self._floats)
        if state.remainder is None:
            p = state.weights
        else:
            _join(state.weights, state.remainder, p, u)
        m, v = state.momentum, state.variance
        p.mul_(k.decay)
        g.copy_(gradients).mul_(k.scale)
        torch.sub(g, m, out=t)
        t.mul_(k.blend)
        torch.add(g if k.from_gradient else m, t, out=m)
        torch.mul(g, k.one_less_beta2, out=t)
        t.mul_(g)
        v.mul_(k.beta2).add_(t)
        _root(v, t)
        t.div_(self._divisor.fill_(k.correction)).add_(k.epsilon)
        torch.mul(m, k.negative_step, out=u)
        p.add_(u.div_(t))
        bits, spare = p.view(torch.int32), t.view(torch.int32)
        torch.bitwise_and(bits, 0x7FFFFFFF, out=spare)
        torch.maximum(self._worst, spare.amax(), out=self._worst)
        if state.remainder is not None:
            _split(bits, state.weights, state.remainder, spare)


def is_lost(worst: int, *, narrow: bool) -> bool:
    """Tells whether a master with these bits is not finite, or not finite as bfloat16 (`narrow`)."""
    return worst >= (_LOST if narrow else _LOST_WIDE)


def _root(values: torch.Tensor, roots: torch.Tensor) -> None:
    """Takes square roots. On a GPU torch rounds them as IEEE 754 says. On the host they are MKL's, which are rounded
    differently."""
    if values.is_cpu:
        np.sqrt(values.numpy(), out=roots.numpy())
    else:
        torch.sqrt(values, out=roots)


def _join(weights: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor, spare: torch.Tensor) -> None:
    bits, rest = master.view(torch.int32), spare.view(torch.int32)
    bits.copy_(weights.view(torch.int16)).bitwise_left_shift_(16)
    bits.add_(rest.copy_(remainder))


def _split(bits: torch.Tensor, weights: torch.Tensor, remainder: torch.Tensor, spare: torch.Tensor) -> None:
    """Splits masters. Both halves, after an arithmetic shift back, fit in int16, so no conversion has to cut."""
    torch.add(bits, 0x8000, out=spare)
    weights.view(torch.int16).copy_(spare.bitwise_right_shift_(16))
    bits.bitwise_left_shift_(16)
    remainder.copy_(bits.bitwise_right_shift_(16))


def _float(value: float) -> float:
    """Rounds to float32."""
    return ctypes.c_float(value).value
