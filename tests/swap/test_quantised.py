"""Goal: the codecs write and read the quantised layouts exactly. Method: bit for bit against a numpy reference or the
decoders of transformers, over drawn sizes, scales and dtypes, and independent of the number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fuyou_cli.core.errors import UsageError
from fuyou_cli.swap import kernels
from fuyou_cli.swap.kernels import Workers

from . import quantised_reference as reference

DTYPES = ("float32", "bfloat16")
POWERS = st.sampled_from([-140, -126, -6, 0, 100])  # denormals among them
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.one_of(st.integers(1, 700), st.sampled_from([64, 128, 256, 4096]))


def _drawn(count: int, seed: int, dtype: str, power: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws memory to encode, and the float32 values it stands for; zeros and exact levels among them, one block all zeros."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal(count).astype(np.float32) * np.float32(2.0**power)
    values[draw.random(count) < 0.1] = 0
    values[64:128] = 0
    values[::7] = reference.NF4[np.arange(values[::7].size) % 16] * np.float32(2.0**power)
    if dtype == "float32":
        return values, values
    bits = reference.bfloat16_bits(values)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def _decoded(decode: object, count: int, dtype: str) -> np.ndarray:
    memory = np.zeros(count, np.float32 if dtype == "float32" else np.uint16)
    decode(memory, dtype)  # type: ignore[operator]
    return memory


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.view(np.uint32) if dtype == "float32" else reference.bfloat16_bits(values)


@examples(60)
@given(count=SIZES, seed=SEEDS, power=POWERS, dtype=st.sampled_from(DTYPES))
def test_nf4_is_the_reference_bit_for_bit(count: int, seed: int, power: int, dtype: str) -> None:
    memory, values = _drawn(count, seed, dtype, power)
    packed, maxima = np.empty((count + 1) // 2, np.uint8), np.empty(-(-count // 64), np.float32)
    kernels.nf4_encode(memory, dtype, packed, maxima)  # type: ignore[arg-type]
    expected, most = reference.nf4(values)
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(maxima.view(np.uint32), most.view(np.uint32))
    back = reference.nf4_values(expected, most, count)
    for out in DTYPES:
        got = _decoded(lambda into, name: kernels.nf4_decode(packed, maxima, into, name), count, out)
        np.testing.assert_array_equal(got.view(np.uint32 if out == "float32" else np.uint16), _rounded(back, out))


@examples(40)
@given(rows=st.integers(1, 9), columns=st.integers(1, 300), seed=SEEDS, dtype=st.sampled_from(DTYPES))
def test_int8_is_the_reference_bit_for_bit(rows: int, columns: int, seed: int, dtype: str) -> None:
    memory, values = _drawn(rows * columns, seed, dtype, -5)
    codes, maxima = np.empty((rows, columns), np.int8), np.empty(rows, np.float32)
    kernels.int8_encode(memory, columns, dtype, codes, maxima)  # type: ignore[arg-type]
    expected, most = reference.int8(values.reshape(rows, columns))
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(maxima, most)
    back = reference.int8_values(expected, most).reshape(-1)
    for out in DTYPES:
        got = _decoded(lambda into, name: kernels.int8_decode(codes, maxima, columns, into, name), rows * columns, out)
        np.testing.assert_array_equal(got.view(np.uint32 if out == "float32" else np.uint16), _rounded(back, out))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


@examples(40)
@given(matrices=st.integers(1, 3), rows=st.integers(1, 70), blocks=st.integers(1, 5), seed=SEEDS, dtype=st.sampled_from(DTYPES))
def test_mxfp4_is_what_transformers_decodes(matrices: int, rows: int, blocks: int, seed: int, dtype: str) -> None:
    """All exponents with which every value is finite, those of denormals among them."""
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (matrices, rows, blocks, 16), generator=draw, dtype=torch.uint8)
    exponents = torch.randint(0, 253, (matrices, rows, blocks), generator=draw, dtype=torch.uint8)
    wanted = convert_moe_packed_tensors(packed, exponents, dtype=getattr(torch, dtype)).transpose(1, 2)
    got = torch.empty(matrices * rows * blocks * 32, dtype=wanted.dtype)
    kernels.mxfp4_decode(packed.numpy().reshape(-1), exponents.numpy().reshape(-1), got.view(torch.uint8).numpy(), dtype)
    assert torch.equal(_bits(got), _bits(wanted))


@examples(40)
@given(sides=st.tuples(st.integers(1, 3), st.integers(1, 3)), seed=SEEDS, dtype=st.sampled_from(DTYPES))
def test_fp8_is_what_transformers_decodes(sides: tuple[int, int], seed: int, dtype: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 255, (128 * sides[0], 128 * sides[1]), generator=draw, dtype=torch.uint8)
    codes[codes == 127] = 0
    scales = torch.randn(sides, generator=draw) * 2.0 ** torch.randint(-130, 100, sides, generator=draw)
    wanted = Fp8Dequantize(None)._dequantize_one(codes.view(torch.float8_e4m3fn), scales, getattr(torch, dtype))
    assert torch.equal(_bits(_of_fp8(codes, scales, dtype)), _bits(wanted))


def _of_fp8(codes: torch.Tensor, scales: torch.Tensor, dtype: str, **workers: Workers) -> torch.Tensor:
    got = torch.empty(codes.numel(), dtype=getattr(torch, dtype))
    memory = (one.contiguous().view(torch.uint8).numpy().reshape(-1) for one in (codes, scales))
    kernels.fp8_decode(*memory, codes.shape[1], got.view(torch.uint8).numpy(), dtype, **workers)  # type: ignore[arg-type]
    return got


@examples(60)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=SEEDS, dtype=st.sampled_from(DTYPES))
def test_squares_of_fp8_are_cut_at_the_ends(rows: int, columns: int, seed: int, dtype: str) -> None:
    """transformers refuses such sizes; DeepSeek's own decoder cuts the last squares."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (rows, columns), generator=draw, dtype=torch.uint8)
    scales = torch.randn((-(-rows // 128), -(-columns // 128)), generator=draw)
    every = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    wanted = (codes.view(torch.float8_e4m3fn).float() * every).to(getattr(torch, dtype))
    assert torch.equal(_bits(_of_fp8(codes, scales, dtype)), _bits(wanted))


def test_values_at_the_borders_between_codes() -> None:
    """There every rounding decides, and so the order of operations. A whole block of nf4, and one that ends early."""
    levels, draw = reference.NF4, np.random.default_rng(8)
    for most in draw.uniform(0.01, 10, 100).astype(np.float32):
        borders = _with_neighbours((levels[:-1] + levels[1:]) / np.float32(2) * most)
        for values in (np.append(borders, most), np.concatenate([borders, np.full(19, most)])):
            packed, maxima = np.empty((values.size + 1) // 2, np.uint8), np.empty(1, np.float32)
            kernels.nf4_encode(values, "float32", packed, maxima)
            np.testing.assert_array_equal(packed, reference.nf4(values)[0])
        row = np.append(_with_neighbours((np.arange(127, dtype=np.float32) + np.float32(0.5)) / np.float32(127) * most), most)
        codes, maxima = np.empty((1, row.size), np.int8), np.empty(1, np.float32)
        kernels.int8_encode(row, row.size, "float32", codes, maxima)
        np.testing.assert_array_equal(codes, reference.int8(row[None])[0])


def _with_neighbours(values: np.ndarray) -> np.ndarray:
    beside = [np.nextafter(values, np.float32(towards)) for towards in (-np.inf, np.inf)]
    return np.concatenate([values, *beside]).astype(np.float32)


@examples(40)
@given(count=SIZES, seed=SEEDS, offset=st.sampled_from([0.0, 0.0371]))
def test_dynamic_codes_are_the_reference_bit_for_bit(count: int, seed: int, offset: float) -> None:
    _, values = _drawn(count, seed, "float32", -4)
    levels = kernels.dynamic_levels()
    codes, maxima = np.empty(count, np.uint8), np.empty(-(-count // 256), np.float32)
    kernels.dynamic_encode(values, codes, maxima)
    expected, most = reference.dynamic(values, levels)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(maxima, most)
    back = np.empty(count, np.float32)
    kernels.dynamic_decode(codes, maxima, back, offset=offset)
    np.testing.assert_array_equal(back, levels[expected] * np.repeat(most, 256)[:count] + np.float32(offset))


def test_dynamic_levels_are_rising_and_reach_from_minus_one_to_one() -> None:
    levels = kernels.dynamic_levels()
    assert levels.size == 256 and np.all(np.diff(levels) > 0)
    assert levels[-1] == 1 and levels[0] == np.float32(-0.99296874) and 0 in levels
    np.testing.assert_array_equal(levels[:127], -levels[254:127:-1])  # all but zero and one


def test_double_quantisation_keeps_maxima_within_a_hundredth_of_their_spread() -> None:
    maxima = np.abs(np.random.default_rng(3).standard_normal(5000).astype(np.float32)) * np.float32(0.02) + np.float32(0.05)
    offset = float(maxima.mean())
    codes, most, back = np.empty(5000, np.uint8), np.empty(20, np.float32), np.empty(5000, np.float32)
    kernels.dynamic_encode(maxima - np.float32(offset), codes, most)
    kernels.dynamic_decode(codes, most, back, offset=offset)
    spread = np.repeat(most, 256)[:5000]
    assert np.all(np.abs(back - maxima) <= 0.01 * spread)  # levels are at most 1/64 apart
    assert codes.nbytes + most.nbytes < 0.27 * maxima.nbytes


def test_any_number_of_workers_writes_the_same_bytes() -> None:
    count, columns = 64 * 9000 + 31, 32
    memory, _ = _drawn(count, 5, "bfloat16", -6)
    rows = count // columns
    found = []
    for workers in (1, 2, 3):
        packed, maxima = np.empty((count + 1) // 2, np.uint8), np.empty(-(-count // 64), np.float32)
        codes, most = np.empty(rows * columns, np.int8), np.empty(rows, np.float32)
        values = np.empty(count, np.uint16), np.empty(rows * columns, np.uint16)
        with Workers(workers) as several:
            kernels.nf4_encode(memory, "bfloat16", packed, maxima, workers=several)
            kernels.nf4_decode(packed, maxima, values[0], "bfloat16", workers=several)
            kernels.int8_encode(memory[: rows * columns], columns, "bfloat16", codes, most, workers=several)
            kernels.int8_decode(codes, most, columns, values[1], "bfloat16", workers=several)
            exponents, small = np.full(count // 32, 120, np.uint8), np.empty(count // 32 * 32, np.uint16)
            kernels.mxfp4_decode(packed[: small.size // 2], exponents, small, "bfloat16", workers=several)
            matrix = torch.from_numpy(codes & 63).view(-1, columns)
            squares = torch.linspace(0.5, 2, -(-rows // 128))[:, None]
            read = _of_fp8(matrix, squares, "bfloat16", workers=several).view(torch.int16).numpy()
        found.append(b"".join(array.tobytes() for array in (packed, maxima, codes, most, *values, small, read)))
    assert found[0] == found[1] == found[2]


def test_values_that_are_not_finite_are_refused() -> None:
    values = np.zeros(200, np.float32)
    values[7], values[190] = np.nan, np.inf
    with pytest.raises(UsageError, match="2 values are NaN or Inf"):
        kernels.nf4_encode(values, "float32", np.empty(100, np.uint8), np.empty(4, np.float32))
    with pytest.raises(UsageError, match="2 values are NaN or Inf"):
        kernels.int8_encode(values, 100, "float32", np.empty(200, np.int8), np.empty(2, np.float32))
    with pytest.raises(UsageError, match="2 values are NaN or Inf"):
        kernels.dynamic_encode(values, np.empty(200, np.uint8), np.empty(1, np.float32))


def test_arrays_of_the_wrong_size_are_refused() -> None:
    values = np.zeros(130, np.float32)
    for packed, maxima in ((64, 3), (65, 2)):
        with pytest.raises(ValueError, match="are needed"):
            kernels.nf4_encode(values, "float32", np.empty(packed, np.uint8), np.empty(maxima, np.float32))
    with pytest.raises(ValueError, match="are needed"):
        kernels.mxfp4_decode(np.empty(32, np.uint8), np.empty(3, np.uint8), np.empty(64, np.float32), "float32")
    with pytest.raises(ValueError, match="are needed"):
        kernels.fp8_decode(np.empty(260, np.uint8), np.empty(2, np.float32), 130, np.empty(260, np.float32).data, "bfloat16")
    with pytest.raises(ValueError, match="are needed"):
        kernels.int8_encode(values, 13, "float32", np.empty(130, np.int8), np.empty(11, np.float32))
