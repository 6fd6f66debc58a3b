"""Makes the recipe of a short run that measures a model: of a named shape, or of a recipe's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoint.hub import Hub
from ...engine.skeleton import load_config
from ...recipe.load import LoadedRecipe, load_recipe
from ...recipe.named import find_recipe
from ..stored_quantised import as_stored
from .measured import STEPS
from .sweep import Loaded
from .synthetic import NAMES, named_config, write_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MADE = {"mxfp4": "nf4", "fp8": "int8"}  # what random weights are quantised to instead: as many bits, and decoded as fast


def shape_of(
    model: str, overrides: Sequence[str], scratch: Path, *, say: Callable[[str], None]
) -> tuple[Loaded, PreTrainedConfig]:
    """Returns what loads the recipe of a short run, and the model's configuration. `model`: a named shape or a recipe."""
    if model.lower() in NAMES:
        path = write_recipe(scratch)
        config = named_config(model.lower())
        config.save_pretrained(scratch / "model")  # the recipe names this folder: measuring a new machine reads it
        return _loader(str(path), overrides, scratch), config
    load = _loader(model, overrides, scratch)
    recipe = load([]).recipe
    model_dir = Hub(recipe, say=say, progress=lambda what, done, total: None).model(need_weights=False)
    rests = as_stored(recipe, model_dir, say=say).model
    rests = rests.model_copy(update={"quantize": _MADE.get(rests.quantize, rests.quantize)})
    rested = [f"model.quantize={rests.quantize}", f"model.double_quant={rests.double_quant}"]
    load = _loader(model, [*overrides, *rested], scratch)
    return load, load_config(model_dir, trust_remote_code=recipe.model.trust_remote_code)


def loaded(recipe: str, overrides: Sequence[str]) -> LoadedRecipe:
    """Loads a recipe by its path or name."""
    return load_recipe(*find_recipe(recipe, list(overrides)))


def _loader(recipe: str, overrides: Sequence[str], scratch: Path) -> Loaded:
    return lambda more: loaded(recipe, [*overrides, *_ours(scratch), *more])


def _ours(scratch: Path) -> list[str]:
    """Returns overrides for a short run that leaves nothing behind elsewhere."""
    return [
        f"output_dir={scratch / 'out'}",
        f"train.max_steps={STEPS}",
        "train.epochs=null",
        "train.max_time=null",
        "offload.ssd_write_limit=null",
        "checkpoint.resume=never",
        "export.at_end=false",
    ]
