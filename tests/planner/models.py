"""Draws models, machines and requests at random: everything the planner sees, without torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.planner.place import least_memory
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.ring import bytes_per_token, exchanges
from fuyou_cli.planner.schedule import Schedule
from fuyou_cli.planner.search import Family, may_measure_first
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import STAGE_ALIGN, Dtype, ModelSpec, OperatorSpec, StageKind, StageSpec, TensorSpec, banks_of
from fuyou_cli.spec.plan import Numerics

NEAR = 0.05  # share of the step that a search may miss
HARDWARE = HardwareProfile(
    device="cpu", device_name="test", cores=2, ram_total=64 * GiB, ram_available=60 * GiB, process_bytes=300 * MiB,
    device_memory=0, disk_free=1 << 44, matmul_flops=1e12, store_read=2e9, store_write=1e9, store_read_mixed=1.2e9,
    store_write_mixed=0.8e9, adamw=((1, 1e10),), h2d=0.0, d2h=0.0, measured="2026-01-01",
)  # fmt: skip


# One is missing, as attention is that cannot be kept, and sizes are no multiples of anything.
OPERATORS = (
    OperatorSpec(index=0, name="mm in", flops=700.0, bytes=30_000),
    OperatorSpec(index=2, name="attention", flops=50.0, bytes=4096 * 64),
    OperatorSpec(index=3, name="mm out", flops=1100.0, bytes=70),
)


def stage(
    index: int, kind: StageKind, params: int, vocabulary: tuple[int, int] | None = None, *, dtype: Dtype = "bfloat16"
) -> StageSpec:
    tensors = (TensorSpec(name=f"{index}.weight", shape=(params,), offset=0, numel=params, decay=True),)
    return StageSpec(
        index=index, kind=kind, name=f"stage {index}", banks=banks_of(dtype, trained=params), tensors=tensors if params else (),
        forward_flops=float(2 * params), forward_peak=4 * params % (64 * MiB), backward_peak=9 * params % (128 * MiB),
        vocabulary=vocabulary, operators=OPERATORS if kind == "block" else (),
        weights_in_backward=kind != "embedding",
    )  # fmt: skip


def model(*params: int, tied: bool = False, dtype: Dtype = "bfloat16", hidden: int = 1024) -> ModelSpec:
    """Makes an embedding, blocks, a norm and a head of these sizes; a tied head owns nothing."""
    kinds: list[StageKind] = ["embedding", *["block"] * (len(params) - 3), "norm", "head"]  # type: ignore[list-item]
    sizes = [*params[:-1], 0 if tied else params[-1]]
    item = 2 if dtype == "bfloat16" else 4
    return ModelSpec(
        architecture="Test", compute_dtype=dtype, hidden_size=hidden,
        vocab_size=32000, tied_head=tied, boundary_bytes_per_token=hidden * item,
        choreography_bytes_per_token=hidden * item,
        stages=tuple(stage(i, kind, size, dtype=dtype) for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True))),
    )  # fmt: skip


def with_graphs(spec: ModelSpec, *, size: int) -> ModelSpec:
    """Returns a model whose blocks are compiled, each with a graph of `size` bytes."""

    def of(stage: StageSpec) -> StageSpec:
        graph = OperatorSpec(index=0, name="graph", flops=stage.forward_flops, bytes=size)
        return replace(stage, operators=(graph,), forward_peak=stage.backward_peak) if stage.kind == "block" else stage

    return replace(spec, compiled=True, stages=tuple(map(of, spec.stages)))


SPEC = model(1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 11, 1 << 20)
NUMERICS = Numerics(
    compute_dtype="bfloat16", accumulate_dtype="float32", batch_size=4, micro_batch_size=2, max_seq_len=64, head_chunk_tokens=0,
    torch_threads=2, seed=7,
)  # fmt: skip


def request(**changes: Any) -> PlanRequest:
    """Asks for a plan of `SPEC` with room in RAM for a little of everything, and no clipping."""
    asked = PlanRequest(
        numerics=NUMERICS, model_name="/somewhere/tiny", device="cpu", clip_grad_norm=None, cpu_budget=0, scratch_size=MiB,
    )  # fmt: skip
    asked = replace(asked, **changes)
    return replace(asked, cpu_budget=least_memory(SPEC, HARDWARE, asked) + 24 * MiB)


@st.composite
def models(draw: st.DrawFn, unit: int = STAGE_ALIGN, most: int = 4 << 20, blocks: int = 12) -> ModelSpec:
    """Draws stage sizes that are multiples of `unit` parameters, at most `most`; blocks of one size, or of two."""
    size = st.integers(1, most // unit).map(lambda count: count * unit)
    one, other = draw(size), draw(size)
    sizes = [one if draw(st.booleans()) else other for _ in range(draw(st.integers(1, blocks)))]
    return model(
        draw(size), *sizes, draw(st.sampled_from([unit, 3 * unit])), draw(size), tied=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])), hidden=draw(st.sampled_from([64, 1024])),
    )  # fmt: skip


def divisors(count: int) -> list[int]:
    return [number for number in range(1, count + 1) if count % number == 0]


@st.composite
def request_for(
    draw: st.DrawFn, spec: ModelSpec, *, budget: int = 1 << 40, pinned: bool = True, swept: bool = False, most: int = 8
) -> PlanRequest:
    """Draws numerics, clipping or deferred updates, lookahead, device and pins; `swept`: also sweeps, or the norm
    first; `most`: micro-batches, and so sweeps."""
    tier = st.sampled_from([None, None, "cpu", "ssd"]) if pinned else st.none()
    micro = draw(st.integers(1, 4))
    clip = draw(st.sampled_from([None, 1.0]))
    defer = draw(st.sampled_from([None, False, True])) if clip is None else None
    numerics = Numerics(
        compute_dtype=spec.compute_dtype, micro_batch_size=micro, batch_size=micro * draw(st.integers(1, most)),
        accumulate_dtype=draw(st.sampled_from([spec.compute_dtype, "float32"])),
        max_seq_len=draw(st.sampled_from([64, 512])), head_chunk_tokens=0, torch_threads=2, seed=0,
    )  # fmt: skip
    request = PlanRequest(
        numerics=numerics, model_name="test", device=draw(st.sampled_from(["cpu", "emulated"])), clip_grad_norm=clip,
        cpu_budget=budget, weights=draw(tier), states=draw(tier), boundaries=draw(tier),
        gradients=draw(tier) if clip or defer else None, lookahead=draw(st.sampled_from([None, 1, 2, 4])), defer=defer,
        scratch_size=draw(st.integers(1, 8)) * MiB, kept=draw(st.sampled_from([None, None, "all"])),
        sweeps=draw(st.sampled_from(divisors(numerics.micro_batches))) if swept and not spec.tied_head else None,
    )  # fmt: skip
    measures = swept and may_measure_first(spec, request) and draw(st.booleans())
    return replace(request, norm_first=True) if measures else request


@st.composite
def parts(draw: st.DrawFn, whole: Family) -> Family:
    """Keeps each knob's first value, and another one or none: few enough candidates to look at all of them. Refining gets
    nothing of its own to try."""
    knobs = {knob.name: getattr(whole, knob.name) for knob in fields(whole) if knob.name != "fewer"}
    return Family(**{name: tuple(sorted({values[0], draw(st.sampled_from(values))})) for name, values in knobs.items()})


def boundary_bytes(spec: ModelSpec, numerics: Numerics, kept: bool) -> int:
    """Returns the bytes of one stage with all of its operators kept or none: a micro-batch's outputs follow its rows, 64-byte
    aligned."""
    row = spec.boundary_bytes_per_token * numerics.max_seq_len
    if not kept:
        return row * numerics.batch_size
    record = row * numerics.micro_batch_size + 30_016 + 4096 * 64 + 128
    return numerics.batch_size // numerics.micro_batch_size * (-(-record // 4096) * 4096)


def with_budget(request: PlanRequest, budget: int) -> PlanRequest:
    return replace(request, cpu_budget=budget)


def cut(spec: ModelSpec, *pieces: int) -> ModelSpec:
    """The same model with embedding and head in pieces of these parameters; a tied head's own none."""
    rows = [(sum(pieces[:i]), sum(pieces[: i + 1])) for i in range(len(pieces))]
    middle = [stage for stage in spec.stages if stage.kind not in ("embedding", "head")]
    parts: list[tuple[StageKind, int, tuple[int, int] | None]] = [
        *(("embedding", size, rows[i]) for i, size in enumerate(pieces)),
        *((part.kind, part.params, None) for part in middle),
        *(("head", 0 if spec.tied_head else size, rows[i]) for i, size in enumerate(pieces)),
    ]
    return replace(spec, stages=tuple(stage(i, *part, dtype=spec.compute_dtype) for i, part in enumerate(parts)))


@st.composite
def cut_models(draw: st.DrawFn, blocks: int = 12) -> ModelSpec:
    """Cuts into two to four pieces, the last one smaller or not."""
    size = draw(st.integers(1, 256)) * STAGE_ALIGN
    last = draw(st.integers(1, size // STAGE_ALIGN)) * STAGE_ALIGN
    return cut(draw(models(blocks=blocks)), *[size] * draw(st.integers(1, 3)), last)


def link_bytes(model: ModelSpec, schedule: Schedule, tokens: int, sweeps: int = 1) -> tuple[int, int]:
    """Returns the bytes of boundaries that a rank takes and gives in a step of `tokens` computed tokens."""
    boundaries = exchanges(model, schedule)
    taken, given = ([b for e in boundaries if (b := getattr(e, side)) is not None] for side in ("takes", "gives"))
    came, left = (sum(bytes_per_token(model, boundary) for boundary in side) for side in (taken, given))
    return came * tokens // sweeps, left * tokens // sweeps
