"""Continues prompts by a model whose weights pass through memory. Loop, cache and sampling are transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel, TextStreamer
from transformers.generation.streamers import BaseStreamer

from fuyou_cli.checkpoint.hub import Progress
from fuyou_cli.core.errors import DeviceMemoryError, PlanError, UsageError
from fuyou_cli.core.units import MiB, gb, gib
from fuyou_cli.data.cache import prompt_ids
from fuyou_cli.data.reading import Prompt
from fuyou_cli.data.tokenise import Tokeniser, load_tokenizer
from fuyou_cli.engine.attention import alike, turns
from fuyou_cli.engine.forward_only import GenerationMemory, Visited, generation_code, passing, prompt_step, room
from fuyou_cli.engine.skeleton import TORCH_DTYPE
from fuyou_cli.spec.plan import rounded_up
from fuyou_cli.training.fixed_prompts import Continued, Sampling, continued, naming_settings, settings

from .models import Budget, FoundModel, Opened, cut_to_fit, open_for_inference, open_source

Say = Callable[[str], None]

USUAL_TOKENS = 256  # new ones, where nobody says how many
_UNMEASURED = 128 * MiB  # what libraries take for themselves in the first pass: 104 MiB for a Llama of 1.1 B parameters
_SMALLER_THERE = "give a smaller --batch-size or --max-new-tokens, or --device cpu"
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Says how much is generated at once: rows, tokens of the longest prompt, new tokens of each."""

    rows: int
    prompt: int
    new: int


def extent(found: FoundModel, *, prompts: Sequence[Sequence[int]], rows: int, new: int | None) -> Extent:
    """Finds how much there is to generate. Raises UsageError where that is more positions than the model has."""
    most, longest = positions(found), max(map(len, prompts))
    wanted = new or max(1, min(USUAL_TOKENS, USUAL_TOKENS if most is None else most - longest))
    if most is not None and longest + wanted > most:
        raise UsageError(
            f"the longest prompt has {longest:,} tokens and {wanted:,} follow, but the model has {most:,} positions",
            hint="shorten the prompt, or give a smaller --max-new-tokens" if longest < most else "shorten the prompt",
        )
    return Extent(rows=min(rows, len(prompts)), prompt=longest, new=wanted)


def positions(found: FoundModel) -> int | None:
    """Returns how many tokens the model was made for; None where its configuration does not say, or positions stretch."""
    if any(turn.growing for turn in turns(found.anatomy.model)):
        return None
    text = found.anatomy.model.config.get_text_config()
    return next((value for name in _POSITIONS if isinstance(value := getattr(text, name, None), int)), None)


class Generator:
    """Continues prompts. Open one by `generator`."""

    def __init__(self, model: PreTrainedModel, tokeniser: Tokeniser, config: GenerationConfig, opened: Opened) -> None:
        self._model, self._tokeniser, self._config, self.weights = model, tokeniser, config, opened.weights
        self._unchecked: Callable[[], None] | None = opened.check

    def run(
        self, prompts: Sequence[Sequence[int]], *, new: int, show: Callable[[str], None] | None = None,
        step: Callable[[], None] | None = None,
    ) -> list[Continued]:  # fmt: skip
        """Continues the tokens of every prompt by at most `new`, all at once: one pass over the weights for each position,
        or several where the positions of a model depend on the length of a row.

        `show` gets the text of a single prompt as it comes, `step` is called at every position.
        """
        streamer = _Shown(self._tokeniser.tokenizer, show) if show is not None else _Counted(step)
        by_prompt: dict[int, Continued] = {}
        for group in alike(self._model, list(map(len, prompts)), new=new):
            by_prompt |= zip(
                group, self._run([prompts[place] for place in group], new, streamer, alone=show is not None), strict=True
            )
        self.check()
        return [by_prompt[place] for place in range(len(prompts))]

    def _run(self, prompts: Sequence[Sequence[int]], new: int, streamer: BaseStreamer, *, alone: bool) -> list[Continued]:
        """`alone`: no other prompts are continued before or after."""
        device, pad = self.weights.device, self._config.pad_token_id
        longest = max(map(len, prompts))
        if not alone:
            longest = rounded_up(longest, prompt_step(self._model, device))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        try:
            grown = self._model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=self._config,
                max_new_tokens=new, streamer=streamer, tokenizer=self._tokeniser.tokenizer,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            why = str(error).partition(". ")[0]
            raise DeviceMemoryError(f"out of device memory: {why}", hint=_SMALLER_THERE) from error
        return continued(grown, longest, self._config, self._tokeniser)

    def check(self) -> None:
        """Compares a store's bytes with their checksums, once: every pass reads the same."""
        if self._unchecked is not None:
            self._unchecked()
            self._unchecked = None


