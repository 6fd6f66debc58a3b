"""Writes the choice behind a plan to a file (`fuyou plan -o plan.json`), and runs that very plan later.

The file holds what the planner chose, not the plan: a run plans again from it, which takes no search, and refuses where
anything else than the same placement comes of it. Nothing in it names a clock or a folder: equal inputs give equal bytes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import find_text, parsed
from fuyou_cli.core.typed import from_json
from fuyou_cli.planner.choice import Choice, family
from fuyou_cli.planner.commit_interval import timed_plan, with_interval
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.place import made_of
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.store_modes import redone
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.steps import Planned

MARK = "fuyou_plan"  # a plan file's first key
FORMAT = 4
LARGEST = 1 << 20  # bytes of a file

# Sections and keys that a plan depends on: the rest (rates of learning, logs, folders) may change beneath it.
_DEPENDS = (
    "seed", "model.name_or_path", "model.attn_implementation", "adapter", "freeze", "dataset.max_seq_len", "optimizer.name",
    "optimizer.state_dtype", "train.batch_size", "train.micro_batch_size", "train.head_chunk_tokens",
    "train.head_chunk_vocab", "train.threads", "train.clip_grad_norm", "train.compile", "precision", "offload",
    "checkpoint.mode", "checkpoint.commit_every_steps",
    "checkpoint.snapshot_every_steps", "checkpoint.keep_last", "export.at_end", "export.dtype",
)  # fmt: skip
_NOT_OF_A_PLAN = (
    "offload.dir", "offload.ssd_write_limit", "offload.verify_reads", "offload.measure", "offload.expandable_segments",
)  # fmt: skip
# What is asked of a plan and may be another by the time it runs; the rest must be the same.
_FREE = ("model_name", "cpu_budget", "gpu_budget", "ssd_budget", "sustained", "may_redo", "wear")
_MICRO_BATCH = "numerics.micro_batch_size"
_AGAIN = "make the plan again: fuyou plan RECIPE -o FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFile:
    """Holds all that a plan is made of again."""

    fuyou_plan: int  # the format's version
    model: str  # what it is called, and a digest of its stages and tensors
    recipe: dict[str, str]  # dotted key -> value as JSON, of the keys that a plan depends on
    asked: dict[str, str]  # the same of `PlanRequest`
    memory: int  # bytes of RAM for the plan beside the bare process
    gpu_budget: int | None
    choice: dict[str, Any]
    commit_every: int | None
    placement: str  # digest of all that the plan places


def plan_file(
    plan: Plan, model: ModelSpec, process: int, request: PlanRequest, choice: Choice, recipe: Mapping[str, str]
) -> PlanFile:
    """`process`: bytes of RAM of the bare process that it was planned for (`HardwareProfile.process_bytes`)."""
    return PlanFile(
        fuyou_plan=FORMAT,
        model=_mark(model),
        recipe=dict(recipe),
        asked=_asked(request),
        memory=request.cpu_budget - process,
        gpu_budget=request.gpu_budget,
        choice=asdict(choice),
        commit_every=plan.commit_every,
        placement=_placement(plan),
    )


def to_text(file: PlanFile) -> str:
    """Writes the mark first, by which a plan is known, and whole numbers and floats exact."""
    return json.dumps(asdict(file), indent=1, allow_nan=False) + "\n"


def from_text(text: str) -> PlanFile:
    """Raises UsageError naming the first key that is unknown, missing, twice there, of another type or negative."""
    data = parsed(text)
    if not isinstance(data, dict) or type(data.get(MARK)) is not int:
        raise UsageError(f"{MARK}: missing: this is no plan file", hint="make one: fuyou plan RECIPE -o plan.json")
    if data[MARK] != FORMAT:
        raise UsageError(f"{MARK}: format {FORMAT} is wanted, not {data[MARK]}", hint="make the plan again")
    file = from_json(PlanFile, data)
    if not re.fullmatch("[1-9][0-9]{0,8}", file.asked.get(_MICRO_BATCH, "")):
        raise UsageError(f"asked.{_MICRO_BATCH}: a whole number of at least 1 is wanted")
    return file


def recipe_keys(recipe: Recipe) -> dict[str, str]:
    """Dotted key -> value as JSON, of all that a plan depends on."""
    found = _flat(recipe.model_dump(mode="json"))
    name = recipe.model.name_or_path  # a hub's as it is, of a folder somewhere the last part alone
    portable = name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "~", ".")) else name
    return {key: value for key, value in found.items() if _depends(key)} | {"model.name_or_path": json.dumps(portable)}


def _depends(key: str) -> bool:
    return key not in _NOT_OF_A_PLAN and any(key == name or key.startswith(f"{name}.") for name in _DEPENDS)


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: json.dumps(value, sort_keys=True)}
    inner = (_flat(one, f"{prefix}.{key}" if prefix else str(key)) for key, one in value.items())
    return {key: text for found in inner for key, text in found.items()}


def _asked(request: PlanRequest) -> dict[str, str]:
    return _flat({key: value for key, value in asdict(request).items() if key not in _FREE})


def _mark(model: ModelSpec) -> str:
    stages = [
        (stage.kind, stage.params, stage.vocabulary, [(t.name, t.shape, t.offset, t.first) for t in stage.tensors])
        for stage in model.stages
    ]
    digest = _digest((model.compute_dtype, model.hidden_size, model.vocab_size, model.tied_head, stages))
    return f"{model.architecture} with {model.parameters:,} parameters ({digest})"


def _placement(plan: Plan) -> str:
    """Digests everything but what the machine decides: what a step takes, and how much memory there is."""
    apart = ("model", "cpu_budget", "memory", "predicted", "sustained")
    return _digest({key: value for key, value in asdict(plan).items() if key not in apart})


def _digest(content: object) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_target(path: Path) -> None:
    """Raises UsageError for what a plan would take the place of and that is none: a recipe, say, or a device."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a link is not followed: the plan is put where it is
            raise UsageError(f"-o {path}: it is there already and is no plain file", hint="name another file")
        with path.open("rb") as stream:
            head = stream.read(64)
    except FileNotFoundError:
        if not path.parent.is_dir():  # said before the plan is made, not after
            raise UsageError(f"-o {path}: there is no folder {path.parent}", hint="make it, or name another file") from None
        return
    except OSError as error:
        raise UsageError(f"-o {path}: {error.strerror}", hint="name a file") from None
    if head and MARK.encode() not in head:
        raise UsageError(f"-o {path}: exists and is not a plan", hint="name another file")


