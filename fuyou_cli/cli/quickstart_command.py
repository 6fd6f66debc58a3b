"""Runs `fuyou quickstart`, and shows what it proved on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from fuyou_cli.core.units import duration, gib
from fuyou_cli.quickstart.demonstration import PROMPT, Shown, demonstrate

from .console import status_console, write_last_result, write_status
from .render.theme import heading, pairs, say, some

STATE_BYTES = 16  # per parameter in memory: weights and gradients 4 with fp32 masters 4, or 8 in fp32; momentum and variance 8


def run_quickstart(overrides: Sequence[str]) -> int:
    """Returns the exit code: 0, or the code of a training that ended early and has printed why."""
    shown = demonstrate(overrides, say=write_status)
    if isinstance(shown, int):
        return shown
    _last_screen(shown)
    return 0


def _last_screen(shown: Shown) -> None:
    console, done = status_console(), shown.done
    heading(console, f"Quickstart  {duration(shown.seconds)}")
    in_memory = STATE_BYTES * done.plan["parameters"]
    rows = [
        ("in memory needs", f"{gib(in_memory)} for weights, gradients and optimizer states alone"),
        ("budget", f"{gib(done.plan['budget'])} for the whole process, {shown.held}"),
        ("peak", gib(done.peak) if done.peak else "not measured: no step was left to run"),
        ("loss", f"{done.losses[0]:.4f} to {done.losses[-1]:.4f} in {some(len(done.losses), 'step')}"),
    ]
    pairs(console, [*rows, ("plain PyTorch", shown.compared)] if shown.compared else rows)
    say(console, PROMPT.replace("\n", "  "), indent=2)
    for when, sample in shown.samples.items():
        say(console, f"{when} {' '.join(sample.split())[:100]}", indent=4)
    write_last_result(f"the fine-tuned model is in {done.plan['export']}: AutoModelForCausalLM.from_pretrained loads it")
