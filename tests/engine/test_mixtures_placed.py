"""Mixtures of experts, whole, in ranges and with LoRA: not a bit of the result depends on where bytes rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drawn import quick_and_slow

from .comparing import Outcome, assert_same
from .rig import Shape, Subject, outcome
from .test_expert_lora import Adapted
from .test_mixtures import FAMILIES

STEPS = 3  # as in `test_equal_bits`
DEVICE: dict[str, Any] = {"device": "emulated", "gpu_budget": 1 << 30}
WAYS: dict[str, dict[str, Any]] = {
    "all in RAM": dict(home="cpu"), "gradients in RAM": dict(gradients="cpu"), "lookahead 3": dict(lookahead=3),
    "emulated device": dict(device="emulated"), "all outputs kept": dict(kept="all"),
    "outputs kept there": dict(DEVICE, kept_there="room"), "two sweeps": dict(sweeps=2), "norm first": dict(norm_first=True),
    "deferred updates": dict(defer=True), "states on the device": dict(DEVICE, device_states=(1, 2)),
}  # fmt: skip
OF_RANGES: dict[str, dict[str, Any]] = {
    **WAYS, "states on the device": dict(DEVICE, device_states=(1, 2, 3)), "norm first there": dict(DEVICE, norm_first=True),
    "batch passes through the host": dict(device="emulated", batch_on_device=False),
    "two sweeps across": dict(device="emulated", batch_on_device=False, sweeps=2),
    "boundaries there": dict(DEVICE, boundaries="gpu"), "one directory of two": dict(directories=2),
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {  # families with their dtype, and ways
    "whole": ({"qwen3_moe, dense and sparse": "bfloat16", "gpt_oss": "float32", "deepseek_v3, groups": "bfloat16"}, WAYS),
    "ranges": ({"qwen3_moe, dense and sparse": "bfloat16", "gpt_oss": "float32", "deepseek_v3, groups": "bfloat16"}, OF_RANGES),
    "LoRA": ({"qwen3_moe": "bfloat16", "deepseek_v3, groups": "float32"}, WAYS),
}
CASES = [(kind, family, way) for kind, (families, ways) in KINDS.items() for family in families for way in ways]
# In the quick suite: ranges in every other way, whole mixtures and LoRA in those between, each of a kind's first family.
QUICK = {"whole": [*WAYS][1::4], "ranges": [*OF_RANGES][::2], "LoRA": [*WAYS][3::4]}


def _is_quick(number: int) -> bool:
    kind, family, way = CASES[number]
    return family == next(iter(KINDS[kind][0])) and way in QUICK[kind]


@pytest.fixture(scope="module")
def subjects() -> Callable[[str, str], Subject]:
    """Makes each once."""

    def made(kind: str, family: str) -> Subject:
        shape = Shape(dtype=KINDS[kind][0][family], experts=2 if kind == "ranges" else 0)
        return Adapted(family, shape) if kind == "LoRA" else Subject(FAMILIES[family], shape)

    return cache(made)


@pytest.fixture(scope="module")
def on_the_ssd(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Subject], Outcome]:
    return cache(lambda subject: outcome(subject, tmp_path_factory.mktemp("store"), STEPS))


@pytest.mark.parametrize(("kind", "family", "way"), quick_and_slow(CASES, _is_quick))
def test_same_bits(
    kind: str, family: str, way: str, subjects: Callable[[str, str], Subject], on_the_ssd: Callable[[Subject], Outcome],
    tmp_path: Path,
) -> None:  # fmt: skip
    subject = subjects(kind, family)
    assert_same(outcome(subject, tmp_path, STEPS, **KINDS[kind][1][way]), on_the_ssd(subject))
