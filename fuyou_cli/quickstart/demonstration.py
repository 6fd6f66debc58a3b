"""Makes a small model, fine-tunes it in less memory than its states need, and compares it with plain PyTorch.

Work that needs the whole model in memory (making it, completing a prompt, the comparison with plain PyTorch) runs in separate
processes, outside the memory group (cgroup v1 or v2) that limits the training.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from fuyou_cli.core import probe
from fuyou_cli.core.errors import FuyouError, Interrupted, OutOfSpaceError, PlanError, UsageError
from fuyou_cli.core.paths import folder
from fuyou_cli.core.units import GiB, gib
from fuyou_cli.engine.processor import has_fast_bfloat16
from fuyou_cli.machine.profile import core_count, measure_once, usable_memory
from fuyou_cli.recipe.load import LoadedRecipe, load_recipe
from fuyou_cli.recipe.named import shipped_recipes
from fuyou_cli.recipe.schema import Recipe
from fuyou_cli.training.plan_step import layers_of
from fuyou_cli.training.prepare import run_directories
from fuyou_cli.training.run_log import read_log
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.store_folders import read_losses

from .toy import CORPUS

# ---- the memory group ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Tells how the command ended, and whether the kernel enforced the limit."""

    code: int
    enforced: bool


def run_limited(command: Sequence[str], limit: int, *, environment: dict[str, str]) -> Ended:
    """Runs `command` with at most `limit` bytes for all its processes; without a limit if none can be set."""
    group = _make_group(limit)
    if group is not None:
        try:
            join = partial((group / "cgroup.procs").write_text, "0")  # 0: the process that writes it
            process = subprocess.Popen(command, env=environment, preexec_fn=join)
            return Ended(code=_wait(process), enforced=True)
        except subprocess.SubprocessError:  # the group could be made, but not joined
            pass
        finally:
            with suppress(OSError):
                group.rmdir()
    return Ended(code=_wait(subprocess.Popen(command, env=environment)), enforced=False)


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the command gets it too, and saves its state
            continue


def _make_group(limit: int, root: Path = probe.ROOT) -> Path | None:
    """Makes a new group that accepts the limit, swap included; None if that fails."""
    for parent, version in _parents(root):
        group = parent / f"fuyou-{os.getpid()}"
        try:
            if version == 2:
                _let_children_hold_memory(parent)
            group.mkdir()
        except OSError:
            continue
        try:
            _hold(group, version, limit)
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        return group
    return None


def _parents(root: Path) -> list[tuple[Path, int]]:
    """Lists the groups that may hold a new one, with their versions. The nearest come first: then most existing limits still
    hold."""
    # In version 2 only the topmost group may have both processes and children with limits. Ours has this process, so the new
    # group is a sibling.
    groups = probe.own_groups("memory", root)
    places = ((place, own) for own in groups for place in (own.folder, *own.folder.parents))
    return [(place, own.version) for place, own in places if place.is_relative_to(own.top)]


def _let_children_hold_memory(parent: Path) -> None:
    control = parent / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        control.write_text("+memory")


def _hold(group: Path, version: int, limit: int) -> None:
    if version == 2:
        _write_if_there(group / "memory.swap.max", "0")
        (group / "memory.max").write_text(str(limit))
        return
    (group / "memory.limit_in_bytes").write_text(str(limit))
    _write_if_there(group / "memory.memsw.limit_in_bytes", str(limit))


def _write_if_there(file: Path, text: str) -> None:
    """Writes the file if it exists. Swap has its own limit only where the kernel counts it."""
    if file.exists():
        file.write_text(text)


# ---- what is shown ---------------------------------------------------------------------------------------------------


Say = Callable[[str], None]

