"""Defines `HardwareProfile`: the machine as measured (or as described in a file), dated.

Rates are bytes or FLOPs per second. Zero means "not measured", of sizes "not known": such work takes no time. What every plan
needs is never zero in a profile that was read (`wrong_rates`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..core.units import LARGEST_RATE, LARGEST_SIZE, parse_rate, parse_size
from .model import Dtype

RatedKind = Literal["block", "head"]


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _rate(value: Any, unit: str) -> Any:
    return parse_rate(value, unit) if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, dict) else value


# As a profile is read from a file: also with units, as people write them.
Count = Annotated[int, Field(le=LARGEST_SIZE)]
Size = Annotated[int, Field(le=LARGEST_SIZE), BeforeValidator(_size)]
Number = Annotated[float, Field(le=LARGEST_RATE)]
Bandwidth = Annotated[float, Field(le=LARGEST_RATE), BeforeValidator(partial(_rate, unit="B/s"))]
Flops = Annotated[float, Field(le=LARGEST_RATE), BeforeValidator(partial(_rate, unit="FLOP/s"))]
ThreadRates = Annotated[tuple[tuple[Count, Bandwidth], ...], BeforeValidator(_pairs)]  # threads, ascending -> of all together

# Of the drives: at first, and once their fast regions are full.
BURST_RATES = ("store_read", "store_write", "store_read_mixed", "store_write_mixed")
SUSTAINED_RATES = ("sustained_write", "sustained_read_mixed", "sustained_write_mixed")
STORE_RATES = (*BURST_RATES, *SUSTAINED_RATES)

# What a digest leaves out: how much is there now, and what things are called. The rest is rates.
_NOT_RATES = (
    "ram_total", "ram_available", "process_bytes", "device_memory", "disk_free", "pinnable", "pinnable_why", "drives", "name",
    "measured", "others_cores", "sources", "steady_bytes", "device_free",
)  # fmt: skip

# What writing costs beside time (`offload.wear: balanced`): assumptions, not anybody's figures, in one money.
DRIVE_PRICE = 85.0  # a TB of capacity
HOUR_PRICE = 0.60  # an hour of the machine and of who waits for it
USUAL_ENDURANCE = 600  # times that a drive may be written whole, where its maker's rating is not known


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRate:
    """Holds what compute gets on one stage at micro-batches of `tokens` tokens, in FLOPs as `StageSpec` counts them."""

    kind: RatedKind
    dtype: Dtype
    hidden: Count
    params: Count  # of the weights it computes with, padding included: a tied head's are its embedding's
    tokens: Count
    forward: Flops  # of `forward_flops` once; of a head: its "logits" pass
    backward: Flops  # of three times `forward_flops`: recompute of what is needed, and backward; a head's one visit
    given: Flops = 0.0  # backward where every output that can be kept was; 0: not measured, then as `backward`

    @property
    def shape(self) -> tuple[str, str, int, int, int]:
        """Names what was measured, without what was found."""
        return self.kind, self.dtype, self.hidden, self.params, self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """Describes one drive under the store's folder."""

    model: str
    capacity: Size
    rated_bytes: Size = 0  # that its maker warrants to be written over its life
    used_bytes: Size = 0  # of those, written so far
    percent_used: Count = 0  # of its endurance, as it says itself: may exceed 100; 0: it says nothing, or is new


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """Describes one machine, one device of it, and the drives a store would lie on."""

    device: str  # cpu | emulated | cuda
    device_name: str
    cores: Count
    ram_total: Size  # of the machine, or what its control group allows where that is less
    ram_available: Size  # what this process may use: cgroup limit or free memory, whichever is less
    process_bytes: Size  # anonymous + kernel memory of this process before the arena exists, libraries loaded
    device_memory: Size  # 0 on device cpu
    disk_free: Size
    matmul_flops: Flops  # in the compute dtype, all threads: where no stage's rate is known
    store_read: Bandwidth
    store_write: Bandwidth
    store_read_mixed: Bandwidth  # while writing
    store_write_mixed: Bandwidth  # while reading
    adamw: ThreadRates
    h2d: Bandwidth
    d2h: Bandwidth
    measured: str  # ISO date, "assumed", or "described"
    others_cores: Number = 0.0  # that others used while it was measured
    stage_rates: tuple[StageRate, ...] = ()
    shared_compute: Number = 1.0  # of their rates, what compute and one update thread keep while both run: less on device cpu
    shared_adamw: Number = 1.0
    host_copy: Bandwidth = 0.0  # read and written, copying on all threads of compute between pages that are there
    host_fresh: Bandwidth = 0.0  # the same where the target's pages are new
    io_cpu: Number = 0.0  # seconds that compute on all cores loses per byte that the store moves
    h2d_mixed: Bandwidth = 0.0  # while copying back
    d2h_mixed: Bandwidth = 0.0
    sustained_write: Bandwidth = 0.0  # once a drive's fast region is full
    sustained_read_mixed: Bandwidth = 0.0
    sustained_write_mixed: Bandwidth = 0.0
    burst_bytes: Size = 0  # written at `store_write` before it fell to `sustained_write`; 0: not known, or there is no fall
    steady_bytes: Size = 0  # written without any fall: so much that there is none
    device_free: Size = 0  # of device_memory, what others have not taken; 0: not known
    pinnable: Size = 0  # host memory that may be registered with a device
    pinnable_why: str = ""
    drives: tuple[Drive, ...] = ()
    name: str = ""
    sources: tuple[str, ...] = ()  # whose figures these are: "<keys>: <source>", or one source of all

    def source_of(self, key: str) -> str:
        """Says whose figure a rate is: the first of `sources` that is about it."""
        parted = (source.partition(": ") for source in self.sources)
        return next((text or keys for keys, _, text in parted if not text or key in keys.split(", ")), "nobody says")

    @property
    def adamw_bytes(self) -> float:
        """Returns bytes/s of one update thread, 0 where that is not measured."""
        return next((rate for threads, rate in self.adamw if threads == 1), 0.0)

    def stage_rate(self, kind: RatedKind, dtype: Dtype, hidden: int, params: int, tokens: int) -> StageRate:
        """Finds the rates measured on the nearest shape of its kind and dtype, by ratios, else `matmul_flops` for both."""

        def distance(rate: StageRate) -> tuple[float, float, float, tuple[str, str, int, int, int]]:
            return (_ratio(rate.params, params), _ratio(rate.tokens, tokens), _ratio(rate.hidden, hidden), rate.shape)

        alike = [rate for rate in self.stage_rates if (rate.kind, rate.dtype) == (kind, dtype)]
        fallback = StageRate(
            kind=kind, dtype=dtype, hidden=hidden, params=params, tokens=tokens, forward=self.matmul_flops,
            backward=self.matmul_flops,
        )  # fmt: skip
        return min(alike, key=distance, default=fallback)

    def lasting(self) -> HardwareProfile:
        """Returns the same machine once the drives' fast regions are full: what is known of that replaces the first rates."""
        return replace(
            self,
            store_write=self.sustained_write or self.store_write,
            store_read_mixed=self.sustained_read_mixed or self.store_read_mixed,
            store_write_mixed=self.sustained_write_mixed or self.store_write_mixed,
        )

    @property
    def seconds_per_byte(self) -> float:
        """Tells how much time a byte written to the store is worth: its share of the drives' price over that of an hour."""
        terabyte = 10**12
        lives = [drive.rated_bytes / drive.capacity for drive in self.drives if drive.rated_bytes and drive.capacity]
        endurance = sum(lives) / len(lives) if lives else USUAL_ENDURANCE
        return DRIVE_PRICE / terabyte / endurance / (HOUR_PRICE / 3600)

    @property
    def slows_down(self) -> bool:
        """Tells whether a run that writes enough finds other rates than the first ones."""
        return self.lasting() != self

    def digest(self) -> str:
        """Names the rates in twelve characters: the same wherever and whenever they are the same."""
        rates = {key: value for key, value in asdict(self).items() if key not in _NOT_RATES}
        return hashlib.sha256(json.dumps(rates, sort_keys=True).encode()).hexdigest()[:12]


