"""Finds the tensor of a file for every name of a model's state dict.

The two differ in few ways, all declared by the model: the base model's prefix may be there or not (GPT-2 on the hub has
no `transformer.`), tied weights may be stored once or twice, and an architecture may have renamed its parts since the
file was written. Whatever remains is an error, and all of them are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import shown

from .header import TensorEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINABLE_DTYPES = ("float32", "bfloat16", "float16")
LISTED = 20  # names of one kind in a message

# Constants that old versions of the model classes saved beside the weights and that are computed today.
_HARMLESS = re.compile(
    r"(^|\.)(rotary_emb\.(original_)?inv_freq|rotary_emb\.(cos|sin)_cached|attn\.(masked_)?bias"
    r"|attention\.(masked_)?bias|masked_bias|position_ids|embed_scale)$"
)
_QUANTISED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|weight_packed|absmax|quant_state.*)$")


@dataclass(kw_only=True, slots=True)
class _Assignment:
    """What the keys of the files stand for, and everything that is wrong with them."""

    found: dict[str, TensorEntry] = field(default_factory=dict)  # by name of the model
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)


def match(
    model_names: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, TensorEntry],
    *,
    base_model_prefix: str,
    tied: Mapping[str, str],
    renames: Mapping[str, str] | None = None,
) -> dict[str, TensorEntry]:
    """The file's tensor for every name in `model_names` (name -> shape), in that order.

    `tied` maps a name to the one whose weights it shares: both get the same entry, whichever of the two the file holds.
    `renames` maps a file's key to what the architecture calls it today. The entry's own `name` stays the key in the
    file, which is also the right key to export under. Raises UsageError with every missing, unexpected, misshapen,
    doubly stored or untrainable tensor.
    """
    assignment = _assign(model_names, entries, base_model_prefix=base_model_prefix, tied=tied, renames=renames or {})
    matched: dict[str, TensorEntry] = {}
    for name, shape in model_names.items():
        entry = next((assignment.found[one] for one in _same_weights(name, tied) if one in assignment.found), None)
        if entry is None:
            assignment.missing.append(shown(name))
            continue
        matched[name] = entry
        if entry.shape != tuple(shape):
            stored = f" (stored as {shown(entry.name)})" if entry.name != name else ""
            assignment.misshapen.append(f"{shown(name)}{stored}: {list(entry.shape)} in the file, {list(shape)} needed")
    _raise_if_flawed(assignment)
    return matched


def tied_copies(
    entries: Mapping[str, TensorEntry],
    *,
    base_model_prefix: str,
    tied: Mapping[str, str],
    renames: Mapping[str, str] | None = None,
) -> list[tuple[TensorEntry, TensorEntry]]:
    """Pairs of stored tensors that the model computes with as one. They have to hold the same values."""
    names = {name: () for name in (*tied, *tied.values())}
    found = _assign(names, entries, base_model_prefix=base_model_prefix, tied=tied, renames=renames or {}).found
    pairs: list[tuple[TensorEntry, TensorEntry]] = []
    for owner in dict.fromkeys(_owner(name, tied) for name in tied):
        stored = [found[one] for one in _same_weights(owner, tied) if one in found]
        pairs += [(stored[0], copy) for copy in stored[1:]]
    return pairs


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Name -> name of the same weights under which they are stored once; empty for a model that ties nothing."""
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name and name not in tied and owner not in tied:
            tied[name] = owner
    return tied


def architecture_renames(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """File key -> today's name, for the keys that the architecture's own conversion table renames.

    Tensors that the table joins, cuts or transposes (per-expert weights the model holds fused) are refused by name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    transforms = get_model_conversion_mapping(model)
    renames: dict[str, str] = {}
    converted: list[str] = []
    for key in sorted(keys):  # in this order, because some renames depend on the keys seen before
        name = key
        for transform in transforms:
            if isinstance(transform, WeightRenaming):
                name, _ = transform.rename_source_key(name)
        if any(
            not isinstance(transform, WeightRenaming) and transform.rename_source_key(name)[1] is not None
            for transform in transforms
        ):
            converted.append(shown(key))
        if name != key:
            renames[key] = name
    if converted:
        raise UsageError(
            f"{type(model).__name__} keeps these tensors in another form than the file: {_listed(converted)}",
            hint="Joining or cutting stored tensors (mixtures of experts) is not supported yet: use a dense model.",
        )
    return renames


def _owner(name: str, tied: Mapping[str, str]) -> str:
    for _ in range(len(tied)):
        if name not in tied:
            break
        name = tied[name]
    return name


def _same_weights(name: str, tied: Mapping[str, str]) -> list[str]:
    """Every name of the same weights: the owner, then this one, then the others."""
    owner = _owner(name, tied)
    return list(dict.fromkeys([owner, name, *(other for other in tied if _owner(other, tied) == owner)]))


def _assign(
    model_names: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, TensorEntry],
    *,
    base_model_prefix: str,
    tied: Mapping[str, str],
    renames: Mapping[str, str],
) -> _Assignment:
    known = {*model_names, *tied, *tied.values()}
    prefix = f"{base_model_prefix}." if base_model_prefix else ""
    assignment = _Assignment()
    for key, entry in entries.items():
        name = renames.get(key, key)
        candidates = (name, prefix + name, name.removeprefix(prefix))
        target = next((candidate for candidate in candidates if candidate in known), None)
        if target is None:
            if not _HARMLESS.search(key):
                assignment.unexpected.append(shown(key))
            continue
        if target in assignment.found:
            other = assignment.found[target].name
            assignment.ambiguous.append(f"{shown(other)} and {shown(key)} are both {shown(target)}")
            continue
        assignment.found[target] = entry
        if entry.dtype not in TRAINABLE_DTYPES:
            assignment.wrong_dtype.append(f"{shown(key)} is {entry.dtype}")
    return assignment


def _raise_if_flawed(assignment: _Assignment) -> None:
    sections = (
        ("missing", assignment.missing),
        ("not part of this model", assignment.unexpected),
        ("of another shape", assignment.misshapen),
        ("stored twice", assignment.ambiguous),
        ("of a dtype that cannot be trained", assignment.wrong_dtype),
    )
    flaws = [f"{len(names)} {what}: {_listed(names)}" for what, names in sections if names]
    if not flaws:
        return
    hint = "config.json and the weights do not belong together: check name_or_path and revision."
    if any(_QUANTISED.search(name.strip("'")) for name in assignment.unexpected):
        hint = "The weights are quantised: fine-tune the model they were made from."
    raise UsageError("the checkpoint does not fit the model:\n  " + "\n  ".join(flaws), hint=hint)


def _listed(names: list[str]) -> str:
    listed = ", ".join(names[:LISTED])
    return listed if len(names) <= LISTED else f"{listed} and {len(names) - LISTED} more"
