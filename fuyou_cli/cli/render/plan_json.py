"""Returns the content of the screen and the whole plan as data (`fuyou plan --json`)."""

from __future__ import annotations

from dataclasses import asdict

from fuyou_cli.advice.facts import RunFacts
from fuyou_cli.advice.planning import Outcome, altered
from fuyou_cli.advice.room import Room
from fuyou_cli.machine.origins import origins_of
from fuyou_cli.planner.commit_interval import commit_costs
from fuyou_cli.planner.phases import phase_peaks
from fuyou_cli.planner.run_planner import FastRegion
from fuyou_cli.spec.plan import Plan

SCHEMA_VERSION = 2
_OF_MODEL = ("architecture", "parameters", "active_parameters", "frozen_parameters", "stored_parameters", "tied_head")


def plan_json(facts: RunFacts) -> dict[str, object]:
    """Returns bytes as integers, times in seconds, rates per second, shares of one."""
    plan, model, hardware = facts.plan, facts.model, facts.hardware
    problems, writes, wear, origins = facts.problems, facts.writes, facts.wear, origins_of(facts.hardware)

    def changed(outcome: Outcome) -> dict[str, object]:
        alters = list(altered(outcome, plan))
        return {"overrides": list(outcome.overrides), "alters": alters, "figures": _figures(outcome.plan)}

    changes = [changed(one) for one in facts.changes or ()]
    return {
        "schema_version": SCHEMA_VERSION,
        "fits": not problems,
        "problems": problems,
        "trainable": facts.refusal is None,
        "refusal": facts.refusal,
        "kernels": facts.kernels or None,
        "evaluation": None if facts.evaluation is None else asdict(facts.evaluation),
        "sampling": None if facts.sampling is None else asdict(facts.sampling),
        "model": {"name": plan.model, "stages": len(model.stages)} | {key: getattr(model, key) for key in _OF_MODEL},
        "hardware": asdict(hardware),
        "hardware_digest": hardware.digest(),
        "assumed": hardware.measured == "assumed" or any(rate.origin == "assumption" for rate in origins),
        "rates": [asdict(rate) for rate in origins],
        "room": _room(facts.room),
        "steps": facts.steps,
        "done": facts.done,
        "run_seconds": facts.run_seconds,
        "endings": [asdict(ending) for ending in facts.endings],
        "fast_region": None if facts.region is None else _region(facts.region, plan),
        **_speed(plan),
        "cpu_peak": plan.predicted.cpu_peak,
        "phase_peaks": phase_peaks(plan),
        "written_by_run": None if writes is None else writes.total,
        "writes": None if writes is None else asdict(writes),
        "rated_bytes": sum(drive.rated_bytes for drive in hardware.drives) or None,
        "commits": _commits(plan) | {"sooner": None if facts.sooner is None else _commits(facts.sooner)},
        "wear": None if wear is None else wear.run,
        "worn_before": None if wear is None else wear.before,
        "worn_after": None if wear is None else wear.after,
        "spared": None if facts.spared is None else asdict(facts.spared),
        "compared": None,  # kept for readers of earlier versions: there is no comparison any more
        "changes": None if facts.changes is None else changes,
        "faster": None if facts.faster is None else [changed(one) for one in facts.faster],
        "faster_command": facts.faster_command or None,
        "tried": None if facts.changes is None else facts.tried,
        "plan": asdict(plan),
    }


def _room(room: Room) -> dict[str, object]:
    disks = [
        {"folders": [str(folder) for folder in disk.folders], "what": list(disk.what)}
        | {"wanted": disk.wanted, "held": disk.held, "free": disk.free}
        for disk in room.disks
    ]
    return asdict(room) | {"disks": disks}


def _region(region: FastRegion, plan: Plan) -> dict[str, object]:
    """Tells how long the drives keep their first speed. `left` means that the run outlasts it, and is planned for the later
    speed."""
    return {
        "bytes": region.size or None,
        "steps": region.steps if region.size else None,
        "seconds": region.steps * region.first if region.size else None,
        "step_seconds": region.first,
        "step_seconds_later": region.later,
        "left": plan.sustained,
    }


def _commits(plan: Plan) -> dict[str, object]:
    """Returns the interval, and `costs`: shares of the time and of the writes, and the most seconds that a crash loses."""
    costs = commit_costs(plan)
    costed = None if costs is None else asdict(costs)
    return {"every_steps": plan.commit_every, "costs": costed}


def _speed(plan: Plan) -> dict[str, object]:
    predicted, tokens = plan.predicted, plan.step_tokens
    known = predicted.step_seconds > 0
    return {
        "tokens_per_step": tokens,
        "computed_per_step": plan.numerics.tokens if plan.typical is None else plan.typical.computed,
        "tokens_per_second": tokens / predicted.step_seconds if known else None,
        "tflops_6n": predicted.step_flops / predicted.step_seconds / 1e12 if known else None,
    }


def _figures(plan: Plan) -> dict[str, object]:
    """Returns the figures that plans are compared by."""
    keys = ("step_seconds", "cpu_peak", "gpu_peak", "read_per_step", "written_per_step")
    predicted = {key: getattr(plan.predicted, key) for key in keys}
    return {**predicted, **_speed(plan), "store_size": plan.store_size}
