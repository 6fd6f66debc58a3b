"""Plans without a run: a recipe on this machine or on a described one, and the same recipe with some keys changed.

Changes that help are the smallest that make it fit or spare its drives, and those that make it faster. Each is planned again,
so nothing untried is suggested. They come from the recipe and its plan: all keys that cost memory, disk or wear, in steps from
the smallest change on. Of each kind the first step that helps is kept. If no single kind helps, pairs are tried. What makes a
run faster that waits for its drives is planned for the same tokens.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.probe import IN_MEMORY, mount_of, process_bytes
from fuyou_cli.core.units import GiB, MiB, align_up
from fuyou_cli.machine.described import on_described
from fuyou_cli.machine.profile import core_count, hardware_for, measure_once
from fuyou_cli.planner.place import Candidate, least_memory
from fuyou_cli.planner.search import Effort
from fuyou_cli.recipe.load import LoadedRecipe, load_recipe
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.length import Epoch, epoch_of, sampled_epoch
from fuyou_cli.training.plan_step import layers_of, plan, plan_request, replan
from fuyou_cli.training.prepare import Inspected, Planned, StoreDisks, inspect, resolve, run_directories, unheard

from .facts import Outcome, described_disks, disks_of, room_of

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
    inspected, hardware, disks, epoch = inspected_for_plan(
        loaded, described, measure=measure, count=count, say=say, progress=progress
    )
    return plan(inspected, hardware, disks, epoch=epoch, effort=effort, say=say)


def inspected_for_plan(
    loaded: LoadedRecipe, described: HardwareProfile | None, *, measure: bool, count: bool, say: Say, progress: Progress
) -> tuple[Inspected, HardwareProfile, StoreDisks, Epoch | None]:
    """Finds out what a plan is made from: the model, the machine, the room on its disks, and the rows if they are counted."""
    here = described is None
    recipe = loaded.recipe if described is None else on_described(loaded, described).recipe
    resolved = resolve(recipe, to_run=False, here=here, say=say, progress=progress)
    inspected = inspect(resolved, say=say, process=process_bytes if here else None)
    if described is None:
        warn_of_memory(loaded, say)
        hardware, disks = machine_here(loaded, inspected, say=say, measure=measure)
    else:
        hardware, disks = described, described_disks(described)
    look = epoch_of if inspected.recipe.train.max_steps is None else sampled_epoch  # how many steps, and how long one is
    epoch = look(inspected.recipe, inspected.tokenizer_dir, say) if count else None
    return inspected, hardware, disks, epoch


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
    """Looks at this machine as it is now, or at the part of it that one of several ranks has. `measure` measures a new machine
    first; of the ranks on a box one does so, while the others wait."""
    peers = inspected.peers
    with nullcontext() if peers is None else peers.one_of_a_box_first("measured"):
        if measure and loaded.recipe.offload.measure:
            refused = inspected.known.facts.refusal  # none of its layers are computed
            layers = "" if refused else layers_of(inspected.recipe, inspected.model_dir, cores=core_count())
            measure_once(loaded, inspected.device, layers=layers, say=say)
    directories = run_directories(loaded.recipe)
    hardware = hardware_for(*directories, device=inspected.device, say=say, unloaded=inspected.known.unloaded_bytes)
    if peers is not None:
        hardware = hardware.shared(peers.local_count, on_card=peers.on_card)
    return hardware, disks_of(inspected)


def command_of(
    loaded: LoadedRecipe, command: str = "finetune", *, changes: Sequence[str] = (), options: Sequence[str] = ()
) -> str:
    """Returns the command line that runs (or plans) this recipe with its overrides, and with `changes` in place of those of the
    same keys."""
    changed = {change.split("=")[0] for change in changes}
    kept = [override for override in loaded.overrides if override.split("=")[0] not in changed]
    return shlex.join(["fuyou", command, str(loaded.path), *kept, *changes, *options])


# ---- the same recipe with other keys ---------------------------------------------------------------------------------


def per_token(plan: Plan) -> float:
    """Returns the seconds that a token takes, by which steps of unlike size are compared."""
    return plan.predicted.step_seconds / plan.step_tokens


def ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Sorts by the time of a token. Of those that are about as fast, that which changes the run least goes first."""
    left, best_first = sorted(outcomes, key=lambda outcome: (per_token(outcome.plan), outcome.changes)), list[Outcome]()
    while left:
        near = [outcome for outcome in left if _NEARLY * per_token(outcome.plan) <= per_token(left[0].plan)]
        best_first.append(min(near, key=lambda outcome: sum(_RANKS.get(change.split("=")[0], 0) for change in outcome.changes)))
        left.remove(best_first[-1])
    return best_first


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
    in_words = [words[key] for key in keys if key in words]
    others = any(key.startswith(("train.", "dataset.", "precision.", "optimizer.")) for key in keys if key not in words)
    return tuple(in_words or (["other last bits"] if others else []))


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


