"""A few points of each proof that nothing is lost; all of them: prove_crashes, prove_power, prove_faults, prove_flips and
prove_steady. In one file, as they share a process that runs are forked from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import prove_steady
import pytest
from drawn import every
from proof import crashes, faults, flips, power
from proof.faults import FROM_THEN_ON, ONCE, Scenario
from proof.setting import Lost
from proof.tiny_runs import TWO_FOLDERS, Place, placed

from fuyou_cli.core.units import MiB
from fuyou_cli.training.state import manifest as manifests


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("proofs")
    with placed(folder, under=folder / "faults") as found:
        yield found


# ---- kills -----------------------------------------------------------------------------------------------------------

KILLED_STEPS = 7


@pytest.mark.parametrize("variant", every(5, ["in RAM", "over two folders", "io_uring", "on the ssd, the norm measured first"]))
def test_killed_runs_end_as_the_one_nobody_killed(variant: str, place: Place) -> None:
    changes = crashes.VARIANTS[variant]
    if crashes.is_unseen(changes) and (refusal := crashes.no_io_uring()):
        pytest.skip(refusal)
    name = f"killed-{variant}".replace(", ", "-").replace(" ", "-")
    whole = crashes.reference(place, name, changes, steps=KILLED_STEPS)
    tally = crashes.kill_runs(place, name, changes, whole, kills=3, each=3, seed=1, steps=KILLED_STEPS)
    assert (tally.kills, tally.runs >= 1, len(tally.steps)) == (3, True, 3)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["lora", "qlora", "int8", "moe", "moe-lora"])
def test_runs_of_other_kinds_are_disturbed_too(run: str, place: Place) -> None:
    """Kills them, and flips a bit in what they have saved: the weights of an adapter's model are in no state, or in both."""
    if "lora" in run:
        pytest.importorskip("peft", reason="peft comes with the extra lora")
    other = place.of(run)
    whole = crashes.reference(other, f"killed-{run}", {}, steps=6)
    assert crashes.kill_runs(other, f"killed-{run}", {}, whole, kills=1, each=1, seed=1, steps=6).kills == 1
    found = flips.flip_bits(other, flips.stopped(other, f"flipped-{run}"), flips=4, seed=1, resumed_every=4)
    assert (found.flips, found.went_back + found.refused) == (4, 1)


@pytest.mark.slow
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
    store = crashes.store_of(recipe)
    newest = manifests.read(store)
    assert newest is not None
    older = manifests.before(store, newest)
    assert older is not None
    manifests.go_back(store, older)
    with pytest.raises(crashes.Lost, match="step 6 was committed, step 5 is what is left"):
        crashes.check_kept(recipe, calls, place.manifests, tally)


def test_a_newest_state_that_is_not_whole_would_be_noticed(place: Place) -> None:
    """The run goes back to the state before and ends well, with the right bytes."""
    run = flips.stopped(place, "torn", "two folders")
    assert crashes.damaged(run.store) == ((), ())
    bit = flips.drawn(run.newest, random.Random(1))
    bit.flip()
    (damage,), before = crashes.damaged(run.store)
    assert (damage.stage, damage.tensor, before) == (bit.stage, bit.tensor, ())
    with pytest.raises(crashes.Lost, match="the newest state was not whole"):
        crashes.finished(place, run.recipe)


# ---- power cuts ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_power_cuts_runs_go_on(place: Place) -> None:
    """Leaves nothing under way in a few of them, so that nothing could be lost."""
    lost = 0
    for name, changes in (("every", {}), ("second", {"checkpoint.commit_every_steps": 2}), ("striped", TWO_FOLDERS)):
        recording = power.recorded(place, f"power-{name}", changes, steps=4)
        assert len({call.file for call in recording.calls if call.file.endswith("store.bin")}) == 1 + (name == "striped")
        cuts = power.cut_power(place, recording, points=2, seed=3)
        assert cuts.points == 2 and cuts.within >= 1
        lost += cuts.missing + cuts.torn
    assert lost > 0


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(place: Place) -> Scenario:
    return faults.scenario(place, "resume")


