"""Plans without a run: a recipe on this machine or on a described one, and the same recipe with some keys changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.probe import IN_MEMORY, mount_of, process_bytes
from fuyou_cli.machine.described import on_described
from fuyou_cli.machine.first_measurement import measure_once
from fuyou_cli.machine.profile import core_count
from fuyou_cli.machine.profile_store import hardware_for
from fuyou_cli.planner.candidate import Candidate
from fuyou_cli.planner.run_planner import Effort
from fuyou_cli.recipe.load import LoadedRecipe, load_recipe
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.length import Epoch, epoch_of, sampled_epoch
from fuyou_cli.training.plan_step import layers_of, plan, replan
from fuyou_cli.training.prepare import Inspected, Planned, StoreDisks, inspect, resolve, run_directories, unheard

from .room import Room, Wear, described_disks, disks_of, plan_problems, room_of, wear_of, writes_of

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]


WORTH = 0.95  # of the time of a token; other losses for less are not worth it
_NEARLY = 0.9  # the same for a great change of the result in place of a small one
_RANKS = {  # small changes of a run's result to great ones
    "precision.grad_accum": 1, "optimizer.state_dtype": 2, "train.batch_size": 4, "train.clip_grad_norm": 8,
}  # fmt: skip


def plan_recipe(
    loaded: LoadedRecipe,
    described: HardwareProfile | None = None,
    *,
    measure: bool = False,
    count: bool = False,
    effort: Effort = "search",
    say: Say,
    progress: Progress = unheard,
) -> Planned:
    """Plans for this machine, or for a described one, of which only its device, memory and drives count. `measure` measures a
    new machine first; `count` counts the rows of an epoch in the data."""
    here = described is None
    recipe = loaded.recipe if described is None else on_described(loaded, described).recipe
    resolved = resolve(recipe, to_run=False, here=here, say=say, progress=progress)
    inspected = inspect(resolved, say=say, process=process_bytes if here else None)
    if described is None:
        warn_of_memory(loaded, say)
        hardware, disks = machine_here(loaded, inspected, say=say, measure=measure)
    else:
        hardware, disks = described, described_disks(described)
    epoch = epoch_to_plan(inspected, say) if count else None
    return plan(inspected, hardware, disks, epoch=epoch, effort=effort, say=say)


def warn_of_memory(loaded: LoadedRecipe, say: Say) -> None:
    """Says which folder of the store is no drive but memory."""
    for folder in run_directories(loaded.recipe):
        if (mount := mount_of(folder)) is not None and mount.kind in IN_MEMORY:
            say(
                f"warning: {folder} is memory ({mount.kind}), not a drive: the store takes memory that a plan counts as free, "
                "and is lost at the next reboot; offload.dir names another folder"
            )


def machine_here(
    loaded: LoadedRecipe, inspected: Inspected, *, say: Say, measure: bool = False
) -> tuple[HardwareProfile, StoreDisks]:
    """Looks at this machine as it is now. `measure` measures a new machine first."""
    if measure and loaded.recipe.offload.measure:
        measure_once(loaded, inspected.device, layers=_layers(inspected), say=say)
    directories = run_directories(loaded.recipe)
    hardware = hardware_for(*directories, device=inspected.device, say=say, unloaded=inspected.known.unloaded_bytes)
    return hardware, disks_of(inspected.resolved)


def _layers(inspected: Inspected) -> str:
    """Identifies the layers to time for this recipe. Empty for a model that cannot be trained: none of its are computed."""
    if inspected.known.facts.refusal:
        return ""
    return layers_of(inspected.recipe, inspected.resolved.model_dir, cores=core_count())


def command_of(
    loaded: LoadedRecipe, command: str = "finetune", *, changes: Sequence[str] = (), options: Sequence[str] = ()
) -> str:
    """Returns the command line that runs (or plans) this recipe with its overrides, and with `changes` in place of those of the
    same keys."""
    import shlex

    changed = {change.split("=")[0] for change in changes}
    kept = [one for one in loaded.overrides if one.split("=")[0] not in changed]
    return shlex.join(["fuyou", command, str(loaded.path), *kept, *changes, *options])


def epoch_to_plan(inspected: Inspected, say: Say) -> Epoch | None:
    """Looks at the rows, which say how many steps an epoch has and how long a step is."""
    look = epoch_of if inspected.recipe.train.max_steps is None else sampled_epoch
    return look(inspected.recipe, inspected.resolved.tokenizer_dir, say)


# ---- the same recipe with other keys ---------------------------------------------------------------------------------


def per_token(plan: Plan) -> float:
    """Returns the seconds that a token takes, by which steps of unlike size are compared."""
    return plan.predicted.step_seconds / plan.step_tokens


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

    def wear(self, times: float = 1.0) -> Wear | None:
        """Returns the wear of the run, or of one `times` as long. Returns None if the data decides its length."""
        prepared, resumed = self.prepared, self.prepared.manifest is not None
        if not prepared.total_steps:
            return None
        return wear_of(prepared.hardware, writes_of(self.plan, self.room, steps=times * prepared.steps_left, resumed=resumed))

    def passes(self, times: float = 1.0) -> bool:
        """Tells whether the run fits, and wears the drives little enough if it is `times` as long."""
        wear = self.wear(times)
        return not self.problems and (wear is None or wear.accepted)


def ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Sorts by the time of a token. Of those that are about as fast, that which changes the run least goes first."""
    left, found = sorted(outcomes, key=lambda one: (per_token(one.plan), one.changes)), list[Outcome]()
    while left:
        near = [one for one in left if _NEARLY * per_token(one.plan) <= per_token(left[0].plan)]
        found.append(min(near, key=lambda one: _rank(one.changes)))
        left.remove(found[-1])
    return found


