"""Continues a recipe's fixed prompts between the steps of a run, so that people see what the model says by now; and what
`fuyou generate` shares with that: settings, and reading what was generated.

Loop and choice of tokens are transformers' own. The passes are those of an evaluation: all tokens so far go through the model
for each new one. So no keys and values are kept, and it takes no memory beside a step's.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutput

from ..core.errors import UsageError
from ..core.json_files import read_object
from ..core.paths import expanded
from ..data.batches import Sequences, lay_out
from ..data.cache import prompt_ids, read_template
from ..data.reading import said, written
from ..data.sandbox import LibraryErrors
from ..data.tokenise import LARGEST_SETTINGS, Tokeniser, load_tokenizer
from ..engine.attention import alike
from ..engine.cutting import holding
from ..engine.forward_only import ForwardOnly
from ..recipe.schema import Recipe
from ..spec.model import ModelSpec
from ..spec.plan import Numerics
from .report import SampleReport

KEY = "eval.samples.prompts"
_OF_A_CHOICE = 16  # bytes per row and token of the vocabulary: logits and what transformers makes of them
_SETTINGS = "generation_config.json"
_MOST_KEYS = 256  # of that file: transformers knows 80


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedPrompts:
    """Holds a recipe's prompts as tokens, and the tokenizer that made them."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    new: int  # tokens to write after each, at most
    tokeniser: Tokeniser
    config: GenerationConfig
    model_dir: Path  # whose file of settings `config` goes by


def fixed_prompts(recipe: Recipe, model: PreTrainedModel, *, model_dir: Path, tokenizer_dir: Path) -> FixedPrompts | None:
    """Tokenises the prompts of a recipe; None if it has none. Raises UsageError for one that the model cannot continue."""
    asked, template = recipe.eval.samples, recipe.tokenizer.chat_template
    if asked is None:
        return None
    text = None if template is None else read_template(expanded(template, key="tokenizer.chat_template"))
    tokenizer = load_tokenizer(tokenizer_dir, chat_template=text, pad_token=recipe.tokenizer.pad_token)
    if asked.chat and not tokenizer.chat_template:
        raise UsageError(
            f"eval.samples.chat: the tokenizer in {tokenizer_dir} has no chat template",
            hint="set eval.samples.chat=false, or tokenizer.chat_template to a .jinja file",
        )
    key = None if template is None else "tokenizer.chat_template"
    tokeniser = Tokeniser(tokenizer, directory=tokenizer_dir, template_key=key)
    most = recipe.dataset.max_seq_len - asked.max_new_tokens
    rows = int(model.get_input_embeddings().weight.shape[0])
    given = [said(prompt) if asked.chat else written(prompt) for prompt in asked.prompts]
    places = [(f"{KEY}: prompt {number}", prompt) for number, prompt in enumerate(given, start=1)]
    ids = []
    for number, ids_of in enumerate(
        prompt_ids(places, tokenizer_dir, chat_template=text, pad_token=recipe.tokenizer.pad_token), start=1
    ):
        if not 0 < len(ids_of) <= most:
            size = f"{len(ids_of):,} tokens, and {asked.max_new_tokens:,} follow (eval.samples.max_new_tokens)"
            raise UsageError(
                f"{KEY}: prompt {number} has {size}; rows have at most {recipe.dataset.max_seq_len:,} (dataset.max_seq_len)",
                hint="shorten it, or lower max_new_tokens" if ids_of else "the prompt has no token: write a longer one",
            )
        if max(ids_of) >= rows:
            raise UsageError(f"{KEY}: prompt {number} has the token {max(ids_of):,}, but the model has {rows:,}")
        ids.append(tuple(ids_of))
    config = settings(model_dir, model, tokeniser, Sampling())
    config.update(max_new_tokens=asked.max_new_tokens, use_cache=False)
    return FixedPrompts(
        texts=asked.prompts, ids=tuple(ids), new=asked.max_new_tokens, tokeniser=tokeniser, config=config, model_dir=model_dir
    )


