"""Measures how fast the machine is while something runs on it: the same small work again and again, in its own process.

A shared host runs the same decoder block in 35 ms now and in 54 a minute later, with nothing else running on it and no steal
shown. Looks before and after a run missed one that was slow throughout (125m in 9.2 s a step, before in 7.4). A plan made with
the rates of one minute says nothing of the next if they differ. This shows whether they do.

The figure is the CPU time of the work, not its duration: what runs beside it takes turns on the same cores.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from types import TracebackType

_PAUSE = 0.5  # seconds between looks, of 8 ms each: less than a hundredth of two cores
_WORK = """
import time, torch
torch.set_num_threads(1)
weights, rows = torch.rand(1024, 2816).to(torch.bfloat16), torch.rand(128, 1024).to(torch.bfloat16)
memory = torch.rand(8 << 20)  # beyond any cache
while True:
    began = time.thread_time()
    for _ in range(3):
        torch.mm(rows, weights)
    memory[::16].sum()
    print(time.monotonic(), time.thread_time() - began, flush=True)
    time.sleep({pause})
"""


class Pace:
    """Watches the machine's speed from now on."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORK.format(pause=_PAUSE)], stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        self._looks: list[tuple[float, float]] = []  # when, and the CPU seconds that the work took
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()
        while not self._looks:  # torch is loaded, its kernels are made
            if self._process.poll() is not None:
                raise RuntimeError(f"who looks at the machine's speed ended at once, with {self._process.returncode}")
            time.sleep(_PAUSE / 10)

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            when, seconds = map(float, line.split())
            self._looks.append((when, seconds))

    def speed(self, begin: float, end: float) -> float:
        """Returns the work done in a second of CPU time between two moments of the monotonic clock; 0 if there was no look."""
        taken = [seconds for when, seconds in list(self._looks) if begin <= when <= end]
        return 1.0 / statistics.mean(taken) if taken else 0.0

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._hearing.join()
