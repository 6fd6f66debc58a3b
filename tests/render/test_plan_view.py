"""`fuyou plan` on the terminal and as JSON: the figures are there, nothing is too wide, ASCII stays ASCII."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fuyou_cli.advice.endings import Ending, steps_within
from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.room import Room, plan_problems
from fuyou_cli.advice.wear import Wear, Writes, wear_of, writes_of
from fuyou_cli.cli.render.plan import show_plan
from fuyou_cli.cli.render.plan_json import plan_json
from fuyou_cli.core.units import GiB, MiB, gb
from fuyou_cli.planner.lasting import FastRegion
from fuyou_cli.spec.hardware import Drive, HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import MemoryLine, Plan

from .conftest import disk

Printer = Callable[..., tuple[Console, Callable[[], str]]]


def row(text: str, first: str) -> list[str]:
    """The cells of the first line that begins with this word."""
    return next(line for line in text.splitlines() if line.strip().startswith(first + " ")).split()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("ascii", [False, True])
def test_figures_fit_the_width(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room, width: int, ascii: bool
) -> None:
    console, printed = printer(width, ascii=ascii)
    show_plan(console, plan, model, hardware, room, verbose=True, facts=RunFacts())
    text = printed()
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii() == ascii
    assert "8,192 tokens per step" in text.replace("\n", " ")
    assert row(text, "weights")[:4] == ["weights", "2.15", "0.41", "4.30"]
    assert row(text, "peak") == ["peak", "1.84", "27.93"]
    assert row(text, "used") == ["used", "92%", "37%"]
    assert row(text, "compute")[1:7] == ["72.0", "TFLOP", "0.857", "TFLOPS", "84.0", "s"]
    assert row(text, "compute")[-1] == "bottleneck"
    assert row(text, "total") == ["total", "17.6", "GB", "15.4", "GB"]
    assert "92.7 tokens/s" in text and "0.612 TFLOPS (6N" in text
    assert ("rest until the norm is known" in text) == (width == 120)  # the policy column needs room
    assert text.splitlines()[0].startswith("fits: RAM 1.84 GiB") and "fuyou finetune recipe.yaml" in " ".join(text.split())


def test_the_widest_figures_leave_the_bottleneck_its_word(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    seconds = {"compute": 1000.0, "update": 0.56, "ssd read": 342.0, "ssd write": 984.0}
    for name in seconds:
        large = replace(plan.predicted, compute_flops=134_328e12, seconds=seconds, step_seconds=1112.0, bottleneck=name)
        console, printed = printer(80)
        show_plan(console, replace(plan, predicted=large), model, hardware, room, verbose=False, facts=RunFacts())
        shown = [line for line in printed().splitlines() if "bottleneck" in line.split()]
        assert len(shown) == 2 and shown[0].split("  ")[1:3] == [
            "bottleneck",
            f"{name}, {seconds[name] / 1112:.0%} of the step",
        ]
        assert shown[1].strip().startswith(name) and len(shown[1]) <= 80
    assert "B params/s" in printed() and "134,328 TFLOP " in printed()


def test_limits_that_stop_the_run_are_said_with_their_step(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    console, printed = printer(80)
    time = Ending(limit="train.max_time=1h", step=40, again="the same command goes on, for as long again")
    facts = RunFacts(
        steps=1000, endings=(time, Ending(limit="offload.ssd_write_limit=1TB", step=64, again="a higher one goes on"))
    )
    show_plan(console, plan, model, hardware, room, verbose=False, facts=facts)
    text = " ".join(printed().split())
    assert "train.max_time=1h stops the run after step 40 of 1,000; the same command goes on" in text
    assert "offload.ssd_write_limit=1TB stops the run after step 64 of 1,000; a higher one goes on" in text
    data = plan_json(plan, model, hardware, room, facts=facts)
    assert data["endings"] == [
        {"limit": "train.max_time=1h", "step": 40, "again": "the same command goes on, for as long again"},
        {"limit": "offload.ssd_write_limit=1TB", "step": 64, "again": "a higher one goes on"},
    ]


@pytest.mark.parametrize(
    ("steps", "done", "said"),
    [
        (None, None, "every 100 steps: 0.0% of time, 0% of writes; a kill costs at most 2h 28m"),
        (1000, None, "every 100 steps: 0.0% of time, 0% of writes; a kill costs at most 2h 28m"),
        (100, 60, "every 100 steps: 0.0% of time, 0% of writes; a kill costs at most 58m 56s"),
        (8, None, "where the run ends alone, sooner than the 100 steps between two; a kill costs at most 11m 47s"),
        (199, 190, "where the run ends alone, sooner than the 100 steps between two; a kill costs at most 13m 16s"),
    ],
)
def test_a_kill_costs_no_more_than_the_run(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room,
    steps: int | None, done: int | None, said: str,
) -> None:  # fmt: skip
    console, printed = printer(100)
    shown = replace(plan, commit_every=100)
    show_plan(console, shown, model, hardware, room, verbose=False, facts=RunFacts(steps=steps, done=done))
    assert f"commits {said}; in place: " in " ".join(printed().split())


def test_steps_within_a_time(plan: Plan) -> None:
    assert steps_within(3600, plan, None) == 40  # at 88.4 s
    slows = FastRegion(size=1, steps=10.0, first=60.0, later=120.0)
    assert steps_within(3600, plan, slows) == 40  # planned within the fast region
    sustained = replace(plan, sustained=True)
    assert [steps_within(seconds, sustained, slows) for seconds in (59, 60, 600, 3600)] == [0, 1, 10, 35]


def test_when_updates_run_is_said(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    def text(clip: float | None, *deferred: int) -> str:
        console, printed = printer(120)
        stages = tuple(replace(stage, deferred=stage.stage in deferred) for stage in plan.stages)
        shown = replace(plan, clip_grad_norm=clip, stages=stages)
        show_plan(console, shown, model, hardware, room, verbose=False, facts=RunFacts())
        return " ".join(printed().split())

    half = model.stages[1].params / model.stored_parameters
    assert "clipping at norm 1, exact: updates wait for the last gradient" in text(1.0, *range(len(plan.stages)))
    assert "no clipping: every update overlaps backward" in text(None)
    assert f"no clipping: {half:.0%} of the updates run in the next forward" in text(None, 1)


def test_bars_grow_with_time(printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room) -> None:
    console, printed = printer(120, ascii=True)
    show_plan(console, plan, model, hardware, room, verbose=False, facts=RunFacts())
    bars = {name: row(printed(), name) for name in ("compute", "update")}
    assert bars["compute"][-2] == "#" * 20  # 95 %, rounded up
    assert bars["update"][-1] == "#"


def test_a_model_that_cannot_be_trained_yet(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    """The plan is shown, and no command that would only be refused."""
    console, printed = printer(200, ascii=True)
    mixture = replace(model, inactive_parameters=model.parameters // 4)
    facts = RunFacts(refusal="it has experts")
    show_plan(console, plan, mixture, hardware, room, verbose=False, facts=facts)
    text = printed()
    assert text.startswith("fits: RAM") and text.splitlines()[0].endswith("; cannot be trained yet")
    assert "another model; this one cannot be trained yet: it has experts" in text and "fuyou finetune" not in text
    assert "active per token), 22 blocks" in text and "6 x active parameters x tokens/s" in text
    data = plan_json(plan, mixture, hardware, room, facts=facts)
    assert (data["fits"], data["trainable"], data["refusal"]) == (True, False, "it has experts")
    assert data["model"]["active_parameters"] == model.parameters - model.parameters // 4  # type: ignore[index]


def test_what_does_not_fit_is_said_in_words(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    small = replace(plan, cpu_budget=GiB)
    tight = replace(room, disks=(disk(free=10 * 10**9),), ssd=20 * 10**9, store=10 * 10**9)
    problems = plan_problems(small, tight)
    assert problems == [
        "train needs 1.84 GiB of RAM, 860 MiB more than its budget (over it too: save)",
        "the store takes 30 GB, offload.max_memory.ssd allows 20 GB",
        "the store and the exported model need 32.2 GB of disk in /nvme; 10 GB are free",
    ]
    console, printed = printer(80)
    show_plan(console, small, model, hardware, tight, verbose=False, facts=RunFacts())
    assert "does not fit" in printed() and "over budget" in printed() and "fuyou finetune" not in printed()
    assert row(printed(), "available") == ["available", "1.00", "9.31"]
    assert plan_problems(plan, room) == []


def test_what_the_run_holds_already_counts_as_room(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    resumed = replace(room, disks=(disk(free=10 * 10**9, held=28_600 * MiB),))
    assert plan_problems(plan, resumed) == []
    console, printed = printer(120, ascii=True)
    show_plan(console, plan, model, hardware, resumed, verbose=False, facts=RunFacts())
    said = "the store and the exported model: 32.2 GB, 30 GB of it there already; 10 GB free"
    assert f"{said}; a saved state is part of the store" in " ".join(printed().split())
    console, printed = printer(120, ascii=True)
    elsewhere = replace(room, disks=(replace(room.disks[0], what=("the exported model",)),))
    show_plan(console, plan, model, hardware, elsewhere, verbose=False, facts=RunFacts())
    assert "the exported model: " in printed() and "saved state" not in printed()


def test_a_separate_device_gets_a_column(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    lines = (*plan.memory, MemoryLine(what="weights", tier="gpu", size=512 * MiB, total=2_200 * MiB, policy="slots"))
    shown = replace(plan, memory=lines, predicted=replace(plan.predicted, gpu_peak=3 * GiB))
    console, printed = printer(80)
    show_plan(console, shown, model, hardware, replace(room, gpu=24 * GiB), verbose=False, facts=RunFacts())
    assert row(printed(), "weights")[:5] == ["weights", "2.15", "0.50", "0.41", "4.30"]
    assert row(printed(), "peak") == ["peak", "3.00", "1.84", "27.93"]
    problems = plan_problems(shown, replace(room, gpu=2 * GiB))
    assert problems == ["the step needs 3.00 GiB of GPU memory, offload.max_memory.gpu leaves 2.00 GiB"]


@pytest.mark.parametrize(("steps", "words"), [(None, "1,000 steps write"), (250, "the run's 250 steps write")])
def test_wear_is_the_runs_own_where_its_length_is_known(
    printer: Printer,
    plan: Plan,
    model: ModelSpec,
    hardware: HardwareProfile,
    room: Room,
    steps: int | None,
    words: str,
) -> None:
    console, printed = printer(100, ascii=True)
    show_plan(console, plan, model, hardware, room, verbose=False, facts=RunFacts(steps=steps))
    assert f"{words} {gb((steps or 1000) * plan.predicted.written_per_step)}" in printed()


@pytest.mark.parametrize(
    ("used", "passes", "words"),
    [
        (0.5, True, "10% of the 600 TB its drive is rated for, 50% of which are written already, 60% after that"),
        (0.95, False, "the run takes a drive to 105% of what it is rated for, 95% is written already"),
        (1.2, True, "the run takes a drive to 130% of what it is rated for, 120% is written already"),
        (0.0, True, "10% of the 600 TB its drive is rated for"),
    ],
)
def test_what_a_drive_has_written_already_counts(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room, used: float, passes: bool, words: str
) -> None:
    """A run of a tenth of its rating. One past it is told, and no change of the recipe cures that."""
    rated = 600 * 10**12
    worn = replace(hardware, drives=(Drive(model="d", capacity=10**12, rated_bytes=rated, used_bytes=round(used * rated)),))
    steps = 1000
    written = replace(plan, predicted=replace(plan.predicted, written_per_step=rated // 10 // steps, export_bytes=0))
    console, printed = printer(160, ascii=True)
    show_plan(console, written, model, worn, room, verbose=False, facts=RunFacts(steps=steps))
    assert words in printed()
    assert ("warning" in printed()) == (used >= 0.95)
    console, asking = printer(160, ascii=True)
    facts = RunFacts(steps=steps, advice="`fuyou plan` plans changes")
    show_plan(console, written, model, worn, room, verbose=False, facts=facts)
    assert ("`fuyou plan` plans changes" in asking()) is not passes
    wear = wear_of(worn, writes_of(written, room, steps=steps))
    assert wear is not None and wear.accepted == passes
    data = plan_json(written, model, worn, room, facts=RunFacts(steps=steps))
    assert (data["wear"], data["worn_after"]) == (pytest.approx(0.1), pytest.approx(used + 0.1))


def test_every_drive_wears_by_itself(hardware: HardwareProfile) -> None:
    """Writes are spread evenly, also over one whose rating nobody knows. The one that is rated for least counts, whatever
    larger ones beside it are rated for, and the one that is worn most."""

    def wear(*drives: tuple[int, int]) -> Wear | None:
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
    ("drives", "words"),
    [
        (((600, 0), (600, 0)), "300 TB to each of its 2 drives: 50% of the 600 TB each is rated for"),
        (((600, 60), (7008, 0)), "the least of them is rated for; the most worn has written 10% of its own already, 60%"),
        (((600, 0), (0, 0)), "50% of the 600 TB the least of them is rated for"),
    ],
)
def test_the_share_of_one_drive_is_told(
    printer: Printer,
    plan: Plan,
    model: ModelSpec,
    hardware: HardwareProfile,
    room: Room,
    drives: tuple[tuple[int, int], ...],
    words: str,
) -> None:
    made = tuple(
        Drive(model="d", capacity=10**12, rated_bytes=rated * 10**12, used_bytes=used * 10**12) for rated, used in drives
    )
    written = replace(plan, predicted=replace(plan.predicted, written_per_step=6 * 10**11))
    console, printed = printer(200, ascii=True)
    show_plan(console, written, model, replace(hardware, drives=made), room, verbose=False, facts=RunFacts(steps=1000))
    said = " ".join(printed().split())
    assert words in said and "of what one of its drives is rated for" in said


def test_a_run_writes_beside_its_steps(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    """With everything in RAM and no commits no step writes, and still the drive takes the model three times and more."""
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
    console, printed = printer(200, ascii=True)
    facts = RunFacts(steps=100)
    small = replace(hardware, drives=(Drive(model="d", capacity=10**12, rated_bytes=2 * writes.total),))
    show_plan(console, resting, model, small, room, verbose=False, facts=facts)
    said = " ".join(printed().split())
    assert f"100 steps write nothing, loading + saving + export {gb(writes.total)}: 50% of the" in said
    data = plan_json(resting, model, small, room, facts=facts)
    assert (data["written_by_run"], data["wear"]) == (writes.total, 0.5)
    assert data["writes"] == {"loading": each, "steps": 0, "saving": 3 * each, "export": 2 * 10**6}


def test_a_plan_that_takes_more_than_there_is(plan: Plan, room: Room) -> None:
    """Of free RAM, clearly: what others hold comes and goes. Of what the kernel enforces or a driver may pin, at all."""
    peak = plan.predicted.cpu_peak
    assert plan_problems(plan, replace(room, ram=int(peak / 1.04))) == []
    (problem,) = plan_problems(plan, replace(room, ram=peak // 2))
    assert problem.startswith("the run takes 1.84 GiB of RAM, the machine has 942 MiB for it")
    assert plan_problems(plan, replace(room, ram=peak, ram_total=peak)) == []
    (problem,) = plan_problems(plan, replace(room, ram=peak, ram_total=int(peak / 1.04)))  # a control group, say
    assert problem.startswith("the run takes 1.84 GiB of RAM, it can never have more than 1.77 GiB")
    small = replace(plan, cpu_budget=peak // 2)  # nothing that max_memory.cpu allows is too much
    (problem,) = plan_problems(small, replace(room, ram=peak, ram_total=int(peak / 1.04), pinnable=peak // 2))
    assert "more than its budget" in problem
    bound = replace(room, pinnable=plan.arena_size - 1, pinnable_why="WSL lets half of RAM be pinned")
    (problem,) = plan_problems(replace(plan, device="cuda"), bound)
    assert "pinned for the GPU" in problem and "(WSL lets half of RAM be pinned)" in problem
    assert plan_problems(plan, bound) == []  # nothing is pinned without one
    assert plan_problems(replace(plan, device="cuda"), replace(bound, pinnable=plan.arena_size)) == []


def test_a_build_without_io_uring_says_so(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    for built in (True, False):
        console, printed = printer(160, ascii=True)
        show_plan(console, plan, model, hardware, room, verbose=False, facts=RunFacts(io_uring=built))
        assert ("I/O by threads (built without io_uring)" in printed()) is not built


def test_assumed_rates_say_how_to_measure_them(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    console, printed = printer(160, ascii=True)
    assumed = replace(hardware, measured="assumed")
    show_plan(console, plan, model, assumed, room, verbose=False, facts=RunFacts(folder=Path("/nvme")))
    assert "`fuyou bench --dir /nvme` measures them" in printed()


def test_equal_stages_share_a_line(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    console, printed = printer(100, ascii=True)
    show_plan(console, plan, model, hardware, room, verbose=True, facts=RunFacts())
    assert row(printed(), "1-22")[:6] == ["1-22", "block", "x22", "44", "M", "84"]
    quiet, terse = printer(100, ascii=True)
    show_plan(quiet, plan, model, hardware, room, verbose=False, facts=RunFacts())
    assert "1-22" not in terse()


def test_names_cannot_break_an_ascii_console(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    console, printed = printer(80, ascii=True)
    show_plan(console, replace(plan, model="模型 [bold]x[/bold]"), model, hardware, room, verbose=False, facts=RunFacts())
    assert "?? [bold]x[/bold]" in printed()


def test_json_keeps_bytes_whole(plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room) -> None:
    data = json.loads(json.dumps(plan_json(plan, model, hardware, room, facts=RunFacts())))
    assert data["schema_version"] == 1 and data["fits"] is True and data["problems"] == []
    assert data["cpu_peak"] == 1_884 * MiB and isinstance(data["cpu_peak"], int)
    assert data["tokens_per_second"] == pytest.approx(8192 / 88.4)
    assert data["plan"]["predicted"]["written_by"]["states"] == 11_000_000_000
    assert data["hardware"]["store_read_mixed"] == 1.2e9
    assert len(data["plan"]["stages"]) == data["model"]["stages"] == 25
    assert data["changes"] is None and data["tried"] is None


def test_json_has_every_limit_and_how_much_was_tried(
    plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    bound = replace(room, ssd=1, ram=2, ram_total=3, pinnable=4, pinnable_why="WSL")
    data = json.loads(json.dumps(plan_json(plan, model, hardware, bound, facts=RunFacts(changes=(), tried=17))))
    limits = {key: data["room"][key] for key in ("ssd", "ram", "ram_total", "pinnable", "pinnable_why")}
    assert limits == {"ssd": 1, "ram": 2, "ram_total": 3, "pinnable": 4, "pinnable_why": "WSL"}
    assert (data["changes"], data["tried"]) == ([], 17)


def test_a_cut_vocabulary_is_said_and_its_pieces_are_one_line(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    stages = tuple(
        replace(stage, kind="head", vocabulary=(1000 * index, 1000 * index + 1000)) if index < 3 else stage
        for index, stage in enumerate(model.stages)
    )
    cut = replace(plan, numerics=replace(plan.numerics, vocabulary_rows=1000))
    for width in (80, 120):
        console, printed = printer(width, ascii=True)
        show_plan(console, cut, replace(model, stages=stages), hardware, room, verbose=True, facts=RunFacts())
        text = printed()
        assert max(map(len, text.splitlines())) <= width
        assert "in pieces of 1,000 tokens of the vocabulary" in " ".join(text.split())


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("case", ["cpu", "gpu", "described", "assumed", "long", "not fitting"])
def test_the_answer_comes_first(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room, width: int, case: str
) -> None:
    """Verdict, step, bottleneck, wear and what to change first: five lines of 100 columns, then the rest."""
    changes: dict[str, dict[str, object]] = {
        "gpu": {"room": replace(room, gpu=24 * GiB)},
        "described": {
            "hardware": replace(hardware, measured="described", name="here", sources=("store read and write: an assumption",))
        },
        "assumed": {"hardware": replace(hardware, measured="assumed")},
        "long": {"facts": RunFacts(steps=100_000, command="fuyou finetune r.yaml")},
        "not fitting": {"plan": replace(plan, cpu_budget=GiB)},
    }
    given: dict[str, object] = {"plan": plan, "hardware": hardware, "room": room, "facts": RunFacts(notes=("no data",))}
    given |= changes.get(case, {})
    console, printed = printer(width)
    show_plan(console, given["plan"], model, given["hardware"], given["room"], verbose=False, facts=given["facts"])  # type: ignore[arg-type]
    lines = printed().splitlines()
    assert max(map(len, lines)) <= width
    if width >= 100:
        assert lines[0].startswith("does not fit: train needs" if case == "not fitting" else "fits: RAM 1.84 GiB of 2.00 GiB")
        assert [line.split()[0] for line in lines[1:5]] == ["step", "bottleneck", "wear", "first"]
        assert "88.4 s" in lines[1] and "92.7 tokens/s" in lines[1] and "compute, 95% of the step" in lines[2]
        assert "written in 1" in lines[3] and lines[5] == ""
    assert lines[lines.index("Plan") - 1] == "" and ("not built yet" not in printed())
    assert (lines[-1] == "  - no data") == (case != "long")


def test_rates_are_a_table_with_v_or_where_they_decide(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    """A described machine whose store is assumed: the table is shown where the store is what a step takes longest for."""
    there = replace(
        hardware, measured="described", name="there", sources=("compute: measured there", "read and write: an assumption")
    )

    def shown(bottleneck: str, *, verbose: bool) -> str:
        seconds = {"compute": 40.0, "update": 1.0, "ssd read": 10.0, "ssd write": 10.0, bottleneck: 84.0}
        predicted = replace(plan.predicted, seconds=seconds, bottleneck=bottleneck)
        console, printed = printer(100)
        show_plan(console, replace(plan, predicted=predicted), model, there, room, verbose=verbose, facts=RunFacts())
        return printed()

    assert "Rates of this machine" in shown("compute", verbose=True)
    quiet, decides = shown("compute", verbose=False), shown("ssd read", verbose=False)
    assert "assumption" not in quiet
    table = decides[decides.index("Rates that decide, and are assumptions") :].split("\n\n")[0]
    assert "store read, write" in table and "AdamW" not in table and "compute" not in table
    assert "measure that machine: the rates that decide are assumptions (store read, write" in decides.splitlines()[4]


def test_what_to_do_first_where_rates_are_doubtful_or_nothing_is_left(
    printer: Printer, plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room
) -> None:
    def first(hardware: HardwareProfile, facts: RunFacts) -> str:
        console, printed = printer(200)
        show_plan(console, plan, model, hardware, room, verbose=False, facts=facts)
        return " ".join(printed().splitlines()[4].split())

    busy = first(replace(hardware, others_cores=50.0), RunFacts(folder=Path("/nvme")))
    assert busy.startswith("first measure again on an idle machine: `fuyou bench --dir /nvme` (others used 50.0 cores")
    assert first(hardware, RunFacts(steps=8, done=8)) == "first nothing: no step is left to do"
