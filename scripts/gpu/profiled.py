#!/usr/bin/env python3
"""Runs `fuyou finetune` with some of its steps under torch's profiler, and writes how busy the device was and its gaps.

    python scripts/gpu/profiled.py --device cuda --first 3 --last 4 --out busy.json RECIPE [key=value]...

`--trace FILE` also keeps the events and the host's stacks (JSON, gzipped), so that gaps can be looked at again elsewhere.

The profiler is told of the device only, and a thread looks at the host's stack every two milliseconds: a trace of the host
would slow down what is looked at. Without a GPU the host's operators stand for the device's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.gaps import MARK, Sample, clock_offset, summary

EVERY = 0.002  # seconds between two samples
FRAMES = 8  # of a stack that are kept


class Sampler:
    """The stack of the thread that made it, again and again, until `stop`."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._of, self._over = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(EVERY):
            frame = sys._current_frames().get(self._of)
            self.samples.append(Sample(at=time.monotonic(), stack=stack_of(frame)))

    def stop(self) -> list[Sample]:
        self._over.set()
        self._thread.join()
        return self.samples


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """The innermost frames, as "file:line function"."""
    stack: list[str] = []
    while frame is not None and len(stack) < FRAMES:
        path = Path(frame.f_code.co_filename)
        stack.append(f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(stack)


def keep_trace(
    path: Path, trace: Sequence[Mapping[str, Any]], samples: Sequence[Sample], *, marked_at: float, window: tuple[float, float]
) -> None:
    """Writes what `summary` is made of. The trace's seconds and `offset` together are the host's."""
    kept = {
        "marked_at": marked_at,
        "offset": clock_offset(trace, marked_at)[0],
        "window": window,
        "samples": [[sample.at, sample.stack] for sample in samples],
        "traceEvents": trace,
    }
    path.write_bytes(gzip.compress(json.dumps(kept).encode(), compresslevel=4))


class Profiler:
    """Steps `first` to `last` of an executor, which it watches."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.done = options, 0

    def watch(self) -> None:
        from fuyou_cli.engine.executor import Executor

        step = Executor.step

        def watched(executor: Executor, *words: Any, **named: Any) -> Any:
            self.done += 1
            if self.done == self.options.first:
                self.begin()
            outcome = step(executor, *words, **named)
            if self.done == self.options.last:
                self.end()
            return outcome

        Executor.step = watched  # type: ignore[method-assign]

    def begin(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        on_gpu = self.options.device == "cuda"
        self.profile = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        self.profile.__enter__()
        # One event whose time is known on both clocks.
        if on_gpu:
            torch.cuda.synchronize()
            self.marked_at = time.monotonic()
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
        else:
            self.marked_at = time.monotonic()
            with record_function(MARK):
                pass
        self.sampler, self.begun = Sampler(), time.monotonic()

    def end(self) -> None:
        import torch

        on_gpu = self.options.device == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        window, samples = (self.begun, time.monotonic()), self.sampler.stop()
        self.profile.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self.profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)["traceEvents"]
        found = summary(trace, samples, marked_at=self.marked_at, window=window, on_gpu=on_gpu)
        found |= {"steps": self.options.last - self.options.first + 1, "samples": len(samples)}
        self.options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if self.options.trace is not None:
            keep_trace(self.options.trace, trace, samples, marked_at=self.marked_at, window=window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "emulated"), required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="where to keep events and stacks, gzipped")
    parser.add_argument("words", nargs="+", help="of fuyou finetune")
    options = parser.parse_args()
    from fuyou_cli.core.process import settle_libraries

    settle_libraries(device=options.device)  # as the command does, before torch is loaded
    Profiler(options).watch()
    from fuyou_cli.cli.app import main as fuyou

    if options.device == "emulated":
        from tests import emulated

        emulated.register()

    fuyou(["finetune", *options.words])


if __name__ == "__main__":
    main()