_ALWAYS = (
    "cores", "ram_total", "disk_free", "matmul_flops", "store_read", "store_write", "store_read_mixed", "store_write_mixed",
)  # fmt: skip
_BESIDE_A_GPU = ("device_memory", "h2d", "d2h")


def wrong_rates(profile: HardwareProfile, *, sizes: bool = True) -> list[str]:
    """Lists what is wrong with a profile that no type says, each by its key. `sizes`: also how much of the machine there is."""
    needed = [*_ALWAYS, *(_BESIDE_A_GPU if profile.device == "cuda" else ())]
    left_out = () if sizes else _NOT_RATES
    wrong = [f"{key}: more than 0 is wanted" for key in needed if key not in left_out and not getattr(profile, key)]
    if profile.device not in ("cpu", "cuda", "emulated"):
        wrong.append(f"device: cpu, cuda or emulated is wanted, not {profile.device!r}")
    threads = [count for count, _ in profile.adamw]
    if 1 not in threads or threads != sorted(set(threads)) or not all(rate > 0 for _, rate in profile.adamw):
        wrong.append("adamw: rates of ascending numbers of threads are wanted, of 1 at least")
    for key in ("shared_compute", "shared_adamw"):
        if not 0 < getattr(profile, key) <= 1:
            wrong.append(f"{key}: a share from 0 to 1 is wanted")
    for index, rate in enumerate(profile.stage_rates):
        wrong += [
            f"stage_rates[{index}].{key}: more than 0 is wanted"
            for key in ("params", "tokens", "forward", "backward")
            if not getattr(rate, key)
        ]
    return wrong


def merged_rates(kept: tuple[StageRate, ...], found: tuple[StageRate, ...]) -> tuple[StageRate, ...]:
    """Joins both, in a fixed order; of one shape measured twice, `found`."""
    by_shape = {rate.shape: rate for rate in (*kept, *found)}
    return tuple(by_shape[shape] for shape in sorted(by_shape))


def _ratio(one: int, other: int) -> float:
    return abs(log(max(one, 1) / max(other, 1)))
