"""Collects everything that `fuyou plan` says about a run, once, for text and for JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.advice.planning import Outcome
from fuyou_cli.advice.room import Room, plan_problems
from fuyou_cli.advice.wear import Spared, Wear, Writes, spared_of, wear_of, writes_of
from fuyou_cli.core.disk import existing
from fuyou_cli.core.units import format_time
from fuyou_cli.machine.origins import RatedBy, origins_of
from fuyou_cli.planner.commit_interval import sooner
from fuyou_cli.planner.evaluation_cost import EvaluationCost, SamplingCost, evaluation_cost, evaluations_left, sampling_cost
from fuyou_cli.planner.run_planner import FastRegion, fast_region
from fuyou_cli.recipe.fields import format_size
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import SamplesSection
    from fuyou_cli.training.prepare import Planned

USUAL = 1000  # steps for which writes are shown if the run's length is not known
_CLOSE = 0.9  # share of the busiest resource's seconds; one this busy also decides
_CHARACTERS = 4  # of a token, about
_RATED = {  # resource -> how the names of the rates behind it begin (`machine/origins`)
    "compute": ("compute",), "cpu": ("compute", "AdamW"), "update": ("AdamW",), "ssd read": ("store",), "ssd write": ("store",),
    "h2d": ("to GPU",), "d2h": ("to GPU",), "dram": ("DRAM",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Holds a limit of the recipe that stops the run after `step`: its key and value, and how the run continues."""

    limit: str
    step: int
    again: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Holds a plan, the recipe and machine it was made for, and what else was found out about it."""

    plan: Plan
    model: ModelSpec
    hardware: HardwareProfile
    room: Room
    steps: int | None = None  # of the whole run; None if the data decides
    done: int | None = None  # steps of the saved run that is resumed; None for a new run
    io_uring: bool = True  # whether this build has io_uring
    folder: Path = Path()  # folder whose drive would hold the store
    command: str = ""  # command that runs the plan; empty if it cannot be run, or already runs
    refusal: str | None = None  # why the model cannot be trained yet
    changes: tuple[Outcome, ...] | None = None  # changes of the recipe that help; None if none were looked for
    tried: int = 0  # plans made to find them
    faster: tuple[Outcome, ...] | None = None  # changes for a run that waits for its drives, best first; None: not looked for
    faster_command: str = ""  # command that plans the first of them
    sooner: Plan | None = None  # the same plan, committed so often that a crash loses little, if now it loses much
    advice: str = ""  # what to do if no changes were looked for
    region: FastRegion | None = None  # of the drives; None if they are not known to slow down
    endings: tuple[Ending, ...] = ()  # limits that stop the run before its last step
    spared: Spared | None = None  # what `offload.wear` avoids
    notes: tuple[str, ...] = ()  # notes from planning
    kernels: str = ""  # kernels of the blocks
    may_compile: bool = False  # blocks are not compiled, but may be, and that is known to be faster
    evaluation: EvaluationCost | None = None  # None if the recipe evaluates nothing, or nothing was simulated
    sampling: SamplingCost | None = None  # the same for fixed prompts
    best_bytes: int = 0  # of the best weights, written anew at each lower loss; 0 if they are not kept

    @property
    def problems(self) -> list[str]:
        return plan_problems(self.plan, self.room)

    @property
    def left(self) -> int | None:
        """Returns the steps still to do, or None if the data decides."""
        return None if self.steps is None else max(0, self.steps - (self.done or 0))

    @property
    def tokens(self) -> int:
        """Returns the tokens of a step, as its rows have them, or as whole rows if their lengths are not known."""
        return self.plan.step_tokens

    @property
    def run_seconds(self) -> float | None:
        """Returns the seconds of all steps still to do. Drives that slow down are fast for the first ones."""
        if self.left is None:
            return None
        if self.plan.sustained and self.region is not None:
            return self.region.seconds(self.left)
        return self.left * self.plan.predicted.step_seconds

    @property
    def writes(self) -> Writes | None:
        """Returns the bytes written from now to the end of the run, or None if its length is not known."""
        return None if self.left is None else self.shown_writes

    @property
    def shown_writes(self) -> Writes:
        """Returns the same, or those of USUAL steps if the length is not known."""
        steps = USUAL if self.left is None else self.left
        return writes_of(self.plan, self.room, steps=steps, resumed=self.done is not None)

    @property
    def wear(self) -> Wear | None:
        return wear_of(self.hardware, self.writes)

    @property
    def deciding_assumptions(self) -> tuple[RatedBy, ...]:
        """Returns the assumed rates of a described machine's busiest resource and of those nearly as busy."""
        if self.hardware.measured != "described":
            return ()
        seconds = self.plan.predicted.seconds
        most = max(seconds.values(), default=0.0)
        names = tuple(word for name, taken in seconds.items() if taken >= _CLOSE * most for word in _RATED.get(name, ()))
        other = "store, both" if self.plan.sustained else "store, sustained"
        rates = (rate for rate in origins_of(self.hardware) if rate.origin == "assumption" and rate.what.startswith(names))
        return tuple(rate for rate in rates if not rate.what.startswith(other))


def facts_of(prepared: Planned, room: Room, *, described: bool = False, command: str = "") -> RunFacts:
    """Collects the facts beside the plan. `described`: for another machine, on which nothing can be run."""
    from fuyou_cli.swap.kernels import has_io_uring

    region = fast_region(prepared.model, prepared.hardware, prepared.plan)
    return RunFacts(
        plan=prepared.plan,
        model=prepared.model,
        hardware=prepared.hardware,
        room=room,
        steps=prepared.total_steps or None,
        done=None if prepared.manifest is None else prepared.manifest.step,
        io_uring=described or has_io_uring(),
        folder=Path() if described else existing(prepared.directories[0].parent),
        command="" if described else command,
        refusal=prepared.refusal,
        region=region,
        endings=endings(prepared, region),
        spared=_spared(prepared),
        kernels=_kernels(prepared),
        may_compile=_may_compile(prepared),
        sooner=sooner(prepared.model, prepared.hardware, prepared.plan) if prepared.fits_ram else None,
    )


