"""AdamW with bfloat16 and int8 states in numpy, after the header and the texts of small_states.c and
int8_states.c: one rounding per operation, or for a product and a sum where it says so (_fused)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fuyou_cli.spec.model import STATE_BLOCK, STATE_TILE
from fuyou_cli.swap.native import Segment, Update

from . import adamw_reference as reference
from .adamw_reference import F, State

_PAGE = 4096


def adamw(update: Update, master: np.ndarray, momentum: np.ndarray, variance: np.ndarray, gradients: np.ndarray) -> None:
    """Updates in place; momentum and variance are the bytes of their layout."""
    step = _bfloat16 if update.states_dtype == "bfloat16" else _int8
    for segment in update.segments:
        if not segment.frozen:
            step(update, segment, master, momentum, variance, gradients)


def _stepped(update: Update, segment: Segment, part: slice, state: State, gradients: np.ndarray) -> None:
    count = part.stop - part.start
    alone = Segment(first=0, count=count, weight_decay=segment.weight_decay, lr_scale=segment.lr_scale)
    values = {name: getattr(update, name) for name in update.__slots__}
    reference.adamw(Update(**{**values, "params": count, "segments": (alone,)}), state, gradients[part])


def _bfloat16(
    update: Update, segment: Segment, master: np.ndarray, momentum: np.ndarray, variance: np.ndarray, gradients: np.ndarray
) -> None:
    part = slice(segment.first, segment.first + segment.count)
    bits = [state.view(np.uint16) for state in (momentum, variance)]
    state = State(master[part].copy(), *(reference.bfloat16_values(each[part]) for each in bits))
    _stepped(update, segment, part, state, gradients)
    draws = _draws(_key(update.seed, update.step, update.label), np.arange(part.start, part.stop, dtype=np.uint32))
    master[part] = state.master
    bits[0][part] = (state.momentum.view(np.uint32) + (draws & np.uint32(0xFFFF))) >> 16
    bits[1][part] = (state.variance.view(np.uint32) + (draws >> np.uint32(16))) >> 16


def _key(seed: int, step: int, label: int) -> np.uint32:
    def mixed(x: int) -> int:
        x &= 2**64 - 1
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        x = (x ^ x >> 27) * 0x94D049BB133111EB & 2**64 - 1
        return x ^ x >> 31

    return np.uint32(mixed(mixed(mixed(seed) + step) + label) & 2**32 - 1)


def _draws(key: np.uint32, index: np.ndarray) -> np.ndarray:
    x = index * np.uint32(0x9E3779B9) + key
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


def _int8(
    update: Update, segment: Segment, master: np.ndarray, momentum: np.ndarray, variance: np.ndarray, gradients: np.ndarray
) -> None:
    key = _key(update.seed, update.step, update.label)
    for part in _blocks(segment):
        scale_m, codes_m = _block(momentum, part, np.int8)
        scale_v, codes_v = _block(variance, part, np.uint8)
        p, g = _whole(master[part]), _whole(_values(update, gradients[part]))
        m, v = _doubled(codes_m[_PLACES] * scale_m), _shifted(codes_v[_PLACES] * scale_v, 2)
        p, m, v = _int8_step(update, segment, p, g, m, v)
        master[part] = p[: part.stop - part.start]
        codes_m[_PLACES] = _to_nearest(_halved(m), _scaled(scale_m, _halved(m), 127))
        scale_m.view(np.uint32)[0] &= ~np.uint32(3)  # three halves of it are exact
        codes_v[_PLACES] = np.maximum(_at_random(_shifted(v, -2), _scaled(scale_v, _shifted(v, -2), 255), key, part.start), 1)


def _values(update: Update, gradients: np.ndarray) -> np.ndarray:
    return reference.bfloat16_values(gradients) if update.gradients_dtype == "bfloat16" else gradients


def _int8_step(
    update: Update, segment: Segment, p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """AdamW with factors gathered: fewer products, and no division by the correction."""
    lr, scale, blend = update.lr * float(F(segment.lr_scale)), F(update.gradient_scale), 1.0 - update.beta1
    keep = F(1) - F(blend) if blend < 0.5 else -(F(blend) - F(1))
    correction = F(math.sqrt(1.0 - update.beta2**update.step))
    m = _fused(m, keep, ((F(1) - keep) * scale) * g)
    small = (np.sqrt(F(1.0 - update.beta2)) * scale) * g
    v = _fused(small, small, v * F(update.beta2))
    step = F(-(lr / (1.0 - update.beta1**update.step))) * correction
    divisor = _fused(np.sqrt(v), F(1) / step, F(update.epsilon) * correction / step) if step else F(-np.inf)
    p = _fused(p, F(1.0 - lr * float(F(segment.weight_decay))), m / divisor)
    assert p.dtype == m.dtype == v.dtype == F
    return p, m, v


def _fused(a: np.ndarray, b: np.ndarray | F, c: np.ndarray | F) -> np.ndarray:
    """Returns a * b + c, rounded once: doubles hold the product, and of an inexact sum its odd neighbour, which no float and no
    middle between two is."""
    product, c = np.multiply(a, b, dtype=np.float64), np.float64(c)
    total = product + c
    added = total - product
    lost = (product - (total - added)) + (c - added)
    beyond = np.nextafter(total, np.copysign(np.inf, lost))
    odd = (total.view(np.uint64) & np.uint64(1)).astype(bool)
    return np.where((lost != 0) & ~odd, beyond, total).astype(F)


def _blocks(segment: Segment) -> Iterator[slice]:
    end = segment.first + segment.count
    for first in range(segment.first, end, STATE_BLOCK):
        yield slice(first, min(first + STATE_BLOCK, end))


def _whole(values: np.ndarray) -> np.ndarray:
    """Returns a block with zeros behind what there is of it."""
    return np.concatenate([values, np.zeros(STATE_BLOCK - len(values), F)])


# Where the code of a block's parameter is: byte b of word i belongs to parameter 2i + b % 2 + 32 (b / 2).
_PLACES = np.array([p % 32 // 2 * 4 + p % 2 + p // 32 * 2 for p in range(STATE_BLOCK)])


def _block(state: np.ndarray, part: slice, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Returns views of the scale and of the codes."""
    tile, inside = divmod(part.start, STATE_TILE)
    begin = tile * (STATE_TILE + _PAGE)
    scale = begin + inside // STATE_BLOCK * 4
    codes = begin + _PAGE + inside
    return state[scale : scale + 4].view(F), state[codes : codes + STATE_BLOCK].view(dtype)


