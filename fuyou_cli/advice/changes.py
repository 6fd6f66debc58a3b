"""The smallest changes of a recipe that make it fit, each planned again: nothing is suggested that was not tried.

Candidates come from the recipe and its plan: every key that takes memory, disk or wear, in steps from the least change on.
Of each kind the first step that helps is kept; where no single kind helps, pairs of them are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from fuyou_cli.core.units import GiB, MiB, align_up
from fuyou_cli.planner.place import least_memory
from fuyou_cli.planner.place import plan as first_that_fits
from fuyou_cli.training.prepare import wishes

from .planning import Elsewise, Outcome

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.prepare import Prepared

SHOWN = 5
_MOST_QUICK = 40  # plans that are only looked at for whether they fit
_LEAST_CHUNK, _LEAST_ROW = 64, 128  # tokens: below, a head's piece or a row is no longer a sensible one
_HALVINGS = 8
_FINER, _FEW = 64 * MiB, 4 * GiB  # steps of RAM, where there is so little of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Changes of one sort, the least first. `numerics`: the run's numbers change with it. `steadily`: where one fits, every
    greater one does; whether it wears drives less is another matter."""

    steps: tuple[tuple[str, ...], ...]
    numerics: bool
    steadily: bool = True


def changes_that_help(elsewise: Elsewise, *, fits: bool) -> list[Outcome]:
    """Up to SHOWN, best first: few keys before many, the same numbers before others, then the faster per token. `fits`: only
    wear stands against the run. Where nothing makes it fit and spares its drives as well, what makes it fit."""
    trials = _Trials(elsewise)
    kinds = list(candidates(elsewise.prepared, fits=fits))
    found = _found(trials, kinds)
    if not found and not fits:
        trials.spare_drives = False
        found = _found(trials, kinds)
    found.sort(key=lambda pair: _order(*pair))
    return [outcome for _, outcome in found[:SHOWN]]


def _found(trials: _Trials, kinds: list[Kind]) -> list[tuple[bool, Outcome]]:
    """What helps, each with whether it changes the run's numbers."""
    found: list[tuple[bool, Outcome]] = []
    for kind in kinds:
        if outcome := trials.first(kind):
            found.append((kind.numerics, outcome))
    if not found:
        for one, other in combinations(kinds, 2):
            if len(found) >= SHOWN or trials.exhausted:
                break
            if outcome := trials.pair(one, other):
                found.append((one.numerics or other.numerics, outcome))
    return found


def _order(numerics: bool, outcome: Outcome) -> tuple[int, bool, float, tuple[str, ...]]:
    per_token = outcome.plan.predicted.step_seconds / outcome.tokens
    return len(outcome.changes), numerics, per_token, outcome.changes


class _Trials:
    """Which changes help: looked at by the first plan that fits, then planned in full."""

    def __init__(self, elsewise: Elsewise) -> None:
        self._elsewise = elsewise
        self.spare_drives = True
        self._trained = _trained(elsewise.prepared)
        self._known: dict[tuple[str, ...], Outcome | None] = {}

    @property
    def exhausted(self) -> bool:
        return len(self._known) >= _MOST_QUICK

    def first(self, kind: Kind) -> Outcome | None:
        """The least of its changes that helps. Where more always fits, its greatest is looked at before the others."""
        if kind.steadily and not self._fits(kind.steps[-1]):
            return None
        return self._least(kind.steps)

    def pair(self, one: Kind, other: Kind) -> Outcome | None:
        """Both at their greatest, unless less of one is what helps; then each as little as does."""
        if one.steadily and not other.steadily:
            one, other = other, one
        ends = [one.steps[-1]] if one.steadily else one.steps[::-1]
        if not any(self._passes((*step, *other.steps[-1])) for step in ends):
            return None
        least = next(step for step in one.steps if self._passes((*step, *other.steps[-1])))
        return self._least(tuple((*least, *step) for step in other.steps))

    def _least(self, steps: tuple[tuple[str, ...], ...]) -> Outcome | None:
        for changes in steps:
            if self._passes(changes):
                outcome = self._elsewise.with_keys(changes)
                if outcome is not None and self._helps(outcome):
                    return outcome
        return None

    def _helps(self, outcome: Outcome) -> bool:
        """It fits, and wears the drives little enough for as many tokens as the recipe trains on: less training is no
        cure for wear."""
        if not self.spare_drives:
            return not outcome.problems
        trained = _trained(outcome.prepared)
        return outcome.passes_for(self._trained / trained if trained else 1.0)

    def _passes(self, changes: tuple[str, ...]) -> bool:
        outcome = self._quickly(changes)
        return outcome is not None and self._helps(outcome)

    def _fits(self, changes: tuple[str, ...]) -> bool:
        outcome = self._quickly(changes)
        return outcome is not None and not outcome.problems

    def _quickly(self, changes: tuple[str, ...]) -> Outcome | None:
        if changes not in self._known:
            self._known[changes] = self._elsewise.with_keys(changes, choose=first_that_fits)
        return self._known[changes]


