"""Runs `fuyou generate`: continues prompts by a model that may be larger than memory, or answers at the terminal."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.printable import printable
from fuyou_cli.core.units import duration, gb, gib
from fuyou_cli.machine import probe

from .console import status_console, write_document, write_json, write_status
from .signals import like_ctrl_c

if TYPE_CHECKING:
    from fuyou_cli.data.prompts import Prompt
    from fuyou_cli.data.tokenise import Tokeniser
    from fuyou_cli.training.generation import Continued, Extent, Generator
    from fuyou_cli.training.inference import Found

_CONVERSATION = 2048  # tokens of a conversation at the terminal, at most: their memory is set aside when it begins
_ANSWER = 256  # tokens of one answer, where nobody says how many


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Holds what the command line asks for. Options that are None were not given."""

    prompt: str | None = None
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


@like_ctrl_c()
def run_generate(source: str, options: GenerateOptions) -> None:
    """Continues one prompt or those of a file; without either, holds a conversation."""
    _check(options)
    budget = budget_of(options.memory, key="--memory")
    from fuyou_cli.machine.allocator import settle_allocator
    from fuyou_cli.machine.libraries import settle_libraries

    settle_allocator()
    settle_libraries(device=options.device)
    import transformers

    transformers.logging.set_verbosity_error()  # its advice is for programs
    given = _Given.found_in(source, options, budget)
    if options.prompt is not None:
        _one(given, options.prompt)
    elif options.file is not None:
        _all_of(given, options.file)
    else:
        _conversation(given)


def _check(options: GenerateOptions) -> None:
    """Raises UsageError for options that contradict each other, or a number out of its range."""
    if options.prompt is not None and options.file is not None:
        raise UsageError("--prompt and --file cannot be used together", hint="add the prompt to the file")
    if options.prompt is None and options.file is None and not options.chat:
        raise UsageError("there is nothing to continue", hint="give --prompt TEXT, --file prompts.jsonl, or --chat")
    if options.json_output and options.prompt is None:
        raise UsageError("--json is for --prompt", hint="--file writes one JSON object per line by itself")
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


def budget_of(text: str, *, key: str) -> int:
    """Returns the bytes that the whole process may take. Raises UsageError that names `key`."""
    from pydantic import TypeAdapter, ValidationError

    from fuyou_cli.machine.profile import usable_memory
    from fuyou_cli.recipe.fields import Limit, MemoryLimit

    try:
        limit = TypeAdapter[MemoryLimit](Limit).validate_python(text)
    except ValidationError as error:
        raise UsageError(f"{key}: {error.errors()[0]['msg']}") from None
    return limit.resolve(total=probe.memory_limit(), auto=int(usable_memory() * 0.9))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """Holds a model, not yet opened, its tokenizer, and what was asked for."""

    options: GenerateOptions
    budget: int
    found: Found
    tokeniser: Tokeniser

    @classmethod
    def found_in(cls, source: str, options: GenerateOptions, budget: int) -> _Given:
        """Finds the model and its tokenizer; a hub's model is fetched if it is not here."""
        from fuyou_cli.checkpoint.hub import resolve
        from fuyou_cli.data.tokenise import Tokeniser, load_tokenizer
        from fuyou_cli.training.inference import find

        from .render.transfer import Transfers

        if not source.strip():
            raise UsageError("the model has no name", hint="give a model's folder or hub name, a run's store or its output_dir")
        folder = Path(source).expanduser()
        if not folder.is_dir():
            with Transfers(status_console()) as transfers:
                folder = resolve(source, say=write_status, progress=transfers)
        model = find(folder, dtype=options.dtype)
        tokenizer = load_tokenizer(model.folder, chat_template=None, pad_token=None)
        return cls(options=options, budget=budget, found=model, tokeniser=Tokeniser(tokenizer, directory=model.folder))

    def ids(self, prompt: Prompt, place: str) -> list[int]:
        """Returns a prompt's tokens. Raises UsageError at `place`."""
        from fuyou_cli.data.formats import RowError

        try:
            ids = self.tokeniser.prompt(prompt)
        except RowError as error:
            raise UsageError(f"{place}: {error}") from None
        if not ids:
            raise UsageError(f"{place}: the prompt is empty", hint="give some text")
        return ids

    @contextmanager
    def opened(self, most: Extent) -> Iterator[Generator]:
        """Opens the model to generate so much at once, and says what it takes."""
        import torch

        from fuyou_cli.training.generation import Sampling, generator

        asked = self.options
        sampling = Sampling(temperature=asked.temperature or None, top_p=asked.top_p, top_k=asked.top_k, seed=asked.seed)
        if asked.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("torch finds no CUDA device on this machine", hint="use --device cpu")
        here = torch.cuda.is_available() and asked.device != "cpu"
        with generator(
            self.found, self.tokeniser, sampling, most, memory=self.budget, taken=probe.process_bytes,
            device=torch.device("cuda" if here else "cpu"), say=write_status,
        ) as opened:  # fmt: skip
            weights = opened.weights
            size = weights.streamed_bytes
            read = f"{gb(size)} more are read for each token of a batch" if size else "that is all"
            write_status(f"weights in RAM: {gib(weights.memory)}; {read}")
            yield opened


