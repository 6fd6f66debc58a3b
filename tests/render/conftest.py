"""Builds a plan of a 1.1B model in 2 GiB, its hardware and one step's timeline by hand: inputs of the views."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fuyou_cli.advice.facts import Room, RunFacts
from fuyou_cli.cli.render.plan_screen import show_plan
from fuyou_cli.core.disk import FileSystem
from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec, StageKind, StageSpec, TensorSpec, banks_of
from fuyou_cli.spec.plan import ExtentPair, IoPlan, MemoryLine, Numerics, Plan, Predicted, Span, StagePlan, Tier
from fuyou_cli.training.report import Busy, Compared, RunReport

Printer = Callable[..., tuple[Console, Callable[[], str]]]
Screen = Callable[..., str]


@pytest.fixture
def printer() -> Printer:
    """Gives `printer(width, ascii=False, tty=False)`, a console and a function returning what it printed."""

    def make(width: int, *, ascii: bool = False, tty: bool = False) -> tuple[Console, Callable[[], str]]:
        raw = io.BytesIO()
        file = io.TextIOWrapper(raw, encoding="ascii" if ascii else "utf-8", write_through=True)
        console = Console(file=file, width=width, height=40, force_terminal=tty, no_color=not tty, legacy_windows=False)
        return console, lambda: raw.getvalue().decode("ascii" if ascii else "utf-8")

    return make


@pytest.fixture
def screen(printer: Printer) -> Screen:
    """Gives `screen(facts, width=200, ascii=True, verbose=False)`, the text of the plan's screen."""

    def make(facts: RunFacts, width: int = 200, *, ascii: bool = True, verbose: bool = False) -> str:
        console, printed = printer(width, ascii=ascii)
        show_plan(console, facts, verbose=verbose)
        return printed()

    return make


def words(text: str) -> str:
    return " ".join(text.split())


def _stage(index: int, kind: StageKind, params: int) -> StageSpec:
    tensor = TensorSpec(name=f"stage{index}.weight", shape=(params,), offset=0, numel=params, decay=True)
    return StageSpec(
        index=index, kind=kind, name=f"model.{index}", banks=banks_of("bfloat16", trained=params), tensors=(tensor,),
        forward_flops=1e11, forward_peak=64 * MiB, backward_peak=128 * MiB, weights_in_backward=kind != "embedding",
    )  # fmt: skip


@pytest.fixture
def model() -> ModelSpec:
    kinds: list[tuple[StageKind, int]] = [("embedding", 65_536_000), *[("block", 44_046_336)] * 22, ("norm", 2048)]
    kinds.append(("head", 65_536_000))
    stages = tuple(_stage(index, kind, params) for index, (kind, params) in enumerate(kinds))
    return ModelSpec(
        architecture="LlamaForCausalLM", compute_dtype="bfloat16", hidden_size=2048, vocab_size=32000, stages=stages,
        tied_head=False, boundary_bytes_per_token=4096, choreography_bytes_per_token=2048,
    )  # fmt: skip


@pytest.fixture
def hardware() -> HardwareProfile:
    return HardwareProfile(
        device="cpu", device_name="AMD EPYC", cores=2, ram_total=24 * GiB, ram_available=22 * GiB, process_bytes=420 * MiB,
        device_memory=0, disk_free=80 * 10**9, matmul_flops=0.861e12, store_read=2.1e9, store_write=1.4e9,
        store_read_mixed=1.2e9, store_write_mixed=0.9e9, adamw=((1, 12.4e9),), h2d=0.0, d2h=0.0, measured="2026-11-21",
    )  # fmt: skip


@pytest.fixture
def room() -> Room:
    """Makes one file system with 80 GB free for store and export; no device memory."""
    return Room(gpu=None, ssd=None, store=80 * 10**9, disks=(disk(free=80 * 10**9),))


def disk(*, free: int, held: int = 0) -> FileSystem:
    what, wanted = ("the store", "the exported model"), 28_600 * MiB + 2_200_000_000
    return FileSystem(folders=(Path("/nvme"),), what=what, wanted=wanted, held=held, free=free, device=1)


_SPAN = Span(offset=0, size=4096)
_MEMORY = (
    MemoryLine(what="weights", tier="cpu", size=420 * MiB, total=2_200 * MiB, policy="3 slots, lookahead 2"),
    MemoryLine(what="weights", tier="ssd", size=2_200 * MiB * 2, total=2_200 * MiB, policy="two extents"),
    MemoryLine(what="states", tier="ssd", size=11_000 * MiB * 2, total=11_000 * MiB, policy="two extents"),
    MemoryLine(what="gradients", tier="cpu", size=250 * MiB, total=2_200 * MiB, policy="2 slots"),
    MemoryLine(what="gradients", tier="ssd", size=2_200 * MiB, total=2_200 * MiB, policy="rest until the norm is known"),
    MemoryLine(what="boundaries", tier="cpu", size=800 * MiB, total=800 * MiB, policy="one per stage"),
    MemoryLine(what="interpreter, torch", tier="cpu", size=420 * MiB, total=0, policy="measured"),
)  # fmt: skip
_PREDICTED = Predicted(
    cpu_peaks={"load": 900 * MiB, "train": 1_884 * MiB, "export": 700 * MiB}, gpu_peak=0, ssd_bytes=28_600 * MiB,
    export_bytes=2_200_000_000, read_per_step=17_600_000_000, written_per_step=15_400_000_000,
    read_by={"weights": 4_400_000_000, "states": 11_000_000_000, "gradients": 2_200_000_000},
    written_by={"weights": 2_200_000_000, "states": 11_000_000_000, "gradients": 2_200_000_000}, step_flops=5.41e13,
    compute_flops=7.2e13, seconds={"compute": 84.0, "update": 3.1, "ssd read": 14.6, "ssd write": 17.1}, step_seconds=88.4,
    bottleneck="compute",
)  # fmt: skip


