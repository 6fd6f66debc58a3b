"""Holds what each step from a recipe to a run returns: Resolved, Inspected, Planned, Fetched, Ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.model_facts import InPlace
from ..spec.plan import Plan
from .adapting import added_values
from .known_model import KnownModel
from .length import Epoch, steps_of
from .plan_request_of import StoreDisks
from .state.resume import steps_left
from .state.stored import Change, Manifest, Untouched

if TYPE_CHECKING:
    from ..checkpoint.header import TensorEntry
    from ..data.rows import Rows
    from ..data.sampler import Sampler
    from ..data.stream import Stream
    from ..engine.anatomy import Anatomy
    from ..planner.plan_request import PlanRequest
    from ..planner.search import SearchResult
    from ..recipe.schema import Recipe
    from .fixed_prompts import FixedPrompts
    from .state.first_weights import Added


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """Holds what the recipe's names stand for on this machine."""

    recipe: Recipe
    to_run: bool  # False: only to plan, so that nothing is refused that only a run would refuse
    model_dir: Path
    tokenizer_dir: Path
    directories: tuple[Path, ...]  # one folder of this run per striped directory
    manifest: Manifest | None  # of the stopped run to resume, if any
    from_files: bool = True  # frozen weights may be read from the model's own files


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """Holds the stages of the model, without its weights."""

    resolved: Resolved
    device: str
    known: KnownModel
    in_place: InPlace | None  # where frozen weights lie in the model's files; None: no matter, or nothing is frozen
    prompts: FixedPrompts | None  # of `eval.samples`

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Holds a plan for a machine, and what it was made from."""

    inspected: Inspected
    hardware: HardwareProfile
    disks: StoreDisks | None  # None: the free disk in the profile
    model: ModelSpec
    request: PlanRequest
    plan: Plan
    found: SearchResult | None  # the result of the search; None if there was none
    epoch: Epoch | None  # None: not looked at yet

    @property
    def recipe(self) -> Recipe:
        return self.inspected.recipe

    @property
    def anatomy(self) -> Anatomy:
        """Returns the stages that a run computes. The first call builds the model, unless `inspect` has."""
        return self.inspected.known.stages(self.plan.numerics, self.inspected.in_place)

    @property
    def refusal(self) -> str | None:
        """Returns why the model cannot be trained yet. It is None for a model that can be run."""
        return self.inspected.known.facts.refusal

    @property
    def model_dir(self) -> Path:
        return self.inspected.resolved.model_dir

    @property
    def directories(self) -> tuple[Path, ...]:
        return self.inspected.resolved.directories

    @property
    def manifest(self) -> Manifest | None:
        return self.inspected.resolved.manifest

    @property
    def total_steps(self) -> int:
        """Returns the steps of the whole run. 0 means that the data decides."""
        return steps_of(self.recipe, self.epoch.rows if self.epoch is not None else None)

    @property
    def steps_left(self) -> int:
        """Returns the steps that no earlier process has done. 0 means that the data decides, or that no step is left."""
        return steps_left(self.total_steps, self.manifest)

    @property
    def fits_ram(self) -> bool:
        """Tells whether the plan fits its RAM budget. Only the smallest plan, made if nothing fits, does not."""
        return self.plan.predicted.cpu_peak <= self.plan.cpu_budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Holds where the model's weights are. For a resumed run whose checkpoint is gone, holds what its manifest says of them."""

    planned: Planned
    entries: Mapping[str, TensorEntry]
    stored_as: Mapping[str, str]  # names of the model's tensors in its checkpoint
    mark: str  # mark of the weights (`checkpoint/reader.weights_mark`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Holds all that a run needs. Once it is settled, `planned` includes the rows and the process as they are then."""

    planned: Planned
    entries: Mapping[str, TensorEntry]
    stored_as: Mapping[str, str]
    rows: Rows | Stream  # the tokenised data
    sampler: Sampler | Stream  # the order of the rows
    fingerprints: dict[str, str]
    evaluated: Mapping[str, Rows]  # sets of rows, by name, whose loss the run tells
    prompts: FixedPrompts | None  # that the run continues where it evaluates
    untouched: Untouched | None  # what the run leaves alone of the model's checkpoint, as it was when the run began
    settings: dict[str, Any] | None = None  # keys of the recipe that the run goes by (`state/recipe_changes.py`)
    changes: tuple[Change, ...] = ()  # of these, since the run was saved

    @property
    def epoch(self) -> Epoch:
        """Returns what a plan needs to know of the rows."""
        return Epoch.of(self.rows)

    @property
    def added(self) -> Added:
        """Returns what gives the values that an adapter's parameters begin with."""
        return added_values(self.planned.recipe, self.planned.anatomy.model)
