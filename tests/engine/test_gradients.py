"""The sum of gradients: in pieces, the same bits as at once."""

from __future__ import annotations

import pytest
import torch

from fuyou_cli.engine import gradients


@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,), (13, 5), (1, 40), (3, 2, 5), (0, 4)])
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("piece", [1, 8, 1 << 19])
def test_pieces_add_up(shape: tuple[int, ...], dtypes: tuple[str, str], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "PIECE", piece)
    torch.manual_seed(3)
    total, gradient = (torch.randn(shape).to(getattr(torch, dtype)) for dtype in dtypes)
    expected = total + gradient.to(torch.float32) if dtypes[0] == "float32" else total.clone().add_(gradient)
    gradients.add_in_pieces(total, gradient)
    assert torch.equal(total, expected)


def test_a_gradient_that_is_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a gradient of a transposed product, say."""
    monkeypatch.setattr(gradients, "PIECE", 8)
    total, gradient = torch.randn(6, 10), torch.randn(10, 6).bfloat16().t()
    expected = total + gradient.float()
    gradients.add_in_pieces(total, gradient)
    assert torch.equal(total, expected)
