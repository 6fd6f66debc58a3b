"""Brings a recipe and a checkpoint together that rests quantised in its files: the file's format is that of the run. What is
trained of one in mxfp4 or fp8 is decoded while it is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.files import CONFIG_NAME, has_weights, name_list, open_checkpoint
from ..core.errors import UsageError
from ..core.json_files import find_object
from ..recipe.rules import broken_rules
from ..spec.packed_tensors import READ_ONLY, Quantised, StoredQuantisation, stored_quantisation
from .adapting import entries_of

if TYPE_CHECKING:
    from ..checkpoint.reader import TensorEntry
    from ..engine.anatomy import Anatomy
    from ..recipe.schema import Recipe
    from ..spec.model import ModelSpec

_LARGEST_CONFIG = 16 << 20  # bytes
_KEYS: dict[Quantised, str] = {
    "nf4": "quantize: nf4",
    "nf4_double": "quantize: nf4, double_quant: true",
    "int8": "quantize: int8",
    "mxfp4": "quantize: mxfp4",
    "fp8": "quantize: fp8",
}


def stored_in(model_dir: Path) -> StoredQuantisation | None:
    """Returns what the configuration in a folder says of quantised weights; None if they are not."""
    file = model_dir / CONFIG_NAME
    return stored_quantisation(file, find_object(file, limit=_LARGEST_CONFIG, finite=False) or {})


def as_stored(recipe: Recipe, model_dir: Path, *, say: Callable[[str], None]) -> Recipe:
    """Returns the recipe with the format of the checkpoint, and says so, if it is quantised. Of one in mxfp4
    or fp8 that is trained whole, or with `quantize: none`, the weights are decoded. Raises UsageError where the recipe asks for
    another format, or for what quantised weights cannot do."""
    stored = stored_in(model_dir)
    if stored is None:
        if recipe.model.quantize in READ_ONLY:
            raise UsageError(
                f"model.quantize is {recipe.model.quantize}, but {model_dir / CONFIG_NAME} does not say that weights rest so",
                hint="fuyou quantises to nf4 and int8 alone: name one of them, or a model that was published so",
            )
        return recipe
    all_trained = recipe.adapter is None and not recipe.freeze
    decoded = recipe.model.quantize == "none" and (all_trained or "quantize" in recipe.model.model_fields_set)
    if stored.kind in READ_ONLY and decoded and not recipe.model.double_quant:
        dtype = recipe.precision.compute
        end = ", and what is exported is too" if all_trained else ""
        say(f"model: its weights are quantised ({stored.kind}): they are decoded to {dtype} while they are imported{end}")
        return recipe
    stored_values = {"quantize": stored.kind.removesuffix("_double"), "double_quant": stored.kind == "nf4_double"}
    asked_values = {key: getattr(recipe.model, key) for key in recipe.model.model_fields_set & stored_values.keys()}
    wrong = next((key for key in sorted(asked_values, reverse=True) if asked_values[key] != stored_values[key]), None)
    if wrong is not None:
        asked = str(asked_values[wrong]).lower()
        raise UsageError(
            f"model.{wrong} is {asked}, but the checkpoint is quantised already: {model_dir / CONFIG_NAME} says "
            f"`{_KEYS[stored.kind]}`",
            hint="leave model.quantize and model.double_quant out, or name the model that was quantised",
        )
    changed = recipe.model_copy(update={"model": recipe.model.model_copy(update=stored_values)})
    for finding in broken_rules(changed):
        raise UsageError(f"{model_dir / CONFIG_NAME} says that the weights are quantised: {finding.message}", hint=finding.help)
    say(f"model: its weights are quantised already (`{_KEYS[stored.kind]}`): their bytes are used as they are")
    return changed


def quantised_keys(model_dir: Path) -> list[tuple[str, str]] | None:
    """Lists the quantised tensors in the files of a model, with their formats; None if the files are not there."""
    if not has_weights(model_dir):
        return None
    entries = open_checkpoint(model_dir).entries.items()
    return [(key, entry.scales.kind) for key, entry in entries if entry.scales is not None]


def quantised_names(recipe: Recipe, anatomy: Anatomy, model_dir: Path, stored: StoredQuantisation) -> frozenset[str]:
    """Returns the names of the parameters that a checkpoint has quantised: as its files say, or its configuration where they
    are not there yet. Of these, only frozen matrices of linear layers in blocks can be used."""
    if not has_weights(model_dir):
        from ..adapters.adapter_names import base_name

        names = {name: base_name(name) for stage in anatomy.stages for name in (tensor.name for tensor in stage.tensors)}
        return frozenset(name for name, base in names.items() if base and stored.takes(base.removesuffix(".weight")))
    kinds = _kinds(entries_of(recipe, anatomy, open_checkpoint(model_dir)))
    if not kinds:
        raise UsageError(
            f"{model_dir / CONFIG_NAME} says that the weights are quantised, but no tensor in its files is",
            hint="remove quantization_config from config.json; model.quantize quantises them",
        )
    if other := next((name for name, kind in kinds.items() if kind != recipe.model.quantisation), None):
        raise UsageError(
            f"{model_dir / CONFIG_NAME} says `{_KEYS[stored.kind]}`, but {other} in its files is `{_KEYS[kinds[other]]}`",
            hint="download the model again",
        )
    return frozenset(kinds)


def check_marked(anatomy: Anatomy, names: frozenset[str], stored: StoredQuantisation) -> None:
    """Raises UsageError for a weight that the checkpoint has quantised, but that no stage holds so. One in mxfp4 or fp8 is
    decoded then; one of them must rest so."""
    marked = {tensor.name for stage in anatomy.stages for tensor in stage.tensors if tensor.quantised}
    if stored.kind in READ_ONLY:
        if not marked:
            raise UsageError(
                f"no frozen matrix in a block is one that the checkpoint has in {stored.kind}",
                hint="set model.quantize=none: then weights are decoded while they are imported",
            )
        return
    if wrong := sorted(names - marked):
        trained = any(tensor.name in wrong and not tensor.frozen for stage in anatomy.stages for tensor in stage.tensors)
        first = "have them frozen (see freeze and adapter.modules_to_save)" if trained else (
            "quantise the model again without them (llm_int8_skip_modules)"
        )  # fmt: skip
        raise UsageError(
            f"the checkpoint has quantised {name_list(wrong)}: only frozen matrices of linear layers in blocks can rest so",
            hint=f"{first}, or use the model that was quantised",
        )


def check_planned(model: ModelSpec, entries: Mapping[str, TensorEntry], model_dir: Path) -> None:
    """Raises UsageError if other weights are quantised in the files than in the plan, which may be older than they."""
    kinds = _kinds(entries)
    planned = {tensor.name: model.quantisation for stage in model.stages for tensor in stage.tensors if tensor.quantised}
    stored = stored_in(model_dir)
    decoded = set(kinds.values()) <= {*READ_ONLY} and stored is not None and stored.kind in READ_ONLY
    if kinds == planned or (not kinds and stored is None) or (decoded and planned.items() <= kinds.items()):
        return
    if stored is None:
        raise UsageError(
            f"{len(kinds)} weights in the files of {model_dir} are quantised, and config.json does not say so",
            hint="download the model's own config.json again",
        )
    raise UsageError(
        f"the files in {model_dir} hold {len(kinds)} quantised weights, and config.json says {len(planned)}",
        hint="run the same command again: it plans by what the files hold",
    )


def _kinds(entries: Mapping[str, TensorEntry]) -> dict[str, Quantised]:
    return {name: entry.scales.kind for name, entry in entries.items() if entry.scales is not None}
