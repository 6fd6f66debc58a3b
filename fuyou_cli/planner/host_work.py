"""What the thread that launches a device's compute does itself with the host's memory, by kind, in bytes read and written.

A device with memory of its own computes while this thread prepares what it is asked next, and stands still where that takes
longer. So each of these bytes is charged in a plan and counted in a run (`engine/crossings`), by the same names. It is little:
what stages hand on rests in pinned memory, and the device itself sums and squares gradients, picks the rows of a piece of a
vocabulary and puts them in their places.
"""

from __future__ import annotations

from typing import Literal

from ..spec.model import ModelSpec, StageSpec
from ..spec.plan import Numerics
from .schedule import Visit

HostWorkKind = Literal["inputs staged"]  # copied to pinned memory, from where they go up

_ID = 8  # bytes of a token's id, or of what it is to predict


def host_work(model: ModelSpec, numerics: Numerics, visit: Visit) -> dict[HostWorkKind, int]:
    """Of one visit on a device with memory of its own. Pieces of a cut head share their targets, counted with the first. A
    model with more than one table adds up what they give: of other operators that it may have between its stages nothing is
    known."""
    stage = model.stages[visit.stage]
    tokens = numerics.tokens
    boundary = model.boundary_bytes_per_token * tokens
    first_piece = _begins_table(stage)
    if stage.kind == "embedding" and stage.index and first_piece:  # of positions, which all rows share
        ids, rows = _ID * numerics.max_seq_len, model.boundary_bytes_per_token * numerics.max_seq_len
        return {"inputs staged": 2 * ids if visit.phase == "forward" else 2 * (ids + rows)}
    if stage.kind == "embedding":
        return {"inputs staged": 2 * _ID * tokens}
    before = model.stages[stage.index - 1]
    if visit.phase == "forward" and before.kind == "embedding" and before.index and _begins_table(before):
        return {"inputs staged": 2 * boundary}
    if (visit.phase == "logits" and first_piece) or (visit.phase == "head" and not model.head_is_cut):
        return {"inputs staged": 2 * _ID * tokens}  # targets
    return {}


def _begins_table(stage: StageSpec) -> bool:
    return stage.vocabulary is None or stage.vocabulary[0] == 0
