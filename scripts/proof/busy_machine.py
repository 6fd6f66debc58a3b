"""Keeps a machine busy: computing, touching memory, writing and flushing files, while something else is tested on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuyou_cli.core.units import MiB

_COMPUTE = "while True:\n    sum(range(1 << 16))\n"
_MEMORY = """
import mmap, sys
while True:
    with mmap.mmap(-1, int(sys.argv[1])) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
"""
_DISK = """
import os, sys
data = os.urandom(1 << 20)
while True:
    with open(sys.argv[1], "wb", buffering=0) as file:
        for _ in range(int(sys.argv[2]) >> 20):
            file.write(data)
        os.fsync(file.fileno())
"""
_UNDER_LOAD = (
    "import os, sys, threading\nthreading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()\n"
)


@contextmanager
def load(folder: Path, *, cores: int, memory: int = 512 * MiB, file: int = 64 * MiB) -> Iterator[None]:
    """Runs, while inside, two computing processes per core, one that maps, touches and gives back `memory` bytes without end,
    and two that write and flush a file of `file` bytes in `folder`. They end with this process, however it ends."""
    files = [folder / f"load-{number}" for number in range(2)]
    programs = [(_COMPUTE, [])] * 2 * cores + [(_MEMORY, [str(memory)])] + [(_DISK, [str(path), str(file)]) for path in files]
    started = []
    try:
        for program, words in programs:
            command = [sys.executable, "-c", _UNDER_LOAD + program, *words]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
        for path in files:
            path.unlink(missing_ok=True)
