"""All that the paper's steps are predicted from: its hardware, its policy, four constants, and what it published.

The paper is "Ratel: Optimizing Holistic Data Movement to Fine-tune 100B Model on a Consumer GPU" (ICDE 2025; first published
as Fuyou, arXiv 2403.06504); "its figures" are read off its figures to one or two percent, "its data" are the authors'
`evaluation_data.md`. No number that a prediction rests on is anywhere else: a test reads this file and `policy.py` for
numbers that are not listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a row is for. "again": the setting of a fitted row, measured another time. Only what is predicted counts as an error.
Role = Literal["predicted", "fitted", "again", "gives the batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One line of what is given. `names` are those in this file, whose values the line is made of."""

    names: tuple[str, ...]
    value: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One published step. `figure` is tokens per second, or TFLOPS where `tflops`."""

    model: str
    batch: int  # sequences
    drives: int
    figure: float
    where: str
    tflops: bool = False
    role: Role = "predicted"

    @property
    def seconds(self) -> float:
        """Of the step. Its TFLOPS are FLOPS_COUNTED x the model's round size x tokens per second: 143.1 are 1,376 tokens per
        second at 13B, 86.9 are 62.1 at 175B."""
        tokens = self.batch * LENGTH
        return FLOPS_COUNTED * size_of(self.model) * tokens / (self.figure * 1e12) if self.tflops else tokens / self.figure


def size_of(model: str) -> float:
    """13e9 of 13B."""
    return float(model.removesuffix("B")) * 1e9


# ---- the constants ---------------------------------------------------------------------------------------------------
# The first is one number for each count of drives, solved for by `policy.fitted_rates` on the rows marked so.
FITTED_BATCH = 32
GPU_FLOPS = 162e12
IN_FLIGHT = 8
BATCH_135B = 24


def constants() -> tuple[Listed, ...]:
    return (
        Listed(
            names=("FITTED_BATCH",),
            value="rate of n drives that read and write at once, in all",
            source=f"fitted, for each n, on the row of 13B with a batch of {FITTED_BATCH} in the table of drives",
        ),
        Listed(
            names=("GPU_FLOPS",),
            value=f"{GPU_FLOPS / 1e12:g} TFLOPS of the RTX 4090",
            source="its measured peak, as its figures show it",
        ),
        Listed(
            names=("IN_FLIGHT",),
            value=f"{IN_FLIGHT} blocks on their way: weights ahead of compute, gradients behind it",
            source="assumed: its code has 8 optimizer buffers, of 700M elements each, which is two blocks at 13B and less than "
            "half of one at 175B",
        ),
        Listed(
            names=("BATCH_135B",),
            value=f"{BATCH_135B} sequences at 135B",
            source="not published; from its one-drive row, see below",
        ),
    )


# ---- its hardware ----------------------------------------------------------------------------------------------------
PCIE = 21e9  # one way
ALL_DRIVES, ALL_DRIVES_RATE = 12, 32e9
RAM = 768e9
CORES = 2 * 26
CHANNELS, CHANNEL_RATE = 16, 8 * 3200e6
DRIVE_CAPACITY = 3.84e12


def hardware() -> tuple[Listed, ...]:
    return (
        Listed(names=("PCIE",), value=f"{PCIE / 1e9:g} GB/s between GPU and RAM, each way", source="its figure 1"),
        Listed(
            names=("ALL_DRIVES", "ALL_DRIVES_RATE"),
            value=f"{ALL_DRIVES_RATE / 1e9:g} GB/s of {ALL_DRIVES} D7-P5510, of fewer in proportion; no less than both at once",
            source="its figure 1, reads and writes added; taken for what drives do that only read or only write",
        ),
        Listed(
            names=("CHANNELS", "CHANNEL_RATE"),
            value=f"{CHANNELS * CHANNEL_RATE / 1e9:.0f} GB/s: AdamW at the rate of {CHANNELS} channels of "
            f"{CHANNEL_RATE / 1e9:g} GB/s",
            source="its table III, DDR4-3200; the paper leaves AdamW out",
        ),
        Listed(names=("RAM",), value=f"{RAM / 1e9:g} GB of RAM", source="its table III"),
        Listed(
            names=("CORES", "DRIVE_CAPACITY"),
            value=f"{CORES} cores, drives of {DRIVE_CAPACITY / 1e12:g} TB",
            source="its table III, two Xeon Gold 5320; no time",
        ),
    )


# ---- its models and policy -------------------------------------------------------------------------------------------
LENGTH = 1024
VOCABULARY = 50257
SHAPES = {"13B": (40, 40, 5120), "70B": (80, 64, 8192), "135B": (88, 88, 11264), "175B": (96, 96, 12288)}
WEIGHT_BYTES = 2  # float16, as bfloat16 here
STEP_BYTES = 30  # per parameter
FLOPS_COUNTED = 8  # per parameter and token


def state_bytes() -> int:
    """Per parameter: what of a step's bytes is no weight, one way."""
    return (STEP_BYTES - 3 * WEIGHT_BYTES) // 2


