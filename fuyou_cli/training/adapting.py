"""Puts a recipe's adapter into a run: into its skeleton, among its first weights, and beside its store.

A run may start from a saved adapter: peft's two files, which anybody may have written. What the recipe leaves out is as it has
it. What the recipe says has to be its own keys, and its tensors those that the recipe trains: so what continues is what peft
continues. peft is imported only for a recipe with an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..adapters.adapter_names import (
    FUSED_ALPHA,
    as_beside,
    base_name,
    config_of,
    config_text,
    file_name,
    is_added,
    layer_of,
    neutral,
    targets_in_experts,
)
from ..checkpoint.files import ADAPTER_CONFIG_NAME, ADAPTER_NAME, inside, name_list
from ..checkpoint.reader import TensorEntry, parse_file
from ..core.errors import UsageError, pip_install
from ..core.json_files import from_json, read_object, shown
from ..core.paths import expanded, is_same_folder
from ..recipe.diagnostics import spelt
from ..recipe.load import as_override

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..checkpoint.files import Checkpoint
    from ..engine.anatomy import Anatomy
    from ..recipe.schema import AdapterSection, Recipe
    from ..spec.model import ModelSpec
    from .state.manifest import Manifest

    Pieces = Callable[[str], Iterator[torch.Tensor]]  # yields a tensor that the checkpoint has
    # Gives the values of those of the names that no checkpoint has. It may ask for pieces of a tensor that a checkpoint has.
    Added = Callable[[Iterable[str], Pieces], Mapping[str, torch.Tensor]]

_LARGEST = 4 << 20  # bytes of adapter_config.json
_PICKLED = "adapter_model.bin"
_HINT = "name a folder with adapter_config.json and adapter_model.safetensors, as runs and peft's save_pretrained write them"
# Keys of peft that change what is computed or trained, and that a recipe does not have: at other values they are refused.
_INERT: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "lora_bias": (False,), "layer_replication": (None,), "use_qalora": (False,),
    "trainable_token_indices": (None,), "target_parameters": (None, []), "alora_invocation_tokens": (None,),
}  # fmt: skip
_LONGEST = 400  # characters of what to write
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq")  # beginnings of init_lora_weights: the base is another then, too


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
    from ..checkpoint.names import entries_for

    named = {} if recipe.adapter is None else {"base_name": base_name}
    return entries_for(anatomy.model, checkpoint, untouched=anatomy.untouched, parts=anatomy.parts, **named)


def stored_names(recipe: Recipe, model: ModelSpec, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Maps the parameters that the adapter added to what its file calls them. `entries`: of the checkpoint, by parameter."""
    if recipe.adapter is None:
        return {}
    added = [t.name for stage in model.stages for t in stage.tensors if is_added(t.name)]
    base_entries = {name: entries.get(f"{layer_of(name)}.weight") for name in added}
    return {
        name: file_name(name) if entry is None else as_beside(file_name(name), entry.name)
        for name, entry in base_entries.items()
    }


def as_started(recipe: Recipe, saved: Manifest | None) -> Recipe:
    """Returns the recipe with the keys that it leaves out of an adapter with a start: as they were for a saved run, which no
    longer needs the folder, or as the adapter that it starts from has them. Raises UsageError where that one is not there."""
    if recipe.adapter is None or recipe.adapter.start is None:
        return recipe
    if saved is None:
        return recipe.model_copy(update={"adapter": with_keys(recipe.adapter, keys_of(recipe.adapter))})
    settings = (saved.settings or {}).items()
    before = {key.removeprefix("adapter."): value for key, value in settings if key.startswith("adapter.")}
    return recipe.model_copy(update={"adapter": with_keys(recipe.adapter, before)})


def check_start(recipe: Recipe, model_dir: Path, *, say: Callable[[str], None]) -> None:
    """Raises UsageError if the recipe's adapter starts from one that is not of its kind. Says where that was trained on another
    model by name."""
    if recipe.adapter is None or recipe.adapter.start is None:
        return
    base = read_start(recipe.adapter).base_model_name_or_path
    if base and base != recipe.model.name_or_path and not is_same_folder(base, model_dir):
        say(f"note: adapter.from: it was trained on {base}; the recipe's model is {recipe.model.name_or_path}")


