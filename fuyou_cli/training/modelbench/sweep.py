"""Measures one shape at several batch sizes. Measures whole runs if time and disk allow, otherwise extrapolates from fewer
blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.errors import PlanError, UsageError
from ...core.units import gb, gib
from ..length import loaded as loaded_bytes
from .beside_pytorch import tokens_per_second as in_memory
from .measured import STEPS, Measured, Place, bound_of, measure, planned_of
from .synthetic import write_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...recipe.load import LoadedRecipe
    from ..prepare import Planned

SAMPLES = ((4, 8), (2, 4))  # blocks of two runs; more tell more, where time and disk allow
AGREE = 0.05  # largest difference between the samples' estimates of the whole step, as a share
Loaded = Callable[[Sequence[str]], "LoadedRecipe"]  # returns the recipe with these overrides added


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Holds the whole model's step time as estimated from a run of some of its blocks."""

    blocks: int
    measured_seconds: float  # of that run's step
    block_seconds: float
    step_seconds: float  # of the whole model's step


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Holds the figures of one batch size. `estimates` is empty if the whole model was measured."""

    batch_size: int
    micro_batch_size: int
    tokens: int  # per step
    parameters: int
    step_seconds: float
    predicted_seconds: float
    bound_seconds: float
    device_flops: float  # the device's measured rate
    busy: dict[str, float]  # resource -> share of the step; if extrapolated, of the larger sample
    homes: dict[str, str]  # tensor -> the tier where it rests
    estimates: tuple[Estimate, ...] = ()
    frozen_parameters: int = 0
    in_memory: float | None = None  # tokens per second of plain PyTorch
    in_memory_why: str = ""  # why it was not measured

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    def flops(self, per_parameter: int) -> float:
        """Returns FLOP/s, with 6 per parameter and token for forward and backward, or the paper's 8 with recompute; 2 less for
        frozen ones."""
        return self.work(per_parameter) * self.tokens_per_second

    def work(self, per_parameter: int) -> int:
        """Returns the FLOPs of a token."""
        return per_parameter * self.parameters - 2 * self.frozen_parameters

    @property
    def device_share(self) -> float:
        """Returns the share of the device's measured rate, with 6 FLOP per parameter and token."""
        return self.flops(6) / self.device_flops

    @property
    def overlap(self) -> float:
        """Returns how close the step is to the lower bound of this plan; 1 is the bound."""
        return self.bound_seconds / self.step_seconds

    @property
    def apart(self) -> float:
        """Returns how much the estimates differ, as a share of the one from more blocks."""
        steps = [estimate.step_seconds for estimate in self.estimates]
        return abs(steps[0] - steps[-1]) / steps[-1] if steps else 0.0

    @property
    def agrees(self) -> bool:
        return self.apart <= AGREE


def sweep(
    config: PreTrainedConfig, load: Loaded, place: Place, *, batch_sizes: Sequence[int], seconds: float,
    heard: Callable[[Point], None] = lambda point: None,
) -> list[Point]:  # fmt: skip
    """Measures every batch size. A whole run that would take longer than `seconds` is extrapolated. `heard` gets each
    result."""
    found = []
    for batch_size in batch_sizes:
        place.say(f"batch size {batch_size}")
        found.append(_point(config, load, place, batch_size, seconds))
        heard(found[-1])
    return found


