"""Runs whose steps go through the model in several sweeps: stopped, resumed with other sweeps, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drawn import every

from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe

from .conftest import NewProject, WholeOf, write_llama
from .running import STEPS, assert_same_exports, interrupt, manifest_of, planned, stop, train

ONE = 24  # tokens of a micro-batch


@pytest.fixture(scope="module")
def llama(materials: Path) -> str:
    """An untied one with dropout."""
    return str(write_llama(materials, "dropping", hidden_size=32, intermediate_size=64, attention_dropout=0.1))


def _changes(model: str, **more: Any) -> dict[str, Any]:
    return {
        "model.name_or_path": model, "train.max_steps": STEPS, "train.batch_size": 6, "train.micro_batch_size": 1,
        **{key.replace("__", "."): value for key, value in more.items()},
    }  # fmt: skip


@pytest.mark.parametrize("clip", every(2, [0.5, None]), ids=["clipped", "unclipped"])
@pytest.mark.slow
def test_stopped_and_resumed_with_other_sweeps_is_the_run_in_one(
    clip: float | None, llama: str, new_project: NewProject, whole: WholeOf, tmp_path: Path
) -> None:
    expected = whole(_changes(llama, train__clip_grad_norm=clip))
    broken = new_project("broken", _changes(llama, train__clip_grad_norm=clip, train__sweep_tokens=3 * ONE))
    for step, phase in ((2, "forward"), (3, "backward")):
        stop(broken, interrupt(step, phase))
        assert manifest_of(broken).step == step - 1  # in its first sweep nothing is updated yet
        broken.write_recipe(_changes(llama, train__clip_grad_norm=clip, train__sweep_tokens=2 * ONE))
    losses, resumed = train(broken)
    assert losses == expected.losses
    assert_same_exports(resumed, expected.store, tmp_path)


@pytest.mark.parametrize(("tokens", "sweeps"), [("auto", None), (6 * ONE, 1), (5 * ONE, 2), (ONE, 6), (100 * ONE, 1)])
def test_a_sweep_has_at_most_so_many_tokens(tokens: int | str, sweeps: int | None, llama: str, new_project: NewProject) -> None:
    recipe = load_recipe(new_project("plan", _changes(llama, train__sweep_tokens=tokens)).recipe).recipe
    found = planned(recipe)
    assert found.request.sweeps == sweeps
    assert found.plan.sweeps == sweeps or sweeps is None


def test_what_cannot_be_swept_is_refused(materials: Path, llama: str, new_project: NewProject) -> None:
    for model, tokens, said in (
        (str(materials / "model"), ONE, "needs all rows of a step at once"),
        (llama, ONE - 1, "less than a micro-batch of 24 tokens"),
    ):
        recipe = load_recipe(new_project(said, _changes(model, train__sweep_tokens=tokens)).recipe).recipe
        with pytest.raises(UsageError, match=said):
            planned(recipe)
