"""Tests plan files: the same bytes for the same inputs, read strictly, and never believed over what their choice gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.advice.plan_files import KeptPlan, PlanFile, from_text, plan_file, to_text
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import MiB
from fuyou_cli.planner.place import least_memory
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import search, timed
from fuyou_cli.planner.store_modes import redone
from fuyou_cli.planner.sustained_rates import planned_for
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, SPEC, model, request
from .test_small_banks import adapted


def made(asked: PlanRequest, hardware: HardwareProfile = HARDWARE) -> tuple[Plan, PlanFile]:
    best = search(SPEC, hardware, asked).best
    plan = timed(best, SPEC, hardware, asked)
    return plan, plan_file(plan, SPEC, hardware.process_bytes, asked, best.candidate)


ASKED = request()


@cache
def first() -> tuple[Plan, PlanFile]:
    return made(ASKED)


@cache
def first_text() -> str:
    return to_text(first()[1])


def chosen(text: str, asked: PlanRequest = ASKED, **changes: Any) -> Plan:
    """Makes what a run would take from such a file."""
    return KeptPlan(Path("plan.json"), from_text(text))(changes.get("spec", SPEC), changes.get("hardware", HARDWARE), asked)


def test_the_plan_that_was_written_is_the_one_that_runs() -> None:
    assert from_text(first_text()) == first()[1]
    assert chosen(first_text()) == first()[0]
    homes = {(stage.weights, stage.states) for stage in first()[0].stages}
    assert len(homes) > 1  # else a wrong home could not be told from a right one


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_grad_norm": 1.0},
        {"device": "emulated"},
        {"device": "emulated", "weights": "gpu"},
        {"states": "cpu", "gradients": "ssd", "defer": 0.5},
        {"boundaries": "cpu", "lookahead": 3},
        {"kept": "all"},
        {"commit_every": "auto"},
        {"commit_every": "auto", "states": "cpu"},
    ],
    ids=str,
)
def test_a_plan_of_any_kind_is_made_again(changes: dict[str, Any]) -> None:
    asked = request(**changes)
    plan, file = made(asked)
    assert chosen(to_text(file), asked) == plan


def test_equal_inputs_give_equal_bytes() -> None:
    assert to_text(made(request())[1]) == first_text()
    assert "/somewhere" not in first_text() and "2026-01-01" not in first_text()


def test_another_machine_keeps_the_placement_and_tells_its_own_figures() -> None:
    slower = replace(HARDWARE, store_read=HARDWARE.store_read / 4, store_write=HARDWARE.store_write / 4)
    there = chosen(first_text(), hardware=replace(slower, process_bytes=HARDWARE.process_bytes + 50 * MiB))
    assert (there.stages, there.slot_classes, there.arena_size) == (
        first()[0].stages,
        first()[0].slot_classes,
        first()[0].arena_size,
    )
    assert there.predicted.step_seconds > first()[0].predicted.step_seconds
    assert there.predicted.cpu_peak == first()[0].predicted.cpu_peak + 50 * MiB
    assert there.cpu_budget == ASKED.cpu_budget


def test_commits_stay_as_far_apart_as_they_were() -> None:
    """Keeps them also on a machine for which the planner would say another number."""
    asked = request(commit_every="auto", states="cpu", weights="cpu")
    plan, file = made(asked)
    slower = replace(HARDWARE, matmul_flops=HARDWARE.matmul_flops / 2)
    assert plan.commit_every != timed(search(SPEC, slower, asked).best, SPEC, slower, asked).commit_every
    assert chosen(to_text(file), asked, hardware=slower).commit_every == plan.commit_every


def changed(path: tuple[str | int, ...], value: Any) -> str:
    data = json.loads(first_text())
    target = data
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("surprise",), 1, "surprise: unknown key"),
        (("fuyou_plan",), 3, "format 6 is wanted, not 3"),
        (("memory",), "large", "memory: expected a whole number"),
        (("memory",), True, "memory: expected a whole number"),
        (("memory",), -4, "memory: must be at least 0"),
        (("memory",), 4096, "placement: with this recipe and this fuyou"),
        (("commit_every",), 7, "placement: with this recipe and this fuyou"),
        (("placement",), "0" * 16, "placement: with this recipe and this fuyou"),
        (("choice", "lookahead"), 1 << 40, "choice: none that the planner has"),
        (("choice", "states"), 0.3, "choice: none that the planner has"),
        (("choice", "sweeps"), 1.0, "choice: none that the planner has"),
        (("choice", "surprise"), 1, "choice: none that the planner has"),
        (("choice",), [], "choice: expected"),
        (("asked", "numerics.micro_batch_size"), "0", "asked.numerics.micro_batch_size: a whole number of at least 1"),
        (("asked", "numerics.micro_batch_size"), 2, "asked.numerics.micro_batch_size: expected text"),
        (("asked", "numerics.seed"), "8", "numerics.seed was 8, is 7 for this run"),
        (("asked", "device"), '"cuda"', 'device was "cuda", is "cpu" for this run'),
        (("model",), "Test with 3 parameters (0)", "it was made for Test with 3 parameters (0), the recipe's model is Test"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else str(value)[:12],
)  # fmt: skip
def test_what_is_wrong_is_named(path: tuple[str | int, ...], value: Any, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        chosen(changed(path, value))
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[]", "this is not a plan file"),
        ('{"fuyou_plan": 6}', "model: missing"),
        ("[" * 100_000, "nested too deeply"),
        ('"memory": NaN, "x": ', "NaN is not a number"),
        ('"memory": 7, "memory": ', "the key 'memory' occurs twice"),
        ('"memory": 1e999, "x": ', "1e999 is too large for a number"),
        ('"memory": ' + "7" * 5000, "digits"),
        ('"memory": ' + "7" * 200, "memory: must be at most"),
    ],
    ids=["empty", "a list", "cut short", "deep", "NaN", "twice", "infinite", "endless", "large"],
)
def test_what_is_no_plan_is_refused(text: str, words: str) -> None:
    """Refuses a text, or what stands in a plan's file instead of the memory's key."""
    if text.startswith('"memory": '):
        text = first_text().replace('"memory": ', text)
        assert text != first_text()
    with pytest.raises(UsageError) as refused:
        chosen(text)
    assert words in refused.value.message


def test_a_plan_for_something_else_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"plan\.json: it was made for Test with [\d,]+ parameters .*, the recipe's model is"):
        chosen(first_text(), spec=model(1 << 20, 1 << 20, 1 << 20, 1 << 11, 1 << 20))
    with pytest.raises(UsageError, match=r"numerics\.batch_size was 4, is 8 for this run"):
        chosen(first_text(), replace(ASKED, numerics=replace(NUMERICS, batch_size=8)))
    with pytest.raises(UsageError, match=r"clip_grad_norm was null, is 1\.0 for this run"):
        chosen(first_text(), replace(ASKED, clip_grad_norm=1.0))
    with pytest.raises(UsageError, match=r"block_size was 1048576, is 4096 for this run"):
        chosen(first_text(), replace(ASKED, block_size=4096))
    with pytest.raises(UsageError, match=r'store_mode was "in_place", is "redo" for this run'):
        chosen(first_text(), replace(ASKED, store_mode="redo"))


def test_a_plan_of_redo_is_taken_where_the_recipe_leaves_the_mode_open() -> None:
    """Takes it whatever the disks have free by now."""
    plan, file = made(redone(ASKED))
    assert plan.store_mode == "redo"
    assert chosen(to_text(file), replace(ASKED, may_redo=True)).store_mode == "redo"
    with pytest.raises(UsageError, match=r"was .*redo.*for this run|was .*for this run"):
        chosen(to_text(file), ASKED)


def test_a_machine_measured_anew_may_have_other_update_threads() -> None:
    """Shifts by their chunks every span behind them, which says nothing of why."""
    with pytest.raises(UsageError, match=r"update_threads was 1, is 2 by this machine's cores and what AdamW"):
        chosen(first_text(), replace(ASKED, update_threads=2, scratch_size=2 * MiB))
    with pytest.raises(UsageError, match=r"scratch_size was 1048576, is 2097152"):
        chosen(first_text(), replace(ASKED, scratch_size=2 * MiB))


def _places(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


@cache
def places() -> list[tuple[str | int, ...]]:
    return list(_places(json.loads(first_text())))


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 1 << 66), st.floats(), st.sampled_from(["cpu", "ssd", "gpu", ""]),
    st.just([]), st.just({}), st.lists(st.integers(0, 5), max_size=3),
)  # fmt: skip


def _mutation(draw: Callable[..., Any]) -> str:
    data = json.loads(first_text())
    *way, last = draw(st.sampled_from(places()))
    target = data
    for part in way:
        target = target[part]
    how = draw(st.sampled_from(["replace", "nudge", "remove", "add", "swap"]))
    if how == "nudge" and isinstance(target[last], (int, float)) and not isinstance(target[last], bool):
        target[last] += draw(st.sampled_from([1, -1, 4096, -4096, 0.5, 2 * MiB]))
    elif how == "remove":
        del target[last]
    elif how == "add" and isinstance(target, dict):
        target[draw(st.text(max_size=3))] = draw(ANYTHING)
    elif how == "swap" and isinstance(target, list):
        other = draw(st.integers(0, len(target) - 1))
        target[last], target[other] = target[other], target[last]
    else:
        target[last] = draw(ANYTHING)
    return json.dumps(data)


@examples(200)
@given(st.data())
def test_any_change_means_the_same_or_is_refused(data: st.DataObject) -> None:
    text = _mutation(data.draw)
    try:
        taken = chosen(text)
    except UsageError as error:
        assert error.exit_code == 2 and error.message
        return
    assert taken == first()[0]


def test_a_plan_for_drives_that_slow_down_says_so() -> None:
    """It is placed as it was, and told for the machine and the length of the run."""
    slowing = replace(HARDWARE, sustained_write=2e8, sustained_write_mixed=1e8, burst_bytes=10**8)
    plan, file = made(replace(ASKED, sustained=True), slowing)
    kept = KeptPlan(Path("plan.json"), file)
    long, short = (planned_for(kept, SPEC, slowing, ASKED, steps=steps) for steps in (10**6, 1))
    assert (long.sustained, short.sustained) == (True, False) and long.stages == short.stages
    assert long.predicted.step_seconds == plan.predicted.step_seconds > short.predicted.step_seconds


def test_a_plan_for_another_optimizer_is_refused_by_name() -> None:
    lion = SPEC.with_layout(replace(SPEC.layout, rule="lion"))
    with pytest.raises(UsageError, match=r"optimizer\.name"):
        chosen(first_text(), spec=lion)


@pytest.mark.parametrize("rests", [None, True, False])
def test_an_adapter_rests_where_the_file_says(rests: bool | None) -> None:
    """Whatever this run would choose, and in whichever way it asks first."""
    spec = adapted(4, 8, 1)
    asked = replace(ASKED, clip_grad_norm=1.0, cpu_budget=least_memory(spec, HARDWARE, ASKED) + 400 * MiB, trained_in_ram=rests)
    best = search(spec, HARDWARE, asked).best
    plan = timed(best, spec, HARDWARE, asked)
    text = to_text(plan_file(plan, spec, HARDWARE.process_bytes, asked, best.candidate))
    for now in (None, True, False):
        assert chosen(text, replace(asked, trained_in_ram=now), spec=spec) == plan
