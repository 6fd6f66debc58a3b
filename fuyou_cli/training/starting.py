"""Reads a saved adapter that a run starts from: peft's two files, which anybody may have written.

What the recipe leaves out is as it has it. What the recipe says has to be its own keys, and its tensors those that the recipe
trains: so what continues is what peft continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..adapters.adapter_names import FUSED_ALPHA, file_name, neutral, targets_in_experts
from ..checkpoint.companions import ADAPTER_CONFIG_NAME
from ..checkpoint.files import ADAPTER_NAME, inside, name_list
from ..checkpoint.header import TensorEntry, parse_file
from ..core.errors import UsageError
from ..core.json_files import read_object, shown
from ..core.paths import expanded
from ..core.typed import from_json
from ..recipe.diagnostics import spelt
from ..recipe.load import as_override

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..recipe.schema import AdapterSection

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """Holds keys of adapter_config.json, with the values of peft's that older files leave out."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Holds a saved adapter whose keys are the recipe's. `targets`: its own target_modules."""

    weights: Path
    targets: str | list[str] | None
    base_model: str


def read_start(section: AdapterSection) -> Start:
    """Reads the configuration of the adapter in `section.start`. Raises UsageError that names a file that is not there, or keys
    that are not the recipe's with what to write."""
    assert section.start is not None
    folder = _folder(section.start)
    written = _written(folder)
    _compare(written, section, folder)
    targets = (
        written.target_modules if isinstance(written.target_modules, str) else sorted(written.target_modules or ()) or None
    )
    return Start(weights=inside(folder, ADAPTER_NAME), targets=targets, base_model=written.base_model_name_or_path or "")


def keys_of(section: AdapterSection) -> dict[str, Any]:
    """Returns what a recipe says of the adapter in `section.start`, its targets and dropout too. Raises UsageError that names a
    file that is not there."""
    assert section.start is not None
    written = _written(_folder(section.start))
    targets = written.target_modules
    named = {} if targets is None else {"target_modules": targets if isinstance(targets, str) else sorted(targets)}
    return {**_keys(written), "lora_dropout": written.lora_dropout, **named}


def with_keys(section: AdapterSection, there: Mapping[str, Any]) -> AdapterSection:
    """Returns the section with those of the keys that the recipe leaves out. Raises UsageError for a value that no recipe can
    have."""
    left_out = {key: value for key, value in there.items() if key not in {*section.model_fields_set, "from"}}
    try:
        taken = type(section).model_validate(left_out)
    except ValidationError as error:
        flaw = error.errors()[0]
        told = f"{'.'.join(map(str, flaw['loc']))}: {flaw['msg']}"
        hint = f"write adapter.{flaw['loc'][0]} in the recipe, or start from another adapter"
        raise UsageError(f"adapter.from: {section.start}: {shown(told)[1:-1]}", hint=hint) from None
    return section.model_copy(update={key: getattr(taken, key) for key in left_out})


def _written(folder: Path) -> _Written:
    """Reads the configuration in a folder. Raises UsageError for keys that fuyou does not train."""
    path = inside(folder, ADAPTER_CONFIG_NAME)
    content = read_object(path, limit=_LARGEST, hint=_HINT)
    for key, values in _INERT.items():
        if content.get(key, values[0]) not in values:
            raise UsageError(f"{path}: {key} is {shown(str(content[key]))}, which fuyou does not train", hint=_merge(folder))
    if str(begun := content.get("init_lora_weights")).lower().startswith(_CHANGES_THE_MODEL):
        what = f"{path}: init_lora_weights is {shown(str(begun))}, so it belongs to weights that it has changed itself"
        raise UsageError(what, hint=_merge(folder))
    try:
        kept = {key.name: content[key.name] for key in fields(_Written) if key.name in content and key.name != "experts"}
        found: _Written = from_json(_Written, kept, defaults=True)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=_HINT) from None
    of_experts = targets_in_experts(parse_file(inside(folder, ADAPTER_NAME)).entries)
    if not of_experts:
        return found
    targets = found.target_modules
    if not isinstance(targets, str):
        targets = tuple(one for one in targets or () if one.rpartition(".")[2] not in of_experts)
    patterns = {key: one for key, one in (found.alpha_pattern or {}).items() if key != FUSED_ALPHA}
    return replace(found, experts=True, target_modules=targets, alpha_pattern=patterns)


