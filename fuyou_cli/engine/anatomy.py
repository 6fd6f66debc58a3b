"""Finds the stages of a model: which modules are streamed, in which order they run, and which parameters they own.

Blocks are found by `GradientCheckpointingLayer` (or `_no_split_modules`), never by attribute names of one family. Every other
module of the base model that owns parameters directly is its own stage (embedding, final norm, a projection). Parameters
outside the base model (the language-model head) belong to the head stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from ..core.errors import UsageError
from ..core.units import align_up
from ..spec.model import (
    ITEM_SIZE,
    PAGE,
    STAGE_ALIGN,
    TENSOR_ALIGN,
    BankSpec,
    Dtype,
    InPlace,
    Lying,
    ModelSpec,
    Piece,
    SourceFile,
    StageKind,
    StageSpec,
    TensorSpec,
    banks_of,
)
from ..spec.packed_tensors import TRANSPOSED, Quantised, packed_bank
from .attention import attention_apart, rope_types
from .calls import TRIED, WORKING, only_refusals, refuse_by_configuration, stage_calls, tracing, with_fake_parameters
from .experts import Bank, ExpertPart, ExpertsLayout, NamedPart, Noting, is_experts, laid_out, named_parts, place
from .experts import Tensor as ExpertTensor

_WIDER = "use precision.compute=float32, or set residual_in_fp32 to false in its config.json"


@dataclass(frozen=True, slots=True)
class Slotted:
    """Describes one tensor of a stage: its specification, and every place in the module tree that reads it. `part`: it is an
    expert's part of the parameter there, which holds those of all experts."""

    spec: TensorSpec
    places: tuple[tuple[nn.Module, str], ...]
    part: ExpertPart | None = None


class Installed(list[nn.Parameter]):
    """Lists the parameters of a stage while they are in their places, one for each tensor. Those of experts are in `banks`, and
    something without elements stands for them, or an anchor that makes autograd look for their gradients."""

    banks: tuple[Bank | Noting, ...] = ()


