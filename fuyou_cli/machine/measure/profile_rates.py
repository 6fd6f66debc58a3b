"""Measures the machine: arithmetic, stages of a few widths, the store, AdamW, and AdamW beside a training step.

Every figure is the median of a few repeats, with the least and the greatest beside it. torch and transformers (3 s) are
imported inside the functions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fuyou_cli.core.errors import UsageError
from fuyou_cli.spec.hardware import HardwareProfile, merged_rates
from fuyou_cli.spec.model import Dtype

from .. import drives, probe
from ..allocator import settle_for_training
from ..profile import assumed_hardware, cpu_name

if TYPE_CHECKING:
    import torch

    from .store import StoreRates
    from .update import Shared

__all__ = ["BenchReport", "Rate", "assumed_hardware", "measure", "measure_hardware"]

Unit = Literal["FLOP/s", "B/s"]

MATMUL_SECONDS = 0.12  # of one repeat
REPEAT_SECONDS = 1.5  # of all repeats of one thing: a busy machine gets fewer
SHARED_QUICK_SECONDS, SHARED_FULL_SECONDS = 0.6, 4.0  # of training steps beside an update
SHARED_WIDTH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One measured rate: the median of the repeats (of a store: the settled rate of its passes), the range they or stretches of
    them spread over, and what it was measured on."""

    name: str
    unit: Unit
    value: float
    low: float
    high: float
    repeats: int
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """All that `fuyou bench` found."""

    profile: HardwareProfile
    rates: tuple[Rate, ...]
    notes: tuple[str, ...]
    quick: bool
    seconds: float
    written_bytes: int


def measure_hardware(*directories: Path, quick: bool, device: str = "auto") -> HardwareProfile:
    """The machine's profile; the store is measured over `directories`. See `measure`."""
    return measure(*directories, quick=quick, device=device).profile


def measure(
    *directories: Path,
    quick: bool,
    device: str = "auto",
    compute_dtype: Dtype = "bfloat16",
    progress: Callable[[str], None] = lambda _: None,
) -> BenchReport:
    """Measure everything. `progress` hears what is being measured. `device` is auto, cpu or cuda.

    Quick: under 15 s and at most 2 GB written. Files, of one store striped over `directories`, are made in folders of their
    own there and removed. Raises UsageError when the device or a directory cannot be used."""
    begin = time.monotonic()
    progress("starting torch")
    target = device_named(device)
    facts = _facts_as_in_runs(directories)
    process = probe.process_bytes()
    settle_for_training()  # stages find their memory here as they do in a run
    repeats = 3 if quick else 7

    from .copies import measure_gpu_copies
    from .memory import measure_memory
    from .stages import measure_layers
    from .store import measure_store  # the native extension, not needed by --help
    from .update import measure_adamw

    progress("AdamW")
    adamw = measure_adamw(facts.cores, repeats=repeats, available=facts.ram_available)
    progress("memory")
    copy, fresh = measure_memory(repeats=repeats)
    progress("matrix multiplication")
    matmul: dict[Dtype, Rate] = {dtype: measure_matmul(target, dtype, repeats=repeats) for dtype in DTYPES}
    progress("decoder layers and heads")
    layers = measure_layers(target, matmul, quick=quick)
    step = 4 / (1 / layers.stage_rates[0].forward + 3 / layers.stage_rates[0].backward)
    beside = _layer_step(target, step, quick=quick) if target.type == "cpu" else None
    progress("a training step beside the update")
    shared = _shared(beside, quick=quick) if beside is not None else None
    progress(f"store in {', '.join(map(str, directories))}")
    store = measure_store(*directories, quick=quick, free=facts.disk_free, step=beside.run if beside is not None else None)
    copies = measure_gpu_copies(repeats=repeats) if target.type == "cuda" else ()
    notes = [*store.notes, *layers.notes]
    if matmul["bfloat16"].value < matmul["float32"].value:
        notes.append("bfloat16 is slower than float32 here: the processor has no instructions for it")
    found = replace(
        facts,
        device=target.type,
        device_name=_device_name(target),
        process_bytes=process,
        device_memory=_device_memory(target),
        # What compute really gets where no stage's rate is near: a layer's forward, recompute and backward.
        matmul_flops=min(matmul[compute_dtype].value, step),
        host_copy=copy.value,
        host_fresh=fresh.value,
        adamw=tuple((threads, rate.value) for threads, rate in adamw),
        shared_compute=shared.compute if shared else 1.0,
        shared_adamw=shared.adamw if shared else 1.0,
        stage_rates=merged_rates((), layers.stage_rates),
        drives=drives.drives_under(*directories),
        measured=date.today().isoformat(),
        sources=(f"fuyou bench, {'quick' if quick else 'full'}",),
    )
    rates = shared.rates if shared else ()
    return BenchReport(
        profile=_with_copies(_with_store(found, store), copies),
        rates=(*matmul.values(), *layers.rates, *rates, *store.rates, *(rate for _, rate in adamw), copy, fresh, *copies),
        notes=tuple(notes),
        quick=quick,
        seconds=time.monotonic() - begin,
        written_bytes=store.written_bytes,
    )