def _trained(prepared: Prepared) -> int:
    """Tokens of the whole run, padding included; 0 where the data decides."""
    numerics = prepared.plan.numerics
    return prepared.total_steps * numerics.batch_size * numerics.max_seq_len


# ---- what may be changed ---------------------------------------------------------------------------------------------


def candidates(prepared: Prepared, *, fits: bool) -> Iterator[Kind]:
    """Every kind of change that this recipe leaves room for. A run that `fits` is only to write less, for as many tokens."""
    recipe = prepared.recipe
    bfloat16_sums = recipe.precision.compute == "bfloat16" != recipe.precision.grad_accum
    less = [] if fits else [
        Kind(steps=(("export.at_end=false",),) if recipe.export.at_end else (), numerics=False),
        Kind(steps=_fewer_states(prepared), numerics=False),
        Kind(steps=_redo(prepared), numerics=False),
        Kind(steps=_micro_batches(prepared), numerics=True),
        Kind(steps=_head_chunks(prepared), numerics=True),
        Kind(steps=(("train.head_chunk_vocab=auto",),) if recipe.train.head_chunk_vocab != "auto" else (), numerics=True),
        Kind(steps=_rows(prepared), numerics=True),
        Kind(steps=_smaller_batches(prepared), numerics=True),
    ]  # fmt: skip
    spilt = _fewer_at_once(prepared) if fits else ()
    made = (
        Kind(steps=_memory(prepared), numerics=False),
        Kind(steps=spilt, numerics=True, steadily=False),
        *less,
        Kind(steps=_rarer_commits(prepared), numerics=False),
        Kind(steps=_sparing(prepared), numerics=False),
        Kind(steps=_recompute(prepared), numerics=False),
        Kind(steps=(("train.clip_grad_norm=null",),) if recipe.train.clip_grad_norm is not None else (), numerics=True),
        Kind(steps=(("precision.grad_accum=bfloat16",),) if bfloat16_sums else (), numerics=True),
        Kind(steps=_pins(recipe), numerics=False, steadily=False),
        Kind(steps=_limits(recipe), numerics=False, steadily=False),
        Kind(steps=_larger_batches(prepared), numerics=True, steadily=False),
    )
    saved = prepared.manifest is not None  # its numbers are settled
    yield from (kind for kind in made if kind.steps and not (saved and kind.numerics))


