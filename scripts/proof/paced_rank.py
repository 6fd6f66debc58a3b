#!/usr/bin/env python3
"""Runs `fuyou finetune RECIPE` on a processor of so many FLOP/s, for which the rank sleeps: other programs then hardly matter.

    python scripts/proof/paced_rank.py FLOPS RECIPE

What a block or the head computes of a micro-batch takes its FLOPs over that rate at least. The machine's kept profile says that
rate, and assumed ones for all else, so a plan knows this processor. Only for device cpu, without kept outputs.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuyou_cli.cli.app import main as fuyou
from fuyou_cli.engine import head, passes
from fuyou_cli.engine.activations import Recompute
from fuyou_cli.machine.profile import assumed_hardware, profile_path, write_profile
from fuyou_cli.recipe.load import load_recipe

LATE = 0.03  # seconds: a pass that begins so much after the one before makes up for it, as a busy system wakes sleepers late


class Pace:
    """Holds when the pass over a micro-batch began, and what a token of it takes."""

    def __init__(self, flops: float) -> None:
        self._rate, self._of_token, self._over = flops, 0.0, 0.0

    def begin_visit(self, visits: Any, stage: int) -> None:
        tokens = visits.plan.numerics.micro_batch_tokens
        self._of_token = visits.model.stages[stage].forward_flops / tokens / self._rate

    def begin(self, x: Any, times: float) -> None:
        now = time.perf_counter()
        began = self._over if now - self._over < LATE else now
        self._over = began + times * x.shape[0] * x.shape[1] * self._of_token

    def end(self) -> None:
        time.sleep(max(0.0, self._over - time.perf_counter()))


def hold(pace: Pace) -> None:
    """Has what computes wait for the pace: a forward of a block, a backward of a block or the head, which computes forward
    again."""
    compute, differentiate = passes.BlockPasses.compute, passes.BlockPasses.differentiate
    run_head, forward, recompute = head.HeadPasses.run, Recompute.forward, Recompute.recompute
    loss, backpropagate = head.Head.loss, passes.backpropagate

    def of_visit(method: Any) -> Any:
        def called(self: Any, call: Any, *arguments: Any, **keywords: Any) -> Any:
            pace.begin_visit(self.visits, call.stage)
            return method(self, call, *arguments, **keywords)

        return called

    def paced_forward(self: Any, run: Any, x: Any, *arguments: Any) -> Any:
        pace.begin(x, 1.0)
        y = forward(self, run, x, *arguments)
        pace.end()
        return y

    def begun(method: Any, place: int) -> Any:
        def called(*arguments: Any, **keywords: Any) -> Any:
            pace.begin(arguments[place], 3.0)
            return method(*arguments, **keywords)

        return called

    def paced_backward(*arguments: Any, **keywords: Any) -> None:
        backpropagate(*arguments, **keywords)
        pace.end()

    def paced_head(self: Any, *arguments: Any) -> Any:
        pace.begin_visit(self.visits, self.visits.model.stages[-1].index)
        return run_head(self, *arguments)

    passes.BlockPasses.compute, passes.BlockPasses.differentiate = of_visit(compute), of_visit(differentiate)
    Recompute.forward, Recompute.recompute = paced_forward, begun(recompute, 2)
    head.HeadPasses.run, head.Head.loss = paced_head, begun(loss, 1)
    passes.backpropagate = head.backpropagate = paced_backward


def main() -> None:
    flops, recipe = float(sys.argv[1]), sys.argv[2]
    folder = Path(str(load_recipe(Path(recipe)).recipe.offload.dir))
    hardware = replace(assumed_hardware(folder), matmul_flops=flops, measured="paced")
    write_profile(hardware, profile_path(folder, device="cpu"))
    hold(Pace(flops))
    fuyou(["finetune", recipe])


if __name__ == "__main__":
    main()