# ---- changes that help -----------------------------------------------------------------------------------------------

SHOWN, SHOWN_FASTER = 5, 2
_WAITS = 0.1  # share of a step that compute waits from which changes are planned
_LARGER = (4, 2)  # times the rows of a step; many more would be another training
_MOST_MICRO_BATCHES = 64  # of a larger batch; plans of more take many seconds
_MOST_QUICK = 40  # plans made only to see whether they fit
_LEAST_CHUNK, _LEAST_ROW = 64, 128  # tokens; a smaller head piece or row makes no sense
_HALVINGS = 8
_FINER, _FEW = 64 * MiB, 4 * GiB  # steps of RAM if there is little of it
INT8, SMALL_SUMS = "optimizer.state_dtype=int8", "precision.grad_accum=bfloat16"
_PINS = ("weights", "gradients", "optimizer_states", "boundaries", "activations", "lookahead", "defer_updates", "norm_first")

ChangeSteps = tuple[tuple[str, ...], ...]  # each is one change: key=value of one or two keys


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeKind:
    """Holds the changes of one kind, smallest first. `numerics`: they change the run's numerics."""

    steps: ChangeSteps
    numerics: bool = False


def changes_that_help(elsewise: Replanner, *, fits: bool) -> list[Outcome]:
    """Returns up to SHOWN changes, best first. `fits`: the run fits and only wears its drives too much; what spares them is
    `ranked`. Else few keys go before many, the same numerics before others, then the faster per token. If no change both fits
    and spares the drives, returns changes that fit."""
    trials = _Trials(elsewise)
    kinds = list(candidates(elsewise.prepared, fits=fits))
    helping = _helping(trials, kinds)
    if not helping and not fits:
        trials.spare_drives = False
        helping = _helping(trials, kinds)
    if fits:
        return ranked(outcome for _, outcome in helping)[:SHOWN]
    helping.sort(key=lambda pair: (len(pair[1].changes), pair[0], per_token(pair[1].plan), pair[1].changes))
    return [outcome for _, outcome in helping[:SHOWN]]


def _helping(trials: _Trials, kinds: list[ChangeKind]) -> list[tuple[bool, Outcome]]:
    """Returns the changes that help, each with whether it changes the run's numerics."""
    helping = [(kind.numerics, outcome) for kind in kinds if (outcome := trials.first(kind))]
    for first, second in combinations(kinds, 2) if not helping else ():
        if len(helping) >= SHOWN or trials.exhausted:
            break
        if outcome := trials.pair(first, second):
            helping.append((first.numerics or second.numerics, outcome))
    return helping


