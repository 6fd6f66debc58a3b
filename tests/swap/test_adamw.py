"""Goal: AdamW in C is AdamW. Method: bit for bit against a numpy float32 reference, closely against torch's own, for
every pair of dtypes; and independent of how a stage is cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fuyou_cli.swap import kernels
from fuyou_cli.swap.requests import Segment, Update

from . import adamw_reference as reference

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
