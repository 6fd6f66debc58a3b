"""Runs `fuyou eval`, and shows what it finds; runs `fuyou lm-eval`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from traceback import walk_tb
from typing import TYPE_CHECKING

from fuyou_cli.core import probe
from fuyou_cli.core.errors import UsageError, pip_install
from fuyou_cli.core.units import gb, gib

from .console import status_console, write_json, write_result, write_status
from .error_screen import like_ctrl_c
from .render.theme import some

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe


@like_ctrl_c()
def run_eval(source: str, recipe: Recipe, *, json_output: bool) -> None:
    """Shows the loss of a model on each of the recipe's sets."""
    from fuyou_cli.inference.evaluating import evaluate
    from fuyou_cli.training.run_log import finite

    from .render.transfer import Transfers

    probe.highest_bytes()  # from here on
    with Transfers(status_console()) as transfers:
        found = evaluate(source, recipe, say=write_status, progress=transfers, bar=_bar)
    peak = probe.highest_bytes()
    if json_output:
        sets = [{key: finite(value) for key, value in asdict(report).items() if key != "step"} for report in found.sets]
        memory = {"budget": found.budget, "peak": peak, "weights": found.weights}
        write_json(
            {
                "model": source, "dtype": found.dtype, "parameters": found.parameters, "sets": sets,
                "passes": found.passes, "read_bytes": found.read_bytes, "memory": memory,
            }
        )  # fmt: skip
        return
    for report in found.sets:
        size = f"{some(report.rows, 'row')}, {report.tokens:,} tokens"
        write_result(f"{report.name}  loss {report.loss:.6g}  perplexity {report.perplexity:.6g}  {size}")
    each = f"{found.read_bytes / found.parameters / found.passes:.2f} bytes per parameter and pass"
    many = f"{found.passes} pass{'es' * (found.passes != 1)}"
    write_status(f"{many}, {gb(found.read_bytes)} read ({each}); {gib(peak)} of {gib(found.budget)} RAM")


@contextmanager
def _bar(rows: int) -> Iterator[Callable[[int], None]]:
    """Shows how many rows are done; gives what is told of each pass."""
    from rich.progress import Progress

    console = status_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("evaluating", total=rows)
        yield lambda count: progress.advance(task, count)


def run_lm_eval(words: list[str]) -> None:
    """Runs lm-evaluation-harness' own command line with fuyou's model registered."""
    from fuyou_cli.core.heap import settle_allocator
    from fuyou_cli.machine.libraries import settle_libraries

    settle_allocator()
    settle_libraries(device="auto")
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry

        from fuyou_cli.inference.lm_eval_model import StreamedLM
    except ImportError as error:
        raise UsageError(f"lm-evaluation-harness cannot be used: {error}", hint=pip_install("fuyou[lm-eval]")) from None
    StreamedLM.say = staticmethod(write_status)
    model_registry.register("fuyou", target=StreamedLM)
    runs = words[0] == "run" or words[0].startswith("-")
    rest = words[words[0] == "run" :] if runs else words
    named = any(word == "--model" or word.startswith("--model=") for word in rest)
    sys.argv = ["fuyou lm-eval", *(["run", *(() if named else ("--model", "fuyou"))] if runs else ()), *rest]
    try:
        cli_evaluate()
    except ValueError as error:
        innermost = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)][-1]
        if not innermost.startswith("lm_eval."):
            raise
        raise UsageError(f"lm-evaluation-harness: {error}", hint="`fuyou lm-eval ls tasks` lists the tasks") from error
