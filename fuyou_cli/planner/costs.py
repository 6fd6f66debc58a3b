"""Gives the seconds of compute per visit, and what one update takes, from the rates of a machine.

Matrix products and attention go at the rate measured on a stage of this kind (`HardwareProfile.stage_rate`), which includes its
gradients' sum; a backward that is given outputs lies between the rates without any and with all of them. Compute also moves
bytes that no product hides: boundaries and what norms make of them to pages new to the process, which the kernel clears first;
kept outputs, the embedding's gradients, and all gradients once more (for the norm, and whether they are finite) to pages that
are there. A device with memory of its own is fed by a thread that moves some bytes itself (`staged_bytes`): a GPU computes
meanwhile, and a visit takes the longer of the two.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..spec.hardware import HardwareProfile, StageRate
from ..spec.model import ITEM_SIZE, STATE_SIZES, ModelSpec, StageSpec
from ..spec.plan import Numerics, Plan, StagePlan
from .plan_request import PlanRequest
from .schedule import Visit

_ID = 8  # bytes of a token's id, or of what it is to predict
_DEVICE_UPDATE_BYTES = 80  # per parameter, of memory: 28 of them states, the rest for 200 of the cache, which is faster
_FLOPS_PER_BYTE = 300  # of a GPU's memory: an H100's. Most cards have fewer: no update is thought faster than it is
_NORM_PASSES = {"forward": 6, "backward": 16}  # over the boundary: float32 inside, one weight


def update_bytes(numerics: Numerics) -> int:
    """Returns bytes of memory that one update reads and writes per parameter: 26 in bfloat16, 28 with float32 gradients."""
    rewritten = ITEM_SIZE[numerics.compute_dtype] + sum(STATE_SIZES[numerics.compute_dtype])
    return 2 * rewritten + ITEM_SIZE[numerics.accumulate_dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Holds what visits and updates of one model and batch take on one machine."""

    model: ModelSpec
    hardware: HardwareProfile
    numerics: Numerics
    device: str
    update_threads: int = 1
    batch_on_device: bool = False
    sweeps: int = 1
    speeds: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # of jobs beside each other
    _known: dict[Hashable, float] = field(default_factory=dict, init=False, compare=False, repr=False)  # visits and updates

    @classmethod
    def of(cls, model: ModelSpec, hardware: HardwareProfile, run: PlanRequest | Plan) -> Costs:
        """Returns the costs of visits and updates for a plan, or for all plans that one request can lead to."""
        return cls(
            model=model,
            hardware=hardware.lasting() if run.sustained else hardware,
            numerics=run.numerics,
            device=run.device,
            batch_on_device=bool(run.batch_on_device),
            sweeps=run.sweeps or 1,
            update_threads=run.io.update_threads if isinstance(run, Plan) else run.update_threads,
        )

    @property
    def micro_batches(self) -> int:
        """Counts those of a sweep."""
        return self.numerics.of_sweep(self.sweeps).micro_batches

    @property
    def boundary(self) -> int:
        """Returns bytes of one boundary of a sweep's rows."""
        return self.model.boundary_bytes_per_token * self.numerics.of_sweep(self.sweeps).tokens

    def compute_seconds(self, visit: Visit, kept: int = 0) -> float:
        """Returns seconds for a sweep's rows, nothing else running. `kept`: bytes of outputs that a micro-batch keeps."""
        sums = (visit.sum_gradients, visit.resume, visit.is_final)
        key = (visit.phase, visit.stage, visit.owner, visit.flops, visit.stash, sums, not visit.index, kept)
        if key not in self._known:
            self._known[key] = self._visit_seconds(visit, kept)
        return self._known[key]

    def _visit_seconds(self, visit: Visit, kept: int) -> float:
        products = self._products(visit)
        if self.device == "cpu":
            return products + self._moving(visit, kept)
        staged = staged_bytes(self.model, self.numerics, visit, on_device=self.batch_on_device, sweeps=self.sweeps)
        feeding = staged / (self.hardware.host_copy or self._memory_rate)
        return max(products, feeding) if self.device == "cuda" else products + self._moving(visit, 0) + feeding

    def _moving(self, visit: Visit, kept: int) -> float:
        """Returns the seconds in which compute moves bytes through host memory, in addition to its matrix products."""
        hardware, copied = self.hardware, 2 * kept * self.micro_batches * visit.stash
        there = hardware.host_copy or self._memory_rate
        return self._moved(visit) / (hardware.host_fresh or there) + (copied + self._gradients_moved(visit)) / there

    def update_seconds(self, stage: StagePlan) -> float:
        """Returns the seconds that one thread takes to update the stage, with all its bytes in memory. 0 where the device
        updates it."""
        if stage.updated_there:
            return 0.0
        if stage.stage not in self._known:
            rate, params = self.hardware.adamw_bytes, self.model.stages[stage.stage].params
            self._known[stage.stage] = update_bytes(self.numerics) * params / rate if rate else 0.0
        return self._known[stage.stage]

    def device_update_seconds(self, stage: StagePlan) -> float:
        """Returns the seconds of compute that the update of a stage takes which rests on the device; none of any other."""
        if not stage.updated_there:
            return 0.0
        there = self.hardware.matmul_flops / _FLOPS_PER_BYTE
        rate = there if self.device == "cuda" else self._memory_rate
        return _DEVICE_UPDATE_BYTES * self.model.stages[stage.stage].params / rate

    @property
    def updates_at_once(self) -> float:
        """Returns how much faster all update threads are than one. Less than their number, because they share memory
        bandwidth."""
        one = self.hardware.adamw_bytes
        rates = [rate for threads, rate in self.hardware.adamw if threads <= self.update_threads]
        return max(rates) / one if one and rates else 1.0

    @property
    def _memory_rate(self) -> float:
        """Returns the bytes per second that all compute threads move through memory. An estimate where it was not measured."""
        rates = [rate for threads, rate in self.hardware.adamw if threads <= self.numerics.torch_threads]
        return max(rates, default=self.hardware.adamw_bytes) or float("inf")

    def _products(self, visit: Visit) -> float:
        if not visit.flops:
            return 0.0
        stage = self.model.stages[visit.stage]
        owner = self.model.stages[visit.owner] if visit.owner is not None else stage
        rate = self.hardware.stage_rate(
            kind="head" if stage.kind == "head" else "block",
            dtype=self.model.compute_dtype,
            hidden=self.model.hidden_size,
            params=owner.params,
            tokens=self.numerics.micro_batch_tokens,
        )
        if visit.phase in ("forward", "logits"):
            return visit.flops / rate.forward if rate.forward else 0.0
        return self._backward(visit, stage, rate) if rate.backward else 0.0

    def _backward(self, visit: Visit, stage: StageSpec, rate: StageRate) -> float:
        """Returns the seconds of backward. They lie between those with no kept output and with all, by the FLOPs saved."""
        whole = (3 * stage.forward_flops - stage.unneeded_flops) * self.micro_batches
        spared = sum(operator.flops for operator in stage.operators) * self.micro_batches
        if visit.phase != "backward" or not spared or not rate.given:
            return visit.flops / rate.backward
        without, given = whole / rate.backward, min(whole / rate.backward, (whole - spared) / rate.given)
        return without - (without - given) * (whole - visit.flops) / spared

    def _moved(self, visit: Visit) -> float:
        """Returns the bytes of boundaries, and of what norms compute from them."""
        stage = self.model.stages[visit.stage]
        whole = self.boundary
        first_piece = _begins_table(stage)
        here = self.device == "cpu"  # elsewhere a device copies
        moved = float(whole * 2 * visit.stash * here)  # the copy that is kept
        if stage.kind == "embedding":
            moved += (3 if visit.phase == "backward" else 2) * whole * first_piece
        elif stage.kind == "norm":
            moved += _NORM_PASSES["backward" if visit.phase == "backward" else "forward"] * whole
        elif self.micro_batches > 1 and here:
            moved += 2 * whole  # outputs of micro-batches gathered
        return moved

    def _gradients_moved(self, visit: Visit) -> float:
        """Returns bytes. Of the embedding and the norm: a gradient is made in the compute dtype by every micro-batch and added
        to the one sum. A block's or a head's rate was measured with that (`engine.alone`). Each sum is looked at once:
        elsewhere by the device, beside its compute."""
        if not visit.sum_gradients:
            return 0.0
        stage = self.model.stages[visit.stage]
        params = self.model.stages[self.model.owner(visit.stage)].params
        item = ITEM_SIZE[self.numerics.accumulate_dtype]
        # An embedding's are of rows: of few of the table's, so that all micro-batches count as one.
        times = {"embedding": int(not visit.sweep), "norm": self.micro_batches}.get(stage.kind, 0)
        summed = params * times * (ITEM_SIZE[self.model.compute_dtype] + 2 * item)
        return float(summed + params * item * (self.device == "cpu" and visit.is_final))


