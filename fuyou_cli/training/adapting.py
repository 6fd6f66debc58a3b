"""Puts a recipe's adapter into a run: into its skeleton, among its first weights, and beside its store.

peft is imported only for a recipe with an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UsageError, pip_install
from ..core.paths import expanded, is_same_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..checkpoint.files import Checkpoint
    from ..checkpoint.header import TensorEntry
    from ..engine.anatomy import Anatomy
    from ..recipe.schema import Recipe
    from ..spec.model import ModelSpec
    from .state.first_weights import Added
    from .state.stored import Manifest


def check_peft(recipe: Recipe) -> None:
    """Raises UsageError if the recipe has an adapter and peft is not there to make it."""
    if recipe.adapter is not None and find_spec("peft") is None:
        hint = f"{pip_install('fuyou[lora]')}, or leave adapter null"
        raise UsageError("adapter: the package peft is not installed", hint=hint)


def adapt(model: PreTrainedModel, recipe: Recipe) -> None:
    """Puts the recipe's adapter into the skeleton, if there is one. All other parameters then require no gradient."""
    if recipe.adapter is not None:
        from ..adapters.injection import inject

        inject(model, recipe.adapter)


def entries_of(recipe: Recipe, anatomy: Anatomy, checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Finds the checkpoint's tensor for every name of the model's state dict but those of the adapter."""
    from ..adapters.adapter_names import base_name
    from ..checkpoint.names import entries_for

    kept: dict[str, Any] = {"untouched": anatomy.untouched, "parts": anatomy.parts}
    if recipe.adapter is None:
        return entries_for(anatomy.model, checkpoint, **kept)
    return entries_for(anatomy.model, checkpoint, base_name=base_name, **kept)


def stored_names(recipe: Recipe, model: ModelSpec, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Maps the parameters that the adapter added to what its file calls them. `entries`: of the checkpoint, by parameter."""
    if recipe.adapter is None:
        return {}
    from ..adapters.adapter_names import as_beside, file_name, is_added, layer_of

    added = [t.name for stage in model.stages for t in stage.tensors if is_added(t.name)]
    beside = {name: entries.get(f"{layer_of(name)}.weight") for name in added}
    return {
        name: file_name(name) if entry is None else as_beside(file_name(name), entry.name) for name, entry in beside.items()
    }


def check_start(recipe: Recipe, model_dir: Path, *, say: Callable[[str], None]) -> None:
    """Raises UsageError if the recipe's adapter starts from one that is not of its kind. Says where that was trained on another
    model by name."""
    if recipe.adapter is None or recipe.adapter.start is None:
        return
    from .starting import read_start

    base = read_start(recipe.adapter).base_model
    if base and base != recipe.model.name_or_path and not is_same_folder(base, model_dir):
        say(f"note: adapter.from: it was trained on {base}; the recipe's model is {recipe.model.name_or_path}")


def as_started(recipe: Recipe, saved: Manifest | None) -> Recipe:
    """Returns the recipe with the keys that it leaves out of an adapter with a start: as they were for a saved run, which no
    longer needs the folder, or as the adapter that it starts from has them. Raises UsageError where that one is not there."""
    if recipe.adapter is None or recipe.adapter.start is None:
        return recipe
    from .starting import keys_of, with_keys

    if saved is None:
        return recipe.model_copy(update={"adapter": with_keys(recipe.adapter, keys_of(recipe.adapter))})
    before = {key.removeprefix("adapter."): one for key, one in (saved.settings or {}).items() if key.startswith("adapter.")}
    return recipe.model_copy(update={"adapter": with_keys(recipe.adapter, before)})


def starting_entries(recipe: Recipe, model: PreTrainedModel) -> dict[str, TensorEntry]:
    """Finds what every trained parameter begins with in the adapter that the recipe starts from; nothing without one."""
    if recipe.adapter is None or recipe.adapter.start is None:
        return {}
    from .starting import read_start, tensors_of

    return tensors_of(read_start(recipe.adapter), model)


def added_values(recipe: Recipe, model: PreTrainedModel) -> Added:
    """Returns what gives the values that the adapter's parameters begin with, but for those of `starting_entries`."""
    if recipe.adapter is None or recipe.adapter.start is not None:
        return lambda names, pieces: {}
    from ..adapters.beginning import FirstValues

    return FirstValues(model, seed=recipe.seed).of


def configuration(recipe: Recipe, model: PreTrainedModel, model_dir: Path) -> bytes | None:
    """Returns peft's configuration of the adapter, with the targets found: what is kept beside the store."""
    if recipe.adapter is None:
        return None
    from ..adapters.adapter_names import config_of, config_text

    named = recipe.model.name_or_path
    is_folder = expanded(named, key="model.name_or_path").is_dir()
    base = str(model_dir.resolve()) if is_folder else named
    return config_text(config_of(model), base_model=base, revision=recipe.model.revision)
