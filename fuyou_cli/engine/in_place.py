"""Lays frozen parameters out as they lie in the checkpoint's files, so that they are read from there and never copied.

The daemon reads whole pages, into whole pages of a slot. Tensors of a file begin anywhere, so a parameter lies in the slot
wherever its pages leave it, and what else is in these pages lies around it. Neighbours in a file share a piece.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.units import align_up
from ..spec.model import ITEM_SIZE, PAGE, STAGE_ALIGN, Dtype, InPlace, Lying, Piece, TensorSpec
from .anatomy import Anatomy, Stage


def read_in_place(anatomy: Anatomy, files: InPlace, dtype: Dtype) -> Anatomy:
    """Returns the anatomy with the frozen parameters of every stage where that can be laid out as in the files.

    The others are copied into the store; `imported_because` says why. A stage has all of its frozen parameters in one way."""
    reasons = dict[str, str]()
    stages = list[Stage]()
    for stage in anatomy.stages:
        reason = files.refusal or _reason(stage, files, dtype)
        if stage.frozen and reason:
            reasons[stage.name] = reason
        stages.append(stage if reason or not stage.frozen else _laid_out(stage, files, ITEM_SIZE[dtype]))
    first = next(iter(reasons.values()), "")
    why = first if files.refusal or len(reasons) < 2 else f"{first} ({len(reasons)} stages)"
    sources = files.sources if any(stage.source for stage in stages) else ()
    return replace(anatomy, stages=tuple(stages), sources=sources, imported_because=why)


def whole_in_place(anatomy: Anatomy, files: InPlace, dtype: Dtype) -> Anatomy | None:
    """Returns the anatomy with all parameters of every stage laid out as in the files, to compute with and never to train; None
    where some cannot be. What wants gradients still does: products are chosen by it."""
    if any(_reason(stage, files, dtype, whole=True) for stage in anatomy.stages):
        return None
    stages = [_laid_out(stage, files, ITEM_SIZE[dtype], whole=True) if stage.params else stage for stage in anatomy.stages]
    return replace(anatomy, stages=tuple(stages))


def _reason(stage: Stage, files: InPlace, dtype: Dtype, *, whole: bool = False) -> str:
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


def _laid_out(stage: Stage, files: InPlace, item: int, *, whole: bool = False) -> Stage:
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
