"""Marks which weights of a model rest quantised: frozen matrices of linear layers in its blocks, as bitsandbytes chooses,
and of their experts."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import UsageError
from ..spec.packed_tensors import TRANSPOSED, Quantised
from .anatomy import Anatomy, Slotted, Stage
from .experts import is_experts


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
