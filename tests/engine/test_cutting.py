"""Tests which models are cut along their vocabulary, and where."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.cutting import automatic_rows, cut_vocabulary, obstacle, resolved_rows
from fuyou_cli.engine.skeleton import build
from fuyou_cli.spec.model import STAGE_ALIGN, TENSOR_ALIGN

from .families import FAMILIES, VOCABULARY, llama

MORE: dict[str, PreTrainedConfig] = {
    "granite": transformers.GraniteConfig(**{**llama().to_dict(), "logits_scaling": 8.0}),
    "cohere": transformers.CohereConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip


def _model(config: PreTrainedConfig | None = None) -> PreTrainedModel:
    return build(config or llama(), dtype="float32", attention="sdpa")


# ---- the rule of auto ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "width", "rows"),
    [
        (32000, 2048, 0),
        (1 << 17, 1 << 10, 0),  # 2**27 elements
        ((1 << 17) + 1, 1 << 10, 43712),  # three pieces, the last one smaller
        (128256, 2048, 32064),  # Llama-3.2-1B
        (128256, 4096, 16064),  # Llama-3-8B: eight
        (151936, 1024, 50688),  # Qwen3-0.6B
        (256000, 2304, 28480),  # Gemma-2-2B
    ],
)
def test_rows_of_known_shapes(vocabulary: int, width: int, rows: int) -> None:
    assert automatic_rows(vocabulary, width) == rows


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 15))
def test_pieces_are_small_equal_and_few(vocabulary: int, width: int) -> None:
    rows = automatic_rows(vocabulary, width)
    if vocabulary * width <= 1 << 27:
        assert rows == 0
        return
    assert rows % 64 == 0 and rows * width <= 1 << 26
    count = -(-vocabulary // rows)
    fewest = -(-vocabulary // ((1 << 26) // width // 64 * 64))
    assert 3 <= count <= fewest
    assert vocabulary - (count - 1) * rows > 0


def test_auto_cuts_large_models_that_allow_it() -> None:
    config = llama(vocab_size=80_000, hidden_size=2048, num_hidden_layers=1, tie_word_embeddings=True)
    assert resolved_rows(dissect(_model(config)), "auto") == automatic_rows(80_000, 2048) == 26688
    assert resolved_rows(dissect(_model()), "auto") == 0
    mixing = _model(config)
    _after_the_head(lambda logits: logits.log_softmax(-1))(mixing)
    assert resolved_rows(dissect(mixing), "auto") == 0


# ---- what allows it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_real_families_allow_it(family: str) -> None:
    anatomy = dissect(_model({**FAMILIES, **MORE}[family]))
    assert obstacle(anatomy) is None
    assert resolved_rows(anatomy, 40) == 40


def _after_the_head(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[PreTrainedModel], None]:
    """The model's own forward does something to its logits."""

    def prepare(model: PreTrainedModel) -> None:
        original = type(model).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(self, *args, **kwargs)
            out.logits = change(out.logits)
            return out

        model.forward = MethodType(forward, model)

    return prepare


def _masked(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 90] = -1e9
    return logits