def policy() -> tuple[Listed, ...]:
    shapes = "; ".join(
        f"{name} of {layers} blocks {width:,} wide, {heads} heads" for name, (layers, heads, width) in SHAPES.items()
    )
    return (
        Listed(
            names=("LENGTH", "VOCABULARY", "SHAPES"),
            value=f"GPT-2 of its sizes, {LENGTH:,} tokens, {VOCABULARY:,} words: {shapes}",
            source="its IV, V",
        ),
        Listed(
            names=("WEIGHT_BYTES", "STEP_BYTES"),
            value=f"{STEP_BYTES} bytes per parameter and step: weights of {WEIGHT_BYTES} read twice and written, states of "
            f"{state_bytes()} read and written",
            source="its equations 4 and 5: 16 read, 14 written",
        ),
        Listed(
            names=("FLOPS_COUNTED",),
            value=f"{FLOPS_COUNTED} FLOP per parameter and token: blocks are computed again",
            source="its TFLOPS over its tokens per second, at every size",
        ),
        Listed(
            names=(),
            value="whole batch in the GPU, inputs of blocks and gradients in RAM, nothing deferred, no states kept in RAM",
            source="its table II",
        ),
    )


def listed() -> dict[str, tuple[Listed, ...]]:
    """All that part 1 is made of, by what it is."""
    return {"constant": constants(), "hardware": hardware(), "policy": policy()}


# ---- what it published -----------------------------------------------------------------------------------------------
_DRIVES = (1, 2, 3, 6, 12)
_TABLE = {32: (37.5, 64.3, 81.1, 121.7, 142.0), 48: (53.1, 89.7, 121.7, 146.3, 153.9), 64: (70.3, 111.7, 136.3, 151.5, 148.2)}
_SWEEP = {8: 411, 16: 811, 32: 1376, 64: 1498, 128: 1479}
_SWEEP_175B = {8: 37.6, 16: 62.1}
_DRIVES_135B = (25, 49, 64, 88, 93)


def published() -> tuple[Published, ...]:
    rows = [
        Published(
            model="13B", batch=batch, drives=n, figure=figure, tflops=True, where="its data, drives",
            role="fitted" if batch == FITTED_BATCH else "predicted",
        )
        for batch, figures in _TABLE.items()
        for n, figure in zip(_DRIVES, figures, strict=True)
    ]  # fmt: skip
    rows += [
        Published(
            model="13B", batch=batch, drives=ALL_DRIVES, figure=figure, where="its data, batches",
            role="again" if batch == FITTED_BATCH else "predicted",
        )
        for batch, figure in _SWEEP.items()
    ]  # fmt: skip
    rows.append(Published(model="70B", batch=32, drives=ALL_DRIVES, figure=263, where="its figures, models"))
    rows += [
        Published(
            model="135B", batch=BATCH_135B, drives=n, figure=figure, where="its figures, drives",
            role="gives the batch" if n == 1 else "predicted",
        )
        for n, figure in zip(_DRIVES, _DRIVES_135B, strict=True)
    ]  # fmt: skip
    rows.append(Published(model="135B", batch=BATCH_135B, drives=ALL_DRIVES, figure=94, where="its figures, models"))
    rows += [
        Published(model="175B", batch=batch, drives=ALL_DRIVES, figure=figure, where="its data, batches")
        for batch, figure in _SWEEP_175B.items()
    ]
    return tuple(rows)


PUBLISHED = published()
