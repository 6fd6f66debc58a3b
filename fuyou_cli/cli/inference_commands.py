"""Runs the commands that only compute forward: `fuyou generate`, which may answer at the terminal, `eval` and `lm-eval`."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Literal

from fuyou_cli.core import probe
from fuyou_cli.core.errors import UsageError, pip_install
from fuyou_cli.core.json_files import printable
from fuyou_cli.core.units import duration, gb, gib
from fuyou_cli.data.formats import Chat
from fuyou_cli.data.reading import read_prompts, said, written
from fuyou_cli.machine.profile import budget_of
from fuyou_cli.training.run_log import finite

from .console import status_console, write_document, write_json, write_result, write_status
from .error_screen import like_ctrl_c
from .render.progress import TransferDisplay, counting
from .render.theme import some

if TYPE_CHECKING:
    from fuyou_cli.data.reading import Prompt
    from fuyou_cli.inference.prompting import Extent, Generator, Prompter
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.fixed_prompts import Continued

_CONVERSATION = 2048  # tokens of a conversation at the terminal, at most: their memory is set aside when it begins
_ANSWER = 256  # tokens of one answer, where nobody says how many


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What the command line asks for. Options that are None were not given."""

    prompts: tuple[str, ...] = ()
    file: Path | None = None
    chat: bool = False
    new: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    batch_size: int = 8
    memory: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    json_output: bool = False


def check_options(options: GenerateOptions) -> None:
    """Raises UsageError for options that contradict each other, or a number out of its range."""
    if options.prompts and options.file is not None:
        raise UsageError("--prompt and --file cannot be used together", hint="add the prompt to the file")
    if not options.prompts and options.file is None and not options.chat:
        raise UsageError("there is nothing to continue", hint="give --prompt TEXT, --file prompts.jsonl, or --chat")
    if options.json_output and len(options.prompts) != 1:
        raise UsageError("--json is for one --prompt", hint="several, and --file, write one JSON object per line without it")
    if any("\ud800" <= letter <= "\udfff" for text in options.prompts for letter in text):  # bytes that are no text
        raise UsageError("--prompt: not valid UTF-8", hint="give the text in UTF-8, or in a file by --file")
    if options.temperature == 0 and (options.top_p is not None or options.top_k is not None):
        raise UsageError(
            "--temperature 0 takes the likeliest token, --top-p and --top-k draw one",
            hint="give a temperature above 0, or none",
        )
    ranges: tuple[tuple[str, float | None, float, float], ...] = (
        ("--temperature", options.temperature, 0, 100),
        ("--top-p", options.top_p, 1e-6, 1),
        ("--top-k", options.top_k, 1, 1 << 31),
        ("--max-new-tokens", options.new, 1, 1 << 31),
        ("--batch-size", options.batch_size, 1, 1 << 16),
        ("--seed", options.seed, 0, (1 << 63) - 1),
    )
    for name, value, least, most in ranges:
        if value is not None and not least <= value <= most:
            raise UsageError(f"{name}: {value:g} is not between {least:g} and {most:g}")


@like_ctrl_c()
def run_generate(source: str, options: GenerateOptions) -> None:
    """Continues prompts, of the command line or of a file; without any, holds a conversation."""
    check_options(options)
    budget = budget_of(options.memory, key="--memory")
    import transformers

    transformers.logging.set_verbosity_error()  # its advice is for programs
    from fuyou_cli.inference.prompting import Prompter

    with TransferDisplay(status_console()) as transfers:
        prompter = Prompter.found_in(source, options.dtype, budget, say=write_status, progress=transfers)
    if len(options.prompts) == 1:
        _one(prompter, options, options.prompts[0])
    elif options.prompts:
        _all_of(
            prompter,
            options,
            [(f"--prompt {n}", {"prompt": text}, _prompt(options, text)) for n, text in enumerate(options.prompts, start=1)],
        )
    elif options.file is not None:
        _all_of(prompter, options, read_prompts(options.file, chat=options.chat))
    else:
        _conversation(prompter, options)


def _prompt(options: GenerateOptions, text: str) -> Prompt:
    return said(text) if options.chat else written(text)


def _opened(prompter: Prompter, options: GenerateOptions, most: Extent) -> AbstractContextManager[Generator]:
    from fuyou_cli.training.fixed_prompts import Sampling

    sampling = Sampling(
        temperature=options.temperature or None, top_p=options.top_p, top_k=options.top_k, seed=options.seed
    )  # fmt: skip
    return prompter.opened(most, sampling, options.device)


def _one(prompter: Prompter, options: GenerateOptions, text: str) -> None:
    """Continues one text, and shows it as it comes."""
    from fuyou_cli.inference.prompting import extent

    ids = prompter.ids(_prompt(options, text), "--prompt")
    most = extent(prompter.found, prompts=[ids], rows=1, new=options.new)
    with _opened(prompter, options, most) as generator:
        begin, quiet = time.monotonic(), options.json_output
        (answer,) = generator.run([ids], new=most.new, show=None if quiet else _show)
        _show("" if quiet else "\n")
        _tell_speed(answer.tokens, begin)
        if quiet:
            write_json({"prompt": text, **_as_data(answer)})


