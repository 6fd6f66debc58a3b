"""How fast the machine itself is: the same work again and again, in a process of its own.

The work is a layer's, forward and backward: a product of small matrices is as fast as ever while the memory behind the caches
is others' (one combination took 22 to 25 s a step where the same an hour later took 20, and products said 0.985).

A machine of a shared host runs the same decoder block in 35 ms now and in 54 a minute later, with nothing else running on it
and no steal told. A plan made with the rates of one minute says nothing of the next if they differ: this tells whether they do.
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

_SECONDS = 10.0  # of one look: what the host does comes and goes within seconds
_WORK = """
import sys, time, torch
torch.set_num_threads({threads})
layer = torch.nn.TransformerEncoderLayer(1024, 16, 2816, dropout=0.0, batch_first=True, dtype=torch.bfloat16)
x = torch.rand(2, 512, 1024).to(torch.bfloat16)
for line in sys.stdin:
    end, done, began = time.perf_counter() + {seconds}, 0, time.perf_counter()
    while time.perf_counter() < end:
        layer(x).backward(x)
        layer.zero_grad()
        done += 1
    print(done / (time.perf_counter() - began), flush=True)
"""


class Pace:
    """Looks at the machine's speed while nothing else of ours runs. The process waits between looks, and takes no time then."""

    def __init__(self, *, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORK.format(threads=threads, seconds=_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.look()  # torch is loaded, its kernels are made

    def look(self) -> float:
        """Layers per second."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print("look", file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()


def moved(before: float, between: float, after: float) -> float:
    """The machine's speed during what came between the last two looks, over that between the first two."""
    return (between + after) / (before + between)
