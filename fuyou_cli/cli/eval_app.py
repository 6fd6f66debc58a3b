"""Defines `fuyou eval`."""

from __future__ import annotations

import sys
from pathlib import Path
from traceback import walk_tb
from typing import Annotated

import typer

from fuyou_cli.core.errors import UsageError, pip_install

from .arguments import Json, OptionalRecipe, Overrides, loaded_recipe
from .console import write_status


def evaluate(
    source: Annotated[str, typer.Argument(metavar="MODEL|STORE|OUTPUT", help="A model, a run's store, or a run's output_dir.")],
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    choices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Questions: JSONL of question, choices, answer.", show_default=False),
    ] = None,
    json_output: Json = False,
) -> None:
    """Show the loss of a model on the eval sets of a recipe.

    Loss and perplexity of each set of dataset.eval, and of the samples that dataset.eval_fraction holds back. The weights pass
    through memory: the model may be larger than offload.max_memory.cpu. Trains and writes nothing. With --choices it answers
    questions instead: the share answered right by log-likelihood (acc), and by log-likelihood per character (acc_norm).
    """
    from fuyou_cli.machine.allocator import settle_allocator
    from fuyou_cli.machine.libraries import settle_libraries

    from .evaluate import run_eval

    loaded = loaded_recipe(recipe, overrides)
    settle_allocator()
    settle_libraries(device=loaded.recipe.offload.device)
    run_eval(source, loaded.recipe, choices=choices, json_output=json_output)


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on a model larger than memory.

    Takes the arguments of its own command lm_eval, and adds a model: `fuyou lm-eval --model_args pretrained=MODEL,memory=8GiB
    --tasks hellaswag`. MODEL is a model, a run's store or its output_dir. `fuyou lm-eval run --help` shows all arguments,
    `fuyou lm-eval ls tasks` the tasks. Needs `pip install "fuyou[lm-eval]"`.
    """
    words = context.args
    if words in ([], ["-h"], ["--help"]):
        typer.echo(context.get_help())
        return
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
