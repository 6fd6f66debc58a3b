"""`fuyou plan -o plan.json`, and a run of that very plan."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import find_text
from fuyou_cli.core.units import gib
from fuyou_cli.planner.choice import Choice
from fuyou_cli.planner.rebuilt import difference, rebuilt
from fuyou_cli.planner.store_modes import redone
from fuyou_cli.planner.wishes import Wishes
from fuyou_cli.spec import plan_file as files
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Numerics, Plan

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.prepare import Prepared

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
_AGAIN = "make the plan again: fuyou plan RECIPE -o FILE"


def recipe_keys(recipe: Recipe) -> dict[str, str]:
    """Dotted key -> value as JSON, of all that a plan depends on."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), one)
        elif _depends(prefix):
            found[prefix] = json.dumps(value, sort_keys=True)

    walk("", recipe.model_dump(mode="json"))
    found["model.name_or_path"] = json.dumps(files.portable_name(recipe.model.name_or_path))
    return found


def _depends(key: str) -> bool:
    return key not in _NOT_OF_A_PLAN and any(key == name or key.startswith(f"{name}.") for name in _DEPENDS)


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
    if head and files.MARK.encode() not in head:
        raise UsageError(f"-o {path}: it is there already and is no plan", hint="name another file")


def write_plan(path: Path, prepared: Prepared, choice: Choice) -> None:
    """The plan with what it was made for; whole or not at all. Raises UsageError where it cannot be written."""
    file = files.plan_file(
        prepared.plan,
        prepared.model,
        prepared.hardware,
        keys=recipe_keys(prepared.recipe),
        pipeline=files.Pipeline(lookahead=choice.lookahead, gradient_slots=choice.gradient_slots, defer=choice.defer),
    )
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole.write_text(files.to_text(file), encoding="utf-8")
        whole.replace(path)
    except OSError as error:
        whole.unlink(missing_ok=True)
        raise UsageError(f"-o {path}: {error.strerror}", hint="name a file in a folder that can be written to") from None


def read_plan(path: Path, recipe: Recipe) -> KeptPlan:
    """Raises UsageError naming the key that is wrong, or that the recipe has changed since."""
    text = find_text(path, limit=files.LARGEST, hint=_AGAIN)
    if text is None:
        raise UsageError(f"cannot read the plan {path}: there is no such file", hint="make one: fuyou plan RECIPE -o FILE")
    try:
        kept = KeptPlan(path, files.from_text(text))
        kept.check_recipe(recipe)
    except UsageError as error:
        raise _refused(path, error) from None
    return kept


def _refused(path: Path, error: UsageError) -> UsageError:
    return UsageError(f"{path}: {error.message}", hint=error.hint or _AGAIN)


class KeptPlan:
    """Chooses the plan of a file, once it is sure that it is still one for this run."""

    def __init__(self, path: Path, file: files.PlanFile) -> None:
        self.path, self.file = path, file

    def check_recipe(self, recipe: Recipe) -> None:
        before, now = self.file.recipe.keys, recipe_keys(recipe)
        for key in dict.fromkeys((*now, *before)):
            if before.get(key) != now.get(key):
                raise UsageError(f"{key} was {before.get(key, 'not there')}, is {now.get(key, 'not there')} in the recipe")
        size, planned = recipe.offload.max_memory.cpu.size, self.file.plan.cpu_budget
        if size is not None and planned > size:
            raise UsageError(f"plan.cpu_budget: {planned}, offload.max_memory.cpu says {size}")

    def __call__(self, model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Plan:
        """The same homes and spans, with what they take and promise on this machine. Raises UsageError naming what does not
        agree; whether it fits what the machine has now is for the caller to see."""
        file = self.file
        if file.plan.store_mode == "redo" and wishes.may_redo:  # another plan has room in place, or had: this one is redo's
            wishes = redone(wishes)
        try:
            _check_run(file, model, wishes)
            _check_figures(file, model, wishes)
            if wishes.commit_every == "auto":  # also on a machine for which the planner would say another
                wishes = replace(wishes, commit_every=file.plan.commit_every)
            return rebuilt(model, hardware, wishes, file.plan, file.pipeline)
        except UsageError as error:
            raise _refused(self.path, error) from None


def _check_run(file: files.PlanFile, model: ModelSpec, wishes: Wishes) -> None:
    """The model and the numerics are those of the run."""
    mark = files.model_mark(model)
    if mark != file.model:
        what = f"{file.model.architecture} with {file.model.parameters:,} parameters"
        now = f"{mark.architecture} with {mark.parameters:,} parameters"
        differ = ": their tensors differ" if what == now else ""
        raise UsageError(f"it was made for {what}, the recipe's model is {now}{differ}")
    for field in fields(Numerics):
        planned, asked = getattr(file.plan.numerics, field.name), getattr(wishes.numerics, field.name)
        if planned != asked:
            raise UsageError(f"plan.numerics.{field.name} is {planned!r}, the run computes with {asked!r}")
    if file.plan.device != wishes.device:
        raise UsageError(f"plan.device is {file.plan.device}, the run computes on {wishes.device}")
    if file.plan.store_mode != wishes.store_mode:
        raise UsageError(
            f"plan.store_mode is {file.plan.store_mode}; by what the disks have free, or by what is saved, the run has "
            f"{wishes.store_mode}"
        )
    io = file.plan.io  # before the spans, all of which shift with what the daemon's chunks take
    if io.update_threads != wishes.update_threads:
        raise UsageError(
            f"plan.io.update_threads: made for {_threads(io.update_threads)}, this machine uses {wishes.update_threads} "
            "by its cores and what AdamW on them was last measured at"
        )
    for name, asked in _io_of(wishes).items():
        if getattr(io, name) != asked:
            raise UsageError(f"plan.io.{name} is {getattr(io, name)!r}, the run uses {asked!r}")
    if io.scratch.size != wishes.scratch_size:
        raise UsageError(f"plan.io.scratch: {io.scratch.size} bytes for chunks, the run takes {wishes.scratch_size}")


def _threads(number: int) -> str:
    return f"{number} update thread{'s' * (number != 1)}"


def _io_of(wishes: Wishes) -> dict[str, object]:
    """What a plan says of transfers, as the run asks for it."""
    names = ("read_depth", "write_depth", "block_size", "stripe", "chunk_params")
    return {"backend": wishes.io_backend, **{name: getattr(wishes, name) for name in names}}


def _check_figures(file: files.PlanFile, model: ModelSpec, wishes: Wishes) -> None:
    """Every figure is what its homes give: spans inside arena and store and apart from each other, sizes of the model."""
    if file.plan.sustained and not file.hardware.slows_down:
        raise UsageError("plan.sustained: drives that do not slow down are planned at one rate")
    if file.pipeline.defer and wishes.clip_grad_norm is not None:
        raise UsageError("pipeline.defer: with train.clip_grad_norm no update is deferred")
    asked = replace(wishes, cpu_budget=file.plan.cpu_budget, sustained=file.plan.sustained)
    expected = rebuilt(model, file.hardware, asked, file.plan, file.pipeline)
    expected = replace(expected, model=files.portable_name(wishes.model_name))
    if where := difference(file.plan, expected):
        raise UsageError(f"{where}: is not what the planner makes of these homes")
    if expected.predicted.cpu_peak > expected.cpu_budget:
        raise UsageError(f"plan.cpu_budget: {gib(expected.cpu_budget)}, the plan needs {gib(expected.predicted.cpu_peak)}")
