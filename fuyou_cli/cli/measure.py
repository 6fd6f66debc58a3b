"""Measures the machine: arithmetic, the store, AdamW, and one training step of a real decoder layer.

Every figure is the median of a few repeats, with the least and the greatest beside it. torch and transformers (3 s) are
imported inside the functions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import Dtype

from . import probe
from .profile import assumed_hardware, cpu_name

if TYPE_CHECKING:
    import torch

__all__ = ["BenchReport", "Rate", "assumed_hardware", "measure", "measure_hardware"]

Unit = Literal["FLOP/s", "B/s"]

MATMUL_SECONDS = 0.12  # of one repeat
LAYER_SECONDS = 0.8
REPEAT_SECONDS = 1.5  # of all repeats of one thing: a busy machine gets fewer
ADAMW_BYTES_PER_PARAMETER = 26  # bfloat16: 14 read, 12 written
ADAMW_PARAMETERS = 1 << 23  # per thread: 117 MB, larger than the caches
ADAMW_PASSES = 4  # one repeat
ADAMW_MEMORY = GiB // 2  # all threads together


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One measured rate: the median, the range of the repeats, and what it was measured on."""

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


def measure_hardware(directory: Path, *, quick: bool, device: str = "auto") -> HardwareProfile:
    """The machine's profile; the store is measured in `directory`. See `measure`."""
    return measure(directory, quick=quick, device=device).profile


def measure(
    directory: Path,
    *,
    quick: bool,
    device: str = "auto",
    compute_dtype: Dtype = "bfloat16",
    progress: Callable[[str], None] = lambda _: None,
) -> BenchReport:
    """Measure everything. `progress` hears what is being measured. `device` is auto, cpu or cuda.

    Quick: under 15 s and at most 2 GB written. Files are made in a folder of their own in `directory` and removed.
    Raises UsageError when the device or the directory cannot be used.
    """
    begin = time.monotonic()
    progress("starting torch")
    target = _device(device)
    facts = assumed_hardware(directory)
    process = probe.process_bytes()
    repeats = 3 if quick else 7

    from .measure_store import measure_store  # the native extension, not needed by --help

    progress(f"store in {directory}")
    store = measure_store(directory, quick=quick, free=facts.disk_free)
    progress("AdamW")
    adamw = measure_adamw(facts.cores, repeats=repeats)
    progress("matrix multiplication")
    matmul: dict[Dtype, Rate] = {dtype: measure_matmul(target, dtype, repeats=repeats) for dtype in _DTYPES}
    progress("one decoder layer")
    layer = measure_layer(target, compute_dtype, repeats=repeats)
    copies = measure_copies(target, repeats=repeats) if target.type == "cuda" else ()
    notes = list(store.notes)
    if matmul["bfloat16"].value < matmul["float32"].value:
        notes.append("bfloat16 is slower than float32 here: the processor has no instructions for it")
    found = HardwareProfile(
        device=target.type,
        device_name=_device_name(target),
        cores=facts.cores,
        ram_total=facts.ram_total,
        ram_available=facts.ram_available,
        process_bytes=process,
        device_memory=_device_memory(target),
        disk_free=facts.disk_free,
        # What compute really gets: a layer's step with its recompute (8 per parameter and token where 6 are counted).
        matmul_flops=min(matmul[compute_dtype].value, layer.value * 4 / 3),
        store_read=store.read.value,
        store_write=store.write.value,
        store_read_mixed=store.read_mixed.value,
        store_write_mixed=store.write_mixed.value,
        adamw=((1, adamw[0].value),),
        h2d=copies[0].value if copies else 0.0,
        d2h=copies[1].value if copies else 0.0,
        measured=date.today().isoformat(),
    )
    return BenchReport(
        profile=found,
        rates=(*matmul.values(), layer, *store.rates, *adamw, *copies),
        notes=tuple(notes),
        quick=quick,
        seconds=time.monotonic() - begin,
        written_bytes=store.written_bytes,
    )


_DTYPES: tuple[Dtype, Dtype] = ("bfloat16", "float32")


def rate_of(name: str, unit: Unit, rates: list[float], note: str = "") -> Rate:
    """The median of the rates of all repeats, and their range."""
    return Rate(
        name=name,
        unit=unit,
        value=statistics.median(rates),
        low=min(rates),
        high=max(rates),
        repeats=len(rates),
        note=note,
    )


def _each(amount: float, seconds: list[float]) -> list[float]:
    """The rate at which `amount` was done in each of these times."""
    return [amount / taken for taken in seconds]


def measure_matmul(device: torch.device, dtype: Dtype, *, repeats: int) -> Rate:
    """FLOP/s of square matrix products, of the largest of a few sizes that is quick enough."""
    import torch

    taken, size = [float("inf")], 0
    for size in (4096, 8192) if device.type == "cuda" else (512, 1024, 2048, 4096):
        a = torch.rand(size, size, device=device, dtype=_torch_dtype(dtype))
        taken = _times(partial(torch.mm, a, a), device, 1)
        if taken[0] * 8 > MATMUL_SECONDS:  # the next size would take eight times as long
            break
    taken = _times(partial(torch.mm, a, a), device, repeats)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return rate_of(f"matmul {dtype}", "FLOP/s", _each(2.0 * size**3, taken), f"{size} x {size}{threads}")


