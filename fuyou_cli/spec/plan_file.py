"""A plan as a file: made on one day, looked at, and run as it is on another.

Beside the plan it holds what it was made for, so that a run can tell that it is still the same: the model, the rates that its
seconds come from, and the keys of the recipe that it depends on. Nothing in it names a clock or a folder: the same inputs
give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..core.errors import UsageError
from ..core.json_files import parsed
from ..core.typed import from_json
from .hardware import HardwareProfile, wrong_rates
from .model import ModelSpec
from .plan import Plan

MARK = "fuyou_plan"  # a plan file's first key
FORMAT = 3
LARGEST = 64 << 20  # bytes of a file: 500 stages take one

# How much of a machine there is, and what it is called: not what a plan's seconds come from.
_LEFT_OUT: dict[str, Any] = {
    "ram_total": 0, "ram_available": 0, "disk_free": 0, "device_memory": 0, "pinnable": 0, "pinnable_why": "", "drives": (),
    "name": "", "measured": "", "others_cores": 0.0, "sources": (), "steady_bytes": 0, "device_free": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMark:
    """Which model: what it is called, and a digest of its stages and tensors."""

    architecture: str
    parameters: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeMark:
    """The keys that a plan depends on, each value as JSON, and their digest."""

    keys: dict[str, str]
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """What the planner chose that a plan's homes do not show, or only the lookahead of it."""

    lookahead: int
    gradient_slots: int
    defer: float  # share of the parameters whose updates wait for the next forward


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFile:
    fuyou_plan: int  # the format's version
    model: ModelMark
    recipe: RecipeMark
    hardware: HardwareProfile  # rates alone
    hardware_digest: str
    pipeline: Pipeline
    plan: Plan


def plan_file(
    plan: Plan, model: ModelSpec, hardware: HardwareProfile, *, keys: Mapping[str, str], pipeline: Pipeline
) -> PlanFile:
    """Everything about this plan that its file says."""
    rates = replace(hardware, **_LEFT_OUT)
    return PlanFile(
        fuyou_plan=FORMAT,
        model=model_mark(model),
        recipe=recipe_mark(keys),
        hardware=rates,
        hardware_digest=rates.digest(),
        pipeline=pipeline,
        plan=replace(plan, model=portable_name(plan.model)),
    )


def model_mark(model: ModelSpec) -> ModelMark:
    """What is left out are costs: they are traced, and looked at where the plan is built again."""
    stages = [
        (stage.kind, stage.params, stage.vocabulary, [(t.name, t.shape, t.offset, t.first) for t in stage.tensors])
        for stage in model.stages
    ]
    content = (model.architecture, model.compute_dtype, model.hidden_size, model.vocab_size, model.tied_head, stages)
    return ModelMark(architecture=model.architecture, parameters=model.parameters, digest=_digest(content))


def recipe_mark(keys: Mapping[str, str]) -> RecipeMark:
    return RecipeMark(keys=dict(sorted(keys.items())), digest=_digest(dict(keys)))


def portable_name(name: str) -> str:
    """A hub's name as it is, of a folder somewhere the last part alone."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "~", ".")) else name


def to_text(file: PlanFile) -> str:
    """As it is written: keys in order, whole numbers and floats exact."""
    data = asdict(file)
    for key in _LEFT_OUT:
        del data["hardware"][key]
    return json.dumps(data, sort_keys=True, indent=1, allow_nan=False) + "\n"


def from_text(text: str) -> PlanFile:
    """Raises UsageError naming the first key that is unknown, missing, twice there, of another type, negative or no number."""
    data = parsed(text)
    if not isinstance(data, dict) or type(data.get("fuyou_plan")) is not int:
        raise UsageError("fuyou_plan: missing: this is no plan file", hint="make one: fuyou plan RECIPE -o plan.json")
    if data["fuyou_plan"] != FORMAT:
        raise UsageError(f"fuyou_plan: format {FORMAT} is wanted, not {data['fuyou_plan']}", hint="make the plan again")
    rates = data.get("hardware")
    if isinstance(rates, dict):
        if unknown := next((key for key in rates if key in _LEFT_OUT), None):
            raise UsageError(f"hardware.{unknown}: unknown key")
        data["hardware"] = {**rates, **{key: list(value) if value == () else value for key, value in _LEFT_OUT.items()}}
    file = from_json(PlanFile, data)
    _check_digests(file)
    return file


def _check_digests(file: PlanFile) -> None:
    if file.hardware.digest() != file.hardware_digest:
        raise UsageError("hardware_digest: is not that of `hardware`")
    if wrong := wrong_rates(file.hardware, sizes=False):
        raise UsageError(f"hardware.{wrong[0]}")
    if recipe_mark(file.recipe.keys) != file.recipe:
        raise UsageError("recipe.digest: is not that of `recipe.keys`")


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