class _Normed(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(super().forward(ids), dim=-1)


class _Shifted(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1.0


class _Numbered(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (1.0 + ids.unsqueeze(-1))


class _Mixed(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ids)
        return rows - rows.mean(0, keepdim=True)


class _Head(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(-1)


def _embedding(kind: type[nn.Embedding], **options: Any) -> Callable[[PreTrainedModel], None]:
    def prepare(model: PreTrainedModel) -> None:
        model.set_input_embeddings(kind(VOCABULARY, 32, device="meta", **options))

    return prepare


def _own_head(model: PreTrainedModel) -> None:
    model.lm_head = _Head(32, VOCABULARY, bias=False, device="meta")


def _tied_with_bias(model: PreTrainedModel) -> None:
    model.lm_head = nn.Linear(32, VOCABULARY, device="meta")
    model.lm_head.weight = model.get_input_embeddings().weight


ODD: dict[str, tuple[Callable[[PreTrainedModel], None], str]] = {
    "log-softmax": (_after_the_head(lambda logits: logits.log_softmax(-1)), "depend on each other"),
    "centred": (_after_the_head(lambda logits: logits - logits.mean(-1, keepdim=True)), "depend on each other"),
    "masked columns": (_after_the_head(_masked), "depend on each other"),
    "fixed width": (_after_the_head(lambda logits: logits * torch.ones(VOCABULARY)), "depend on each other"),
    "own head": (_own_head, "head is not a plain linear layer"),
    "bias of a tied head": (_tied_with_bias, "head owns more"),
    "max_norm": (_embedding(nn.Embedding, max_norm=1.0), "not a plain lookup"),
    "scale_grad_by_freq": (_embedding(nn.Embedding, scale_grad_by_freq=True), "not a plain lookup"),
    "normalised rows": (_embedding(_Normed), "more to a row than scale it"),
    "shifted rows": (_embedding(_Shifted), "more to a row than scale it"),
    "numbered rows": (_embedding(_Numbered), "more to a row than scale it"),
    "rows that depend on each other": (_embedding(_Mixed), "more to a row than scale it"),
}


@pytest.mark.parametrize("oddity", ODD)
def test_what_does_not_is_left_whole_or_refused_by_name(oddity: str) -> None:
    prepare, reason = ODD[oddity]
    model = _model()
    prepare(model)
    anatomy = dissect(model)
    assert resolved_rows(anatomy, "auto") == resolved_rows(anatomy, 0) == 0
    with pytest.raises(UsageError, match=rf"head_chunk_vocab: LlamaForCausalLM cannot be cut .*{reason}") as refused:
        resolved_rows(anatomy, 40)
    assert "auto" in str(refused.value.hint)


def test_capped_and_scaled_logits_are_not_odd() -> None:
    for change in (lambda x: torch.tanh(x / 30) * 30, lambda x: x * 0.25):
        model = _model()
        _after_the_head(change)(model)
        assert obstacle(dissect(model)) is None


def test_too_many_pieces_are_refused() -> None:
    anatomy = dissect(_model(llama(vocab_size=1000)))
    assert resolved_rows(anatomy, 4) == 4
    with pytest.raises(UsageError, match="1000 tokens in pieces of 3 are more than 256 pieces"):
        resolved_rows(anatomy, 3)


# ---- the stages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 32, 96, 97, 1000])
@pytest.mark.parametrize("tied", [False, True])
def test_every_element_is_in_one_piece(rows: int, tied: bool) -> None:
    model = _model(llama(tie_word_embeddings=tied))
    if not tied:
        model.lm_head = nn.Linear(32, VOCABULARY, device="meta")  # a bias is cut with the rows
    cut = cut_vocabulary(dissect(model), rows)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found: dict[str, int] = {}
    for stage in cut.stages:
        end = 0
        for spec in stage.tensors:
            assert spec.model_shape == shapes[spec.name]
            assert spec.first == found.get(spec.name, 0)
            assert spec.offset % TENSOR_ALIGN == 0 and spec.offset >= end
            end = spec.offset + spec.numel
            found[spec.name] = spec.first + spec.numel
        assert stage.params % STAGE_ALIGN == 0 and end <= stage.params < end + STAGE_ALIGN
    assert found == {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    count = -(-VOCABULARY // rows)
    assert [stage.kind for stage in cut.stages] == ["embedding"] * count + ["block", "block", "norm"] + ["head"] * count
    if rows == 32:
        assert [stage.name for stage in cut.stages[:2]] == ["embed_tokens[0:32]", "embed_tokens[32:64]"]
        assert cut.stages[-1].name == "head[96:97]"
        assert cut.owner(len(cut.stages) - 1) is cut.stages[3 if tied else -1]


def test_not_cut_is_the_same_anatomy() -> None:
    anatomy = dissect(_model())
    assert cut_vocabulary(anatomy, 0) is anatomy
