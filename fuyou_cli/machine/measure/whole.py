"""Measures the machine: arithmetic, stages of a few widths, the store, AdamW, and AdamW beside a training step.

Every figure is the median of a few repeats, with the least and the greatest. torch is imported inside functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core import probe
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.process import settle_for_training
from fuyou_cli.planner.plan_request import update_threads_for
from fuyou_cli.spec.hardware import HardwareProfile, merged_rates
from fuyou_cli.spec.model import Dtype

from ..profile import assumed_hardware, card, cpu_name, drives_under
from .timing import DTYPES, Findings, Rate, each, mean_seconds, rate_of, seconds_of

if TYPE_CHECKING:
    import torch

MATMUL_SECONDS = 0.12  # seconds of one repeat
GPU_SETTLES = 1.0  # seconds of work that take a GPU's clock from idle to what it is under load
REPEAT_SECONDS = 1.5  # seconds of all repeats of one thing: a busy machine gets fewer
SHARED_QUICK_SECONDS, SHARED_FULL_SECONDS = 0.6, 4.0  # seconds of training steps beside an update
SHARED_WIDTH = 1024
QUICK_TOGETHER, FULL_TOGETHER = 0.1, 0.5  # seconds that all that moves bytes moves alone or at once, in a turn

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """Everything that `fuyou bench` found."""

    profile: HardwareProfile
    rates: tuple[Rate, ...]
    notes: tuple[str, ...]
    quick: bool
    seconds: float
    written_bytes: int

    def with_found(self, findings: Findings) -> BenchReport:
        """Adds results: figures replace those of the profile, rates of stages are added to it."""
        stages = merged_rates(self.profile.stage_rates, findings.stage_rates)
        return replace(
            self,
            profile=replace(self.profile, **findings.figures, stage_rates=stages),
            rates=self.rates + findings.rates,
            notes=self.notes + findings.notes,
            written_bytes=self.written_bytes + findings.written_bytes,
        )


def measure(*directories: Path, quick: bool, device: str = "auto", progress: Progress = lambda _: None) -> BenchReport:
    """Measures everything. `progress` gets the name of what is being measured. `device` is auto, cpu or cuda.

    Quick: under 15 s, at most 2 GB written. Raises UsageError if the device or a directory cannot be used.
    """
    begin = time.monotonic()
    progress("starting torch")
    target = device_named(device)
    facts = _facts_as_in_runs(directories)
    process = probe.process_bytes()  # before it holds a device's driver
    name, memory = card() if target.type == "cuda" else (cpu_name(), 0)
    facts = replace(
        facts,
        process_bytes=process,
        device=target.type,
        device_name=name,
        device_memory=memory,
        drives=drives_under(*directories),
        measured=date.today().isoformat(),
        sources=(f"fuyou bench, {'quick' if quick else 'full'}",),
    )
    settle_for_training()  # stages get their memory as in a run
    report = BenchReport(profile=facts, rates=(), notes=(), quick=quick, seconds=0.0, written_bytes=0)
    report = report.with_found(_measured(facts, target, directories, quick=quick, progress=progress))
    return replace(report, seconds=time.monotonic() - begin)


def _measured(
    facts: HardwareProfile, target: torch.device, directories: tuple[Path, ...], *, quick: bool, progress: Progress
) -> Findings:
    from .compute import measure_layers
    from .memory_rates import measure_adamw, measure_memory, measure_shared, measure_sums
    from .store_rates import measure_store  # the native extension, not needed by --help

    repeats = 3 if quick else 7
    progress("AdamW")
    adamw = measure_adamw(facts.cores, repeats=repeats, available=facts.ram_available)
    progress("memory")
    memory = measure_memory(repeats=repeats)
    progress("matrix multiplication")
    matmul = {dtype: measure_matmul(target, dtype, repeats=repeats) for dtype in DTYPES}
    progress("decoder layers and heads")
    layers = measure_layers(target, matmul, quick=quick)
    step = 4 / (1 / layers.stage_rates[0].forward + 3 / layers.stage_rates[0].backward)
    sums = measure_sums(target, repeats=repeats) if target.type == "cuda" else Findings()
    shared, step_beside = Findings(), None
    if target.type == "cpu":
        progress("a training step beside the update")
        seconds = SHARED_QUICK_SECONDS if quick else SHARED_FULL_SECONDS
        step_beside, flops, note = _layer_step(target, step, seconds)
        shared = measure_shared(step_beside, flops, seconds=seconds, note=note)
    progress(f"store in {', '.join(map(str, directories))}")
    store = measure_store(*directories, quick=quick, free=facts.disk_free, step=step_beside)
    progress("all that moves bytes at once")
    crossing = _crossing(replace(facts, **adamw.figures), target, directories, quick=quick, repeats=repeats)
    return _arithmetic(matmul, step) + layers + sums + shared + store + adamw + memory + crossing


def _crossing(
    facts: HardwareProfile, target: torch.device, directories: tuple[Path, ...], *, quick: bool, repeats: int
) -> Findings:
    """Measures copies where there is a GPU, then all that moves bytes through the host's memory, at once."""
    from fuyou_cli.engine.devices import open_device

    from .memory_rates import measure_copies, measure_dram

    threads = update_threads_for(facts, device=target.type, torch_threads=facts.cores)
    best, seconds = max(rate for _, rate in facts.adamw), QUICK_TOGETHER if quick else FULL_TOGETHER
    device = open_device("cuda") if target.type == "cuda" else None
    try:
        copies = Findings() if device is None else measure_copies(device, repeats=repeats)
        return copies + measure_dram(*directories, threads=threads, best=best, device=device, seconds=seconds, turns=repeats)
    finally:
        if device is not None:
            device.close()


