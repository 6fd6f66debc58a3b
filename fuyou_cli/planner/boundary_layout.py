"""Lays out what is kept with a stage's boundary from forward to backward.

Each micro-batch has its rows, then the outputs of its kept operators. Backward uses those outputs and does not compute them
again. Outputs that stay on the device have the same layout, without rows. The planner and the engine share this one layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..core.units import align_up
from ..spec.model import ModelSpec, OperatorSpec, StageSpec
from ..spec.plan import MicroBatch, Numerics, Span

OUTPUT_ALIGN = 64  # bytes: a cache line, which also aligns any dtype
# Bytes, for outputs that stay on a device: the allocator's own alignment, because libraries choose kernels by alignment.
DEVICE_ALIGN = 512
SUMMARY_TOKENS = 32  # kernels round the tokens of attention's log-sum-exp up to this
_SEVERAL = 8  # tensors of an operator's output, at most
RECORD_ALIGN = 4096  # bytes: O_DIRECT can then move one micro-batch's record alone

Kept = tuple[tuple[int, ...], ...]  # per stage, the indexes of the operators whose outputs are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryLayout:
    """Where rows and kept outputs lie. The record of each micro-batch takes `record` bytes: its rows first, then
    outputs by operator index (spans within the record). If no output is kept, the rows of the whole batch are contiguous."""

    size: int  # bytes of all records, a multiple of RECORD_ALIGN
    record: int
    outputs: dict[int, Span]
    # Of micro-batches of unlike size: where the record of each begins, and its own outputs, as `outputs`.
    uneven: tuple[tuple[int, dict[int, Span]], ...] = ()

    def begins(self, micro_batch: int) -> int:
        """Returns where the record of one micro-batch begins, relative to the start of the boundary."""
        return self.uneven[micro_batch][0] if self.uneven else micro_batch * self.record

    def begin(self, micro_batch: int, operator: int) -> int:
        """Returns where one output of one micro-batch begins, relative to the start of the boundary."""
        return self.output(micro_batch, operator).offset

    def output(self, micro_batch: int, operator: int) -> Span:
        """Returns the span of that output."""
        span = (self.uneven[micro_batch][1] if self.uneven else self.outputs)[operator]
        return Span(offset=self.begins(micro_batch) + span.offset, size=span.size)


def boundary_layout(
    stage: StageSpec, kept: tuple[int, ...], *, rows: int, row_bytes: int, micro_batch_size: int, align: int = OUTPUT_ALIGN
) -> BoundaryLayout:
    """Lays out a batch of `rows` rows of `row_bytes` each. `align`: the alignment of outputs, in bytes."""
    micro_batch = micro_batch_size * row_bytes
    if not kept:
        return BoundaryLayout(size=align_up(rows * row_bytes, RECORD_ALIGN), record=micro_batch, outputs={})
    outputs: dict[int, Span] = {}
    end = align_up(micro_batch, align)
    for operator in _chosen(stage, kept):
        outputs[operator.index] = Span(offset=end, size=operator.bytes)
        end = align_up(end + operator.bytes, align)
    record = align_up(end, RECORD_ALIGN)
    return BoundaryLayout(size=record * -(-rows // micro_batch_size), record=record, outputs=outputs)


def uneven_layout(
    stage: StageSpec, kept: tuple[int, ...], parts: Sequence[MicroBatch], *, token_bytes: int, planned: int
) -> BoundaryLayout:
    """Lays out a batch of these micro-batches. `token_bytes`: of a token's boundary; `planned`: tokens of a whole micro-batch.
    One with half of them has outputs of half the size, where they follow its tokens. 0: all have whole outputs. It takes no
    more than the planned layout if none has more tokens, and there are no more of them."""
    whole = boundary_layout(stage, kept, rows=len(parts), row_bytes=planned * token_bytes, micro_batch_size=1)
    follows = {operator.index for operator in stage.operators if operator.follows_tokens}
    records, begin = [], 0
    for part in parts:
        outputs: dict[int, Span] = {}
        end = align_up(part.tokens * token_bytes, OUTPUT_ALIGN if kept else 1)
        tokens = (part.end - part.first) * align_up(part.width, SUMMARY_TOKENS)
        for operator, span in whole.outputs.items():
            own = span.size
            if operator in follows and planned:  # tensors of an output are aligned one by one
                own = min(own, span.size * tokens // planned + _SEVERAL * OUTPUT_ALIGN)
            outputs[operator] = Span(offset=end, size=own)
            end = align_up(end + own, OUTPUT_ALIGN)
        records.append((begin, outputs))
        begin = align_up(begin + end, RECORD_ALIGN if kept else 1)
    return replace(whole, size=align_up(begin, RECORD_ALIGN), uneven=tuple(records))


def planned_boundary(model: ModelSpec, numerics: Numerics, stage: int, kept: tuple[int, ...]) -> BoundaryLayout:
    """Returns the planned boundary for all rows of a batch, or of a sweep."""
    return boundary_layout(
        model.stages[stage],
        kept,
        rows=numerics.batch_size,
        row_bytes=numerics.max_seq_len
        * (model.boundary_bytes_per_token if model.stages[stage].expert_range is None else model.sent_bytes_per_token),
        micro_batch_size=numerics.micro_batch_size,
    )


def outputs_size(stage: StageSpec, kept: tuple[int, ...]) -> int:
    """Returns the bytes that kept outputs take in the record of one micro-batch: the sum of theirs, as each is aligned."""
    return sum([align_up(operator.bytes, OUTPUT_ALIGN) for operator in _chosen(stage, kept)])


def filled_boundary(model: ModelSpec, numerics: Numerics, outputs: int) -> int:
    """Returns the bytes of a planned boundary whose kept outputs (one at least) take `outputs` bytes of each record."""
    rows = model.boundary_bytes_per_token * numerics.max_seq_len * numerics.micro_batch_size
    record = align_up(align_up(rows, OUTPUT_ALIGN) + outputs, RECORD_ALIGN)
    return record * -(-numerics.batch_size // numerics.micro_batch_size)


def device_layouts(model: ModelSpec, numerics: Numerics, every: Kept) -> list[tuple[int, BoundaryLayout]]:
    """Returns where each stage's outputs lie in the device's memory for outputs: an offset and a layout, for all rows of a
    batch or of a sweep. `every`: the kept operators of each stage."""
    places, end = [], 0
    for stage, kept in zip(model.stages, every, strict=True):
        layout = _device_layout(stage, numerics, kept)
        places.append((end, layout))
        end += layout.size
    return places


def _device_layout(stage: StageSpec, numerics: Numerics, kept: tuple[int, ...]) -> BoundaryLayout:
    rows, micro_batch_size = numerics.batch_size, numerics.micro_batch_size
    return boundary_layout(stage, kept, rows=rows, row_bytes=0, micro_batch_size=micro_batch_size, align=DEVICE_ALIGN)


def device_bytes(model: ModelSpec, numerics: Numerics, every: Kept) -> int:
    """Returns the bytes that these outputs take on the device."""
    sizes: dict[tuple[int, tuple[int, ...]], int] = {}  # equal blocks share their operators
    total = 0
    for stage, kept in zip(model.stages, every, strict=True):
        if not kept:
            continue
        key = (id(stage.operators), kept)
        if key not in sizes:
            sizes[key] = _device_layout(stage, numerics, kept).size
        total += sizes[key]
    return total


def device_boundaries(model: ModelSpec, numerics: Numerics, there: Iterable[int]) -> tuple[dict[int, int], int]:
    """Returns, by stage of `there`, where its boundary lies in the device's memory for boundaries, and the bytes of all of
    them. Each is for all rows of a batch or of a sweep."""
    size = align_up(model.widest_bytes_per_token * numerics.tokens, DEVICE_ALIGN)
    places = {stage: number * size for number, stage in enumerate(there)}
    return places, len(places) * size


def every_operator(model: ModelSpec, *, there: bool = False) -> Kept:
    """Returns, by stage, every operator whose output can be kept with the boundary, or `there`: on the device."""
    return of_each(model, lambda operators: tuple([operator.index for operator in operators if there or not operator.stays]))


def of_each(model: ModelSpec, chosen: Callable[[Sequence[OperatorSpec]], tuple[int, ...]]) -> Kept:
    """Returns, by stage, what is `chosen` of its operators, once for equal blocks: they share their operators."""
    by_operators: dict[int, tuple[int, ...]] = {}
    for stage in model.stages:
        if id(stage.operators) not in by_operators:
            by_operators[id(stage.operators)] = chosen(stage.operators)
    return tuple(by_operators[id(stage.operators)] for stage in model.stages)


def spared_flops(stage: StageSpec, kept: tuple[int, ...]) -> float:
    """Returns the FLOPs that one micro-batch's recompute saves: kept outputs, and outputs that backward never reads."""
    return sum([operator.flops for operator in _chosen(stage, kept)]) + stage.unneeded_flops


def kept_bytes(stage: StageSpec, kept: tuple[int, ...]) -> int:
    """Returns the bytes that one micro-batch's kept outputs take."""
    return sum([operator.bytes for operator in _chosen(stage, kept)])


def _chosen(stage: StageSpec, kept: tuple[int, ...]) -> list[OperatorSpec]:
    if not kept:
        return []
    chosen = frozenset(kept)  # a recurrent block has thousands of operators
    return [operator for operator in stage.operators if operator.index in chosen]
