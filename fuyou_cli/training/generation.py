"""Continues prompts by a model whose weights pass through memory. Loop, cache and sampling are transformers' own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StopStringCriteria, TextStreamer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutput

from ..checkpoint.reader import PIECE
from ..core.errors import DeviceMemoryError, PlanError, UsageError
from ..core.json_files import read_object
from ..core.units import MiB, gib
from ..data.sandbox import LibraryErrors
from ..data.tokenise import LARGEST_SETTINGS, Tokeniser
from ..engine.generating import GenerationMemory, generation_code, passing, prompt_step, room
from ..engine.lookup import holding
from ..engine.row_lengths import alike, turns
from ..engine.skeleton import TORCH_DTYPE
from ..engine.weight_stream import Visited
from ..spec.micro_batch import rounded_up
from .exporting import READ_ARENA
from .inference import FoundModel, Opened, memory_of, open_for_inference

USUAL_TOKENS = 256  # new ones, where nobody says how many
_SETTINGS = "generation_config.json"
_MOST_KEYS = 256  # of that file: transformers knows 80
_UNMEASURED = 128 * MiB  # what libraries take for themselves in the first pass: 104 MiB for a Llama of 1.1 B parameters
_SMALLER_THERE = "give a smaller --batch-size or --max-new-tokens, or --device cpu"
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Says how the next token is chosen: the likeliest one, or drawn as soon as one of the numbers is given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    @property
    def draws(self) -> bool:
        return any(value is not None for value in (self.temperature, self.top_p, self.top_k))


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """Holds what a model made of one prompt. `ended`: by its end token or a stop string, or by the length."""

    text: str
    tokens: int  # new ones, the end token included
    ended: Literal["end", "length"]


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
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new: int,
        show: Callable[[str], None] | None = None,
        step: Callable[[], None] | None = None,
    ) -> list[Continued]:
        """Continues the tokens of every prompt by at most `new`, all at once: one pass over the weights for each position,
        or several where the positions of a model depend on the length of a row.

        `show` gets the text of a single prompt as it comes, `step` is called at every position.
        """
        streamer = _Shown(self._tokeniser.tokenizer, show) if show is not None else _Counted(step)
        found: dict[int, Continued] = {}
        for group in alike(self._model, list(map(len, prompts)), new=new):
            found |= zip(
                group, self._run([prompts[place] for place in group], new, streamer, alone=show is not None), strict=True
            )
        self.check()
        return [found[place] for place in range(len(prompts))]

    def _run(self, prompts: Sequence[Sequence[int]], new: int, streamer: BaseStreamer, *, alone: bool) -> list[Continued]:
        """`alone`: no other prompts are continued before or after."""
        device, pad = self.weights.device, self._config.pad_token_id
        longest = max(map(len, prompts))
        if not alone:
            longest = rounded_up(longest, prompt_step(self._model, device))
        ids = torch.tensor([[pad] * (longest - len(one)) + list(one) for one in prompts])
        there = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        try:
            grown = self._model.generate(
                input_ids=ids.to(device), attention_mask=there.to(device), generation_config=self._config,
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


def continued(grown: torch.Tensor, begin: int, config: GenerationConfig, tokeniser: Tokeniser) -> list[Continued]:
    """Reads what `generate` wrote from position `begin` on, up to each row's end token or stop string. `grown`: int64
    [rows, tokens]."""
    ends = config.eos_token_id
    known, found = ends if isinstance(ends, list) else [] if ends is None else [ends], list[Continued]()
    for row, stop in zip(grown[:, begin:].tolist(), _stops(grown, begin, config, tokeniser), strict=True):
        places = [place for place, token in enumerate(row) if token in known]
        at = min(places if stop is None else [*places, stop], default=None)
        kept = row if at is None else row[: at + 1]
        text = tokeniser.tokenizer.decode(kept, skip_special_tokens=True)
        found.append(Continued(text=text, tokens=len(kept), ended="length" if at is None else "end"))
    return found


def _stops(grown: torch.Tensor, begin: int, config: GenerationConfig, tokeniser: Tokeniser) -> list[int | None]:
    """Finds where behind `begin` each row completes one of the stop strings, by the check that ended it: `generate` fills up
    a row that has ended, and does not say where."""
    found: list[int | None] = [None] * len(grown)
    if config.stop_strings is None:
        return found
    completes = StopStringCriteria(tokeniser.tokenizer, config.stop_strings)
    for place in range(grown.shape[1] - begin):
        for row, done in enumerate(completes(grown[:, : begin + place + 1], None).tolist()):
            found[row] = place if done and found[row] is None else found[row]
    return found


@contextmanager
def generator(
    found: FoundModel, tokeniser: Tokeniser, sampling: Sampling, most: Extent, *, memory: int, taken: Callable[[], int],
    device: torch.device | None = None, say: Callable[[str], None] | None = None,
) -> Iterator[Generator]:  # fmt: skip
    """Opens a model to generate at most so much at once, in at most `memory` bytes for the whole process. `taken`: bytes that
    the process has now. Raises PlanError where they do not do."""
    device = device or torch.device("cpu")
    config = settings(found.folder, found.anatomy.model, tokeniser, sampling)
    model, step = found.anatomy.model, prompt_step(found.anatomy.model, device)
    needed = room(model, rows=most.rows, prompt=rounded_up(most.prompt, step), new=most.new)
    if step:
        needed = replace(needed, work=needed.work + generation_code(model, prompt=most.prompt, new=most.new))
    there = left_for_weights(memory_of(device), needed, Visited.of(found.anatomy, TORCH_DTYPE[found.dtype]).largest)
    beside = taken() + (needed.total if device.type == "cpu" else 0) + (PIECE if found.store is None else READ_ARENA)
    torch.manual_seed(sampling.seed)
    with ExitStack() as stack:
        sizes = {"memory": memory - beside - _UNMEASURED, "device_memory": there}
        try:
            opened = stack.enter_context(open_for_inference(found, device=device, say=say, **sizes))
        except PlanError as error:
            process = f"the process itself takes {gib(taken() + _UNMEASURED)}"
            raise PlanError(f"does not fit {gib(memory)}: {error.message}; {process}", hint=_smaller(most, needed)) from None
        stack.enter_context(naming_settings(opened.anatomy.model, found.folder))
        model = stack.enter_context(passing(opened.anatomy, opened.weights))
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


def settings(folder: Path, model: PreTrainedModel, tokeniser: Tokeniser, sampling: Sampling) -> GenerationConfig:
    """Returns the model's own settings, of its folder, with this sampling: the likeliest token unless asked otherwise. Raises
    UsageError for settings that `generate` refuses."""
    asked = {name: value for name, value in asdict(sampling).items() if name != "seed"}
    known = {name: value for name, value in asked.items() if value is not None or not sampling.draws}
    pad = tokeniser.pad_id if tokeniser.pad_id < model.get_input_embeddings().num_embeddings else 0  # nothing attends to it

    def tried(config: GenerationConfig) -> GenerationConfig:
        config.update(
            **known, do_sample=sampling.draws, num_beams=1, num_return_sequences=1, cache_implementation=None, use_cache=True,
            max_length=None, pad_token_id=pad, return_dict_in_generate=False, prefill_chunk_size=None,
        )  # fmt: skip
        if config.eos_token_id is None:
            config.eos_token_id = tokeniser.eos_id
        if config.stop_strings == "" or (isinstance(config.stop_strings, list) and "" in config.stop_strings):
            raise ValueError("a stop string is empty, and every text ends with nothing")
        if (folder / _SETTINGS).is_file():
            _try(config, model, tokeniser)
        return config

    with refused_settings(folder, lambda: _refused_key(folder / _SETTINGS, tried)):
        return tried(own_settings(folder, model))


def refused_settings(folder: Path, key: Callable[[], str] = str) -> LibraryErrors:
    """Names the file of settings in whatever transformers raises about them, and what `key` finds to be the cause."""
    file, hint = folder / _SETTINGS, "correct the file, or remove it"

    def as_error(why: str) -> UsageError:
        named = key()
        return UsageError(f"{file}: {named}{' ' * bool(named)}cannot be used: {why}", hint=hint)

    return LibraryErrors(as_error)


def _refused_key(file: Path, tried: Callable[[GenerationConfig], GenerationConfig]) -> str:
    """Finds the key of a file of settings without which they are not refused. Empty where there is no single one."""
    given = read_object(file, limit=LARGEST_SETTINGS, finite=False)
    for key in sorted(given)[:_MOST_KEYS]:
        with suppress(ValueError), LibraryErrors(ValueError):
            tried(GenerationConfig.from_dict({other: value for other, value in given.items() if other != key}))
            return key
    return ""


def own_settings(folder: Path, model: PreTrainedModel) -> GenerationConfig:
    """Returns the settings in the model's folder, or those that its configuration gives. Raises what transformers raises."""
    if (folder / _SETTINGS).is_file():
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    assert model.generation_config is not None
    return model.generation_config


