"""Runs a few steps of a shape, through the same steps as `fuyou finetune`, and returns the figures of the settled ones."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.units import count
from ...planner.bound import lower_bound
from ...planner.costs import Costs
from ...planner.schedule import plan_schedule
from ...spec.hardware import HardwareProfile
from ..length import sampler_of
from ..loggers import Trace
from ..plan_step import plan, settle
from ..prepare import Inspected, Planned, Ready, Resolved, StoreDisks, inspect, run_directories
from ..report import StepReport, medians, settling_steps
from ..run import Run
from ..state import fingerprints
from ..state.places import forget
from .synthetic import random_entries, random_rows

if TYPE_CHECKING:
    from ...data.rows import Rows
    from ...recipe.load import LoadedRecipe

Machine = Callable[["LoadedRecipe", Inspected], tuple[HardwareProfile, StoreDisks]]
Say = Callable[[str], None]
STEPS = 5  # steps of a run; the first ones, which differ from the rest, do not count


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Describes where and how bench runs are made. `scratch`: a folder that the caller removes."""

    scratch: Path
    # The override that names the folders of one store, which are removed at the end.
    store: Callable[[], AbstractContextManager[str]]
    machine: Machine
    trace: Trace | None
    say: Say
    beside: bool = True  # also measures in-memory PyTorch if it fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Holds the figures of a run's settled steps, as medians."""

    blocks: int
    parameters: int
    step_seconds: float
    block_seconds: float  # of a step, per block: from the end of the visit before to the end of its own visit
    tokens: int  # per step
    busy: dict[str, float]  # resource -> seconds per step
    waits: dict[str, float]
    losses: tuple[float, ...]


def planned_of(loaded: LoadedRecipe, model_dir: Path, place: Place, *, to_run: bool) -> Planned:
    """Plans the recipe for the configuration in `model_dir`."""
    recipe = loaded.recipe
    directories = run_directories(recipe)
    resolved = Resolved(
        recipe=recipe, to_run=to_run, model_dir=model_dir, tokenizer_dir=model_dir, directories=directories, manifest=None,
        from_files=False,
    )  # fmt: skip
    inspected = inspect(resolved, say=place.say)
    return plan(inspected, *place.machine(loaded, inspected), say=place.say)


def bound_of(planned: Planned) -> float:
    """Returns a lower bound for a step of this plan at the machine's rates, in seconds."""
    costs = Costs.of(planned.model, planned.hardware, planned.plan)
    return lower_bound(costs, plan_schedule(planned.model, planned.plan), planned.plan)


def measure(loaded: LoadedRecipe, planned: Planned, place: Place) -> Measured:
    """Loads random weights, trains, and returns the measured figures."""
    ready = _ready(loaded, planned, place)
    reports: list[StepReport] = []
    with Run(ready, announce=place.say) as run:
        place.say(f"loading random weights, {count(planned.model.parameters)} parameters, and training {STEPS} steps")
        run.load(lambda count: None)
        if place.trace is not None:
            run.trace(place.trace)
        run.train(reports.append)
        losses = tuple(run.losses)
    forget(ready.planned.directories[0])  # its folders are removed
    gc.collect()  # the run is a cycle that still holds its tensors, and what follows is planned for what is free
    settled = reports[settling_steps(ready.planned.plan, resumed=False) :]
    blocks = {stage.name for stage in planned.model.stages if stage.kind == "block"}
    return Measured(
        blocks=len(blocks),
        parameters=planned.model.parameters,
        step_seconds=_median([report.seconds for report in settled]),
        block_seconds=_median([seconds_of(report, blocks) for report in settled]),
        tokens=settled[-1].batch_tokens,
        busy=medians([report.busy for report in settled]),
        waits=medians([report.stalls for report in settled]),
        losses=losses,
    )


def seconds_of(report: StepReport, blocks: set[str]) -> float:
    """Returns the seconds of a step per block of `blocks`, with the waits before their visits."""
    total, before = 0.0, 0.0
    for item in sorted((one for one in report.timeline if one.resource == "compute"), key=lambda one: one.end):
        if item.label.partition(" ")[2] in blocks:
            total += item.end - before
        before = item.end
    return total / len(blocks)


def _ready(loaded: LoadedRecipe, planned: Planned, place: Place) -> Ready:
    recipe, model = planned.recipe, planned.anatomy.model
    entries = random_entries(model, place.scratch, dtype=planned.model.compute_dtype, seed=recipe.seed)
    rows = rows_of(planned, place)
    made_of = fingerprints.of(
        recipe,
        planned.model_dir,
        planned.model,
        device=planned.device,
        weights_mark="random",
        data=rows.summary.digest,
        total_steps=STEPS,
    )
    ready = Ready(
        planned=planned,
        entries=entries,
        stored_as={name: name for name in entries},
        mark="random",
        rows=rows,
        sampler=sampler_of(recipe, len(rows)),
        fingerprints=made_of,
        evaluated={},
        untouched=None,  # nothing is exported
    )
    return settle(ready, *place.machine(loaded, planned))


def rows_of(planned: Planned, place: Place) -> Rows:
    """Makes random rows for every step of the run."""
    config: Any = planned.anatomy.model.config
    batch, tokens = planned.recipe.train.batch_size, planned.recipe.dataset.max_seq_len
    vocabulary = config.get_text_config().vocab_size
    return random_rows(place.scratch, rows=STEPS * batch, tokens=tokens, vocabulary=vocabulary, seed=planned.recipe.seed)


def _median(values: list[float]) -> float:
    return statistics.median(values)
