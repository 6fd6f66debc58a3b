"""Tests that AdamW by tensor operations is the library's, bit for bit, however a stage is cut into chunks."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuyou_cli.engine import updates
from fuyou_cli.engine.devices import gpu_kernels
from fuyou_cli.engine.skeleton import TORCH_DTYPE
from fuyou_cli.engine.updates import DeviceAdamW, DeviceState, Optimizer, Scalars, is_lost
from fuyou_cli.planner.device import UPDATE_SCRATCH
from fuyou_cli.spec.model import Dtype
from fuyou_cli.swap import kernels
from fuyou_cli.swap.native import Segment, Update

COUNT = 2048 * 3
SEGMENTS = (
    Segment(first=0, count=1000, weight_decay=0.1), Segment(first=1003, count=4001, weight_decay=0.01),
    Segment(first=5100, count=1000, weight_decay=0.0),
)  # fmt: skip


def _tensors(generator: torch.Generator, narrow: bool) -> dict[str, torch.Tensor]:
    """Makes a state and gradients of many magnitudes, denormals and zeros among them."""

    def values(low: int, high: int) -> torch.Tensor:
        found = torch.randn(COUNT, generator=generator) * 10.0 ** torch.randint(low, high, (COUNT,), generator=generator)
        return found * (torch.rand(COUNT, generator=generator) > 0.1)

    found = {"weights": values(-8, 3), "momentum": values(-42, 1), "variance": values(-42, 1).abs()}
    if narrow:
        found["weights"] = found["weights"].bfloat16()
        rest = torch.randint(-(1 << 15), 1 << 15, (COUNT,), generator=generator).to(torch.int16)
        # Below a zero there is no master, only the bits of a NaN, which a GPU does not hand on as they are.
        found["remainder"] = rest.where(found["weights"] != 0, rest.clamp(min=0))
    return found


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _by_library(
    tensors: dict[str, torch.Tensor], gradients: torch.Tensor, scalars: Scalars, weights: Dtype, summed_in: Dtype
) -> int:
    optimizer = scalars.optimizer
    update = Update(
        params=COUNT, weights_dtype=weights, gradients_dtype=summed_in, weights=0, lr=scalars.lr, beta1=optimizer.beta1,
        beta2=optimizer.beta2, epsilon=optimizer.epsilon, gradient_scale=scalars.gradient_scale, step=scalars.step,
        segments=SEGMENTS,
    )  # fmt: skip
    return kernels.adamw(update, gradients=_bytes(gradients), **{name: _bytes(value) for name, value in tensors.items()})


def _by_device(adamw: DeviceAdamW, tensors: dict[str, torch.Tensor], gradients: torch.Tensor, scalars: Scalars) -> int:
    state = DeviceState(remainder=tensors.get("remainder"), **{k: v for k, v in tensors.items() if k != "remainder"})
    return int(adamw.update(state, gradients, scalars, SEGMENTS))


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("summed_in", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", [dict(), dict(beta1=0.3, beta2=0.95), dict(epsilon=1e-6, beta2=0.98)])
@pytest.mark.parametrize(
    ("device", "chunk", "fused"),
    [
        ("cpu", 1 << 14, True), ("cpu", 700, True), pytest.param("cuda", 700, False, marks=pytest.mark.gpu),
        pytest.param("cuda", 700, True, marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_it_is_the_librarys(
    weights: Dtype, summed_in: Dtype, way: dict[str, Any], device: str, chunk: int, fused: bool
) -> None:
    narrow = weights == "bfloat16"
    generator = torch.Generator().manual_seed(7)
    theirs = _tensors(generator, narrow)
    there = {name: value.clone().to(device) for name, value in theirs.items()}
    optimizer = Optimizer(**{"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1, **way})
    adamw = DeviceAdamW(torch.empty(UPDATE_SCRATCH * 4 * chunk, dtype=torch.uint8, device=device), fused=fused)
    for step in range(1, 13):
        gradients = _tensors(generator, False)["momentum"].to(TORCH_DTYPE[summed_in])
        given = gradients.clone().to(device)
        scalars = Scalars(optimizer=optimizer, lr=1e-3 * step, step=step, gradient_scale=1.0 if step % 2 else 0.37)
        worst = _by_device(adamw, there, given, scalars)
        lost = _by_library(theirs, gradients, scalars, weights, summed_in)
        assert is_lost(worst, narrow=narrow) == (lost > 0)
        assert [name for name in theirs if not _same(there[name].cpu(), theirs[name])] == []
        assert _same(given.cpu(), gradients)
    if device == "cuda":
        assert fused == any(adamw._kernels.values()), "by the kernel where there is one, and tensor operations as well"


_IN_C = """
#include <string.h>
#define KERNEL static
#define __fmul_rn(a, b) ((a) * (b))
#define __fadd_rn(a, b) ((a) + (b))
#define __fsub_rn(a, b) ((a) - (b))
#define __fdiv_rn(a, b) ((a) / (b))
#define __fsqrt_rn(a) __builtin_sqrtf(a)
#define __shfl_xor_sync(mask, value, lane) (value)
#define max(a, b) ((a) > (b) ? (a) : (b))
#define atomicMax(place, value) (*(place) = max(*(place), value))
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static const struct { int x; } gridDim = {1}, blockDim = {1}, blockIdx = {0}, threadIdx = {0};
%s
void update(WEIGHT *w, short *r, float *m, float *v, const GRADIENT *g, int *worst, unsigned long long count, const float *k)
{
    adamw(w, r, m, v, g, worst, count, k[0], k[1], k[2], (int)k[3], k[4], k[5], k[6], k[7], k[8]);
}
"""


@pytest.fixture(scope="module")
def kernel_in_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, bool], Callable[..., None]]:
    """Compiles the kernel's own source for the processor, as one thread: its arithmetic without a GPU."""
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "adamw.c").write_text(_IN_C % gpu_kernels.ADAMW)

    def compiled(narrow_weights: bool, narrow_gradients: bool) -> Callable[..., None]:
        library = folder / f"{narrow_weights}-{narrow_gradients}.so"
        words = ["cc", "-O2", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
        words += gpu_kernels.adamw_definitions(narrow_weights, narrow_gradients)
        subprocess.run([*words, "-o", str(library), str(folder / "adamw.c")], check=True)
        update = ctypes.CDLL(str(library)).update
        update.argtypes = [*[ctypes.c_void_p] * 6, ctypes.c_ulonglong, ctypes.c_void_p]

        def launch(*given: Any) -> None:
            *moved, rounded = given
            scalars = torch.tensor(astuple(rounded), dtype=torch.float32)
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in moved]
            update(*addresses, moved[0].numel(), scalars.data_ptr())

        return launch

    return compiled


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("summed_in", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", [dict(), dict(beta1=0.3, beta2=0.95), dict(epsilon=1e-6, beta2=0.98)])
def test_the_kernels_source_is_the_librarys(
    weights: Dtype, summed_in: Dtype, way: dict[str, Any], kernel_in_c: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = kernel_in_c(weights == "bfloat16", summed_in == "bfloat16")
    monkeypatch.setattr(updates, "adamw_kernel", lambda device, **_: compiled)
    monkeypatch.setattr(DeviceAdamW, "_chunk", lambda *_: pytest.fail("not by the kernel"))
    test_it_is_the_librarys(weights, summed_in, way, "cpu", 700, True)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -math.nan, 3.4e38, 3.3e38, -3.395e38])
