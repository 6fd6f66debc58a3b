"""Tests what `auto` and shares of RAM stand for, on machines of several kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuyou_cli.core.units import GiB
from fuyou_cli.engine.processor import has_fast_bfloat16
from fuyou_cli.machine.described import described
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.plan import Numerics
from fuyou_cli.training.numerics import gpu_limit, gpu_most, note_slow_products
from fuyou_cli.training.plan_step import plan_request

from .conftest import NewProject

NUMERICS = Numerics(
    compute_dtype="bfloat16", accumulate_dtype="float32", batch_size=4, micro_batch_size=2, max_seq_len=64, head_chunk_tokens=0,
    torch_threads=2, seed=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "pinnable", "budget", "expected"),
    [
        ("cuda", 64 * GiB, "auto", int(0.9 * 62 * GiB)),
        ("cuda", 32 * GiB, "auto", 32 * GiB),  # WSL: nearly all of a run's memory is pinned
        ("cpu", 32 * GiB, "auto", int(0.9 * 62 * GiB)),
        ("cuda", 0, "auto", int(0.9 * 62 * GiB)),  # not known
        ("cuda", 32 * GiB, "90%", int(0.9 * 64 * GiB)),  # asked for: refused by name where the plan takes it
        ("cuda", 32 * GiB, "48GiB", 48 * GiB),
    ],
)
def test_the_budget(new_project: NewProject, device: str, pinnable: int, budget: str, expected: int) -> None:
    machine = replace(described("rtx4090,gen4,64GiB"), device=device, pinnable=pinnable)
    changes = [f"offload.max_memory.cpu={budget}", "offload.device=auto"]
    recipe = load_recipe(new_project().recipe, changes).recipe
    assert plan_request(recipe, NUMERICS, machine, device=device).cpu_budget == expected


@pytest.mark.parametrize(
    ("free", "budget", "expected"),
    [
        (0, "auto", int(0.95 * 24 * GiB)),  # described: all of it is
        (24 * GiB, "auto", int(0.95 * 24 * GiB)),
        (21 * GiB, "auto", int(0.95 * 21 * GiB)),  # others hold the rest
        (21 * GiB, "50%", int(0.95 * 12 * GiB)),  # a share is of the card
        (21 * GiB, "22GiB", int(0.95 * 21 * GiB)),  # more than there is
        (0, "22GiB", int(0.95 * 22 * GiB)),
    ],
)
def test_the_budget_of_a_card(new_project: NewProject, free: int, budget: str, expected: int) -> None:
    """Shows that what the process may have is a little more."""
    machine = replace(described("rtx4090,gen4,64GiB"), device_free=free)
    recipe = load_recipe(new_project().recipe, [f"offload.max_memory.gpu={budget}", "offload.device=auto"]).recipe
    assert gpu_limit(recipe, machine) == expected
    assert int(0.95 * (gpu_most(recipe, machine) or 0)) == expected
    assert plan_request(recipe, NUMERICS, machine, device="cuda").gpu_budget == expected


@pytest.mark.parametrize(
    ("dtype", "device", "slow"), [("bfloat16", "cpu", True), ("float32", "cpu", False), ("bfloat16", "cuda", False)]
)
def test_slow_products_are_said(new_project: NewProject, dtype: str, device: str, slow: bool) -> None:
    said = list[str]()
    recipe = load_recipe(new_project(changes={"precision.compute": dtype}).recipe).recipe
    note_slow_products(recipe, device, said.append)
    assert len(said) == (slow and not has_fast_bfloat16())
    assert all("precision.compute=float32" in text for text in said)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], None),
        (["offload.gradients=auto", "offload.norm_first=always"], True),
        (["model.trust_remote_code=true"], False),
    ],
)
def test_code_whose_backward_writes_into_outputs_has_one_backward(
    new_project: NewProject, changes: list[str], expected: bool | None
) -> None:
    recipe = load_recipe(new_project().recipe, ["train.clip_grad_norm=1", *changes]).recipe
    machine = replace(described("rtx4090,gen4,64GiB"), device="cpu")
    assert plan_request(recipe, NUMERICS, machine, device="cpu").norm_first is expected
