"""Tests compute that repeats itself on a GPU: what is asked of torch, on the emulated device, and what torch refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.run import Run

from .conftest import NewProject, Whole
from .running import STEPS, train

EMULATED = {"train.max_steps": STEPS, "offload.device": "emulated"}
REPEATED = {**EMULATED, "train.deterministic": True}


def _asked() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), bool(torch.utils.deterministic.fill_uninitialized_memory)


def test_torch_is_asked_while_the_run_lasts(new_project: NewProject, whole: Callable[..., Whole]) -> None:
    """Checks that memory is not filled for it; the CPU's bits are those without it."""
    before, seen = _asked(), set[tuple[bool, bool]]()
    losses = train(new_project(changes=REPEATED), lambda run: seen.add(_asked()))[0]
    assert seen == {(True, False)}
    assert _asked() == before
    assert losses == whole(EMULATED).losses


def test_an_operator_without_such_a_kernel_is_named(new_project: NewProject) -> None:
    def scatter(run: Run) -> None:
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))

    with pytest.raises(UsageError, match=r"^train\.deterministic: put_ has no deterministic kernel here$"):
        train(new_project(changes=REPEATED), scatter)


def test_a_saved_run_is_gone_on_with_alike(new_project: NewProject) -> None:
    project = new_project(changes=REPEATED)
    train(project)
    project.write_recipe(EMULATED)
    with pytest.raises(UsageError, match=r"train\.deterministic.* changed since it was saved"):
        train(project)
