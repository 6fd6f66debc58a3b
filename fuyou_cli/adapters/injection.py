"""Puts peft's LoRA layers into a skeleton: peft decides which modules are targets, and its layers compute.

Nothing is allocated: the layers' parameters are on the meta device too, in the dtype of the weights beside them. Afterwards a
parameter requires a gradient exactly if it is to be trained. What they begin with is given stage after stage (`FirstValues`),
so that memory stays bounded.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..core.errors import UsageError
from ..engine.anatomy import beside_text, blocks_of
from ..engine.experts import LOW_RANK, LowRank, add_low_rank, is_experts, named_parts
from ..engine.skeleton import LIBRARY_ERRORS, said
from ..recipe.schema import AdapterSection
from .adapter_names import ADAPTER, OF_EXPERTS, alpha_of_fused, file_name, is_added, lora_names
from .merging import LoraWeights

_SAVED = "it names modules by the end of their names, as norm or lm_head"


def inject(model: PreTrainedModel, section: AdapterSection) -> LoraConfig:
    """Puts LoRA layers into `model` in place, and freezes all other parameters but those of `modules_to_save`.

    Returns peft's configuration with the targets it found. Raises UsageError where nothing matches, or what matches cannot be
    adapted."""
    other_parts = list(beside_text(model).values())
    blocks, tied = blocks_of(model), _tied(model)
    linear = _linear_names(blocks)
    config = _config(section, other_parts, _targets(section, model, blocks))
    try:
        with warnings.catch_warnings(action="ignore"):  # fan_in_fan_out peft sets right, and the rest is refused below
            inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    except LIBRARY_ERRORS as error:
        left = [name for name in linear if f"'{name}'" not in str(error)]
        such = f"write layers that can be in adapter.target_modules, such as {', '.join(left)}"
        such += "; none inside adapter.modules_to_save can" if section.modules_to_save else ""
        raise UsageError(
            f"adapter: {type(model).__name__} cannot be adapted so: {said(error)}",
            hint=such if left else "remove `adapter` to train in full, with `freeze` for layers that are not to change",
        ) from error
    inside = {id(module) for block in blocks for module in block.modules()}
    for name, layer in lora_layers(model):
        if is_experts(layer.get_base_layer()):
            raise UsageError(
                f"adapter.target_modules: peft takes these names for the experts of {name}",
                hint="leave out the names that experts have in files, such as gate_proj, up_proj and down_proj; "
                "adapter.experts=true gives each expert LoRA",
            )
        if not isinstance(layer, Linear) or id(layer) not in inside:
            shared = id(layer.get_base_layer().weight) in tied
            raise UsageError(
                f"adapter.target_modules: {name} is not a linear layer of a decoder block, so it cannot have LoRA yet",
                hint="leave it out" if shared else "leave it out; adapter.modules_to_save trains it in full",
            )
        dtype = layer.get_base_layer().weight.dtype
        for name in (*layer.adapter_layer_names, "lora_magnitude_vector"):
            getattr(layer, name).to(dtype)  # they are computed with together
    if lost := sorted(_lost_by_peft(model, [name for name, _ in lora_layers(model)])):
        raise UsageError(f"adapter.target_modules: peft does not find LoRA of {lost[0]} when it loads it", hint="leave it out")
    in_full = _train_in_full(model, tied)
    if wrong := [name for name in in_full if f"{name}.".startswith(tuple(f"{part}." for part in other_parts))]:
        raise UsageError(
            f"adapter.modules_to_save: {wrong[0]} does not run on text, so it cannot be trained",
            hint="write more of the name of the module that is meant, as language_model.norm",
        )
    _refuse_unused(section, [name for name, _ in lora_layers(model)], in_full)
    if section.experts:
        _adapt_experts(model, section, config)
    return config


def _adapt_experts(model: PreTrainedModel, section: AdapterSection, config: LoraConfig) -> None:
    """Gives A and B to each matrix of the experts, and names these in peft's configuration, which joins them when it loads.
    Raises UsageError where that cannot be."""
    family, refused = type(model).__name__, "leave adapter.experts false"
    modules = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not modules:
        raise UsageError(f"adapter.experts: {family} has no experts", hint=refused)
    parts = named_parts(model)
    matrices = {f"{name}.{own}" for name, module in modules.items() for own, p in module.named_parameters() if p.dim() > 2}
    if whole := sorted(matrices - parts.keys()):
        what = f"adapter.experts: files of {family} have one tensor for all experts ({whole[0]}), not one for each"
        raise UsageError(f"{what}: they cannot have LoRA yet", hint=refused)
    names = {part.split(".")[-2] for own in matrices for part, *_ in parts[own]}
    if not names <= _joined_by_peft(model):
        raise UsageError(f"adapter.experts: peft cannot load an adapter of the experts of {family}", hint=refused)
    patterns = (*section.rank_pattern, *section.alpha_pattern)
    if wrong := [pattern for pattern in patterns if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in matrices)]:
        key = "rank_pattern" if wrong[0] in section.rank_pattern else "alpha_pattern"
        raise UsageError(
            f"adapter.{key}: `{wrong[0]}` matches experts, which all have adapter.r and lora_alpha", hint="narrow it"
        )
    scaling = section.lora_alpha / (math.sqrt(section.r) if section.use_rslora else section.r)
    for name, module in modules.items():
        own = {own: parts[f"{name}.{own}"] for own, _ in module.named_parameters() if f"{name}.{own}" in parts}
        add_low_rank(module, own, section.r, scaling, OF_EXPERTS)
    config.target_modules = {*(config.target_modules or ()), *names}
    config.alpha_pattern = {**alpha_of_fused(section.lora_alpha, use_rslora=section.use_rslora), **config.alpha_pattern}


def _joined_by_peft(model: PreTrainedModel) -> set[str]:
    """Returns the names of experts' matrices in files that peft puts together again for this family."""
    from peft.utils import transformers_weight_conversion as known

    like = known._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type, "")
    return set(known._MOE_TARGET_MODULE_MAPPING.get(like, ()))


