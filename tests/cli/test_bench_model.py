"""What `fuyou bench --model` makes of its runs: the arithmetic, and the screen."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fuyou_cli.cli.bench_model import NAMED, Estimate, Point, block_seconds, estimated, show_model_bench
from fuyou_cli.recipe.named import shipped_shapes
from fuyou_cli.training.report import Busy


def _run(step: float, *spans: tuple[str, float, float]) -> Any:
    other = Busy(resource="ssd read", label="read block.0", begin=0.0, end=9.0)
    timeline = (other, *(Busy(resource="compute", label=f"forward {name}", begin=a, end=b) for name, a, b in spans))
    return SimpleNamespace(report=SimpleNamespace(step_seconds=step, timeline=timeline), steps=[SimpleNamespace(seconds=14.0)])


def _estimate(blocks: int, step: float, each: float) -> Estimate:
    return Estimate(blocks=blocks, measured_seconds=step, block_seconds=each, step_seconds=step + (32 - blocks) * each)


POINT = Point(
    batch_size=8, micro_batch_size=2, tokens=8192, parameters=8 * 10**9, frozen_parameters=0, predicted_seconds=33.9,
    step_flops=6 * 8e9 * 8192, device_flops=16e12, busy={"compute": 0.9, "ssd read": 0.4}, homes={"weights": "cpu"},
    estimates=(_estimate(2, 3.0, 1.0), _estimate(4, 5.0, 1.1)),
)  # fmt: skip


def test_a_block_takes_the_time_from_the_end_of_the_visit_before() -> None:
    run = _run(7.0, ("embed_tokens", 0, 1), ("layers.0", 1.5, 2), ("layers.1.mlp[0:8]", 2, 4), ("head", 4.5, 5), ("h.1", 5, 7))
    assert block_seconds(run, 2) == pytest.approx(
        (1.0 + 2.0 + 2.0) / 2 / 2
    )  # the last step took twice the time of the usual one
    assert estimated(run, 2, 12).step_seconds == pytest.approx(7.0 + 10 * 1.25)


def test_estimates_that_differ_by_more_than_a_twentieth_do_not_agree() -> None:
    assert POINT.step_seconds == pytest.approx(35.8) and POINT.apart == pytest.approx(2.8 / 35.8)
    assert POINT.as_data()["agrees"] is False
    assert replace(POINT, estimates=(_estimate(2, 3.0, 1.09), POINT.estimates[1])).as_data()["agrees"] is True


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_says_how_far_the_samples_differ(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_model_bench(console, "8b", [POINT])
    lines = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, lines.splitlines())) <= width
    shown = " ".join(lines.split())
    assert "8 8,192 35.8 s 33.9 s 228.8 11.0 69% 7.8%" in shown
    assert "2 blocks take 3.0 s, of it 1.0 s each, so the whole 33.0 s; 4 blocks take 5.0 s" in shown
    assert "they DO NOT AGREE: 7.8% apart (at most 5%)" in shown


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.03), ("13b", 13.02), ("70b", 70.55), ("175b", 174.6)])
def test_named_shapes_have_their_size(name: str, billions: float) -> None:
    from transformers import AutoConfig

    from fuyou_cli.engine.anatomy import dissect
    from fuyou_cli.engine.skeleton import build

    shapes = shipped_shapes(NAMED[name]) or {}
    anatomy = dissect(build(AutoConfig.for_model(**shapes), dtype="bfloat16", attention="sdpa"))
    assert sum(parameter.numel() for parameter in anatomy.model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)
