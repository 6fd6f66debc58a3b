"""Goal: AdamW with bfloat16 and int8 states is what small_states.c says, whoever computes which part of it. Method: bit for bit
against numpy; bounds of one rounding against float32 states."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from fuyou_cli.spec.model import STATE_BLOCK, STATE_TILE, StateDtype, StateLayout
from fuyou_cli.swap import kernels
from fuyou_cli.swap.native import Segment, Update

from . import adamw_reference as reference
from . import small_states_reference

COUNT = STATE_TILE + 2048 * 3  # a whole tile, and one that ends early
SEGMENTS = (
    Segment(first=0, count=1000, weight_decay=0.1),
    Segment(first=1024, count=3, weight_decay=0.0),
    Segment(first=1088, count=4001, weight_decay=0.01, lr_scale=0.5),
    Segment(first=5120, count=2000, weight_decay=0.1, frozen=True),
    Segment(first=STATE_TILE - 640, count=3001, weight_decay=0.1),
)
SMALL: tuple[StateDtype, ...] = ("bfloat16", "int8")


class Stage(NamedTuple):
    master: np.ndarray
    momentum: np.ndarray
    variance: np.ndarray


def a_stage(states: StateDtype) -> Stage:
    layout = StateLayout(weights="float32", dtype=states)
    sizes = [layout.size("momentum", COUNT), layout.size("variance", COUNT)]
    return Stage(reference.random_state(COUNT, 1).master, *(np.zeros(size, np.uint8) for size in sizes))


def an_update(states: StateDtype, step: int = 1, **changes: object) -> Update:
    fields: dict[str, object] = dict(
        params=COUNT, weights_dtype="float32", gradients_dtype="float32", weights=0, lr=1e-3, beta1=0.9, beta2=0.999,
        epsilon=1e-8, step=step, segments=SEGMENTS, states_dtype=states, seed=5 << 40, label=7,
    )  # fmt: skip
    return Update(**{**fields, **changes})  # type: ignore[arg-type]


def assert_same(one: Stage, other: Stage) -> None:
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint8), theirs.view(np.uint8))


@pytest.mark.parametrize("states", SMALL)
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gradients_dtype", ["float32", "bfloat16"])
def test_matches_the_numpy_reference_bit_for_bit(states: StateDtype, weights_dtype: str, gradients_dtype: str) -> None:
    expected, got = a_stage(states), a_stage(states)
    weights, remainder = np.empty(COUNT, np.uint16), np.empty(COUNT, np.int16)
    kernels.split(got.master, weights, remainder)
    for step in range(1, 6):
        gradients = reference.random_gradients(COUNT, step, gradients_dtype)
        gradients[640:1000] = 0  # blocks that are all zero
        update = an_update(states, step, weights_dtype=weights_dtype, gradients_dtype=gradients_dtype, gradient_scale=0.3)
        small_states_reference.adamw(update, *expected, gradients)
        held = weights if weights_dtype == "bfloat16" else got.master
        moments = {"momentum": got.momentum, "variance": got.variance}
        assert kernels.adamw(update, weights=held, remainder=remainder, **moments, gradients=gradients) == 0
    if weights_dtype == "bfloat16":
        kernels.join(weights, remainder, got.master)
    assert_same(got, expected)
    assert got.variance.any(), "no state was written: nothing was compared"


@pytest.mark.parametrize("beta1", [0.0, 0.3])
def test_a_short_memory_of_gradients_is_the_references(beta1: float) -> None:
    """Torch's momentum begins at the gradient then."""
    expected, got = a_stage("int8"), a_stage("int8")
    for step in (1, 2):
        gradients, update = reference.random_gradients(COUNT, step, "float32"), an_update("int8", step, beta1=beta1)
        small_states_reference.adamw(update, *expected, gradients)
        moments = {"momentum": got.momentum, "variance": got.variance}
        kernels.adamw(update, weights=got.master, **moments, gradients=gradients)
    assert_same(got, expected)