def _lost_by_peft(model: PreTrainedModel, layers: Iterable[str]) -> set[str]:
    """Returns the layers whose A and B peft would not find again: of some families it gives what it loads other names."""
    from peft.utils import transformers_weight_conversion as known

    keys = {file_name(f"{layer}.lora_A.{ADAPTER}.weight"): layer for layer in layers}
    nothing = torch.empty(1, 1)
    converted = known.convert_peft_adapter_state_dict_for_transformers(
        model, LoraConfig(), dict.fromkeys(keys, nothing), ADAPTER
    )
    return {layer for key, layer in keys.items() if key not in converted}


def _config(section: AdapterSection, other_parts: list[str], targets: str | list[str]) -> LoraConfig:
    """Returns peft's configuration for the text part of a model; peft leaves `other_parts` out, whoever loads it.
    `targets`: see `_targets`."""
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=targets,
        exclude_modules=rf"({'|'.join(map(re.escape, other_parts))})(\..*)?" if other_parts else None,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        modules_to_save=list(section.modules_to_save) or None,
        rank_pattern=dict(section.rank_pattern),
        alpha_pattern=dict(section.alpha_pattern),
    )


def _targets(section: AdapterSection, model: PreTrainedModel, blocks: Iterable[nn.Module]) -> str | list[str]:
    """Returns the recipe's target modules. In a mixture all-linear means the linear layers of the blocks: peft's own meaning
    has routers as well. Layers with names that peft, whoever loads the adapter, takes for the experts or for
    modules outside the blocks are left out."""
    targets = section.target_modules
    inside = [(name, module) for block in blocks for name, module in block.named_modules()]
    if targets != "all-linear" or not any(is_experts(module) for _, module in inside):
        return targets if isinstance(targets, str) else list(targets)
    routers = set()
    for _, module in inside:
        experts = {len(weight) for child in module.children() if is_experts(child) for weight in child.parameters()}
        if experts:
            routers |= {p for p in module.modules() if isinstance(p, nn.Linear) and p.out_features in (1, *experts)}
    linear = [(name.rpartition(".")[2], part) for name, part in inside if isinstance(part, (nn.Linear, Conv1D))]
    whole = {part: name for name, part in model.named_modules()}
    lost = _lost_by_peft(model, [whole[part] for _, part in linear])
    left = {name for name, part in linear if part in routers or whole[part] in lost}
    blockwise = {part for _, part in inside}
    apart = {part for beside in beside_text(model) for part in beside.modules()}
    outside = {name.rpartition(".")[2] for part, name in whole.items() if part not in blockwise | apart}
    return sorted({name for name, _ in linear} - left - outside - _joined_by_peft(model))


def _linear_names(blocks: Iterable[nn.Module]) -> list[str]:
    """Returns the names by which a recipe calls linear layers of decoder blocks."""
    every = (name for block in blocks for name, part in block.named_modules() if isinstance(part, (nn.Linear, Conv1D)))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in every))


def _tied(model: PreTrainedModel) -> set[int]:
    """Returns the identities of parameters that several modules hold."""
    held = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    return {pointer for pointer in held if held.count(pointer) > 1} if len(set(held)) < len(held) else set()


