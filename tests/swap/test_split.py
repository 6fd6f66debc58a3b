"""Goal: a float32 master survives being stored as bfloat16 weights and a remainder. The native tests visit every finite
pattern; here are the edges, a stride through all patterns, and the rounding."""

from __future__ import annotations

import numpy as np
import torch

from fuyou_cli.swap import kernels


def split(master: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    weights, remainder = np.empty(master.size, np.uint16), np.empty(master.size, np.int16)
    return weights, remainder, kernels.split(master, weights, remainder)


def joined(weights: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    master = np.empty(weights.size, np.float32)
    kernels.join(weights, remainder, master)
    return master


def representable() -> np.ndarray:
    """Every 4093rd bit pattern that stays finite as bfloat16, of both signs, and the ones around each edge."""
    magnitudes = np.arange(0, 0x7F7F8000, 4093, dtype=np.uint32)
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x007FFFFF, 0x00800000, 0x3F7F8000, 0x7F7F7FFF], np.uint32)
    magnitudes = np.concatenate([magnitudes, edges])
    return np.concatenate([magnitudes, magnitudes | np.uint32(0x80000000)])


def test_join_undoes_split() -> None:
    bits = representable()
    weights, remainder, nonfinite = split(bits.view(np.float32))
    assert nonfinite == 0
    np.testing.assert_array_equal(joined(weights, remainder).view(np.uint32), bits)


def test_what_rounds_to_infinity_is_counted() -> None:
    bits = np.array([0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000, 0x7F800000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    assert split(bits.view(np.float32))[2] == 5


def test_rounds_as_torch_does_but_for_exact_ties() -> None:
    bits = representable()
    weights, _, _ = split(bits.view(np.float32))
    theirs = torch.from_numpy(bits.view(np.float32).copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    tie = (bits & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(weights[~tie], theirs[~tie])
    up = (bits[tie] >> 16) + 1  # away from zero
    np.testing.assert_array_equal(weights[tie], up.astype(np.uint16))
