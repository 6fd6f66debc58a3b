"""Tests Liger's kernels, by way of transformers: a package of that name stands for it, which has no GPU to run on here."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers.integrations.liger as integration

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.liger import apply_liger, check_liger

from .comparing import unequal
from .families import gpt2, llama
from .rig import Rig, Shape, Subject


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Holds what the package was asked for; it puts a norm of its own, of the same arithmetic, in every block."""
    found: list[dict[str, Any]] = []

    def patch(model: Any, **options: Any) -> None:
        found.append(options)
        for layer in model.model.layers:
            norm, own = layer.input_layernorm, type(layer.input_layernorm).forward

            def forward(x: torch.Tensor, norm: Any = norm, own: Any = own) -> torch.Tensor:
                options["called"] = True
                return own(norm, x)

            norm.forward = forward

    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    for name in names:
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module._apply_liger_kernel_to_instance = patch
        module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": patch}
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(integration, "is_liger_kernel_available", lambda: True)
    return found


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="the package is here")
def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(UsageError, match="liger-kernel is not installed") as caught:
        check_liger(Subject(llama(), Shape()).anatomy.model)
    assert "fuyou[liger]" in (caught.value.hint or "")


def test_a_family_that_it_has_nothing_for_is_refused(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="has no kernels for models of type gpt2"):
        apply_liger(Subject(gpt2(), Shape()).anatomy.model)
    assert asked == []


def test_blocks_compute_with_it_and_the_loss_stays_ours(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    with Rig(Subject(llama(), Shape()), tmp_path / "torch", home="cpu") as rig:
        losses, weights = rig.run(2), rig.weights()
    subject = Subject(llama(), Shape())
    apply_liger(subject.anatomy.model)
    with Rig(subject, tmp_path / "liger", home="cpu") as rig:
        assert rig.run(2) == losses
        assert unequal(rig.weights(), weights) == []
    assert asked == [{"cross_entropy": False, "fused_linear_cross_entropy": False, "rope": False, "called": True}]
