"""Twenty kills at random moments of runs, loads and exports; two hundred of each kind are scripts/prove_crashes.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from proof import crashes
from proof.crashes import Place, placed

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with placed(tmp_path_factory.mktemp("crashes")) as found:
        yield found


@pytest.mark.parametrize("variant", crashes.IN_CI)
def test_killed_runs_end_as_the_one_nobody_killed(variant: str, place: Place) -> None:
    tally = crashes.kill_runs(place, variant, crashes.VARIANTS[variant], kills=6, each=6, seed=1, steps=24)
    assert (tally.kills, tally.runs >= 1) == (6, True)


def test_killed_loads_begin_again(place: Place) -> None:
    assert crashes.kill_loads(place, kills=4, seed=1).kills == 4


def test_killed_exports_leave_nothing_in_the_way(place: Place) -> None:
    assert crashes.kill_exports(place, kills=4, seed=1).kills == 4


def test_a_lost_commit_would_be_noticed(place: Place) -> None:
    """The manifest is put back to the one before: a state that was committed is gone."""
    recipe = place.recipe("lost", {}, steps=6)
    trace = place.trace(recipe.parent)
    crashes.finished(place, recipe, trace=trace)
    calls, tally = trace.calls(), crashes.Tally()
    assert crashes.named_steps(calls, place.manifests) == [None, *range(7)]
    crashes.check_kept(recipe, calls, place.manifests, tally)
    crashes.manifests.go_back(crashes.store_of(recipe))
    with pytest.raises(crashes.Lost, match="step 6 was committed, step 5 is what is left"):
        crashes.check_kept(recipe, calls, place.manifests, tally)
