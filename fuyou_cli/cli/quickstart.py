"""`fuyou quickstart`: a model made here, fine-tuned in less memory than its states take, and the proof on one screen.

Whatever needs the whole model in memory (making it, sampling from it, the comparison with plain PyTorch) runs in
processes of its own, outside the memory group the training is held in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import FuyouError, OutOfSpaceError, PlanError, UsageError
from fuyou_cli.core.paths import folder
from fuyou_cli.core.units import GiB, duration, gib
from fuyou_cli.machine import probe
from fuyou_cli.machine.groups import Ended, run_limited

from .console import status_console, write_result, write_status
from .errors import INTERRUPTED
from .probing import probe_once

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.recipe.schema import Recipe

COMPARED_STEPS = 5
STATE_BYTES = 16  # per parameter in memory: weights 2, gradients 2, fp32 master 4, momentum 4, variance 4
PROMPTS = ("Question: What is the harbour of Torvane called?\nAnswer:",)
_PACKAGE = "fuyou_cli.training.quickstart"
# What the training said already: its own code goes on to whoever called us.
_PASSED_ON = (UsageError.exit_code, PlanError.exit_code, OutOfSpaceError.exit_code, INTERRUPTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The run that has just ended, from its log and its store."""

    plan: dict[str, Any]  # its "plan" record
    losses: tuple[float, ...]  # of every step, those before an interruption included
    peak: int  # of this process; 0 where no step ran in it


def run_quickstart(overrides: Sequence[str]) -> int:
    """The exit code: 0, or that of a training that ended early and has said why. Raises FuyouError when another part
    fails, with that part's own message above it."""
    began = time.monotonic()
    loaded = _load(overrides)
    recipe = loaded.recipe
    model, out = Path(recipe.model.name_or_path), folder(recipe.output_dir, key="output_dir")
    _write_corpus(Path(recipe.dataset.train[0].path))
    write_status(f"making a small model and its tokenizer in {model}")
    _module("make_model", str(model))
    before = _samples(model)
    if recipe.offload.measure:  # here: the memory group has no room for it
        probe_once(loaded, recipe.offload.device)
    limit = _limit(recipe)
    ended = run_limited(
        [sys.executable, "-m", "fuyou_cli", "finetune", str(loaded.path), *overrides, *_start_over(recipe, out)],
        limit,
        environment=dict(os.environ),
    )
    if ended.code in _PASSED_ON:
        return ended.code
    if ended.code:
        raise FuyouError(
            f"the fine-tuning ended with code {ended.code}",
            hint="the memory group killed it: raise offload.max_memory.cpu (please report it if the plan said that it fits)"
            if ended.code in (-9, 137)
            else "its message is above",
        )
    done = _done(recipe, out)
    _refuse_excess(ended, done)
    exported = Path(done.plan["export"])
    after = _samples(exported)
    difference = _compare(loaded, overrides, done)
    _last_screen(
        done,
        held=_held(ended, limit, done),
        difference=difference,
        samples=(before, after),
        seconds=time.monotonic() - began,
        exported=exported,
    )
    return 0


def _load(overrides: Sequence[str]) -> LoadedRecipe:
    """The shipped recipe with overrides. Raises UsageError for those under which there is nothing to show."""
    from fuyou_cli.recipe.load import load_recipe
    from fuyou_cli.recipe.shipped import shipped_recipes

    path = shipped_recipes()["quickstart"]
    loaded, plain = load_recipe(path, overrides), load_recipe(path).recipe
    recipe = loaded.recipe
    refused = {
        # these are made here: a file or folder of somebody's must never be written over
        "model.name_or_path": recipe.model.name_or_path != plain.model.name_or_path,
        "model.revision": recipe.model.revision is not None,
        "tokenizer": recipe.tokenizer != plain.tokenizer,
        "dataset.train": recipe.dataset.train != plain.dataset.train,
        # these leave nothing to compare or to sample from
        "offload.device": recipe.offload.device != "cpu",
        "export.at_end": not recipe.export.at_end,
        "logging.backends": "jsonl" not in recipe.logging.backends,
        "checkpoint.resume": recipe.checkpoint.resume not in ("auto", "never"),
    }
    if any(refused.values()):
        keys = ", ".join(f"`{key}`" for key, wrong in refused.items() if wrong)
        raise UsageError(
            f"the quickstart makes its own model and text and compares on the CPU: {keys} cannot be changed",
            hint="for a run of your own: fuyou recipes cp quickstart, edit recipe.yaml, fuyou finetune recipe.yaml",
        )
    return loaded


def _write_corpus(path: Path) -> None:
    """The bundled text where the recipe expects it, never over anything else."""
    from fuyou_cli.training.quickstart.make_corpus import corpus_text

    text = corpus_text()
    if path.exists():
        if path.read_bytes() != text.encode():
            raise UsageError(f"{path} exists and is not the quickstart's text", hint="move it, or run in another folder")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def _limit(recipe: Recipe) -> int:
    """Bytes of the memory group: the budget, resolved as the planner resolves it, or what we are held to ourselves."""
    from fuyou_cli.machine.profile import usable_memory

    asked = recipe.offload.max_memory.cpu
    budget = asked.resolve(total=probe.memory_limit(), auto=int(usable_memory() * 0.9))
    return min(budget, probe.memory_limit())


