#!/usr/bin/env python3
"""Compares updates with int8 optimizer states with torchao's AdamW8bit, on the same gradients.

    python scripts/compare_torchao.py
    a minute of one core, with the package torchao

A million parameters are updated with fuyou's int8 and bfloat16 states, by AdamW8bit and by torch's AdamW. AdamW8bit has a scale
for 64 values, as fuyou has, and once more for its usual 256. Its update is not compiled here. Every parameter has
gradients of its own size: e to the power of a normal number times the spread. So a block of states holds small and large ones.
An error is the distance from AdamW's parameters, as a share of how far those moved. Asked: the first update differs from both
others by at most 1e-5, and later errors are at most those of AdamW8bit with as many scales.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.verdicts import Row, at_most, conclude, holds, plain_parser, reported

from fuyou_cli.spec.model import STATE_BLOCK, StateDtype, StateLayout
from fuyou_cli.swap import kernels
from fuyou_cli.swap.native import Segment, Update

COUNT, LR, DECAY = 1 << 20, 1e-3, 0.01
SPREADS, LOOKS = (0.0, 0.5, 1.0, 2.0), (1, 2, 10, 50)  # a look: after so many updates
FIRST = 1e-5  # of the first update: float32's own rounding
EIGHT = "AdamW8bit"
Kind = Callable[..., torch.optim.Optimizer]


def gradients(spread: float) -> Iterator[torch.Tensor]:
    draws = torch.Generator().manual_seed(3)
    size = torch.exp(torch.randn(COUNT, generator=draws) * spread) * 1e-3
    mean = torch.randn(COUNT, generator=draws) * size * 0.3
    while True:
        yield mean + torch.randn(COUNT, generator=draws) * size


def start() -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(5)) * 0.02


def ours(states: StateDtype, spread: float) -> Iterator[torch.Tensor]:
    layout, held = StateLayout(weights="float32", dtype=states), start().numpy()
    moments = {name: np.zeros(layout.size(name, COUNT), np.uint8) for name in ("momentum", "variance")}
    for step, gradient in enumerate(gradients(spread), start=1):
        update = Update(
            params=COUNT, weights_dtype="float32", gradients_dtype="float32", weights=0, lr=LR, beta1=0.9, beta2=0.999,
            epsilon=1e-8, step=step, segments=(Segment(first=0, count=COUNT, weight_decay=DECAY),), states_dtype=states,
            seed=5 << 40, label=7,
        )  # fmt: skip
        kernels.adamw(update, weights=held, remainder=None, **moments, gradients=gradient.numpy())
        yield torch.from_numpy(held)


def theirs(kind: Kind, spread: float) -> Iterator[torch.Tensor]:
    parameter = torch.nn.Parameter(start())
    optimizer = kind([parameter], lr=LR, weight_decay=DECAY)
    for gradient in gradients(spread):
        parameter.grad = gradient
        optimizer.step()
        yield parameter.detach()


def compared(kind: Kind, spread: float) -> Iterator[Row]:
    sides = {
        "int8": ours("int8", spread), "bfloat16": ours("bfloat16", spread),
        EIGHT: theirs(partial(kind, block_size=STATE_BLOCK), spread), f"{EIGHT} in blocks of 256": theirs(kind, spread),
        "AdamW": theirs(torch.optim.AdamW, spread),
    }  # fmt: skip
    for step in range(1, max(LOOKS) + 1):
        found = {name: next(side) for name, side in sides.items()}
        if step not in LOOKS:
            continue
        moved = float((found["AdamW"] - start()).norm())
        error = {name: float((value - found["AdamW"]).norm()) / moved for name, value in found.items()}
        apart = float((found["int8"] - found[EIGHT]).norm()) / moved
        what = f"spread {spread:g}, {step} update{'s' if step > 1 else ''}"
        others = ", ".join(f"{name} {error[name]:.2g}" for name in (EIGHT, f"{EIGHT} in blocks of 256", "bfloat16"))
        note = f"errors: {others}; int8 beside {EIGHT} {apart:.2g}"
        if step == 1:
            worst = max(error["int8"], apart)
            yield holds(f"{what}: int8 beside both, the larger", f"<= {FIRST:g}", f"{worst:.1e}", worst <= FIRST, note=note)
        else:
            yield reported(f"{what}: error of int8", f"{error['int8']:.2g}", note=note)
            yield at_most(f"{what}: error of int8 / of {EIGHT}", error["int8"] / error[EIGHT], 1.0)


def main() -> int:
    options: argparse.Namespace = plain_parser(__doc__).parse_args()
    try:
        import torchao
    except ImportError:
        raise SystemExit("error: the package torchao is not installed: pip install torchao") from None
    torch.compile = lambda function, **_: function  # type: ignore[assignment]  # their update computes the same uncompiled
    torch.set_num_threads(1)
    rows = [row for spread in SPREADS for row in compared(torchao.optim.AdamW8bit, spread)]
    settings: dict[str, object] = {"torchao": torchao.__version__, "parameters": COUNT, "lr": LR, "weight_decay": DECAY}
    return conclude("compare_torchao", rows, results=options.results, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
