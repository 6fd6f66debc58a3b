"""Says what `fuyou plan` shows of a planned run: whether it fits, how much it wears the drives, what evaluations take. Then
what its plan promises, and how the finished run compares. Writes nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.checkpoint.writer import refuse_foreign
from fuyou_cli.core import disk
from fuyou_cli.core.disk import FileSystem, Wanted, existing, file_systems, store_files, taken
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import folder
from fuyou_cli.core.probe import file_system_of
from fuyou_cli.core.units import format_time, gb, gib
from fuyou_cli.machine.measure.timing import are_busy
from fuyou_cli.machine.profile import RatedBy, origins_of
from fuyou_cli.planner.commit_interval import sooner
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.memory import phase_peaks
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import evaluation_schedule, plan_schedule, weights_left
from fuyou_cli.planner.search import FastRegion, SearchResult, fast_region, timed
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.recipe.schema import format_size
from fuyou_cli.spec.hardware import HardwareProfile, Network
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.length import loaded, saved_where_it_stops, steps_within_writes
from fuyou_cli.training.numerics import gpu_limit
from fuyou_cli.training.prepare import DiskShare, Planned, Resolved, StoreDisks, best_copies, best_folder
from fuyou_cli.training.report import RunReport, compared, through_memory
from fuyou_cli.training.state.store_folders import STORE_FILE

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe, SamplesSection

CLEARLY = 1.05  # tolerance for free RAM, which changes; the limits of a machine or control group have none
GAIN = 1.15  # times as fast: less is told as no gain
_PASSES = 2  # of an evaluation, simulated; the first begins with empty slots
USUAL = 1000  # steps for which writes are shown if the run's length is not known
_CLOSE = 0.9  # share of the busiest resource's seconds; one this busy also decides
_CHARACTERS = 4  # of a token, about
_RATED = {  # resource -> how the names of the rates behind it begin (`machine/profile`)
    "compute": ("compute",), "cpu": ("compute", "AdamW"), "update": ("AdamW",), "ssd read": ("store",), "ssd write": ("store",),
    "h2d": ("to GPU",), "d2h": ("to GPU",), "dram": ("DRAM",),
}  # fmt: skip


# ---- room and wear ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Holds limits in bytes. None means no limit."""

    gpu: int | None
    ssd: int | None  # offload.max_memory.ssd, for the store
    store: int  # bytes that the store may use on its disks: free or already its own, and allowed
    disks: tuple[FileSystem, ...]  # disks for store and export
    ram: int | None = None  # RAM that this process can use now, whatever its budget
    ram_total: int | None = None  # RAM of the machine or its control group
    pinnable: int | None = None  # host memory that the GPU's driver allows to pin
    pinnable_why: str = ""


def room_of(prepared: Planned, *, described: bool = False) -> Room:
    """Returns the limits of this machine and its disks, or of a described one's empty drives."""
    recipe, hardware, disks = prepared.recipe, prepared.hardware, prepared.disks
    return Room(
        gpu=gpu_limit(recipe, hardware),
        ssd=None if disks is None else disks.limit(recipe),
        store=prepared.request.disk(hardware),
        ram=hardware.ram_available,
        ram_total=hardware.ram_total,
        pinnable=hardware.pinnable or None,
        pinnable_why=hardware.pinnable_why,
        disks=(_described_drives(prepared),) if described else _disks(prepared),
    )


def disks_of(resolved: Resolved) -> StoreDisks:
    """Returns the room on the disks under the run's store: free, or already the store's. Ranks on one box share it out."""
    directories = resolved.directories
    systems = [existing(directory).stat().st_dev for directory in directories]
    exported = existing(export_folder(resolved.recipe, resolved.model_dir)).stat().st_dev
    files = [(system, taken(directory / STORE_FILE)) for directory, system in zip(directories, systems, strict=True)]
    ranks, exports_here = 1, True
    if (peers := resolved.peers) is not None:
        exports_here = peers.boxes[peers.rank] == peers.boxes[0]
        ranks, files = peers.local_count, [file for files in peers.gather_on_box("store files", files) for file in files]
    shares = []
    for directory, system in zip(directories, systems, strict=True):
        held = [size for on, size in files if on == system]
        free = disk.free_space(directory) + sum(held)
        shares.append(DiskShare(free=free, files=len(held), has_export=exports_here and system == exported))
    places = {system: existing(directory) for system, directory in zip(systems, directories, strict=True)}
    total = sum(shutil.disk_usage(place).total for place in places.values())
    return StoreDisks(shares=tuple(shares), total=total, ranks=ranks)


