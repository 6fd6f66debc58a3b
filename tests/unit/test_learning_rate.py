"""The learning rate of every step: beside the schedulers of transformers, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.recipe.schema import Recipe
from fuyou_cli.training.length import LearningRate, learning_rate

NAMES = ["constant", "linear", "cosine", "wsd"]
BASE: dict[str, Any] = {"model": {"name_or_path": "x"}, "dataset": {"train": [{"path": "x"}]}, "output_dir": "x"}


def _rates(name: str, *, warmup: int = 4, total: int = 20, ratio: float = 0.1, **more: Any) -> list[float]:
    rate = LearningRate(name=name, peak=2.0, warmup_steps=warmup, total_steps=total, min_ratio=ratio, **more)
    return [rate.at(step) for step in range(1, total + 1)]


def _of_recipe(name: str, warmup: int, total: int, ratio: float) -> list[float]:
    schedule = {"name": name, "warmup_steps": warmup, "min_lr_ratio": ratio}
    recipe = Recipe.model_validate({**BASE, "optimizer": {"lr": 2.0}, "lr_scheduler": schedule})
    rate = learning_rate(recipe, total)
    return [rate.at(step) for step in range(1, total + 1)]


def _of_transformers(name: str, warmup: int, total: int, ratio: float) -> list[float]:
    """The rates that transformers' own scheduler gives a loop of so many steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    if name == "wsd":
        decay = min(max(1, total // 10), total - warmup)
        scheduler = transformers.get_wsd_schedule(
            optimizer, warmup, decay, num_training_steps=total, decay_type="linear", min_lr_ratio=ratio
        )
    elif name == "cosine":
        scheduler = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, total, min_lr_rate=ratio)
    elif name == "linear":
        scheduler = transformers.get_linear_schedule_with_warmup(optimizer, warmup, total)
    else:
        scheduler = transformers.get_constant_schedule_with_warmup(optimizer, warmup)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@given(
    name=st.sampled_from(NAMES), total=st.integers(1, 60), share=st.floats(0, 1), ratio=st.sampled_from([0.0, 0.1, 0.5, 1.0])
)
def test_rates_are_those_of_transformers(name: str, total: int, share: float, ratio: float) -> None:
    """But in the warm-up, where transformers' first step has the rate 0. Its linear schedule falls to 0 alone."""
    warmup = round(share * total)
    ours, theirs = _of_recipe(name, warmup, total, ratio), _of_transformers(name, warmup, total, ratio)
    if name == "linear":
        theirs = [2.0 * ratio + (1 - ratio) * rate for rate in theirs]
    assert ours[:warmup] == pytest.approx([2.0 * step / warmup for step in range(1, warmup + 1)])
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12, abs=1e-15)
    assert min(ours) > 0 and ours[warmup : warmup + 1] in ([2.0], [])


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_one_step_has_the_peak(name: str) -> None:
    assert _of_recipe(name, 0, 1, 0.0) == _of_recipe(name, 1, 1, 0.0) == [2.0]


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_linear_and_reaches_the_peak(name: str) -> None:
    assert _rates(name, decay_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_a_run_of_the_rule_before_has_the_least_rate_in_its_last_step() -> None:
    before: dict[str, Any] = {"peak_after_warmup": False}
    assert _rates("linear", **before)[3:] == pytest.approx([2.0 - 1.8 * part / 16 for part in range(17)])
    cosine = _rates("cosine", **before)
    assert (cosine[11], cosine[-1]) == pytest.approx((1.1, 0.2))
    wsd = _rates("wsd", decay_steps=5, **before)
    assert set(wsd[3:15]) == {2.0}
    assert wsd[15:] == pytest.approx([2.0 - 1.8 * part / 5 for part in range(1, 6)])
