"""`fuyou plan --json`: everything the screen says and the whole plan, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from fuyou_cli.advice.break_even import BreakEven
from fuyou_cli.advice.compare import Comparison, Row
from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.planning import Outcome
from fuyou_cli.advice.room import Room, plan_problems
from fuyou_cli.advice.wear import wear_of
from fuyou_cli.machine.origins import origins_of
from fuyou_cli.planner.commit_interval import commit_costs
from fuyou_cli.planner.lasting import FastRegion
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .memory import memory_json, with_evaluation
from .step import run_seconds
from .wear import written

SCHEMA_VERSION = 1


def plan_json(plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room, *, facts: RunFacts) -> dict[str, object]:
    """Bytes are integers, times seconds, rates per second, shares of one."""
    problems = plan_problems(plan, room)
    writes = written(plan, room, facts)
    wear, origins = wear_of(hardware, writes), origins_of(hardware)
    return {
        "schema_version": SCHEMA_VERSION,
        "fits": not problems,
        "problems": problems,
        "trainable": facts.refusal is None,
        "refusal": facts.refusal,
        "model": {
            "name": plan.model,
            "architecture": model.architecture,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "stored_parameters": model.stored_parameters,
            "stages": len(model.stages),
            "tied_head": model.tied_head,
        },
        "hardware": asdict(hardware),
        "hardware_digest": hardware.digest(),
        "assumed": hardware.measured == "assumed" or any(rate.origin == "assumption" for rate in origins),
        "rates": [asdict(rate) for rate in origins],
        "room": _room(room),
        "steps": facts.steps,
        "done": facts.done,
        "run_seconds": None if facts.left is None else run_seconds(plan, facts.left, facts.region),
        "endings": [asdict(ending) for ending in facts.endings],
        "fast_region": None if facts.region is None else _region(facts.region, plan),
        **_speed(plan),
        "cpu_peak": plan.predicted.cpu_peak,
        "phase_peaks": with_evaluation(plan, model),
        "memory": None if facts.step is None else memory_json(plan, model, facts.step),
        "written_by_run": None if writes is None else writes.total,
        "writes": None if writes is None else asdict(writes),
        "rated_bytes": sum(drive.rated_bytes for drive in hardware.drives) or None,
        "commits": _commits(plan),
        "wear": None if wear is None else wear.run,
        "spared": None if facts.spared is None else asdict(facts.spared),
        "worn_before": None if wear is None else wear.before,
        "worn_after": None if wear is None else wear.after,
        "break_even": _break_even(facts.even),
        "compared": None if facts.compared is None else _compared(facts.compared),
        "changes": None if facts.changes is None else _changes(facts.changes),
        "tried": None if facts.changes is None else facts.tried,
        "plan": asdict(plan),
    }


def _region(region: FastRegion, plan: Plan) -> dict[str, object]:
    """How long the drives are as fast as at first; `left`: the run goes on after that, and is planned for then."""
    return {
        "bytes": region.size or None,
        "steps": region.steps if region.size else None,
        "seconds": region.steps * region.first if region.size else None,
        "step_seconds": region.first,
        "step_seconds_later": region.later,
        "left": plan.sustained,
    }


def _commits(plan: Plan) -> dict[str, object]:
    """`costs`: shares of time and of what is written, and seconds of work that a kill takes at most."""
    costs = commit_costs(plan)
    return {
        "mode": plan.store_mode,
        "every_steps": plan.commit_every,
        "kept": plan.keep,
        "costs": None if costs is None else asdict(costs),
    }


def _room(room: Room) -> dict[str, object]:
    return {
        "gpu": room.gpu,
        "ssd": room.ssd,
        "store": room.store,
        "ram": room.ram,
        "ram_total": room.ram_total,
        "pinnable": room.pinnable,
        "pinnable_why": room.pinnable_why,
        "disks": [
            {"folders": [str(folder) for folder in disk.folders], "what": list(disk.what)}
            | {"wanted": disk.wanted, "held": disk.held, "free": disk.free}
            for disk in room.disks
        ],
    }


def _speed(plan: Plan) -> dict[str, object]:
    predicted, tokens = plan.predicted, plan.numerics.batch_size * plan.numerics.max_seq_len
    known = predicted.step_seconds > 0
    return {
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / predicted.step_seconds if known else None,
        "tflops_6n": predicted.step_flops / predicted.step_seconds / 1e12 if known else None,
    }


def _break_even(even: BreakEven | None) -> dict[str, object] | None:
    return None if even is None else {**asdict(even), "below": even.below}


def _figures(plan: Plan | None) -> dict[str, object] | None:
    if plan is None:
        return None
    predicted = plan.predicted
    return {
        "step_seconds": predicted.step_seconds,
        **_speed(plan),
        "cpu_peak": predicted.cpu_peak,
        "gpu_peak": predicted.gpu_peak,
        "read_per_step": predicted.read_per_step,
        "written_per_step": predicted.written_per_step,
        "store_size": plan.store_size,
    }


def _row(row: Row) -> dict[str, object]:
    fits = row.plan is not None
    return {"words": row.words, "choice": asdict(row.choice), "fits": fits, "slower": row.slower if fits else None} | {
        "why": row.why,
        "figures": _figures(row.plan),
    }


def _compared(compared: Comparison) -> dict[str, object]:
    return {
        "best": _row(compared.best),
        "others": [_row(row) for row in compared.others],
        "left_out": compared.left_out,
        "same": compared.same,
        "looked_at": compared.looked_at,
        "family": compared.family,
        "complete": compared.complete,
    }


def _changes(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    return [{"overrides": list(outcome.overrides), "figures": _figures(outcome.plan)} for outcome in outcomes]
