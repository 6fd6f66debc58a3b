"""The heap's holes, in a process of its own: what is done to them stays done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A hole of 80 MiB under a small block that stays: then a block of 40 MiB, freed again. How much of it stays taken?
_HOLE = """
import ctypes, sys
from fuyou_cli.core import process
from fuyou_cli.core.probe import process_bytes
C = process._C
C.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
MiB = 1 << 20

def taken(count, size):
    blocks = [C.malloc(size) for _ in range(count)]
    for block in blocks:
        C.memset(block, 1, size)
    return blocks

process.settle_allocator()
process.settle_for_training()
below = taken(80, MiB)
staying = taken(1, MiB)
for block in below:
    C.free(block)
for turn in range(3):
    process.trim(sys.argv[1] == "apart")
    before = process_bytes()
    (large,) = taken(1, 40 * MiB)
    held = process_bytes() - before
    C.free(large)
    print(held // MiB, (process_bytes() - before) // MiB, len(process._plugs))
"""


def _turns(how: str) -> list[list[int]]:
    done = subprocess.run([sys.executable, "-c", _HOLE, how], capture_output=True, text=True, check=True)
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks the kernel")
def test_a_large_block_is_taken_from_no_hole() -> None:
    """The first line is what would happen: that it does is why there are plugs."""
    assert all(held in (39, 40) and left >= 39 and plugs == 0 for held, left, plugs in _turns("as it is"))
    assert all(held in (39, 40) and left <= 1 and plugs == 3 for held, left, plugs in _turns("apart"))
