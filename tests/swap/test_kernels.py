"""The update beside a reference in numpy, the split of masters, sums of squares and checksums."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fuyou_cli.swap import kernels
from fuyou_cli.swap.native import Segment, Update

from . import adamw_reference as reference
from .adamw_reference import F, State

# ---- split -----------------------------------------------------------------------------------------------------------
# Goal: a float32 master survives being stored as bfloat16 weights and a remainder. The native tests visit every finite pattern;
# here are the edges, a stride through all patterns, and the rounding.


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


# ---- sums ------------------------------------------------------------------------------------------------------------
# Goal: the gradient norm and the checksums do not depend on how the work is cut, and notice what they must.


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


# ---- adamw -----------------------------------------------------------------------------------------------------------
# Goal: AdamW in C is AdamW. Method: bit for bit against a numpy float32 reference, closely against torch's own, for every pair
# of dtypes; and independent of how a stage is cut.


COUNT = 2048 * 5
SEGMENTS = (
    Segment(first=0, count=1000, weight_decay=0.1),
    Segment(first=1000, count=3, weight_decay=0.0),
    Segment(first=1003, count=4001, weight_decay=0.01, lr_scale=0.5),
    Segment(first=5100, count=2000, weight_decay=0.1, frozen=True),
    Segment(first=7100, count=3000, weight_decay=0.1),
)
UNTOUCHED = [slice(5004, 7100), slice(10100, COUNT)]  # a gap, the frozen segment, the padding


def an_update(step: int = 1, **changes: object) -> Update:
    fields: dict[str, object] = dict(
        params=COUNT, weights_dtype="float32", gradients_dtype="float32", weights=0, lr=1e-3, beta1=0.9, beta2=0.999,
        epsilon=1e-8, step=step, segments=SEGMENTS,
    )  # fmt: skip
    return Update(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gradients_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "scalars", [{}, {"gradient_scale": 0.37}, {"beta1": 0.3, "beta2": 0.95}, {"lr": 3e-2, "epsilon": 1e-6}]
)
def test_matches_the_numpy_reference_bit_for_bit(weights_dtype: str, gradients_dtype: str, scalars: dict[str, float]) -> None:
    expected = reference.random_state(COUNT, seed=1)
    master, momentum, variance = expected.master.copy(), expected.momentum.copy(), expected.variance.copy()
    weights, remainder = expected.split()
    for step in range(1, 21):
        gradients = reference.random_gradients(COUNT, step, gradients_dtype)
        update = an_update(step, weights_dtype=weights_dtype, gradients_dtype=gradients_dtype, **scalars)
        reference.adamw(update, expected, gradients)
        nonfinite = kernels.adamw(
            update,
            weights=weights if weights_dtype == "bfloat16" else master,
            remainder=remainder,
            momentum=momentum,
            variance=variance,
            gradients=gradients,
        )
        assert nonfinite == 0
    if weights_dtype == "bfloat16":
        kernels.join(weights, remainder, master)
        np.testing.assert_array_equal(weights, expected.split()[0])
    np.testing.assert_array_equal(master.view(np.uint32), expected.master.view(np.uint32))
    np.testing.assert_array_equal(momentum.view(np.uint32), expected.momentum.view(np.uint32))
    np.testing.assert_array_equal(variance.view(np.uint32), expected.variance.view(np.uint32))


def test_stays_close_to_torch_over_twenty_steps() -> None:
    """Compares within 2e-6, 20 steps of half an ulp of weights near 1 plus as much again: torch fuses multiply-adds where the
    machine can, so single roundings differ."""
    start = reference.random_state(COUNT, seed=2)
    parameter = torch.nn.Parameter(torch.from_numpy(start.master.copy()))
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=False, fused=False
    )
    master = start.master.copy()
    momentum, variance = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
    segments = (Segment(first=0, count=COUNT, weight_decay=0.1),)
    for step in range(1, 21):
        gradients = reference.random_gradients(COUNT, step, "float32")
        parameter.grad = torch.from_numpy(gradients.copy())
        optimizer.step()
        kernels.adamw(
            an_update(step, segments=segments), weights=master, momentum=momentum, variance=variance,
            gradients=gradients,
        )  # fmt: skip
    theirs = parameter.detach().numpy()
    assert np.abs(theirs - start.master).max() > 1e-3, "the weights did not move: nothing was compared"
    assert np.abs(theirs - master).max() < 2e-6
    assert np.linalg.norm(theirs - master) < 1e-7 * np.linalg.norm(theirs)


def test_frozen_and_uncovered_parameters_keep_every_bit() -> None:
    state = reference.random_state(COUNT, seed=3)
    before = reference.random_state(COUNT, seed=3)
    gradients = reference.random_gradients(COUNT, 4, "float32")
    kernels.adamw(an_update(), weights=state.master, momentum=state.momentum, variance=state.variance, gradients=gradients)
    for part in UNTOUCHED:
        for name in ("master", "momentum", "variance"):
            np.testing.assert_array_equal(getattr(state, name)[part], getattr(before, name)[part])
    assert np.all(state.momentum[:5004] != before.momentum[:5004])


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_any_cut_of_a_stage_gives_the_same_bits(weights_dtype: str) -> None:
    """Puts every value by odd cuts once into a vector's body and once into a loop's tail."""
    whole, cut = reference.random_state(COUNT, seed=5), reference.random_state(COUNT, seed=5)
    gradients = reference.random_gradients(COUNT, 6, "bfloat16")
    results = []
    for state, edges in ((whole, (0, COUNT)), (cut, (0, 1, 8, 77, 2049, 6000, 6001, COUNT))):
        weights, remainder = state.split()
        for begin, end in itertools.pairwise(edges):
            segments = (Segment(first=0, count=end - begin, weight_decay=0.1),)
            part = slice(begin, end)
            kernels.adamw(
                an_update(3, params=end - begin, segments=segments, weights_dtype=weights_dtype, gradients_dtype="bfloat16"),
                weights=weights[part] if weights_dtype == "bfloat16" else state.master[part],
                remainder=remainder[part],
                momentum=state.momentum[part],
                variance=state.variance[part],
                gradients=gradients[part],
            )
        results.append((state.master, weights, remainder, state.momentum, state.variance))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))


def test_counts_new_weights_that_are_not_finite() -> None:
    largest = np.float32(3.4e38)  # finite as float32, infinite when rounded to bfloat16
    for weights_dtype, expected in (("float32", 2), ("bfloat16", 3)):
        state = reference.random_state(COUNT, seed=7)
        gradients = np.zeros(COUNT, np.float32)
        state.momentum[:], state.variance[:] = 0, 0
        gradients[10], gradients[20] = np.nan, np.inf
        weights, remainder = state.split()
        state.master[30] = largest
        weights[30], remainder[30] = 0x7F80, np.int16(-0x8000 + 0x7FFF)
        nonfinite = kernels.adamw(
            an_update(weights_dtype=weights_dtype, segments=(Segment(first=0, count=COUNT, weight_decay=0.0),)),
            weights=weights if weights_dtype == "bfloat16" else state.master,
            remainder=remainder,
            momentum=state.momentum,
            variance=state.variance,
            gradients=gradients,
        )
        assert nonfinite == expected


def test_denormal_variances_are_kept() -> None:
    """Keeps them, as a thread that flushes denormals would turn v = 1e-42 to 0 and the step into m / epsilon."""
    state = reference.random_state(COUNT, seed=8)
    state.variance[:] = np.float32(1e-42)
    expected = reference.State(state.master.copy(), state.momentum.copy(), state.variance.copy())
    gradients = np.zeros(COUNT, np.float32)
    update = an_update(epsilon=1e-22, segments=(Segment(first=0, count=COUNT, weight_decay=0.0),))
    assert torch.set_flush_denormal(True)
    try:
        kernels.adamw(update, weights=state.master, momentum=state.momentum, variance=state.variance, gradients=gradients)
    finally:
        torch.set_flush_denormal(False)
    reference.adamw(update, expected, gradients)
    assert np.all(expected.variance > 0)
    np.testing.assert_array_equal(state.master.view(np.uint32), expected.master.view(np.uint32))


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(first=0, count=COUNT + 1, weight_decay=0.0),),
        (Segment(first=10, count=10, weight_decay=0.0), Segment(first=15, count=10, weight_decay=0.0)),
        (Segment(first=2**63, count=2**63, weight_decay=0.0),),
    ],
)
def test_segments_outside_or_overlapping_are_refused(segments: tuple[Segment, ...]) -> None:
    state = reference.random_state(COUNT, seed=9)
    before = state.master.copy()
    with pytest.raises(Exception, match="EINVAL"):
        kernels.adamw(
            an_update(segments=segments), weights=state.master, momentum=state.momentum, variance=state.variance,
            gradients=np.zeros(COUNT, np.float32),
        )  # fmt: skip
    np.testing.assert_array_equal(state.master, before)


def test_arrays_of_the_wrong_size_are_refused() -> None:
    state = reference.random_state(COUNT, seed=9)
    with pytest.raises(ValueError, match="momentum has"):
        kernels.adamw(
            an_update(), weights=state.master, momentum=state.momentum[:-1], variance=state.variance,
            gradients=np.zeros(COUNT, np.float32),
        )  # fmt: skip


# ---- lion ------------------------------------------------------------------------------------------------------------
# Lion in C: bit for bit a numpy reference, for every pair of dtypes.


def _step(update: Update, state: State, gradients: np.ndarray) -> None:
    """Steps in place. Every operation is rounded once."""
    values = reference.bfloat16_values(gradients) if update.gradients_dtype == "bfloat16" else gradients
    for segment in update.segments:
        if segment.frozen:
            continue
        part = slice(segment.first, segment.first + segment.count)
        lr, decay = update.lr * float(F(segment.lr_scale)), float(F(segment.weight_decay))
        g, p, m = values[part] * F(update.gradient_scale), state.master[part], state.momentum[part]
        sign = np.sign(m * F(update.beta1) + F(1.0 - update.beta1) * g)
        m = m * F(update.beta2) + F(1.0 - update.beta2) * g
        p = p * F(1.0 - lr * decay) + F(-lr) * sign
        assert p.dtype == m.dtype == F
        state.master[part], state.momentum[part] = p, m


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gradients_dtype", ["float32", "bfloat16"])
def test_matches_the_numpy_reference_bit_for_bit_of_lion(weights_dtype: str, gradients_dtype: str) -> None:
    expected = reference.random_state(COUNT, seed=1)
    start, master, momentum = expected.master.copy(), expected.master.copy(), expected.momentum.copy()
    weights, remainder = expected.split()
    for step in range(1, 11):
        gradients = reference.random_gradients(COUNT, step, gradients_dtype)
        gradients[:7] = 0
        update = an_update(
            step, weights_dtype=weights_dtype, gradients_dtype=gradients_dtype, rule="lion", gradient_scale=0.37, beta2=0.99
        )
        _step(update, expected, gradients)
        narrow = weights_dtype == "bfloat16"
        lost = kernels.adamw(
            update, weights=weights if narrow else master, remainder=remainder if narrow else None, momentum=momentum,
            gradients=gradients,
        )  # fmt: skip
        assert lost == 0
    if weights_dtype == "bfloat16":
        kernels.join(weights, remainder, master)
    np.testing.assert_array_equal(master.view(np.uint32), expected.master.view(np.uint32))
    np.testing.assert_array_equal(momentum.view(np.uint32), expected.momentum.view(np.uint32))
    assert all(np.array_equal(master[part], start[part]) for part in UNTOUCHED)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_counted(value: float) -> None:
    """Counts by the momentum alone, as Lion moves as far whatever the gradient."""
    state = reference.random_state(COUNT, seed=3)
    gradients = np.zeros(COUNT, F)
    gradients[[5, 3000]] = value
    assert kernels.adamw(an_update(rule="lion"), weights=state.master, momentum=state.momentum, gradients=gradients) == 2


def test_the_states_of_other_rules_are_refused() -> None:
    state = reference.random_state(COUNT, seed=4)
    gradients = np.zeros(COUNT, F)
    with pytest.raises(ValueError, match="AdamW needs its variance"):
        kernels.adamw(an_update(), weights=state.master, momentum=state.momentum, gradients=gradients)
    small = an_update(rule="lion", states_dtype="bfloat16")
    with pytest.raises(Exception, match="refused its arguments"):
        kernels.adamw(small, weights=state.master, momentum=np.zeros(COUNT, np.uint16), gradients=gradients)
