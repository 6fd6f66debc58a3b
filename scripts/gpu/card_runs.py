"""Runs of either side on the machine's GPU, or on the emulated one: recipes made here, `fuyou finetune`, and plain PyTorch."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proof.both_sides import STEP_FIELDS, InMemory, end_of, fuyou_on, started
from proof.materials import model_folder, own_text, rows_folder
from proof.setting import fresh, recipe_in
from proof.verdicts import ROOT
from proof.watch import LineCounter

from fuyou_cli.machine.profile import core_count
from fuyou_cli.training.run_log import read_log

SAVING = 20.0  # seconds after its last step that a run may take to save its states: tens of GB, nothing that is asked
STACK_LINES = 120  # of one that was ended: what all of its threads were doing
TO_TELL = 2.0  # seconds that it has to say so


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where runs happen, on which device."""

    work: Path
    device: str
    length: int  # tokens of a row
    text_rows: int  # that are tokenised and packed
    until: float  # of the monotonic clock: what runs then is ended
    micro: int | None = None  # rows computed at once; None: chosen by the planner
    fixed: Mapping[str, object] = field(default_factory=dict)  # of the recipe's offload section

    @property
    def environment(self) -> dict[str, str]:
        """Profiles of the machine are those measured here, and stay here. What is ended tells its threads' stacks."""
        return {"XDG_CACHE_HOME": str(self.work / "profiles"), "PYTHONFAULTHANDLER": "1"}

    def model(self, shape: str) -> Path:
        """The checkpoint of `shape` with random weights, made once."""
        return model_folder(self.work, shape, self.text(), "--repeat")

    def text(self) -> Path:
        path = self.work / "text.jsonl"
        if not path.exists():
            path.write_text(own_text(self.text_rows), encoding="utf-8")
        return path


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run of our side."""

    shape: str
    rows: int  # per step
    steps: int
    clip: float | None = None
    on_ssd: bool = False
    compiled: bool = False  # train.compile
    gpu: str | None = None  # offload.max_memory.gpu
    offload: Mapping[str, object] = field(default_factory=dict)  # more of that section


def write_recipe(place: Place, case: Case) -> Path:
    """The recipe of a case in a fresh folder; what an earlier run left there is gone, its store as well."""
    out, model = fresh(place.work / "run"), place.model(case.shape)
    fresh(place.work / "store")
    tiers = {key: "ssd" for key in ("weights", "gradients", "optimizer_states") if case.on_ssd}
    offload = {
        "device": place.device, "dir": str(place.work / "store"), "max_memory": {"gpu": case.gpu or "auto"}, **place.fixed,
        **({"defer_updates": "auto"} if case.clip is not None else {}),  # clipping leaves no choice of it
        **tiers, **case.offload,
    }  # fmt: skip
    return recipe_in(
        out, model, place.work / "rows", case, place.length, commit_every=None, offload=offload, export={"at_end": False},
        entry={"path": str(place.text()), "format": "prompt_completion"},
        train={"micro_batch_size": place.micro or "auto", "compile": case.compiled},
    )  # fmt: skip


def finetune(place: Place, case: Case, *, words: Sequence[str] = (), saves: float = SAVING) -> dict[str, Any]:
    """The case through `fuyou finetune`: its plan, its steps and what it compared at its end. `failed` says why where it did
    not do all of them. `words`: the command to put before the recipe, instead of ours."""
    recipe = write_recipe(place, case)
    command = [*(words or (*fuyou_on(place.device), "finetune")), str(recipe)]
    log, output = recipe.parent / "log.jsonl", place.work / "run.txt"
    begun, cut, late = time.monotonic(), False, False
    with output.open("wb") as file, started(command, None, file, **place.environment) as child:
        lines, last = LineCounter(log), 0.0
        while child.poll() is None:
            lines.steps += sum(b'"event":"step"' in line for line in lines.new())
            if lines.steps >= case.steps:
                last = last or time.monotonic()
                cut = time.monotonic() - last > saves
            late = time.monotonic() > place.until
            if late:
                end_with_stacks(child)
            if cut or late:
                child.kill()
                break
            time.sleep(0.05)
    records = read_log(log) if log.exists() else []
    steps = [{name: record.get(name) for name in STEP_FIELDS} for record in records if record["event"] == "step"]
    result: dict[str, Any] = {
        "exit": child.returncode,
        "seconds": round(time.monotonic() - begun, 1),
        "plan": next((record for record in records if record["event"] == "plan"), {}),
        "steps": steps,
        "compared": next((record["compared"] for record in records if record["event"] == "end"), []),
        "saving_cut_short": cut,
    }
    if len(steps) != case.steps or not (child.returncode == 0 or cut or late):
        how = "ended by the stage's limit" if late else f"exit code {child.returncode}"
        result["failed"] = f"{how}, {len(steps)} of {case.steps} steps:\n{end_of(output)}"
        if late:
            result["stacks"] = end_of(output, STACK_LINES)
    return result


def in_memory(place: Place, case: Case, *, micro: int) -> dict[str, Any]:
    """The same rows, weights and numerics in plain PyTorch, everything in the device's memory. Of the recipe that ran last."""
    out, output = place.work / "in_memory.jsonl", place.work / "in_memory.txt"
    out.unlink(missing_ok=True)
    rows = rows_folder(place.work / "run" / "recipe.yaml")
    device = "cuda" if place.device == "cuda" else "cpu"
    side = InMemory(
        shape=case.shape, rows=case.rows, micro=micro, steps=case.steps, turn=0, clip=case.clip, length=place.length
    )
    command = [*side.command(model=place.model(case.shape), rows=rows, out=out), "--device", device, "--float32-gradients"]
    with output.open("wb") as file, started(command, None, file) as child:
        try:
            child.wait(max(1.0, place.until - time.monotonic()))
            how = f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            how = "ended by the stage's limit"
    steps = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    result: dict[str, Any] = {"exit": child.returncode, "steps": steps}
    if child.returncode != 0:
        result["failed"] = f"{how}, {len(steps)} of {case.steps} steps:\n{end_of(output)}"
        result["too_large"] = "OutOfMemoryError" in result["failed"]
    return result