def starting_entries(recipe: Recipe, model: PreTrainedModel) -> dict[str, TensorEntry]:
    """Finds what every trained parameter begins with in the adapter that the recipe starts from; nothing without one."""
    if recipe.adapter is None or recipe.adapter.start is None:
        return {}
    return tensors_of(read_start(recipe.adapter), model)


def added_values(recipe: Recipe, model: PreTrainedModel) -> Added:
    """Returns what gives the values that the adapter's parameters begin with, but for those of `starting_entries`."""
    if recipe.adapter is None or recipe.adapter.start is not None:
        return lambda names, pieces: {}
    from ..adapters.injection import FirstValues

    return FirstValues(model, seed=recipe.seed).of


def configuration(recipe: Recipe, model: PreTrainedModel, model_dir: Path) -> bytes | None:
    """Returns peft's configuration of the adapter, with the targets found: what is kept beside the store."""
    if recipe.adapter is None:
        return None
    named = recipe.model.name_or_path
    is_folder = expanded(named, key="model.name_or_path").is_dir()
    base = str(model_dir.resolve()) if is_folder else named
    return config_text(config_of(model), base_model=base, revision=recipe.model.revision)


# ---- a saved adapter to start from ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedAdapter:
    """Holds keys of adapter_config.json, with the values of peft's that older files leave out."""

    folder: Path
    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: tuple[str, ...] | None = None
    target_modules: str | tuple[str, ...] | None = None
    base_model_name_or_path: str | None = None
    experts: bool = False  # no key of peft's: its tensors say so, and its patterns and targets do so no more

    @property
    def targets(self) -> dict[str, str | list[str]]:
        """Returns its own target_modules by the recipe's key; empty where it does not say."""
        targets = self.target_modules
        return {} if targets is None else {"target_modules": targets if isinstance(targets, str) else sorted(targets)}

    @property
    def keys(self) -> dict[str, Any]:
        """Returns what a recipe has to say of it, by the recipe's keys."""
        return {
            "r": self.r,
            "lora_alpha": _whole(self.lora_alpha),
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "experts": self.experts,
            "rank_pattern": self.rank_pattern or {},
            "alpha_pattern": {key: _whole(alpha) for key, alpha in (self.alpha_pattern or {}).items()},
            "modules_to_save": sorted(self.modules_to_save or ()),
        }


def _whole(number: float) -> float:
    return int(number) if number.is_integer() else number


def read_start(section: AdapterSection) -> SavedAdapter:
    """Reads the configuration of the adapter in `section.start`. Raises UsageError that names a file that is not there, or keys
    that are not the recipe's with what to write."""
    saved = _saved_adapter(section)
    pairs: dict[str, tuple[Any, Any]] = {key: (was, getattr(section, key)) for key, was in saved.keys.items()}
    pairs["modules_to_save"] = (pairs["modules_to_save"][0], sorted(section.modules_to_save))
    if other := {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}:
        unlike = "; ".join(f"adapter.{key} is {spelt(was)} there, {spelt(asked)} here" for key, (was, asked) in other.items())
        hint = _to_write({key: was for key, (was, _) in other.items()}, saved.folder)
        what = f"adapter.from: {saved.folder} is of another kind than the recipe's adapter: {unlike}"
        raise UsageError(what, hint=hint)
    return saved


def keys_of(section: AdapterSection) -> dict[str, Any]:
    """Returns what a recipe says of the adapter in `section.start`, its targets and dropout too. Raises UsageError that names a
    file that is not there."""
    saved = _saved_adapter(section)
    return {**saved.keys, "lora_dropout": saved.lora_dropout, **saved.targets}


def with_keys(section: AdapterSection, there: Mapping[str, Any]) -> AdapterSection:
    """Returns the section with those of the keys that the recipe leaves out. Raises UsageError for a value that no recipe can
    have."""
    left_out = {key: value for key, value in there.items() if key not in {*section.model_fields_set, "from"}}
    try:
        saved_section = type(section).model_validate(left_out)
    except ValidationError as error:
        flaw = error.errors()[0]
        reason = f"{'.'.join(map(str, flaw['loc']))}: {flaw['msg']}"
        hint = f"write adapter.{flaw['loc'][0]} in the recipe, or start from another adapter"
        raise UsageError(f"adapter.from: {section.start}: {shown(reason)[1:-1]}", hint=hint) from None
    return section.model_copy(update={key: getattr(saved_section, key) for key in left_out})