def _try(config: GenerationConfig, model: PreTrainedModel, tokeniser: Tokeniser) -> None:
    """Lets `generate` write two tokens by these settings, with logits that are all alike: it looks at some of them only when
    it needs them, which may be after hours. Raises what it raises."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"it asks for {mode.value.replace('_', ' ')}, but one token after another is written here")
    if config.guidance_scale not in (None, 1):
        raise ValueError("it asks for a second pass over each text without its prompt, and no memory is planned for that")
    embedding, called, tried = model.get_input_embeddings(), copy.copy(model), copy.deepcopy(config)
    tried.update(use_cache=False, max_new_tokens=2)
    logits = torch.zeros(1, 1, model.config.get_text_config().vocab_size)
    called.forward = lambda **_: CausalLMOutput(logits=logits.clone())
    with (
        holding(embedding, torch.empty(0, embedding.embedding_dim), padding=None), torch.no_grad(), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")  # of lengths, which are not those of the run
        called.generate(input_ids=torch.zeros(1, 1, dtype=torch.long), generation_config=tried, tokenizer=tokeniser.tokenizer)


@contextmanager
def naming_settings(model: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Names the file of settings inside, where one fails at a later token than was tried."""
    own = model._get_logits_processor

    def processors(*args: Any, **kwargs: Any) -> LogitsProcessorList:
        return _Named(folder, own(*args, **kwargs))

    vars(model)["_get_logits_processor"] = processors
    try:
        yield
    finally:
        del vars(model)["_get_logits_processor"]


class _Named(LogitsProcessorList):  # type: ignore[misc]
    def __init__(self, folder: Path, of_settings: LogitsProcessorList) -> None:
        super().__init__(of_settings)
        self._folder = folder

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for one in self:
            with refused_settings(self._folder, partial(str, type(one).__name__)):
                scores = LogitsProcessorList([one])(input_ids, scores, **kwargs)
        return scores


class _Shown(TextStreamer):  # type: ignore[misc]
    """Hands words to `show` as soon as they are whole."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._show(text)


class _Counted(BaseStreamer):  # type: ignore[misc]
    """Calls `step` for every position."""

    def __init__(self, step: Callable[[], None] | None) -> None:
        self._step = step

    def put(self, value: torch.Tensor) -> None:
        if self._step is not None:
            self._step()

    def end(self) -> None:
        pass
