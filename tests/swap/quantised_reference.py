"""The quantised layouts in numpy float32, one rounding per operation: nothing shared with the C code.

The rules are those of bitsandbytes 0.50's CPU kernels; `scripts/bench_quantised.py` compares bytes with the library itself.
"""

from __future__ import annotations

import numpy as np

F = np.float32
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], F,
)  # fmt: skip


def nf4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns packed bytes and maxima of blocks of 64."""
    bounds = (NF4[:-1] + NF4[1:]) / F(2)
    codes, maxima = [], []
    for begin in range(0, values.size, 64):
        block = values[begin : begin + 64]
        most = np.abs(block).max()
        least = max(most, F(1e-38))
        whole = block.size == 64
        maxima.append(most if whole else least)
        scaled = block * (F(1) / least) if whole else block / least
        codes.append(np.searchsorted(bounds, scaled, side="left"))
    flat = np.concatenate([*codes, [7]]).astype(np.uint8)[: (values.size + 1) // 2 * 2]
    return flat[::2] << 4 | flat[1::2], np.array(maxima, F)


def nf4_values(packed: np.ndarray, maxima: np.ndarray, count: int) -> np.ndarray:
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[:count]
    return NF4[codes] * np.repeat(maxima, 64)[:count]


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Rounds to nearest, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def dynamic(values: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and maxima of blocks of 256."""
    middles = F(0.5) * (levels[:-1] + levels[1:])
    codes, maxima = [], []
    for begin in range(0, values.size, 256):
        block = values[begin : begin + 256]
        most = np.abs(block).max()
        scaled = np.clip(block * (F(1) / most), F(-1), F(1)) if most else block
        places = ((scaled + F(1)) * F(0.5) * F(65535) + F(0.5)).astype(np.int32).astype(F)
        found = np.searchsorted(middles, F(-1) + F(2) * places / F(65535), side="left")
        codes.append(found if most else np.zeros(block.size))
        maxima.append(most)
    return np.concatenate(codes).astype(np.uint8), np.array(maxima, F)


def int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and maxima of rows."""
    maxima = np.abs(rows).max(axis=1)
    scale = np.array([F(1) / most * F(127) if most else F(0) for most in maxima], F)
    return np.rint(rows * scale[:, None]).astype(np.int8), maxima


def int8_values(codes: np.ndarray, maxima: np.ndarray) -> np.ndarray:
    return codes.astype(F) * maxima[:, None] * F(7.874015718698502e-3)