def _point(config: PreTrainedConfig, load: Loaded, place: Place, batch_size: int, seconds: float) -> Point:
    overrides, blocks = [f"train.batch_size={batch_size}"], int(config.get_text_config().num_hidden_layers)
    model_dir = write_config(config, place.scratch, blocks=blocks)
    with place.store() as store:
        loaded = load([*overrides, store])
        whole = planned_of(loaded, model_dir, place, to_run=False)
        if not whole.fits_ram:
            needed, budget = gib(whole.plan.predicted.cpu_peak), gib(whole.plan.cpu_budget)
            raise PlanError(f"batch size {batch_size}: the run needs {needed} of RAM, but has {budget}")
        if whole.refusal:
            raise UsageError(whole.refusal)
        why = _why_not(whole, seconds) if blocks > SAMPLES[-1][-1] else ""
        if not why:
            return _as_measured(whole, measure(loaded, whole, place), place)
        if whole.model.frozen_parameters:
            raise UsageError(
                f"batch size {batch_size}: {why}, and a model with frozen parts is not extrapolated from a few blocks",
                hint="make room, raise --minutes, or leave freeze out",
            )
    alike = [f"offload.{key}={home}" for key, home in homes_of(whole).items()]
    alike.append(f"train.micro_batch_size={whole.plan.numerics.micro_batch_size}")

    def sample(count: int, store: str, *, to_run: bool) -> tuple[LoadedRecipe, Planned]:
        loaded = load([*overrides, *alike, store])
        return loaded, planned_of(loaded, write_config(config, place.scratch, blocks=count), place, to_run=to_run)

    def allowed(count: int) -> bool:
        with place.store() as store:
            return count < blocks and not _why_not(sample(count, store, to_run=False)[1], seconds)

    counts = next((pair for pair in SAMPLES[:-1] if allowed(pair[-1])), SAMPLES[-1])
    place.say(f"extrapolated from {' and '.join(map(str, counts))} of {blocks} blocks: {why}")
    samples = []
    for count in counts:
        with place.store() as store:
            samples.append(measure(*sample(count, store, to_run=True), place))
    return _as_extrapolated(whole, samples, blocks)


def _why_not(planned: Planned, limit: float) -> str:
    """Says why this run is not made; an empty text if time and disk allow it."""
    plan, hardware = planned.plan, planned.hardware
    if plan.store_size > hardware.disk_free:
        return f"the store needs {gb(plan.store_size)}, but {gb(hardware.disk_free)} are free"
    takes = STEPS * plan.predicted.step_seconds + 2 * loaded_bytes(plan) / hardware.store_write
    return f"a whole run would take about {takes / 60:.0f} min, but {limit / 60:.0f} are allowed" if takes > limit else ""


def homes_of(planned: Planned) -> dict[str, str]:
    """Returns the tier where the plan keeps most blocks' weights, states, gradients and boundaries."""
    blocks = [stage for stage in planned.plan.stages if planned.model.stages[stage.stage].kind == "block"]

    def most(tiers: Sequence[str]) -> str:
        return Counter(tiers).most_common(1)[0][0]

    return {
        "weights": most([stage.weights for stage in blocks]),
        "optimizer_states": most([stage.states for stage in blocks]),
        "gradients": most([stage.gradients for stage in blocks]),
        "boundaries": most([stage.boundary for stage in blocks]),
    }


def estimated(sample: Measured, blocks: int) -> Estimate:
    """Estimates the whole step: adds each block that the sample lacks, at the time of a block that it has."""
    return Estimate(
        blocks=sample.blocks,
        measured_seconds=sample.step_seconds,
        block_seconds=sample.block_seconds,
        step_seconds=sample.step_seconds + (blocks - sample.blocks) * sample.block_seconds,
    )


def _as_extrapolated(whole: Planned, samples: Sequence[Measured], blocks: int) -> Point:
    estimates = tuple(estimated(sample, blocks) for sample in samples)
    larger = samples[-1]
    why = "only some blocks were measured"
    return _made(whole, larger, estimates[-1].step_seconds, estimates=estimates, in_memory=None, in_memory_why=why)


def _as_measured(whole: Planned, measured: Measured, place: Place) -> Point:
    rate, why = in_memory(whole, place) if place.beside else (None, "not asked for")
    return _made(whole, measured, measured.step_seconds, estimates=(), in_memory=rate, in_memory_why=why)


def _made(
    whole: Planned, measured: Measured, step: float, *, estimates: tuple[Estimate, ...], in_memory: float | None,
    in_memory_why: str,
) -> Point:  # fmt: skip
    plan = whole.plan
    return Point(
        batch_size=plan.numerics.batch_size,
        micro_batch_size=plan.numerics.micro_batch_size,
        tokens=measured.tokens,
        parameters=whole.model.parameters,
        frozen_parameters=whole.model.frozen_parameters,
        step_seconds=step,
        predicted_seconds=plan.predicted.step_seconds,
        bound_seconds=bound_of(whole),
        device_flops=whole.hardware.matmul_flops,
        busy={name: seconds / measured.step_seconds for name, seconds in measured.busy.items()},
        homes=homes_of(whole),
        estimates=estimates,
        in_memory=in_memory,
        in_memory_why=in_memory_why,
    )
