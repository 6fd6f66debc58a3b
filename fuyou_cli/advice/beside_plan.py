"""Says what a plan promises, and compares a finished run with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from datetime import datetime

from fuyou_cli.core.probe import file_system_of
from fuyou_cli.machine.background_load import are_busy
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.schedule import plan_schedule, weights_left
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.prepare import Planned
from fuyou_cli.training.report import RunReport, compared, through_memory

from .room import export_folder


def beside_plan(
    planned: Planned, report: RunReport, others_cores: float, *, gpu_peak: int, say: Callable[[str], None]
) -> RunReport:
    """Simulates the plan's step once more for its figures of every resource. Says so if other programs disturbed the run."""
    if not report.steps:
        return report
    model, hardware, plan = planned.model, planned.hardware, planned.plan
    step = simulate(model, hardware, plan, plan_schedule(model, plan))
    if are_busy(others_cores):
        say(f"note: other programs used {others_cores:.1f} cores during the run, so steps took longer than needed")
    assumed = hardware.measured == "assumed"
    memory = hardware.dram, through_memory(report, Costs.of(model, hardware, plan), plan)
    return replace(report, compared=compared(report, plan, step, gpu_peak=gpu_peak, memory=memory), assumed=assumed)


def promises(planned: Planned) -> dict[str, object]:
    """Returns what the plan of this run predicts, to compare with its measurements."""
    plan, predicted = planned.plan, planned.plan.predicted
    keys = (
        "cpu_peak", "gpu_peak", "ssd_bytes", "read_per_step", "written_per_step", "read_by", "written_by", "step_seconds",
    )  # fmt: skip
    return {
        "budget": plan.cpu_budget,
        "arena": plan.arena_size,
        "process_bytes": planned.hardware.process_bytes,
        "model": planned.recipe.model.name_or_path,
        "device": f"{planned.hardware.device} ({planned.hardware.device_name})",
        "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        "assumed": planned.hardware.measured == "assumed",
        "memory": [{"what": line.what, "tier": line.tier, "size": line.size} for line in plan.memory],
        "drives": [
            {"model": drive.model, "rated_bytes": drive.rated_bytes, "used_bytes": drive.used_bytes}
            for drive in planned.hardware.drives
        ],
        "parameters": planned.model.parameters,
        "frozen_parameters": planned.model.frozen_parameters,
        "total_steps": planned.total_steps,
        "numerics": asdict(plan.numerics),
        "store": str(planned.directories[0].absolute()),
        "store_on": astuple(file_system_of(planned.directories[0])),
        "export": str(export_folder(planned.recipe, planned.model_dir)),
        **{f"predicted_{key}": getattr(predicted, key) for key in keys},
        "deferred_weights": sum(s.weights_at.size for s in plan.stages if s.deferred and s.writes_weights),
        "weights_left": weights_left(planned.model, plan, plan_schedule(planned.model, plan).visits),
        "commit_every": plan.commit_every,
        "choice": placed_in_words(plan, planned.model),
    }


def placed_in_words(plan: Plan, model: ModelSpec) -> str:
    """Describes any plan by what it does, in a log's few words."""
    params, trained = [stage.params for stage in model.stages], [stage.trained for stage in model.stages]
    slots = max(len(slots.gradient_slots) for slots in plan.slot_classes)
    deferred = sum(trained[stage.stage] for stage in plan.stages if stage.deferred) / (sum(trained) or 1)
    parts = [_pipeline(plan.lookahead, slots), _defer(deferred)]
    for what in ("weights", "states"):
        in_ram = [stage for stage in plan.stages if getattr(stage, what) != "ssd" and not stage.updated_there]
        share = sum(params[stage.stage] for stage in in_ram) / (sum(params) or 1)
        parts.append(f"{share:.0%} of the {what} in RAM")
    there = sum(params[stage.stage] for stage in plan.stages if stage.updated_there)
    parts += [f"{there / (sum(params) or 1):.0%} of both on the GPU"] if there else []
    keeping = [stage for stage in plan.stages if stage.boundary_ram or stage.boundary_extent or stage.boundary == "gpu"]
    place = "on the GPU" if any(stage.boundary == "gpu" for stage in keeping) else "in RAM"
    parts.append(f"{sum(stage.boundary != 'ssd' for stage in keeping)} of {len(keeping)} boundaries {place}")
    kept_there = sum(len(stage.kept_there) for stage in plan.stages)
    kept = sum(len(stage.given) for stage in plan.stages)
    parts.append(f"{kept} graphs kept" if model.compiled else f"{kept} outputs kept")
    parts += [f"{kept_there} of them on the GPU"] if kept_there and not model.compiled else []
    parts += [_sweeps(plan.sweeps)] if plan.sweeps > 1 else []
    parts += [_norm_first(True)] if plan.norm_first else []
    return ", ".join(parts)


def _pipeline(lookahead: int, slots: int) -> str:
    return f"{lookahead} stage{'s' * (lookahead != 1)} fetched early, {slots} gradient slot{'s' * (slots != 1)}"


def _sweeps(count: int) -> str:
    return f"{count} sweeps over the model" if count > 1 else "one sweep over the model"


def _norm_first(measured: bool) -> str:
    return "a first backward for the norm" if measured else "updates that wait for the norm"


def _defer(share: float) -> str:
    return f"{share:.1%} of the updates in forward".replace(".0%", "%") if share else "every update in backward"