class _Trials:
    """Finds which changes help: tries each with the first plan that fits, then plans it in full."""

    def __init__(self, elsewise: Replanner) -> None:
        self._elsewise = elsewise
        self.spare_drives = True
        self._trained = _trained(elsewise.prepared)
        self._known: dict[tuple[str, ...], Outcome | None] = {}

    @property
    def exhausted(self) -> bool:
        return len(self._known) >= _MOST_QUICK

    def first(self, kind: ChangeKind) -> Outcome | None:
        """Returns the smallest of its changes that helps. If neither the smallest nor the largest fits, none between does."""
        ends = (self._quickly(changes) for changes in (kind.steps[-1], kind.steps[0]))
        return self._least(kind.steps) if any(end is not None and not end.problems for end in ends) else None

    def pair(self, first: ChangeKind, second: ChangeKind) -> Outcome | None:
        """Returns a pair of changes, each as small as possible, if both at their largest help."""
        if not self._passes((*first.steps[-1], *second.steps[-1])):
            return None
        least = next(step for step in first.steps if self._passes((*step, *second.steps[-1])))
        return self._least((*least, *step) for step in second.steps)

    def _least(self, steps: Iterable[tuple[str, ...]]) -> Outcome | None:
        full = (self._elsewise.with_keys(changes) for changes in steps if self._passes(changes))
        return next((outcome for outcome in full if outcome is not None and self._helps(outcome)), None)

    def _helps(self, outcome: Outcome) -> bool:
        """Tells whether it fits and wears the drives little enough for as many tokens as the recipe trains on. Training less
        does not count as a remedy."""
        trained = _trained(outcome.prepared)
        return outcome.passes(self._trained / trained if trained else 1.0) if self.spare_drives else not outcome.problems

    def _passes(self, changes: tuple[str, ...]) -> bool:
        outcome = self._quickly(changes)
        return outcome is not None and self._helps(outcome)

    def _quickly(self, changes: tuple[str, ...]) -> Outcome | None:
        if changes not in self._known:
            self._known[changes] = self._elsewise.with_keys(changes, effort="fit")
        return self._known[changes]


def _trained(prepared: Planned) -> int:
    """Returns the tokens of the whole run. 0 means that the data decides."""
    return prepared.total_steps * prepared.plan.step_tokens


# ---- what may be changed ---------------------------------------------------------------------------------------------


def candidates(prepared: Planned, *, fits: bool) -> Iterator[ChangeKind]:
    """Yields every kind of change that this recipe allows. A run that `fits` only needs to write less, for as many tokens. A
    saved run keeps its numerics."""
    kinds = [*_of_placement(prepared, fits=fits)]
    if prepared.manifest is None:
        kinds += [ChangeKind(steps=steps, numerics=True) for steps in _of_numbers(prepared, fits=fits)]
    yield from (kind for kind in kinds if kind.steps)


def _of_placement(prepared: Planned, *, fits: bool) -> Iterator[ChangeKind]:
    """Yields the changes that keep every loss the same."""
    recipe, plan = prepared.recipe, prepared.plan
    keeps = any(stage.kept for stage in plan.stages) and recipe.offload.activations == "auto"
    pinned = tuple(f"offload.{key}=auto" for key in _PINS if getattr(recipe.offload, key) != "auto")
    yield ChangeKind(steps=_memory(prepared))
    if not fits:
        yield ChangeKind(steps=_if(recipe.export.at_end, "export.at_end=false"))
    yield ChangeKind(steps=_rarer_commits(prepared))
    yield ChangeKind(steps=_if(recipe.offload.wear != "spare", "offload.wear=spare"))
    yield ChangeKind(steps=_if(keeps, "offload.activations=recompute"))
    yield ChangeKind(steps=(*((pin,) for pin in pinned), *([pinned] if len(pinned) > 1 else [])))
    for key in ("cpu", "gpu", "ssd"):
        yield ChangeKind(steps=_if(not getattr(recipe.offload.max_memory, key).is_auto, f"offload.max_memory.{key}=auto"))


