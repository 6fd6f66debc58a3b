"""AdamW and the bfloat16 split in numpy float32: one rounding per operation, nothing shared with the C code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fuyou_cli.swap.native import Segment, Update

F = np.float32


@dataclass
class State:
    """The arrays of one stage. `master` is float32; weights and remainder are what the store would hold in bfloat16."""

    master: np.ndarray
    momentum: np.ndarray
    variance: np.ndarray

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        bits = self.master.view(np.uint32)
        weights = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
        return weights, (bits & 0xFFFF).astype(np.uint16).view(np.int16)


def random_state(count: int, seed: int) -> State:
    draw = np.random.default_rng(seed)
    return State(
        draw.standard_normal(count).astype(F) * F(0.05),
        draw.standard_normal(count).astype(F) * F(1e-3),
        np.square(draw.standard_normal(count)).astype(F) * F(1e-6),
    )


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(F)


def random_gradients(count: int, seed: int, dtype: str) -> np.ndarray:
    """Returns float32 values, or the bits of bfloat16 ones."""
    values = np.random.default_rng(seed).standard_normal(count).astype(F) * F(2e-3)
    if dtype == "float32":
        return values
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def adamw(update: Update, state: State, gradients: np.ndarray) -> None:
    """Updates in place, segment by segment."""
    if update.gradients_dtype == "bfloat16":
        gradients = bfloat16_values(gradients)
    for segment in update.segments:
        if not segment.frozen:
            _segment(update, segment, state, gradients)


def _segment(update: Update, segment: Segment, state: State, gradients: np.ndarray) -> None:
    part = slice(segment.first, segment.first + segment.count)
    lr = update.lr * float(F(segment.lr_scale))
    g = gradients[part] * F(update.gradient_scale)
    p, m, v = state.master[part], state.momentum[part], state.variance[part]
    p = p * F(1.0 - lr * float(F(segment.weight_decay)))
    blend = 1.0 - update.beta1
    m = m + F(blend) * (g - m) if blend < 0.5 else g + (F(blend) - F(1)) * (g - m)
    v = v * F(update.beta2) + (F(1.0 - update.beta2) * g) * g
    denominator = np.sqrt(v) / F(math.sqrt(1.0 - update.beta2**update.step)) + F(update.epsilon)
    p = p + (F(-(lr / (1.0 - update.beta1**update.step))) * m) / denominator
    assert p.dtype == m.dtype == v.dtype == F
    state.master[part], state.momentum[part], state.variance[part] = p, m, v