def described_disks(hardware: HardwareProfile) -> StoreDisks:
    """Treats a described machine's drives as one disk, which the export uses too."""
    total = sum(drive.capacity for drive in hardware.drives) or hardware.disk_free
    return StoreDisks(shares=(DiskShare(free=hardware.disk_free, files=1, has_export=True),), total=total)


def _disks(prepared: Planned) -> tuple[FileSystem, ...]:
    plan = prepared.plan
    files = store_files([directory / STORE_FILE for directory in prepared.directories], plan.store_size)
    if prepared.recipe.export.at_end:
        model = export_folder(prepared.recipe, prepared.model_dir)
        files.append(Wanted(what="the exported model", path=model, size=prepared.export_bytes))
    if prepared.recipe.eval.keep_best:  # a new copy is written beside the old one
        best = best_folder(prepared.recipe, prepared.model_dir)
        new = prepared.export_bytes * best_copies(prepared.recipe)
        files.append(Wanted(what="the best weights and new ones beside them", path=best, size=new))
    return tuple(file_systems(files))


def _described_drives(prepared: Planned) -> FileSystem:
    plan, hardware = prepared.plan, prepared.hardware
    export = plan.predicted.export_bytes * (prepared.recipe.export.at_end + best_copies(prepared.recipe))
    return FileSystem(
        folders=(Path(hardware.name or "the described drives"),),
        what=("the store", "the exported model") if export else ("the store",),
        wanted=plan.store_size + export,
        held=0,
        free=hardware.disk_free,
        device=0,
    )


def export_folder(recipe: Recipe, model_dir: Path) -> Path:
    """Returns `model` or `adapter` below the output directory, never the folder the run started from."""
    out = Path(recipe.output_dir).expanduser() / ("model" if recipe.adapter is None else "adapter")
    return out.with_name(f"{out.name}-finetuned") if out.resolve() == model_dir.resolve() else out


def check_output(recipe: Recipe) -> None:
    """Raises UsageError unless `output_dir` is a writable folder or can become one."""
    out = folder(recipe.output_dir, key="output_dir")
    parent = existing(out)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"output_dir: cannot write to {parent}", hint="choose another output_dir, or change its permissions")
    for name in ("log.jsonl", "timeline.svg"):
        path = out / name
        # Writing to a pipe that nobody reads would wait forever.
        if path.is_symlink() or (path.exists() and not path.is_file()):
            kind = "a folder" if path.is_dir() and not path.is_symlink() else "not a regular file"
            raise UsageError(f"output_dir: {path} is {kind}", hint="move it away, or choose another output_dir")


def check_export(recipe: Recipe, model_dir: Path) -> None:
    """Raises UsageError if the export at the end, or the best weights, would replace something that is not ours."""
    folders = [(export_folder(recipe, model_dir), "export.at_end")] if recipe.export.at_end else []
    if recipe.eval.keep_best:
        folders.append((best_folder(recipe, model_dir), "eval.keep_best"))
    for place, key in folders:
        try:
            refuse_foreign(place)
        except UsageError as error:
            hint = f"move it away, choose another output_dir, or set {key}=false"
            raise UsageError(f"output_dir: {error.message}", hint=hint) from error


def plan_problems(plan: Plan, room: Room) -> list[str]:
    """Says why the plan does not fit, one sentence each. Empty if it fits."""
    predicted, problems = plan.predicted, []
    over = {phase: peak for phase, peak in phase_peaks(plan).items() if peak > plan.cpu_budget}
    if over:
        worst, *others = sorted(over, key=lambda phase: -over[phase])
        needs = f"{worst} needs {gib(over[worst])} of RAM, {gib(over[worst] - plan.cpu_budget)} more than its budget"
        problems.append(needs + (f" (also over it: {', '.join(others)})" if others else ""))
    ram = f"the run needs {gib(predicted.cpu_peak)} of RAM,"
    allowed = min(predicted.cpu_peak, plan.cpu_budget)  # above the budget, the budget is what is too small
    if room.ram_total is not None and allowed > room.ram_total:
        problems.append(f"{ram} the machine or its control group has {gib(room.ram_total)}: lower offload.max_memory.cpu")
    elif room.ram is not None and allowed > CLEARLY * room.ram:
        problems.append(f"{ram} {gib(room.ram)} are free: lower offload.max_memory.cpu, or free some RAM")
    if plan.device == "cuda" and room.pinnable is not None and min(plan.arena_size, plan.cpu_budget) > room.pinnable:
        problems.append(
            f"the run pins {gib(plan.arena_size)} of RAM for the GPU, the driver allows {gib(room.pinnable)} "
            f"({room.pinnable_why}): lower offload.max_memory.cpu"
        )
    if room.gpu is not None and predicted.gpu_peak > room.gpu:
        problems.append(
            f"the step needs {gib(predicted.gpu_peak)} of GPU memory, offload.max_memory.gpu leaves {gib(room.gpu)}"
        )
    if room.ssd is not None and predicted.ssd_bytes > room.ssd:
        problems.append(f"the store needs {gb(predicted.ssd_bytes)}, offload.max_memory.ssd allows {gb(room.ssd)}")
    return problems + [disk.problem for disk in room.disks if disk.problem]


