#!/usr/bin/env python3
"""Measures how long a device waits for copies: blocks of an 8B model on a 4090, emulated with fewer bytes and longer times.

A tiny model runs through the real executor, plan and arena on an emulated device. Its copies move at a planned rate. Its
compute takes a planned time, and the launching thread runs ahead of it. Bytes are scaled so that weights, gradients, boundaries
and pieces have the same ratios as those of a Llama-3-8B block. All times are longer by one factor, so that a busy processor
keeps up.

The output has a line per number of micro-batches of 2,048 tokens, in the 4090's milliseconds: compute of a backward block, its
copies each way, the period from one block's end to the next one's, and the bytes that the launching thread copies or sums
itself in a block's visits, with the longest of these (at real size and --host-rate).

Asked: a period of at most 1.05 of the larger of compute and copies at 32,768 tokens, and no copy or sum of more than 1 ms.
--write: writes the same text to scripts/results. Exit codes: 0 all holds, 1 something does not, 2 usage.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from engine.families import llama
from engine.rig import Rig, Shape, Subject
from proof.verdicts import Row, at_most, described, exit_code, reported, table
from torch.utils._python_dispatch import TorchDispatchMode

from fuyou_cli.engine.devices.base import PIECE
from fuyou_cli.planner.schedule import Visit
from tests.emulated import EmulatedDevice, Rates

ROOT = Path(__file__).resolve().parents[1]
PARAMETERS, MICRO_BOUNDARY = 218_112_000, 2048 * 4096 * 2  # of a Llama-3-8B block; bytes of 2,048 tokens of its boundary
FORWARD, BACKWARD = 5.5e-3, 15.4e-3  # seconds per 2,048 tokens: backward with the forward again
RATE = 23e9  # bytes per second each way
HIDDEN, INTERMEDIATE, TOKENS, BLOCKS = 128, 384, 64, 8
ASKED = 16  # micro-batches of 2,048 tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=4.0, help="times longer than on the 4090 (default: 4)")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8, ASKED])
    parser.add_argument("--host-rate", type=float, default=10e9, help="bytes read and written per second by one thread")
    parser.add_argument("--through-host", action="store_true", help="as where the card has no room for the batch")
    parser.add_argument("--write", action="store_true", help="to scripts/results as well")
    return parser.parse_args()


class HostWork(TorchDispatchMode):
    """Counts copies and sums that this thread makes in the arena. The emulated device makes its own on other threads."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self._memory, self.sizes = rig.memory, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable or "copy" in func.__name__:
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            if any(self._memory.holds(tensor) for tensor in tensors):
                self.sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Found:
    """Holds what was measured of backward visits of blocks, in seconds of the 4090."""

    micro_batches: int
    period: float
    stays: bool  # the batch, on the device: of boundaries what was kept goes up, and nothing comes down
    host: list[int]  # bytes of every copy or sum by the launching thread, at the scale of the 8B model

    @property
    def compute(self) -> float:
        return self.micro_batches * BACKWARD

    @property
    def up(self) -> float:
        return (2 * PARAMETERS + (2 - self.stays) * self.micro_batches * MICRO_BOUNDARY) / RATE

    @property
    def down(self) -> float:
        return (4 * PARAMETERS + (not self.stays) * self.micro_batches * MICRO_BOUNDARY) / RATE

    @property
    def over(self) -> float:
        return self.period / max(self.compute, self.up, self.down)


def measured(micro_batches: int, slower: float, folder: Path, *, stays: bool) -> Found:
    """Measures the second step. A third step counts the host's work, because counting takes time."""
    config = llama(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=BLOCKS, num_attention_heads=4)
    subject = Subject(config, Shape(dtype="bfloat16", batch=micro_batches, micro=1, tokens=TOKENS))
    block = next(stage for stage in subject.spec.stages if stage.kind == "block")
    scale = block.params / PARAMETERS
    rate = RATE * scale / slower
    device = EmulatedDevice(pace=Rates(rate, rate), piece=int(PIECE * scale))
    with Rig(subject, folder, device="emulated", home="cpu", clip=1.0, opened=device, batch_on_device=stays) as rig:
        _take_their_time(rig, device, slower)
        ends: list[float] = []
        host: list[int] = []
        work = HostWork(rig)

        def after(visit: Visit) -> None:
            if subject.spec.stages[visit.stage].kind == "block":
                if visit.phase == "backward":
                    ends.append(time.monotonic())
                host.extend(int(size / scale) for size in work.sizes)
            work.sizes.clear()

        rig.executor.after_visit = after
        batches = subject.batches(3)
        rig.step(*next(batches), 1)
        ends.clear()
        rig.step(*next(batches), 2)
        periods = [end - begin for begin, end in pairwise(ends[1:])]  # the first is behind the head
        with work:
            rig.step(*next(batches), 3, last=True)
        rig.executor.drain()
    period = statistics.median(periods) / slower
    return Found(micro_batches=micro_batches, period=period, stays=stays, host=host)


def _take_their_time(rig: Rig, device: EmulatedDevice, slower: float) -> None:
    """Makes each micro-batch of a block take its time on the 4090, `slower` times as long."""
    executor, stages = rig.executor, rig.spec.stages
    differentiate = executor.visits.differentiate

    def in_block() -> bool:
        return stages[executor.visits.schedule.visits[executor.visits.lookahead.cursor].stage].kind == "block"

    def taking_its_time(forward: Any) -> Any:
        def timed(*given: Any) -> torch.Tensor:
            y = forward(*given)
            if in_block():
                device.takes(FORWARD * slower)
            return y

        return timed

    def backward(*given: Any) -> None:
        differentiate(*given)
        if in_block():
            device.takes(BACKWARD * slower)

    for activations in executor.activations:
        activations.forward = taking_its_time(activations.forward)  # type: ignore[method-assign]
    executor.visits.differentiate = backward  # type: ignore[method-assign]


def rows_of(found: Found, host_rate: float) -> list[Row]:
    name = f"{found.micro_batches * 2048:,} tokens"
    figures = f"period {1e3 * found.period:.1f} ms; compute {1e3 * found.compute:.1f}, up {1e3 * found.up:.1f}, down"
    note = f"{figures} {1e3 * found.down:.1f}"
    over = f"{name}: period over the larger of copies and compute"
    longest = max(found.host, default=0) / host_rate * 1e3
    return [
        at_most(over, found.over, 1.05, note=note)
        if found.micro_batches == ASKED
        else reported(over, f"{found.over:.3f}", note=note),
        at_most(f"{name}: longest copy or sum on the launching thread, ms", longest, 1.0, note=f"{len(found.host)} in blocks"),
    ]


def main() -> int:
    options = arguments()
    rows: list[Row] = []
    for count in options.micro_batches:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(count, options.slower, Path(folder), stays=not options.through_host)
            rows += rows_of(found, options.host_rate)
    way = "the batch by way of the host" if options.through_host else "the batch on the card"
    text = (
        f"{described()}\nan 8B block on a 4090 at {RATE / 1e9:g} GB/s each way, emulated {options.slower:g} times slower, {way}"
    )
    text += "\n\n" + table(rows)
    print(text)
    if options.write:
        results = ROOT / "scripts" / "results"
        (results / f"{time.strftime('%Y-%m-%d')}-bench_crossing.txt").write_text(text + "\n", encoding="utf-8")
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