def _start_over(recipe: Recipe, out: Path) -> list[str]:
    """The override for a store that cannot be gone on from: of a quickstart that ended. One that was stopped or killed is
    resumed."""
    from fuyou_cli.training.prepare import run_directories
    from fuyou_cli.training.state import manifest as manifests

    store = run_directories(recipe)[0]
    if recipe.checkpoint.resume == "never":
        return []
    try:
        manifest, _ = manifests.newest(store)
    except UsageError:  # of another version, or damaged
        why = "an earlier quickstart left a store that cannot be read"
    else:
        if manifest is None or manifest.state == "loading" or not _ended(out / "log.jsonl"):
            return []
        why = "an earlier quickstart ended"
    write_status(f"{why} in {store}: starting over")
    return ["checkpoint.resume=never"]


def _ended(log: Path) -> bool:
    """Whether the last run that wrote this log reached its end."""
    from fuyou_cli.training.jsonl import read_log

    records = read_log(log) if log.exists() else []
    return bool(records) and records[-1]["event"] == "end"


def _module(name: str, *arguments: str) -> str:
    """Runs one of the quickstart's modules; what it printed."""
    done = subprocess.run([sys.executable, "-m", f"{_PACKAGE}.{name}", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise FuyouError(f"{name.replace('_', ' ')} failed: {last[0]}")
    return done.stdout


def _samples(model: Path) -> list[str]:
    return [json.loads(line) for line in _module("sample", str(model), *PROMPTS).splitlines()]


def _done(recipe: Recipe, out: Path) -> Done:
    """The last run in the log, which is appended to: nothing before its "plan" counts."""
    from fuyou_cli.training import losses
    from fuyou_cli.training.jsonl import read_log
    from fuyou_cli.training.prepare import run_directories
    from fuyou_cli.training.state import manifest as manifests

    records: list[dict[str, Any]] = list(read_log(out / "log.jsonl"))
    begin = max(number for number, record in enumerate(records) if record["event"] == "plan")
    store = run_directories(recipe)[0]
    manifest, _ = manifests.newest(store)
    assert manifest is not None, "a run that ended well has committed"
    known, _ = losses.read(store, manifest.step)
    steps = [record for record in records[begin:] if record["event"] == "step"]
    return Done(plan=records[begin], losses=tuple(known), peak=max((int(step["ram_peak"]) for step in steps), default=0))


def _compare(loaded: LoadedRecipe, overrides: Sequence[str], done: Done) -> float | None:
    """The largest relative difference of the first losses to plain PyTorch's, or None where that does not fit memory."""
    if probe.memory_available() < 4 * GiB:
        write_status("plain PyTorch is not run beside it: it needs about 3 GiB of free memory")
        return None
    steps = min(COMPARED_STEPS, len(done.losses))
    write_status(f"the first {steps} steps again in plain PyTorch, in memory, for comparison")
    # what `auto` became in the run: the loop beside it takes the same numbers
    numerics = done.plan["numerics"]
    numbers = (steps, numerics["micro_batch_size"], numerics["torch_threads"], done.plan["total_steps"])
    printed = _module("reference", str(loaded.path), *map(str, numbers), *overrides)
    plain = [float(line) for line in printed.splitlines()]
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(done.losses, plain, strict=False))


def _refuse_excess(ended: Ended, done: Done) -> None:
    """Where no memory group held the run, its measured peak has to be within the budget."""
    budget = done.plan["budget"]
    if not ended.enforced and done.peak > budget:
        raise FuyouError(
            f"the run took {gib(done.peak)} of memory, its budget is {gib(budget)} (no memory group could hold it here)",
            hint="please report it, with the output of `fuyou doctor`",
        )


def _held(ended: Ended, limit: int, done: Done) -> str:
    if not ended.enforced:
        return "measured, not held: no memory group could be made here"
    return "held there by the kernel" if limit == done.plan["budget"] else f"held to {gib(limit)} by the kernel"


def _last_screen(
    done: Done,
    *,
    held: str,
    difference: float | None,
    samples: tuple[list[str], list[str]],
    seconds: float,
    exported: Path,
) -> None:
    from .render.theme import heading, pairs, say

    console, losses = status_console(), done.losses
    heading(console, f"Quickstart  {duration(seconds)}")
    in_memory = STATE_BYTES * done.plan["parameters"]
    rows = [
        ("in memory needs", f"{gib(in_memory)} for weights, gradients and optimizer states alone"),
        ("budget", f"{gib(done.plan['budget'])} for the whole process, {held}"),
        ("peak", gib(done.peak) if done.peak else "not measured: no step was left to run"),
        ("loss", f"{losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} step{'s' * (len(losses) != 1)}"),
    ]
    if difference is not None:
        compared = min(COMPARED_STEPS, len(losses))
        rows.append(("plain PyTorch", f"equal within {difference:.1e} (losses of the first {compared} steps)"))
    pairs(console, rows)
    for prompt, before, after in zip(PROMPTS, *samples, strict=True):
        say(console, prompt.replace("\n", "  "), indent=2)
        say(console, f"before: {_one_line(before)}", indent=4)
        say(console, f"after:  {_one_line(after)}", indent=4)
    write_result(f"the fine-tuned model is in {exported}: AutoModelForCausalLM.from_pretrained loads it")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]
