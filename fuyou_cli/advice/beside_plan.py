"""Says what a plan promises, and compares a finished run with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from datetime import datetime

from fuyou_cli.core.mounts import file_system_of
from fuyou_cli.machine.background_load import are_busy
from fuyou_cli.machine.profile_store import keep_corrected
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.schedule import plan_schedule, weights_left
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.training.corrected import corrected
from fuyou_cli.training.prepared import Planned
from fuyou_cli.training.report import RunReport, compared, through_memory

from .compare import placed_in_words
from .room import export_folder


def beside_plan(
    planned: Planned, report: RunReport, others_cores: float, *, gpu_peak: int, say: Callable[[str], None]
) -> RunReport:
    """Simulates the plan's step once more for its figures of every resource. Keeps the measured rates for later plans that
    ask for them, unless other programs disturbed the run."""
    if not report.steps:
        return report
    model, hardware, plan = planned.model, planned.hardware, planned.plan
    step = simulate(model, hardware, plan, plan_schedule(model, plan))
    if are_busy(others_cores):
        why = f"other programs used {others_cores:.1f} cores during the run"
        say(f"note: {why}, so steps took longer than needed and their rates are not kept for --calibrated")
    elif (shown := corrected(hardware, model, plan, step, report)) is not None:
        keep_corrected(shown, *planned.directories, instead_of=hardware, say=say)
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
