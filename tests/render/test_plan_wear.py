"""Tests what `fuyou plan` says of drives: what a run writes to them, what they are rated for, and how worn they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.room import RunWear, Writes, wear_of, writes_of
from fuyou_cli.cli.render.plan_screen import plan_json
from fuyou_cli.core.units import gb
from fuyou_cli.spec.hardware import Drive, HardwareProfile

from .conftest import Screen, words

TB = 10**12


@pytest.mark.parametrize(("steps", "said"), [(None, "1,000 steps write"), (250, "the run's 250 steps write")])
def test_wear_is_the_runs_own_where_its_length_is_known(screen: Screen, facts: RunFacts, steps: int | None, said: str) -> None:
    written = gb((steps or 1000) * facts.plan.predicted.written_per_step)
    assert f"{said} {written}" in screen(replace(facts, steps=steps), 100)


@pytest.mark.parametrize(
    ("used", "passes", "said"),
    [
        (0.5, True, "10% of the 600 TB that the drive is rated for; the most worn drive: 50% used before, 60% after"),
        (0.95, False, "after the run, a drive will have used 105% of its rated writes; it had used 95% before"),
        (1.2, True, "after the run, a drive will have used 130% of its rated writes; it had used 120% before"),
        (0.0, True, "10% of the 600 TB that the drive is rated for"),
    ],
)
def test_what_a_drive_has_written_already_counts(screen: Screen, facts: RunFacts, used: float, passes: bool, said: str) -> None:
    """Runs a tenth of its rating. One past it is told, and no change of the recipe cures that."""
    rated, steps = 600 * TB, 1000
    worn = replace(facts.hardware, drives=(Drive(model="d", capacity=TB, rated_bytes=rated, used_bytes=round(used * rated)),))
    predicted = replace(facts.plan.predicted, written_per_step=rated // 10 // steps, export_bytes=0)
    run = replace(facts, plan=replace(facts.plan, predicted=predicted), hardware=worn, steps=steps)
    text = screen(run)
    assert said in text and ("warning" in text) == (used >= 0.95)
    assert ("`fuyou plan` plans changes" in screen(replace(run, advice="`fuyou plan` plans changes"))) is not passes
    assert run.wear is not None and run.wear.accepted == passes
    data = plan_json(run)
    assert (data["wear"], data["worn_after"]) == (pytest.approx(0.1), pytest.approx(used + 0.1))


def test_where_no_change_helps_it_is_said_what_for(screen: Screen, facts: RunFacts) -> None:
    """Says it twice: as what to do next, and where the changes would be."""
    tried = replace(facts, changes=(), tried=37)
    told = words(screen(tried)).lower()
    assert told.count("no change of one or two keys spares the drives (37 plans tried)") == 2 and "makes it fit" not in told
    told = words(screen(replace(tried, room=replace(facts.room, ssd=1))))
    said = "o change of one or two keys makes it fit (37 plans tried): it takes "
    assert told.count(said) == 2 and f"N{said}" in told and "spares" not in told
    assert told[told.index(f"N{said}") :].partition(" of RAM")[0].endswith("iB")  # not in small letters


def test_every_drive_wears_by_itself(hardware: HardwareProfile) -> None:
    """Writes are spread evenly, also over one whose rating nobody knows. The one that is rated for least counts, whatever
    larger ones beside it are rated for, and the one that is worn most."""

    def wear(*drives: tuple[int, int]) -> RunWear | None:
        made = tuple(Drive(model="d", capacity=1, rated_bytes=rated, used_bytes=used) for rated, used in drives)
        writes = Writes(loading=10**14, steps=10**14, saving=5 * 10**13, export=5 * 10**13)
        return wear_of(replace(hardware, drives=made), writes)

    worn = wear((10**15, 10**14), (10**15, 0), (0, 5))
    assert worn is not None and (worn.run, worn.rated, worn.before, worn.after) == (0.1, 10**15, 0.1, 0.2)
    mixed = wear((10**14, 0), (7 * 10**14, 0))  # of both together it would be 38 %
    assert mixed is not None and mixed.run == mixed.after == 1.5 and not mixed.accepted
    older = wear((10**15, 0), (2 * 10**15, 18 * 10**14))  # rated for least is one, worn most the other
    assert older is not None and (older.run, older.before, older.after) == (0.15, 0.9, 0.975)
    assert wear((0, 5)) is None
    assert wear_of(hardware, None) is None


@pytest.mark.parametrize(
    ("drives", "said"),
    [
        (((600, 0), (600, 0)), "300 TB to each of 2 drives is 50% of the 600 TB that the least of them is rated for"),
        (((600, 60), (7008, 0)), "the least of them is rated for; the most worn drive: 10% used before, 60% after"),
        (((600, 0), (0, 0)), "50% of the 600 TB that the least of them is rated for"),
    ],
)
def test_the_share_of_one_drive_is_told(
    screen: Screen, facts: RunFacts, drives: tuple[tuple[int, int], ...], said: str
) -> None:
    made = tuple(Drive(model="d", capacity=TB, rated_bytes=rated * TB, used_bytes=used * TB) for rated, used in drives)
    plan = replace(facts.plan, predicted=replace(facts.plan.predicted, written_per_step=6 * 10**11))
    text = words(screen(replace(facts, plan=plan, hardware=replace(facts.hardware, drives=made), steps=1000)))
    assert said in text and "of a drive's rated writes" in text


def test_a_run_writes_beside_its_steps(screen: Screen, facts: RunFacts) -> None:
    """Writes the model to the drive three times and more, although with everything in RAM and no commits no step writes."""
    plan, room = facts.plan, facts.room
    stages = tuple(
        replace(stage, weights_ram=stage.weights_at, momentum_ram=stage.momentum_at, variance_ram=stage.variance_at)
        for stage in plan.stages
    )
    predicted = replace(plan.predicted, written_per_step=0, export_bytes=2 * 10**6)
    resting = replace(plan, stages=stages, predicted=predicted, commit_every=None)
    each = len(stages) * stages[0].weights_at.size
    writes = writes_of(resting, room, steps=100)
    assert writes == Writes(loading=each, steps=0, saving=3 * each, export=2 * 10**6)
    assert writes_of(replace(resting, commit_every=1), room, steps=100).saving == 0  # updates do that
    (both,) = room.disks
    apart = (replace(both, what=("the store",)), replace(both, what=("the exported model",)))
    assert writes_of(resting, replace(room, disks=apart), steps=100).export == 0  # not to the store's drives
    small = replace(facts.hardware, drives=(Drive(model="d", capacity=TB, rated_bytes=2 * writes.total),))
    run = replace(facts, plan=resting, hardware=small, steps=100)
    said = f"wear loading {gb(each)}, saving {gb(3 * each)}, export 2 MB; {gb(writes.total)} is 50% of the"
    assert said in words(screen(run))
    data = plan_json(run)
    assert (data["written_by_run"], data["wear"]) == (writes.total, 0.5)
    assert data["writes"] == {"loading": each, "steps": 0, "saving": 3 * each, "export": 2 * 10**6}


def test_a_plan_says_which_drive_is_near_its_end(screen: Screen, facts: RunFacts) -> None:
    """Says it also of one that nobody knows the rating of."""
    worn, fresh = (Drive(model=f"No Name {percent}", capacity=TB, percent_used=percent) for percent in (95, 40))
    text = screen(replace(facts, hardware=replace(facts.hardware, drives=(worn, fresh, worn)), steps=10))
    assert text.count("warning: No Name 95 reports that 95 % of its endurance is used") == 1
    assert "No Name 40" not in text
