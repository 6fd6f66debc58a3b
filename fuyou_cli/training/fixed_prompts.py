"""Continues a recipe's fixed prompts between the steps of a run, so that people see what the model says by now.

Loop and choice of tokens are transformers' own, as in `generation`. The passes are those of an evaluation: all tokens so far
go through the model for each new one. So no keys and values are kept, and it takes no memory beside a step's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ..core.errors import UsageError
from ..core.paths import expanded
from ..data.batches import Sequences, lay_out
from ..data.cache import prompt_ids, read_template
from ..data.prompts import said, written
from ..data.tokenise import Tokeniser, load_tokenizer
from ..engine.forward_only import ForwardOnly
from ..engine.lookup import holding
from ..engine.row_lengths import alike
from ..recipe.schema import Recipe
from ..spec.model import ModelSpec
from ..spec.plan import Numerics
from .generation import Sampling, continued, naming_settings, settings
from .report import SampleReport

KEY = "eval.samples.prompts"
_OF_A_CHOICE = 16  # bytes per row and token of the vocabulary: logits and what transformers makes of them


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
    for number, found in enumerate(
        prompt_ids(places, tokenizer_dir, chat_template=text, pad_token=recipe.tokenizer.pad_token), start=1
    ):
        if not 0 < len(found) <= most:
            size = f"{len(found):,} tokens, and {asked.max_new_tokens:,} follow (eval.samples.max_new_tokens)"
            raise UsageError(
                f"{KEY}: prompt {number} has {size}; rows have at most {recipe.dataset.max_seq_len:,} (dataset.max_seq_len)",
                hint="shorten it, or lower max_new_tokens" if found else "the prompt has no token: write a longer one",
            )
        if max(found) >= rows:
            raise UsageError(f"{KEY}: prompt {number} has the token {max(found):,}, but the model has {rows:,}")
        ids.append(tuple(found))
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
        found: list[SampleReport] = []
        with self._forward.open():
            for rows in alike(self._model, list(map(len, self._prompts.ids)), new=self._prompts.new):
                for first in range(0, len(rows), self._rows):
                    found += self._group(rows[first : first + self._rows], step)
        return sorted(found, key=lambda sample: sample.number)

    def _group(self, group: Sequence[int], step: int) -> Iterator[SampleReport]:
        prompts, begin = self._prompts, time.monotonic()
        ids = [prompts.ids[number] for number in group]
        longest = max(map(len, ids))
        grown = self._grown(ids, longest)
        seconds = time.monotonic() - begin
        for number, one in zip(group, continued(grown, longest, prompts.config, prompts.tokeniser), strict=True):
            yield SampleReport(
                step=step, number=number + 1, prompt=prompts.texts[number], text=one.text, tokens=one.tokens, ended=one.ended,
                seconds=seconds / len(group),
            )  # fmt: skip

    def _grown(self, ids: Sequence[tuple[int, ...]], longest: int) -> torch.Tensor:
        """Returns the prompts, padded on the left, with what follows them: (rows, tokens) int64, in host memory."""
        prompts = self._prompts
        pad, new = prompts.tokeniser.pad_id, prompts.new
        padding = torch.tensor([longest - len(one) for one in ids])
        given = torch.tensor([[pad] * (longest - len(one)) + list(one) for one in ids])
        there = (torch.arange(longest) >= padding.unsqueeze(1)).long()
        # A copy that shares every module: `generate` calls its forward, and the passes the model's own.
        called, embedding = copy.copy(self._model), self._model.get_input_embeddings()
        called.forward = self._step(padding.tolist(), longest + new)
        nowhere = torch.empty(0, embedding.embedding_dim)  # `generate` sends ids to where the first parameter rests
        with holding(embedding, nowhere, padding=None), naming_settings(called, prompts.model_dir):
            grown: torch.Tensor = called.generate(
                input_ids=given, attention_mask=there, generation_config=prompts.config,
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
