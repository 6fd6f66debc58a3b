"""Tests what a plan charges for the code that libraries keep for each shape."""

from __future__ import annotations

from dataclasses import replace

from fuyou_cli.planner.memory import ATTENTION_CODE, MOST_PRODUCTS, PRODUCT_CODE, code_bytes

from .models import NUMERICS, SPEC

STAGES = tuple(
    replace(stage, tensors=tuple(replace(tensor, shape=(8 + stage.index, tensor.numel)) for tensor in stage.tensors))
    for stage in SPEC.stages
)
MATRICES = replace(SPEC, stages=STAGES)
SHAPES = {tensor.shape for stage in STAGES if stage.kind != "embedding" for tensor in stage.tensors}
BFLOAT16 = replace(NUMERICS, compute_dtype="bfloat16", max_seq_len=512, document_step=64)


def test_each_width_more_has_its_products() -> None:
    """Three of each trained matrix (forward, and two of backward), one of each where nothing is trained."""
    one, two, eight = (code_bytes(MATRICES, BFLOAT16, widths=widths) for widths in (1, 2, 8))
    assert one == 7 * ATTENTION_CODE and len(SHAPES) > 2  # eight lengths of documents
    assert two - one == 3 * len(SHAPES) * PRODUCT_CODE and eight - one == 7 * (two - one)
    forward = code_bytes(MATRICES, BFLOAT16, widths=2, trains=False)
    assert forward - one == len(SHAPES) * PRODUCT_CODE
    assert code_bytes(MATRICES, BFLOAT16, widths=1 << 20) == one + MOST_PRODUCTS * PRODUCT_CODE
    assert code_bytes(MATRICES, replace(BFLOAT16, compute_dtype="float32"), widths=8) == 0
    whole = replace(BFLOAT16, document_step=0)
    assert code_bytes(MATRICES, whole, widths=8) - 7 * (two - one) == 7 * ATTENTION_CODE  # as many lengths as widths