def altered(outcome: Outcome, before: Plan) -> tuple[str, ...]:
    """Says in words what a change alters of the run's result. Empty: every loss stays the same."""
    now, was = outcome.plan.numerics, before.numerics
    words = {
        "optimizer.state_dtype": "states rounded to int8",
        "precision.grad_accum": "gradients summed in bfloat16",
        "train.batch_size": f"{now.batch_size:,} rows a step instead of {was.batch_size:,}",
        "train.clip_grad_norm": "no clipping",
        "dataset.max_seq_len": f"rows of {now.max_seq_len:,} tokens",
    }
    keys = [change.split("=")[0] for change in outcome.changes]
    said = [words[key] for key in keys if key in words]
    others = any(key.startswith(("train.", "dataset.", "precision.", "optimizer.")) for key in keys if key not in words)
    return tuple(said or (["other last bits"] if others else []))


def _rank(changes: Iterable[str]) -> int:
    return sum(_RANKS.get(change.split("=")[0], 0) for change in changes)


@dataclass(slots=True)
class Replanner:
    """Plans changed recipes for the machine and model of a run that is already planned."""

    loaded: LoadedRecipe
    prepared: Planned
    described: bool
    plans: int = field(default=0)  # made so far

    def with_keys(
        self, changes: Sequence[str], candidate: Candidate | None = None, *, effort: Effort = "search"
    ) -> Outcome | None:  # fmt: skip
        """Plans the recipe with these `key=value`, with the same micro-batch unless they change it. Returns None if the recipe
        does not allow them, the model refuses them, or nothing fits (of a `candidate`: it does not)."""
        try:
            loaded = load_recipe(self.loaded.path, [*self.loaded.overrides, *changes])
            if self.described:
                loaded = on_described(loaded, self.prepared.hardware)
            self.plans += 1
            prepared = replan(self.prepared, loaded.recipe, candidate, effort=effort)
        except FuyouError:
            return None
        room = room_of(prepared, described=self.described)
        automatic = loaded.recipe.train.micro_batch_size == "auto"
        pinned = (f"train.micro_batch_size={prepared.plan.numerics.micro_batch_size}",) if automatic else ()
        return Outcome(changes=tuple(changes), prepared=prepared, room=room, pinned=pinned)
