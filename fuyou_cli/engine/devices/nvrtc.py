"""Compiles kernels of our own for NVIDIA GPUs, and launches them. The compiler is NVRTC; torch installs its bindings beside its
CUDA builds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


class Kernel:
    """Holds a compiled kernel, loaded into torch's context for as long as the process lives."""

    def __init__(self, driver: Any, function: Any) -> None:
        self._driver, self._function = driver, function

    def launch(self, values: Sequence[Any], types: Sequence[Any], *, blocks: int, threads: tuple[int, int]) -> None:
        """Launches it after the compute submitted so far. `types`: of the values, as ctypes. `threads`: of a block, x and y."""
        stream = torch.cuda.current_stream().cuda_stream
        given = tuple(values), tuple(types)
        _checked(self._driver.cuLaunchKernel(self._function, blocks, 1, 1, *threads, 1, 0, stream, given, 0))


def make_kernel(device: torch.device, name: str, source: str, definitions: Sequence[str]) -> Kernel | None:
    """Compiles the kernel `name` of CUDA C for a device. Returns None if there is no compiler for it, as in builds of torch for
    other GPUs. Raises RuntimeError with the compiler's words if it fails: too old for the card, say, or too new for the driver.
    """
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        from cuda.bindings import driver, nvrtc  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    binary = cubin(nvrtc, f"sm_{major}{minor}", name, source, tuple(definitions))
    return Kernel(driver, _checked(driver.cuModuleGetFunction(_checked(driver.cuModuleLoadData(binary)), name.encode())))


@cache
def cubin(nvrtc: Any, architecture: str, name: str, source: str, definitions: tuple[str, ...]) -> bytes:
    """Compiles for an architecture such as "sm_89". Fuses nothing that the source does not fuse. Raises RuntimeError with the
    compiler's words."""
    options = [word.encode() for word in (f"--gpu-architecture={architecture}", "-fmad=false", *definitions)]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"the kernel {name} does not compile for {architecture}: {log.decode(errors='replace')}")
    binary: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return binary


def _checked(returned: tuple[Any, ...]) -> Any:
    """Returns a call's result. Raises RuntimeError if the call failed."""
    status, *results = returned
    if int(status):
        raise RuntimeError(f"CUDA: {status}")
    return results[0] if results else None
