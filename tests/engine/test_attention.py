"""The names of attention's kernels: those that are allowed, and the one that is taken."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fuyou_cli.advice.facts import allowed_kernels
from fuyou_cli.engine.attention import AttentionSeen, attend, rows_are_whole
from fuyou_cli.engine.compiled import CompiledBlocks, load_compiler

from .families import FAMILIES, gpt2, llama
from .rig import Rig, Shape, Subject
from .test_mixtures import FAMILIES as MIXTURES


@pytest.mark.parametrize(
    ("device", "dtype", "deterministic", "expected"),
    [
        ("cuda", "bfloat16", False, ("flash", "cudnn", "efficient", "math")),
        ("cuda", "bfloat16", True, ("flash", "efficient", "math")),
        ("cuda", "float32", False, ("efficient", "math")),
        ("cpu", "bfloat16", True, ("flash", "math")),
    ],
)
def test_allowed(device: str, dtype: str, deterministic: bool, expected: tuple[str, ...]) -> None:
    assert allowed_kernels(device, dtype, deterministic=deterministic) == expected


def test_what_the_user_turned_off_is_not_allowed() -> None:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert allowed_kernels("cuda", "bfloat16") == ("efficient", "math")


@pytest.mark.parametrize(
    ("subject", "backends", "expected"),
    [
        (lambda: Subject(llama(), Shape()), [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "flash"),
        (lambda: Subject(llama(), Shape()), [SDPBackend.MATH], "math"),
        (lambda: Subject(gpt2(dropout=0.1), Shape()), [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "math"),
        (lambda: Subject(FAMILIES["gemma2"], Shape()), [SDPBackend.MATH], ""),  # which has no attention by sdpa
    ],
)
def test_the_one_taken_is_seen_in_the_first_step(subject: Any, backends: Any, expected: str, tmp_path: Path) -> None:
    with Rig(subject(), tmp_path, home="cpu", kept="all") as rig, sdpa_kernel(backends):
        rig.run(2)
        assert rig.executor.attention.kernel == expected


def test_a_compiled_block_is_not_looked_into(tmp_path: Path) -> None:
    load_compiler()
    torch._dynamo.reset()
    blocks = CompiledBlocks(backend="aot_eager")
    with Rig(Subject(llama(), Shape()), tmp_path, home="cpu", compiled=blocks) as rig:
        rig.run(2)
        assert (rig.executor.attention.kernel, blocks.graphs) == ("", 1)


def test_it_is_asked_once() -> None:
    q = torch.randn(1, 2, 4, 8)
    with AttentionSeen() as seen:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert seen.kernel == "flash"
        torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert seen.kernel == "flash"


def test_flash_attention_looks_at_no_values_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone could be a packed one: transformers looks, which an inspection without values cannot."""
    from transformers import modeling_flash_attention_utils as flash

    spec = find_spec(flash.__name__)
    assert spec is not None and spec.loader is not None
    fresh = module_from_spec(spec)  # another test may have built a model with flash attention in this process
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(flash, "_is_packed_sequence", fresh._is_packed_sequence)  # is put back
    with FakeTensorMode() as fake:
        positions = fake.from_tensor(torch.arange(8).unsqueeze(0))
        with pytest.raises(RuntimeError, match=r"data.dependent|_local_scalar_dense"):
            bool(flash._is_packed_sequence(positions, 1))
        rows_are_whole()
        assert flash._is_packed_sequence(positions, 1) is False


# ---- latent attention, whose values are narrower than its queries ----------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_narrow_values_are_attended_to_as_by_torch(masked: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 4, 48, size, generator=generator, requires_grad=True) for size in (24, 24, 16))
    mask = torch.ones(48, 48, dtype=torch.bool).tril().logical_and(torch.rand(48, 48, generator=generator) < 0.7)
    mask = (mask | torch.eye(48, dtype=torch.bool)).view(1, 1, 48, 48) if masked else None
    grad = torch.randn(2, 48, 4, 16, generator=generator)
    found = []
    for function in (attend, sdpa_attention_forward):
        out, _ = function(torch.nn.Module(), query, key, value, mask, scaling=0.3, is_causal=not masked)
        found.append((out, *torch.autograd.grad(out, (query, key, value), grad)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_narrow_values_take_a_fused_kernel(tmp_path: Path) -> None:
    """So a block takes no scores of a row times a row."""
    with Rig(Subject(MIXTURES["deepseek_v3"], Shape()), tmp_path, home="cpu") as rig:
        rig.run(1)
        assert rig.executor.attention.kernel == "flash"
    short, long = (
        next(stage for stage in Subject(MIXTURES["deepseek_v3"], Shape(tokens=tokens)).spec.stages if stage.kind == "block")
        for tokens in (512, 2048)
    )
    assert long.backward_peak < 4.5 * short.backward_peak
