"""Traces leave nothing behind, and a forward does not depend on the ones before it."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.generating import room
from fuyou_cli.engine.module_state import ModuleState, check_no_fakes, tracing
from fuyou_cli.engine.skeleton import build

from .families import llama

_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 2.5, 3.0]}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


class _Keeps(nn.Module):
    """Remembers its inputs in every way that a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.recent: deque[torch.Tensor] = deque(maxlen=2)
        self.by_length: dict[int, Any] = {}
        self.inside, self.calls, self.last = SimpleNamespace(longest=None), 0, (None,)
        self.register_buffer("longest", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        self.recent.append(x)
        self.by_length[x.shape[0]] = {"x": [x]}
        self.inside.longest, self.last, self.new = x, (x,), x  # type: ignore[assignment]
        self.calls += 1
        self.register_buffer("longest", x, persistent=False)
        return x


def _assert_as_made(keeps: _Keeps) -> None:
    check_no_fakes(keeps)
    assert (keeps.seen, keeps.by_length, keeps.inside.longest, keeps.last, keeps.calls) == ([], {}, None, (None,), 0)
    assert not keeps.recent
    assert keeps.longest.tolist() == [0, 0] and not hasattr(keeps, "new")


def test_a_trace_leaves_nothing_behind() -> None:
    keeps = _Keeps()
    with tracing(keeps):
        keeps(torch.ones(4))
        with pytest.raises(UsageError, match=r"a tensor of an inspection in _Keeps\.longest"):
            check_no_fakes(keeps)
    _assert_as_made(keeps)


def test_an_ended_trace_leaves_nothing_behind_either() -> None:
    keeps = _Keeps()
    with pytest.raises(ZeroDivisionError), tracing(keeps):
        keeps(torch.ones(4))
        raise ZeroDivisionError
    _assert_as_made(keeps)


def test_what_cannot_be_put_back_is_refused_by_name() -> None:
    layer = nn.Linear(2, 2)
    layer.config = PreTrainedConfig()  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"keeps a tensor of an inspection in Linear\.config\.cosines"), tracing(layer):
        layer.config.cosines = torch.ones(2)


def test_modules_are_put_back_as_loaded() -> None:
    keeps = _Keeps()
    state = ModuleState(keeps)
    assert state.put_back() == []
    keeps(torch.ones(4))
    names = ("seen", "recent", "by_length.4", "inside.longest", "last", "new", "calls", "longest")
    assert sorted(state.put_back()) == sorted(f"_Keeps.{name}" for name in names)
    _assert_as_made(keeps)


def test_what_is_written_in_place_is_undone_or_refused() -> None:
    keeps = _Keeps()
    state = ModuleState(keeps)
    keeps.longest.fill_(3)
    assert state.put_back() == ["_Keeps.longest"] and keeps.longest.tolist() == [0, 0]
    keeps.longest.fill_(4)
    assert state.put_back() == ["_Keeps.longest"] and keeps.longest.tolist() == [0, 0]
    keeps.table = torch.zeros(1 << 20)
    state = ModuleState(keeps)
    keeps.table[0] = 1
    with pytest.raises(UsageError, match=r"_Keeps\.table: a forward writes into this tensor"):
        state.put_back()


def test_parameters_and_the_mode_are_left_alone() -> None:
    layer = nn.Linear(2, 2)
    state = ModuleState(layer)
    layer.weight = nn.Parameter(torch.ones(2, 2))
    layer.eval()
    assert state.put_back() == [] and layer.weight.sum() == 4 and not layer.training


def _phi3(**changes: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.Phi3Config(
        **sizes, **ends, intermediate_size=64, max_position_embeddings=64, original_max_position_embeddings=16,
        rope_parameters=dict(_LONG), **changes,
    )  # fmt: skip


ROTATED = {"longrope": _phi3(), "dynamic": llama(rope_parameters=dict(_DYNAMIC), max_position_embeddings=16)}


def _cosines(model: Any, tokens: int) -> torch.Tensor:
    found: torch.Tensor = model.base_model.rotary_emb(torch.zeros(1), torch.arange(tokens).unsqueeze(0))[0]
    return found


@pytest.mark.parametrize("name", ROTATED)
def test_positions_after_traces_are_those_of_a_fresh_model(name: str) -> None:
    """Rows shorter and longer than the length that the configuration names, each after traces of both."""
    model = build(ROTATED[name], dtype="float32", attention="sdpa")
    state = ModuleState(model)
    anatomy = dissect(model)
    for tokens in (8, 40):
        inspect(anatomy, dtype="float32", micro_batch_size=1, max_seq_len=tokens, head_chunk_tokens=0)
        room(model, rows=1, prompt=4, new=tokens)
    for tokens in (40, 8, 40, 24, 12):
        fresh = _cosines(build(ROTATED[name], dtype="float32", attention="sdpa"), tokens)
        assert torch.equal(_cosines(model, tokens), fresh), tokens
        state.put_back()
    assert not torch.equal(_cosines(model, 40)[:, :8], _cosines(build(ROTATED[name], dtype="float32", attention="sdpa"), 8))
