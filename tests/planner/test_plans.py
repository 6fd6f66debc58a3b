"""Nine plans beside those of before, whose seconds and bytes are in plans.json: none is clearly worse. Every other one is slow.

Models are described here, machines by their parts. What may differ, and how much, is as in scripts/compare_plans.py, which
plans real configurations. After a change that is meant to: `python -m tests.planner.test_plans` writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.machine.described import described
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import LEAST_WRITTEN, WORTH, search
from fuyou_cli.spec.model import ModelSpec, OperatorSpec, banks_of
from fuyou_cli.spec.plan import Numerics
from tests.drawn import every

from .models import NUMERICS, model

FIGURES = Path(__file__).with_name("plans.json")
WORSE = 0.003  # of the objective, at most
_WORDS = 128_256


def transformer(hidden: int, blocks: int, numerics: Numerics, *, rank: int = 0) -> ModelSpec:
    """Describes a Llama whose MLP is 3.5 times as wide. `rank`: of an adapter, beside which all other weights are frozen."""
    tokens, length = numerics.micro_batch_tokens, numerics.max_seq_len
    inputs = {  # width of what comes out, and FLOPs, both in units of `hidden`
        "qkv": (1.5, 1.5), "attention": (1, length / hidden), "out": (1, 1), "gate": (3.5, 3.5), "up": (3.5, 3.5),
        "down": (1, 3.5),
    }  # fmt: skip
    operators = tuple(
        OperatorSpec(index=index, name=name, flops=2 * flops * hidden**2 * tokens, bytes=int(2 * width * hidden * tokens))
        for index, (name, (width, flops)) in enumerate(inputs.items())
    )
    unit, matrix = 2 * hidden * tokens, sum(flops for name, (_, flops) in inputs.items() if name != "attention") * hidden**2
    flops = sum(operator.flops for operator in operators)
    spec = model(_WORDS * hidden, *[int(matrix)] * blocks, 1 << 13, _WORDS * hidden, hidden=hidden)
    stages = []
    for stage in spec.stages:
        if stage.kind == "block":
            stage = replace(stage, operators=operators, forward_flops=flops, forward_peak=8 * unit, backward_peak=20 * unit)
        if rank:
            trained = 18 * rank * hidden if stage.kind == "block" else 0
            frozen_flops = stage.forward_flops if stage.params else 0.0
            banks = banks_of("bfloat16", trained=trained, frozen=stage.params)
            stage = replace(stage, banks=banks, frozen_flops=frozen_flops, goes_back=stage.kind != "embedding")
        stages.append(stage)
    return replace(spec, stages=tuple(stages), may_sweep=True)


def cases() -> Iterator[tuple[str, str, int, int, int, float | None, dict[str, object]]]:
    """Yields a name, the machine, hidden size, blocks, rows of a step, clipping, and changes of the request."""
    yield "3B, one drive, clipped", "rtx4090,gen4,32GiB", 3072, 16, 8, 1.0, {}
    yield "3B, two drives, many rows, not clipped", "rtx4090,2xgen4,32GiB", 3072, 16, 64, None, {}
    yield "6B, 8 GB, clipped", "rtx4090,gen4,64GiB", 4096, 20, 8, 1.0, {"gpu_budget": 8 * GiB}
    yield "6B, 80 GB, not clipped", "h100,gen4,64GiB", 4096, 20, 8, None, {"gpu_budget": 79 * GiB}
    yield "6B, all RAM, ignoring wear, clipped", "rtx4090,gen4,128GiB", 4096, 20, 16, 1.0, {"wear": "ignore"}
    yield "1B on a processor, not clipped", "gen4,12GiB", 2048, 8, 8, None, {"device": "cpu", "gpu_budget": None}
    yield "13B, LoRA, 12 GB", "rtx4090,gen4,32GiB", 5120, 24, 16, 1.0, {"rank": 16, "gpu_budget": 11 * GiB}
    yield "13B, LoRA, RAM", "rtx4090,2xgen4,64GiB", 5120, 24, 16, None, {"rank": 16}
    yield "3B, states on the ssd", "rtx4090,gen4,32GiB", 3072, 16, 8, 1.0, {"states": "ssd"}


CASES = {name: rest for name, *rest in cases()}


def planned(name: str) -> dict[str, float]:
    machine, hidden, blocks, rows, clip, changes = CASES[name]
    length = 1024 if "processor" in name else 4096
    numerics = replace(NUMERICS, batch_size=rows, micro_batch_size=1, max_seq_len=length, accumulate_dtype="bfloat16")
    rank = int(changes.get("rank", 0))  # type: ignore[call-overload]
    hardware, spec = described(machine), transformer(hidden, blocks, numerics, rank=rank)
    request = PlanRequest(
        numerics=numerics, model_name=name, device="cuda", clip_grad_norm=clip, cpu_budget=int(0.9 * hardware.ram_available),
        gpu_budget=int(0.95 * hardware.device_memory), scratch_size=64 * MiB, update_threads=4, wear="spare", sustained=True,
        commit_every="auto",
    )  # fmt: skip
    request = replace(request, **{key: value for key, value in changes.items() if key != "rank"})
    best = search(spec, hardware, request).best
    least = LEAST_WRITTEN * sum(stage.weight_bytes + stage.state_bytes for stage in spec.stages)
    return {"seconds": best.seconds, "written": max(best.written, least)}


@pytest.mark.parametrize("name", every(2, CASES))
def test_no_plan_is_worse_than_before(name: str) -> None:
    before, now = json.loads(FIGURES.read_text(encoding="utf-8"))[name], planned(name)
    least = min(before["written"], now["written"])
    costs = [plan["seconds"] * (1 + 2 * WORTH * (1 - least / plan["written"])) for plan in (before, now)]
    assert costs[1] <= costs[0] * (1 + WORSE), (before, now)


if __name__ == "__main__":
    FIGURES.write_text(json.dumps({name: planned(name) for name in CASES}, indent=1) + "\n", encoding="utf-8")
