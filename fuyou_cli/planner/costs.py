"""Computes the seconds of compute per visit and per update from the rates of a machine.

Matrix products and attention run at the rate measured on a stage of the same kind. On a processor that is the model's own stage
at this shape of micro-batch, if it was timed (`stage_times` below), else the nearest (`HardwareProfile.stage_rate`). That rate
includes the sum of the stage's gradients. With kept outputs, backward runs at a rate between the one without kept outputs and
the one with all of them.

Compute also moves bytes that matrix products do not hide. Boundaries, and what norms compute from them, go to memory that is
new to the process, which the kernel clears first. Kept outputs, the embedding's gradients, and a second pass over all gradients
(for the norm and the check for NaN) use memory that the process already has.

A device with its own memory is fed by a host thread that copies some bytes itself (`staged_bytes`). A GPU computes meanwhile,
so a visit takes the longer of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, TypeVar

from ..spec.hardware import HardwareProfile, StageRate, rated_kind
from ..spec.model import ITEM_SIZE, Dtype, ExpertWork, ModelSpec, StageSpec, StateLayout
from ..spec.plan import Numerics, Plan, StagePlan, TypicalStep
from .boundary_layout import kept_bytes
from .device import begins_table, staged_bytes
from .plan_request import PlanRequest
from .schedule import Visit

Resource = Literal["compute", "update", "ssd read", "ssd write", "h2d", "d2h", "dram"]
# What a job of the simulation takes, all parts at once: bytes of transfers, seconds of one update thread, or seconds of compute
# (always a job of its own). Times are those without any other job.
JobParts = tuple[tuple[Resource, float], ...]

_Visits = tuple[Visit, ...]
_Stages = tuple[StagePlan, ...]
_Value = TypeVar("_Value")

# Bytes of a device's memory per parameter that it updates. A GPU runs one kernel, which reads and writes everything once.
# Tensor operations move 200 bytes through the cache as well, which the rest stands for.
_GPU_UPDATE_BYTES, _DEVICE_UPDATE_BYTES = 28, 80
_DEVICE_DECODE_BYTES = 24  # bytes of memory per quantised weight that a GPU decodes: indices, float32 values, products, casts
# Seconds of an update over those with float32 states, as measured on one or two threads: fewer bytes, but more operations.
_STATES_COST = {"float32": 1.0, "bfloat16": 2.0, "int8": 1.25}
FLOPS_PER_BYTE = 300  # of a GPU's memory, for an H100. Most cards have fewer, so no update is estimated too fast
_NORM_PASSES = {"forward": 6, "backward": 16}  # passes over the boundary; norms compute in float32 and have one weight


def update_bytes(layout: StateLayout, gradients: Dtype, params: int) -> int:
    """Returns bytes of memory that an update of so many parameters reads and writes: of AdamW with float32 states 26 each in
    bfloat16, 28 with float32 gradients."""
    return 2 * (ITEM_SIZE[layout.weights] * params + layout.total(params)) + ITEM_SIZE[gradients] * params


@dataclass(slots=True)
class KnownSpeeds:
    """Caches what simulations find out of jobs that run at once: equal blocks make the same jobs again and again."""

    kinds: dict[JobParts, int] = field(default_factory=dict)
    # By the kinds of all jobs, in order: the speed of each, and the share of each resource that they use together.
    speeds: dict[tuple[int, ...], tuple[tuple[float, ...], dict[Resource, float]]] = field(default_factory=dict)

    def kind(self, parts: JobParts) -> int:
        return self.kinds.setdefault(parts, len(self.kinds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """How long visits and updates of one model and batch take on one machine."""

    model: ModelSpec
    hardware: HardwareProfile
    numerics: Numerics
    device: str
    update_threads: int = 1
    batch_on_device: bool = False
    sweeps: int = 1
    typical: TypicalStep | None = None
    free_pages: bool = False
    # Of one sweep, as each visit of each plan asks for them: the share of the planned tokens that a step computes,
    # micro-batches, and bytes of one boundary for all rows.
    fill: float = field(init=False, compare=False)
    micro_batches: int = field(init=False, compare=False)
    boundary: int = field(init=False, compare=False)
    # Cache: speeds of jobs that run at once.
    speeds: KnownSpeeds = field(default_factory=KnownSpeeds, init=False, compare=False, repr=False)
    # Cache: what was computed last of visits and stages, since a plan is asked for the same more than once.
    _last: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    # Cache: boundaries that a visit copies to the device and back.
    crossings: dict[Hashable, tuple[int, int]] = field(default_factory=dict, init=False, compare=False, repr=False)
    # Caches: bytes of kept outputs, rates by stage, seconds of visits and updates.
    _kept: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict, init=False, compare=False, repr=False)
    _rates: dict[int, StageRate] = field(default_factory=dict, init=False, compare=False, repr=False)
    _times: dict[int, StageTimes | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    _known: dict[Hashable, float] = field(default_factory=dict, init=False, compare=False, repr=False)

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
            typical=run.typical,
            free_pages=run.free_pages,
            update_threads=run.io.update_threads if isinstance(run, Plan) else run.update_threads,
        )

    def __post_init__(self) -> None:
        sweep = self.numerics.of_sweep(self.sweeps)
        fill = 1.0 if self.typical is None else self.typical.computed / self.numerics.tokens
        object.__setattr__(self, "fill", fill)
        object.__setattr__(self, "micro_batches", sweep.micro_batches)
        object.__setattr__(self, "boundary", int(fill * self.model.boundary_bytes_per_token * sweep.tokens))

    def once(self, what: str, visits: _Visits, stages: _Stages, compute: Callable[[], _Value]) -> _Value:
        """Returns what `compute` makes of these visits and stages. It is kept until the same is wanted of others."""
        last = self._last.get(what)
        if last is None or last[0] is not visits or last[1] is not stages:
            last = self._last[what] = (visits, stages, compute())
        value: _Value = last[2]
        return value

    def seconds_of(self, visits: _Visits, stages: _Stages) -> tuple[float, ...]:
        """Returns the seconds of compute of each visit of a step, in order."""

        def compute() -> tuple[float, ...]:
            kept = [self.kept_bytes(plan) for plan in stages]
            return tuple([self.compute_seconds(visit, kept[visit.stage]) for visit in visits])

        return self.once("compute", visits, stages, compute)

    def kept_bytes(self, stage: StagePlan) -> int:
        """Returns the bytes that the stage's kept outputs take for one micro-batch."""
        if not stage.kept:
            return 0
        spec = self.model.stages[stage.stage]
        key = (id(spec.operators), stage.kept)  # equal blocks share their operators
        if key not in self._kept:
            self._kept[key] = kept_bytes(spec, stage.kept)
        return self._kept[key]

    def compute_seconds(self, visit: Visit, kept: int = 0) -> float:
        """Returns the seconds for a sweep's rows when nothing else runs. `kept`: bytes of outputs that a micro-batch keeps."""
        sums = (visit.sum_gradients, visit.resume, visit.is_final)
        key = (visit.phase, visit.stage, visit.owner, visit.flops, visit.stash, sums, not visit.index, kept)
        if key not in self._known:
            self._known[key] = self._visit_seconds(visit, kept)
        return self._known[key]

    def _visit_seconds(self, visit: Visit, kept: int) -> float:
        products = self._products(visit) + self._decoding(visit)
        if self.device == "cpu":
            return products + self._moving(visit, kept)
        staged = staged_bytes(self.model, self.numerics, visit, on_device=self.batch_on_device, sweeps=self.sweeps)
        feeding = staged / (self.hardware.host_copy or self._memory_rate)
        return max(products, feeding) if self.device == "cuda" else products + self._moving(visit, 0) + feeding

    def _decoding(self, visit: Visit) -> float:
        """Returns the seconds in which quantised weights are decoded before the visit computes with them."""
        owner = None if visit.owner is None else self.model.stages[visit.owner]
        if owner is None or not owner.quantised:
            return 0.0
        if self.device == "cuda":
            return _DEVICE_DECODE_BYTES * owner.quantised / self._device_rate
        written = ITEM_SIZE[self.model.compute_dtype] * owner.params
        return (owner.packed_bytes + 2 * written) / self._memory_rate  # memory that is written is read first

    @property
    def _device_rate(self) -> float:
        """Returns the bytes per second that a GPU moves through its own memory; an estimate where that was not measured."""
        return self.hardware.device_memory_rate or self.hardware.matmul_flops / FLOPS_PER_BYTE

    def _moving(self, visit: Visit, kept: int) -> float:
        """Returns the extra seconds in which compute moves bytes through host memory, on top of its matrix products."""
        hardware, copied = self.hardware, 2 * kept * self.micro_batches * visit.stash
        there = hardware.host_copy or self._memory_rate
        fresh = self._moved(visit) + self._faulted(visit)
        return fresh / (hardware.host_fresh or there) + (copied + self._gradients_moved(visit)) / there

    def _faulted(self, visit: Visit) -> float:
        """Returns the bytes of the heap that a block faults in again, because the block before it gave them back."""
        stage = self.model.stages[visit.stage]
        if self.free_pages or self.device != "cpu" or stage.kind != "block":
            return 0.0
        peak, mapped = (
            (stage.forward_peak, stage.forward_mapped)
            if visit.phase == "forward"
            else (stage.backward_peak, stage.backward_mapped)
        )
        return float(peak - mapped)  # mapped ones are new each time, and were so when the stage was timed

    def update_seconds(self, stage: StagePlan) -> float:
        """Returns the seconds that one thread takes to update the stage, with all its bytes in memory. It is 0 if the device
        updates the stage."""
        if stage.updated_on_device:
            return 0.0
        if stage.stage not in self._known:
            self._known[stage.stage] = self.processor_update_seconds(self.model.stages[stage.stage].trained)
        return self._known[stage.stage]

    def processor_update_seconds(self, params: int) -> float:
        """Returns the seconds that one thread of the processor takes to update so many parameters."""
        rate = self.hardware.adamw_bytes
        return self._update_work(self.model.layout, params) / rate if rate else 0.0

    def _update_work(self, layout: StateLayout, params: int) -> float:
        """Returns the bytes that AdamW with float32 states would move in the time of this update."""
        moved = update_bytes(replace(layout, dtype="float32"), self.numerics.accumulate_dtype, params)
        return moved * _STATES_COST[layout.dtype]

    @property
    def update_bytes_rate(self) -> float:
        """Returns the bytes of memory that an update reads and writes per second of one thread."""
        layout, some = self.model.layout, 1 << 20
        moved = update_bytes(layout, self.numerics.accumulate_dtype, some)
        return self.hardware.adamw_bytes * moved / self._update_work(layout, some)

    def device_update_seconds(self, stage: StagePlan) -> float:
        """Returns the seconds that the device takes to update a stage that rests there, 0 for any other stage."""
        if not stage.updated_on_device:
            return 0.0
        on_gpu, trained = self.device == "cuda", self.model.stages[stage.stage].trained
        return _GPU_UPDATE_BYTES * trained / self._device_rate if on_gpu else _DEVICE_UPDATE_BYTES * trained / self._memory_rate

    @property
    def updates_at_once(self) -> float:
        """Returns how much faster all update threads are than one. They share memory bandwidth, so it is less than their
        number."""
        single = self.hardware.adamw_bytes
        rates = [rate for threads, rate in self.hardware.adamw if threads <= self.update_threads]
        return max(rates) / single if single and rates else 1.0

    @property
    def _memory_rate(self) -> float:
        """Returns the bytes per second that all compute threads move through memory. Estimates the rate if it was not
        measured."""
        rates = [rate for threads, rate in self.hardware.adamw if threads <= self.numerics.torch_threads]
        return max(rates, default=self.hardware.adamw_bytes) or float("inf")

    def _products(self, visit: Visit) -> float:
        if not visit.flops:
            return 0.0
        stage = self.model.stages[visit.stage]
        rate = self.rate(stage)
        if visit.phase in ("forward", "logits"):
            return self._share(stage, visit.phase) * visit.flops / rate.forward if rate.forward else 0.0
        return self._share(stage, visit.phase) * self._backward(visit, stage, rate) if rate.backward else 0.0

    def _share(self, stage: StageSpec, phase: str) -> float:
        """Returns the time of a typical step's micro-batches over that of whole ones."""
        if self.typical is None:
            return 1.0
        key = "share", stage.kind, stage.params, phase
        if key not in self._known:
            seconds = [self.micro_batch_seconds(stage, phase, *part) for part in self.typical.parts]
            usual = self.micro_batch_seconds(stage, phase, self.numerics.micro_batch_tokens, self.numerics.max_seq_len)
            self._known[key] = sum(seconds) / (self.numerics.micro_batches * usual) if usual else self.fill
        return self._known[key]

    def rate(self, stage: StageSpec) -> StageRate:
        """Returns the stage's rates at this run's micro-batches."""
        if stage.index not in self._rates:
            self._rates[stage.index] = self._rate(stage)
        return self._rates[stage.index]

    def _rate(self, stage: StageSpec) -> StageRate:
        """Returns the stage's rates at this run's micro-batches. For each of them (in a head for each piece) a GPU adds whole
        gradients to their sums. A rate of other tokens includes more or less of that per FLOP, one of no tokens nothing. A GPU
        waits for what the host submits, which takes as long for few tokens as for many."""
        owner = self.model.stages[self.model.owner(stage.index)]
        tokens = self.numerics.micro_batch_tokens
        rate = self.hardware.stage_rate(
            kind=rated_kind(self.model, stage),
            dtype=self.model.compute_dtype,
            hidden=self.model.hidden_size,
            params=owner.params,
            tokens=tokens,
            expert_rows=0.0 if stage.expert_work is None else stage.expert_work.rows,
        )
        if self.device != "cuda":
            times, shape = self._own_times(stage), self._shape(stage)
            if times is None:
                return rate
            given = 0.0 if times.given is None else times.given.rate(*shape)
            return replace(rate, forward=times.forward.rate(*shape), backward=times.backward.rate(*shape), given=given)
        chunk = self.numerics.head_chunk_tokens if stage.kind == "head" else 0
        piece, rated = (min(some, chunk or some) for some in (tokens, rate.tokens))
        included = piece / (rated or self.numerics.tokens)  # the first sum of a step is a copy
        once = owner.trained * (ITEM_SIZE[self.model.compute_dtype] + 2 * ITEM_SIZE[self.numerics.accumulate_dtype])
        more = once / self._device_rate * (1 - included) * (tokens / piece)
        whole, spared = _backward_flops(stage)
        backward, given = _in_more_time(rate.backward, whole, more), _in_more_time(rate.given, whole - spared, more)
        graph = rate.graph * tokens // rate.tokens if rate.graph else 0
        launch = rate.backward_launch * (tokens / piece)
        if stage.expert_work is not None:
            return self._of_experts(stage, stage.expert_work, replace(rate, tokens=tokens, backward=backward, given=given))
        return replace(
            rate, tokens=tokens, graph=graph, backward=_in_at_least(backward, whole, launch),
            forward=_in_at_least(rate.forward, stage.forward_flops, rate.forward_launch * (tokens / piece)),
            given=_in_at_least(given, whole - spared, launch),
        )  # fmt: skip

    def _of_experts(self, stage: StageSpec, experts: ExpertWork, rate: StageRate) -> StageRate:
        """Returns a GPU's rates for a block that sends few rows to each of many experts. Each expert's rows are multiplied in
        whole tiles, and the host submits every product by itself: the rate of a dense block includes neither, that of a
        mixture both, with its own rows."""
        tiles, whole, spared = self._tiles(experts.rows) - self._tiles(rate.expert_rows), *_backward_flops(stage)
        launch = 0.0 if rate.forward_launch and rate.expert_rows else self.hardware.product_launch * experts.products

        def of(rate: float, flops: float, passes: float, measured: float) -> float:
            more = _in_more_time(rate, flops, passes * experts.flops * tiles / rate if rate else 0.0)
            return _in_at_least(more, flops, max(measured, passes * launch))

        unneeded, kept = (
            sum(operator.flops for operator in operators if operator.kind == "experts") / experts.flops
            for operators in (stage.unneeded, stage.operators)
        )
        passes = experts.backward_passes - unneeded
        return replace(
            rate,
            forward=of(rate.forward, stage.forward_flops, 1, rate.forward_launch),
            backward=of(rate.backward, whole, passes, rate.backward_launch),
            given=of(rate.given, whole - spared, passes - kept, rate.backward_launch),
        )

    def _tiles(self, rows: float) -> float:
        """Returns how many rows a GPU multiplies for each that an expert has, of `rows` in the mean: the last of whole tiles is
        half full, as experts do not get a multiple of it. 1 for a dense block (0 rows)."""
        tile = self.hardware.tile_rows
        return max(tile, rows + tile // 2) / rows if rows else 1.0

    def micro_batch_seconds(self, stage: StageSpec, phase: str, tokens: int, width: int, rows: int = 0) -> float:
        """Returns the seconds of products and attention of one micro-batch of so many tokens, in rows of `width` (`rows`: if
        they are not all as wide): `forward` (of a head "logits"), or any other phase with nothing kept. A list of unlike
        micro-batches takes the sum. Blocks and heads only; others have no products."""
        is_forward = phase in ("forward", "logits")
        whole = stage.forward_flops if is_forward else _backward_flops(stage)[0]
        times = self._own_times(stage)
        if times is None:  # in proportion to tokens, at the rate of the nearest stage
            rate = self.rate(stage).forward if is_forward else self.rate(stage).backward
            return whole * tokens / self.numerics.micro_batch_tokens / rate if rate else 0.0
        timed = times.forward if is_forward else times.backward
        usual, width_of, pieces = self._shape(stage)
        trained = whole / timed.flops.of(usual, width_of, pieces=pieces)  # less than all where some weights are frozen
        tokens, width, pieces = self._shape(stage, tokens, width)
        return trained * timed.seconds.of(tokens, width, rows=rows if stage.kind == "block" else 0, pieces=pieces)

    def _own_times(self, stage: StageSpec) -> StageTimes | None:
        """Returns what was timed of this very stage on this machine's processor; None if nothing was."""
        if self.device == "cuda":
            return None
        if stage.index not in self._times:
            owner, threads = self.model.stages[self.model.owner(stage.index)], self.numerics.torch_threads
            shape = (rated_kind(self.model, stage), self.model.compute_dtype, self.model.hidden_size, owner.params)
            experts = 0.0 if stage.expert_work is None else stage.expert_work.rows / self.numerics.micro_batch_tokens
            own = self.hardware.own_rates(*shape, trained=owner.trained, threads=threads, experts=experts)
            if stage.expert_work is not None and stage.expert_work.rows >= self.hardware.tile_rows:
                # Fewer rows of an expert take as long as a tile: time is no straight line down to there.
                own = tuple(rate for rate in own if rate.expert_rows >= self.hardware.tile_rows) or own
            self._times[stage.index] = stage_times(own)
        return self._times[stage.index]

    def _shape(self, stage: StageSpec, tokens: int = 0, width: int = 0) -> tuple[int, int, int]:
        """Returns a micro-batch's tokens, the width of its rows and the pieces it is computed in, of the usual micro-batch
        unless told. A head mixes no tokens: its rows are one token wide."""
        tokens, width = tokens or self.numerics.micro_batch_tokens, width or self.numerics.max_seq_len
        if stage.kind != "head":
            return tokens, width, 1
        width = tokens if self.numerics.padding == "none" else width  # end to end, all rows are one
        chunk, rows = self.numerics.head_chunk_tokens or tokens, -(-tokens // width)
        return tokens, 1, -(-rows // max(1, chunk // width)) * -(-width // chunk)

    def _backward(self, visit: Visit, stage: StageSpec, rate: StageRate) -> float:
        """Returns the seconds of backward. They lie between those without kept outputs and those with all of them, by the FLOPs
        saved. A compiled block that keeps its graph saves its whole forward."""
        whole, spared = (flops * self.micro_batches for flops in _backward_flops(stage))
        if self.model.compiled and visit.phase == "backward" and rate.forward:
            return max(0.0, whole / rate.backward - (whole - visit.flops) / rate.forward)
        if visit.phase != "backward" or not spared or not rate.given:
            return visit.flops / rate.backward
        without, given = whole / rate.backward, min(whole / rate.backward, (whole - spared) / rate.given)
        return without - (without - given) * (whole - visit.flops) / spared

    def _moved(self, visit: Visit) -> float:
        """Returns the bytes of boundaries, and of what norms compute from them."""
        stage = self.model.stages[visit.stage]
        whole = self.boundary
        first_piece = begins_table(stage)
        here = self.device == "cpu"  # on another device the copy engine moves them
        moved = float(whole * 2 * visit.stash * here)  # the copy of the input that is kept
        if stage.kind == "embedding":
            moved += (3 if visit.phase == "backward" else 2) * whole * first_piece
        elif stage.kind == "norm":
            moved += _NORM_PASSES["backward" if visit.phase == "backward" else "forward"] * whole
        elif self.micro_batches > 1 and here:
            moved += 2 * whole  # outputs of micro-batches are gathered in one tensor
        return moved

    def _gradients_moved(self, visit: Visit) -> float:
        """Returns the bytes of gradients that compute moves. For embedding and norm each micro-batch makes a gradient in the
        compute dtype and adds it to the sum. The measured rates of blocks and heads include that (`engine.alone`). Each sum is
        read once more; another device does this beside its compute."""
        if not visit.sum_gradients:
            return 0.0
        stage = self.model.stages[visit.stage]
        params = self.model.stages[self.model.owner(visit.stage)].trained
        item = ITEM_SIZE[self.numerics.accumulate_dtype]
        # An embedding has gradients for few rows of its table, so all micro-batches count as one.
        times = {"embedding": int(not visit.sweep), "norm": self.micro_batches}.get(stage.kind, 0)
        summed = params * times * (ITEM_SIZE[self.model.compute_dtype] + 2 * item)
        return float(summed + params * item * (self.device == "cpu" and visit.is_final))


def _backward_flops(stage: StageSpec) -> tuple[float, float]:
    """Returns the FLOPs of a micro-batch's backward with its recompute, and those that kept outputs would save."""
    whole = 3 * stage.forward_flops - stage.frozen_flops - stage.unneeded_flops
    return whole, sum(operator.flops for operator in stage.operators)


def _in_more_time(rate: float, flops: float, seconds: float) -> float:
    """Returns the rate of FLOPs that take so much longer (shorter: at most by half)."""
    return flops / max(flops / rate / 2, flops / rate + seconds) if rate and flops > 0 else rate


def _in_at_least(rate: float, flops: float, seconds: float) -> float:
    """Returns the rate of FLOPs that take no less time than this."""
    return min(rate, flops / seconds) if seconds and flops > 0 else rate


# ---- micro-batches of any shape, from a few that were timed ----------------------------------------------------------------
#
# The seconds of one pass over a stage are `fixed + per_token * tokens + per_pair * tokens * width + per_row * rows`: what a
# micro-batch costs however small it is (calls of small layers, the sum of the stage's gradients), its matrix products, its
# attention, and what each row costs however short it is (where rows lie end to end, attention is called for each). So a list of
# unlike micro-batches takes the sum over it (`Costs.micro_batch_seconds`).


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaped:
    """An amount (seconds, or FLOPs) as a function of a micro-batch's shape."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0  # per token and token of its row
    per_row: float = 0.0

    def of(self, tokens: int, width: int, *, rows: int = 0, pieces: int = 1) -> float:
        """Returns the amount for so many tokens in rows of `width`, computed in so many pieces (of a head: several). `rows`: if
        they are not all as wide; `width` is then what a token attends to in the mean."""
        rows = rows or -(-tokens // width)
        return pieces * self.fixed + tokens * (self.per_token + self.per_pair * width) + rows * self.per_row


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """The seconds and the FLOPs of one pass over a stage, both by the micro-batch's shape."""

    seconds: Shaped
    flops: Shaped

    def rate(self, tokens: int, width: int, pieces: int = 1) -> float:
        """Returns FLOP/s at micro-batches of this shape."""
        seconds = self.seconds.of(tokens, width, pieces=pieces)
        return self.flops.of(tokens, width, pieces=pieces) / seconds if seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """What was timed of one stage: forward (of a head: its "logits" pass), backward with its recompute (of a head: its
    visit), and backward with every output kept that can be (None: none can)."""

    forward: PassTime
    backward: PassTime
    given: PassTime | None


def stage_times(own: Sequence[StageRate]) -> StageTimes | None:
    """Returns the times of a stage that was timed in these shapes (`HardwareProfile.own_rates`). None if there are none."""
    if not own:
        return None
    given = [rate for rate in own if rate.given and rate.given_flops]
    return StageTimes(
        forward=_pass_time(own, lambda rate: (rate.forward_flops / rate.forward, rate.forward_flops)),
        backward=_pass_time(own, lambda rate: (rate.backward_flops / rate.backward, rate.backward_flops)),
        given=_pass_time(given, lambda rate: (rate.given_flops / rate.given, rate.given_flops)) if given else None,
    )


def _pass_time(rates: Iterable[StageRate], amounts: Callable[[StageRate], tuple[float, float]]) -> PassTime:
    shapes = [(rate.tokens, rate.width, *amounts(rate)) for rate in rates]
    return PassTime(
        seconds=fitted([(tokens, width, seconds) for tokens, width, seconds, _ in shapes]),
        flops=fitted([(tokens, width, flops) for tokens, width, _, flops in shapes]),
    )


def fitted(timed: Sequence[tuple[int, int, float]]) -> Shaped:
    """Fits the amounts at (tokens, width): the least sum of squared relative errors, where no part is negative. Of too
    few shapes to tell the parts apart, the amount is in proportion to tokens first, then has a fixed part."""
    columns: tuple[Callable[[int, int], float], ...] = (
        lambda tokens, _: float(tokens),
        lambda tokens, _: 1.0,
        lambda tokens, width: float(tokens * width),
        lambda tokens, width: tokens / width,
    )
    best, least = Shaped(), float("inf")
    most = min(len(columns), len({(tokens, width) for tokens, width, _ in timed}))
    for count in range(1, most + 1):
        for chosen in combinations(range(len(columns)), count):
            # Divided by the amount, so that each shape's relative error counts alike: the wanted value of each is 1.
            rows = [[columns[column](tokens, width) / amount for column in chosen] for tokens, width, amount in timed]
            parts = _least_squares(rows)
            if parts is None or 0 not in chosen:
                continue
            if min(parts) < 0:
                continue
            by_column = dict(zip(chosen, parts, strict=True))
            per_token, fixed, per_pair, per_row = (by_column.get(column, 0.0) for column in range(4))
            error = sum((sum(part * value for part, value in zip(parts, row, strict=True)) - 1) ** 2 for row in rows)
            if error < least - 1e-12:  # a part more has to explain something; of exact times even the least does
                best, least = Shaped(fixed=fixed, per_token=per_token, per_pair=per_pair, per_row=per_row), error
    return best


def _least_squares(rows: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
    """Returns the x that makes every row's product with it nearest to 1; None if there are several."""
    size = len(rows[0])
    scale = [max(abs(row[k]) for row in rows) for k in range(size)]
    scaled = [[value / unit for value, unit in zip(row, scale, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)] + [sum(row[i] for row in scaled)] for i in range(size)
    ]
    for k in range(size):  # Gauss and Jordan, with pivots
        pivot = max(range(k, size), key=lambda row: abs(matrix[row][k]))
        matrix[k], matrix[pivot] = matrix[pivot], matrix[k]
        if abs(matrix[k][k]) < 1e-12:
            return None
        matrix[k] = [value / matrix[k][k] for value in matrix[k]]
        for row in range(size):
            if row != k:
                matrix[row] = [value - matrix[row][k] * under for value, under in zip(matrix[row], matrix[k], strict=True)]
    return tuple(matrix[k][size] / scale[k] for k in range(size))