def _is_text(text: str) -> bool:
    """Tells whether the shell gave text: other bytes come as halves of surrogates."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


def _one(given: _Given, text: str) -> None:
    """Continues one text, and shows it as it comes."""
    from fuyou_cli.data.prompts import said, written
    from fuyou_cli.training.generation import extent

    if not _is_text(text):
        raise UsageError("--prompt: not valid UTF-8", hint="give the text in UTF-8, or in a file by --file")
    ids = given.ids(said(text) if given.options.chat else written(text), "--prompt")
    most = extent(given.found, prompts=[ids], rows=1, new=given.options.new)
    with given.opened(most) as generator:
        begin, quiet = time.monotonic(), given.options.json_output
        (found,) = generator.run([ids], new=most.new, show=None if quiet else _show)
        _show("" if quiet else "\n")
        _tell_speed(found.tokens, begin)
        if quiet:
            write_json({"prompt": text, **_as_data(found)})


def _all_of(given: _Given, file: Path) -> None:
    """Continues every prompt of a file; writes its row with what was generated, one JSON object per line."""
    from rich.progress import Progress

    from fuyou_cli.data.prompts import read_prompts
    from fuyou_cli.training.generation import extent

    rows = read_prompts(file, chat=given.options.chat)
    prompts = [given.ids(prompt, place) for place, _, prompt in rows]
    most = extent(given.found, prompts=prompts, rows=given.options.batch_size, new=given.options.new)
    begin, tokens, console = time.monotonic(), 0, status_console()
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with given.opened(most) as generator, bar as progress:
        for first in range(0, len(rows), most.rows):
            batch = slice(first, first + most.rows)
            task = progress.add_task(f"prompts {first + 1} to {min(batch.stop, len(rows))} of {len(rows)}", total=most.new)
            found = generator.run(prompts[batch], new=most.new, step=partial(progress.advance, task))
            for (_, row, _), continued in zip(rows[batch], found, strict=True):
                write_document(json.dumps({**row, **_as_data(continued)}, default=str))  # a date of a Parquet file
                tokens += continued.tokens
            progress.remove_task(task)
    _tell_speed(tokens, begin)


def _conversation(given: _Given) -> None:
    """Answers line after line of the terminal, until it is closed."""
    from fuyou_cli.data.formats import Chat
    from fuyou_cli.data.prompts import said
    from fuyou_cli.training.generation import Extent, positions

    most = min(_CONVERSATION, positions(given.found) or _CONVERSATION)
    new = given.options.new or min(_ANSWER, most // 2)
    if (longest := most - new) < 1:
        raise UsageError(f"--max-new-tokens: {new} leaves no room for a conversation", hint="give a smaller number")
    given.ids(said("?"), "--chat")  # refuses a tokenizer without a template before anything is opened
    chat = Chat(messages=())
    with given.opened(Extent(rows=1, prompt=longest, new=new)) as generator:
        write_status("end with Ctrl-D or Ctrl-C")
        for line in _lines():
            told = replace(chat, messages=(*chat.messages, *said(line).messages))
            if len(ids := given.ids(told, "--chat")) > longest:
                write_status(f"note: the conversation has more than {longest} tokens: it begins anew with this line")
                told = said(line)
                if len(ids := given.ids(told, "--chat")) > longest:
                    write_status(f"note: the line alone has {len(ids)} tokens: write a shorter one")
                    continue
            (answer,) = generator.run([ids], new=new, show=_show)
            _show("\n")
            chat = replace(told, messages=(*told.messages, {"role": "assistant", "content": answer.text}))


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


def _as_data(found: Continued) -> dict[str, Any]:
    return {"generated": found.text, "tokens": found.tokens, "ended": found.ended}


def _tell_speed(tokens: int, begin: float) -> None:
    seconds = time.monotonic() - begin
    write_status(f"{tokens} tokens in {duration(seconds)}: {tokens / max(seconds, 1e-9):.3g} tokens/s")