def test_it_finds_what_the_library_finds(weights: Dtype, value: float) -> None:
    """Finds also a finite master that is not finite as a bfloat16."""
    narrow = weights == "bfloat16"
    tensors = _tensors(torch.Generator().manual_seed(3), narrow)
    tensors["momentum"].zero_(), tensors["variance"].fill_(1.0)
    if narrow:
        master = torch.tensor([value]).view(torch.int32)
        tensors["weights"].view(torch.int16)[1200] = int((master >> 16).item())
        tensors["remainder"][1200] = 0
    else:
        tensors["weights"][1200] = value
    theirs = {name: part.clone() for name, part in tensors.items()}
    optimizer = Optimizer(lr=1e-9, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    scalars, gradients = Scalars(optimizer=optimizer, lr=1e-9, step=5), torch.zeros(COUNT)
    adamw = DeviceAdamW(torch.empty(UPDATE_SCRATCH * 4 * 512, dtype=torch.uint8))
    worst = _by_device(adamw, tensors, gradients, scalars)
    assert is_lost(worst, narrow=narrow) == (_by_library(theirs, gradients, scalars, weights, "float32") > 0)


def test_a_kernel_that_cannot_be_made_is_told_and_none_at_all_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such architecture")

    made = partial(gpu_kernels.adamw_kernel, torch.device("cuda"), narrow_weights=True, narrow_gradients=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # not installed
    assert made() is None
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=None, nvrtc=None))
    monkeypatch.setattr(gpu_kernels, "cubin", refuse)
    with pytest.warns(UserWarning, match="several times slower: no such architecture"):
        assert made() is None