_NOTHING = nn.Parameter(torch.empty(0), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Stage:
    """Describes one stage of a model. Between visits its parameters are the skeleton's meta parameters."""

    name: str
    kind: StageKind
    module: nn.Module | None  # None for the head, which is the causal model itself
    parameters: tuple[Slotted, ...]
    trained: int  # elements, with padding, from the first on
    frozen: int = 0  # elements, with padding, behind these
    vocabulary: tuple[int, int] | None = None  # rows (first, end) of a piece; None: not a piece
    quantised: BankSpec | None = None  # behind all others; None: nothing rests quantised
    source: tuple[Piece, ...] = ()  # of frozen parameters that are read from the checkpoint's files (engine/anatomy)
    # Of a range of experts: first, end, and how many the mixture has; its module is theirs. None: no range.
    expert_range: tuple[int, int, int] | None = None
    cut: tuple[nn.Module, int] | None = None  # of a block whose experts are the stages that follow: their module and number
    # Derived; kept, because every visit needs them: parameters that are no experts', with their numbers, and the others.
    plain: tuple[tuple[int, Slotted], ...] = field(init=False, repr=False)
    experts: tuple[ExpertsLayout, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        routed = dict[tuple[nn.Module, str], list[ExpertTensor]]()
        plain = list[tuple[int, Slotted]]()
        for number, slotted in enumerate(self.parameters):
            spec, (holder, attribute) = slotted.spec, slotted.places[0]
            if spec.routed:
                expert_tensor = ExpertTensor(number, spec.offset, spec.shape, not spec.frozen, slotted.part, spec.transposed)
                routed.setdefault((holder, attribute), []).append(expert_tensor)
            else:
                plain.append((number, slotted))
        object.__setattr__(self, "plain", tuple(plain))
        object.__setattr__(self, "experts", laid_out(routed))

    @classmethod
    def packed(
        cls, name: str, kind: StageKind, module: nn.Module | None, parameters: Iterable[Slotted],
        vocabulary: tuple[int, int] | None = None, quantisation: Quantised | None = None,
    ) -> Stage:  # fmt: skip
        """Lays the parameters out one after the other: trained ones, frozen ones, and those that rest quantised."""
        every = tuple(parameters)
        trained, boundary = _laid_out([slotted for slotted in every if not slotted.spec.frozen], begin=0)
        plain = [slotted for slotted in every if slotted.spec.frozen and not slotted.spec.quantised]
        frozen, end = _laid_out(plain, begin=boundary)
        quantised, last = _laid_out([slotted for slotted in every if slotted.spec.quantised], begin=end)
        bank = None if quantisation is None or not quantised else _bank(quantisation, quantised, last - end)
        return cls(name, kind, module, trained + frozen + quantised, boundary, end - boundary, vocabulary, bank)

    @property
    def params(self) -> int:
        return self.trained + self.frozen + (0 if self.quantised is None else self.quantised.elements)

    @property
    def rows(self) -> tuple[int, int]:
        """Returns the rows (first, end) of a piece of the vocabulary."""
        assert self.vocabulary is not None
        return self.vocabulary

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(slotted.spec for slotted in self.parameters)

    def specified(self, index: int, *, dtype: Dtype, **costs: Any) -> StageSpec:
        """Returns the specification of the stage at place `index`."""
        banks = banks_of(dtype, trained=self.trained, frozen=self.frozen, source=self.source, quantised=self.quantised)
        return StageSpec(
            index=index, kind=self.kind, name=self.name, banks=banks, tensors=self.tensors, vocabulary=self.vocabulary,
            expert_range=self.expert_range, **costs,
        )  # fmt: skip

    def call_inside(self, look: Callable[..., None]) -> list[RemovableHandle]:
        """Calls `look` inside the stage's forward, after each innermost module, until the handles are removed."""
        if self.module is None:
            return []
        inside = [part for part in self.module.modules() if part is not self.module and not any(part.children())]
        return [part.register_forward_hook(look) for part in inside]

    @contextmanager
    def installed(self, flat: torch.Tensor) -> Iterator[Installed]:
        """Sets every place that reads one of the stage's parameters to a view of `flat` (1-D, `params` elements). Those that
        are trained want gradients in every pass, as in memory: torch chooses between two products by it, also without autograd,
        and their last bits differ."""
        replaced: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        parameters = Installed([_NOTHING] * len(self.parameters))
        try:
            for number, slotted in self.plain:
                tensor = slotted.spec
                view = flat[tensor.offset : tensor.offset + tensor.numel].view(tensor.shape)
                parameters[number] = parameter = nn.Parameter(view, requires_grad=not tensor.frozen)
                for holder, attribute in slotted.places:
                    replaced.append((holder, attribute, holder._parameters[attribute]))
                    holder._parameters[attribute] = parameter
            if self.cut is not None:
                holder, experts = self.cut
                parameters.banks = (Noting(experts),)
                place(holder, parameters.banks[0])
            if self.experts:
                parameters.banks = tuple(Bank(products, flat) for _, products in self.experts)
                for (holder, products), bank in zip(self.experts, parameters.banks, strict=True):
                    place(holder, bank)
                    if bank.anchor is not None:
                        parameters[next(iter(products.values())).tensors[0][0]] = bank.anchor
            yield parameters
        finally:
            for holder, attribute, skeleton in replaced:
                holder._parameters[attribute] = skeleton
            for holder, _ in (*self.experts, *([] if self.cut is None else [self.cut])):
                place(holder, None)


def _laid_out(parameters: Iterable[Slotted], *, begin: int) -> tuple[tuple[Slotted, ...], int]:
    """Places parameters one after the other from element `begin` on; returns them and the end of their bank."""
    placed, end = list[Slotted](), begin
    for slotted in parameters:
        spec = slotted.spec
        placed.append(slotted if spec.offset == end else Slotted(replace(spec, offset=end), slotted.places, slotted.part))
        end = align_up(end + slotted.spec.numel, TENSOR_ALIGN)
    return tuple(placed), align_up(end, STAGE_ALIGN)


def _bank(quantisation: Quantised, parameters: Iterable[Slotted], elements: int) -> BankSpec:
    shapes = ((slotted.spec.name, slotted.spec.shape) for slotted in parameters)
    packed = packed_bank(quantisation, shapes)[1]
    return BankSpec(name="quantised", storage=quantisation, elements=elements, layout=None, packed=packed)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Describes the stages of one model in running order, the head last."""

    model: PreTrainedModel
    stages: tuple[Stage, ...]
    tied_head: bool
    isolated: bool = False  # documents of a row do not see each other (`isolated`)
    untouched: tuple[str, ...] = ()  # parts that do not run on text, as a vision tower: modules, topmost ones, by name
    sources: tuple[SourceFile, ...] = ()  # files that frozen parameters are read from
    imported_because: str = ""  # why frozen parameters are not
    parts: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]] = field(default_factory=dict)  # see `experts.named_parts`

    @property
    def has_experts(self) -> bool:
        """Whether tokens are sent to experts in some of its blocks."""
        return any(stage.experts for stage in self.stages)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names the buffers that a checkpoint holds values for, as what a block of Gemma 4 multiplies its output by."""
        kept, parts = set(self.model.state_dict()), tuple(f"{part}." for part in self.untouched)
        names = (name for name, _ in self.model.named_buffers())
        return tuple(name for name in names if name in kept and not name.startswith(parts))

    def modules(self) -> dict[nn.Module, str]:
        """Returns the names of stages that are modules, as the model's own forward calls them. For a module that was cut into
        pieces, the last piece's name is used."""
        return {stage.module: stage.name for stage in self.stages if stage.module is not None and stage.expert_range is None}

    def owner(self, index: int) -> Stage:
        """Finds the stage whose weights stage `index` computes with (see ModelSpec.owner)."""
        stage = self.stages[index]
        if not self.tied_head or stage.kind != "head":
            return stage
        return next(other for other in self.stages if other.vocabulary == stage.vocabulary)


def dissect(model: PreTrainedModel, *, marked: bool = False) -> Anatomy:
    """Finds the stages of `model`. `marked`: parameters that require no gradient are frozen, as peft leaves them; else all are
    trained. Raises UsageError if it has no blocks, or cannot be streamed."""
    blocks, optional = blocks_of(model), beside_text(model)
    refuse_by_configuration(model)
    units = list(_units(model.base_model, blocks, optional))
    return _assembled(model, _running_order(units, model, blocks, optional), blocks, marked=marked)


def outline(model: PreTrainedModel, *, marked: bool = False) -> Anatomy:
    """Finds stages for a plan (not for a run) of a model that `dissect` refuses. Every parameter is in exactly one stage.

    The stages are in the order of the model's forward if that can be followed, otherwise embeddings come first. Raises
    UsageError if no module says that it is a block.
    """
    blocks, optional = blocks_of(model), beside_text(model)
    units = list(_units(model.base_model, blocks, optional))
    try:
        order = _running_order(units, model, blocks, optional)
    except UsageError:
        text = [(name, module) for name, module in units if module not in optional]
        order = sorted(text, key=lambda unit: not _is_input(unit[1]))
    return _assembled(model, order, blocks, marked=marked)


def beside_text(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Returns the parts of a model beside its text decoder, as a vision tower and what projects its outputs: topmost modules
    with parameters, each with its name. A model of text alone has none."""
    names = {module: name for name, module in model.named_modules()}
    decoder, base = model.get_decoder(), model.base_model
    if base is model or decoder not in set(base.modules()):
        return {}
    waiting, other_parts = [base], dict[nn.Module, str]()
    while waiting:
        module = waiting.pop()
        if module is decoder:
            continue
        if any(inner is decoder for inner in module.modules()):
            waiting += module.children()
        elif any(True for _ in module.parameters()):
            other_parts[module] = names[module]
    return other_parts


def blocks_of(model: PreTrainedModel) -> set[nn.Module]:
    """Returns the decoder blocks. Raises UsageError if no module says that it is one."""
    names = getattr(model, "_no_split_modules", None) or ()
    outside = {module for part in beside_text(model) for module in part.modules()} | {model.base_model}
    inside = (module for module in model.base_model.modules() if module not in outside)
    blocks = {m for m in inside if isinstance(m, GradientCheckpointingLayer) or type(m).__name__ in names}
    if not blocks:
        raise UsageError(f"{type(model).__name__} has no decoder blocks that can be streamed", hint=WORKING)
    return blocks


def _assembled(
    model: PreTrainedModel, order: list[tuple[str, nn.Module]], blocks: set[nn.Module], *, marked: bool
) -> Anatomy:  # fmt: skip
    """Returns the stages of `order`, then the head with all remaining parameters but those that do not run on text."""
    unowned, ordered, parts = _places(model), {module for _, module in order}, named_parts(model)
    untouched = [name for module, name in beside_text(model).items() if module not in ordered]
    untouched += _around_decoder(model)
    ends = tuple(f"{part}." for part in untouched)
    unowned = {parameter: places for parameter, places in unowned.items() if not f"{places[0][2]}.".startswith(ends)}
    stages = []
    for name, module in order:
        kind: StageKind = "block" if module in blocks else "embedding" if _is_input(module) else "norm"
        stages.append(Stage.packed(name, kind, module, _take_parameters(module, unowned, parts, marked=marked)))
    stages.append(Stage.packed("head", "head", None, _take_parameters(model, unowned, parts, marked=marked)))
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    named = {name: tuple((part, shape) for part, shape, _ in places) for name, places in parts.items()}
    return Anatomy(model, tuple(stages), tied, untouched=tuple(untouched), parts=named)


def _around_decoder(model: PreTrainedModel) -> list[str]:
    """Names the parameters that modules around the text decoder own themselves, as what marks the end of a row of an image."""
    decoder, base = model.get_decoder(), model.base_model
    if base is model:
        return []
    around = ((name, m) for name, m in model.named_modules() if m not in (model, decoder) and decoder in set(m.modules()))
    return [f"{name}.{own}" for name, module in around for own, _ in module.named_parameters(recurse=False)]


def _is_input(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


def _units(
    base: nn.Module, blocks: set[nn.Module], optional: Container[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Returns topmost modules that are blocks, `optional` for text, or own parameters themselves, in registration order."""
    for name, child in base.named_children():
        path = f"{prefix}{name}"
        if child in blocks or child in optional or any(True for _ in child.named_parameters(recurse=False)):
            yield path, child
        else:
            yield from _units(child, blocks, optional, path + ".")


def _running_order(
    units: list[tuple[str, nn.Module]], model: PreTrainedModel, blocks: set[nn.Module], optional: Container[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """Finds the order in which the base model's own forward calls the units. Refuses a unit that is called twice, or never if
    it is `optional`."""
    calls = stage_calls(model, {module: name for name, module in units}, shape=TRIED)
    called = [call.name for call, _ in calls]
    for name, module in units:
        if called.count(name) != 1 and not (module in optional and name not in called):
            times = "never" if name not in called else f"{called.count(name)} times"
            raise UsageError(f"{type(model).__name__}: {name} runs {times} in a forward pass, but must run once", hint=WORKING)
    modules = dict(units)
    dtype = model.get_input_embeddings().weight.dtype
    for call, x in calls:
        if modules[call.name] in blocks and not x.is_floating_point():
            reason = f"{call.name} is a block that takes token ids"
            raise UsageError(f"{type(model).__name__} cannot be streamed: {reason}", hint=WORKING)
        if x.is_floating_point() and x.dtype != dtype:
            reason = f"{call.name} takes {x.dtype}, but the model computes in {dtype}".replace("torch.", "")
            raise UsageError(f"{type(model).__name__} cannot be streamed: {reason}", hint=_WIDER)
    return [(name, modules[name]) for name in called]


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str, str]]]:
    """Returns, by parameter identity, every (module, attribute, full name) that holds it. Tied weights have several."""
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for module_name, module in model.named_modules(remove_duplicate=True):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{attribute}" if module_name else attribute
            places.setdefault(id(parameter), []).append((module, attribute, name))
    return places


def _take_parameters(
    owner: nn.Module, unowned: dict[int, list[tuple[nn.Module, str, str]]], parts: Mapping[str, list[NamedPart]], *,
    marked: bool,
) -> Iterator[Slotted]:  # fmt: skip
    """Takes the parameters of `owner` out of those that no stage owns yet. One of experts is one tensor for each of its
    `parts`, if it has some."""
    for parameter in owner.parameters():
        where = unowned.pop(id(parameter), None)
        if where is None:
            continue
        (holder, _, name), *_ = where
        places = tuple((holder, attribute) for holder, attribute, _ in where)
        routed, frozen = is_experts(holder), marked and not parameter.requires_grad
        if name in parts:
            for part, shape, which in parts[name]:
                spec = TensorSpec(name=part, shape=shape, offset=0, numel=prod(shape), decay=True, frozen=frozen, routed=True)
                yield Slotted(spec, places, which)
        else:
            shape = tuple(parameter.shape)
            decays = parameter.dim() >= (3 if routed else 2)  # a bias of each expert is one row of two dimensions
            spec = TensorSpec(name=name, shape=shape, offset=0, numel=prod(shape), decay=decays, frozen=frozen, routed=routed)
            yield Slotted(spec, places)


# ---- what is frozen -----------------------------------------------------------------------------------------------
# Freezes parameters by the patterns of a recipe, and says what backward is spared by that.

_PART = re.compile(r"\*|\[(\d+)-(\d+)\]|[^*\[]+|\[")


def frozen(anatomy: Anatomy, patterns: Sequence[str]) -> Anatomy:
    """Returns the anatomy with the matching parameters frozen, behind the others of their stages.

    A pattern is the name of a parameter or of a module, which stands for all in it; `*` is any text, `[0-15]` any number of
    these. Raises UsageError for a pattern that matches nothing, and where nothing is left to train."""
    if not patterns:
        return anatomy
    names, unmatched = _every_name(anatomy), dict.fromkeys(patterns)

    def of(slotted: Slotted) -> Slotted:
        every = [*names[_identity(slotted)], slotted.spec.name] if slotted.part else names[_identity(slotted)]
        matching = [pattern for pattern in patterns if any(_matches(pattern, name) for name in every)]
        for pattern in matching:
            unmatched.pop(pattern, None)
        return replace(slotted, spec=replace(slotted.spec, frozen=bool(matching)))

    packed = _with_parameters(anatomy, of)
    for pattern in [
        pattern for pattern in unmatched if any(_matches(pattern, name) for every in names.values() for name in every)
    ]:
        unmatched.pop(pattern)  # a part that is left alone anyway
    if unmatched:
        some = ", ".join(dict.fromkeys(_pattern_of(stage) for stage in anatomy.stages if stage.parameters))
        wrong = ", ".join(f"`{pattern}`" for pattern in unmatched)
        raise UsageError(f"freeze: no parameter of {type(anatomy.model).__name__} matches {wrong}", hint=f"it has {some}")
    if not any(stage.trained for stage in packed.stages):
        raise UsageError(
            f"freeze: every parameter of {type(anatomy.model).__name__} matches, so nothing is left to train",
            hint="leave out the pattern of what is to be trained",
        )
    return packed


def frozen_with_others(anatomy: Anatomy, patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Returns names that no pattern matches, each with the name of what it is tied to and frozen with."""
    pairs = []
    for names in _every_name(anatomy).values():
        meant = [name for name in names if any(_matches(pattern, name) for pattern in patterns)]
        pairs += [(name, meant[0]) for name in names if meant and name not in meant]
    return pairs


def _with_parameters(anatomy: Anatomy, of: Callable[[Slotted], Slotted]) -> Anatomy:
    """Returns the anatomy with changed parameters, its stages packed anew: trained ones come first."""
    stages = tuple(
        Stage.packed(stage.name, stage.kind, stage.module, list(map(of, stage.parameters)), stage.vocabulary)
        for stage in anatomy.stages
    )
    return replace(anatomy, stages=stages)


def _every_name(anatomy: Anatomy) -> dict[int, list[str]]:
    """Returns all names of each parameter, by identity: tied weights have several."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in anatomy.model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    return by_parameter


def _identity(slotted: Slotted) -> int:
    holder, attribute = slotted.places[0]
    return id(holder._parameters[attribute])


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern is of this parameter, or of a module that it is in."""
    ranges: list[range] = []
    expression = ""
    for part in _PART.finditer(pattern):
        if part[0] == "*":
            expression += ".*"
        elif part[1] is not None:
            ranges.append(range(int(part[1]), int(part[2]) + 1))
            expression += r"(\d+)"
        else:
            expression += re.escape(part[0])
    match = re.fullmatch(rf"{expression}(?:\..*)?", name)
    return match is not None and all(int(text) in numbers for text, numbers in zip(match.groups(), ranges, strict=True))


def _pattern_of(stage: Stage) -> str:
    """Returns a pattern that matches the stage, one for all blocks."""
    before, name, _ = stage.parameters[0].spec.name.partition(stage.name)
    return re.sub(r"\.\d+$", ".*", before + name)


# ---- what backward is spared ------------------------------------------------------------------------------------------


def with_frozen_work(model: ModelSpec, *, tokens: int) -> ModelSpec:
    """Says which stages backward visits and what it computes there. `tokens`: of a micro-batch.

    It ends at the lowest stage with something to learn. Nothing is kept of the stages below."""
    lowest = next((stage.index for stage in model.stages if model.stages[model.owner(stage.index)].trained), 0)
    stages = []
    for stage in model.stages:
        learns = model.stages[model.owner(stage.index)].trained > 0
        goes_back = stage.index >= lowest and (stage.kind != "embedding" or learns)
        spared = replace(
            stage, goes_back=goes_back, passes_on=stage.index > lowest, frozen_flops=_frozen_flops(model, stage, tokens)
        )
        if not goes_back:
            spared = replace(
                spared, operators=(), unneeded=(), backward_peak=stage.forward_peak, backward_mapped=stage.forward_mapped
            )
        stages.append(spared)
    return replace(model, stages=tuple(stages))


def _frozen_flops(model: ModelSpec, stage: StageSpec, tokens: int) -> float:
    """Counts 2 per token and element of a frozen matrix; an embedding has no products, of a head all are of its weights. Those
    of frozen experts were found by the trace, since not every token goes there."""
    owner = model.stages[model.owner(stage.index)]
    if stage.kind == "head":
        return stage.forward_flops if owner.frozen_weight_bytes and not owner.trained else 0.0
    if stage.kind == "embedding":
        return 0.0
    frozen = sum(t.numel for t in stage.tensors if t.frozen and len(t.shape) > 1 and not t.routed)
    of_experts = 0.0 if stage.expert_work is None else stage.expert_work.frozen_flops
    return min(stage.forward_flops, of_experts + 2.0 * frozen * tokens)


# ---- what rests quantised -----------------------------------------------------------------------------------------
# Marks which weights of a model rest quantised: frozen matrices of linear layers in its blocks, as bitsandbytes chooses, and
# of their experts.


def quantised(anatomy: Anatomy, quantisation: Quantised | None, names: Container[str] | None = None) -> Anatomy:
    """Returns the anatomy with these weights behind all others of their stages. Embeddings, the head, norms and biases stay as
    they are. `names`: others do too; None: none of them does, and a UsageError says where there is no such weight."""
    if quantisation is None:
        return anatomy
    stages = tuple(_marked(stage, quantisation, names) if stage.kind == "block" else stage for stage in anatomy.stages)
    if names is None and not any(stage.quantised for stage in stages):
        other = any(isinstance(module, Conv1D) for module in anatomy.model.modules())
        raise UsageError(
            f"model.quantize: the blocks of {type(anatomy.model).__name__} have no frozen matrix in a torch.nn.Linear",
            hint="set model.quantize=none"
            + (": a Conv1D is never quantised, but may have LoRA" if other else
               ", or freeze some layers: only their weights are quantised"),
        )  # fmt: skip
    return replace(anatomy, stages=stages)


def _marked(stage: Stage, quantisation: Quantised, names: Container[str] | None) -> Stage:
    def of(slotted: Slotted) -> Slotted:
        transposed = quantisation in TRANSPOSED  # and of no linear layer, but of experts
        can_be = slotted.spec.frozen if transposed else _can_be(slotted)
        chosen = can_be and (names is None or slotted.spec.name in names)
        return replace(slotted, spec=replace(slotted.spec, quantised=chosen, transposed=chosen and transposed))

    return Stage.packed(stage.name, stage.kind, stage.module, map(of, stage.parameters), stage.vocabulary, quantisation)


def _can_be(slotted: Slotted) -> bool:
    dimensions, frozen = len(slotted.spec.shape), slotted.spec.frozen
    if all(is_experts(holder) for holder, _ in slotted.places):
        return frozen and dimensions == (3 if slotted.part is None else 2)  # the matrices of all experts, or one of them
    of_linear = all(isinstance(holder, nn.Linear) and attribute == "weight" for holder, attribute in slotted.places)
    return frozen and of_linear and dimensions == 2


# ---- as files have it ----------------------------------------------------------------------------------------------
# Lays frozen parameters out as they lie in the checkpoint's files, so that they are read from there and never copied.
#
# The daemon reads whole pages, into whole pages of a slot. Tensors of a file begin anywhere, so a parameter lies in the slot
# wherever its pages leave it, and what else is in these pages lies around it. Neighbours in a file share a piece.


def read_in_place(anatomy: Anatomy, files: InPlace, dtype: Dtype) -> Anatomy:
    """Returns the anatomy with the frozen parameters of every stage where that can be laid out as in the files.

    The others are copied into the store; `imported_because` says why. A stage has all of its frozen parameters in one way."""
    reasons = dict[str, str]()
    stages = list[Stage]()
    for stage in anatomy.stages:
        reason = files.refusal or _not_in_place(stage, files, dtype)
        if stage.frozen and reason:
            reasons[stage.name] = reason
        stages.append(stage if reason or not stage.frozen else _as_in_files(stage, files, ITEM_SIZE[dtype]))
    first = next(iter(reasons.values()), "")
    why = first if files.refusal or len(reasons) < 2 else f"{first} ({len(reasons)} stages)"
    sources = files.sources if any(stage.source for stage in stages) else ()
    return replace(anatomy, stages=tuple(stages), sources=sources, imported_because=why)


def whole_in_place(anatomy: Anatomy, files: InPlace, dtype: Dtype) -> Anatomy | None:
    """Returns the anatomy with all parameters of every stage laid out as in the files, to compute with and never to train; None
    where some cannot be. What wants gradients still does: products are chosen by it."""
    if any(_not_in_place(stage, files, dtype, whole=True) for stage in anatomy.stages):
        return None
    stages = [_as_in_files(stage, files, ITEM_SIZE[dtype], whole=True) if stage.params else stage for stage in anatomy.stages]
    return replace(anatomy, stages=tuple(stages))


def _not_in_place(stage: Stage, files: InPlace, dtype: Dtype, *, whole: bool = False) -> str:
    """Returns why a stage's frozen parameters (`whole`: all) cannot be used as they lie in the files, or an empty string."""
    for tensor in stage.tensors:
        if not (whole or tensor.frozen):
            continue
        lying = files.tensors[tensor.name]
        if lying.dtype != dtype:
            return f"{tensor.name} is {lying.dtype} in the model's files, and computes in {dtype}"
        if _address(tensor, lying, ITEM_SIZE[dtype]) % max(files.alignment, ITEM_SIZE[dtype]):
            return f"{tensor.name} is not at a multiple of {max(files.alignment, ITEM_SIZE[dtype])} bytes in the model's files"
    return ""


def _address(tensor: TensorSpec, lying: Lying, item: int) -> int:
    """Returns where the part of the tensor that the stage holds begins."""
    return lying.address + tensor.first * item


def _as_in_files(stage: Stage, files: InPlace, item: int, *, whole: bool = False) -> Stage:
    """Places the frozen parameters of a stage behind its trained ones, or all from the first on if `whole`, as the pages that
    hold them follow one another."""
    pieces, offsets, last = list[Piece](), dict[str, int](), -1
    begins = 0 if whole else stage.trained
    placed_here = {tensor.name: tensor for tensor in stage.tensors if whole or tensor.frozen}
    for address, name in sorted((_address(tensor, files.tensors[name], item), name) for name, tensor in placed_here.items()):
        tensor = placed_here[name]
        source = files.tensors[tensor.name].source
        begin, end = address // PAGE * PAGE, align_up(address + item * tensor.numel, PAGE)
        if pieces and source == last and begin <= pieces[-1].offset + pieces[-1].size:
            pieces[-1] = replace(pieces[-1], size=max(pieces[-1].size, end - pieces[-1].offset))
        else:
            place = pieces[-1].place + pieces[-1].size if pieces else 0
            pieces.append(Piece(place=place, offset=begin, size=end - begin))
        last = source
        offsets[tensor.name] = begins + (pieces[-1].place + address - pieces[-1].offset) // item
    size = pieces[-1].place + pieces[-1].size
    placed = tuple(
        replace(slotted, spec=replace(slotted.spec, offset=offsets.get(slotted.spec.name, slotted.spec.offset)))
        for slotted in stage.parameters
    )
    elements, laid = align_up(size // item, STAGE_ALIGN), replace(stage, parameters=placed, source=tuple(pieces))
    return replace(laid, trained=elements, frozen=0) if whole else replace(laid, frozen=elements)


# ---- documents of a row ------------------------------------------------------------------------------------------------
# Finds out whether a model can compute rows whose documents do not see each other (`attention`).

_PACKED = "use dataset.packing: concat, or false"


class _Attended(TorchFunctionMode):
    """Whether attention was computed document by document inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or func is attention_apart
        return func(*args, **(kwargs or {}))


def isolated(anatomy: Anatomy) -> Anatomy:
    """Returns the anatomy of a model that computes documents apart. Raises UsageError if the model would mix them."""
    name = type(anatomy.model).__name__
    try:
        for why in _mixes(anatomy):
            raise UsageError(why)
        with only_refusals(anatomy.model, shape=TRIED):
            _try_apart(anatomy)
    except UsageError as error:
        reason = error.message.removeprefix(f"{name} cannot be streamed: ")
        raise UsageError(f"dataset.packing: isolated: {name} cannot keep documents apart: {reason}", hint=_PACKED) from error
    return replace(anatomy, isolated=True)


def kept_apart_if_possible(anatomy: Anatomy) -> Anatomy:
    """Returns the anatomy of a model that computes documents apart, or the same one if the model would mix them."""
    try:
        return isolated(anatomy)
    except UsageError:
        return anatomy


def _mixes(anatomy: Anatomy) -> Iterator[str]:
    """Says why documents of a row would see each other, by what is known without running the model."""
    model = anatomy.model
    if not type(model).__module__.startswith("transformers."):
        yield "its code is not a part of transformers"
    if not getattr(model, "_supports_attention_backend", False):
        yield "its attention is computed by code of its own"
    tables = [stage.name for stage in anatomy.stages if stage.kind == "embedding"]
    if len({stage.module for stage in anatomy.stages if stage.kind == "embedding"}) > 1:
        yield f"it looks positions up in a table ({tables[-1]})"
    if any(isinstance(module, nn.Conv1d) for module in model.base_model.modules()):
        yield "it has convolutions over tokens"
    for kind in sorted({"longrope", "dynamic"} & set(rope_types(model))):
        yield f"its positions depend on the length of the row (rope type {kind})"


def _try_apart(anatomy: Anatomy) -> None:
    """Runs each sort of block on fake tensors. Raises UsageError for one that does not attend by transformers' functions."""
    blocks = {stage.name: stage.module for stage in anatomy.stages if stage.kind == "block" and stage.module is not None}
    seen = set()
    for call, x in stage_calls(anatomy.model, anatomy.modules(), shape=TRIED, isolated=True):
        module = blocks.get(call.name)
        sort = module and (type(module), tuple(parameter.shape for parameter in module.parameters()))
        if module is None or sort in seen:
            continue
        seen.add(sort)
        assert hasattr(x, "fake_mode")
        traced = tracing(module, mode=x.fake_mode, length=x.shape[1])
        with traced, torch.no_grad(), with_fake_parameters(module), _Attended() as attended:
            call.output(x)
        if not attended.seen:
            raise UsageError(f"{call.name} ({type(module).__name__}) has no attention that transformers chooses")