def write_plan(path: Path, prepared: Planned, request: PlanRequest, choice: Choice) -> None:
    """Writes the file whole or not at all. Raises UsageError where it cannot be written."""
    process, keys = prepared.hardware.process_bytes, recipe_keys(prepared.recipe)
    text = to_text(plan_file(prepared.plan, prepared.model, process, request, choice, keys))
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole.write_text(text, encoding="utf-8")
        whole.replace(path)
    except OSError as error:
        whole.unlink(missing_ok=True)
        raise UsageError(f"-o {path}: {error.strerror}", hint="name a file in a folder that can be written to") from None


def read_plan(path: Path, recipe: Recipe) -> KeptPlan:
    """Raises UsageError naming the key that is wrong, or that the recipe has changed since."""
    text = find_text(path, limit=LARGEST, hint=_AGAIN)
    if text is None:
        raise UsageError(f"cannot read the plan {path}: there is no such file", hint="make one: fuyou plan RECIPE -o FILE")
    try:
        kept = KeptPlan(path, from_text(text))
        _check_same(kept.file.recipe, recipe_keys(recipe), "in the recipe")
    except UsageError as error:
        raise _refused(path, error) from None
    return kept


def _check_same(before: Mapping[str, str], now: Mapping[str, str], where: str) -> None:
    for key in dict.fromkeys((*now, *before)):
        if before.get(key) != now.get(key):
            raise UsageError(f"{key} was {before.get(key, 'not there')}, is {now.get(key, 'not there')} {where}")


def _refused(path: Path, error: UsageError) -> UsageError:
    return UsageError(f"{path}: {error.message}", hint=error.hint or _AGAIN)


class KeptPlan:
    """Makes the plan of a file again, once it is sure that it is still one for this run."""

    def __init__(self, path: Path, file: PlanFile) -> None:
        self.path, self.file = path, file

    @property
    def micro_batch_size(self) -> int:
        return int(self.file.asked[_MICRO_BATCH])

    def __call__(self, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
        """Returns the same placement, with what it takes and promises on this machine. Raises UsageError naming what does
        not agree; whether it fits what the machine has now is for the caller to see."""
        if self.file.asked.get("store_mode") == '"redo"' and request.may_redo:
            request = redone(request)  # another plan has room in place, or had: this one is redo's
        try:
            _check_run(self.file, model, request)
            plan = _placed(self.file, model, hardware, request)
        except UsageError as error:
            raise _refused(self.path, error) from None
        return timed_plan(model, hardware, plan, chosen=False)


def _check_run(file: PlanFile, model: ModelSpec, request: PlanRequest) -> None:
    """Compares the model and what is asked of the plan with those of the run."""
    if file.model != _mark(model):
        raise UsageError(f"it was made for {file.model}, the recipe's model is {_mark(model)}")
    threads = file.asked.get("update_threads")  # first: the size of the scratch memory follows from them
    if threads != str(request.update_threads):
        raise UsageError(
            f"update_threads was {threads}, is {request.update_threads} by this machine's cores "
            "and what AdamW on them was last measured at"
        )
    _check_same(file.asked, _asked(request), "for this run")


def _placed(file: PlanFile, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
    """Places the choice in as much memory as it was made for, however large the process is now."""
    choice = next((known for known in family(model, request) if asdict(known) == file.choice), None)
    if choice is None:
        raise UsageError("choice: none that the planner has for this recipe")
    asked = replace(request, cpu_budget=file.memory + hardware.process_bytes, gpu_budget=file.gpu_budget)
    plan = made_of(model, hardware, asked, choice)
    if plan is not None and plan.commit_every != file.commit_every:  # also where the planner would now say another
        plan = with_interval(Costs.of(model, hardware, plan), plan, plan_schedule(model, plan), file.commit_every)
    if plan is None or _placement(plan) != file.placement:
        raise UsageError("placement: the planner of this fuyou makes something else of `choice`")
    return replace(plan, cpu_budget=request.cpu_budget)
