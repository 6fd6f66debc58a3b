"""Tensors of a whole batch: ordinary tensors, whose memory goes back to the system with their last view."""

from __future__ import annotations

import pytest
import torch

from fuyou_cli.cli.probe import process_bytes
from fuyou_cli.engine.whole_batch import whole_batch

MiB = 1 << 20


@pytest.mark.parametrize("shape", [(1, 1), (4, 512, 512), (3, 700, 513)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = whole_batch(shape, dtype)
    assert (tuple(made.shape), made.dtype, made.is_contiguous()) == (shape, dtype, True)
    values = torch.rand(shape).to(dtype)
    made.copy_(values)
    assert torch.equal(made, values)


def test_its_pages_go_back_with_the_last_view() -> None:
    before = process_bytes()
    view = whole_batch((16, 1024, 1024), torch.float32).fill_(1.0)[3]
    assert process_bytes() - before >= 63 * MiB
    del view
    assert process_bytes() - before <= 8 * MiB