def _saved_adapter(section: AdapterSection) -> SavedAdapter:
    """Reads the folder in `section.start`, or `adapter` in it, as in a run's output_dir. Raises UsageError for files that are
    not there, and for keys that fuyou does not train."""
    assert section.start is not None
    asked = expanded(section.start, key="adapter.from")
    folder = next((candidate for candidate in (asked, asked / "adapter") if (candidate / ADAPTER_CONFIG_NAME).is_file()), None)
    if folder is None:
        raise UsageError(f"adapter.from: there is no {ADAPTER_CONFIG_NAME} in {asked}", hint=_HINT)
    if not (folder / ADAPTER_NAME).is_file():
        pickled = (folder / _PICKLED).is_file()
        why = f"only {_PICKLED}, which can run code as it is read" if pickled else f"no {ADAPTER_NAME}"
        hint = "load it with peft on an isolated machine and save it anew: it writes safetensors" if pickled else _HINT
        raise UsageError(f"adapter.from: {folder} has {why}", hint=hint)
    path = inside(folder, ADAPTER_CONFIG_NAME)
    content = read_object(path, limit=_LARGEST, hint=_HINT)
    merge = f"merge {folder} into its model with peft (merge_and_unload), and train from that (model.name_or_path)"
    for key, values in _INERT.items():
        if content.get(key, values[0]) not in values:
            raise UsageError(f"{path}: {key} is {shown(str(content[key]))}, which fuyou does not train", hint=merge)
    if str(begun := content.get("init_lora_weights")).lower().startswith(_CHANGES_THE_MODEL):
        what = f"{path}: init_lora_weights is {shown(str(begun))}, so it belongs to weights that it has changed itself"
        raise UsageError(what, hint=merge)
    keys = [key.name for key in fields(SavedAdapter) if key.name in content and key.name not in ("folder", "experts")]
    try:
        saved = from_json(SavedAdapter, {"folder": folder, **{key: content[key] for key in keys}}, defaults=True)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=_HINT) from None
    in_experts = targets_in_experts(parse_file(inside(folder, ADAPTER_NAME)).entries)
    if not in_experts:
        return saved
    targets = saved.target_modules
    if not isinstance(targets, str):
        targets = tuple(name for name in targets or () if name.rpartition(".")[2] not in in_experts)
    patterns = {key: alpha for key, alpha in (saved.alpha_pattern or {}).items() if key != FUSED_ALPHA}
    return replace(saved, experts=True, target_modules=targets, alpha_pattern=patterns)


def _to_write(values: Mapping[str, Any], folder: Path) -> str:
    """Says how a recipe has these values of an adapter's keys."""
    words = [as_override(f"adapter.{key}", value) for key, value in values.items()]
    text = " ".join(
        word if len(word) < _LONGEST else f"adapter.{key} of {ADAPTER_CONFIG_NAME}"
        for key, word in zip(values, words, strict=True)
    )
    return f"write {text}, as {folder} was trained"


def tensors_of(start: SavedAdapter, model: PreTrainedModel) -> dict[str, TensorEntry]:
    """Finds the tensor of every trained parameter of `model`, into which the recipe's adapter was put. Raises UsageError where
    they are not the same ones."""
    from ..engine.experts import named_parts

    weights = inside(start.folder, ADAPTER_NAME)
    stored = {neutral(key): entry for key, entry in parse_file(weights).entries.items()}
    parts = named_parts(model)
    trained = {
        neutral(file_name(part)): (part, shape)
        for name, p in model.named_parameters()
        if p.requires_grad
        for part, shape, *_ in parts.get(name) or ((name, tuple(p.shape)),)
    }
    targets = _to_write(start.targets, start.folder) if start.targets.get("target_modules") else ""
    if missing := [name for name in trained if name not in stored]:
        what = f"adapter.from: {weights} lacks {name_list(missing)}, which the recipe trains"
        raise UsageError(what, hint=targets or "leave these layers out of adapter.target_modules")
    if extra := [name for name in stored if name not in trained]:
        what = f"adapter.from: {weights} has {name_list(extra)}, which the recipe does not train"
        raise UsageError(what, hint=targets or "name these layers in adapter.target_modules")
    for name, (_, shape) in trained.items():
        if stored[name].shape != shape:
            what = f"adapter.from: {weights}: {shown(name)} is {stored[name].shape}, but {shape} for the recipe's model"
            raise UsageError(what, hint="name the model that it was trained on (model.name_or_path)")
    return {model_name: stored[name] for name, (model_name, _) in trained.items()}
