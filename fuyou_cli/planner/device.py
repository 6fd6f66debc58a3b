"""Decides which copies a device with its own memory needs: weights go up, gradients come back, boundaries go both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.units import align_up
from ..spec.model import ITEM_SIZE, ModelSpec, StageSpec
from ..spec.packed_tensors import DYNAMIC_BLOCK, FP8_BLOCK, NF4_BLOCK
from ..spec.plan import Numerics, StagePlan
from .schedule import Visit

# What compute waits for. The simulation and a run use the same names.
WEIGHTS_UP = "copies of weights to the device"
BOUNDARIES_ACROSS = "copies of boundaries"
GRADIENTS_ACROSS = "copies of gradients"

# Priority of weights and gradients. They are copied in pieces, after boundaries (priority 0). In the simulation a boundary
# starts at once; in a run it may wait 1.5 ms for the piece under way.
BULK_PRIORITY = 1

COPY_ALIGN = 64  # bytes: alignment of tensors that are copied together
_ID = 8  # bytes of a token's id, or of its target

SQUARE_LANES = 1 << 21  # at most; float64 lanes in which squares of gradients are summed

UPDATE_SCRATCH = 4  # float32 values per parameter of a chunk that a device updates
UPDATE_CHUNK = 1 << 20  # parameters per chunk at most: its 16 MiB fit in the cache of a GPU

DECODED_AT_ONCE = 1 << 22  # quantised weights that a device decodes at once, in memory of its own

WEIGHTS_ON_DEVICE = 2  # spans for streamed weights on a device; stages use them in turn


def stages_at_turn(model: ModelSpec) -> list[int]:
    """Returns the stages at the turn of a step, embeddings and the first block: last in backward and first in forward."""
    first = next(stage.index for stage in model.stages if stage.kind == "block")
    return [stage.index for stage in model.stages[: first + 1] if stage.trained]


def square_lanes(count: int) -> int:
    """Returns the number of lanes in which the squares of `count` values are summed: a power of two."""
    return min(SQUARE_LANES, 1 << max(0, count - 1).bit_length())


def decoded_at_once(model: ModelSpec) -> int:
    """Returns how many elements of quantised weights a device decodes at once: whole maxima of maxima, whole rows of int8, and
    whole squares of fp8. Returns 0 where there are none."""
    packed = [tensor for stage in model.stages if stage.quantised for tensor in stage.packed().values()]
    rows = FP8_BLOCK if model.quantisation == "fp8" else 1
    largest = max((max(rows * tensor.columns, min(DECODED_AT_ONCE, tensor.numel)) for tensor in packed), default=0)
    return align_up(largest, NF4_BLOCK * DYNAMIC_BLOCK)


def decode_scratch(at_once: int) -> int:
    """Returns the bytes in which a device decodes so many elements: their values in float32, an index for every two, and the
    same of their maxima."""
    return 6 * at_once + 8 * (at_once // NF4_BLOCK)


class DeviceSide:
    """Keeps track of which stages' weights are on the device, by generation and ticket of their copy. `stages`: of a plan."""

    def __init__(self, model: ModelSpec, stages: Sequence[StagePlan]) -> None:
        self._at_home = {stage.stage for stage in stages if stage.weights == "gpu"}
        self._never_copied = {
            stage.stage for stage in stages if stage.updated_on_device or not model.stages[stage.stage].params
        }
        self._resting: dict[int, tuple[int, int]] = {}  # of stages with a home there, those that were copied
        self._streamed: dict[int, tuple[int, int]] = {}  # of other stages, in the order of their last use

    def upload(self, owner: int, generation: int, begin: Callable[[], int]) -> int | None:
        """Makes sure that the weights of `owner` are on the device. Returns the ticket of their copy. Returns None for a stage
        without weights, and for one that is updated on the device.

        Streamed weights stay until `WEIGHTS_ON_DEVICE` other stages were used. Weights with a home on the device stay for the
        whole run.
        """
        if owner in self._never_copied:
            return None
        weights = self._resting if owner in self._at_home else self._streamed
        copy = weights.pop(owner, None)
        if copy is None or copy[0] != generation:
            copy = generation, begin()
        weights[owner] = copy
        if len(self._streamed) > WEIGHTS_ON_DEVICE:
            del self._streamed[next(iter(self._streamed))]
        return copy[1]


