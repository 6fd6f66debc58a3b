"""Writes the candidate behind a plan to a file (`fuyou plan -o plan.json`), so that a run can use this plan later.

The file holds what the planner chose, not the plan. A run plans again from it, without a search, and refuses to run if the
placement differs. The file names no time and no folder, so equal inputs give equal bytes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import find_text, parsed
from fuyou_cli.core.typed import from_json
from fuyou_cli.planner.candidate import Candidate, known_candidate
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
    from fuyou_cli.training.prepared import Planned

MARK = "fuyou_plan"  # a plan file's first key
FORMAT = 6
LARGEST = 1 << 20  # bytes of a file

# Keys of the request that may change before the run. The rest must stay the same.
_FREE = (
    "model_name", "cpu_budget", "gpu_budget", "ssd_budget", "exports_trained", "sustained", "may_redo", "wear", "typical",
    "code_bytes", "free_pages",
)  # fmt: skip
_MICRO_BATCH = "numerics.micro_batch_size"
_AGAIN = "make the plan again: fuyou plan RECIPE -o FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFile:
    """Holds everything needed to build the plan again."""

    fuyou_plan: int  # the format's version
    model: str  # the model's name, and a digest of its stages and tensors
    asked: dict[str, str]  # dotted key -> value as JSON, of `PlanRequest`
    memory: int  # bytes of RAM for the plan beside the bare process
    gpu_budget: int | None
    choice: dict[str, Any]  # the candidate
    commit_every: int | None
    placement: str  # digest of all that the plan places


def plan_file(plan: Plan, model: ModelSpec, process: int, request: PlanRequest, candidate: Candidate) -> PlanFile:
    """Makes the file's content. `process`: bytes of RAM of the bare process (`HardwareProfile.process_bytes`)."""
    return PlanFile(
        fuyou_plan=FORMAT,
        model=_mark(model),
        asked=_asked(model, request),
        memory=request.cpu_budget - process,
        gpu_budget=request.gpu_budget,
        choice=asdict(candidate),
        commit_every=plan.commit_every,
        placement=_placement(plan),
    )


def to_text(file: PlanFile) -> str:
    """Formats the file's content: the mark first, and all numbers exact."""
    return json.dumps(asdict(file), indent=1, allow_nan=False) + "\n"


def from_text(text: str) -> PlanFile:
    """Reads the file's content. Raises UsageError that names the first key that is unknown, missing, duplicate, negative or of
    another type."""
    data = parsed(text)
    if not isinstance(data, dict) or type(data.get(MARK)) is not int:
        raise UsageError(f"{MARK} is missing: this is not a plan file", hint="make one: fuyou plan RECIPE -o plan.json")
    if data[MARK] != FORMAT:
        raise UsageError(f"{MARK}: format {FORMAT} is wanted, not {data[MARK]}", hint="make the plan again")
    file = from_json(PlanFile, data)
    if not re.fullmatch("[1-9][0-9]{0,8}", file.asked.get(_MICRO_BATCH, "")):
        raise UsageError(f"asked.{_MICRO_BATCH}: a whole number of at least 1 is wanted")
    return file


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: json.dumps(value, sort_keys=True)}
    inner = (_flat(one, f"{prefix}.{key}" if prefix else str(key)) for key, one in value.items())
    return {key: text for found in inner for key, text in found.items()}


def _asked(model: ModelSpec, request: PlanRequest) -> dict[str, str]:
    asked = _flat({key: value for key, value in asdict(request).items() if key not in _FREE})
    for key in ("norm_first", "trained_in_ram"):
        if asked[key] == "null":
            del asked[key]  # as in files made before there was such a key
    rule, states, quantised = model.layout.rule, model.layout.dtype, model.quantisation
    asked |= {} if rule == "adamw" else {"optimizer.name": json.dumps(rule)}
    asked |= {} if states == "float32" else {"optimizer.state_dtype": json.dumps(states)}
    return asked if quantised is None else {**asked, "model.quantize": json.dumps(quantised)}


def _mark(model: ModelSpec) -> str:
    stages = [
        (
            stage.kind,
            stage.params,
            stage.trained,
            stage.vocabulary,
            [(t.name, t.shape, t.offset, t.first) for t in stage.tensors],
        )
        for stage in model.stages
    ]
    digest = _digest((model.compute_dtype, model.hidden_size, model.vocab_size, model.tied_head, stages))
    return f"{model.architecture} with {model.parameters:,} parameters ({digest})"


def _placement(plan: Plan) -> str:
    """Returns a digest of everything except what the machine decides: a step's times, and the amount of memory."""
    apart = ("model", "cpu_budget", "memory", "predicted", "sustained", "typical")
    content = {key: value for key, value in asdict(plan).items() if key not in apart}
    for later in ("decoded", "norm_first", "free_pages"):  # plans made before had none
        if not content[later]:
            del content[later]
    return _digest(content)


