"""AdamW with bfloat16 and int8 states in numpy, after the header and the text of small_states.c: one rounding per operation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fuyou_cli.spec.model import STATE_BLOCK, STATE_TILE
from fuyou_cli.swap.requests import Segment, Update

from . import reference
from .reference import F, State

_PAGE = 4096


def adamw(update: Update, master: np.ndarray, momentum: np.ndarray, variance: np.ndarray, gradients: np.ndarray) -> None:
    """In place; momentum and variance are the bytes of their layout."""
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
    for part in _blocks(segment):
        scale_m, codes_m = _block(momentum, part, np.int8)
        scale_v, codes_v = _block(variance, part, np.uint8)
        m, v = codes_m.astype(F) * scale_m, codes_v.astype(F) * scale_v
        state = State(master[part].copy(), m * np.abs(m), (v * v) * (v * v))
        _stepped(update, segment, part, state, gradients)
        master[part] = state.master
        codes_m[:] = _coded(scale_m, np.sqrt(np.abs(state.momentum)), 127) * np.where(state.momentum < 0, -1, 1)
        roots = np.sqrt(np.sqrt(state.variance))
        codes_v[:] = np.maximum(_coded(scale_v, roots, 255), roots > 0)


def _blocks(segment: Segment) -> Iterator[slice]:
    end = segment.first + segment.count
    for first in range(segment.first, end, STATE_BLOCK):
        yield slice(first, min(first + STATE_BLOCK, end))


def _block(state: np.ndarray, part: slice, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Views of the scale and of the codes."""
    tile, inside = divmod(part.start, STATE_TILE)
    begin = tile * (STATE_TILE + _PAGE)
    scale = begin + inside // STATE_BLOCK * 4
    codes = begin + _PAGE + inside
    return state[scale : scale + 4].view(F), state[codes : codes + part.stop - part.start].view(dtype)


def _coded(scale: np.ndarray, roots: np.ndarray, most: int) -> np.ndarray:
    largest = roots.max()
    per_code = F(most) / largest if largest > 0 else F(0)
    scale[0] = largest * (F(1) / F(most))
    return (roots * per_code + F(0.5)).astype(np.int32)