@contextmanager
def generator(
    found: FoundModel, tokeniser: Tokeniser, sampling: Sampling, most: Extent, *, ram: int, device: torch.device,
    say: Callable[[str], None] | None = None,
) -> Iterator[Generator]:  # fmt: skip
    """Opens a model to generate at most so much at once, in at most `ram` bytes for the whole process. Raises PlanError where
    they do not do."""
    config = settings(found.folder, found.anatomy.model, tokeniser, sampling)
    model, step = found.anatomy.model, prompt_step(found.anatomy.model, device)
    needed = room(model, rows=most.rows, prompt=rounded_up(most.prompt, step), new=most.new)
    if step:
        needed = replace(needed, work=needed.work + generation_code(model, prompt=most.prompt, new=most.new))
    budget = Budget.now(ram, device)
    weights_on_device = left_for_weights(budget.device, needed, Visited.of(found.anatomy, TORCH_DTYPE[found.dtype]).largest)
    torch.manual_seed(sampling.seed)
    with ExitStack() as stack:
        left = budget.for_weights(found, _UNMEASURED + (needed.total if budget.device is None else 0))
        # What a block sends to ranges of its experts, and float32 sums of what they return.
        of_ranges = 12 * model.config.get_text_config().hidden_size * most.rows * rounded_up(most.prompt, step)
        try:
            if (cut := cut_to_fit(found, left - of_ranges)).anatomy is not found.anatomy:
                found, left = cut, left - of_ranges
            opened = stack.enter_context(
                open_for_inference(found, device=device, say=say, memory=left, device_memory=weights_on_device)
            )
        except PlanError as error:
            process = f"the process itself takes {gib(budget.process + _UNMEASURED)}"
            raise PlanError(f"does not fit {gib(ram)}: {error.message}; {process}", hint=_smaller(most, needed)) from None
        stack.enter_context(naming_settings(opened.weights.anatomy.model, found.folder))
        model = stack.enter_context(passing(opened.weights))
        yield Generator(model, tokeniser, config, opened)


def left_for_weights(memory: int | None, needed: GenerationMemory, largest: int) -> int:
    """Returns what is left for weights of a device's own memory, 0 without any. `largest`: bytes of the largest stage.

    Raises PlanError where the cache, the work of a pass and that stage do not fit at once."""
    if memory is None:
        return 0
    if memory < needed.total + largest:
        raise PlanError(
            f"does not fit: keys, values and the work of a pass take {gib(needed.total)} of the GPU, the largest stage's "
            f"weights {gib(largest)}, but {gib(memory)} are free",
            hint=_SMALLER_THERE,
        )
    return memory - needed.total


def _smaller(most: Extent, needed: GenerationMemory) -> str:
    takes = f"keys and values take {gib(needed.cache)}, the work of a pass {gib(needed.work)}"
    fewer = ", or a smaller --batch-size" if most.rows > 1 else ""
    return f"give more --memory{fewer}, or a smaller --max-new-tokens: {takes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompter:
    """A model, not yet opened, that is to continue prompts in `budget` bytes for the whole process."""

    budget: int
    found: FoundModel
    say: Say

    @classmethod
    def found_in(
        cls, source: str, dtype: Literal["auto", "float32", "bfloat16"], budget: int, *, say: Say, progress: Progress
    ) -> Prompter:
        """Finds the model; one of the hub is fetched if it is not here."""
        return cls(budget=budget, found=open_source(source, dtype=dtype, say=say, progress=progress), say=say)

    def ids(self, prompt: Prompt, place: str) -> list[int]:
        """Returns a prompt's tokens. Raises UsageError at `place`."""
        return self.all_ids([(place, prompt)])[0]

    def all_ids(self, prompts: Sequence[tuple[str, Prompt]]) -> list[list[int]]:
        """Returns the tokens of each prompt. Another process makes them: a chat template may never end."""
        ids_of = prompt_ids(prompts, self.found.folder)
        for (place, _), ids in zip(prompts, ids_of, strict=True):
            if not ids:
                raise UsageError(f"{place}: the prompt is empty", hint="give some text")
            self.found.check_ids(ids, place)
        return ids_of

    @contextmanager
    def opened(self, most: Extent, sampling: Sampling, device: Literal["auto", "cpu", "cuda"]) -> Iterator[Generator]:
        """Opens the model to generate so much at once, and says what it takes. Prompts come first: their process is
        watched, and a tokenizer that it could not load is never loaded here."""
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("torch finds no CUDA device on this machine", hint="use --device cpu")
        on_gpu = torch.cuda.is_available() and device != "cpu"
        tokenizer = load_tokenizer(self.found.folder, chat_template=None, pad_token=None)
        tokeniser = Tokeniser(tokenizer, directory=self.found.folder)
        where = torch.device("cuda" if on_gpu else "cpu")
        with generator(self.found, tokeniser, sampling, most, ram=self.budget, device=where, say=self.say) as opened:
            weights = opened.weights
            size = weights.streamed_bytes
            read = f"{gb(size)} more are read for each token of a batch" if size else "that is all"
            on_gpu_text = f"on the GPU: {gib(weights.device_memory)}, " if on_gpu else ""
            self.say(f"weights {on_gpu_text}in RAM: {gib(weights.memory)}; {read}")
            yield opened


class _Shown(TextStreamer):  # type: ignore[misc]
    """Hands words to `show` as soon as they are whole."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._show(text)


class _Counted(BaseStreamer):  # type: ignore[misc]
    def __init__(self, step: Callable[[], None] | None) -> None:
        self._step = step

    def put(self, value: torch.Tensor) -> None:
        if self._step is not None:
            self._step()

    def end(self) -> None:
        pass
