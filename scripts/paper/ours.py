"""What `fuyou plan --hardware` says for the paper's machines and for two consumer drives: a recipe each, planned by the
command's own code with everything that the recipe leaves out as it is by default."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from proof.on_paper import recipe_of

from fuyou_cli.advice.facts import Outcome, room_of
from fuyou_cli.advice.planning import Replanner, plan_recipe
from fuyou_cli.cli.console import write_status
from fuyou_cli.core.errors import PlanError
from fuyou_cli.machine.described import described
from fuyou_cli.spec.hardware import HardwareProfile

from . import given, policy

UNCLIPPED = "train.clip_grad_norm=null"  # the paper does not clip; the default is 1.0
CLIPPED = "train.clip_grad_norm=1.0"
COMMITTED = "checkpoint.commit_every_steps=1"  # no kill costs more; the paper's runs cannot be gone on from
RECOMPUTED = "offload.activations=recompute"
SHARE = 0.85  # asked of the device's rate at 175B
USEFUL_FLOPS = 6  # per parameter and token, where nothing is computed again
PAPER_RAM = 768  # GiB
LARGE = ("175B", 32, 256)  # model, batch and GiB of it
CONSUMER_MODELS, CONSUMER_RAM, CONSUMER_BATCHES = ("13B", "70B"), (64, 128), (32, 64, 128, 256, 512)


def counted(model: str, tokens: float) -> float:
    """Share of the device's rate that so many tokens a second are."""
    return given.FLOPS_COUNTED * given.size_of(model) * tokens / given.GPU_FLOPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, a batch and a machine to plan for."""

    model: str
    batch: int
    where: str  # for people
    hardware: HardwareProfile
    settings: tuple[str, ...] = (UNCLIPPED,)  # that differ from what a recipe has by default
    paper: float | None = None  # tokens per second, published


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """The plan's figures; all predicted. `problem` where it does not fit."""

    model: str
    where: str
    batch: int
    settings: tuple[str, ...]
    problem: str = ""
    paper: float | None = None  # tokens per second
    micro: int = 0
    sums: str = ""
    ram: int = 0  # bytes that the plan may take
    seconds: float = 0.0
    tokens: float = 0.0  # per second
    clipped: float | None = None  # tokens per second with clipping, as by default; None where that does not fit
    committed: float | None = None  # the same with a commit every step, as by default, and no clipping
    busy: float = 0.0  # share of the step that the GPU computes
    written: int = 0  # bytes a step
    rated: int = 0  # bytes that the drives are warranted to be written
    weights_in_ram: float = 0.0  # share; those at home on the GPU have a copy there that updates write
    states_in_ram: float = 0.0
    deferred: float = 0.0  # of the updates
    kept: float = 0.0  # of the operators' outputs
    waits: str = ""  # what compute waits for most

    @property
    def counted(self) -> float:
        """Share of the device's rate as the paper counts: FLOPS_COUNTED per parameter and token, computed again or kept."""
        return counted(self.model, self.tokens)

    @property
    def slower(self) -> bool:
        return self.paper is not None and self.tokens < self.paper

    @property
    def slower_clipped(self) -> bool:
        return self.paper is not None and (self.clipped or 0.0) < self.paper

    @property
    def slower_committed(self) -> bool:
        return self.paper is not None and (self.committed or 0.0) < self.paper


def paper_parts(drives: int, ram: int) -> str:
    """As `fuyou plan --hardware` takes them. `ram` in GiB."""
    return f"rtx4090,{drives}xp5510,{ram}GiB,2xgold5320"


def consumer_parts(ram: int) -> str:
    return f"rtx4090,2xgen4,{ram}GiB"


def paper_machine(drives: int, rate: float, ram: int) -> HardwareProfile:
    """The shipped parts of the paper's machine with the drives' rates of part 1. AdamW is the shipped host's, which is slower
    than what part 1 takes."""
    there = described(paper_parts(drives, ram))
    paper = policy.machine(drives, rate)
    assert (there.matmul_flops, there.h2d, there.d2h) == (paper.matmul_flops, paper.h2d, paper.d2h)
    return _with_rates(there, paper.store_read, paper.store_write, paper.store_read_mixed, paper.store_write_mixed)


def consumer_machine(ram: int, *, sustained: bool) -> HardwareProfile:
    """Two consumer drives; `sustained` at their rates once the fast region is full, from the first byte on."""
    there = described(consumer_parts(ram))
    if sustained:
        return _with_rates(
            there, there.store_read, there.sustained_write, there.sustained_read_mixed, there.sustained_write_mixed
        )
    return _with_rates(there, there.store_read, there.store_write, there.store_read_mixed, there.store_write_mixed)


def _with_rates(hardware: HardwareProfile, read: float, write: float, read_mixed: float, write_mixed: float) -> HardwareProfile:
    """These and no others, however long a run writes."""
    return replace(
        hardware, store_read=read, store_write=write, store_read_mixed=read_mixed, store_write_mixed=write_mixed,
        sustained_write=write, sustained_read_mixed=read_mixed, sustained_write_mixed=write_mixed, burst_bytes=0,
    )  # fmt: skip


