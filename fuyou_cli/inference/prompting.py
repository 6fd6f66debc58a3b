"""Finds a model for prompts, and opens it for so many tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fuyou_cli.checkpoint.hub import Progress, resolve
from fuyou_cli.core import probe
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import gb, gib
from fuyou_cli.data.cache import prompt_ids
from fuyou_cli.data.prompts import Prompt
from fuyou_cli.data.tokenise import Tokeniser, load_tokenizer
from fuyou_cli.training.generation import Extent, Generator, Sampling, generator
from fuyou_cli.training.inference import FoundModel, find

from .generate_options import GenerateOptions

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompter:
    """Holds a model, not yet opened, and what was asked for."""

    options: GenerateOptions
    budget: int
    found: FoundModel
    say: Say

    @classmethod
    def found_in(cls, source: str, options: GenerateOptions, budget: int, *, say: Say, progress: Progress) -> Prompter:
        """Finds the model; one of the hub is fetched if it is not here."""
        if not source.strip():
            raise UsageError("the model has no name", hint="give a model's folder or hub name, a run's store or its output_dir")
        folder = Path(source).expanduser()
        if not folder.is_dir():
            folder = resolve(source, say=say, progress=progress)
        model = find(folder, dtype=options.dtype)
        return cls(options=options, budget=budget, found=model, say=say)

    def ids(self, prompt: Prompt, place: str) -> list[int]:
        """Returns a prompt's tokens. Raises UsageError at `place`."""
        return self.all_ids([(place, prompt)])[0]

    def all_ids(self, prompts: Sequence[tuple[str, Prompt]]) -> list[list[int]]:
        """Returns the tokens of each prompt. Another process makes them: a chat template may never end."""
        found = prompt_ids(prompts, self.found.folder)
        for (place, _), ids in zip(prompts, found, strict=True):
            if not ids:
                raise UsageError(f"{place}: the prompt is empty", hint="give some text")
            self.found.check_ids(ids, place)
        return found

    @contextmanager
    def opened(self, most: Extent) -> Iterator[Generator]:
        """Opens the model to generate so much at once, and says what it takes. Prompts come first: their process is
        watched, and a tokenizer that it could not load is never loaded here."""
        asked = self.options
        sampling = Sampling(temperature=asked.temperature or None, top_p=asked.top_p, top_k=asked.top_k, seed=asked.seed)
        if asked.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("torch finds no CUDA device on this machine", hint="use --device cpu")
        here = torch.cuda.is_available() and asked.device != "cpu"
        tokenizer = load_tokenizer(self.found.folder, chat_template=None, pad_token=None)
        tokeniser = Tokeniser(tokenizer, directory=self.found.folder)
        with generator(
            self.found, tokeniser, sampling, most, memory=self.budget, taken=probe.process_bytes,
            device=torch.device("cuda" if here else "cpu"), say=self.say,
        ) as opened:  # fmt: skip
            weights = opened.weights
            size = weights.streamed_bytes
            read = f"{gb(size)} more are read for each token of a batch" if size else "that is all"
            there = f"on the GPU: {gib(weights.device_memory)}, " if here else ""
            self.say(f"weights {there}in RAM: {gib(weights.memory)}; {read}")
            yield opened