COMPARED_STEPS = 5
PROMPT = "Question: What is the harbour of Torvane called?\nAnswer:"
# The quickstart makes these files, or needs them to compare and to sample.
_FIXED = ("model.name_or_path", "model.revision", "tokenizer", "dataset.train", "offload.device", "export.at_end")
# Exit codes that the training has explained already: the quickstart returns them unchanged.
_PASSED_ON = (UsageError.exit_code, PlanError.exit_code, OutOfSpaceError.exit_code, Interrupted.exit_code)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """The run that has just ended, from its log and its store."""

    plan: dict[str, Any]  # the log's "plan" record
    losses: tuple[float, ...]  # of every step, also of steps before an interruption
    peak: int  # of this process; 0 if no step ran in it


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What the quickstart shows at its end."""

    done: FinishedRun
    held: str  # how the memory was limited
    compared: str | None  # with plain PyTorch; None where that does not fit memory
    samples: dict[str, str]  # what the model wrote, before and after
    seconds: float


def demonstrate(overrides: Sequence[str], *, say: Say) -> Shown | int:
    """Runs everything. Returns what it shows, or the exit code of a training that ended early and has printed why.

    Raises FuyouError if another part fails, with that part's message.
    """
    began = time.monotonic()
    asked, overrides = overrides, _for_this_processor(overrides)
    loaded = _load(overrides)
    recipe = loaded.recipe
    model, out = recipe.model.name_or_path, folder(recipe.output_dir, key="output_dir")
    _write_corpus(Path(recipe.dataset.train[0].path))
    if overrides != asked:
        say("computing in float32: without AVX-512 this processor is slow in bfloat16")
    say(f"making a small model and its tokenizer in {model}")
    samples = {"before:": _toy("make", model, PROMPT)}
    if recipe.offload.measure:  # here, because the memory group has no room for it
        layers = layers_of(recipe, folder(model, key="model.name_or_path"), cores=core_count())
        measure_once(loaded, recipe.offload.device, layers=layers, say=say)
    budget = recipe.offload.max_memory.cpu.resolve(total=probe.memory_limit(), auto=int(usable_memory() * 0.9))
    limit = min(budget, probe.memory_limit())
    run = [
        "finetune",
        str(loaded.path),
        *overrides,
        *_start_over(out, say),
        "--assume-rates",
    ]  # else it would measure in the group
    command = [sys.executable, "-m", "fuyou_cli", *run]
    ended = run_limited(command, limit, environment=dict(os.environ))
    if ended.code in _PASSED_ON:
        return ended.code
    if ended.code:
        killed = "the memory group killed it: raise offload.max_memory.cpu (please report it if the plan said that it fits)"
        hint = killed if ended.code in (-9, 137) else "its message is above"
        raise FuyouError(f"the fine-tuning ended with code {ended.code}", hint=hint)
    done = _done(recipe, out)
    _refuse_excess(ended, done)
    samples["after: "] = _toy("complete", done.plan["export"], PROMPT)
    compared = _compare(loaded, overrides, done, say)
    held = "measured, not limited: no memory group could be made here"
    if ended.enforced:
        held = "limited by the kernel" if limit == done.plan["budget"] else f"limited to {gib(limit)} by the kernel"
    return Shown(done=done, held=held, compared=compared, samples=samples, seconds=time.monotonic() - began)


def _for_this_processor(overrides: Sequence[str]) -> Sequence[str]:
    """Adds float32 to overrides that do not choose a dtype, where bfloat16 would take several times as long."""
    chosen = any(override.startswith("precision") for override in overrides)
    if chosen or has_fast_bfloat16():
        return overrides
    return [*overrides, "precision.compute=float32"]


def _load(overrides: Sequence[str]) -> LoadedRecipe:
    """Loads the shipped recipe with overrides. Raises UsageError for overrides that would leave nothing to show."""
    path = shipped_recipes()["quickstart"]
    loaded, plain = load_recipe(path, overrides), load_recipe(path).recipe
    recipe = loaded.recipe
    changed = [key for key in _FIXED if attrgetter(key)(recipe) != attrgetter(key)(plain)]
    if "jsonl" not in recipe.logging.backends:
        changed.append("logging.backends")
    if recipe.checkpoint.resume not in ("auto", "never"):
        changed.append("checkpoint.resume")
    if changed:
        keys = ", ".join(f"`{key}`" for key in changed)
        raise UsageError(
            f"the quickstart makes its own model and text and compares on the CPU: {keys} cannot be changed",
            hint="for a run of your own: fuyou recipes cp quickstart, edit recipe.yaml, fuyou finetune recipe.yaml",
        )
    return loaded


def _write_corpus(path: Path) -> None:
    """Writes the bundled text where the recipe expects it, and never overwrites another file."""
    text = CORPUS.read_bytes()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    elif path.read_bytes() != text:
        raise UsageError(f"{path} exists and is not the quickstart's text", hint="move it, or run in another folder")


def _toy(*words: str) -> str:
    """Runs one of the commands of `toy` and returns what it printed."""
    command = [sys.executable, "-m", f"{__package__}.toy", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise FuyouError(f"the quickstart's {words[0]} failed: {last[0]}")
    return done.stdout


def _start_over(out: Path, say: Say) -> list[str]:
    """Returns the override that restarts a finished quickstart. A stopped or killed one is resumed."""
    records = _log(out)
    if not records or records[-1]["event"] != "end":
        return []
    say(f"an earlier quickstart ended in {out}: starting over")
    return ["checkpoint.resume=never"]


def _log(out: Path) -> list[dict[str, Any]]:
    log = out / "log.jsonl"
    return list(read_log(log)) if log.exists() else []


def _done(recipe: Recipe, out: Path) -> FinishedRun:
    """Reads the last run in the log. Each run appends to the log, and a run begins with its "plan"."""
    records = _log(out)
    begin = max(number for number, record in enumerate(records) if record["event"] == "plan")
    store = run_directories(recipe)[0]
    manifest, _ = manifests.newest(store)
    assert manifest is not None, "a run that ended well has committed"
    known, _ = read_losses(store, manifest.step)
    peaks = [int(record["ram_peak"]) for record in records[begin:] if record["event"] == "step"]
    return FinishedRun(plan=records[begin], losses=tuple(known), peak=max(peaks, default=0))


def _refuse_excess(ended: Ended, done: FinishedRun) -> None:
    """Raises FuyouError if no memory group held the run and its measured peak exceeds the budget."""
    budget = done.plan["budget"]
    if not ended.enforced and done.peak > budget:
        raise FuyouError(
            f"the run took {gib(done.peak)} of memory, but its budget is {gib(budget)} (no memory group could limit it here)",
            hint="please report it, with the output of `fuyou doctor`",
        )


def _compare(loaded: LoadedRecipe, overrides: Sequence[str], done: FinishedRun, say: Say) -> str | None:
    """Tells how near the first losses are to plain PyTorch's; None if plain PyTorch does not fit memory."""
    if probe.memory_available() < 4 * GiB:
        say("no comparison with plain PyTorch: it needs about 3 GiB of free memory")
        return None
    steps = min(COMPARED_STEPS, len(done.losses))
    say(f"repeating the first {steps} steps in plain PyTorch, in memory, to compare")
    # the values that `auto` got in the run: plain PyTorch uses the same
    numerics = done.plan["numerics"]
    numbers = (steps, numerics["micro_batch_size"], numerics["torch_threads"], done.plan["total_steps"])
    printed = _toy("losses", str(loaded.path), *map(str, numbers), *overrides)
    plain = [float(line) for line in printed.splitlines()]
    apart = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(done.losses, plain, strict=False))
    return f"equal within {apart:.1e} (losses of the first {steps} steps)"
