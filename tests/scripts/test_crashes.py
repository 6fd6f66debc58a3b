"""Twenty kills and some at random moments of runs, loads and exports; two hundred of each kind: scripts/prove_crashes.py."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from proof import crashes, flips, loads_and_exports
from proof.place import Place, placed

from fuyou_cli.training.state import manifest as manifests

STEPS = 12


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with placed(tmp_path_factory.mktemp("crashes")) as found:
        yield found


@pytest.mark.parametrize(
    "variant",
    [
        "in_place, in RAM",
        "in_place, in RAM, committed as planned",
        "in_place, over two folders",
        "redo, on the ssd, clipped",
        "snapshot, every second step",
        "in_place, io_uring",
    ],
)
def test_killed_runs_end_as_the_one_nobody_killed(variant: str, place: Place) -> None:
    changes = crashes.VARIANTS[variant]
    if crashes.is_unseen(changes) and (refusal := crashes.no_io_uring()):
        pytest.skip(refusal)
    name = variant.replace(", ", "-").replace(" ", "-")
    whole = crashes.reference(place, name, changes, steps=STEPS)
    tally = crashes.kill_runs(place, name, changes, whole, kills=3, each=3, seed=1, steps=STEPS)
    assert (tally.kills, tally.runs >= 1, len(tally.steps)) == (3, True, 3)


def test_killed_loads_begin_again(place: Place) -> None:
    assert loads_and_exports.kill_loads(place, kills=4, seed=1).kills == 4


def test_killed_exports_leave_nothing_in_the_way(place: Place) -> None:
    assert loads_and_exports.kill_exports(place, kills=4, seed=1).kills == 4


def test_a_lost_commit_would_be_noticed(place: Place) -> None:
    """The manifest is put back to the one before: a state that was committed is gone."""
    recipe = place.recipe("lost", {}, steps=6)
    trace = place.trace(recipe.parent)
    crashes.finished(place, recipe, trace=trace)
    calls, tally = trace.calls(), crashes.Tally()
    assert crashes.named_steps(calls, place.manifests) == [None, *range(7)]
    crashes.check_kept(recipe, calls, place.manifests, tally)
    store = crashes.store_of(recipe)
    newest = manifests.read(store)
    assert newest is not None
    manifests.go_back(store, next(manifests.before(store, newest)))
    with pytest.raises(crashes.Lost, match="step 6 was committed, step 5 is what is left"):
        crashes.check_kept(recipe, calls, place.manifests, tally)


def test_a_newest_state_that_is_not_whole_would_be_noticed(place: Place) -> None:
    """The run goes back to the state before and ends well, with the right bytes."""
    run = flips.stopped(place, "torn", "in_place, over two folders")
    assert crashes.damaged(run.store) == ((), ())
    bit = flips.drawn(run.newest, random.Random(1))
    bit.flip()
    (damage,), before = crashes.damaged(run.store)
    assert (damage.stage, damage.tensor, before) == (bit.stage, bit.tensor, ())
    with pytest.raises(crashes.Lost, match="the newest state was not whole"):
        crashes.finished(place, run.recipe)