def rows_at_once(model: ModelSpec, *, most: int, vocabulary: int) -> int:
    """Returns how many rows, at most `most`, have room for their logits in the memory of a step's pass over the head."""
    room = max(stage.backward_peak for stage in model.stages if stage.kind == "head")
    return max(1, min(most, room // (_OF_A_CHOICE * vocabulary)))


class Continuations:
    """Continues the prompts with the weights as they are between two steps."""

    def __init__(
        self, prompts: FixedPrompts, forward: ForwardOnly, model: PreTrainedModel, numerics: Numerics, *, rows: int,
        one_shape: bool,
    ) -> None:  # fmt: skip
        """`rows`: prompts at once. `one_shape`: of all passes, for blocks that are compiled anew for each."""
        self._prompts, self._forward, self._model, self._rows = prompts, forward, model, rows
        widest = max(map(len, prompts.ids)) + prompts.new
        self._numerics = replace(numerics, padding="step", width_step=widest) if one_shape else numerics

    def run(self, step: int) -> list[SampleReport]:
        """Continues every prompt after `step` steps. Raises what a callback of the executor raises."""
        samples: list[SampleReport] = []
        with self._forward.open():
            for rows in alike(self._model, list(map(len, self._prompts.ids)), new=self._prompts.new):
                for first in range(0, len(rows), self._rows):
                    samples += self._group(rows[first : first + self._rows], step)
        return sorted(samples, key=lambda sample: sample.number)

    def _group(self, group: Sequence[int], step: int) -> Iterator[SampleReport]:
        prompts, begin = self._prompts, time.monotonic()
        ids = [prompts.ids[number] for number in group]
        longest = max(map(len, ids))
        grown = self._grown(ids, longest)
        seconds = time.monotonic() - begin
        for number, text in zip(group, continued(grown, longest, prompts.config, prompts.tokeniser), strict=True):
            yield SampleReport(
                step=step, number=number + 1, prompt=prompts.texts[number], text=text.text, tokens=text.tokens,
                ended=text.ended, seconds=seconds / len(group),
            )  # fmt: skip

    def _grown(self, ids: Sequence[tuple[int, ...]], longest: int) -> torch.Tensor:
        """Returns the prompts, padded on the left, with what follows them: (rows, tokens) int64, in host memory."""
        prompts = self._prompts
        pad, new = prompts.tokeniser.pad_id, prompts.new
        padding = torch.tensor([longest - len(prompt) for prompt in ids])
        given = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in ids])
        mask = (torch.arange(longest) >= padding.unsqueeze(1)).long()
        # A copy that shares every module: `generate` calls its forward, and the passes the model's own.
        called, embedding = copy.copy(self._model), self._model.get_input_embeddings()
        called.forward = self._step(padding.tolist(), longest + new)
        nowhere = torch.empty(0, embedding.embedding_dim)  # `generate` sends ids to where the first parameter rests
        with holding(embedding, nowhere, padding=None), naming_settings(called, prompts.model_dir):
            grown: torch.Tensor = called.generate(
                input_ids=given, attention_mask=mask, generation_config=prompts.config,
                tokenizer=prompts.tokeniser.tokenizer,
            )  # fmt: skip
        if grown.shape[1] < longest + new:
            self._forward.stop_ahead()
        return grown

    def _step(self, padding: Sequence[int], end: int) -> Callable[..., CausalLMOutput]:
        """Returns a forward over all tokens so far, of which `padding` fill up each row's left. `end`: tokens of a row that
        ends by its length."""
        pad_id, numerics = self._prompts.tokeniser.pad_id, self._numerics

        def forward(*, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
            tokens = input_ids.shape[1]
            rows = Sequences([of_row[left:] for of_row, left in zip(input_ids.tolist(), padding, strict=True)])
            batch = lay_out(rows, range(len(padding)), pad_id=pad_id, numerics=numerics)
            at = [(place.row, place.end - 1) for place in batch.places]
            return CausalLMOutput(logits=self._forward.next_logits(batch, at, last=tokens == end - 1).unsqueeze(1))

        return forward


# ---- settings, and what was generated -----------------------------------------------------------------------------------


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


def continued(grown: torch.Tensor, begin: int, config: GenerationConfig, tokeniser: Tokeniser) -> list[Continued]:
    """Reads what `generate` wrote from position `begin` on, up to each row's end token or stop string. `grown`: int64
    [rows, tokens]."""
    ends = config.eos_token_id
    known, texts = ends if isinstance(ends, list) else [] if ends is None else [ends], list[Continued]()
    for row, stop in zip(grown[:, begin:].tolist(), _stops(grown, begin, config, tokeniser), strict=True):
        places = [place for place, token in enumerate(row) if token in known]
        at = min(places if stop is None else [*places, stop], default=None)
        kept = row if at is None else row[: at + 1]
        text = tokeniser.tokenizer.decode(kept, skip_special_tokens=True)
        texts.append(Continued(text=text, tokens=len(kept), ended="length" if at is None else "end"))
    return texts


def _stops(grown: torch.Tensor, begin: int, config: GenerationConfig, tokeniser: Tokeniser) -> list[int | None]:
    """Finds where behind `begin` each row completes one of the stop strings, by the check that ended it: `generate` fills up
    a row that has ended, and does not say where."""
    places: list[int | None] = [None] * len(grown)
    if config.stop_strings is None:
        return places
    completes = StopStringCriteria(tokeniser.tokenizer, config.stop_strings)
    for place in range(grown.shape[1] - begin):
        for row, done in enumerate(completes(grown[:, : begin + place + 1], None).tolist()):
            places[row] = place if done and places[row] is None else places[row]
    return places


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
        # A least length beyond what is asked for: then each text is as long as asked.
        warnings.filterwarnings("ignore", "Unfeasible length constraints")
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
        for processor in self:
            with refused_settings(self._folder, partial(str, type(processor).__name__)):
                scores = LogitsProcessorList([processor])(input_ids, scores, **kwargs)
        return scores
