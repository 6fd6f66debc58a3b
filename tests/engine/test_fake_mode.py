"""Fake results that are remembered: the same model's specification as with torch's own fake mode."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from fuyou_cli.engine import calls, fake_mode
from fuyou_cli.engine.describe import outlined, specified
from fuyou_cli.engine.fake_mode import RememberingMode
from fuyou_cli.engine.skeleton import build
from fuyou_cli.spec.model import ModelSpec

from .families import gpt2
from .test_mixtures import FAMILIES


def _specified(config: PreTrainedConfig) -> ModelSpec:
    outline = outlined(build(config, dtype="bfloat16", attention="sdpa"), strict=True)
    return specified(outline, dtype="bfloat16", micro_batch_size=2, max_seq_len=192, head_chunk_tokens=64)


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "deepseek_v3, groups", "gpt2"])
def test_a_model_is_described_as_by_torchs_own_fakes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpt2() if name == "gpt2" else FAMILIES[name]
    config.max_position_embeddings = 192
    quick = _specified(config)
    monkeypatch.setattr(calls, "RememberingMode", partial(FakeTensorMode, allow_non_fake_inputs=True))
    assert quick == _specified(config)


def test_chunks_are_remembered_and_begin_where_they_are() -> None:
    with RememberingMode(), torch.no_grad():
        whole = torch.empty(3, 4, 5)
        chunks = [whole[:, index] for index in range(4)]
        products = [chunk * chunk for chunk in chunks]
        assert [chunk.storage_offset() for chunk in chunks] == [0, 5, 10, 15]
        assert {chunk.untyped_storage()._cdata for chunk in chunks} == {whole.untyped_storage()._cdata}
        assert len({product.untyped_storage()._cdata for product in products}) == 4
        assert {(product.shape, product.stride(), product.storage_offset()) for product in products} == {((3, 5), (5, 1), 0)}
        assert chunks[0].mul_(2) is chunks[0]
        assert chunks[1].mul_(2) is chunks[1]


def test_what_another_mode_has_seen_is_not_taken_where_more_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of results serves all modes, in little room here."""
    monkeypatch.setattr(fake_mode, "_KNOWN", {})
    monkeypatch.setattr(fake_mode, "_MOST_KNOWN", 3)
    usual = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            with RememberingMode() as mode:
                ones = torch.ones(4, 3, dtype=torch.int64)
                across = ones.new_empty(3, 4).t()
                quotients = [ones / 2, across / 2]
                assert {quotient.dtype for quotient in quotients} == {dtype}
                assert [quotient.stride() for quotient in quotients] == [(3, 1), (1, 4)]
                assert all(quotient.fake_mode is mode for quotient in quotients)  # type: ignore[attr-defined]
                assert len(fake_mode._KNOWN) <= 3
    finally:
        torch.set_default_dtype(usual)
