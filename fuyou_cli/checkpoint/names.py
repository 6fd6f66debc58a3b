"""Finds a file's tensor for every name of a model's state dict, and checks everything before the first weight is used.

File and model may differ in three ways, all declared by the model: the base model's prefix may be missing (GPT-2 on the hub has
no `transformer.`), tied weights may be stored once or twice, and the architecture may have renamed parts since the file was
written. Every other difference is an error, and all errors are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import shown

from .files import Checkpoint
from .reader import TensorEntry, TensorReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINABLE_DTYPES = ("float32", "bfloat16", "float16")
LISTED = 20  # most names of one kind in a message

# Constants that old model classes saved beside the weights; today they are computed.
_HARMLESS = re.compile(
    r"(^|\.)(rotary_emb\.(original_)?inv_freq|rotary_emb\.(cos|sin)_cached|attn\.(masked_)?bias"
    r"|attention\.(masked_)?bias|masked_bias|position_ids|embed_scale)$"
)
_QUANTISED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|weight_packed|absmax|quant_state.*|SCB)$")
_FLAWS = ("missing", "not part of this model", "of another shape", "stored twice", "of a dtype that cannot be trained")

_NO_PARTS: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]] = MappingProxyType({})

_NOTHING = re.compile(r"(?!)")
Shape = tuple[int, ...]
Flaws = dict[str, list[str]]  # kind of flaw, from _FLAWS -> names that have it


def entries_for(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    *,
    base_name: Callable[[str], str | None] = lambda name: name,
    untouched: Collection[str] = (),
    parts: Mapping[str, Sequence[tuple[str, Shape]]] = _NO_PARTS,
) -> dict[str, TensorEntry]:
    """Finds the file's tensor for every name of the model's state dict. The model may be on the meta device.

    base_name: gives the name that the model without its adapter has for it; None for a tensor of the adapter, which no file
    has. untouched: parts of the model that nothing is computed with, so that their values do not matter. parts: names and
    shapes of what files have instead of one tensor of the model, as matrices of each expert.

    Tensors that the model's class leaves unread by name, as layers that predict further tokens, are found under their own keys
    too: nothing is computed with them, and an export has them as they are.

    The model's buffers get the values that the file has for them. Names of tied weights get the same entry: where a tied tensor
    is stored twice, both copies must be equal, because training keeps one. Raises UsageError naming every tensor that does not
    fit.
    """
    shapes: dict[str, Shape] = {}
    for name, tensor in model.state_dict().items():
        shapes |= parts.get(name) or {name: tuple(tensor.shape)}
    named = {name: base for name in shapes if (base := base_name(name)) is not None}
    names = {base: shapes[name] for name, base in named.items()}
    renames = architecture_renames(model, checkpoint.entries, parts={part for pairs in parts.values() for part, _ in pairs})
    matched, copies = match(
        names, checkpoint.entries, base_model_prefix=model.base_model_prefix, tied=tied_names(model), renames=renames,
        unread=_unread(model),
    )  # fmt: skip
    carried = {key: entry for key, entry in matched.items() if key not in names}
    with TensorReader() as reader:
        for first, second in copies:
            if not reader.equal(first, second):
                raise UsageError(
                    f"{checkpoint.directory}: {shown(first.name)} and {shown(second.name)} are tied in the model "
                    "but differ in the file",
                    hint='set "tie_word_embeddings": false in config.json if they are meant to differ',
                )
        by_name = {name: matched[base] for name, base in named.items()}
        for name, buffer in model.named_buffers(remove_duplicate=False):  # get the values that the file has for them
            if name in by_name and not is_in(untouched, name) and not buffer.is_meta:
                buffer.copy_(reader.read(by_name[name]))
    return by_name | carried


def _unread(model: PreTrainedModel) -> re.Pattern[str]:
    """Returns what matches the keys that `from_pretrained` leaves unread without a word."""
    patterns = [pattern for pattern in model._keys_to_ignore_on_load_unexpected or () if pattern]
    return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns)) or r"(?!)")


def is_in(parts: Iterable[str], name: str) -> bool:
    """Whether a parameter or buffer of this name is, or is in, one of these parts of a model."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def match(
    model_names: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, TensorEntry],
    *,
    base_model_prefix: str,
    tied: Mapping[str, str],
    renames: Mapping[str, str] | None = None,
    unread: re.Pattern[str] = _NOTHING,
) -> tuple[dict[str, TensorEntry], list[tuple[TensorEntry, TensorEntry]]]:
    """Finds the file's tensor for every name in `model_names` (name -> shape), in that order.

    Also returns pairs of stored tensors that the model uses as one; both must hold the same values.

    `tied` maps a name to the one whose weights it shares: both get the same entry, whichever of the two the file holds.
    `unread` finds keys that stand for nothing in the model: they are returned last, under their own names.
    `renames` maps a file's key to the architecture's name for it today. The entry's own `name` stays the key in the file;
    exports use it too. Raises UsageError with every tensor that is missing, unexpected, of a wrong shape, stored twice or
    untrainable.
    """
    prefix = f"{base_model_prefix}." if base_model_prefix else ""
    known, carried = {*model_names, *tied, *tied.values()}, dict[str, TensorEntry]()
    for key, value in entries.items():
        if unread.search(key) and not _HARMLESS.search(key) and _target(known, prefix, renames or {}, key) is None:
            carried[key] = value
    assigned, flaws = _assign(known, {k: e for k, e in entries.items() if k not in carried}, prefix, renames or {})
    matched: dict[str, TensorEntry] = {}
    for name, shape in model_names.items():
        entry = next((assigned[same] for same in _same_weights(name, tied) if same in assigned), None)
        if entry is None:
            flaws["missing"].append(shown(name))
            continue
        matched[name] = entry
        if entry.shape != tuple(shape):
            under = f" (stored as {shown(entry.name)})" if entry.name != name else ""
            flaws["of another shape"].append(f"{shown(name)}{under}: {list(entry.shape)} in the file, {list(shape)} needed")
    _refuse(flaws)
    copies = []
    for owner in dict.fromkeys(_owner(name, tied) for name in tied):
        stored = [assigned[same] for same in _same_weights(owner, tied) if same in assigned]
        copies += [(stored[0], copy) for copy in stored[1:]]
    return matched | carried, copies


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Maps each tied name to the name that its weights are stored under; empty for a model that ties nothing."""
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name and name not in tied and owner not in tied:
            tied[name] = owner
    return tied


def architecture_renames(model: PreTrainedModel, keys: Iterable[str], *, parts: Collection[str] = ()) -> dict[str, str]:
    """Maps a file's key to today's name, for the keys that the architecture's own conversion table renames. `parts`: names that
    it would join to others, but that are used as they are.

    Raises UsageError naming the tensors that the table would join, cut or transpose (such as fused weights of experts).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    transforms = get_model_conversion_mapping(model)
    renaming = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converting = [transform for transform in transforms if not isinstance(transform, WeightRenaming)]
    renames: dict[str, str] = {}
    converted: list[str] = []
    for key in sorted(keys):  # sorted: some renames depend on the keys seen before
        name = key
        for transform in renaming:
            name, _ = transform.rename_source_key(name)
        if name not in parts and any(transform.rename_source_key(name)[1] is not None for transform in converting):
            converted.append(shown(key))
        if name != key:
            renames[key] = name
    if converted:
        raise UsageError(
            f"{type(model).__name__} stores these tensors in a different form than the file: {_listed(converted)}",
            hint="fuyou cannot join or cut stored tensors yet: take a model whose files hold its tensors as they are",
        )
    return renames