WORN = 0.3  # share of a drive's rated writes; fuyou warns about a run that writes more


@dataclass(frozen=True, kw_only=True, slots=True)
class Writes:
    """Holds the bytes that a run writes to the drives of its store."""

    loading: int
    steps: int
    saving: int  # saving at the end, beside the updates
    export: int  # 0 if the model goes to other drives

    @property
    def total(self) -> int:
        return self.loading + self.steps + self.saving + self.export


def writes_of(plan: Plan, room: Room, *, steps: float, resumed: bool = False) -> Writes:
    """Returns the writes of this many steps to the run's end. A `resumed` run loads nothing."""
    shares_drives = any({"the store", "the exported model"} <= set(disk.what) for disk in room.disks)
    return Writes(
        loading=0 if resumed else loaded(plan),
        steps=round(steps * plan.predicted.written_per_step),
        saving=saved_where_it_stops(plan) if steps else 0,
        export=plan.predicted.export_bytes if shares_drives else 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWear:
    """Holds shares of the drives' rated writes."""

    run: float  # what the run uses of the drive with the lowest rating
    rated: int  # bytes of that drive
    before: float  # what the most worn drive has written, before the run and after it
    after: float

    @property
    def accepted(self) -> bool:
        """Tells whether the run uses little enough and wears out no drive. A drive worn out before does not count."""
        return self.run <= WORN and not self.before < 1 < self.after


def wear_of(hardware: HardwareProfile, writes: Writes | None) -> RunWear | None:
    """Returns the wear of writes spread evenly over the drives. Returns None if the writes or all ratings are unknown."""
    rated = [drive for drive in hardware.drives if drive.rated_bytes]
    if writes is None or not rated:
        return None
    each = writes.total / len(hardware.drives)
    least = min(drive.rated_bytes for drive in rated)
    worst = max(rated, key=lambda drive: (drive.used_bytes + each) / drive.rated_bytes)
    return RunWear(
        run=each / least,
        rated=least,
        before=worst.used_bytes / worst.rated_bytes,
        after=(worst.used_bytes + each) / worst.rated_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spared:
    """Holds what `offload.wear` avoids writing, and what that writing would have gained."""

    instead: str  # what happens instead, in words
    per_step: int  # bytes
    faster: float  # extra time of this plan, as a share of the fastest plan's step


def spared_of(
    result: SearchResult, plan: Plan, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest
) -> Spared | None:
    """Compares `plan`, made from a search's result, with the fastest plan. Returns None if they are the same or it is no
    faster."""
    if result.fastest is result.best:
        return None
    fastest, chosen = timed(result.fastest, model, hardware, request, costs=result.costs).predicted, plan.predicted
    faster, more = chosen.step_seconds / fastest.step_seconds - 1, fastest.written_per_step - chosen.written_per_step
    if faster <= 0 or more <= 0:
        return None
    most = max(sorted(fastest.written_by), key=lambda kind: fastest.written_by[kind] - chosen.written_by.get(kind, 0))
    swaps = _swapped(result.fastest.plan) > _swapped(plan)
    instead = "outputs are recomputed instead of swapped" if swaps else f"{most} stay in RAM"
    return Spared(instead=instead, per_step=more, faster=faster)


def _swapped(plan: Plan) -> int:
    """Counts the operators, over all stages, whose outputs go to the ssd."""
    return sum(len(stage.kept) for stage in plan.stages if stage.boundary == "ssd")


# ---- a plan and what may be changed ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Holds what a run of a recipe, changed or not, would be like."""

    changes: tuple[str, ...]  # key=value
    prepared: Planned
    room: Room
    pinned: tuple[str, ...] = ()  # key=value of settings that the changes alone would have chosen again

    @property
    def overrides(self) -> tuple[str, ...]:
        """Returns the overrides that give exactly this plan."""
        return (*self.changes, *self.pinned)

    @property
    def plan(self) -> Plan:
        return self.prepared.plan

    @property
    def problems(self) -> list[str]:
        return plan_problems(self.plan, self.room)

    @property
    def tokens(self) -> int:
        return self.plan.step_tokens

    def wear(self, times: float = 1.0) -> RunWear | None:
        """Returns the wear of the run, or of one `times` as long. Returns None if the data decides its length."""
        prepared, resumed = self.prepared, self.prepared.manifest is not None
        if not prepared.total_steps:
            return None
        return wear_of(prepared.hardware, writes_of(self.plan, self.room, steps=times * prepared.steps_left, resumed=resumed))

    def passes(self, times: float = 1.0) -> bool:
        """Tells whether the run fits, and wears the drives little enough if it is `times` as long."""
        wear = self.wear(times)
        return not self.problems and (wear is None or wear.accepted)


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoBoxes:
    """Says what two boxes like the planned one would do. `written`: bytes of a step on the fuller box."""

    network: Network
    tokens_per_second: float
    speed_up: float  # beside one
    written: int
    remarks: tuple[str, ...]  # why that is no more
    command: str

    @property
    def helps(self) -> bool:
        return self.speed_up >= GAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationCost:
    """Says what evaluations take. `rows` and what follows from it: None where the sets are not tokenised yet."""

    pass_rows: int
    pass_seconds: float
    pass_read: int  # bytes of the store
    times: int | None  # evaluations left in the run; None if its length is not known
    rows: int | None = None  # of all sets
    passes: int | None = None  # of one evaluation
    seconds: float | None = None  # of one evaluation
    run_share: float | None = None  # of the time of all steps left and evaluations


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingCost:
    """Says what continuing fixed prompts takes at one evaluation."""

    prompts: int
    passes: int  # over the weights, at most: one for each new token
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Holds a limit of the recipe that stops the run after `step`: its key and value, and how the run continues."""

    limit: str
    step: int
    again: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Holds a plan, the recipe and machine it was made for, and what else was found out about it."""

    plan: Plan
    model: ModelSpec
    hardware: HardwareProfile
    room: Room
    steps: int | None = None  # of the whole run; None if the data decides
    done: int | None = None  # steps of the saved run that is resumed; None for a new run
    io_uring: bool = True  # whether this build has io_uring
    folder: Path = Path()  # folder whose drive would hold the store
    command: str = ""  # command that runs the plan; empty if it cannot be run, or already runs
    refusal: str | None = None  # why the model cannot be trained yet
    changes: tuple[Outcome, ...] | None = None  # changes of the recipe that help; None if none were looked for
    tried: int = 0  # plans made to find them
    faster: tuple[Outcome, ...] | None = None  # changes for a run that waits for its drives, best first; None: not looked for
    faster_command: str = ""  # command that plans the first of them
    boxes: TwoBoxes | None = None  # like this one; None: not looked for
    sooner: Plan | None = None  # the same plan, committed so often that a crash loses little, if now it loses much
    advice: str = ""  # what to do if no changes were looked for
    region: FastRegion | None = None  # of the drives; None if they are not known to slow down
    endings: tuple[Ending, ...] = ()  # limits that stop the run before its last step
    spared: Spared | None = None  # what `offload.wear` avoids
    notes: tuple[str, ...] = ()  # notes from planning
    kernels: str = ""  # kernels of the blocks
    may_compile: bool = False  # blocks are not compiled, but may be, and that is known to be faster
    evaluation: EvaluationCost | None = None  # None if the recipe evaluates nothing, or nothing was simulated
    sampling: SamplingCost | None = None  # the same for fixed prompts
    ranks_on_box: int = 0  # where this is a rank's plan; 0: nothing waits for others
    network: Network | None = None  # over which the step of a rank's plan is that of all; None: it is without waits for others
    best_bytes: int = 0  # of the best weights, written anew at each lower loss; 0 if they are not kept

    @property
    def problems(self) -> list[str]:
        return plan_problems(self.plan, self.room)

    @property
    def left(self) -> int | None:
        """Returns the steps still to do, or None if the data decides."""
        return None if self.steps is None else max(0, self.steps - (self.done or 0))

    @property
    def tokens(self) -> int:
        """Returns the tokens of a step, as its rows have them, or as whole rows if their lengths are not known."""
        return self.plan.step_tokens

    @property
    def run_seconds(self) -> float | None:
        """Returns the seconds of all steps still to do; None for a rank whose own step tells nothing of them. Drives that slow
        down are fast for the first ones."""
        if self.left is None or (self.ranks_on_box and self.network is None):
            return None
        if self.plan.sustained and self.region is not None:
            return self.region.seconds(self.left)
        return self.left * self.plan.predicted.step_seconds

    @property
    def writes(self) -> Writes | None:
        """Returns the bytes written from now to the end of the run, or None if its length is not known."""
        return None if self.left is None else self.shown_writes

    @property
    def shown_writes(self) -> Writes:
        """Returns the same, or those of USUAL steps if the length is not known."""
        steps = USUAL if self.left is None else self.left
        return writes_of(self.plan, self.room, steps=steps, resumed=self.done is not None)

    @property
    def wear(self) -> RunWear | None:
        return wear_of(self.hardware, self.writes)

    @property
    def deciding_assumptions(self) -> tuple[RatedBy, ...]:
        """Returns the assumed rates of a described machine's busiest resource and of those nearly as busy."""
        if self.hardware.measured != "described":
            return ()
        seconds = self.plan.predicted.seconds
        most = max(seconds.values(), default=0.0)
        names = tuple(word for name, busy in seconds.items() if busy >= _CLOSE * most for word in _RATED.get(name, ()))
        other = "store, both" if self.plan.sustained else "store, sustained"
        rates = (rate for rate in origins_of(self.hardware) if rate.origin == "assumption" and rate.what.startswith(names))
        return tuple(rate for rate in rates if not rate.what.startswith(other))


def facts_of(prepared: Planned, room: Room, *, described: bool = False, command: str = "") -> RunFacts:
    """Collects the facts beside the plan. `described`: for another machine, on which nothing can be run."""
    from fuyou_cli.swap.kernels import has_io_uring

    region, spared = fast_region(prepared.model, prepared.hardware, prepared.plan), None
    if prepared.found is not None and prepared.fits_ram:
        spared = spared_of(prepared.found, prepared.plan, prepared.model, prepared.hardware, prepared.request)
    return RunFacts(
        plan=prepared.plan,
        model=prepared.model,
        hardware=prepared.hardware,
        room=room,
        steps=prepared.total_steps or None,
        done=None if prepared.manifest is None else prepared.manifest.step,
        io_uring=described or has_io_uring(),
        folder=Path() if described else existing(prepared.directories[0].parent),
        command="" if described else command,
        refusal=prepared.refusal,
        region=region,
        endings=endings(prepared, region),
        spared=spared,
        kernels=_kernels(prepared),
        may_compile=_may_compile(prepared),
        sooner=sooner(prepared.model, prepared.hardware, prepared.plan) if prepared.fits_ram else None,
    )


def of_rank(facts: RunFacts, ranks_on_box: int, network: Network | None = None) -> RunFacts:
    """Returns the facts of a rank's plan without those that only plans of all ranks tell. `network`: over which its step is
    that of all ranks (`with_waits`)."""
    return replace(facts, ranks_on_box=ranks_on_box, network=network, region=None, endings=(), sooner=None)


def with_evaluation(facts: RunFacts, prepared: Planned, rows: Sequence[int] | None) -> RunFacts:
    """Adds what evaluations take. `rows`: of each set; None: not known."""
    dataset, settings, total = prepared.recipe.dataset, prepared.recipe.eval, prepared.total_steps
    if facts.refusal is not None or not prepared.fits_ram:
        return facts
    if settings.samples is not None:
        facts = replace(facts, sampling=_sampling(prepared, settings.samples))
    if not (dataset.eval or dataset.eval_fraction):
        return facts
    times = evaluations_left(settings.every_steps, at_start=settings.at_start, total=total, done=facts.done) if total else None
    cost = evaluation_cost(facts.model, facts.hardware, facts.plan, rows=rows, times=times, run_seconds=facts.run_seconds)
    return replace(facts, evaluation=cost, best_bytes=prepared.export_bytes * settings.keep_best)


def _sampling(prepared: Planned, settings: SamplesSection) -> SamplingCost:
    """Prices `max_new_tokens` after each prompt, as many of them in a pass as fit. Rows have about the mean of tokens."""
    from fuyou_cli.training.fixed_prompts import rows_at_once  # loads torch

    model, alone, prompts, new = prepared.model, _alone(prepared.plan), len(settings.prompts), settings.max_new_tokens
    most = rows_at_once(model, most=alone.group.batch_size, vocabulary=prepared.known.facts.head_rows)
    at_once, tokens = min(prompts, most), max(map(len, settings.prompts)) // _CHARACTERS + new // 2
    schedule, share = evaluation_schedule(model, alone), at_once * tokens / alone.group.tokens
    shorter = replace(schedule, visits=tuple(replace(visit, flops=share * visit.flops) for visit in schedule.visits))
    seconds = simulate(model, prepared.hardware, alone, shorter, steps=_PASSES, jobs=False).step_seconds
    passes = new * -(-prompts // at_once)
    return SamplingCost(prompts=prompts, passes=passes, seconds=passes * seconds)


def _alone(plan: Plan) -> Plan:
    """Returns the plan without updates, which steps pay."""
    return replace(plan, stages=tuple(replace(stage, deferred=False) for stage in plan.stages))


def evaluation_cost(
    model: ModelSpec,
    hardware: HardwareProfile,
    plan: Plan,
    *,
    rows: Sequence[int] | None,
    times: int | None,
    run_seconds: float | None,
) -> EvaluationCost:
    """Prices evaluations of sets of so many `rows` each. `run_seconds`: of the steps left."""
    alone = _alone(plan)
    simulated = simulate(model, hardware, alone, evaluation_schedule(model, alone), steps=_PASSES, jobs=False)
    at_once, seconds = plan.group.batch_size, simulated.step_seconds
    cost = EvaluationCost(pass_rows=at_once, pass_seconds=seconds, pass_read=simulated.read, times=times)
    if rows is None:
        return cost
    passes = sum(-(-count // at_once) for count in rows)
    share = None
    if times is not None and run_seconds is not None and (whole := run_seconds + times * passes * seconds) > 0:
        share = times * passes * seconds / whole
    return replace(cost, rows=sum(rows), passes=passes, seconds=passes * seconds, run_share=share)


def evaluations_left(every: int | None, *, at_start: bool, total: int, done: int | None) -> int:
    """Counts the evaluations of a run from step `done` on (None: a new run): at its start, every so many steps, at its end."""
    begun = done or 0
    regular = 0 if every is None else total // every - begun // every
    at_end = begun < total and (every is None or total % every != 0)
    return regular + at_end + (at_start and done is None)


def _kernels(prepared: Planned) -> str:
    """Says what computes the blocks. For sdpa, includes the kernels that torch chooses from."""
    train, plan = prepared.recipe.train, prepared.plan
    attention = prepared.known.facts.attention
    if attention == "sdpa":
        allowed = allowed_kernels(plan.device, plan.numerics.compute_dtype, deterministic=train.deterministic)
        attention += f" ({' or '.join(allowed)})"
    others = {"blocks compiled": train.compile, "deterministic": train.deterministic}
    return ", ".join([f"attention by {attention}", *(name for name, chosen in others.items() if chosen)])


def _may_compile(prepared: Planned) -> bool:
    """Tells whether to try compiled blocks: where it was measured, on a GPU and with all weights trained. A saved run keeps to
    what it began with."""
    recipe = prepared.recipe
    chosen = recipe.train.compile or recipe.offload.activations == "swap"
    possible = prepared.plan.device == "cuda" and recipe.dataset.packing != "isolated" and prepared.manifest is None
    return possible and not chosen and not prepared.model.frozen_parameters


def allowed_kernels(device: str, dtype: str, *, deterministic: bool = False) -> tuple[str, ...]:
    """Returns the kernels that torch's scaled_dot_product_attention may choose from, for compute of `dtype` on a device of this
    name."""
    if device != "cuda":
        return "flash", "math"
    torch = sys.modules.get("torch")  # where it is not loaded, nobody has changed its settings, which allow all

    def is_on(name: str) -> bool:
        return torch is None or bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")())

    allowed = {
        "flash": is_on("flash") and dtype != "float32",
        "cudnn": is_on("cudnn") and dtype != "float32" and not deterministic,
        "efficient": is_on("mem_efficient"),
        "math": is_on("math"),
    }
    return tuple(name for name, is_allowed in allowed.items() if is_allowed)


def endings(prepared: Planned, region: FastRegion | None) -> tuple[Ending, ...]:
    """Returns the limits that stop this process before the run's last step, as planned. Loading does not count."""
    plan, recipe, saved, ends = prepared.plan, prepared.recipe, prepared.manifest, list[Ending]()
    done = saved.step if saved is not None else 0
    seconds, most = recipe.train.max_time, recipe.offload.ssd_write_limit
    if seconds is not None and plan.predicted.step_seconds > 0:
        step = done + steps_within(seconds, plan, region)
        again = "run the same command again to continue"
        ends.append(Ending(limit=f"train.max_time={format_time(seconds)}", step=step, again=again))
    if most is not None and plan.predicted.written_per_step:
        step = done + steps_within_writes(plan, most - (saved.written_total if saved is not None else loaded(plan)), done=done)
        ends.append(Ending(limit=f"offload.ssd_write_limit={format_size(most)}", step=step, again="raise it to continue"))
    return tuple(end for end in ends if not prepared.total_steps or end.step < prepared.total_steps)


def steps_within(seconds: float, plan: Plan, region: FastRegion | None) -> int:
    """Returns the whole steps that a run completes in this time. Drives that slow down are fast for the first ones."""
    if region is None or not plan.sustained:
        return int(seconds / plan.predicted.step_seconds)
    fast = region.steps * region.first
    return int(seconds / region.first if seconds <= fast else region.steps + (seconds - fast) / region.later)


def beside_plan(
    planned: Planned, report: RunReport, others_cores: float, *, gpu_peak: int, say: Callable[[str], None]
) -> RunReport:
    """Simulates the plan's step once more for its figures of every resource. Says so if other programs disturbed the run."""
    if not report.steps:
        return report
    model, hardware, plan = planned.model, planned.hardware, planned.plan
    step = simulate(model, hardware, plan, plan_schedule(model, plan))
    if planned.ring is not None:
        step = replace(step, stalls=plan.predicted.stalls)  # with the waits for other ranks
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
        "parameters": planned.whole.parameters,
        "frozen_parameters": planned.whole.frozen_parameters,
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
        **({} if planned.ring is None else {"network": asdict(planned.ring.network)}),
    }


def placed_in_words(plan: Plan, model: ModelSpec) -> str:
    """Describes any plan by what it does, in a log's few words."""
    params = [stage.params for stage in model.stages]
    slots = max(len(slots.gradient_slots) for slots in plan.slot_classes)
    deferred = any(stage.deferred for stage in plan.stages)
    parts = [
        f"{plan.lookahead} stage{'s' * (plan.lookahead != 1)} fetched early, {slots} gradient slot{'s' * (slots != 1)}",
        "every update in forward" if deferred else "every update in backward",
    ]
    for what in ("weights", "states"):
        in_ram = [stage for stage in plan.stages if getattr(stage, what) != "ssd" and not stage.updated_on_device]
        share = sum(params[stage.stage] for stage in in_ram) / (sum(params) or 1)
        parts.append(f"{share:.0%} of the {what} in RAM")
    on_gpu = sum(params[stage.stage] for stage in plan.stages if stage.updated_on_device)
    parts += [f"{on_gpu / (sum(params) or 1):.0%} of both on the GPU"] if on_gpu else []
    keeping = [stage for stage in plan.stages if stage.boundary_ram or stage.boundary_extent or stage.boundary == "gpu"]
    place = "on the GPU" if any(stage.boundary == "gpu" for stage in keeping) else "in RAM"
    parts.append(f"{sum(stage.boundary != 'ssd' for stage in keeping)} of {len(keeping)} boundaries {place}")
    kept_there = sum(len(stage.kept_there) for stage in plan.stages)
    outputs = sum(len(stage.given) for stage in plan.stages)
    parts.append(f"{outputs} graphs kept" if model.compiled else f"{outputs} outputs kept")
    parts += [f"{kept_there} of them on the GPU"] if kept_there and not model.compiled else []
    parts += [f"{plan.sweeps} sweeps over the model"] if plan.sweeps > 1 else []
    parts += ["a first backward for the norm"] if plan.norm_first else []
    return ", ".join(parts)
