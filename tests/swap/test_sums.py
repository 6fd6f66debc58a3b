"""Goal: the gradient norm and the checksums do not depend on how the work is cut, and notice what they must."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fuyou_cli.swap import kernels

from . import adamw_reference as reference

LEAF = 16384


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, LEAF, 5 * LEAF + 1234])
def test_sum_equals_its_leaves_added_in_order(dtype: str, count: int) -> None:
    values = reference.random_gradients(count, 1, dtype)
    whole, _ = kernels.sum_squares(values, dtype)  # type: ignore[arg-type]
    total = 0.0
    for at in range(0, count, LEAF):
        total += kernels.sum_squares(values[at : at + LEAF], dtype)[0]  # type: ignore[arg-type]
    assert whole == total
    exact = reference.bfloat16_values(values) if dtype == "bfloat16" else values
    assert whole == pytest.approx(math.fsum(float(v) ** 2 for v in exact), rel=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nonfinite_values_are_counted_wherever_they_are(dtype: str) -> None:
    values = reference.random_gradients(2 * LEAF + 5, 2, dtype)
    bad = [0, 7, LEAF - 1, LEAF, 2 * LEAF + 4]
    for index, special in zip(bad, [np.inf, -np.inf, np.nan, np.inf, np.nan], strict=True):
        values[index] = special if dtype == "float32" else np.array([special], np.float32).view(np.uint32)[0] >> 16
    assert kernels.sum_squares(values, dtype)[1] == len(bad)  # type: ignore[arg-type]


def test_unaligned_memory_is_summed_too() -> None:
    values = reference.random_gradients(1001, 3, "float32")
    raw = bytearray(b"x" + values.tobytes())
    assert kernels.sum_squares(memoryview(raw)[1:], "float32") == kernels.sum_squares(values, "float32")


def test_checksum_notices_flips_moves_and_lengths() -> None:
    data = np.random.default_rng(4).integers(0, 256, 3 * 4096 + 100, dtype=np.uint8)
    good = kernels.checksum(data)
    assert kernels.checksum(data.copy()) == good
    for place in (0, 1, 127, 128, 4095, 4096, 3 * 4096, data.size - 1):
        for bit in range(8):
            changed = data.copy()
            changed[place] ^= np.uint8(1 << bit)
            assert kernels.checksum(changed) != good
    swapped = data.copy()
    swapped[:4096], swapped[4096:8192] = data[4096:8192], data[:4096]
    assert kernels.checksum(swapped) != good
    for first, second in ((0, 8), (0, 128), (8, 4000)):  # words of one block change places
        moved = data.copy()
        moved[first : first + 8], moved[second : second + 8] = data[second : second + 8], data[first : first + 8]
        assert kernels.checksum(moved) != good
    assert kernels.checksum(data[:-1]) != good
    zeros = {kernels.checksum(bytes(size)) for size in (0, 1, 4095, 4096, 4097, 8192)}
    assert len(zeros) == 6


def test_checksum_is_the_same_on_every_machine() -> None:
    """Verifies a store written elsewhere: the value is part of the format."""
    assert kernels.checksum(bytes(range(256)) * 64) == 0xD8EB827289594244
