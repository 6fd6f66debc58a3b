"""Sets the environment variables that torch and its libraries read when they load. Keeps what the user has set."""

from __future__ import annotations

import os
from pathlib import Path

from fuyou_cli.core.probe import ROOT

_NVIDIA = ("dev/nvidiactl", "dev/dxg")  # the driver's device; the second is WSL2's
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # torch reads the first that is set

# Rounds that a thread of torch spins for work before it sleeps; libgomp's own are 300,000. Beside other programs a thread that
# spins keeps the one that it waits for off its core: a token took twice as long (scripts/results/TRIED.md).
_SPINS = "20000"

# For matrix products, and for flash-attn (used by transformers).
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


def settle_libraries(*, device: str, expandable_segments: bool = True, deterministic: bool = False, root: Path = ROOT) -> None:
    """Sets the environment for compute on a GPU (`device` is the recipe's). For other devices only says how long threads spin.

    Stages allocate tensors of different sizes one after the other. Memory segments of fixed size leave holes that add up, and
    no plan counts them. Growing segments leave none; each growth costs one driver call. torch's threads have little to do
    beside a GPU: if they spun for milliseconds waiting for work, they would take cores from the update.
    """
    if device not in ("auto", "cuda") or not any((root / name).exists() for name in _NVIDIA):
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name, value in _DETERMINISTIC.items() if deterministic else ():
        os.environ.setdefault(name, value)
    if expandable_segments and not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