@pytest.mark.parametrize("kind", every(2, [kind for kind in faults.KINDS if kind != "clock"]))
def test_a_fault_is_survived_or_named(kind: str, place: Place, resumed: Scenario) -> None:
    swept = faults.sweep(place, resumed, kind, ONCE, every=30, seed=4, most=1)
    assert swept.problems == [] and swept.points == 1


def test_a_wall_clock_that_jumps_changes_nothing(place: Place, resumed: Scenario) -> None:
    swept = faults.Swept()
    assert faults.struck(place, resumed, "clock", FROM_THEN_ON, 1, swept)
    assert (swept.points, swept.survived, swept.problems) == (1, 1, [])


def test_a_run_without_the_call_is_none_of_the_points(place: Place, resumed: Scenario) -> None:
    assert not faults.struck(place, resumed, "eio", ONCE, 10**6, faults.Swept())


# ---- flipped bits ----------------------------------------------------------------------------------------------------


def test_flipped_bits_are_found_and_gone_back_behind(place: Place) -> None:
    run = flips.stopped(place)
    found = flips.flip_bits(place, run, flips=10, seed=1, resumed_every=3)
    assert (found.flips, found.went_back, found.refused) == (10, 3, 1)


@pytest.mark.parametrize("kind", every(2, [kind for kind in flips.STORES if kind != "one folder"]))
@pytest.mark.slow
def test_flipped_bits_are_found_in_every_kind_of_store(kind: str, place: Place) -> None:
    run = flips.stopped(place, kind.replace(", ", "-").replace(" ", "-"), kind)
    found = flips.flip_bits(place, run, flips=6, seed=1, resumed_every=6)
    assert (found.flips, found.went_back) == (6, 1)
    manifests = flips.flip_manifests(place, run, flips=40, seed=1, resumed_every=40)
    assert (manifests.flips, manifests.gone_on) == (40, 1)


def test_a_run_does_not_miss_the_manifest_before_the_newest(place: Place) -> None:
    run = flips.stopped(place, "older")
    found = flips.flip_manifests(place, run, flips=4, seed=1, resumed_every=1)
    assert (found.flips, found.gone_on, found.older) == (4, 3, 1)


# ---- long runs -------------------------------------------------------------------------------------------------------


def test_a_run_is_looked_at_as_it_goes(place: Place) -> None:
    found = prove_steady.samples(place, "steady", steps=16, every=3)
    assert len(found) >= 3 and [sample.files for sample in found] == [found[0].files] * len(found)
    assert all(sample.rss > 50 * MiB and sample.descriptors > 3 for sample in found)


def _samples(**last: Any) -> list[prove_steady.Sample]:
    usual: dict[str, Any] = {"rss": 200 * MiB, "descriptors": 20, "files": ("manifest.json", "store.bin"), "size": 9 * MiB}
    return [prove_steady.Sample(step=step, **{**usual, **(last if step > 600 else {})}) for step in range(100, 900, 100)]


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ({}, ""),
        ({"rss": 203 * MiB, "descriptors": 22, "size": 9 * MiB + 5600}, ""),
        ({"rss": 206 * MiB}, "memory: "),
        ({"descriptors": 30}, "open files: 20 to 30"),
        ({"files": ("manifest.json", "more", "store.bin")}, "files: ['more']"),
        ({"size": 10 * MiB}, "size of the store: "),
    ],
)
def test_what_grows_is_named(last: dict[str, object], problem: str) -> None:
    problems = prove_steady.growing(_samples(**last))
    assert (not problems and not problem) or (len(problems) == 1 and problems[0].startswith(problem))


def test_a_run_that_ended_badly_is_none(place: Place) -> None:
    with pytest.raises(Lost, match="exit code 2"):
        prove_steady.samples(place, "refused", steps=0, every=1)
