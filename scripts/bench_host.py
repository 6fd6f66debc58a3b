#!/usr/bin/env python3
"""Measures the processor time of the thread that feeds a device, per block and micro-batch, beyond transformers' own.

    python scripts/bench_host.py [--device emulated | cuda] [--times 15] [--results DIR]
    needs no GPU but for --device cuda; a minute. To try the script itself: --times 2

A tiny Llama takes steps through the real executor: on a device of its own memory that the batch stays on, without outputs kept,
with all of them kept in RAM or on the device, and on device cpu. A turn is a step of each, and the same model in memory (with
--device cuda on the GPU): forward without gradients, then forward and backward. So forward is compared with forward, and
backward, which computes outputs again, with both. In memory a block is what ten blocks take more than two, by eight. Only the
launching thread's processor time counts, not what it waits for. Its kernels compute hardly anything. Lines are medians over the
turns; the quartiles stand beside them.

The device is "immediate": a copy is one call, as it is where a driver makes it. With --device emulated it is that of the tests,
which also poisons what a copy will fill, and whose copy threads take the interpreter from the launching thread.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from engine.families import llama
from engine.rig import Rig, Shape, Subject
from proof.verdicts import Row, at_most, conclude, plain_parser, reported, show_command

from fuyou_cli.engine.devices import Device
from fuyou_cli.planner.schedule import Visit

BARS = {"forward": 0.5, "backward": 1.5}  # milliseconds
FEW, MANY = 2, 10  # blocks
MICRO_BATCHES = 8
UNCOUNTED = 2  # turns

Ways = dict[str, dict[str, Any]]

Turn = dict[tuple[str, str], float]  # (who, phase) -> milliseconds


class Immediate(Device):
    """Has its own memory and copies at once, as if a driver did."""

    separate = True


def ways_of(device: str) -> Ways:
    keeping: Ways = {"": {}, ", all outputs kept": {"kept": "all"}, ", all outputs kept on it": {"kept_there": "room"}}
    ways = {f"device {device}{words}": {"device": device, **kept} for words, kept in keeping.items()}
    if device == "immediate":  # planned as the emulated one
        for way in ways.values():
            way |= {"device": "emulated", "opened": Immediate()}
    return {**ways, "device cpu": {"device": "cpu"}}


def subject_of(blocks: int) -> Subject:
    return Subject(llama(num_hidden_layers=blocks), Shape(dtype="bfloat16", batch=MICRO_BATCHES, micro=1, tokens=8))


class Streamed:
    """Takes steps on one device and times its visits of blocks."""

    def __init__(self, folder: Path, name: str, way: dict[str, Any]) -> None:
        self._name, self._subject, self._step = name, subject_of(MANY), 0
        self.rig = Rig(self._subject, folder, home="cpu", clip=None, **{"kept": "none", **way})
        self._spent = dict.fromkeys(BARS, 0.0)
        self._since = 0.0
        self.rig.executor.after_visit = self._left

    def _left(self, visit: Visit) -> None:
        now = time.thread_time()
        if self._subject.spec.stages[visit.stage].kind == "block":
            self._spent[visit.phase] += now - self._since
        self._since = now

    def step(self) -> Turn:
        self._spent, self._step = dict.fromkeys(BARS, 0.0), self._step + 1
        (batch,) = self._subject.batches(1)
        self._since = time.thread_time()
        self.rig.step(*batch, self._step)
        return {(self._name, phase): 1e3 * spent / MANY / MICRO_BATCHES for phase, spent in self._spent.items()}


class InMemory:
    """Takes the passes of the same model without fuyou."""

    def __init__(self, device: str) -> None:
        where = "cuda" if device == "cuda" else "cpu"
        self._models = [subject_of(blocks).fresh().to(where) for blocks in (FEW, MANY)]
        self._ids = torch.ones(1, 8, dtype=torch.long, device=where)

    def step(self) -> Turn:
        passes = {"forward": self._forward, "backward": self._backward}
        found: Turn = {}
        for phase, run in passes.items():
            few, many = (self._seconds(run, model) for model in self._models)
            found["transformers", phase] = 1e3 * (many - few) / (MANY - FEW)
        return found

    def _seconds(self, run: Any, model: Any) -> float:
        begin = time.thread_time()
        for _ in range(MICRO_BATCHES):
            run(model)
        return (time.thread_time() - begin) / MICRO_BATCHES

    def _forward(self, model: Any) -> None:
        with torch.no_grad():
            model(self._ids, use_cache=False)

    def _backward(self, model: Any) -> None:
        model(self._ids, use_cache=False).logits.sum().backward()


def rows_of(turns: Sequence[Turn], ways: Ways) -> list[Row]:
    rows = list[Row]()
    for name in ways:
        for phase, bar in BARS.items():
            ours, theirs = ([turn[who, phase] for turn in turns] for who in (name, "transformers"))
            beyond = [one - other for one, other in zip(ours, theirs, strict=True)]
            note = f"in all {quartiles(ours)}, transformers {quartiles(theirs)}, beyond {quartiles(beyond)}"
            what = f"{name}, {phase}: ms per block and micro-batch beyond transformers"
            values = {"ours": ours, "transformers": theirs}
            middle = statistics.median(beyond)
            if name == "device cpu":
                rows.append(reported(what, f"{middle:.3f}", note=note, values=values))
            else:
                rows.append(at_most(what, middle, bar, note=note, values=values))
    return rows


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def main(words: Sequence[str] | None = None) -> int:
    options = plain_parser(__doc__)
    options.add_argument("--device", choices=("immediate", "emulated", "cuda"), default="immediate")
    options.add_argument("--times", type=int, default=15, help="turns (default: 15)")
    asked = options.parse_args(words)
    show_command("scripts/bench_host.py", words)
    turns, ways = list[Turn](), ways_of(asked.device)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sides: list[Any] = [InMemory(asked.device)]
        for number, (name, way) in enumerate(ways.items()):
            sides.append(Streamed(Path(folder) / f"{number}", name, way))
            stack.enter_context(sides[-1].rig)
        for number in range(UNCOUNTED + max(2, asked.times)):
            turn = {key: value for side in sides for key, value in side.step().items()}
            turns += [turn] if number >= UNCOUNTED else []
    settings = {"blocks": MANY, "micro_batches": MICRO_BATCHES, "times": asked.times, "device": asked.device}
    return conclude("bench_host", rows_of(turns, ways), results=asked.results, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
