"""A ModelSpec by rules alone, of a model that cannot be run on fake tensors.

Exact: stages, tensors, shapes. By rule: a block or norm holds input and output of every matrix that a token meets, in
backward also their gradients and the gradient of its largest tensor; a head holds 16 bytes for every logit of the tokens
that it takes at once, in backward also the gradient of its weights; an embedding holds its rows, in backward three times.
Work is 2 per parameter and token.
"""

from __future__ import annotations

from ..core.heap import worked_on
from ..spec.model import ModelSpec, StageSpec, TensorSpec
from .anatomy import Anatomy
from .experts import Mixture
from .head import pieces
from .skeleton import TORCH_DTYPE

_LOGIT_BYTES = 16  # of one token and vocabulary entry: logits, float32 copy, softmax, gradient


def ruled(anatomy: Anatomy, *, dtype: str, shape: tuple[int, int], head_chunk_tokens: int) -> ModelSpec:
    """At micro-batches of `shape` (rows, tokens)."""
    width = _width(anatomy)
    boundary = width * TORCH_DTYPE[dtype].itemsize
    stages = []
    for index in range(len(anatomy.kinds)):
        flops, forward, backward = _cost(anatomy, index, item=TORCH_DTYPE[dtype].itemsize, shape=shape, chunk=head_chunk_tokens)
        stages.append(
            StageSpec(
                index=index,
                kind=anatomy.kinds[index],
                name=anatomy.names[index],
                params=anatomy.params[index],
                tensors=tuple(slotted.spec for slotted in anatomy.parameters[index]),
                forward_flops=flops,
                forward_peak=worked_on(forward),
                backward_peak=worked_on(backward),
                vocabulary=anatomy.vocabulary[index],
            )
        )
    return ModelSpec(
        architecture=type(anatomy.model).__name__,
        compute_dtype="bfloat16" if dtype == "bfloat16" else "float32",
        hidden_size=width,
        vocab_size=anatomy.model.config.get_text_config().vocab_size,
        stages=tuple(stages),
        tied_head=anatomy.tied_head,
        boundary_bytes_per_token=boundary,
        choreography_bytes_per_token=2 * boundary,
    )


def _head_tokens(shape: tuple[int, int], chunk: int) -> int:
    """Tokens whose logits are there at once."""
    rows, tokens = next(pieces(*shape, chunk))
    return len(range(*rows.indices(shape[0]))) * len(range(*tokens.indices(shape[1])))


def _cost(anatomy: Anatomy, index: int, *, item: int, shape: tuple[int, int], chunk: int) -> tuple[float, int, int]:
    """Work of a forward, and the peaks of forward and backward in bytes."""
    kind, tokens = anatomy.kinds[index], shape[0] * shape[1]
    tensors = [slotted.spec for slotted in anatomy.parameters[anatomy.owner(index)]]
    largest = item * max((tensor.numel for tensor in tensors), default=0)
    if kind == "head":
        first, end = anatomy.vocabulary[index] or (0, anatomy.model.config.get_text_config().vocab_size)
        forward = _LOGIT_BYTES * (end - first) * _head_tokens(shape, chunk)
        return 2.0 * (end - first) * _width(anatomy) * tokens, forward, forward + largest
    if kind == "embedding":
        rows = tokens * (tensors[0].shape[-1] if tensors else _width(anatomy)) * item
        return 0.0, rows, 3 * rows
    mixture = Mixture.of(anatomy.model.config.get_text_config())
    forward = tokens * item * sum(_ends(tensor, mixture) for tensor in tensors)
    return 2.0 * sum(tensor.numel for tensor in tensors) * tokens, forward, 2 * forward + largest


def _ends(tensor: TensorSpec, mixture: Mixture) -> int:
    """Elements that one token takes into a matrix and out of it. A vector counts four times: norms compute in float32, and
    keep the input in both."""
    if mixture.is_fused(tensor):
        return mixture.chosen * (sum(tensor.shape[1:3]))
    ends = 4 * tensor.numel if len(tensor.shape) < 2 else tensor.shape[0] + tensor.numel // tensor.shape[0]
    return ends * mixture.chosen // mixture.experts if mixture.is_routed(tensor) else ends


def _width(anatomy: Anatomy) -> int:
    """Elements of a boundary."""
    text = anatomy.model.config.get_text_config()
    return int(getattr(text, "hidden_size", None) or anatomy.model.get_input_embeddings().weight.shape[1])