def paper_cases(rates: dict[int, float]) -> list[Case]:
    """Every published setting once, beside the best of its figures, with all of the machine's RAM."""
    best: dict[tuple[str, int, int], float] = {}
    for row in given.PUBLISHED:
        setting = (row.model, row.batch, row.drives)
        best[setting] = max(best.get(setting, 0.0), row.batch * given.LENGTH / row.seconds)
    return [
        Case(
            model=model, batch=batch, where=f"{drives} P5510, {PAPER_RAM} GiB",
            hardware=paper_machine(drives, rates[drives], PAPER_RAM), paper=paper,
        )
        for (model, batch, drives), paper in best.items()
    ]  # fmt: skip


def large_cases(rates: dict[int, float]) -> list[Case]:
    """What is asked at 175B: as planned; with all outputs computed again; on the shipped parts as they are."""
    model, batch, ram = LARGE
    hardware = paper_machine(given.ALL_DRIVES, rates[given.ALL_DRIVES], ram)
    where = f"{given.ALL_DRIVES} P5510, {ram} GiB"
    best = Case(model=model, batch=batch, where=where, hardware=hardware)
    shipped = described(paper_parts(given.ALL_DRIVES, ram))
    return [
        best,
        replace(best, settings=(UNCLIPPED, RECOMPUTED)),
        replace(best, where=f"{where}, as shipped", hardware=shipped),
    ]


def consumer_cases(*, sustained: bool) -> list[Case]:
    return [
        Case(
            model=model, batch=batch, where=f"2 Gen4, {ram} GiB" + (", sustained" if sustained else ""),
            hardware=consumer_machine(ram, sustained=sustained),
        )
        for model in CONSUMER_MODELS
        for ram in CONSUMER_RAM
        for batch in CONSUMER_BATCHES
    ]  # fmt: skip


# ---- planning ------------------------------------------------------------------------------------------------------------


def planned(cases: Sequence[Case], say: Callable[[str], None]) -> Iterator[Ours]:
    """The cases' plans in their order, a process per core."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        for case, found in zip(cases, pool.map(plan_of, cases), strict=True):
            say(f"planned {case.model}, {case.batch} sequences, {case.where}")
            yield found


def plan_of(case: Case, *, alone: bool = False) -> Ours:
    """What `fuyou plan` chooses, and the same with clipping, and with commits; `alone`: without these two."""
    named = {"model": case.model, "where": case.where, "batch": case.batch, "settings": case.settings, "paper": case.paper}
    config, train = json.loads(policy.config_of(case.model).to_json_string()), {"max_steps": 1000, "batch_size": case.batch}
    uncommitted = {"commit_every_steps": None}  # as there
    with recipe_of(config, length=given.LENGTH, train=train, overrides=case.settings, checkpoint=uncommitted) as loaded:
        try:
            prepared = plan_recipe(loaded, case.hardware, say=write_status)
        except PlanError as error:
            return Ours(**named, problem=error.message)  # type: ignore[arg-type]
        outcome = Outcome(changes=(), prepared=prepared, room=room_of(prepared, described=True))
        elsewise = Replanner(loaded=loaded, prepared=prepared, described=True)
        clipped, committed = (None if alone else elsewise.with_keys([key]) for key in (CLIPPED, COMMITTED))
    return _figures(named, outcome, clipped=clipped, committed=committed)


def _figures(named: dict[str, object], outcome: Outcome, *, clipped: Outcome | None, committed: Outcome | None) -> Ours:
    plan, model = outcome.plan, outcome.prepared.model
    tokens, step = outcome.tokens, plan.predicted.step_seconds
    stages, params = plan.stages, model.stored_parameters

    def share(chosen: Callable[[int], bool]) -> float:
        """Of the parameters, those of such stages."""
        return sum(model.stages[index].params for index in range(len(stages)) if chosen(index)) / params

    def speed(other: Outcome | None) -> float | None:
        return None if other is None or other.problems else tokens / other.plan.predicted.step_seconds

    operators = sum(len(stage.operators) for stage in model.stages)
    return Ours(
        **named,  # type: ignore[arg-type]
        problem="; ".join(outcome.problems),
        micro=plan.numerics.micro_batch_size,
        sums=plan.numerics.accumulate_dtype,
        ram=plan.cpu_budget,
        seconds=step,
        tokens=tokens / step,
        clipped=speed(clipped),
        committed=speed(committed),
        busy=plan.predicted.seconds["compute"] / step,
        written=plan.predicted.written_per_step,
        rated=sum(drive.rated_bytes for drive in outcome.prepared.hardware.drives),
        weights_in_ram=share(lambda index: stages[index].weights != "ssd"),
        states_in_ram=share(lambda index: stages[index].states == "cpu"),
        deferred=share(lambda index: stages[index].deferred),
        kept=sum(len(stage.given) for stage in stages) / max(1, operators),
        waits=max(plan.predicted.stalls, key=lambda cause: plan.predicted.stalls[cause], default=""),
    )


def fastest_of(rows: Sequence[Ours]) -> list[Ours]:
    """The fastest batch of each model and machine."""
    best: dict[tuple[str, str], Ours] = {}
    for row in rows:
        key = (row.model, row.where)
        if not row.problem and (key not in best or row.tokens > best[key].tokens):
            best[key] = row
    return list(best.values())
