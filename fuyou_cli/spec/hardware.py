"""Defines `HardwareProfile`: the machine as it was measured or described in a file, with the date; and `Network`: what connects
the ranks of a run, as it is described, or measured where ranks join.

Rates are bytes or FLOPs per second. A rate of 0 means "not measured", and its work takes no time. A size of 0 means "not
known". The rates that every plan needs are never 0 in a profile read from a file (`machine/profile`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..core.units import LARGEST_RATE, LARGEST_SIZE, parse_rate, parse_size
from .model import Dtype, ModelSpec, OperatorSpec, StageSpec

RatedKind = Literal["block", "compiled block", "head"]


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _rate(value: Any, unit: str) -> Any:
    return parse_rate(value, unit) if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, dict) else value


# Types of values in a profile's file. They may have units, as people write them.
Count = Annotated[int, Field(le=LARGEST_SIZE)]
Size = Annotated[int, Field(le=LARGEST_SIZE), BeforeValidator(_size)]
Number = Annotated[float, Field(le=LARGEST_RATE)]
Bandwidth = Annotated[float, Field(le=LARGEST_RATE), BeforeValidator(partial(_rate, unit="B/s"))]
Flops = Annotated[float, Field(le=LARGEST_RATE), BeforeValidator(partial(_rate, unit="FLOP/s"))]
# Threads, ascending -> rate of all threads together.
ThreadRates = Annotated[tuple[tuple[Count, Bandwidth], ...], BeforeValidator(_pairs)]

# Rates of the drives: at first, and once their fast regions are full.
BURST_RATES = ("store_read", "store_write", "store_read_mixed", "store_write_mixed")
SUSTAINED_RATES = ("sustained_write", "sustained_read_mixed", "sustained_write_mixed")
STORE_RATES = (*BURST_RATES, *SUSTAINED_RATES)

# What a digest leaves out: current amounts and names. The rest is rates.
_NOT_RATES = (
    "ram_total", "ram_available", "process_bytes", "device_memory", "disk_free", "pinnable", "pinnable_why", "drives", "name",
    "measured", "others_cores", "sources", "steady_bytes", "device_free",
)  # fmt: skip

ON_PROCESSOR = {"cpu"}  # devices that compute on this machine's processor; tests add one of theirs


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRate:
    """Holds the compute rates of one stage at micro-batches of `tokens` tokens, in FLOPs as `StageSpec` counts them.

    Of a recipe's own stage on a processor several shapes are timed, and `planner/costs` makes seconds of any shape from
    them. These rates say how many FLOPs were timed."""

    kind: RatedKind
    dtype: Dtype
    hidden: Count
    params: Count  # of the weights it computes with, padding included; a tied head uses its embedding's
    tokens: Count
    forward: Flops  # for `forward_flops`; for a head, its "logits" pass
    backward: Flops  # for three times `forward_flops`: recompute and backward; for a head, its one visit
    given: Flops = 0.0  # backward with every output kept that can be; 0: not measured, `backward` applies
    graph: Size = 0  # bytes that a compiled block's graph holds from forward to backward; 0: not measured
    # Seconds in which the thread that feeds a GPU submits a micro-batch (of a head a piece), however small; 0: not measured
    forward_launch: Number = 0.0
    backward_launch: Number = 0.0
    width: Count = 0  # tokens of a row; 0: not known, as of all but a recipe's own stages
    threads: Count = 0  # of torch; 0: not known
    trained: Count = 0  # of the params, as they were timed: a frozen head has no gradients
    forward_flops: Number = 0.0  # of the micro-batch that was timed (of a head: the piece); 0: not known
    backward_flops: Number = 0.0
    given_flops: Number = 0.0
    expert_rows: Number = 0.0  # of a mixture: rows of an expert, if tokens are sent to all alike; 0: no mixture
    layers: str = ""  # what the stage was timed for: digest of its model and the recipe's keys, "/", max_seq_len

    @property
    def shape(self) -> tuple[str, str, int, int, int, int, int, int]:
        """Identifies what was measured, without the rates."""
        return self.kind, self.dtype, self.hidden, self.params, self.tokens, self.width, self.threads, self.trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """Describes one drive under the store's folder."""

    model: str
    capacity: Size
    rated_bytes: Size = 0  # bytes that its maker allows to be written over its life
    used_bytes: Size = 0  # bytes written so far
    percent_used: Count = 0  # share of its endurance that it reports as used; may exceed 100; 0: not reported, or new


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """Describes one machine, one of its devices, and the drives for a store."""

    device: str  # cpu | cuda
    device_name: str
    cores: Count
    ram_total: Size  # of the machine, or of its control group if that allows less
    ram_available: Size  # what this process may use: control group limit or free memory, whichever is less
    process_bytes: Size  # anonymous and kernel memory of this process with libraries loaded, before the arena exists
    device_memory: Size  # 0 on device cpu
    disk_free: Size
    matmul_flops: Flops  # in the compute dtype, on all threads; used if no stage's rate is known
    store_read: Bandwidth
    store_write: Bandwidth
    store_read_mixed: Bandwidth  # while writing
    store_write_mixed: Bandwidth  # while reading
    adamw: ThreadRates
    h2d: Bandwidth
    d2h: Bandwidth
    measured: str  # ISO date, "assumed", or "described"
    others_cores: Number = 0.0  # cores that other processes used during the measurement
    stage_rates: tuple[StageRate, ...] = ()
    # Share of its rate that compute keeps while an update thread runs, and the reverse below; below 1 on device cpu.
    shared_compute: Number = 1.0
    shared_adamw: Number = 1.0
    host_copy: Bandwidth = 0.0  # bytes read plus written when all compute threads copy between pages in use
    host_fresh: Bandwidth = 0.0  # the same if the target's pages are new
    io_cpu: Number = 0.0  # seconds that compute on all cores loses per byte moved by the store
    h2d_mixed: Bandwidth = 0.0  # while also copying back
    d2h_mixed: Bandwidth = 0.0
    device_memory_rate: Bandwidth = 0.0  # of the device's own memory; 0: estimated from its FLOPs
    dram: Bandwidth = 0.0  # of the host's memory, read plus written, of AdamW, copies and drives together; 0: not known
    sustained_write: Bandwidth = 0.0  # once the drives' fast regions are full
    sustained_read_mixed: Bandwidth = 0.0
    sustained_write_mixed: Bandwidth = 0.0
    burst_bytes: Size = 0  # bytes written at `store_write` before it fell to `sustained_write`; 0: not known, or no fall
    steady_bytes: Size = 0  # bytes written without a fall, enough to be sure that there is none
    tile_rows: Count = 64  # multiplied together: an expert with fewer takes as long. Of a GPU an assumption until measured
    product_launch: Number = 6e-6  # seconds in which the host submits one product. An assumption until measured
    device_free: Size = 0  # part of device_memory that other processes do not use; 0: not known
    pinnable: Size = 0  # host memory that a device's driver may pin
    pinnable_why: str = ""
    drives: tuple[Drive, ...] = ()
    name: str = ""
    sources: tuple[str, ...] = ()  # source of the figures: "<keys>: <source>", or one source for all

    def source_of(self, key: str) -> str:
        """Returns the source of a rate: the first of `sources` that covers it."""
        parted = (source.partition(": ") for source in self.sources)
        return next((text or keys for keys, _, text in parted if not text or key in keys.split(", ")), "not known")

    @property
    def adamw_bytes(self) -> float:
        """Returns the bytes/s of one update thread, or 0 if not measured."""
        return next((rate for threads, rate in self.adamw if threads == 1), 0.0)

    def stage_rate(
        self, kind: RatedKind, dtype: Dtype, hidden: int, params: int, tokens: int, *, expert_rows: float = 0.0
    ) -> StageRate:
        """Returns the rates measured on the nearest shape of this kind and dtype, by ratios. Mixtures (`expert_rows`: of one
        expert) are nearer to mixtures than to dense blocks, whatever their size. A compiled block has the rates of a block if
        no compiled one was measured within twice or half its parameters. If there are none, both are `matmul_flops`, of no
        tokens."""

        def distance(rate: StageRate) -> tuple[float | tuple[str, str, int, int, int, int, int, int], ...]:
            unlike = bool(rate.expert_rows) != bool(expert_rows)
            rows = _ratio(rate.expert_rows, expert_rows)
            ratios = (_ratio(rate.params, params), rows, _ratio(rate.tokens, tokens), _ratio(rate.hidden, hidden))
            return (unlike, *ratios, rate.shape)

        alike = [rate for rate in self.stage_rates if (rate.kind, rate.dtype) == (kind, dtype)]
        if kind == "compiled block":
            alike = [rate for rate in alike if _ratio(rate.params, params) <= log(2)]
            if not alike:
                return self.stage_rate("block", dtype, hidden, params, tokens)
        fallback = StageRate(
            kind=kind, dtype=dtype, hidden=hidden, params=params, tokens=0, forward=self.matmul_flops,
            backward=self.matmul_flops,
        )  # fmt: skip
        return min(alike, key=distance, default=fallback)

    def own_rates(
        self, kind: RatedKind, dtype: Dtype, hidden: int, params: int, *, trained: int, threads: int, experts: float = 0.0
    ) -> tuple[StageRate, ...]:
        """Returns what was timed of this very stage, with as much of it `trained` and on as many threads if it was timed so;
        empty if it was not timed. Weights that are read where the model's files have them have other gaps between them, so its
        `params` may differ a little. `experts`: rows of an expert per token; the same weights may be of other mixtures."""
        alike = [rate for rate in self.stage_rates if rate.shape[:3] == (kind, dtype, hidden) and rate.forward_flops]
        own = [rate for rate in alike if _ratio(rate.params, params) <= log(_SAME_STAGE)]
        own = [rate for rate in own if rate.trained == trained] or own
        own = [rate for rate in own if abs(rate.expert_rows - experts * rate.tokens) <= 1e-6 * rate.tokens]
        nearest = min((rate.params for rate in own), key=lambda some: _ratio(some, params), default=0)
        own = [rate for rate in own if rate.params == nearest]
        return tuple([rate for rate in own if rate.threads == threads] or own)

    def lasting(self) -> HardwareProfile:
        """Returns the same machine once the drives' fast regions are full. Known sustained rates replace the first ones."""
        return replace(
            self,
            store_write=self.sustained_write or self.store_write,
            store_read_mixed=self.sustained_read_mixed or self.store_read_mixed,
            store_write_mixed=self.sustained_write_mixed or self.store_write_mixed,
        )

    def shared(self, count: int, *, on_card: int = 1) -> HardwareProfile:
        """Returns what one of `count` processes has of this machine, all of them at work: its cores, memory and drives are
        shared out, and its GPU among `on_card` of them."""
        if count == 1:
            return self
        parts = {name: getattr(self, name) // count for name in _SHARED_SIZES}
        rates = {name: getattr(self, name) / count for name in _SHARED_RATES}
        share = replace(self, **parts, **rates, cores=max(1, self.cores // count), adamw=self._shared_updates(count))
        sharing = on_card if self.device == "cuda" else count
        stages = tuple(
            replace(rate, forward=rate.forward / sharing, backward=rate.backward / sharing, given=rate.given / sharing)
            for rate in self.stage_rates
        )
        return replace(
            share, stage_rates=stages, matmul_flops=self.matmul_flops / sharing, device_memory=self.device_memory // on_card,
            device_free=self.device_free // on_card, device_memory_rate=self.device_memory_rate / on_card,
            h2d=self.h2d / on_card, d2h=self.d2h / on_card,
        )  # fmt: skip

    def _shared_updates(self, count: int) -> tuple[tuple[int, float], ...]:
        """Returns what threads of one process move while as many of each other are at work: together no more than the box."""

        def together(threads: int) -> float:
            return max(rate for few, rate in self.adamw if few <= count * threads)

        return tuple((threads, min(rate, together(threads) / count)) for threads, rate in self.adamw)

    @property
    def slows_down(self) -> bool:
        """Tells whether the drives' rates change for a run that writes enough."""
        return self.lasting() != self

    def digest(self) -> str:
        """Identifies the rates in twelve characters. Equal rates give an equal digest."""
        rates = {key: value for key, value in asdict(self).items() if key not in _NOT_RATES}
        return hashlib.sha256(json.dumps(rates, sort_keys=True).encode()).hexdigest()[:12]


_SHARED_SIZES = ("ram_available", "disk_free", "burst_bytes", "steady_bytes", "pinnable")
_SHARED_RATES = (
    "store_read", "store_write", "store_read_mixed", "store_write_mixed", "sustained_write", "sustained_read_mixed",
    "sustained_write_mixed", "host_copy", "host_fresh", "dram",
)  # fmt: skip
_SAME_STAGE = 1.02  # times the parameters of a stage, with other padding
_GRAPH_MARGIN = 1.02  # a graph that is larger than planned is not kept


def rated_kind(model: ModelSpec, stage: StageSpec) -> RatedKind:
    """Returns whose rates a stage computes at."""
    if stage.kind == "head":
        return "head"
    return "compiled block" if model.compiled else "block"


def with_measured_graphs(model: ModelSpec, hardware: HardwareProfile, tokens: int) -> ModelSpec:
    """Returns the model with the sizes of kept graphs that were measured of its own block, at micro-batches of `tokens` tokens.
    A compiler saves less for backward than operators do one by one."""
    seen = dict[int, tuple[OperatorSpec, ...]]()  # equal blocks share them: a search relies on it

    def of(stage: StageSpec) -> StageSpec:
        if not any(operator.stays for operator in stage.operators):
            return stage
        rate = hardware.stage_rate("compiled block", model.compute_dtype, model.hidden_size, stage.params, tokens)
        if not rate.graph or (rate.params, rate.hidden) != (stage.params, model.hidden_size):
            return stage
        (graph,) = stage.operators
        size = min(graph.bytes, int(_GRAPH_MARGIN * rate.graph * tokens / rate.tokens))
        return replace(stage, operators=seen.setdefault(size, (replace(graph, bytes=size),)))

    return replace(model, stages=tuple(map(of, model.stages)))


def merged_rates(kept: tuple[StageRate, ...], measured: tuple[StageRate, ...]) -> tuple[StageRate, ...]:
    """Joins both in a fixed order. If a shape was measured twice, `measured` counts. A recipe's own stages count instead of all
    that was kept of stages with as many parameters and as many trained, unless those were timed for the same layers at rows of
    another length."""

    def layers(rate: StageRate) -> str:  # without the length of rows
        return rate.layers.partition("/")[0]

    own = {(rate.shape[:4], rate.trained): layers(rate) for rate in measured if rate.layers}
    stages = {shape for shape, _ in own}

    def stays(rate: StageRate) -> bool:
        if not rate.layers:
            return rate.shape[:4] not in stages
        return own.get((rate.shape[:4], rate.trained), layers(rate)) == layers(rate)

    others = [rate for rate in kept if stays(rate)]
    by_shape = {rate.shape: rate for rate in (*others, *measured)}
    return tuple(by_shape[shape] for shape in sorted(by_shape))


def _ratio(first: float, second: float) -> float:
    return abs(log(max(first, 1) / max(second, 1)))


# ---- what connects several -------------------------------------------------------------------------------------------

# Assumptions. Of an Ethernet's bits TCP delivers 94 % with packets of 1,500 bytes, and a message takes a tenth of a millisecond
# through both hosts' kernels and a switch. Ranks on one box send through its loopback: every byte is copied four times.
PAYLOAD, LATENCY = 0.94, 1e-4
WITHIN_BOX, WITHIN_LATENCY = 3e9, 3e-5
ASSUMED_NAME, ASSUMED_LINK = "10GbE", 10e9 / 8 * PAYLOAD  # where none is described or measured
MEASURED_NAME = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Describes boxes with as many ranks each. Ranks are counted box by box."""

    boxes: int = 1
    ranks_per_box: int = 1
    link: float = ASSUMED_LINK  # bytes per second, each way, of a box
    link_name: str = ""
    latency: float = LATENCY  # seconds

    @classmethod
    def between(cls, boxes: Sequence[object]) -> Network:
        """Describes what connects ranks whose boxes these are. Where boxes have unlike numbers of ranks, or ranks are not
        counted box by box, every message is taken to cross between two."""
        count = len(boxes)
        each = boxes.count(boxes[0])
        alike = count % each == 0 and all(boxes[rank] == boxes[rank // each * each] for rank in range(count))
        if alike and boxes.count(boxes[-1]) == each:
            return cls(boxes=count // each, ranks_per_box=each)
        return cls(boxes=count)

    @property
    def assumed(self) -> Network:
        """Returns the network with the link that is assumed where this one's was measured: what results depend on may not
        depend on that."""
        is_measured = self.link_name == MEASURED_NAME
        return replace(self, link=ASSUMED_LINK, latency=LATENCY, link_name="") if is_measured else self

    @property
    def ranks(self) -> int:
        return self.boxes * self.ranks_per_box

    def box(self, rank: int) -> int:
        return rank // self.ranks_per_box

    def way(self, sender: int, receiver: int) -> tuple[float, float]:
        """Returns the rate and the latency between two ranks."""
        if self.box(sender) == self.box(receiver):
            return WITHIN_BOX, WITHIN_LATENCY
        return self.link, self.latency

    def seconds(self, sender: int, receiver: int, size: float) -> float:
        """Returns the seconds that a message takes once both are ready for it."""
        rate, latency = self.way(sender, receiver)
        return size / rate + 2 * latency
