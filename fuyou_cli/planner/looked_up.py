"""Counts the bytes that a visit reads of a frozen table of tokens: the pages that hold the rows of the step's tokens.

A step reads a row once. How many rows it looks up is known only when it begins, so a plan counts a row for every token, but no
row twice. A cut table is taken to be looked up evenly: its pieces together never read more than that, but a single one may.
"""

from __future__ import annotations

from ..core.units import align_up
from ..spec.model import ITEM_SIZE, PAGE, ModelSpec, StageSpec
from .plan_request import PlanRequest

# Bytes that are read one after the other in the time of asking for one row: 22 us of the launching thread, measured, at 3 GB/s.
ROW_COST = 64 << 10


def most_read(model: ModelSpec, request: PlanRequest) -> tuple[int, ...]:
    """Returns, by stage, the bytes that a visit reads of a frozen table at most. Returns 0 for all other stages, and for tables
    that are read whole: all of a table is read beside the step before, but rows are known only when their step begins, so they
    must take less than half the time."""
    tables = [stage for stage in model.stages if stage.looked_up]
    found, rows = [0] * len(model.stages), sum(stage.tensors[0].shape[0] for stage in tables)
    if request.is_swept:  # every sweep looks up its own rows
        return tuple(found)
    tokens = min(request.numerics.tokens, rows)
    for stage in tables:
        share = -(-tokens * stage.tensors[0].shape[0] // rows)
        pages, whole = _row_pages(model, stage), sum(piece.size for piece in stage.source) or stage.weight_bytes
        found[stage.index] = share * pages if 2 * share * (pages + ROW_COST) <= whole else 0
    return tuple(found) if all(found[stage.index] for stage in tables) else (0,) * len(found)


def row_span(first: int, size: int, row: int) -> tuple[int, int]:
    """Returns begin and end of the pages that hold a row of `size` bytes, where row 0 begins at `first`."""
    begin = first + row * size
    return begin // PAGE * PAGE, align_up(begin + size, PAGE)


def _row_pages(model: ModelSpec, stage: StageSpec) -> int:
    """Returns the bytes of the pages that hold a row, wherever it is."""
    (table,), item = stage.tensors, ITEM_SIZE[model.compute_dtype]
    size = item * (table.numel // table.shape[0])
    is_whole = item * table.offset % PAGE == 0 and (size % PAGE == 0 or PAGE % size == 0)
    return align_up(size, PAGE) + (0 if is_whole else PAGE)
