"""Tests `fuyou plan` on the terminal and as JSON: the figures are there, nothing is too wide, ASCII stays ASCII."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fuyou_cli.advice.facts import (
    Ending,
    EvaluationCost,
    RunFacts,
    RunWear,
    Writes,
    plan_problems,
    steps_within,
    wear_of,
    writes_of,
)
from fuyou_cli.cli.render.plan_screen import plan_json, show_changed
from fuyou_cli.core.units import GiB, MiB, gb
from fuyou_cli.planner.search import FastRegion
from fuyou_cli.spec.hardware import Drive, HardwareProfile, StageRate
from fuyou_cli.spec.model import Rule
from fuyou_cli.spec.plan import MemoryLine, Plan

from .conftest import Printer, Screen, disk, words


def row(text: str, first: str) -> list[str]:
    """The cells of the first line that begins with this word."""
    return next(line for line in text.splitlines() if line.strip().startswith(first + " ")).split()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("ascii", [False, True])
def test_figures_fit_the_width(screen: Screen, facts: RunFacts, width: int, ascii: bool) -> None:
    text = screen(facts, width, ascii=ascii, verbose=True)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii() == ascii
    assert "8,192 tokens per step" in words(text)
    assert row(text, "weights")[:4] == ["weights", "2.15", "0.41", "4.30"]
    assert row(text, "peak") == ["peak", "1.84", "27.93"]
    assert row(text, "used") == ["used", "92%", "37%"]
    assert "load 900 MiB" in text and "train 1.84 GiB" in text
    assert row(text, "compute")[1:7] == ["72.0", "TFLOP", "0.857", "TFLOPS", "84.0", "s"]
    assert row(text, "compute")[-1] == "bottleneck"
    assert row(text, "total") == ["total", "17.6", "GB", "15.4", "GB"]
    assert "92.67 tokens/s" in text and "0.612 TFLOPS (6N" in text
    assert ("rest until the norm is known" in text) == (width == 120)  # the policy column needs room
    assert text.splitlines()[0].startswith("fits: RAM 1.84 GiB") and "fuyou finetune recipe.yaml" in words(text)


def test_the_widest_figures_leave_the_bottleneck_its_word(screen: Screen, facts: RunFacts) -> None:
    seconds = {"compute": 1000.0, "update": 0.56, "ssd read": 342.0, "ssd write": 984.0}
    predicted = replace(facts.plan.predicted, compute_flops=134_328e12, seconds=seconds, step_seconds=1112.0)
    for name in seconds:
        plan = replace(facts.plan, predicted=replace(predicted, bottleneck=name))
        text = screen(replace(facts, plan=plan), 80, ascii=False)
        shown = [line for line in text.splitlines() if "bottleneck" in line.split()]
        answer = ["bottleneck", f"{name}, {seconds[name] / 1112:.0%} of the step"]
        assert len(shown) == 2 and shown[0].split("  ")[1:3] == answer
        assert shown[1].strip().startswith(name) and len(shown[1]) <= 80
    assert "B params/s" in text and "134,328 TFLOP " in text


def test_limits_that_stop_the_run_are_said_with_their_step(screen: Screen, facts: RunFacts) -> None:
    time = Ending(limit="train.max_time=1h", step=40, again="run the same command again to continue")
    limited = replace(facts, steps=1000, endings=(time,))
    assert "train.max_time=1h stops the run after step 40 of 1,000; run the same command" in words(screen(limited, 80))
    assert plan_json(limited)["endings"] == [
        {"limit": "train.max_time=1h", "step": 40, "again": "run the same command again to continue"}
    ]


@pytest.mark.parametrize(
    ("steps", "done", "said"),
    [
        (None, None, "every 100 steps: a crash loses at most 2h 28m, commits take 0.0% of the time and 0% of the writes"),
        (1000, None, "every 100 steps: a crash loses at most 2h 28m, commits take 0.0% of the time and 0% of the writes"),
        (100, 60, "every 100 steps: a crash loses at most 58m 56s, commits take 0.0% of the time and 0% of the writes"),
        (8, None, "only at the end, because the run is shorter than an interval of 100 steps: a crash loses at most 11m 47s"),
        (199, 190, "only at the end, because the run is shorter than an interval of 100 steps: a crash loses at most 13m 16s"),
    ],
)
def test_a_crash_loses_no_more_than_the_run(
    screen: Screen, facts: RunFacts, steps: int | None, done: int | None, said: str
) -> None:
    rare = replace(facts, plan=replace(facts.plan, commit_every=100), steps=steps, done=done)
    assert f"commits {said}; two copies of " in words(screen(rare, 100))


@pytest.mark.parametrize("width", [80, 120])
def test_what_makes_a_crash_cheaper_is_said_where_it_costs_much(screen: Screen, facts: RunFacts, width: int) -> None:
    def told(every: int, often: int, **changes: object) -> str:
        rare, soon = (replace(facts.plan, commit_every=steps) for steps in (every, often))
        seconds = facts.plan.predicted.step_seconds + 8.84 / often
        soon = replace(soon, predicted=replace(soon.predicted, step_seconds=seconds, commit_seconds=8.84))
        text = screen(replace(facts, plan=rare, sooner=soon, **changes), width, ascii=False)  # type: ignore[arg-type]
        assert max(map(len, text.splitlines())) <= width
        return words(text)

    assert "; with checkpoint.commit_every_steps=5 at most 9m 01s, for 2.0% of the time; two copies" in told(100, 5)
    assert "; with checkpoint.commit_every_steps=1 at most the running step, for 9.1% of the time; two" in told(100, 1)
    assert "commit_every_steps" not in told(100, 5, steps=6)  # the whole run takes less than ten minutes


@pytest.mark.parametrize(("rule", "said"), [("adamw", "float32 AdamW;"), ("lion", "float32 Lion;")])
def test_the_method_names_the_recipes_optimizer(screen: Screen, facts: RunFacts, rule: Rule, said: str) -> None:
    model = facts.model.with_layout(replace(facts.model.layout, rule=rule))
    assert said in words(screen(replace(facts, model=model), 120))


def test_a_plan_made_again_is_one_line_of_what_changed(printer: Printer, plan: Plan) -> None:
    """Of a process that has grown while it tokenised, and so of what has room beside it."""
    before = replace(plan, memory=(*plan.memory, _process(420 * MiB)))
    now = replace(before, memory=(*plan.memory, _process(484 * MiB)), predicted=replace(plan.predicted, step_seconds=90.0))
    console, printed = printer(200)
    show_changed(console, before, now)
    told = "the plan, now that the data is read: a step 90.0 s (was 88.4 s), process 484 MiB (was 420 MiB)\n"
    assert printed() == told
    show_changed(console, before, replace(before, arena_size=plan.arena_size + 1))
    assert printed() == told  # nothing that the screen shows


def _process(size: int) -> MemoryLine:
    return MemoryLine(what="process", tier="cpu", size=size, total=0, policy="")


def test_steps_within_a_time(plan: Plan) -> None:
    assert steps_within(3600, plan, None) == 40  # at 88.4 s
    slows = FastRegion(size=1, steps=10.0, first=60.0, later=120.0)
    assert steps_within(3600, plan, slows) == 40  # planned within the fast region
    sustained = replace(plan, sustained=True)
    assert [steps_within(seconds, sustained, slows) for seconds in (59, 60, 600, 3600)] == [0, 1, 10, 35]


def test_when_updates_run_is_said(screen: Screen, facts: RunFacts) -> None:
    def text(clip: float | None, *deferred: int, norm_first: bool = False) -> str:
        stages = tuple(replace(stage, deferred=stage.stage in deferred) for stage in facts.plan.stages)
        return words(
            screen(replace(facts, plan=replace(facts.plan, clip_grad_norm=clip, stages=stages, norm_first=norm_first)), 120)
        )

    assert "exact clipping at norm 1: updates wait for the last gradient" in text(1.0, *range(len(facts.plan.stages)))
    measured = "exact clipping at norm 1, which a first backward measures: every update overlaps the second backward"
    assert measured in text(1.0, norm_first=True)
    assert "no clipping: every update overlaps backward" in text(None)
    assert "no clipping: every update runs in the next forward" in text(None, *range(len(facts.plan.stages)))


def test_bars_grow_with_time(screen: Screen, facts: RunFacts) -> None:
    text = screen(facts, 120)
    assert row(text, "compute")[-2] == "#" * 20  # 95 %, rounded up
    assert row(text, "update")[-1] == "#"


def test_a_model_that_cannot_be_trained_yet(screen: Screen, facts: RunFacts) -> None:
    """The plan is shown, and no command that would only be refused."""
    mixture = replace(facts.model, inactive_parameters=facts.model.parameters // 4)
    refused = replace(facts, model=mixture, refusal="it has experts")
    text = screen(refused)
    assert text.startswith("fits: RAM") and text.splitlines()[0].endswith("; cannot be trained yet")
    assert "another model; this one cannot be trained yet: it has experts" in text and "fuyou finetune" not in text
    assert "active per token), 22 blocks" in text and "6 x active parameters x tokens/s" in text
    data = plan_json(refused)
    assert (data["fits"], data["trainable"], data["refusal"]) == (True, False, "it has experts")
    assert data["model"]["active_parameters"] == mixture.parameters - mixture.parameters // 4  # type: ignore[index]


def test_what_does_not_fit_is_said_in_words(screen: Screen, facts: RunFacts) -> None:
    tight = replace(facts.room, disks=(disk(free=10 * 10**9),), ssd=20 * 10**9, store=10 * 10**9)
    small = replace(facts, plan=replace(facts.plan, cpu_budget=GiB), room=tight)
    assert small.problems == [
        "train needs 1.84 GiB of RAM, 860 MiB more than its budget (also over it: save)",
        "the store needs 30 GB, offload.max_memory.ssd allows 20 GB",
        "the store and the exported model need 32.2 GB of disk in /nvme, but 10 GB are free",
    ]
    text = screen(small, 80)
    assert "does not fit" in text and "over budget" in text and "fuyou finetune" not in text
    assert row(text, "available") == ["available", "1.00", "9.31"]
    assert facts.problems == []


def test_what_the_run_holds_already_counts_as_room(screen: Screen, facts: RunFacts) -> None:
    resumed = replace(facts, room=replace(facts.room, disks=(disk(free=10 * 10**9, held=28_600 * MiB),)))
    assert resumed.problems == []
    assert "the store and the exported model: 32.2 GB, 30 GB of it already there; 10 GB free" in words(screen(resumed))


def test_a_separate_device_gets_a_column(screen: Screen, facts: RunFacts) -> None:
    plan = facts.plan
    lines = (*plan.memory, MemoryLine(what="weights", tier="gpu", size=512 * MiB, total=2_200 * MiB, policy="slots"))
    shown = replace(plan, memory=lines, predicted=replace(plan.predicted, gpu_peak=3 * GiB))
    text = screen(replace(facts, plan=shown, room=replace(facts.room, gpu=24 * GiB)), 80)
    assert row(text, "weights")[:5] == ["weights", "2.15", "0.50", "0.41", "4.30"]
    assert row(text, "peak") == ["peak", "3.00", "1.84", "27.93"]
    problems = plan_problems(shown, replace(facts.room, gpu=2 * GiB))
    assert problems == ["the step needs 3.00 GiB of GPU memory, offload.max_memory.gpu leaves 2.00 GiB"]


# ---- memory, machine, stages -----------------------------------------------------------------------------------------


def test_a_plan_that_takes_more_than_there_is(facts: RunFacts) -> None:
    """Compares clearly with free RAM, as what others hold comes and goes; exactly with what the kernel enforces or a driver may
    pin."""
    plan, room, peak = facts.plan, facts.room, facts.plan.predicted.cpu_peak
    assert plan_problems(plan, replace(room, ram=int(peak / 1.04))) == []
    (problem,) = plan_problems(plan, replace(room, ram=peak // 2))
    assert problem.startswith("the run needs 1.84 GiB of RAM, 942 MiB are free")
    assert plan_problems(plan, replace(room, ram=peak, ram_total=peak)) == []
    (problem,) = plan_problems(plan, replace(room, ram=peak, ram_total=int(peak / 1.04)))  # a control group, say
    assert problem.startswith("the run needs 1.84 GiB of RAM, the machine or its control group has 1.77 GiB")
    small = replace(plan, cpu_budget=peak // 2)  # nothing that max_memory.cpu allows is too much
    (problem,) = plan_problems(small, replace(room, ram=peak, ram_total=int(peak / 1.04), pinnable=peak // 2))
    assert "more than its budget" in problem
    bound = replace(room, pinnable=plan.arena_size - 1, pinnable_why="WSL lets half of RAM be pinned")
    (problem,) = plan_problems(replace(plan, device="cuda"), bound)
    assert "of RAM for the GPU" in problem and "(WSL lets half of RAM be pinned)" in problem
    assert plan_problems(plan, bound) == []  # nothing is pinned without one
    assert plan_problems(replace(plan, device="cuda"), replace(bound, pinnable=plan.arena_size)) == []


def test_a_build_without_io_uring_says_so(screen: Screen, facts: RunFacts) -> None:
    assert "I/O by threads (built without io_uring)" in screen(replace(facts, io_uring=False))
    assert "built without" not in screen(facts)


def test_equal_stages_share_a_line(screen: Screen, facts: RunFacts) -> None:
    assert row(screen(facts, verbose=True), "1-22")[:6] == ["1-22", "block", "x22", "44", "M", "84"]
    assert "1-22" not in screen(facts)


def test_names_cannot_break_an_ascii_console(screen: Screen, facts: RunFacts) -> None:
    named = replace(facts, plan=replace(facts.plan, model="模型 [bold]x[/bold]"))
    assert "?? [bold]x[/bold]" in screen(named, 80)


def test_a_cut_vocabulary_is_said_and_its_pieces_are_one_line(screen: Screen, facts: RunFacts) -> None:
    stages = tuple(
        replace(stage, kind="head", vocabulary=(1000 * index, 1000 * index + 1000)) if index < 3 else stage
        for index, stage in enumerate(facts.model.stages)
    )
    plan = replace(facts.plan, numerics=replace(facts.plan.numerics, vocabulary_rows=1000))
    for width in (80, 120):
        text = screen(replace(facts, plan=plan, model=replace(facts.model, stages=stages)), width, verbose=True)
        assert max(map(len, text.splitlines())) <= width
        assert "vocabulary in pieces of 1,000 tokens" in words(text)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def test_evaluations_are_priced_as_far_as_they_are_known(screen: Screen, facts: RunFacts) -> None:
    one = EvaluationCost(pass_rows=16, pass_seconds=20.0, pass_read=1 << 31, times=None)
    every = replace(one, times=5, rows=20, passes=2, seconds=40.0, run_share=0.031)
    for cost, said in (
        (one, "20.0 s for 16 rows, forward alone"),
        (replace(every, times=None, run_share=None), "40.0 s for 20 rows in 2 passes, forward alone"),
        (every, "40.0 s for 20 rows in 2 passes, forward alone; 5 times, 3% of the run"),
    ):
        known = replace(facts, evaluation=cost)
        assert f"evaluating {said} " in f"{words(screen(known, 120, ascii=False))} "
        assert plan_json(known)["evaluation"] == asdict(cost)
    assert "evaluating" not in screen(facts, 120, ascii=False) and plan_json(facts)["evaluation"] is None


def test_json_keeps_bytes_whole(facts: RunFacts) -> None:
    data = json.loads(json.dumps(plan_json(facts)))
    assert data["schema_version"] == 2 and data["fits"] is True and data["problems"] == []
    assert data["cpu_peak"] == 1_884 * MiB and isinstance(data["cpu_peak"], int)
    assert data["tokens_per_second"] == pytest.approx(8192 / 88.4)
    assert data["plan"]["predicted"]["written_by"]["states"] == 11_000_000_000
    assert data["hardware"]["store_read_mixed"] == 1.2e9
    assert len(data["plan"]["stages"]) == data["model"]["stages"] == 25
    assert data["changes"] is None and data["tried"] is None


def test_json_has_every_limit_and_how_much_was_tried(facts: RunFacts) -> None:
    bound = replace(facts.room, ssd=1, ram=2, ram_total=3, pinnable=4, pinnable_why="WSL")
    data = json.loads(json.dumps(plan_json(replace(facts, room=bound, changes=(), tried=17))))
    limits = {key: data["room"][key] for key in ("ssd", "ram", "ram_total", "pinnable", "pinnable_why")}
    assert limits == {"ssd": 1, "ram": 2, "ram_total": 3, "pinnable": 4, "pinnable_why": "WSL"}
    assert (data["changes"], data["tried"]) == ([], 17)


# ---- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("case", ["cpu", "gpu", "described", "assumed", "long", "not fitting"])
def test_the_answer_comes_first(screen: Screen, facts: RunFacts, width: int, case: str) -> None:
    """Prints verdict, step, bottleneck, wear and what to do next: five lines of 100 columns, then the rest."""
    there = {
        "measured": "described",
        "name": "here",
        "sources": ("matmul_flops: measured there", "store_read, store_write: an assumption"),
    }
    changes: dict[str, object] = {
        "gpu": {"room": replace(facts.room, gpu=24 * GiB)},
        "described": {"hardware": replace(facts.hardware, **there)},  # type: ignore[arg-type]
        "assumed": {"hardware": replace(facts.hardware, measured="assumed")},
        "long": {"steps": 100_000, "command": "fuyou finetune r.yaml"},
        "not fitting": {"plan": replace(facts.plan, cpu_budget=GiB)},
    }.get(case, {})  # type: ignore[assignment]
    text = screen(replace(facts, notes=("no data",), **changes), width, ascii=False)  # type: ignore[arg-type]
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    if width >= 100:
        assert lines[0].startswith("does not fit: train needs" if case == "not fitting" else "fits: RAM 1.84 GiB of 2.00 GiB")
        assert [line.split()[0] for line in lines[1:5]] == ["step", "bottleneck", "wear", "next"]
        assert "88.4 s" in lines[1] and "92.67 tokens/s" in lines[1] and "compute, 95% of the step" in lines[2]
        assert "written in 1" in lines[3] and lines[5] == ""
    assert lines[lines.index("Plan") - 1] == "" and lines[-1] == "  - no data"


def test_rates_are_a_table_with_v_and_where_an_assumption_decides(screen: Screen, facts: RunFacts) -> None:
    """Prints them of a described machine. Those that decide and are assumptions are named first."""
    sources = ("matmul_flops: measured there", "store_read, store_write: an assumption")
    there = replace(facts.hardware, measured="described", name="there", sources=sources)

    def shown(bottleneck: str, *, verbose: bool) -> str:
        seconds = {"compute": 40.0, "update": 1.0, "ssd read": 10.0, "ssd write": 10.0, bottleneck: 84.0}
        plan = replace(facts.plan, predicted=replace(facts.plan.predicted, seconds=seconds, bottleneck=bottleneck))
        return screen(replace(facts, plan=plan, hardware=there), verbose=verbose)

    assert "Rates of this machine" in shown("compute", verbose=True)
    assert "Rates of this machine" in shown("ssd read", verbose=False)
    assert "assumption" not in shown("compute", verbose=False) and "Rates" not in shown("compute", verbose=False)
    assert "the important rates are assumptions (store read, write" in shown("ssd read", verbose=False).splitlines()[4]


def test_what_to_do_next(screen: Screen, facts: RunFacts) -> None:
    def after(**changes: object) -> str:
        return words(screen(replace(facts, **changes)).splitlines()[4])  # type: ignore[arg-type]

    here = Path("/nvme")
    busy = after(hardware=replace(facts.hardware, others_cores=50.0), folder=here)
    assert busy.startswith("next measure again when the machine is idle: `fuyou bench --dir /nvme` (other programs used 50.0")
    assumed = after(hardware=replace(facts.hardware, measured="assumed"), folder=here)
    assert assumed.startswith("next measure this machine: `fuyou bench --dir /nvme`")
    assert after(steps=8, done=8) == "next nothing: all steps are done"
    seconds = {"compute": 30.0, "update": 3.1, "ssd read": 44.0, "ssd write": 60.0}
    waiting = replace(facts.plan.predicted, seconds=seconds, bottleneck="ssd write", stalls={"weights": 50.0})
    waits = replace(facts.plan, predicted=waiting)
    assert after(plan=waits, faster=()).startswith("next try more RAM or faster drives: compute waits 57%")
    assert (
        after(plan=waits, steps=8, done=4, advice="`p` finds")
        == "next try more RAM or faster drives: compute waits 57% of the step. Run: fuyou finetune recipe.yaml"
    )
    assert after(plan=waits, advice="`fuyou plan` finds").startswith("next `fuyou plan` finds: compute waits 57% of the step")
    through = replace(waits, predicted=replace(waiting, seconds={**seconds, "dram": 80.0}, bottleneck="dram"))
    assert after(plan=through).startswith("next try faster memory: compute waits 57%")
    busy = "compute is nearly always busy"
    assert busy in after() and "compile" not in after()
    assert after(may_compile=True).startswith(f"next try train.compile=true (other losses): {busy}; on an H100")
    compiled, shown = replace(facts.model, compiled=True), "at rates of blocks that are not compiled"
    assert shown in after(model=compiled)
    block = next(stage for stage in compiled.stages if stage.kind == "block")
    rate = StageRate(kind="compiled block", dtype=compiled.compute_dtype, hidden=compiled.hidden_size, params=block.params,
                     tokens=8, forward=1.0, backward=1.0)  # fmt: skip
    assert shown not in after(model=compiled, hardware=replace(facts.hardware, stage_rates=(rate,)))
    assert shown in after(model=compiled, hardware=replace(facts.hardware, stage_rates=(replace(rate, params=9),)))
    text = screen(replace(facts, plan=through, hardware=replace(facts.hardware, dram=3e9)))
    assert "dram 3 GB/s" in words(text)
    assert row(text, "dram") == ["dram", "240", "GB", "3", "GB/s", "80.0", "s", *row(text, "dram")[7:]]
    # Compute on a CPU moves bytes that are not counted, so the row is there only where the memory binds.
    for device, shown in (("cpu", False), ("cuda", True)):
        free = replace(waiting, seconds={**seconds, "dram": 9.0})
        text = screen(replace(facts, plan=replace(waits, predicted=free, device=device)))
        assert any(line.split()[:1] == ["dram"] for line in text.splitlines()) is shown


# ---- drives ----------------------------------------------------------------------------------------------------------


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