def _shifted(values: np.ndarray, by: int) -> np.ndarray:
    bits = values.view(np.uint32)
    return (bits << np.uint32(by) if by > 0 else bits >> np.uint32(-by)).view(F)


def _halved(values: np.ndarray) -> np.ndarray:
    """The root of the size, with the sign."""
    return np.copysign(_shifted(np.abs(values), -1), values)


def _doubled(roots: np.ndarray) -> np.ndarray:
    return np.copysign(_shifted(np.abs(roots), 1), roots)


def _scaled(scale: np.ndarray, roots: np.ndarray, most: int) -> F:
    """Sets a block's scale; returns codes per root."""
    largest = np.abs(roots).max()
    scale[0] = max(largest, F(2**-119)) * (F(1) / F(most)) if largest > 0 else F(0)
    return F(most) / max(largest, F(2**-119))


def _to_nearest(roots: np.ndarray, per_root: F) -> np.ndarray:
    integers = F(1.5 * 2**23)
    return _fused(roots, per_root, integers) - integers


def _at_random(roots: np.ndarray, per_root: F, key: np.uint32, first: int) -> np.ndarray:
    """Rounds a block's values up with the probability of their fractions, of which 15 bits count. Half a draw serves a value as
    it is, and another one as what it lacks to the most."""
    words = _walked(_draws(key, np.array([first // STATE_BLOCK], np.uint32)), np.arange(STATE_BLOCK // 4, dtype=np.uint32))
    half = np.stack([words & np.uint32(0x7FFF), words >> np.uint32(17)], axis=1).reshape(-1)
    draws = np.concatenate([half, np.uint32(0x7FFF) - half])
    return _fused(roots, per_root, F(256) + draws.astype(F) / F(2**15)) // F(1) - F(256)


def _walked(start: np.ndarray, index: np.ndarray) -> np.ndarray:
    x = start + index * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))