def staged_bytes(model: ModelSpec, numerics: Numerics, visit: Visit, *, on_device: bool = False, sweeps: int = 1) -> int:
    """Returns bytes that the thread which feeds a device reads and writes itself: ids, targets and what a model's own operators
    make between stages, copied to pinned memory. A run counts them as well (`engine/crossings`).

    Targets of a cut head go to the device before the first visit of a step, those of a whole one with its visit. A model with
    more than one table adds up what they give. `on_device`: the batch is there, with ids, positions and targets from the
    first visit on.
    """
    stage, is_first = model.stages[visit.stage], not visit.index
    step, positions = 2 * _ID * numerics.tokens, 2 * _ID * numerics.max_seq_len
    ids = step // sweeps
    targets = step * is_first if on_device or model.head_is_cut else ids * (visit.phase == "head")
    targets += 2 * looked_up_bytes(model, numerics) * is_first
    if on_device:
        return targets + (step + positions) * is_first
    if stage.kind == "embedding" and stage.index and _begins_table(stage):  # of positions, which all rows share
        rows = 2 * model.boundary_bytes_per_token * numerics.max_seq_len
        return positions if visit.phase == "forward" else positions + rows
    if stage.kind == "embedding":
        return ids + targets
    before = model.stages[stage.index - 1]
    if visit.phase == "forward" and before.kind == "embedding" and before.index and _begins_table(before):
        return 2 * model.boundary_bytes_per_token * numerics.tokens // sweeps
    return targets


def looked_up_bytes(model: ModelSpec, numerics: Numerics) -> int:
    """Returns bytes that say, on a device with memory of its own, which ids of a step differ, and which are of a piece."""
    more = any(stage.kind == "embedding" and stage.index and _begins_table(stage) for stage in model.stages)
    return _ID * (numerics.tokens * (1 if model.stages[0].vocabulary is None else 2) + numerics.max_seq_len * more)


def _begins_table(stage: StageSpec) -> bool:
    return stage.vocabulary is None or stage.vocabulary[0] == 0
