"""Tests what is set before torch loads, where there is a GPU, and what the user has set; and holes in the heap."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuyou_cli.core.process import settle_libraries

POLICY, CONF, OLD = "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
PASSIVE, GROWING = {POLICY: "passive"}, {CONF: "expandable_segments:True"}
SPINS = {"GOMP_SPINCOUNT": "20000"}


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine with a GPU, and an environment in which nothing is set."""
    for name in (POLICY, CONF, OLD, "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("device", "expandable", "given", "expected"),
    [
        ("cuda", True, {}, PASSIVE | GROWING),
        ("auto", True, {}, PASSIVE | GROWING),
        ("cuda", False, {}, PASSIVE),
        ("cpu", True, {}, SPINS),
        ("emulated", True, {}, SPINS),
        ("cpu", True, {"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ("cpu", True, {POLICY: "active"}, {POLICY: "active"}),
        ("cuda", True, {POLICY: "active"}, {POLICY: "active"} | GROWING),
        ("cuda", True, {CONF: "max_split_size_mb:64"}, PASSIVE | {CONF: "max_split_size_mb:64"}),
        ("cuda", True, {OLD: ""}, PASSIVE | {OLD: ""}),
    ],
)
def test_what_is_set(
    gpu: Path, device: str, expandable: bool, given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    settle_libraries(device=device, expandable_segments=expandable, root=gpu)
    assert os.environ == expected


def test_compute_that_repeats_has_its_workspaces(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"FLASH_ATTENTION_DETERMINISTIC": "0"})
    settle_libraries(device="cuda", deterministic=True, root=gpu)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "0"  # what the user set stays


def test_nothing_where_there_is_no_gpu(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu / "dev/nvidiactl").unlink()
    monkeypatch.setattr(os, "environ", {})
    settle_libraries(device="cuda", root=gpu)
    assert os.environ == SPINS


_BEFORE = """
import sys
from pathlib import Path
from fuyou_cli.cli import app
from fuyou_cli.core import process

def settle(**options):
    assert "torch" not in sys.modules, "torch was there before"
    print(options)
    sys.exit(0)

process.settle_libraries = settle
app.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (
            ["finetune", "llama31-8b-full-24gb", "offload.device=cuda", "offload.expandable_segments=false"],
            {"device": "cuda", "expandable_segments": False, "deterministic": False},
        ),
        (["bench"], {"device": "auto"}),
        (["bench", "llama31-8b-full-24gb", "offload.device=cpu"], {"device": "cpu"}),
    ],
)
def test_it_is_done_before_torch_loads(words: list[str], options: dict[str, object], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(options)), done.stderr


# ---- the heap ------------------------------------------------------------------------------------------------------------


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


# As many threads as there are cores compute beside the main thread's, and one that began before them waits. Prints the arenas.
_ARENAS = """
import ctypes, os, sys, threading
from fuyou_cli.core import process
C = process._C
C.fopen.restype = ctypes.c_void_p
C.malloc_info.argtypes, C.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
process.settle_allocator()
count = 1 + len(os.sched_getaffinity(0))
there, over = threading.Barrier(count + 1), threading.Event()

def take():
    C.malloc(1 << 16)
    there.wait()
    over.wait()

for _ in range(count):
    threading.Thread(target=take, daemon=True).start()
there.wait()
file = C.fopen(sys.argv[1].encode(), b"w")
C.malloc_info(0, file)
C.fclose(file)
over.set()
print(count + 1)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="asks glibc")
def test_threads_that_compute_share_no_arena(tmp_path: Path) -> None:
    """Two that share one wait for its lock at each small block."""
    words = [sys.executable, "-c", _ARENAS, str(tmp_path / "arenas")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (tmp_path / "arenas").read_text().count("<heap nr=") == int(done.stdout)
