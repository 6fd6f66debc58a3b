"""Turns examples into tokens with a loss mask, using the checkpoint's own tokenizer.

Runs in the worker only. Prompt and completion are tokenised separately, as in generation. A conversation is rendered and
tokenised as a whole, and its mask is found by characters (`masks`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import read_object

from . import sandbox
from .formats import Chat, Example, RowError, Texts, Tokens
from .masks import LARGEST_SAMPLE as LARGEST_SAMPLE
from .masks import Conversations, Spans
from .packing import Row
from .sandbox import LibraryErrors

PREVIEW_TOKENS = 400
LARGEST_SETTINGS = 16 << 20  # bytes of generation_config.json


class Encoded(NamedTuple):
    """The tokens of an example, where loss is, and what was noted about it: kinds of `rows.NOTES`, and the way in which
    the mask of a conversation was found."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    noted: frozenset[str] = frozenset()


def load_tokenizer(directory: Path, *, chat_template: str | None, pad_token: str | None) -> Any:
    """Loads the tokenizer of a checkpoint directory. Downloads nothing and runs no code of the checkpoint. Raises UsageError
    for one that needs its own."""
    from transformers import AutoTokenizer

    def unloadable(why: str) -> UsageError:
        if own:
            return UsageError(
                f"tokenizer: {directory} cannot be loaded without code of its own ({own}), and code of a tokenizer is never "
                "run, whatever model.trust_remote_code says",
                hint="if its tokenizer.json is all it needs, copy the tokenizer's files, write `tokenizer_class: "
                "PreTrainedTokenizerFast` in place of `auto_map` and the class in tokenizer_config.json, and name the copy in "
                "tokenizer.name_or_path",
            )
        hint = "check that its files are complete, or set tokenizer.name_or_path to another"
        return UsageError(f"tokenizer: {directory} cannot be loaded: {why}", hint=hint)

    own = sandbox.own_class(directory)
    with LibraryErrors(unloadable):
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if pad_token is not None:
        pad_id = tokenizer.convert_tokens_to_ids(pad_token)
        if pad_id is None or (pad_id == tokenizer.unk_token_id and pad_token != tokenizer.unk_token):
            raise UsageError(f"tokenizer.pad_token: {pad_token!r} is not in the vocabulary of {directory}")
        tokenizer.pad_token = pad_token
    return tokenizer