def _all_of(prompter: Prompter, options: GenerateOptions, rows: Sequence[tuple[str, dict[str, Any], Prompt]]) -> None:
    """Continues the prompt of every row, which has a place; writes rows with what was generated, one JSON object per line."""
    from fuyou_cli.inference.prompting import extent

    prompts = prompter.all_ids([(place, prompt) for place, _, prompt in rows])
    most = extent(prompter.found, prompts=prompts, rows=options.batch_size, new=options.new)
    begin, tokens = time.monotonic(), 0
    with _opened(prompter, options, most) as generator:
        for first in range(0, len(rows), most.rows):
            batch = slice(first, first + most.rows)
            with counting(f"prompts {first + 1} to {min(batch.stop, len(rows))} of {len(rows)}", most.new) as progress:
                answers = generator.run(prompts[batch], new=most.new, step=partial(progress, 1))
            for (_, row, _), continued in zip(rows[batch], answers, strict=True):
                write_document(json.dumps({**row, **_as_data(continued)}, default=str))  # a date of a Parquet file
                tokens += continued.tokens
    _tell_speed(tokens, begin)


def _conversation(prompter: Prompter, options: GenerateOptions) -> None:
    """Answers line after line of the terminal, until it is closed."""
    from fuyou_cli.inference.prompting import Extent, positions

    most = min(_CONVERSATION, positions(prompter.found) or _CONVERSATION)
    new = options.new or min(_ANSWER, most // 2)
    if (longest := most - new) < 1:
        raise UsageError(f"--max-new-tokens: {new} leaves no room for a conversation", hint="give a smaller number")
    prompter.ids(said("?"), "--chat")  # refuses a tokenizer without a template before anything is opened
    chat = Chat(messages=())
    with _opened(prompter, options, Extent(rows=1, prompt=longest, new=new)) as generator:
        write_status("end with Ctrl-D or Ctrl-C")
        for line in _lines():
            asked_chat = replace(chat, messages=(*chat.messages, *said(line).messages))
            if len(ids := prompter.ids(asked_chat, "--chat")) > longest:
                write_status(f"note: the conversation has more than {longest} tokens: it begins anew with this line")
                asked_chat = said(line)
                if len(ids := prompter.ids(asked_chat, "--chat")) > longest:
                    write_status(f"note: the line alone has {len(ids)} tokens: write a shorter one")
                    continue
            (answer,) = generator.run([ids], new=new, show=_show)
            _show("\n")
            chat = replace(asked_chat, messages=(*asked_chat.messages, {"role": "assistant", "content": answer.text}))


def _lines() -> Iterator[str]:
    """Yields lines of the terminal, or of a pipe, that are not empty."""
    if sys.stdin is None:  # closed: <&-
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a pipe may hold anything
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.strip()


def _show(text: str) -> None:
    """Writes some of an answer to stdout at once."""
    print(printable(text), end="", file=sys.stdout, flush=True)


def _as_data(answer: Continued) -> dict[str, Any]:
    return {"generated": answer.text, "tokens": answer.tokens, "ended": answer.ended}


def _tell_speed(tokens: int, begin: float) -> None:
    seconds = time.monotonic() - begin
    write_status(f"{tokens} tokens in {duration(seconds)}: {tokens / max(seconds, 1e-9):.3g} tokens/s")


# ---- eval and lm-eval ------------------------------------------------------------------------------------------------


@like_ctrl_c()
def run_eval(source: str, recipe: Recipe, *, json_output: bool) -> None:
    """Shows the loss of a model on each of the recipe's sets."""
    from fuyou_cli.inference.evaluating import evaluate

    probe.highest_bytes()  # from here on
    with TransferDisplay(status_console()) as transfers:
        evaluated = evaluate(source, recipe, say=write_status, progress=transfers, bar=partial(counting, "evaluating"))
    peak = probe.highest_bytes()
    if json_output:
        sets = [{key: finite(value) for key, value in asdict(report).items() if key != "step"} for report in evaluated.sets]
        memory = {"budget": evaluated.budget, "peak": peak, "weights": evaluated.weights}
        write_json(
            {
                "model": source, "dtype": evaluated.dtype, "parameters": evaluated.parameters, "sets": sets,
                "passes": evaluated.passes, "read_bytes": evaluated.read_bytes, "memory": memory,
            }
        )  # fmt: skip
        return
    for report in evaluated.sets:
        size = f"{some(report.rows, 'row')}, {report.tokens:,} tokens"
        write_result(f"{report.name}  loss {report.loss:.6g}  perplexity {report.perplexity:.6g}  {size}")
    each = f"{evaluated.read_bytes / evaluated.parameters / evaluated.passes:.2f} bytes per parameter and pass"
    many = f"{evaluated.passes} pass{'es' * (evaluated.passes != 1)}"
    write_status(f"{many}, {gb(evaluated.read_bytes)} read ({each}); {gib(peak)} of {gib(evaluated.budget)} RAM")


def run_lm_eval(words: list[str]) -> None:
    """Runs lm-evaluation-harness' own command line with fuyou's model registered."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry

        from fuyou_cli.inference.lm_eval_model import StreamedLM
    except ImportError as error:
        raise UsageError(f"lm-evaluation-harness cannot be used: {error}", hint=pip_install("fuyou[lm-eval]")) from None
    StreamedLM.say = staticmethod(write_status)
    model_registry.register("fuyou", target=StreamedLM)
    runs = words[0] == "run" or words[0].startswith("-")
    options = words[words[0] == "run" :] if runs else words
    named = any(word == "--model" or word.startswith("--model=") for word in options)
    sys.argv = ["fuyou lm-eval", *(["run", *(() if named else ("--model", "fuyou"))] if runs else ()), *options]
    try:
        cli_evaluate()
    except ValueError as error:
        innermost = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)][-1]
        if not innermost.startswith("lm_eval."):
            raise
        raise UsageError(f"lm-evaluation-harness: {error}", hint="`fuyou lm-eval ls tasks` lists the tasks") from error
