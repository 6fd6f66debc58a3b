"""Lion in C: bit for bit a numpy reference, for every pair of dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from fuyou_cli.swap import kernels
from fuyou_cli.swap.requests import Update

from . import adamw_reference as reference
from .adamw_reference import F, State
from .test_adamw import COUNT, UNTOUCHED, an_update


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
def test_matches_the_numpy_reference_bit_for_bit(weights_dtype: str, gradients_dtype: str) -> None:
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
