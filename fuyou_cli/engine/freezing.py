"""Freezes parameters by the patterns of a recipe, and says what backward is spared by that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..core.errors import UsageError
from ..spec.model import ModelSpec, StageSpec
from .anatomy import Anatomy, Slotted, Stage

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
    for pattern in [one for one in unmatched if any(_matches(one, name) for every in names.values() for name in every)]:
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
    found = []
    for names in _every_name(anatomy).values():
        meant = [name for name in names if any(_matches(pattern, name) for pattern in patterns)]
        found += [(name, meant[0]) for name in names if meant and name not in meant]
    return found


def as_marked(anatomy: Anatomy) -> Anatomy:
    """Returns the anatomy with frozen exactly those parameters that require no gradient, as peft leaves a model."""

    def of(slotted: Slotted) -> Slotted:
        holder, attribute = slotted.places[0]
        parameter = holder._parameters[attribute]
        assert parameter is not None
        if slotted.spec.frozen == (not parameter.requires_grad):
            return slotted
        return replace(slotted, spec=replace(slotted.spec, frozen=not parameter.requires_grad))

    return _with_parameters(anatomy, of)


def _with_parameters(anatomy: Anatomy, of: Callable[[Slotted], Slotted]) -> Anatomy:
    """Returns the anatomy with changed parameters, its stages packed anew: trained ones come first."""
    stages = tuple(
        Stage.packed(stage.name, stage.kind, stage.module, list(map(of, stage.parameters)), stage.vocabulary)
        for stage in anatomy.stages
    )
    return replace(anatomy, stages=stages)


def _every_name(anatomy: Anatomy) -> dict[int, list[str]]:
    """Returns all names of each parameter, by identity: tied weights have several."""
    found: dict[int, list[str]] = {}
    for name, parameter in anatomy.model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _identity(slotted: Slotted) -> int:
    holder, attribute = slotted.places[0]
    return id(holder._parameters[attribute])


def _matches(pattern: str, name: str) -> bool:
    """Tells whether a pattern is of this parameter, or of a module that it is in."""
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
    found = re.fullmatch(rf"{expression}(?:\..*)?", name)
    return found is not None and all(int(text) in numbers for text, numbers in zip(found.groups(), ranges, strict=True))


def _pattern_of(stage: Stage) -> str:
    """Returns a pattern that matches the stage, one for all blocks."""
    before, name, _ = stage.parameters[0].spec.name.partition(stage.name)
    return re.sub(r"\.\d+$", ".*", before + name)


# ---- what backward is spared ------------------------------------------------------------------------------------------


def with_frozen_work(model: ModelSpec, *, tokens: int) -> ModelSpec:
    """Says which stages backward visits and what it computes there. `tokens`: of a micro-batch.

    It ends at the lowest stage with something to learn. Nothing is kept of the stages below."""
    lowest = next(_learning(model), 0)
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


def _learning(model: ModelSpec) -> Iterator[int]:
    """Yields the stages that compute with a trained parameter, the lowest first."""
    return (stage.index for stage in model.stages if model.stages[model.owner(stage.index)].trained)


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