def _of_numbers(prepared: Planned, *, fits: bool) -> Iterator[ChangeSteps]:
    """Yields the changes that change the losses."""
    recipe, numerics = prepared.recipe, prepared.plan.numerics
    batch, micro, length = numerics.batch_size, numerics.micro_batch_size, numerics.max_seq_len
    smaller = list(dict.fromkeys(size // micro * micro for size in _halved(batch, micro)))
    if fits:
        # the ssd holds anything that grows with the batch, or that the batch displaces
        spills = any("ssd" in (stage.boundary, stage.gradients, stage.states) for stage in prepared.plan.stages)
        yield same_tokens(prepared, smaller) if spills else ()
    else:
        yield tuple((f"train.micro_batch_size={size}",) for size in _halved(micro, 1) if batch % size == 0)
        chunk = numerics.head_chunk_tokens or micro * length
        yield tuple((f"train.head_chunk_tokens={size}",) for size in _halved(chunk, _LEAST_CHUNK))
        yield _if(recipe.train.head_chunk_vocab != "auto", "train.head_chunk_vocab=auto")
        yield tuple((f"dataset.max_seq_len={size}",) for size in _halved(length, _LEAST_ROW))
        yield tuple((f"train.batch_size={size}",) for size in smaller)
    yield _if(recipe.train.clip_grad_norm is not None, "train.clip_grad_norm=null")
    yield _if(may_have_smaller_sums(prepared), SMALL_SUMS)
    states = may_have_smaller_states(prepared)
    yield _if(states, INT8)
    yield ((INT8, SMALL_SUMS),) if fits and states and may_have_smaller_sums(prepared) else ()
    yield same_tokens(prepared, [batch * factor for factor in (2, 4, 8, 16) if prepared.total_steps >= factor])


def _if(possible: bool, change: str) -> ChangeSteps:
    return ((change,),) if possible else ()


def may_have_smaller_states(prepared: Planned) -> bool:
    recipe = prepared.recipe
    usual = (recipe.optimizer.name, recipe.optimizer.state_dtype) == ("adamw", "float32")
    return usual and recipe.offload.optimizer_states != "gpu" and prepared.manifest is None


def may_have_smaller_sums(prepared: Planned) -> bool:
    precision = prepared.recipe.precision
    return precision.compute == "bfloat16" != precision.grad_accum


def _memory(prepared: Planned) -> ChangeSteps:
    """Returns more RAM for the process, up to the machine's: the smallest size that is enough, then larger steps."""
    plan, hardware = prepared.plan, prepared.hardware
    request = plan_request(prepared.recipe, plan.numerics, hardware, device=plan.device)
    request = replace(request, code_bytes=prepared.request.code_bytes)
    enough = max(least_memory(prepared.model, hardware, request), plan.cpu_budget + 1)
    size, most, sizes = -(-enough // GiB), hardware.ram_available // GiB, []
    finer = align_up(enough, _FINER)
    less = (f"offload.max_memory.cpu={finer // MiB}MiB",) if finer < min(size * GiB, _FEW) else ()
    while size <= most:
        sizes.append(size)
        size += max(1, size // 2)
    if sizes and sizes[-1] < most:
        sizes.append(most)
    return tuple((change,) for change in (*less, *(f"offload.max_memory.cpu={size}GiB" for size in sizes)))


def _rarer_commits(prepared: Planned) -> ChangeSteps:
    """Returns fewer commits, because each writes what rests in RAM."""
    plan, every = prepared.plan, prepared.plan.commit_every
    resting = any("cpu" in (stage.weights, stage.states) for stage in plan.stages)
    if every is None or not resting:
        return ()
    return tuple((f"checkpoint.commit_every_steps={factor * every}",) for factor in (10, 100))


def same_tokens(prepared: Planned, batches: Iterable[int]) -> ChangeSteps:
    """Returns other batch sizes for the same training. A step writes its states once, whatever its batch."""
    train, trained = prepared.recipe.train, prepared.total_steps * prepared.plan.numerics.batch_size
    by_epochs = train.max_steps is None  # the number of steps then follows
    return tuple(
        (f"train.batch_size={batch}",)
        if by_epochs
        else (f"train.batch_size={batch}", f"train.max_steps={-(-trained // batch)}")
        for batch in batches
    )


def _halved(value: int, least: int) -> Iterator[int]:
    for _ in range(_HALVINGS):
        value //= 2
        if value < least:
            return
        yield value


# ---- what makes it faster --------------------------------------------------------------------------------------------


def ways_to_be_faster(elsewise: Replanner) -> tuple[Outcome, ...]:
    """Returns the two best kinds of change, best first; none for a run that hardly waits for drives, or that nothing makes
    clearly faster. Each is searched as the recipe with its overrides is, and so has the figures of that plan.

    The changes of a kind, and the kinds, are compared by quick plans with the choice of the plan that is there."""
    prepared = elsewise.prepared
    if prepared.manifest is not None or prepared.found is None or not waits_for_drives(prepared.plan):
        return ()  # a saved run keeps its numbers
    if prepared.refusal is not None or prepared.hardware.measured == "assumed":
        return ()
    best: list[Outcome] = []
    for kind in _kinds(prepared):
        planned = [outcome for keys in kind if (outcome := _quickly(elsewise, keys)) is not None]
        best += ranked(_worth(prepared.plan, planned))[:1]
    searched = (elsewise.with_keys(outcome.changes) for outcome in ranked(best)[:SHOWN_FASTER])
    return tuple(ranked(_worth(prepared.plan, [outcome for outcome in searched if outcome is not None])))


def waits_for_drives(plan: Plan) -> bool:
    """Tells whether the store, or the host's memory, makes a step longer. A plan that computes a backward twice, to measure the
    norm first, does so because they would."""
    predicted = plan.predicted
    waits = sum(predicted.stalls.values()) > _WAITS * predicted.step_seconds
    return waits or plan.norm_first or predicted.bottleneck.startswith(("ssd", "dram"))


def _worth(plan: Plan, outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if not outcome.problems and _is_worth(plan, outcome.plan)]


def _is_worth(plan: Plan, changed: Plan) -> bool:
    return per_token(changed) <= WORTH * per_token(plan)


def _kinds(prepared: Planned) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yields the changes of each kind that the recipe allows."""
    recipe = prepared.recipe
    states, sums = may_have_smaller_states(prepared), may_have_smaller_sums(prepared)
    if states:
        yield ((INT8,), (INT8, SMALL_SUMS)) if sums else ((INT8,),)
    elif sums:
        yield ((SMALL_SUMS,),)
    numerics, by_epochs = prepared.plan.numerics, recipe.train.max_steps is None
    times = [
        factor
        for factor in _LARGER
        if factor * numerics.micro_batches <= _MOST_MICRO_BATCHES and (by_epochs or prepared.total_steps >= factor)
    ]
    yield same_tokens(prepared, [factor * numerics.batch_size for factor in times[:1]])
    yield (("train.clip_grad_norm=null",),) if recipe.train.clip_grad_norm is not None else ()


def _quickly(elsewise: Replanner, keys: tuple[str, ...]) -> Outcome | None:
    """Plans changed keys with the choice of the plan that is there, or as usual where that does not fit; searches where the
    usual plan would be faster but lacks room. More sweeps than one may be there only for what a change makes small, so one is
    tried as well."""
    search = elsewise.prepared.found
    assert search is not None
    same = replace(search.best.candidate, norm_first=False)
    placed = (elsewise.with_keys(keys, candidate) for candidate in dict.fromkeys((same, replace(same, sweeps=1))))
    fitting = [outcome for outcome in placed if outcome is not None]
    if fitting:
        return min(fitting, key=lambda one: per_token(one.plan))
    usual = elsewise.with_keys(keys, effort="usual")
    lacks_room = usual is not None and usual.problems and _is_worth(elsewise.prepared.plan, usual.plan)
    return elsewise.with_keys(keys) if lacks_room else usual