def test_scales_of_earlier_builds_are_cut() -> None:
    """They may have bits that would round a code's value twice on some processors."""
    gradients, one, other = reference.random_gradients(COUNT, 1, "float32"), a_stage("int8"), a_stage("int8")
    for stage, extra in ((one, 0), (other, 3)):
        for step in (1, 2):
            moments = {"momentum": stage.momentum, "variance": stage.variance}
            kernels.adamw(an_update("int8", step), weights=stage.master, **moments, gradients=gradients)
            scales = stage.momentum[: STATE_TILE // STATE_BLOCK * 4].view(np.uint32)
            assert scales.any()
            scales[scales > 0] |= np.uint32(extra if step == 1 else 0)
    assert_same(one, other)


@pytest.mark.parametrize("states", SMALL)
def test_a_draw_depends_on_seed_step_and_stage(states: StateDtype) -> None:
    """Rounds other values up by other draws; the same ones are the same wherever they are made (the reference)."""
    gradients = reference.random_gradients(COUNT, 1, "float32")
    found = set()
    for change in ({}, {"seed": 6}, {"label": 8}, {"step": 2}, {"seed": 6 << 40}):
        stage = a_stage(states)
        update = an_update(states, **change)
        kernels.adamw(update, weights=stage.master, momentum=stage.momentum, variance=stage.variance, gradients=gradients)
        found.add(stage.variance.tobytes())
    assert len(found) == 5


def test_rounding_at_random_keeps_the_mean() -> None:
    """The mean of n draws lies within 5 standard deviations, of at most half a step each, of the value."""
    stage, gradients = a_stage("bfloat16"), np.full(COUNT, 0.0123, np.float32)
    segments = (Segment(first=0, count=COUNT, weight_decay=0.0),)
    update = an_update("bfloat16", 1, segments=segments)
    kernels.adamw(update, weights=stage.master, momentum=stage.momentum, variance=stage.variance, gradients=gradients)
    got = reference.bfloat16_values(stage.momentum.view(np.uint16))
    exact = np.float64(np.float32(0.1) * np.float32(0.0123))
    step = got.max() - got.min()
    assert 0 < step <= exact * 2**-7
    assert abs(got.astype(np.float64).mean() - exact) < 5 * (step / 2) / COUNT**0.5


def test_codes_of_variances_keep_the_mean_and_the_largest() -> None:
    """Of values that all lie at one place between two codes, the mean is that place, as above. A block's largest is exact."""
    stage, gradients = a_stage("int8"), np.full(COUNT, 0.0123, np.float32)
    gradients[::STATE_BLOCK] = 1.0
    update = an_update("int8", 1, segments=(Segment(first=0, count=COUNT, weight_decay=0.0),))
    kernels.adamw(update, weights=stage.master, momentum=stage.momentum, variance=stage.variance, gradients=gradients)
    codes = stage.variance[4096 : 4096 + STATE_TILE].reshape(-1, STATE_BLOCK)
    exact = 255 * float(root_of(0.001 * 0.0123**2)) / float(root_of(0.001))
    assert (codes[:, 0] == 255).all()
    assert set(np.unique(codes[:, 1:])) == {int(exact), int(exact) + 1}
    assert abs(codes[:, 1:].mean(dtype=np.float64) - exact) < 5 * 0.5 / codes[:, 1:].size ** 0.5


def root_of(variance: float) -> np.ndarray:
    return (np.array(variance, np.float32).view(np.uint32) >> 2).view(np.float32)


def test_steps_stay_as_long_as_with_float32_states() -> None:
    """A variance that moved by rare large gradients alone would be too large after a thousand steps, by 6 %."""
    ours, plain = (mean_step_after(1000, 4096, states) for states in ("int8", "float32"))
    assert ours == pytest.approx(plain, rel=5e-3)


def mean_step_after(steps: int, count: int, states: StateDtype) -> float:
    """Returns the mean size of the last 50 updates of a parameter, on the same gradients for all states."""
    layout, draws, sizes = StateLayout(weights="float32", dtype=states), np.random.default_rng(1), list[float]()
    moments = {name: np.zeros(layout.size(name, count), np.uint8) for name in ("momentum", "variance")}
    for step in range(1, steps + 1):
        master, gradients = np.zeros(count, np.float32), draws.standard_normal(count, np.float32)
        update = an_update(states, step, params=count, segments=(Segment(first=0, count=count, weight_decay=0.0),))
        kernels.adamw(update, weights=master, remainder=None, **moments, gradients=gradients)
        sizes.append(float(np.abs(master).mean()))
    return float(np.mean(sizes[-50:]))


def test_a_small_variance_does_not_become_zero() -> None:
    """It would make the step of a momentum that is not zero huge."""
    stage, gradients = a_stage("int8"), np.full(COUNT, 1e-8, np.float32)
    gradients[::64] = 1.0
    segments = (Segment(first=0, count=COUNT, weight_decay=0.0),)
    before = stage.master.copy()
    for step in (1, 2, 3):
        update = an_update("int8", step, segments=segments)
        kernels.adamw(update, weights=stage.master, momentum=stage.momentum, variance=stage.variance, gradients=gradients)
    assert np.abs(stage.master - before).max() < 4e-3  # three steps of lr 1e-3


@pytest.mark.parametrize("gradient", [0x7FFFFFFF, 0x7F800000])  # not a number as a GPU writes it, infinity
@pytest.mark.parametrize("places", [(10, 12), (70, 75)])  # of an even block, and of an odd one
def test_counts_new_weights_that_are_not_finite(gradient: int, places: tuple[int, ...]) -> None:
    stage, gradients = a_stage("int8"), np.zeros(COUNT, np.float32)
    gradients.view(np.uint32)[[*places, COUNT - 1]] = gradient
    update = an_update("int8", segments=(Segment(first=0, count=COUNT - 1, weight_decay=0.0),))
    moments = {"momentum": stage.momentum, "variance": stage.variance}
    assert kernels.adamw(update, weights=stage.master, **moments, gradients=gradients) == 2


def test_counts_those_of_a_block_that_a_segment_ends_in() -> None:
    """And none behind the segment."""
    stage, gradients = a_stage("int8"), np.zeros(COUNT, np.float32)
    end = 10 * 64 + 7
    gradients[[end - 7, end - 1, end]] = np.nan
    update = an_update("int8", segments=(Segment(first=0, count=end, weight_decay=0.0),))
    moments = {"momentum": stage.momentum, "variance": stage.variance}
    assert kernels.adamw(update, weights=stage.master, **moments, gradients=gradients) == 2


def test_counts_new_weights_that_round_to_infinity() -> None:
    """Two are finite in float32, and their sum is small."""
    stage, gradients = a_stage("int8"), np.zeros(COUNT, np.float32)
    stage.master[[130, 258]] = np.float32(3.4e38), np.float32(-3.4e38)
    weights, remainder = np.empty(COUNT, np.uint16), np.empty(COUNT, np.int16)
    kernels.split(stage.master, weights, remainder)
    moments = {"momentum": stage.momentum, "variance": stage.variance}
    update = an_update("int8", weights_dtype="bfloat16", segments=(Segment(first=0, count=COUNT, weight_decay=0.0),))
    assert kernels.adamw(update, weights=weights, remainder=remainder, **moments, gradients=gradients) == 2


def test_a_step_of_no_length_leaves_the_weights() -> None:
    stage, before = a_stage("int8"), a_stage("int8").master
    gradients = reference.random_gradients(COUNT, 1, "float32")
    gradients[:1000] = 0  # and nothing to divide by
    update = an_update("int8", lr=0.0)
    kernels.adamw(update, weights=stage.master, momentum=stage.momentum, variance=stage.variance, gradients=gradients)
    np.testing.assert_array_equal(stage.master, before)
    assert stage.momentum.any()


def test_refuses_int8_segments_that_begin_inside_a_block() -> None:
    stage, segments = a_stage("int8"), (Segment(first=63, count=64, weight_decay=0.0),)
    gradients = reference.random_gradients(COUNT, 1, "float32")
    with pytest.raises(Exception, match="refused"):
        kernels.adamw(
            an_update("int8", 1, segments=segments), weights=stage.master, momentum=stage.momentum, variance=stage.variance,
            gradients=gradients,
        )  # fmt: skip