class Tokeniser:
    """Makes tokens and mask of examples. `target` says what carries loss: see `formats.loss_target`."""

    def __init__(self, tokenizer: Any, *, directory: Path, template_key: str | None = None) -> None:
        """Takes `template_key`, a key of the recipe, if the chat template is not the tokenizer's own."""
        self.tokenizer = tokenizer
        self.template = f"the chat template of {template_key or directory}"
        self._directory = directory
        self.eos_id: int | None = tokenizer.eos_token_id
        self.stop_ids = frozenset(_stop_ids(tokenizer, directory))
        self._special = _special_tokens(tokenizer)
        self._conversations = Conversations(tokenizer, template=self.template)
        with LibraryErrors(lambda why: UsageError(f"tokenizer: {directory} fails: {why}")):
            self._starts = self._start_tokens()

    @property
    def pad_id(self) -> int:
        """Returns the token that fills short rows. It never carries loss, so any id will do if the tokenizer names none."""
        known = (self.tokenizer.pad_token_id, self.eos_id, 0)
        return next(value for value in known if value is not None)

    def encode(self, examples: Sequence[Example], *, target: str) -> list[Encoded]:
        """Makes tokens int32 [n] and mask uint8 [n] of each example (all of one kind). Raises RowError on a sample that
        cannot be rendered or tokenised."""
        if isinstance(examples[0], Chat):
            return [self._chat(example, target) for example in examples if isinstance(example, Chat)]
        if isinstance(examples[0], Tokens):
            return [self._given(example, target) for example in examples if isinstance(example, Tokens)]
        return self._texts([example for example in examples if isinstance(example, Texts)], target)

    def prompt(self, example: Texts | Chat) -> list[int]:
        """Makes the tokens that a model is to continue: as in training, up to where the answer begins. Raises RowError on one
        that cannot be rendered or tokenised."""
        if isinstance(example, Texts):
            return [int(token) for token in self._texts([example], "all")[0][0]]
        if not self.tokenizer.chat_template:
            hint = "put a chat_template.jinja beside it, or give texts to continue"
            raise UsageError(f"{self._directory}: the tokenizer has no chat template, but a conversation needs one", hint=hint)
        return self._ids([self._conversations.taken(example, add_generation_prompt=True)[1]])[0]

    @cached_property
    def _vocabulary(self) -> int:
        """Returns the bound of the token ids. There may be holes below it."""
        return max(len(self.tokenizer), *(int(token) + 1 for token in self.tokenizer.get_vocab().values()))

    def _given(self, example: Tokens, target: str) -> Encoded:
        """Returns given tokens unchanged, after a check that each is in the vocabulary."""
        size = len(self.tokenizer)
        if len(example.ids) and example.ids.max() >= size:
            size = self._vocabulary
        if (strange := np.flatnonzero((example.ids < 0) | (example.ids >= size))).size:
            at = strange[0]
            raise RowError(
                f"token {at + 1:,} is {example.ids[at]}, outside the vocabulary of {self._directory} (0 to {size - 1:,}): "
                "was another tokenizer used?"
            )
        return _encoded(example.ids, np.ones(len(example.ids)) if target == "all" else example.learnt)

    def special_in(self, example: Example) -> str | None:
        """Finds a special token in the example's own text, before a chat template adds more. A tokenizer reads "<|end|>" in
        a sentence as the real end token."""
        texts = () if self._special is None or example.bare else example.texts()
        return next((found.group() for text in texts if self._special and (found := self._special.search(text))), None)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        with LibraryErrors(self._untokenised):
            encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return encoded

    def _untokenised(self, why: str) -> RowError:
        return RowError(f"the tokenizer {self._directory} cannot tokenise this sample: {why}")

    def _start_tokens(self) -> list[int]:
        """Finds what this tokenizer puts before a text: its start token, or nothing."""
        plain, framed = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        for begin in range(len(framed) - len(plain) + 1):
            if framed[begin : begin + len(plain)] == plain:
                return list(framed[:begin])
        return []

    def _texts(self, examples: list[Texts], target: str) -> list[Encoded]:
        ids = iter(self._ids([text for example in examples for text in example.texts()]))
        made = []
        for example in examples:
            if self.eos_id is None and not example.bare and not all(learnt for _, learnt in example.parts):
                raise UsageError("the tokenizer has no end token (eos_token): the model would never learn to stop")
            pieces = [(next(ids), learnt) for _, learnt in example.parts]
            start, end, noted = self._frame(example, next((piece for piece, _ in pieces if piece), []), pieces[-1][0])
            pieces = [(start, example.parts[0][1]), *pieces, (end, example.parts[-1][1])]
            mask = np.repeat([learnt or target == "all" for _, learnt in pieces], [len(piece) for piece, _ in pieces])
            made.append(_encoded([one for piece, _ in pieces for one in piece], mask, noted))
        return made

    def _frame(self, example: Texts, first: list[int], last: list[int]) -> tuple[list[int], list[int], set[str]]:
        """Returns the start and end tokens to put around an example, whose first and last text are these tokens, and says which
        of them it has itself."""
        start = self._starts if example.begins else []
        end = [] if self.eos_id is None or example.bare or not example.ends else [self.eos_id]
        noted = set[str]()
        if start and first[: len(start)] == start:
            start, noted = [], noted | {"own_start"}
        if end and self.eos_id in last:
            after = last[len(last) - last[::-1].index(self.eos_id) :]
            if not after or not self.tokenizer.decode(after).strip():  # a line break may follow
                end, noted = [], noted | {"own_end"}
        return start, end, noted

    def _chat(self, chat: Chat, target: str) -> Encoded:
        if not self.tokenizer.chat_template:
            raise UsageError(
                "the tokenizer has no chat template, but conversations need one",
                hint="set tokenizer.chat_template to a .jinja file, or use a tokenizer that has one",
            )
        if not self.tokenizer.is_fast:
            raise UsageError("the loss mask of conversations needs a fast tokenizer (with a tokenizer.json)")
        spans = self._conversations.spans(chat)
        ids, places = self._placed(spans.text)
        mask, noted = (self._by_marks if spans.marks else self._by_prefixes)(spans, places, target, ids)
        ends = [*self.stop_ids, *self._starts]
        if (np.isin(ids[1:], ends) & (ids[1:] == ids[:-1])).any() and self.special_in(chat):
            noted |= {"doubled"}
        return _encoded(ids, mask, spans.noted | noted)

    def _placed(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns tokens [n] and the characters [n, 2] that each is. A post-processor may trim blanks off them, so it is left
        out: beside that it only adds start and end tokens, which templates write."""
        inner = self.tokenizer.backend_tokenizer
        with LibraryErrors(self._untokenised):
            kept, inner.post_processor = inner.post_processor, None
            try:
                encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            finally:
                inner.post_processor = kept
        places = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        return np.asarray(encoded["input_ids"], np.int64), places

    def _by_marks(
        self, spans: Spans, places: NDArray[np.int64], target: str, ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], set[str]]:
        """Takes the mask from the template, which marks what the assistant generates."""
        chat, turns, marks = spans.chat, spans.turns, spans.marks
        answers, meant = chat.answers("all"), chat.answers(target)
        excluded = {turn for turn in answers if turn in chat.unlearnt or (turn not in meant and target != "all")}
        if turns is None and target == "last_assistant" and not chat.unlearnt:
            marks = marks[-1:]
        elif turns is None and excluded:
            raise RowError(
                f"{self.template} marks {len(marks)} texts, but the assistant has {len(answers)} messages: it is unclear which "
                f"message {'`train: false` excludes' if chat.unlearnt else 'belongs to the prompt'}"
            )
        unlearnt = {mark for turn in excluded for mark in (turns or {}).get(turn, ())}
        mask = np.full(len(ids), int(target == "all"), np.uint8)
        for begin, end in unlearnt if target == "all" else [mark for mark in marks if mark not in unlearnt]:
            within = np.flatnonzero((places[:, 1] > begin) & (places[:, 0] < end))
            if within.size:
                mask[within[0] : within[-1] + 1] = target != "all"
        return mask, {"marks"}

    def _by_prefixes(
        self, spans: Spans, places: NDArray[np.int64], target: str, ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], set[str]]:
        """Takes the mask from renderings of the conversation's beginnings."""
        chat, noted, everything = spans.chat, {"prefixes"}, target == "all"
        mask = np.full(len(ids), int(everything), np.uint8)
        asked = [turn for turn in chat.answers(target) if (turn in chat.unlearnt) == everything]
        found, unasked = self._conversations.by_prefixes(chat, spans.text, asked)
        for turn, (begin, end) in found.items():
            within = (places[:, 0] >= begin) & (places[:, 0] < end)
            if (across := (places[:, 0] < begin) & (places[:, 1] > begin)).any():
                within |= across & (turn in unasked)  # what is before is no prompt of its own
                noted |= set() if turn in unasked else {"border"}
            learnt = np.flatnonzero(within)
            stops = np.flatnonzero(np.isin(ids[learnt], list(self.stop_ids)))
            # A template may add something after the stop token, such as a line break: no model generates it.
            mask[learnt[: stops[-1] + 1] if stops.size else learnt] = not everything
        return mask, noted | ({"unasked"} if unasked else set())


def decode_pieces(tokenizer: Any, row: Row, *, at_most: int = PREVIEW_TOKENS) -> list[tuple[str, bool]]:
    """Decodes the first tokens of a sample into runs (text, carries loss), special tokens shown. So a person sees what is
    learnt. Nothing predicts the first token, so it is shown without loss."""
    tokens, mask = row[0][:at_most], row[1][:at_most].astype(bool)
    mask[:1] = False
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    pieces = [(tokenizer.decode(tokens[a:b].tolist(), skip_special_tokens=False), bool(mask[a])) for a, b in pairwise(cuts)]
    more = len(row[0]) - at_most
    return [*pieces, (f" ... ({more:,} more tokens)", False)] if more > 0 else pieces


def _encoded(ids: Any, mask: Any, noted: Collection[str] = ()) -> Encoded:
    return Encoded(np.asarray(ids, np.int32), np.asarray(mask, np.uint8), frozenset(noted))


def _special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Makes a pattern of the tokens that the tokenizer never splits; None if there are none."""
    added = tokenizer.added_tokens_decoder.values()
    names = {str(name) for name in (*tokenizer.all_special_tokens, *(token for token in added if token.special))} - {""}
    if not names or getattr(tokenizer, "split_special_tokens", False):
        return None
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def _stop_ids(tokenizer: Any, directory: Path) -> Iterator[int]:
    """Yields the tokens that end a generation: the tokenizer's, and those the checkpoint adds (often the end of a turn)."""
    if tokenizer.eos_token_id is not None:
        yield tokenizer.eos_token_id
    file = directory / "generation_config.json"
    if file.is_file():
        hint = "correct the file, or remove it"
        with LibraryErrors(lambda why: UsageError(f"{file}: cannot be read: {why}", hint=hint)):
            named = read_object(file, limit=LARGEST_SETTINGS, finite=False, hint=hint).get("eos_token_id")
            ids = named if isinstance(named, list) else [] if named is None else [named]
            if not all(isinstance(number, int) for number in ids):
                raise ValueError("eos_token_id is neither a token id nor a list of them")
        yield from ids