def deepspeed(place: Place, case: Case) -> dict[str, Any]:
    """The model and as many random tokens a step through DeepSpeed's NVMe offload, without clipping. `failed` says why where
    it did not do all steps."""
    folder = fresh(place.work / "deepspeed")
    out, output = folder / "told.jsonl", place.work / "deepspeed.txt"
    command = [sys.executable, str(ROOT / "scripts" / "proof" / "deepspeed_loop.py"), "--model", str(place.model(case.shape))]
    command += ["--nvme", str(folder / "nvme"), "--out", str(out), "--last", str(case.steps), "--rows", str(case.rows)]
    command += ["--length", str(place.length), "--device", place.device, "--threads", str(core_count())]
    with output.open("wb") as file, started(command, None, file) as child:
        try:
            child.wait(max(1.0, place.until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    told = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    result: dict[str, Any] = {"exit": child.returncode, "steps": [line for line in told if "step" in line], "told": told}
    if len(result["steps"]) != case.steps:
        result["failed"] = f"exit code {child.returncode}, {len(result['steps'])} of {case.steps} steps:\n{end_of(output)}"
    shutil.rmtree(folder)  # tens of GB
    return result


def end_with_stacks(child: subprocess.Popen[bytes]) -> None:
    """Python's faulthandler writes what every thread is doing, also where one is inside a driver that does not return."""
    resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))  # it has tens of GB of memory
    child.send_signal(signal.SIGABRT)
    try:
        child.wait(TO_TELL)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def settled(result: Mapping[str, Any], warm_up: int, name: str = "seconds") -> float:
    """The median over the steps after the first ones."""
    return statistics.median(step[name] for step in result["steps"][warm_up:])