def _homes(index: int, kind: str) -> StagePlan:
    tier: Tier = "cpu" if kind == "norm" else "ssd"
    return StagePlan(
        stage=index, weights=tier, states=tier, gradients="ssd", boundary="cpu", slot_class=0, deferred=True,
        pair=ExtentPair(offset=0, size=4096), weights_at=_SPAN, remainder_at=_SPAN, momentum_at=_SPAN, variance_at=_SPAN,
        gradients_extent=_SPAN, boundary_extent=None, weights_ram=None, remainder_ram=None, momentum_ram=None,
        variance_ram=None, gradients_ram=None, boundary_ram=_SPAN,
    )  # fmt: skip


@pytest.fixture
def plan(model: ModelSpec) -> Plan:
    return Plan(
        version=1,
        model="TinyLlama-1.1B",
        device="cpu",
        numerics=Numerics(
            compute_dtype="bfloat16",
            accumulate_dtype="float32",
            batch_size=16,
            micro_batch_size=4,
            max_seq_len=512,
            head_chunk_tokens=512,
            torch_threads=2,
            seed=42,
        ),
        clip_grad_norm=1.0,
        stages=tuple(_homes(stage.index, stage.kind) for stage in model.stages),
        slot_classes=(),
        boundary_slots=(),
        upload_slots=(),
        lookahead=2,
        io=IoPlan(
            backend="io_uring",
            read_depth=8,
            write_depth=4,
            block_size=MiB,
            stripe=MiB,
            update_threads=1,
            chunk_params=1 << 20,
            scratch=_SPAN,
        ),
        arena_size=1_500 * MiB,
        store_size=28_600 * MiB,
        cpu_budget=2 * GiB,
        memory=_MEMORY,
        predicted=_PREDICTED,
    )


@pytest.fixture
def facts(plan: Plan, model: ModelSpec, hardware: HardwareProfile, room: Room) -> RunFacts:
    return RunFacts(plan=plan, model=model, hardware=hardware, room=room, command="fuyou finetune recipe.yaml")


@pytest.fixture
def timeline() -> tuple[Busy, ...]:
    """Makes four blocks, forward then backward; reads run ahead, updates and writes follow."""
    items: list[Busy] = []
    for block in range(4):
        items.append(Busy(resource="ssd read", label=f"weights block {block}", begin=block, end=block + 0.5, bytes=88_000_000))
        items.append(Busy(resource="compute", label=f"forward block {block}", begin=block + 0.5, end=block + 1.5))
    for turn, block in enumerate(reversed(range(4))):
        start = 4.5 + 3 * turn
        items.append(Busy(resource="ssd read", label=f"states block {block}", begin=start, end=start + 1.5, bytes=440_000_000))
        items.append(Busy(resource="compute", label=f"backward block {block}", begin=start, end=start + 3))
        items.append(Busy(resource="update", label=f"update block {block}", begin=start + 3, end=start + 3.4))
        items.append(Busy(resource="ssd write", label=f"block {block}", begin=start + 3.2, end=start + 5, bytes=528_000_000))
    return tuple(items)


@pytest.fixture
def run_report(timeline: tuple[Busy, ...]) -> RunReport:
    return RunReport(
        steps=40,
        settled=38,
        seconds=3600.0,
        losses=(4.2137, *(1.8 + 2.4 / (1 + 0.3 * step) for step in range(1, 39)), 1.8342),
        tokens_per_second=92.7,
        tflops=0.61,
        ram_budget=2 * GiB,
        ram_peak=1_850 * MiB,
        step_seconds=86.2,
        read_per_step=17_610_000_000,
        written_per_step=15_400_000_000,
        written_total=616_000_000_000,
        stalls={"ssd read": 3.1, "update": 0.4},
        timeline_stalls={"ssd read": 0.3},
        timeline=timeline,
        output_dir="outputs/run",
        compared=(
            Compared(what="peak RAM", unit="bytes", predicted=1_884 * MiB, measured=1_850 * MiB),
            Compared(what="step", unit="seconds", predicted=88.4, measured=86.2),
            Compared(what="compute under way", unit="seconds", predicted=84.0, measured=82.5),
            Compared(what="ssd read", unit="bytes", predicted=17_600_000_000, measured=17_610_000_000),
            Compared(what="ssd written", unit="bytes", predicted=15_400_000_000, measured=15_400_000_000),
            Compared(what="waiting", unit="seconds", predicted=0.0, measured=3.5),
            Compared(what="  for update of the embedding", unit="seconds", predicted=0.0, measured=3.1),
        ),
    )