def _digest(content: object) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_target(path: Path) -> None:
    """Raises UsageError if writing a plan would replace something that is not a plan, for example a recipe or a device."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a link is not followed, because the plan would replace it
            raise UsageError(f"-o {path}: it is there already and is no plain file", hint="name another file")
        with path.open("rb") as stream:
            head = stream.read(64)
    except FileNotFoundError:
        if not path.parent.is_dir():  # reported before the plan is made
            raise UsageError(f"-o {path}: there is no folder {path.parent}", hint="make it, or name another file") from None
        return
    except OSError as error:
        raise UsageError(f"-o {path}: {error.strerror}", hint="name a file") from None
    if head and MARK.encode() not in head:
        raise UsageError(f"-o {path}: exists and is not a plan", hint="name another file")


def write_plan(path: Path, prepared: Planned, request: PlanRequest, candidate: Candidate) -> None:
    """Writes the file completely or not at all. Raises UsageError if it cannot be written."""
    text = to_text(plan_file(prepared.plan, prepared.model, prepared.hardware.process_bytes, request, candidate))
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole.write_text(text, encoding="utf-8")
        whole.replace(path)
    except OSError as error:
        whole.unlink(missing_ok=True)
        raise UsageError(f"-o {path}: {error.strerror}", hint="name a file in a folder that can be written to") from None


def read_plan(path: Path, recipe: Recipe) -> KeptPlan:
    """Reads a plan to run. Raises UsageError that names the wrong key."""
    text = find_text(path, limit=LARGEST, hint=_AGAIN)
    if text is None:
        raise UsageError(f"cannot read the plan {path}: there is no such file", hint="make one: fuyou plan RECIPE -o FILE")
    try:
        kept = KeptPlan(path, from_text(text))
        if recipe.train.micro_batch_size not in ("auto", kept.micro_batch_size):  # the rest is checked once the run is planned
            raise _changed("train.micro_batch_size", str(kept.micro_batch_size), str(recipe.train.micro_batch_size))
    except UsageError as error:
        raise _refused(path, error) from None
    return kept


def _changed(key: str, before: str | None, now: str | None) -> UsageError:
    return UsageError(f"{key} was {before or 'not there'}, is {now or 'not there'} for this run")


def _refused(path: Path, error: UsageError) -> UsageError:
    return UsageError(f"{path}: {error.message}", hint=error.hint or _AGAIN)


class KeptPlan:
    """Makes the plan of a file again, after checking that it still fits this run."""

    def __init__(self, path: Path, file: PlanFile) -> None:
        self.path, self.file = path, file

    @property
    def micro_batch_size(self) -> int:
        return int(self.file.asked[_MICRO_BATCH])

    def __call__(self, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
        """Returns the same placement, with its needs and predictions on this machine. Raises UsageError that names what
        differs. The caller checks whether it fits the machine now."""
        if self.file.asked.get("store_mode") == '"redo"' and request.may_redo:
            request = redone(request)  # the file's plan uses redo, even if another would fit in place
        rests = {"true": True, "false": False}.get(self.file.asked.get("trained_in_ram", ""))
        request = replace(request, trained_in_ram=rests)  # whatever would be chosen now
        try:
            _check_run(self.file, model, request)
            plan = _placed(self.file, model, hardware, request)
        except UsageError as error:
            raise _refused(self.path, error) from None
        return timed_plan(model, hardware, plan, chosen=False)


def _check_run(file: PlanFile, model: ModelSpec, request: PlanRequest) -> None:
    """Compares the model and the request with those of the run."""
    if file.model != _mark(model):
        raise UsageError(f"it was made for {file.model}, the recipe's model is {_mark(model)}")
    threads = file.asked.get("update_threads")  # first, because the size of the scratch memory follows from it
    if threads != str(request.update_threads):
        raise UsageError(
            f"update_threads was {threads}, is {request.update_threads} by this machine's cores "
            "and what AdamW on them was last measured at"
        )
    asked = _asked(model, request)
    for key in dict.fromkeys((*asked, *file.asked)):
        if file.asked.get(key) != asked.get(key):
            raise _changed(key, file.asked.get(key), asked.get(key))


def _placed(file: PlanFile, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
    """Places the candidate in as much memory as it was made for, whatever the process takes now."""
    candidate = known_candidate(model, request, file.choice)
    if candidate is None:
        raise UsageError("choice: none that the planner has for this recipe")
    asked = replace(request, cpu_budget=file.memory + hardware.process_bytes, gpu_budget=file.gpu_budget)
    plan = made_of(model, hardware, asked, candidate)
    if plan is not None and plan.commit_every != file.commit_every:  # even if the planner would now choose another
        plan = with_interval(Costs.of(model, hardware, plan), plan, plan_schedule(model, plan), file.commit_every)
    if plan is None or _placement(plan) != file.placement:
        raise UsageError("placement: with this recipe and this fuyou something else comes of `choice`")
    return replace(plan, cpu_budget=request.cpu_budget)
