"""What the thread that launches a device's compute does itself with the host's memory, by kind, in bytes read and written.

A device with memory of its own computes while this thread prepares what it is asked next, and stands still where that takes
longer. So each of these bytes is charged in a plan and counted in a run (`engine/host_work`), by the same names. It is little:
what stages hand on rests in pinned memory, and the device itself sums gradients and squares them.
"""

from __future__ import annotations

from typing import Literal

from ..spec.model import ITEM_SIZE, ModelSpec, StageSpec
from ..spec.plan import Numerics
from .schedule import Visit

HostWorkKind = Literal[
    "inputs staged",  # copied to pinned memory, from where they go up
    "inputs gathered",  # rows picked out of the whole batch
    "results placed",  # put where the whole batch is, pages that are there
    "results on new pages",  # the same where the kernel has to clear the pages first
    "added",  # to a sum in host memory
    "looked at",  # read once: squares, checksums
]

_ID = 8  # bytes of a token's id, or of what it is to predict


def host_work(model: ModelSpec, numerics: Numerics, visit: Visit) -> dict[HostWorkKind, int]:
    """Of one visit on a device with memory of its own. What pieces of a vocabulary do together counts with the first. A model
    with more than one table adds up what they give: of other operators that it may have between its stages nothing is known."""
    stage = model.stages[visit.stage]
    tokens = numerics.batch_size * numerics.max_seq_len
    boundary = model.boundary_bytes_per_token * tokens
    first_piece = _begins_table(stage)
    if stage.kind == "embedding" and stage.index and first_piece:  # of positions, which all rows share
        ids, rows = _ID * numerics.max_seq_len, model.boundary_bytes_per_token * numerics.max_seq_len
        return {"inputs staged": 2 * ids if visit.phase == "forward" else 2 * (ids + rows)}
    if stage.kind == "embedding" and first_piece:
        return _embedding(visit.phase, ids=_ID * tokens, rows=boundary, cut=stage.vocabulary is not None)
    before = model.stages[stage.index - 1]
    if visit.phase == "forward" and before.kind == "embedding" != stage.kind and before.index and _begins_table(before):
        return {"inputs staged": 2 * boundary}
    if (visit.phase == "logits" and first_piece) or (visit.phase == "head" and not model.head_is_cut):
        return {"inputs staged": 2 * _ID * tokens}  # targets
    if visit.phase == "head":
        return _cut_head(model, boundary, begins=visit.stage == model.stages[-1].index, ends=first_piece)
    return {}


def _begins_table(stage: StageSpec) -> bool:
    return stage.vocabulary is None or stage.vocabulary[0] == 0


def _embedding(phase: str, *, ids: int, rows: int, cut: bool) -> dict[HostWorkKind, int]:
    if not cut:
        return {"inputs staged": 2 * ids}
    if phase == "forward":
        return {"inputs staged": 2 * ids, "results placed": 2 * rows}
    return {"inputs staged": 2 * (ids + rows), "inputs gathered": 2 * rows}


def _cut_head(model: ModelSpec, boundary: int, *, begins: bool, ends: bool) -> dict[HostWorkKind, int]:
    """Gradients of the last hidden state, added up over the pieces in float32; at the end in the compute dtype."""
    item = ITEM_SIZE[model.compute_dtype]
    total = boundary // item * ITEM_SIZE["float32"]
    work: dict[HostWorkKind, int] = {"added": 2 * total + boundary}
    is_result = total == boundary  # in memory of the plan from the beginning
    if begins:
        work["results placed" if is_result else "results on new pages"] = total
    if ends and not is_result:
        work["results placed"] = work.get("results placed", 0) + total + boundary
    return work