def _folder(named: str) -> Path:
    """Returns the folder of both files: the one named, or `adapter` in a run's output_dir."""
    asked = expanded(named, key="adapter.from")
    folder = next((one for one in (asked, asked / "adapter") if (one / ADAPTER_CONFIG_NAME).is_file()), None)
    if folder is None:
        raise UsageError(f"adapter.from: there is no {ADAPTER_CONFIG_NAME} in {asked}", hint=_HINT)
    if not (folder / ADAPTER_NAME).is_file():
        pickled = (folder / _PICKLED).is_file()
        why = f"only {_PICKLED}, which can run code as it is read" if pickled else f"no {ADAPTER_NAME}"
        hint = "load it with peft on an isolated machine and save it anew: it writes safetensors" if pickled else _HINT
        raise UsageError(f"adapter.from: {folder} has {why}", hint=hint)
    return folder


def _to_write(values: Mapping[str, Any], folder: Path) -> str:
    """Says how a recipe has these values of an adapter's keys."""
    words = [as_override(f"adapter.{key}", value) for key, value in values.items()]
    text = " ".join(
        word if len(word) < _LONGEST else f"adapter.{key} of {ADAPTER_CONFIG_NAME}"
        for key, word in zip(values, words, strict=True)
    )
    return f"write {text}, as {folder} was trained"


def _merge(folder: Path) -> str:
    return f"merge {folder} into its model with peft (merge_and_unload), and train from that (model.name_or_path)"


def _compare(written: _Written, section: AdapterSection, folder: Path) -> None:
    """Raises UsageError that names every key whose value is not the recipe's."""
    pairs: dict[str, tuple[Any, Any]] = {key: (was, getattr(section, key)) for key, was in _keys(written).items()}
    pairs["modules_to_save"] = (pairs["modules_to_save"][0], sorted(section.modules_to_save))
    if other := {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}:
        told = "; ".join(f"adapter.{key} is {spelt(was)} there, {spelt(here)} here" for key, (was, here) in other.items())
        hint = _to_write({key: was for key, (was, _) in other.items()}, folder)
        raise UsageError(f"adapter.from: {folder} is of another kind than the recipe's adapter: {told}", hint=hint)


def _keys(written: _Written) -> dict[str, Any]:
    """Returns what a recipe has to say of an adapter, by the recipe's keys."""
    return {
        "r": written.r,
        "lora_alpha": _whole(written.lora_alpha),
        "use_rslora": written.use_rslora,
        "use_dora": written.use_dora,
        "experts": written.experts,
        "rank_pattern": written.rank_pattern or {},
        "alpha_pattern": {key: _whole(one) for key, one in (written.alpha_pattern or {}).items()},
        "modules_to_save": sorted(written.modules_to_save or ()),
    }


def _whole(number: float) -> float:
    return int(number) if number.is_integer() else number


def tensors_of(start: Start, model: PreTrainedModel) -> dict[str, TensorEntry]:
    """Finds the tensor of every trained parameter of `model`, into which the recipe's adapter was put. Raises UsageError where
    they are not the same ones."""
    from ..engine.experts import named_parts

    found = {neutral(key): entry for key, entry in parse_file(start.weights).entries.items()}
    parts = named_parts(model)
    trained = {
        neutral(file_name(part)): (part, shape)
        for name, p in model.named_parameters()
        if p.requires_grad
        for part, shape, *_ in parts.get(name) or ((name, tuple(p.shape)),)
    }
    targets = "" if start.targets is None else _to_write({"target_modules": start.targets}, start.weights.parent)
    if missing := [name for name in trained if name not in found]:
        what = f"adapter.from: {start.weights} lacks {name_list(missing)}, which the recipe trains"
        raise UsageError(what, hint=targets or "leave these layers out of adapter.target_modules")
    if extra := [name for name in found if name not in trained]:
        what = f"adapter.from: {start.weights} has {name_list(extra)}, which the recipe does not train"
        raise UsageError(what, hint=targets or "name these layers in adapter.target_modules")
    for name, (_, shape) in trained.items():
        if found[name].shape != shape:
            what = f"adapter.from: {start.weights}: {shown(name)} is {found[name].shape}, but {shape} for the recipe's model"
            raise UsageError(what, hint="name the model that it was trained on (model.name_or_path)")
    return {model_name: found[name] for name, (model_name, _) in trained.items()}
