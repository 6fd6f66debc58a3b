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
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.units import GiB, duration, gib

from . import probe
from .console import status_console, write_result, write_status
from .memory_group import run_limited

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe

COMPARED_STEPS = 5
EXPORTED = "model-finetuned"  # the recipe's model is `model`, so the export takes the other name
STATE_BYTES = 16  # per parameter in memory: weights 2, gradients 2, fp32 master 4, momentum 4, variance 4
PROMPTS = ("Question: What is the harbour of Torvane called?\nAnswer:",)
_PACKAGE = "fuyou_cli.training.quickstart"


def run_quickstart(overrides: Sequence[str]) -> None:
    """Raises FuyouError when a part fails, with that part's own message above it."""
    from fuyou_cli.recipe.load import load_recipe
    from fuyou_cli.recipe.shipped import shipped_recipes
    from fuyou_cli.training.quickstart.make_corpus import corpus_text

    began = time.monotonic()
    path = shipped_recipes()["quickstart"]
    loaded = load_recipe(path, overrides)
    model = Path(loaded.recipe.model.name_or_path)
    out = Path(loaded.recipe.output_dir)
    write_status(f"making a small model and its tokenizer in {model}")
    out.mkdir(parents=True, exist_ok=True)
    Path(loaded.recipe.dataset.train[0].path).write_text(corpus_text(), encoding="utf-8")
    _module("make_model", str(model))
    before = _samples(model)
    budget = loaded.recipe.offload.max_memory.cpu.size or GiB
    ended = run_limited(
        [sys.executable, "-m", "fuyou_cli", "finetune", str(path), *overrides], budget, environment=dict(os.environ)
    )
    if ended.code:
        raise FuyouError(
            f"the fine-tuning ended with code {ended.code}",
            hint="killed by the memory group: please report it" if ended.code in (-9, 137) else "its message is above",
        )
    after = _samples(out / EXPORTED)
    plan, losses, peak = _log(out / "log.jsonl")
    difference = _compare(loaded, overrides, losses)
    _last_screen(
        plan=plan,
        budget=budget,
        enforced=ended.enforced,
        peak=peak,
        losses=losses,
        difference=difference,
        samples=(before, after),
        seconds=time.monotonic() - began,
        out=out,
    )


def _module(name: str, *arguments: str) -> str:
    """Runs one of the quickstart's modules; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"{_PACKAGE}.{name}", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise FuyouError(f"{name.replace('_', ' ')} failed: {last[0]}")
    return done.stdout


def _samples(model: Path) -> list[str]:
    return [json.loads(line) for line in _module("sample", str(model), *PROMPTS).splitlines()]


def _log(path: Path) -> tuple[dict[str, int], list[float], int]:
    """The last run's promises, its losses by step, and its peak memory."""
    from fuyou_cli.training.jsonl import read_log

    plan: dict[str, int] = {}
    losses: dict[int, float] = {}
    peak = 0
    for record in read_log(path):
        if record["event"] == "plan":
            plan = {key: value for key, value in record.items() if isinstance(value, int)}
        elif record["event"] == "step":
            losses[int(str(record["step"]))] = float(str(record["loss"]))
            peak = max(peak, int(str(record["ram_peak"])))
    return plan, [losses[step] for step in sorted(losses)], peak


def _compare(loaded: LoadedRecipe, overrides: Sequence[str], losses: list[float]) -> float | None:
    """The largest relative difference of the first losses to plain PyTorch's, or None where that does not fit memory."""
    if probe.memory_available() < 4 * GiB:
        write_status("plain PyTorch is not run beside it: it needs about 3 GiB of free memory")
        return None
    steps = min(COMPARED_STEPS, len(losses))
    write_status(f"the first {steps} steps again in plain PyTorch, in memory, for comparison")
    printed = _module("reference", str(loaded.path), str(steps), *overrides)
    plain = [float(line) for line in printed.splitlines()]
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, plain, strict=False))


def _last_screen(
    *,
    plan: dict[str, int],
    budget: int,
    enforced: bool,
    peak: int,
    losses: list[float],
    difference: float | None,
    samples: tuple[list[str], list[str]],
    seconds: float,
    out: Path,
) -> None:
    from .render.theme import heading, pairs, say

    console = status_console()
    heading(console, f"Quickstart  {duration(seconds)}")
    in_memory = STATE_BYTES * plan["parameters"]
    held = "held there by the kernel" if enforced else "not enforced here: no memory group could be made"
    rows = [
        ("in memory needs", f"{gib(in_memory)} for weights, gradients and optimizer states alone"),
        ("budget", f"{gib(budget)} for the whole process, {held}"),
        ("peak", gib(peak)),
        ("loss", f"{losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps"),
    ]
    if difference is not None:
        rows.append(("plain PyTorch", f"equal within {difference:.1e} (losses of the first {COMPARED_STEPS} steps)"))
    pairs(console, rows)
    for prompt, before, after in zip(PROMPTS, *samples, strict=True):
        say(console, prompt.replace("\n", "  "), indent=2)
        say(console, f"before: {_one_line(before)}", indent=4)
        say(console, f"after:  {_one_line(after)}", indent=4)
    write_result(f"the fine-tuned model is in {out / EXPORTED}: AutoModelForCausalLM.from_pretrained loads it")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]