def _memory(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    """More RAM for the process, up to what the machine has: the least that is enough first, then in ever larger steps."""
    plan, hardware = prepared.plan, prepared.hardware
    asked = wishes(prepared.recipe, plan.numerics, hardware, device=plan.device)
    enough = max(least_memory(prepared.model, hardware, asked), plan.cpu_budget + 1)
    size, most, sizes = -(-enough // GiB), hardware.ram_available // GiB, []
    finer = align_up(enough, _FINER)
    less = (f"offload.max_memory.cpu={finer // MiB}MiB",) if finer < min(size * GiB, _FEW) else ()
    while size <= most:
        sizes.append(size)
        size += max(1, size // 2)
    if sizes and sizes[-1] < most:
        sizes.append(most)
    return tuple((change,) for change in (*less, *(f"offload.max_memory.cpu={size}GiB" for size in sizes)))


def _fewer_states(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    """Snapshots that are kept."""
    checkpoint = prepared.recipe.checkpoint
    if checkpoint.mode != "snapshot" or prepared.manifest is not None:  # a saved run has the store that it has
        return ()
    fewer = [kept for kept in (checkpoint.keep_last - 1, *_halved(checkpoint.keep_last, 1)) if kept]
    return tuple((f"checkpoint.keep_last={kept}",) for kept in dict.fromkeys(fewer))


def _redo(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    """One extent of everything, where the planner may not choose it by itself."""
    checkpoint = prepared.recipe.checkpoint
    every_step = checkpoint.mode != "snapshot" and checkpoint.commit_every_steps in (1, "auto")
    if prepared.plan.store_mode == "redo" or prepared.manifest is not None or (checkpoint.mode == "auto" and every_step):
        return ()
    if checkpoint.mode == "snapshot":
        return (("checkpoint.mode=redo", "checkpoint.snapshot_every_steps=null"),)
    return (("checkpoint.mode=redo",) if every_step else ("checkpoint.mode=redo", "checkpoint.commit_every_steps=1"),)


def _rarer_commits(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    """What rests in RAM is written in steps that are committed alone."""
    checkpoint, plan = prepared.recipe.checkpoint, prepared.plan
    every, key = plan.commit_every, "snapshot" if checkpoint.mode == "snapshot" else "commit"
    resting = any("cpu" in (stage.weights, stage.states) for stage in plan.stages)
    if every is None or not resting or plan.store_mode == "redo":
        return ()
    return tuple((f"checkpoint.{key}_every_steps={factor * every}",) for factor in (10, 100))


def _sparing(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    return (("offload.wear=spare",),) if prepared.recipe.offload.wear != "spare" else ()


def _recompute(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    """Outputs that the planner keeps because that is faster; on the ssd they are written every step."""
    keeps = any(stage.kept for stage in prepared.plan.stages)
    return (("offload.activations=recompute",),) if keeps and prepared.recipe.offload.activations == "auto" else ()


def _pins(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """What the recipe pins, left to the planner: each alone, then all of it."""
    offload = recipe.offload
    pinned = [
        f"offload.{key}=auto"
        for key in ("weights", "gradients", "optimizer_states", "boundaries", "activations", "lookahead", "defer_updates")
        if getattr(offload, key) != "auto"
    ]
    single = tuple((change,) for change in pinned)
    return (*single, tuple(pinned)) if len(pinned) > 1 else single


def _limits(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """Limits of the recipe's own, below what the machine has or (of RAM) above it."""
    limits = recipe.offload.max_memory
    keys = [f"offload.max_memory.{key}=auto" for key in ("cpu", "gpu", "ssd") if not getattr(limits, key).is_auto]
    return tuple((key,) for key in keys)


def _halved(value: int, least: int) -> Iterator[int]:
    for _ in range(_HALVINGS):
        value //= 2
        if value < least:
            return
        yield value


def _micro_batches(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    numerics = prepared.plan.numerics
    sizes = [size for size in _halved(numerics.micro_batch_size, 1) if numerics.batch_size % size == 0]
    return tuple((f"train.micro_batch_size={size}",) for size in sizes)


def _head_chunks(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    numerics = prepared.plan.numerics
    whole = numerics.head_chunk_tokens or numerics.micro_batch_size * numerics.max_seq_len
    return tuple((f"train.head_chunk_tokens={size}",) for size in _halved(whole, _LEAST_CHUNK))


def _rows(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    """Shorter rows, as many of them at once as before."""
    numerics = prepared.plan.numerics
    return tuple((f"dataset.max_seq_len={size}",) for size in _halved(numerics.max_seq_len, _LEAST_ROW))


def _smaller_batches(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    numerics = prepared.plan.numerics
    micro = numerics.micro_batch_size
    sizes = [size // micro * micro for size in _halved(numerics.batch_size, micro)]
    return tuple((f"train.batch_size={size}",) for size in dict.fromkeys(sizes))


def _fewer_at_once(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    """The same tokens in more steps, where what a batch keeps is on the ssd: less of it may stay in RAM."""
    train, plan = prepared.recipe.train, prepared.plan
    if not any(stage.boundary == "ssd" or stage.gradients == "ssd" or stage.states == "ssd" for stage in plan.stages):
        return ()
    smaller = [int(keys[0].partition("=")[2]) for keys in _smaller_batches(prepared)]
    steps = {size: -(-prepared.total_steps * plan.numerics.batch_size // size) for size in smaller}
    by_epochs = train.max_steps is None
    return tuple(
        (f"train.batch_size={size}",) if by_epochs else (f"train.batch_size={size}", f"train.max_steps={count}")
        for size, count in steps.items()
    )


def _larger_batches(prepared: Prepared) -> tuple[tuple[str, ...], ...]:
    """The same tokens in fewer steps: states are written once a step, whatever its batch."""
    steps, batch = prepared.total_steps, prepared.plan.numerics.batch_size
    by_epochs = prepared.recipe.train.max_steps is None  # then the steps follow by themselves

    def change(factor: int) -> tuple[str, ...]:
        larger = f"train.batch_size={batch * factor}"
        return (larger,) if by_epochs else (larger, f"train.max_steps={-(-steps // factor)}")

    return tuple(change(factor) for factor in (2, 4, 8, 16) if steps >= factor)
