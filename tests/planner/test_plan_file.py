"""Plan files: the same bytes for the same inputs, read strictly, and never believed over what their homes give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.advice.plan_files import KeptPlan
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import MiB
from fuyou_cli.planner.lasting import planned_for
from fuyou_cli.planner.place import least_memory
from fuyou_cli.planner.search import search, timed
from fuyou_cli.planner.store_modes import redone
from fuyou_cli.planner.wishes import Wishes
from fuyou_cli.spec.plan import Numerics, Plan
from fuyou_cli.spec.plan_file import Pipeline, PlanFile, from_text, plan_file, to_text

from .models import HARDWARE, model

SPEC = model(1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 11, 1 << 20)
NUMERICS = Numerics(
    compute_dtype="bfloat16", accumulate_dtype="float32", batch_size=4, micro_batch_size=2, max_seq_len=64, head_chunk_tokens=0,
    torch_threads=2, seed=7,
)  # fmt: skip


def wishes(**changes: Any) -> Wishes:
    """With room in RAM for a little of everything, and no clipping."""
    asked = Wishes(
        numerics=NUMERICS, model_name="/somewhere/tiny", device="cpu", clip_grad_norm=None, cpu_budget=0, scratch_size=MiB,
    )  # fmt: skip
    asked = replace(asked, **changes)
    return replace(asked, cpu_budget=least_memory(SPEC, HARDWARE, asked) + 24 * MiB)


def made(asked: Wishes) -> tuple[Plan, PlanFile]:
    best = search(SPEC, HARDWARE, asked).best
    plan = timed(best, SPEC, HARDWARE, asked)
    choice = best.choice
    pipeline = Pipeline(lookahead=choice.lookahead, gradient_slots=choice.gradient_slots, defer=choice.defer)
    return plan, plan_file(plan, SPEC, HARDWARE, keys={"train.batch_size": "4"}, pipeline=pipeline)


ASKED = wishes()
PLAN, FILE = made(ASKED)
TEXT = to_text(FILE)


def chosen(text: str, asked: Wishes = ASKED, **changes: Any) -> Plan:
    """What a run would take from such a file."""
    return KeptPlan(Path("plan.json"), from_text(text))(changes.get("spec", SPEC), changes.get("hardware", HARDWARE), asked)


def test_the_plan_that_was_written_is_the_one_that_runs() -> None:
    assert from_text(TEXT) == FILE
    assert chosen(TEXT) == PLAN
    homes = {(stage.weights, stage.states) for stage in PLAN.stages}
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
    ],
    ids=str,
)
def test_a_plan_of_any_kind_is_built_again(changes: dict[str, Any]) -> None:
    asked = wishes(**changes)
    plan, file = made(asked)
    assert chosen(to_text(file), asked) == plan


def test_equal_inputs_give_equal_bytes() -> None:
    assert to_text(made(wishes())[1]) == TEXT
    elsewhere = replace(HARDWARE, disk_free=1, ram_available=2, measured="2030-01-01", name="other")
    again = plan_file(PLAN, SPEC, elsewhere, keys=FILE.recipe.keys, pipeline=FILE.pipeline)
    assert to_text(again) == TEXT
    assert "/somewhere" not in TEXT and "2026-01-01" not in TEXT


def test_another_machine_keeps_the_homes_and_tells_its_own_seconds() -> None:
    slower = replace(HARDWARE, store_read=HARDWARE.store_read / 4, store_write=HARDWARE.store_write / 4)
    there = chosen(TEXT, hardware=slower)
    assert (there.stages, there.slot_classes, there.arena_size) == (PLAN.stages, PLAN.slot_classes, PLAN.arena_size)
    assert there.predicted.step_seconds > PLAN.predicted.step_seconds


def changed(path: tuple[str | int, ...], value: Any) -> str:
    data = json.loads(TEXT)
    target = data
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("plan", "surprise"), 1, "plan.surprise: unknown key"),
        (("hardware", "disk_free"), 1, "hardware.disk_free: unknown key"),
        (("fuyou_plan",), 1, "format 3 is wanted"),
        (("plan", "arena_size"), "large", "plan.arena_size: expected a whole number"),
        (("plan", "arena_size"), True, "plan.arena_size: expected a whole number"),
        (("plan", "arena_size"), -4, "plan.arena_size: must be at least 0"),
        (("plan", "predicted", "step_seconds"), -1.0, "plan.predicted.step_seconds: must be at least 0"),
        (("plan", "predicted", "step_seconds"), 1e-3, "plan.predicted.step_seconds: is not what the planner makes"),
        (("plan", "stages", 1, "weights"), "tape", "expected 'gpu', 'cpu' or 'ssd'"),
        (("plan", "stages", 1, "kept"), [0, 0], "plan.stages[1].kept"),
        (("plan", "stages", 1, "momentum_at", "offset"), 0, "plan.stages[1].momentum_at.offset"),
        (("plan", "stages", 1, "momentum_at", "size"), 1 << 60, "plan.stages[1].momentum_at.size"),
        (("plan", "stages", 1, "ring", "spares"), 0, "plan.stages[1].ring.spares"),
        (("plan", "stages", 1, "kept"), {}, "expected a list"),
        (("plan", "stages", 1, "ring"), [], "expected keys and values"),
        (("plan", "stages", 2, "stage"), 1, "plan.stages[2].stage"),
        (("plan", "stages"), [], "plan.stages: 0 of them"),
        (("plan", "lookahead"), 0, "plan.lookahead"),
        (("plan", "lookahead"), 1 << 40, "plan.lookahead"),
        (("plan", "cpu_budget"), 1, "plan.cpu_budget"),
        (("plan", "sustained"), True, "plan.sustained: drives that do not slow down"),
        (("plan", "numerics", "seed"), 8, "plan.numerics.seed is 8, the run computes with 7"),
        (("plan", "device"), "cuda", "plan.device is cuda"),
        (("pipeline", "gradient_slots"), 1 << 50, "pipeline.gradient_slots"),
        (("hardware", "store_read"), 1.0, "hardware_digest"),
        (("recipe", "keys", "train.batch_size"), "8", "recipe.digest"),
        (("model", "digest"), "0" * 16, "their tensors differ"),
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
        ("[]", "this is no plan file"),
        ('{"fuyou_plan": 3}', "model: missing"),
        ("[" * 100_000, "nested too deeply"),
        (TEXT.replace('"seed": 7', '"seed": NaN'), "NaN is no number"),
        (TEXT.replace('"seed": 7', '"seed": 7, "seed": 7'), "the key 'seed' is there twice"),
        (TEXT.replace('"seed": 7', '"seed": 1e999'), "1e999 is more than a number can be"),
        (TEXT.replace('"seed": 7', '"seed": ' + "7" * 5000), "a number of 5,000 digits"),
        (TEXT.replace('"seed": 7', '"seed": ' + "7" * 299), "plan.numerics.seed: must be at most"),
        (re.sub('"step_seconds": [0-9.e-]+', '"step_seconds": 1' + "0" * 299, TEXT), "step_seconds"),
        (re.sub('"step_seconds": [0-9.e-]+', '"step_seconds": 1' + "0" * 310, TEXT), "a number of 311 digits"),
    ],
    ids=["empty", "a list", "cut short", "deep", "NaN", "twice", "infinite", "endless", "large", "vast", "too vast"],
)
def test_what_is_no_plan_is_refused(text: str, words: str) -> None:
    assert text != TEXT
    with pytest.raises(UsageError) as refused:
        chosen(text)
    assert words in refused.value.message


def test_a_plan_for_something_else_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"plan\.json: it was made for Test with [\d,]+ parameters, the recipe's model is Test"
    ):
        chosen(TEXT, spec=model(1 << 20, 1 << 20, 1 << 20, 1 << 11, 1 << 20))
    with pytest.raises(UsageError, match=r"plan\.numerics\.batch_size is 4, the run computes with 8"):
        chosen(TEXT, replace(ASKED, numerics=replace(NUMERICS, batch_size=8)))
    with pytest.raises(UsageError, match=r"plan\.stages\[\d\]|plan\.clip_grad_norm|pipeline\.defer"):
        chosen(TEXT, replace(ASKED, clip_grad_norm=1.0))
    with pytest.raises(UsageError, match=r"plan\.io\.block_size is 1048576, the run uses 4096"):
        chosen(TEXT, replace(ASKED, block_size=4096))
    with pytest.raises(UsageError, match=r"plan\.store_mode is in_place; by what the disks have free"):
        chosen(TEXT, redone(ASKED))


def test_a_plan_of_redo_is_taken_where_the_recipe_leaves_the_mode_open() -> None:
    """Whatever the disks have free by now."""
    plan, file = made(redone(ASKED))
    assert plan.store_mode == "redo"
    assert chosen(to_text(file), replace(ASKED, may_redo=True)).store_mode == "redo"
    with pytest.raises(UsageError, match=r"plan\.store_mode is redo; by what the disks have free"):
        chosen(to_text(file), ASKED)


def test_a_machine_measured_anew_may_have_other_update_threads() -> None:
    """Their chunks shift every span behind them, which says nothing of why."""
    with pytest.raises(UsageError, match=r"made for 1 update thread, this machine uses 2 by its cores and what AdamW"):
        chosen(TEXT, replace(ASKED, update_threads=2, scratch_size=2 * MiB))
    with pytest.raises(UsageError, match=r"plan\.io\.scratch: 1048576 bytes for chunks, the run takes 2097152"):
        chosen(TEXT, replace(ASKED, scratch_size=2 * MiB))


def _places(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


PLACES = list(_places(json.loads(TEXT)))
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 1 << 66), st.floats(), st.sampled_from(["cpu", "ssd", "gpu", ""]),
    st.just([]), st.just({}), st.lists(st.integers(0, 5), max_size=3),
)  # fmt: skip


def _mutation(draw: Callable[..., Any]) -> str:
    data = json.loads(TEXT)
    *way, last = draw(st.sampled_from(PLACES))
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
    assert taken == PLAN


def test_a_plan_for_drives_that_slow_down_says_so() -> None:
    """It is compared at the rates it was made for, and told again for the machine and the length of the run."""
    slowing = replace(HARDWARE, sustained_write=2e8, sustained_write_mixed=1e8, burst_bytes=10**8)
    asked = replace(ASKED, sustained=True)
    best = search(SPEC, slowing, asked).best
    choice = best.choice
    pipeline = Pipeline(lookahead=choice.lookahead, gradient_slots=choice.gradient_slots, defer=choice.defer)
    text = to_text(plan_file(timed(best, SPEC, slowing, asked), SPEC, slowing, keys={}, pipeline=pipeline))
    kept = KeptPlan(Path("plan.json"), from_text(text))
    long, short = (planned_for(kept, SPEC, slowing, ASKED, steps=steps) for steps in (10**6, 1))
    assert (long.sustained, short.sustained) == (True, False) and long.stages == short.stages
    assert long.predicted.step_seconds == kept.file.plan.predicted.step_seconds > short.predicted.step_seconds
    broken = json.loads(text)
    broken["plan"]["sustained"] = False
    with pytest.raises(UsageError, match="is not what the planner makes of these homes"):
        chosen(json.dumps(broken), hardware=slowing)


@pytest.mark.parametrize("key", ["store_read_mixed", "matmul_flops"])
def test_rates_that_no_machine_has(key: str) -> None:
    file = plan_file(PLAN, SPEC, replace(HARDWARE, **{key: 0.0}), keys={}, pipeline=FILE.pipeline)
    with pytest.raises(UsageError, match=f"hardware.{key}: more than 0 is wanted"):
        from_text(to_text(file))