def crossing(
    model: ModelSpec, index: int, phase: str, *, stash: bool, on_device: bool = False, stays: bool = False
) -> tuple[int, int]:
    """Returns how many whole-batch boundaries a visit of stage `index` copies to the device and back. `on_device`: the batch is
    on the device, so only what is kept for backward is copied; `stays`: it is kept on the device, so nothing is.

    The ids of an embedding are small and not counted. Each piece of a vocabulary continues with the rows of the pieces before
    it. A cut head sums in float32, and in the compute dtype at the end. `stash`: the input is kept for backward, copied from
    the device.
    """
    stage = model.stages[index]
    if stays:
        return 0, 0
    if on_device:
        return int(phase == "backward" and stage.keeps_input), int(stash)
    if stage.expert_range is not None:  # what it was sent and the gradient come up, and sums in float32 both ways
        sums, begins, ends = (
            ITEM_SIZE["float32"] // ITEM_SIZE[model.compute_dtype],
            stage.expert_range[0] == 0,
            stage.is_last_range,
        )
        if phase == "forward":
            return 1 + sums * (not begins) + ends, (1 if ends else sums) + stash
        return 2 + sums * (not ends), sums + (ends and not begins)
    first_piece = stage.vocabulary is None or stage.vocabulary[0] == 0
    if stage.kind == "embedding":
        return (int(not first_piece), 1) if phase == "forward" else (1, 0)
    if phase == "head" and model.head_is_cut:
        sums = ITEM_SIZE["float32"] // ITEM_SIZE[model.compute_dtype]
        return 1 + sums * (index != model.stages[-1].index), 1 if first_piece else sums
    # Backward: the input and the output's gradient go up, the input's gradient comes back where a stage below needs it.
    if model.ranges(index):  # and what is sent to its experts, or the gradients of that
        sums = ITEM_SIZE["float32"] // ITEM_SIZE[model.compute_dtype]
        return (1, 2 + stash) if phase == "forward" else (2 + sums, int(stage.passes_on))
    return {"forward": (1, 1 + stash), "logits": (1, 0), "head": (1, 1), "backward": (2, int(stage.passes_on))}[phase]


def staged_bytes(model: ModelSpec, numerics: Numerics, visit: Visit, *, on_device: bool = False, sweeps: int = 1) -> int:
    """Returns the bytes that the thread that feeds a device reads and writes itself: ids, targets, and what the model's own
    operators compute between stages. They are copied to pinned memory. A run counts them as well (`engine/crossings`).

    Targets of a cut head go to the device before the first visit of a step, those of a whole head with its visit. A model with
    several tables adds up their outputs. `on_device`: the batch stays on the device, with ids, positions and targets from the
    first visit on.
    """
    stage, is_first = model.stages[visit.stage], not visit.index
    step, positions = 2 * _ID * numerics.tokens, 2 * _ID * numerics.max_seq_len
    ids = step // sweeps
    targets = step * is_first if on_device or model.head_is_cut else ids * (visit.phase == "head")
    if is_first:
        targets += 2 * looked_up_bytes(model, numerics)
    if on_device:
        return targets + (step + positions) * is_first
    if stage.kind == "embedding" and stage.index and begins_table(stage):  # a table of positions, which all rows share
        rows = 2 * model.boundary_bytes_per_token * numerics.max_seq_len
        return positions if visit.phase == "forward" else positions + rows
    if stage.kind == "embedding":
        return ids + targets
    before = model.stages[stage.index - 1]
    if visit.phase == "forward" and before.kind == "embedding" and before.index and begins_table(before):
        return 2 * model.boundary_bytes_per_token * numerics.tokens // sweeps
    return targets


def looked_up_bytes(model: ModelSpec, numerics: Numerics) -> int:
    """Returns the bytes on a device for the tables of distinct ids of a step, and of the ids in each piece of a vocabulary."""
    more = any(stage.kind == "embedding" and stage.index and begins_table(stage) for stage in model.stages)
    return _ID * (numerics.tokens * (1 if model.stages[0].vocabulary is None else 2) + numerics.max_seq_len * more)


def begins_table(stage: StageSpec) -> bool:
    return stage.vocabulary is None or stage.vocabulary[0] == 0
