"""Marks which weights of a model rest quantised: frozen matrices of linear layers in its blocks, as bitsandbytes chooses."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..core.errors import UsageError
from ..spec.packed_tensors import Quantised
from .anatomy import Anatomy, Slotted, Stage


def quantised(anatomy: Anatomy, quantisation: Quantised | None) -> Anatomy:
    """Returns the anatomy with these weights behind all others of their stages. Embeddings, the head, norms and biases stay as
    they are. Raises UsageError where there is no such weight."""
    if quantisation is None:
        return anatomy
    stages = tuple(_marked(stage, quantisation) if stage.kind == "block" else stage for stage in anatomy.stages)
    if not any(stage.quantised for stage in stages):
        raise UsageError(
            f"model.quantize: the blocks of {type(anatomy.model).__name__} have no frozen matrix in a torch.nn.Linear",
            hint="set model.quantize=none, or freeze some layers: only their weights are quantised",
        )
    return replace(anatomy, stages=stages)


def _marked(stage: Stage, quantisation: Quantised) -> Stage:
    parameters = [replace(slotted, spec=replace(slotted.spec, quantised=_is_chosen(slotted))) for slotted in stage.parameters]
    return Stage.packed(stage.name, stage.kind, stage.module, parameters, stage.vocabulary, quantisation)


def _is_chosen(slotted: Slotted) -> bool:
    of_linear = all(isinstance(holder, nn.Linear) and attribute == "weight" for holder, attribute in slotted.places)
    return slotted.spec.frozen and of_linear and len(slotted.spec.shape) == 2
