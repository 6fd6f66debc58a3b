"""Set what torch and the libraries under it read from the environment while they load. What the user set stays."""

from __future__ import annotations

import os
from pathlib import Path

from fuyou_cli.machine.probe import ROOT

_NVIDIA = ("dev/nvidiactl", "dev/dxg")  # the driver's device; of WSL2 its paravirtual one
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # torch reads the first that is set

# Of products of matrices, and of flash-attn by way of transformers.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


def settle_libraries(*, device: str, expandable_segments: bool = True, deterministic: bool = False, root: Path = ROOT) -> None:
    """Set the environment for compute on a GPU (`device`: the recipe's); for others nothing changes.

    Stages allocate tensors of different sizes one after the other. In segments of fixed size the holes between them add up,
    and a plan counts none; segments that grow have none, for a call of the driver where memory is taken the first time.
    torch's threads have little to do beside a GPU: spinning for more, as they would for milliseconds, they would take the
    cores of the update."""
    if device not in ("auto", "cuda") or not any((root / name).exists() for name in _NVIDIA):
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name, value in _DETERMINISTIC.items() if deterministic else ():
        os.environ.setdefault(name, value)
    if expandable_segments and not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
