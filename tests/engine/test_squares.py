"""Tests squares of gradients: summed by the device, in an order that is written out, and seen before anything is updated."""

from __future__ import annotations

import ctypes
import math
import subprocess
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.errors import NumericsError
from fuyou_cli.engine import gradients
from fuyou_cli.engine.devices import gpu_kernels as square_kernels
from fuyou_cli.engine.devices import open_device
from fuyou_cli.engine.devices.base import Event, Squares, ValueRun
from fuyou_cli.engine.devices.cuda import CudaDevice
from fuyou_cli.engine.devices.gpu_kernels import squares_in_lanes
from fuyou_cli.planner import device as device_rules
from fuyou_cli.planner.device import square_lanes
from fuyou_cli.planner.schedule import Visit
from fuyou_cli.spec.model import TensorSpec
from fuyou_cli.swap import kernels
from tests.emulated import EmulatedDevice
from tests.planner.models import stage

from .families import llama
from .measuring import Seen
from .rig import Rig, Shape, Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(num_hidden_layers=3), Shape())


# ---- in lanes --------------------------------------------------------------------------------------------------------


def _by_hand(values: list[float], width: int) -> float:
    """Adds one value after the other to lane i mod `width`, folds lanes in halves, in Python's doubles."""
    lanes = [0.0] * width
    for at, value in enumerate(values):
        lanes[at % width] += value * value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


