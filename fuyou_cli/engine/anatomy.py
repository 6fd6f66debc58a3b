"""Finding the stages of a model: which modules are streamed, in which order they run, and which parameters they own.

Blocks are found by `GradientCheckpointingLayer` (or `_no_split_modules`), never by attribute names of one family. Every
other module of the base model that owns parameters directly is a stage of its own (embedding, final norm, a projection);
what the base model does not own (the language-model head) is the head stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..core.errors import UsageError
from ..core.units import align_up
from ..spec.model import STAGE_ALIGN, TENSOR_ALIGN, StageKind, TensorSpec
from .calls import TRIED, WORKING, refuse_by_configuration, stage_calls


@dataclass(frozen=True, slots=True)
class Slotted:
    """One parameter of a stage: its specification and every place in the module tree that reads it."""

    spec: TensorSpec
    places: tuple[tuple[nn.Module, str], ...]


@dataclass(slots=True)
class Anatomy:
    """The stages of one model in running order; `modules[i]` is None for the head, which is the causal model itself."""

    model: PreTrainedModel
    names: list[str] = field(default_factory=list)
    kinds: list[StageKind] = field(default_factory=list)
    modules: list[nn.Module | None] = field(default_factory=list)
    parameters: list[tuple[Slotted, ...]] = field(default_factory=list)
    params: list[int] = field(default_factory=list)  # elements with padding
    vocabulary: list[tuple[int, int] | None] = field(default_factory=list)  # rows (first, end) of a piece
    tied_head: bool = False

    @property
    def base(self) -> nn.Module:
        base = self.model.base_model
        assert isinstance(base, nn.Module)
        return base

    def owner(self, stage: int) -> int:
        """The stage whose weights stage `stage` computes with (see ModelSpec.owner)."""
        if not self.tied_head or self.kinds[stage] != "head":
            return stage
        return self.vocabulary.index(self.vocabulary[stage])


def is_block(module: nn.Module, model: PreTrainedModel) -> bool:
    names = getattr(model, "_no_split_modules", None) or ()
    return isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names


def dissect(model: PreTrainedModel) -> Anatomy:
    """Stages of `model`, in the order its own forward runs them; the head last.

    Raises UsageError when the model has no blocks, or is one that cannot be streamed.
    """
    blocks = _declared_blocks(model)
    if not blocks:
        raise UsageError(f"{type(model).__name__} has no decoder blocks that can be streamed", hint=WORKING)
    refuse_by_configuration(model)
    units = list(_units(model.base_model, blocks))
    return _assembled(model, _running_order(units, model, blocks), blocks)


def outline(model: PreTrainedModel) -> Anatomy:
    """Stages of a model that `dissect` refuses, to be planned with and not to be run: every parameter belongs to exactly
    one of them. The order is that of its forward where that can be followed, else embeddings before everything else as
    registered. Where no module says that it is a block, the longest list of modules holds them.

    Raises UsageError when there is no such list either.
    """
    blocks = _declared_blocks(model) or _longest_list(model)
    if not blocks:
        raise UsageError(f"{type(model).__name__} has no blocks: fuyou cannot tell its stages", hint=WORKING)
    units = list(_units(model.base_model, blocks))
    try:
        order = _running_order(units, model, blocks)
    except UsageError:
        order = sorted(units, key=lambda unit: not _is_input(unit[1]))
    return _assembled(model, order, blocks)


def _declared_blocks(model: PreTrainedModel) -> set[nn.Module]:
    return {module for module in model.base_model.modules() if module is not model.base_model and is_block(module, model)}


def _longest_list(model: PreTrainedModel) -> set[nn.Module]:
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    return set(max(lists, key=len, default=()))


def _assembled(model: PreTrainedModel, order: list[tuple[str, nn.Module]], blocks: set[nn.Module]) -> Anatomy:
    """The stages of `order`, then the head with every parameter that is left."""
    anatomy = Anatomy(model=model)
    places = _places(model)
    owned: set[int] = set()
    for name, module in order:
        kind: StageKind = "block" if module in blocks else "embedding" if _is_input(module) else "norm"
        _add(anatomy, kind, name, module, module, places, owned)
    _add(anatomy, "head", "head", None, model, places, owned)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    anatomy.tied_head = head is not None and embedding is not None and head.weight is embedding.weight
    return anatomy


def _is_input(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


def _units(base: nn.Module, blocks: set[nn.Module], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Topmost modules that are blocks or own parameters themselves, in registration order."""
    for name, child in base.named_children():
        path = f"{prefix}{name}"
        if child in blocks or any(True for _ in child.named_parameters(recurse=False)):
            yield path, child
        else:
            yield from _units(child, blocks, path + ".")


def _running_order(
    units: list[tuple[str, nn.Module]], model: PreTrainedModel, blocks: set[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """The units in the order the base model's own forward calls them, found by running it on two rows of fake tensors.
    A unit called twice, or never, is refused by name."""
    calls = stage_calls(model, {module: name for name, module in units}, shape=TRIED)
    called = [call.name for call in calls]
    for name, _ in units:
        if called.count(name) != 1:
            times = "never" if name not in called else f"{called.count(name)} times"
            raise UsageError(
                f"{type(model).__name__}: {name} runs {times} in a forward pass; fuyou streams it once", hint=WORKING
            )
    for call in calls:
        if call.module in blocks and not call.x.is_floating_point():
            reason = f"{call.name} is a block that takes token ids"
            raise UsageError(f"{type(model).__name__} cannot be streamed: {reason}", hint=WORKING)
    modules = dict(units)
    return [(name, modules[name]) for name in called]


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str, str]]]:
    """Parameter identity -> every (module, attribute, full name) that holds it. Tied weights have several."""
    found: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for module_name, module in model.named_modules(remove_duplicate=True):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{attribute}" if module_name else attribute
            found.setdefault(id(parameter), []).append((module, attribute, name))
    return found


def _add(
    anatomy: Anatomy,
    kind: StageKind,
    name: str,
    module: nn.Module | None,
    owner: nn.Module,
    places: dict[int, list[tuple[nn.Module, str, str]]],
    owned: set[int],
) -> None:
    slotted: list[Slotted] = []
    offset = 0
    for parameter in owner.parameters():
        if id(parameter) in owned:
            continue
        owned.add(id(parameter))
        where = places[id(parameter)]
        numel = prod(parameter.shape)
        spec = TensorSpec(
            name=where[0][2], shape=tuple(parameter.shape), offset=offset, numel=numel, decay=parameter.dim() >= 2
        )
        slotted.append(Slotted(spec, tuple((holder, attribute) for holder, attribute, _ in where)))
        offset = align_up(offset + numel, TENSOR_ALIGN)
    anatomy.names.append(name)
    anatomy.kinds.append(kind)
    anatomy.modules.append(module)
    anatomy.parameters.append(tuple(slotted))
    anatomy.params.append(align_up(offset, STAGE_ALIGN))
    anatomy.vocabulary.append(None)