def _facts_as_in_runs(directories: tuple[Path, ...]) -> HardwareProfile:
    """What is known without measuring. Computes on no more threads than a plan has cores for from here on: torch counts all of
    them, whatever share a quota leaves."""
    import torch

    facts = assumed_hardware(*directories)
    torch.set_num_threads(min(torch.get_num_threads(), facts.cores))
    return facts


def _with_store(profile: HardwareProfile, store: StoreRates) -> HardwareProfile:
    return replace(
        profile,
        store_read=store.read.value,
        store_write=store.write.value,
        store_read_mixed=store.read_mixed.value,
        store_write_mixed=store.write_mixed.value,
        io_cpu=store.io_cpu,
    )


def _with_copies(profile: HardwareProfile, copies: tuple[Rate, ...]) -> HardwareProfile:
    """As `measure_copies` gives them; none without a GPU."""
    if not copies:
        return profile
    up, down, up_mixed, down_mixed = (rate.value for rate in copies)
    return replace(profile, h2d=up, d2h=down, h2d_mixed=up_mixed, d2h_mixed=down_mixed)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerStep:
    """A bfloat16 layer's forward, recompute and backward: what updates and transfers are measured beside."""

    run: Callable[[], None]
    flops: float
    note: str


def _layer_step(target: torch.device, rate: float, *, quick: bool) -> _LayerStep:
    """`rate`: what such a layer gets alone, about."""
    from .stages import LAYER_FLOPS, affordable_tokens, layer_alone, shape_of, small_model

    seconds = SHARED_QUICK_SECONDS if quick else SHARED_FULL_SECONDS
    tokens = affordable_tokens(LAYER_FLOPS * SHARED_WIDTH**2, rate, seconds / 4)
    anatomy, model = small_model(SHARED_WIDTH, tokens)
    layer = layer_alone(anatomy, model, target, "bfloat16", shape_of(tokens))

    def step() -> None:
        layer.forward()
        layer.backward()

    note = f"Llama layer {SHARED_WIDTH} wide, bfloat16, {tokens} tokens, forward + recompute + backward"
    return _LayerStep(run=step, flops=layer.flops + layer.backward_flops, note=note)


def _shared(beside: _LayerStep, *, quick: bool) -> Shared:
    """The layer's step looped beside one update thread."""
    from .update import measure_shared

    seconds = SHARED_QUICK_SECONDS if quick else SHARED_FULL_SECONDS
    return measure_shared(beside.run, beside.flops, seconds=seconds, note=beside.note)


DTYPES: tuple[Dtype, Dtype] = ("bfloat16", "float32")


def rate_of(
    name: str, unit: Unit, rates: list[float], note: str = "", *, middle: Callable[[list[float]], float] = statistics.median
) -> Rate:
    """The median of the rates of all repeats (or another `middle` of them), and their range."""
    return Rate(
        name=name,
        unit=unit,
        value=middle(rates),
        low=min(rates),
        high=max(rates),
        repeats=len(rates),
        note=note,
    )


def each(amount: float, seconds: list[float]) -> list[float]:
    """The rate at which `amount` was done in each of these times."""
    return [amount / taken for taken in seconds]


def measure_matmul(device: torch.device, dtype: Dtype, *, repeats: int) -> Rate:
    """FLOP/s of square matrix products, of the largest of a few sizes that is quick enough."""
    import torch

    taken, size = [float("inf")], 0
    for size in (4096, 8192) if device.type == "cuda" else (512, 1024, 2048, 4096):
        a = torch.rand(size, size, device=device, dtype=torch_dtype(dtype))
        taken = times(partial(torch.mm, a, a), device, 1)
        if taken[0] * 8 > MATMUL_SECONDS:  # the next size would take eight times as long
            break
    taken = times(partial(torch.mm, a, a), device, repeats)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return rate_of(f"matmul {dtype}", "FLOP/s", each(2.0 * size**3, taken), f"{size} x {size}{threads}")


def times(action: Callable[[], object], device: torch.device, repeats: int, *, seconds: float = REPEAT_SECONDS) -> list[float]:
    """Seconds of each repeat, after one that is not counted: fewer than `repeats` when they take more than `seconds`, but
    never none."""
    taken: list[float] = []
    while len(taken) <= 1 or (len(taken) <= repeats and sum(taken) < seconds):
        taken.append(seconds_of(action, device))
    return taken[1:]


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Of one repeat."""
    import torch

    begin = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the launch alone takes no time
    return time.perf_counter() - begin


def torch_dtype(dtype: Dtype) -> Any:
    import torch

    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]


def device_named(name: str) -> torch.device:
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401 - counted in the process's memory, as in a run

    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"there is no device {name!r} to measure", hint="auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no CUDA device here", hint="use device cpu")
    return torch.device("cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda")


def _device_name(device: torch.device) -> str:
    import torch

    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else cpu_name()


def _device_memory(device: torch.device) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
