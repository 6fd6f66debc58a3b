"""Runs `fuyou eval`, and shows what it finds; runs `fuyou lm-eval`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import UsageError, pip_install
from fuyou_cli.core.units import gb, gib
from fuyou_cli.machine import probe

from .console import status_console, write_json, write_result, write_status
from .error_screen import like_ctrl_c
from .render.theme import some

if TYPE_CHECKING:
    from fuyou_cli.inference.evaluating import ModelEvaluation
    from fuyou_cli.recipe.schema import Recipe


@like_ctrl_c()
def run_eval(source: str, recipe: Recipe, *, choices: Path | None, json_output: bool) -> None:
    """Evaluates a model on the recipe's sets, or on the questions of the file `choices`."""
    from fuyou_cli.inference.evaluating import evaluate

    from .render.transfer import Transfers

    probe.highest_bytes()  # from here on
    with Transfers(status_console()) as transfers:
        found = evaluate(source, recipe, choices=choices, say=write_status, progress=transfers, bar=_bar)
    result, peak = _as_data(found), probe.highest_bytes()
    if not isinstance(found.result, list) and found.result.cut:
        cut = some(found.result.cut, "choice")
        write_status(f"note: {cut} longer than dataset.max_seq_len: the question's beginning is cut")
    if json_output:
        where = {"model": source, "dtype": found.dtype, "parameters": found.parameters}
        memory = {"budget": found.budget, "peak": peak, "weights": found.weights}
        write_json({**where, **result, "passes": found.passes, "read_bytes": found.read_bytes, "memory": memory})
        return
    for line in _lines(found):
        write_result(line)
    each = f"{found.read_bytes / found.parameters / found.passes:.2f} bytes per parameter and pass"
    many = f"{found.passes} pass{'es' * (found.passes != 1)}"
    write_status(f"{many}, {gb(found.read_bytes)} read ({each}); {gib(peak)} of {gib(found.budget)} RAM")


def _as_data(found: ModelEvaluation) -> dict[str, object]:
    from fuyou_cli.training.run_log import finite

    if not isinstance(found.result, list):
        return {"choices": asdict(found.result)}
    return {"sets": [{key: finite(value) for key, value in asdict(one).items() if key != "step"} for one in found.result]}


def _lines(found: ModelEvaluation) -> list[str]:
    if not isinstance(found.result, list):
        score = found.result
        return [f"acc {score.acc:.4f}  acc_norm {score.acc_norm:.4f}  {some(score.questions, 'question')}"]
    return [
        f"{one.name}  loss {one.loss:.6g}  perplexity {one.perplexity:.6g}  {some(one.rows, 'row')}, {one.tokens:,} tokens"
        for one in found.result
    ]


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
    from fuyou_cli.machine.allocator import settle_allocator
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
