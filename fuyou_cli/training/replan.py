"""`replanned(...)`: what changed keys of a recipe would do, without looking at model, data or machine again."""

from __future__ import annotations

from dataclasses import replace

from ..planner.lasting import Choose
from ..planner.store_modes import planned_with_room
from ..recipe.schema import Recipe
from ..spec.plan import Numerics
from .length import steps_of
from .numerics import numerics_of
from .prepare import Prepared, cut, described_at, wishes, within
from .state.resume import steps_left


def replanned(before: Prepared, recipe: Recipe, *, choose: Choose) -> Prepared:
    """The same model on the same machine as it was planned for, with other keys of batch, numerics or placement. Raises as
    `prepare` does."""
    assert before.outline is not None
    hardware, device = before.hardware, before.plan.device
    numerics = _numerics(before, recipe)
    known = replace(before.outline, anatomy=cut(before.outline.anatomy, numerics))
    model, refusal = before.model, before.refusal
    if _traced(numerics) != _traced(before.plan.numerics):
        described = described_at(known, numerics)
        model, refusal = described.model, described.refusal
    rows = before.epoch_rows if recipe.dataset == before.recipe.dataset else None
    steps = steps_of(recipe, rows)
    asked = wishes(recipe, numerics, hardware, device=device, saved=before.manifest)
    disks = (before.directories, before.model_dir)
    asked = within(before.store_room, asked, recipe, model, hardware, *disks)
    plan = planned_with_room(choose, model, hardware, asked, steps=steps_left(steps, before.manifest))
    changed = replace(before, recipe=recipe, anatomy=known.anatomy, model=model, plan=plan, refusal=refusal)
    return replace(changed, epoch_rows=rows, total_steps=steps)


_NUMBERS = ("seed", "dataset", "train", "precision")  # sections of a recipe


def _numerics(before: Prepared, recipe: Recipe) -> Numerics:
    """Where nothing of that changed they stay, those of a saved run too; else as for a new run."""
    assert before.outline is not None
    now = before.plan.numerics
    if all(getattr(recipe, section) == getattr(before.recipe, section) for section in _NUMBERS):
        return now
    micro = now.micro_batch_size if recipe.train.batch_size % now.micro_batch_size == 0 else None
    return numerics_of(recipe, before.outline.anatomy, before.hardware, None, micro=micro)


def _traced(numerics: Numerics) -> tuple[object, ...]:
    """What a specification depends on."""
    numbers = (numerics.micro_batch_size, numerics.max_seq_len, numerics.head_chunk_tokens, numerics.vocabulary_rows)
    return (numerics.compute_dtype, *numbers)