def _arithmetic(matmul: dict[Dtype, Rate], step: float) -> Findings:
    """Rates matrix products. `step` is what compute really gets, by a layer's forward, recompute and backward."""
    slow = "bfloat16 is slower than float32 here: the processor has no instructions for it"
    return Findings(
        figures={"matmul_flops": min(matmul["bfloat16"].value, step)},
        rates=tuple(matmul.values()),
        notes=(slow,) if matmul["bfloat16"].value < matmul["float32"].value else (),
    )


def _facts_as_in_runs(directories: tuple[Path, ...]) -> HardwareProfile:
    """Returns what is known without measuring, and limits torch to the threads that a plan has cores for."""
    import torch

    facts = assumed_hardware(*directories)  # torch counts all cores and ignores quotas
    torch.set_num_threads(min(torch.get_num_threads(), facts.cores))
    return facts


def _layer_step(target: torch.device, rate: float, seconds: float) -> tuple[Callable[[], None], float, str]:
    """Makes a step of a bfloat16 layer that gets about `rate` alone, to measure beside. Returns the step, its FLOPs and a
    note."""
    from .compute import LAYER_FLOPS, affordable_tokens, small_stage

    tokens = affordable_tokens(LAYER_FLOPS * SHARED_WIDTH**2, rate, seconds / 4)
    layer = small_stage("block", SHARED_WIDTH, "bfloat16", tokens, target).make(tokens)

    def step() -> None:
        layer.forward()
        layer.backward()

    note = f"Llama layer {SHARED_WIDTH} wide, bfloat16, {tokens} tokens, forward + recompute + backward"
    return step, layer.flops + layer.backward_flops, note


def measure_matmul(device: torch.device, dtype: Dtype, *, repeats: int) -> Rate:
    """Measures FLOP/s of square matrix products, the largest of a few sizes that is quick enough."""
    import torch

    for size in (4096, 8192) if device.type == "cuda" else (512, 1024, 2048, 4096):
        a = torch.rand(size, size, device=device, dtype=getattr(torch, dtype))
        product = partial(torch.mm, a, a)
        seconds_of(product, device)  # not counted
        if seconds_of(product, device) * 8 > MATMUL_SECONDS:  # the next size takes eight times as long
            break
    if device.type == "cuda":
        mean_seconds(product, GPU_SETTLES, device)
        durations = [mean_seconds(product, MATMUL_SECONDS, device) for _ in range(repeats)]
    else:
        durations = _times(product, device, repeats)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return rate_of(f"matmul {dtype}", "FLOP/s", each(2.0 * size**3, durations), f"{size} x {size}{threads}")


def _times(action: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Times each repeat after one that is not counted: at most `repeats`, fewer if they take long, at least one."""
    durations: list[float] = []
    while len(durations) <= 1 or (len(durations) <= repeats and sum(durations) < REPEAT_SECONDS):
        durations.append(seconds_of(action, device))
    return durations[1:]


def device_named(name: str) -> torch.device:
    """Finds the device that `auto`, `cpu` or `cuda` names. Raises UsageError if there is none."""
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401 - part of the process's memory, as in a run

    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}", hint="use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no CUDA device on this machine", hint="use --device cpu")
    return torch.device("cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda")