def with_evaluation(facts: RunFacts, prepared: Planned, rows: Sequence[int] | None) -> RunFacts:
    """Adds what evaluations take. `rows`: of each set; None: not known."""
    dataset, asked, total = prepared.recipe.dataset, prepared.recipe.eval, prepared.total_steps
    if facts.refusal is not None or not prepared.fits_ram:
        return facts
    if asked.samples is not None:
        facts = replace(facts, sampling=_sampling(prepared, asked.samples))
    if not (dataset.eval or dataset.eval_fraction):
        return facts
    times = evaluations_left(asked.every_steps, at_start=asked.at_start, total=total, done=facts.done) if total else None
    cost = evaluation_cost(facts.model, facts.hardware, facts.plan, rows=rows, times=times, run_seconds=facts.run_seconds)
    return replace(facts, evaluation=cost, best_bytes=facts.plan.predicted.export_bytes * asked.keep_best)


def _sampling(prepared: Planned, asked: SamplesSection) -> SamplingCost:
    from fuyou_cli.training.fixed_prompts import rows_at_once

    longest, model, plan = max(map(len, asked.prompts)) // _CHARACTERS, prepared.model, prepared.plan
    return sampling_cost(
        model,
        prepared.hardware,
        plan,
        prompts=len(asked.prompts),
        at_once=rows_at_once(model, most=plan.group.batch_size, vocabulary=prepared.inspected.known.facts.head_rows),
        tokens=longest + asked.max_new_tokens // 2,
        new=asked.max_new_tokens,
    )


def _kernels(prepared: Planned) -> str:
    """Says what computes the blocks. For sdpa, includes the kernels that torch chooses from."""
    train, model, plan = prepared.recipe.train, prepared.recipe.model, prepared.plan
    attention = prepared.inspected.known.facts.attention
    if attention == "sdpa":
        allowed = allowed_kernels(plan.device, plan.numerics.compute_dtype, deterministic=train.deterministic)
        attention += f" ({' or '.join(allowed)})"
    others = {"Liger": model.kernels == "liger", "blocks compiled": train.compile, "deterministic": train.deterministic}
    return ", ".join([f"attention by {attention}", *(name for name, chosen in others.items() if chosen)])


def _may_compile(prepared: Planned) -> bool:
    """Tells whether to try compiled blocks: where it was measured, on a GPU and with all weights trained. A saved run keeps to
    what it began with."""
    recipe = prepared.recipe
    asked = recipe.train.compile or recipe.model.kernels != "torch" or recipe.offload.activations == "swap"
    possible = prepared.plan.device == "cuda" and recipe.dataset.packing != "isolated" and prepared.manifest is None
    return possible and not asked and not prepared.model.frozen_parameters


def allowed_kernels(device: str, dtype: str, *, deterministic: bool = False) -> tuple[str, ...]:
    """Returns the kernels that torch's scaled_dot_product_attention may choose from, for compute of `dtype` on a device of this
    name."""
    if device != "cuda":
        return "flash", "math"
    torch = sys.modules.get("torch")  # where it is not loaded, nobody has changed its settings, which allow all

    def is_on(name: str) -> bool:
        return torch is None or bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")())

    allowed = {
        "flash": is_on("flash") and dtype != "float32",
        "cudnn": is_on("cudnn") and dtype != "float32" and not deterministic,
        "efficient": is_on("mem_efficient"),
        "math": is_on("math"),
    }
    return tuple(name for name, is_allowed in allowed.items() if is_allowed)


def _spared(prepared: Planned) -> Spared | None:
    if prepared.found is None or not prepared.fits_ram:
        return None
    return spared_of(prepared.found, prepared.plan, prepared.model, prepared.hardware, prepared.request)


def endings(prepared: Planned, region: FastRegion | None) -> tuple[Ending, ...]:
    """Returns the limits that stop this process before the run's last step, as planned. Loading does not count."""
    steps = prepared.total_steps
    return tuple(ending for ending in _limits(prepared, region) if not steps or ending.step < steps)


def _limits(prepared: Planned, region: FastRegion | None) -> Iterator[Ending]:
    from fuyou_cli.training.length import loaded, steps_within_writes

    plan, recipe, saved = prepared.plan, prepared.recipe, prepared.manifest
    done = saved.step if saved is not None else 0
    seconds, most = recipe.train.max_time, recipe.offload.ssd_write_limit
    if seconds is not None and plan.predicted.step_seconds > 0:
        step = done + steps_within(seconds, plan, region)
        yield Ending(limit=f"train.max_time={format_time(seconds)}", step=step, again="run the same command again to continue")
    if most is not None and plan.predicted.written_per_step:
        step = done + steps_within_writes(plan, most - (saved.written_total if saved is not None else loaded(plan)), done=done)
        yield Ending(limit=f"offload.ssd_write_limit={format_size(most)}", step=step, again="raise it to continue")


def steps_within(seconds: float, plan: Plan, region: FastRegion | None) -> int:
    """Returns the whole steps that a run completes in this time. Drives that slow down are fast for the first ones."""
    if region is None or not plan.sustained:
        return int(seconds / plan.predicted.step_seconds)
    fast = region.steps * region.first
    return int(seconds / region.first if seconds <= fast else region.steps + (seconds - fast) / region.later)
