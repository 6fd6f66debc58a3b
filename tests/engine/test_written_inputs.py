"""Tests a model whose block writes into its own input, while its copy to the host is under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fuyou_cli.core.errors import UsageError

from .comparing import assert_same
from .families import llama
from .rig import Rig, Shape, Subject

REFUSED = r"^layers.0 \(LlamaDecoderLayer\) writes into its own input \(aten.mul_\), which backward needs unchanged$"


def _subject(monkeypatch: pytest.MonkeyPatch, *, in_place: bool) -> Subject:
    """Makes a model of which autograd sees nothing of that: what it sees is refused before there is a plan."""
    forward = LlamaDecoderLayer.forward

    def writes(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if in_place:
            hidden_states.detach().mul_(1.5)
        else:
            hidden_states = hidden_states + (hidden_states / 2).detach()
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", writes)
    return Subject(llama(), Shape(batch=4, micro=2))


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("kept", [None, "all"])
def test_is_refused_by_name(stays: bool, kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = _subject(monkeypatch, in_place=True)
    with Rig(subject, tmp_path, device="emulated", home="cpu", kept=kept, batch_on_device=stays) as rig:
        with pytest.raises(UsageError, match=REFUSED):
            rig.run(1)
        rig.executor.abandon()


def test_on_device_cpu_the_input_is_kept_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for in_place in (True, False):
        with monkeypatch.context() as patch:
            subject = _subject(patch, in_place=in_place)
            with Rig(subject, tmp_path / str(in_place), home="cpu", clip=None) as rig:
                found.append((rig.run(2), rig.weights()))
    assert_same(found[0], found[1])