def measure_layer(device: torch.device, dtype: Dtype, *, repeats: int) -> Rate:
    """FLOP/s, counted as 6 per parameter and token, of one training step of a Llama decoder layer: forward, then
    recompute and backward. The batch grows until a step takes about LAYER_SECONDS."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        layer = LlamaDecoderLayer(config, layer_idx=0).to(_torch_dtype(dtype)).train()
        rotary = LlamaRotaryEmbedding(config)
    weights = list(layer.parameters())
    numel = sum(weight.numel() for weight in weights)

    def step(entry: torch.Tensor) -> None:
        turns = rotary(entry, torch.arange(entry.shape[1], device=device)[None])
        with torch.no_grad():
            layer(entry, position_embeddings=turns)
        again = entry.detach().requires_grad_()
        leave = layer(again, position_embeddings=turns)
        torch.autograd.grad(leave, [again, *weights], entry)

    most, tokens = (8192 if device.type == "cuda" else 2048), 64
    taken = [0.0]
    while tokens < most and 2 * taken[0] < LAYER_SECONDS:
        tokens *= 2
        length = min(tokens, 512)
        entry = torch.randn((tokens // length, length, config.hidden_size), device=device, dtype=_torch_dtype(dtype))
        taken = _times(partial(step, entry), device, 1)
    taken = _times(partial(step, entry), device, repeats)
    note = f"Llama layer, {tokens // length} x {length} tokens, forward + recompute + backward, counted as 6N"
    return rate_of(f"training step {dtype}", "FLOP/s", _each(6.0 * numel * tokens, taken), note)


def measure_adamw(cores: int, *, repeats: int) -> tuple[Rate, ...]:
    """Bytes/s of the update's own kernel (bfloat16: 26 bytes per parameter), for 1, 2, 4, ... threads."""
    counts = [count for count in _powers_of_two(cores) if count == 1 or count * ADAMW_PARAMETERS * 14 <= ADAMW_MEMORY]
    size = counts[-1] * ADAMW_PARAMETERS * 14

    from fuyou_cli.swap.arena import Arena

    rates = []
    with Arena(size) as arena, ThreadPoolExecutor(counts[-1]) as pool:
        shares = [_adamw_share(arena.view, number) for number in range(counts[-1])]
        for count in counts:

            def work(count: int = count) -> None:
                for done in [pool.submit(share) for share in shares[:count]]:
                    done.result()

            work()
            taken = []
            for _ in range(repeats):
                begin = time.perf_counter()
                for _ in range(ADAMW_PASSES):
                    work()
                taken.append(time.perf_counter() - begin)
            amount = float(ADAMW_PASSES) * count * ADAMW_PARAMETERS * ADAMW_BYTES_PER_PARAMETER
            rates.append(rate_of(f"AdamW, {count} thread{'s' * (count > 1)}", "B/s", _each(amount, taken)))
        shares.clear()
    return tuple(rates)


def _adamw_share(view: Callable[[int, int], memoryview], number: int) -> Callable[[], object]:
    """One thread's update over its own part of the arena, gradients filled."""
    import torch

    from fuyou_cli.swap import kernels
    from fuyou_cli.swap.requests import Segment, Update

    count = ADAMW_PARAMETERS
    base, places = number * count * 14, {}
    for name, item in (("momentum", 4), ("variance", 4), ("weights", 2), ("remainder", 2), ("gradients", 2)):
        places[name] = view(base, count * item)
        base += count * item
    torch.frombuffer(places["gradients"], dtype=torch.bfloat16).fill_(0.5)
    update = Update(
        params=count, weights_dtype="bfloat16", gradients_dtype="bfloat16", weights=0, lr=1e-3, beta1=0.9, beta2=0.95,
        epsilon=1e-8, step=1, segments=(Segment(first=0, count=count, weight_decay=0.1),),
    )  # fmt: skip
    return lambda: kernels.adamw(update, **places)


def measure_copies(device: torch.device, *, repeats: int) -> tuple[Rate, Rate]:
    """Bytes/s between pinned host memory and the GPU, each way alone."""
    import torch

    host = torch.empty(256 * MiB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    up = _times(lambda: there.copy_(host, non_blocking=True), device, repeats)
    down = _times(lambda: host.copy_(there, non_blocking=True), device, repeats)
    return (
        rate_of("host to GPU", "B/s", _each(256.0 * MiB, up), "pinned"),
        rate_of("GPU to host", "B/s", _each(256.0 * MiB, down), "pinned"),
    )


def _times(action: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each repeat, after one that is not counted: fewer than `repeats` when they are slow, never none."""
    import torch

    taken: list[float] = []
    while len(taken) < 2 or (len(taken) <= repeats and sum(taken) < REPEAT_SECONDS):
        begin = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the launch alone takes no time
        taken.append(time.perf_counter() - begin)
    return taken[1:]


def _powers_of_two(most: int) -> Iterator[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2


def _torch_dtype(dtype: Dtype) -> Any:
    import torch

    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]


def _device(name: str) -> torch.device:
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
