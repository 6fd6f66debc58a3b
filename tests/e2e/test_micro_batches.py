"""How many rows are computed at once where the recipe says auto: the fastest that fits, chosen once, kept with the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.cli.profile import assumed_hardware
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.plan import Numerics
from fuyou_cli.training.micro_batches import MOST_TOKENS, fastest_size, sizes, usual_size
from fuyou_cli.training.prepare import prepare

from .conftest import Project


@given(st.integers(1, 96), st.integers(1, 16384))
def test_sizes_divide_the_batch(batch: int, length: int) -> None:
    found = sizes(batch, length)
    assert found[0] == usual_size(batch, length)
    assert len(set(found)) == len(found) and all(batch % size == 0 for size in found)
    assert all(size == 1 or size * length <= MOST_TOKENS for size in found)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({2: 10.0, 4: 9.9, 8: 9.9, 1: 10.1}, 2),  # hardly faster: the usual one
        ({2: 10.0, 4: 9.0, 8: 9.5, 1: 11.0}, 4),
        ({2: None, 4: None, 8: None, 1: 12.0}, 1),  # too large but one
        ({2: None, 4: None, 8: None, 1: None}, 2),  # nothing fits: who plans it says so
    ],
)
def test_the_fastest_that_fits(seconds: dict[int, float | None], best: int) -> None:
    assert fastest_size(16, 512, seconds.__getitem__) == best


def test_chosen_once_and_kept(new_project: Callable[..., Project]) -> None:
    project = new_project(changes={"train.batch_size": 8, "train.micro_batch_size": "auto"})
    chosen = _numerics(project, None)
    assert chosen.batch_size == 8 and 8 % chosen.micro_batch_size == 0
    assert [_numerics(project, size).micro_batch_size for size in (1, 2, 8)] == [1, 2, 8]


def _numerics(project: Project, micro_batch_size: int | None) -> Numerics:
    return prepare(
        load_recipe(project.recipe).recipe, probe=lambda device: assumed_hardware(device=device), say=lambda message: None,
        planning_only=True, micro_batch_size=micro_batch_size,
    ).plan.numerics  # fmt: skip