def _owner(name: str, tied: Mapping[str, str]) -> str:
    for _ in range(len(tied)):
        if name not in tied:
            break
        name = tied[name]
    return name


def _same_weights(name: str, tied: Mapping[str, str]) -> list[str]:
    """Lists every name of the same weights: first the owner, then this one, then the others."""
    owner = _owner(name, tied)
    return list(dict.fromkeys([owner, name, *(other for other in tied if _owner(other, tied) == owner)]))


def _assign(
    known: set[str], entries: Mapping[str, TensorEntry], prefix: str, renames: Mapping[str, str]
) -> tuple[dict[str, TensorEntry], Flaws]:
    """Finds the model's name (from `known`) for each key of the files, and every flaw."""
    assigned: dict[str, TensorEntry] = {}
    flaws: Flaws = {kind: [] for kind in _FLAWS}
    for key, entry in entries.items():
        target = _target(known, prefix, renames, key)
        if target is None:
            if not _HARMLESS.search(key):
                flaws["not part of this model"].append(shown(key))
        elif target in assigned:
            flaws["stored twice"].append(f"{shown(assigned[target].name)} and {shown(key)} both stand for {shown(target)}")
        else:
            assigned[target] = entry
            if entry.dtype not in TRAINABLE_DTYPES and entry.scales is None:
                flaws["of a dtype that cannot be trained"].append(f"{shown(key)} is {entry.dtype}")
    return assigned, flaws


def _target(known: Collection[str], prefix: str, renames: Mapping[str, str], key: str) -> str | None:
    """Returns the model's name (from `known`) for a key of the files, None without one."""
    name = renames.get(key, key)
    return next((candidate for candidate in (name, prefix + name, name.removeprefix(prefix)) if candidate in known), None)


def _refuse(flaws: Flaws) -> None:
    lines = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in flaws.items() if names]
    if not lines:
        return
    hint = "config.json and the weights do not belong together: check name_or_path and revision"
    if any(_QUANTISED.search(name.strip("'")) for name in flaws["not part of this model"]):
        hint = "the weights are quantised: fine-tune the original model instead"
    raise UsageError("the checkpoint does not fit the model:\n  " + "\n  ".join(lines), hint=hint)


def _listed(names: list[str]) -> str:
    listed = ", ".join(names[:LISTED])
    return listed if len(names) <= LISTED else f"{listed} and {len(names) - LISTED} more"
