"""`ModelSpec`: what the planner knows about a model, without its weights.

A model is an ordered list of stages (embedding, decoder blocks, final norm, head). Each stage owns its parameters,
packed one after the other into one flat array: tensor t lives at [offset, offset + numel) of its stage. Offsets are
multiples of 64 elements and stages are padded to a multiple of `STAGE_ALIGN` elements, so that every extent of every
dtype is aligned for O_DIRECT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StageKind = Literal["embedding", "block", "norm", "head"]
Dtype = Literal["float32", "bfloat16"]

ITEM_SIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "int16": 2}
TENSOR_ALIGN = 64  # elements
STAGE_ALIGN = 2048  # elements: 4096 bytes of bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One parameter of a stage. `name` is its name in the model's state dict; `offset` counts elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    decay: bool  # weight decay applies (matrices, not biases or norms)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """One stage. `params` counts elements with padding; `trainable` without. Byte and FLOP figures are for one
    micro-batch of the planned shape."""

    index: int
    kind: StageKind
    name: str
    params: int
    tensors: tuple[TensorSpec, ...]
    forward_flops: float  # one micro-batch, forward
    forward_peak: int  # bytes a forward of one micro-batch allocates at most, inputs and outputs of the stage excluded
    backward_peak: int  # the same for recompute and backward, gradients of one tensor at a time included

    @property
    def trainable(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The whole model at one batch shape."""

    architecture: str
    compute_dtype: Dtype
    hidden_size: int
    vocab_size: int
    stages: tuple[StageSpec, ...]
    tied_head: bool  # the head computes with the embedding stage's weights
    boundary_bytes_per_token: int
    choreography_bytes_per_token: int  # held by the model's own forward between stages, whole batch

    @property
    def parameters(self) -> int:
        return sum(stage.trainable for stage in self.stages)

    @property
    def stored_parameters(self) -> int:
        """With padding: what the store and the update see."""
        return sum(stage.params for stage in self.stages)