@given(
    counts=st.lists(st.integers(0, 90), min_size=1, max_size=4), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    most=st.sampled_from([1, 4, 16, 64]), seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_the_order_of_additions_is_the_one_written_out(counts: list[int], dtype: torch.dtype, most: int, seed: int) -> None:
    flat = (torch.randn(sum(counts) + 7, generator=torch.Generator().manual_seed(seed)) * 1e3).to(dtype)
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    runs = [(end - count, count) for end, count in zip(ends, counts, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_rules, "SQUARE_LANES", most)
        found = squares_in_lanes(flat, runs, torch.full((most,), math.nan, dtype=torch.float64)).tolist()
        wanted = [_by_hand(flat[first : first + count].tolist(), square_lanes(count)) for first, count in runs]
    assert found == wanted


def test_extremes_are_squared_exactly_and_what_is_not_finite_shows() -> None:
    lanes = torch.empty(4, dtype=torch.float64)
    small, large = 2.0**-149, float(torch.finfo(torch.float32).max)
    flat = torch.tensor([small, large, large, math.inf, 1.0, math.nan, 0.0])
    found = squares_in_lanes(flat, [(0, 1), (1, 2), (3, 2), (4, 2), (6, 1)], lanes).tolist()
    assert found[:2] == [small**2, 2 * large**2] and found[4] == 0.0
    assert math.isinf(found[2]) and math.isnan(found[3])


def test_the_library_and_the_lanes_agree() -> None:
    """Adds in two orders over the same exact squares."""
    flat = torch.randn(100_003, generator=torch.Generator().manual_seed(1))
    ours, _ = kernels.sum_squares(flat.numpy().data, "float32")
    (lanes,) = squares_in_lanes(flat, [(0, flat.numel())], torch.empty(1 << 17, dtype=torch.float64)).tolist()
    assert lanes == pytest.approx(ours, rel=1e-13)


_IN_C = """
#include <pthread.h>
#include <string.h>
typedef struct { unsigned x, y; } Place;
static _Thread_local Place threadIdx;
static Place blockIdx;
static pthread_barrier_t barrier;
#define KERNEL static void
#define __shared__ static
#define __syncthreads() pthread_barrier_wait(&barrier)
#define __fma_rn(a, b, c) __builtin_fma(a, b, c)
#define __dadd_rn(a, b) ((a) + (b))
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
%s
static struct { const VALUE *values; double *few; unsigned long long count; unsigned width; } given;
static void *run(void *number)
{
    threadIdx.x = (unsigned)(size_t)number %% COLUMNS;
    threadIdx.y = (unsigned)(size_t)number / COLUMNS;
    squares(given.values, given.few, given.count, given.width);
    return 0;
}
void launch(const VALUE *values, double *few, unsigned long long count, unsigned width)
{
    static pthread_t threads[ROWS * COLUMNS];
    given.values = values, given.few = few, given.count = count, given.width = width;
    for (blockIdx.x = 0; blockIdx.x < FEW / COLUMNS; blockIdx.x++) {
        pthread_barrier_init(&barrier, 0, ROWS * COLUMNS);
        for (size_t i = 0; i < ROWS * COLUMNS; i++)
            pthread_create(threads + i, 0, run, (void *)i);
        for (size_t i = 0; i < ROWS * COLUMNS; i++)
            pthread_join(threads[i], 0);
    }
}
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_source_gives_the_bits_of_the_lanes(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiles it for the processor, with fewer lanes: its arithmetic and its order without a GPU."""
    few, most = 32, 32 * 32 * 4
    (tmp_path / "squares.c").write_text(_IN_C % square_kernels.SQUARES)
    words = ["cc", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    words += square_kernels.square_definitions(narrow=dtype == torch.bfloat16, few=few, most=most)
    subprocess.run([*words, "-o", str(tmp_path / "squares.so"), str(tmp_path / "squares.c")], check=True)
    launch = ctypes.CDLL(str(tmp_path / "squares.so")).launch
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint]
    monkeypatch.setattr(square_kernels, "FEW", few)
    monkeypatch.setattr(device_rules, "SQUARE_LANES", most)
    counts = [33, 64, 65, 700, 2048, 4097, 3 * most + 5]
    flat = (torch.randn(sum(counts), generator=torch.Generator().manual_seed(1)) * 1e3).to(dtype)
    runs = [(sum(counts[:number]), count) for number, count in enumerate(counts)]
    room, launched = torch.full((most,), math.nan, dtype=torch.float64), list[int]()

    def kernel(values: torch.Tensor, few: torch.Tensor, width: int) -> None:
        few.fill_(math.nan)
        launched.append(width)
        launch(values.data_ptr(), few.data_ptr(), values.numel(), width)

    found = squares_in_lanes(flat, runs, room, kernel=kernel)
    assert torch.equal(found, squares_in_lanes(flat, runs, room)) and launched == [64, 64, 128, 1024, 2048, most, most]
    monkeypatch.setattr(square_kernels, "SQUARE_LANES", most)
    assert square_kernels.agrees(kernel, dtype, room)
    assert not square_kernels.agrees(lambda values, few, width: kernel(values[:-1], few, width), dtype, room)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_the_same_bits_by_the_kernel(dtype: torch.dtype) -> None:
    counts = [4096, 1 << 11, 5_000_003, 77, 1 << 22]
    flat = torch.randn(sum(counts), generator=torch.Generator().manual_seed(2)).to(dtype)
    runs = [(sum(counts[:number]), count) for number, count in enumerate(counts)]
    room = torch.empty(1 << 21, dtype=torch.float64)
    with closing(open_device("cuda")) as device:
        found = device.squares(device.upload_now(flat), runs, device.empty(8 << 21)).result()
        assert isinstance(device, CudaDevice) and device._square[dtype] is not None
    assert found == squares_in_lanes(flat, runs, room).tolist()


def _launched(func: Any, args: Any) -> str | None:
    """Names an operator that a GPU has a kernel for."""
    name: str = func.overloadpacket.__name__
    return name if name.endswith("_") or name in ("zeros", "clone") else None


def test_few_launches_for_a_block() -> None:
    """Each takes the launching thread microseconds, while the device has nothing else to do. A block of Llama-8B: one for every
    two million values, and what is left of folding."""
    sizes = [4096 * 4096] * 2 + [1024 * 4096] * 2 + [14336 * 4096] * 3 + [4096] * 2
    runs = [(sum(sizes[:number]), size) for number, size in enumerate(sizes)]
    flat, lanes = torch.empty(sum(sizes), device="meta"), torch.empty(1 << 21, dtype=torch.float64, device="meta")
    with Seen(_launched) as launches:
        squares_in_lanes(flat, runs, lanes)
    assert sum(sizes) // (1 << 21) < len(launches.found) < 2 * sum(sizes) // (1 << 21) + 4


# ---- in a step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
def test_the_launching_thread_squares_nothing(clip: float | None, subject: Subject, tmp_path: Path, monkeypatch: Any) -> None:
    seen, count = set[int](), kernels._count

    def watched(memory: Any, item: int) -> int:
        seen.add(threading.get_ident())
        return count(memory, item)

    monkeypatch.setattr(kernels, "_count", watched)
    with Rig(subject, tmp_path, device="emulated", clip=clip) as rig:
        rig.run(2)
    assert len(seen) == 1 and threading.get_ident() not in seen


class _HeldSquares:
    """Holds squares back until they are released."""

    def __init__(self, squares: Squares) -> None:
        self._squares, self.released = squares, False

    def done(self) -> bool:
        return self.released and self._squares.done()

    def result(self) -> list[float]:
        assert self.released
        return self._squares.result()


class _HoldsSquares(EmulatedDevice):
    """The first squares of all are held."""

    held: _HeldSquares | None = None

    def squares(self, flat: torch.Tensor, runs: Sequence[ValueRun], lanes: torch.Tensor) -> Squares:
        squares = super().squares(flat, runs, lanes)
        if self.held is not None:
            return squares
        self.held = _HeldSquares(squares)
        return self.held


def test_no_update_begins_before_its_gradients_were_seen(subject: Subject, tmp_path: Path) -> None:
    """Waits until those of the head have arrived, and those of the norm behind them."""
    device = _HoldsSquares()
    with Rig(subject, tmp_path, opened=device, device="emulated", clip=None, defer=False) as rig:
        begun = list[bool]()

        def look(visit: Visit) -> None:
            if device.held is not None and not device.held.released:
                device._down.synchronize()
                rig.executor.visits.sums.advance()
                begun.append(rig.executor._updating)
                device.held.released = visit.phase == "backward"

        rig.executor.after_visit = look
        rig.run(1)
        assert begun == [False, False] and rig.generations == {1}


class _HeldCopy(Event):
    """Nobody finds it over before it is released; who waits for it may have to be refused."""

    def __init__(self, event: Event, *, may_wait: bool) -> None:
        self._event, self._may_wait, self.released = event, may_wait, False

    def synchronize(self) -> None:
        assert self.released or self._may_wait, "somebody waits for the newest download"
        self._event.synchronize()

    def done(self) -> bool:
        return self.released and self._event.done()


class _HoldsDownloads(EmulatedDevice):
    """The first two downloads of a stage's gradients do not end before they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.spans, self.held = set[int](), list[_HeldCopy]()

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        event = super().download(device, host, bulk=bulk)
        if device.data_ptr() not in self.spans or len(self.held) == 2:
            return event
        self.held.append(_HeldCopy(event, may_wait=not self.held))
        return self.held[-1]


def test_a_sum_waits_for_the_oldest_download_alone(subject: Subject, tmp_path: Path, monkeypatch: Any) -> None:
    """The last block's sum takes the span of the head's, which is over at last; the norm's gradients are still on their way."""
    device = _HoldsDownloads()
    with Rig(subject, tmp_path, opened=device, device="emulated", clip=None) as rig:
        device.spans = {span.memory.data_ptr() for span in rig.executor.visits.sums._spans}
        begin, opened = rig.executor.visits.sums.open, list[int]()

        def observed(owner: int, **how: Any) -> Any:
            if len(device.held) == 2:
                assert opened or len(rig.executor.visits.sums._spans) == 0
                device.held[0].released = True
            total = begin(owner, **how)
            if len(device.held) == 2:
                opened.append(owner)
                device.held[1].released = True
            return total

        monkeypatch.setattr(rig.executor.visits.sums, "open", observed)
        rig.run(1)
        assert opened == [3, 2, 1, 0]


# ---- what a sum and its squares say ---------------------------------------------------------------------------------


PADDED = replace(
    stage(0, "block", 64),
    tensors=tuple(TensorSpec(name=n, shape=(3,), offset=at, numel=3, decay=True) for n, at in (("a", 0), ("b", 8))),
)


def test_what_has_no_gradient_is_zero() -> None:
    """The update reads all of the memory, which held something else before."""
    total = gradients.GradientSum(stage=PADDED, flat=torch.full((16,), 7.0))
    total.add(0, torch.tensor([1.0, 2.0, 3.0]))
    total.complete()
    assert total.flat.tolist() == [1.0, 2.0, 3.0, *[0.0] * 13]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_are_named(wrong: float) -> None:
    summed = torch.tensor([1.0, 2.0, 3.0, *[0.0] * 5, 1.0, wrong, 2.0])
    with pytest.raises(NumericsError, match=r"step 3: 1 gradients of b \(stage 0\) are not finite"):
        gradients.squared_norm(PADDED, [14.0, 5.0 + wrong * wrong], summed, step=3, changed=False, reached=set())


# ---- sums in pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,), (13, 5), (1, 40), (3, 2, 5), (0, 4)])
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("piece", [1, 8, 1 << 19])
def test_pieces_add_up(shape: tuple[int, ...], dtypes: tuple[str, str], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "PIECE", piece)
    torch.manual_seed(3)
    total, gradient = (torch.randn(shape).to(getattr(torch, dtype)) for dtype in dtypes)
    expected = total + gradient.to(torch.float32) if dtypes[0] == "float32" else total.clone().add_(gradient)
    gradients.add_in_pieces(total, gradient)
    assert torch.equal(total, expected)


def test_a_gradient_that_is_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a gradient of a transposed product, say."""
    monkeypatch.setattr(gradients, "PIECE", 8)
    total, gradient = torch.randn(6, 10), torch.randn(10, 6).bfloat16().t()
    expected = total + gradient.float()
    gradients.add_in_pieces(total, gradient)
    assert torch.equal(total, expected)