def lora_layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    """Lists the LoRA layers by name, in the order in which peft makes them."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _refuse_unused(section: AdapterSection, adapted: list[str], in_full: list[str]) -> None:
    """Raises UsageError for a name or pattern of the recipe that no module has, which peft would pass over."""
    targets = section.target_modules
    unused = {
        "target_modules": [] if isinstance(targets, str) else _unused(targets, adapted, r"(.*\.)?", re.escape),
        "modules_to_save": _unused(section.modules_to_save, in_full, ".*", re.escape),
        "rank_pattern": _unused(section.rank_pattern, adapted, r"(.*\.)?", str),
        "alpha_pattern": _unused(section.alpha_pattern, adapted, r"(.*\.)?", str),
    }
    for key, names in unused.items():
        if names:
            raise UsageError(
                f"adapter.{key}: matches nothing: {', '.join(names)}",
                hint="leave it out, or correct it: "
                + (_SAVED if key == "modules_to_save" else f"layers with LoRA are {', '.join(adapted[:8])}, ..."),
            )


def _unused(written: Iterable[str], names: list[str], before: str, spelt: Callable[[str], str]) -> list[str]:
    return [pattern for pattern in written if not any(re.fullmatch(f"{before}({spelt(pattern)})", name) for name in names)]


def _train_in_full(model: PreTrainedModel, tied: set[int]) -> list[str]:
    """Takes peft's wrappers of `modules_to_save` out again, and has the modules themselves trained: nobody needs the old
    weights. Returns their names."""
    names = []
    for name, wrapper in list(model.named_modules()):
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        module = wrapper.original_module
        if any(id(parameter) in tied for parameter in module.parameters()):
            raise UsageError(
                f"adapter.modules_to_save: {name} shares its weights with another module",
                hint='leave it out, or set "tie_word_embeddings": false in a copy of the model that has both weights',
            )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
        module.requires_grad_(True)
        names.append(name)
    return names


def initial_values(model: nn.Module, *, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and value of every A and B, layer by layer: what peft begins with after `torch.manual_seed(seed)`.

    Magnitudes of DoRA are not among them: they begin as the norms of the weights (`merging.output_norms`)."""
    state = torch.Generator().manual_seed(seed).get_state()
    for name, layer in lora_layers(model):
        rank, dtype = layer.r[ADAPTER], layer.get_base_layer().weight.dtype
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            a = nn.Linear(layer.in_features, rank, bias=False)
            nn.Linear(rank, layer.out_features, bias=False)  # peft draws it before it sets it to zero
            nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
            state = torch.get_rng_state()
        yield f"{name}.lora_A.{ADAPTER}.weight", a.weight.detach().to(dtype)
        yield f"{name}.lora_B.{ADAPTER}.weight", torch.zeros(layer.out_features, rank, dtype=dtype)


def initial_values_of_experts(model: nn.Module, *, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and value of every A and B of experts: A as peft draws it for a linear layer, B zero. They are drawn apart:
    other layers have the same values without them."""
    generator = torch.Generator().manual_seed(seed ^ 0x45585054)  # "EXPT"
    for module in model.modules():
        added: LowRank | None = vars(module).get(LOW_RANK)
        for attribute, parts in () if added is None else added.parts.items():
            dtype = module._parameters[attribute].dtype  # type: ignore[union-attr]
            for name, shape, _ in parts:
                value = torch.zeros(shape)
                if name.endswith(OF_EXPERTS[0]):
                    nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
                yield name, value.to(dtype)


# Yields a parameter of the base model as 1-D pieces of the compute dtype, from its beginning.
Pieces = Callable[[str], Iterator[torch.Tensor]]


class FirstValues:
    """Gives the values after `torch.manual_seed(seed)` of the adapter in `model`, as peft would make them."""

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self._layers = dict(lora_layers(model))
        self._drawn = initial_values(model, seed=seed)
        self._of_experts = initial_values_of_experts(model, seed=seed)
        self._held: dict[str, torch.Tensor] = {}  # drawn before they were asked for

    def of(self, names: Iterable[str], pieces: Pieces) -> dict[str, torch.Tensor]:
        """Returns the values of those of `names` that the adapter has. Each can be asked for once.

        They are drawn in the order of the model's modules. So names are best asked for in this order."""
        added = {name for name in names if is_added(name)}
        values: dict[str, torch.Tensor] = {}
        for layer in self._layers:
            a, b, magnitude = lora_names(layer)
            if a in added:
                values |= {a: self._take(a, self._drawn), b: self._take(b, self._drawn)}
            if magnitude in added:
                values[magnitude] = self._norms(layer, values[a], values[b], pieces)
        return values | {name: self._take(name, self._of_experts) for name in sorted(added - values.keys())}

    def _take(self, name: str, drawn: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
        while name not in self._held:
            drawn_name, value = next(drawn)
            self._held[drawn_name] = value
        return self._held.pop(name)

    def _norms(self, layer: str, a: torch.Tensor, b: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        """Returns the norms of the weights of each output, which DoRA's magnitudes begin as. Nothing is added to them yet: B is
        zero."""
        lora = LoraWeights(a=a.float(), b=b.float(), scaling=1.0, transposed=self._layers[layer].fan_in_fan_out)
        return lora.output_norms(pieces(f"{layer}.base_layer.weight")).to(a.dtype)
