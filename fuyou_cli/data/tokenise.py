"""Turns examples into tokens with a loss mask, using the checkpoint's own tokenizer.

Runs in the worker only. Prompt and completion are tokenised separately, as in generation. A conversation is rendered and
tokenised as a whole, and its mask is found by characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import read_object

from . import sandbox
from .formats import Chat, Example, RowError, Texts, Tokens
from .packing import Row
from .sandbox import LibraryErrors

LARGEST_SAMPLE = 1 << 22  # most characters of a sample that cannot be cut
PREVIEW_TOKENS = 400
_LARGEST_SETTINGS = 16 << 20  # bytes of generation_config.json
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


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
        with LibraryErrors(lambda why: UsageError(f"tokenizer: {directory} fails: {why}")):
            self._starts = self._start_tokens()

    @property
    def pad_id(self) -> int:
        """Returns the token that fills short rows. It never carries loss, so any id will do if the tokenizer names none."""
        known = (self.tokenizer.pad_token_id, self.eos_id, 0)
        return next(value for value in known if value is not None)

    def encode(self, examples: Sequence[Example], *, target: str) -> list[Row]:
        """Makes tokens int32 [n] and mask uint8 [n] of each example (all of one kind). Raises RowError on a sample that
        cannot be rendered or tokenised."""
        if isinstance(examples[0], Chat):
            return self._chats([example for example in examples if isinstance(example, Chat)], target)
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
        return self._ids([self._render(example, example.messages, add_generation_prompt=True)])[0]

    def _given(self, example: Tokens, target: str) -> Row:
        """Returns given tokens unchanged, after a check that each is in the vocabulary."""
        size = len(self.tokenizer)
        if (strange := np.flatnonzero((example.ids < 0) | (example.ids >= size))).size:
            at = strange[0]
            raise RowError(
                f"token {at + 1:,} is {example.ids[at]}, outside the vocabulary of {self._directory} (0 to {size - 1:,}): "
                "was another tokenizer used?"
            )
        return _row(example.ids, np.ones(len(example.ids)) if target == "all" else example.learnt)

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

    def _texts(self, examples: list[Texts], target: str) -> list[Row]:
        ids = iter(self._ids([text for example in examples for text in example.texts()]))
        end = [] if self.eos_id is None else [self.eos_id]
        rows = []
        for example in examples:
            if self.eos_id is None and not example.bare and not all(learnt for _, learnt in example.parts):
                raise UsageError("the tokenizer has no end token (eos_token): the model would never learn to stop")
            pieces = [(self._starts if example.begins else [], example.parts[0][1])]
            pieces += [(next(ids), learnt) for _, learnt in example.parts]
            pieces += [(end if example.ends and not example.bare else [], example.parts[-1][1])]
            mask = np.repeat([learnt or target == "all" for _, learnt in pieces], [len(piece) for piece, _ in pieces])
            rows.append(_row([one for piece, _ in pieces for one in piece], mask))
        return rows

    def _chats(self, chats: list[Chat], target: str) -> list[Row]:
        if not self.tokenizer.chat_template:
            raise UsageError(
                "the tokenizer has no chat template, but conversations need one",
                hint="set tokenizer.chat_template to a .jinja file, or use a tokenizer that has one",
            )
        with LibraryErrors(lambda why: UsageError(f"{self.template} cannot be used: {why}")):
            marked = _GENERATION.search(self.tokenizer.get_chat_template()) is not None
        if not self.tokenizer.is_fast and not marked:
            raise UsageError("the loss mask of conversations needs a fast tokenizer (with a tokenizer.json)")
        return [self._marked(chat, target) if marked else self._by_prefixes(chat, target) for chat in chats]

    def _render(self, chat: Chat, messages: Sequence[dict[str, object]], **options: Any) -> str:
        """Renders within limits: a template is a program and may never stop writing."""
        try:
            with sandbox.memory_limit():
                text: str = self._apply(chat, messages, tokenize=False, **options)
        except MemoryError:
            most = f"{sandbox.TEMPLATE_BYTES >> 20} MiB"
            raise RowError(f"{self.template} takes more than {most} for this conversation") from None
        if len(text) > LARGEST_SAMPLE:
            raise RowError(f"{self.template} makes {len(text):,} characters of this conversation, more than {LARGEST_SAMPLE:,}")
        return text

    def _apply(self, chat: Chat, messages: Sequence[dict[str, object]], **options: Any) -> Any:
        with LibraryErrors(lambda why: RowError(f"{self.template} refuses this conversation: {why}")):
            return self.tokenizer.apply_chat_template(list(messages), tools=list(chat.tools) or None, **options)

    def _marked(self, chat: Chat, target: str) -> Row:
        """Takes the mask from the template, which marks what the assistant generates."""
        self._render(chat, chat.messages)  # checks the size first: tokenising takes much more memory than the text
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._apply(chat, chat.messages, **options)
        mask = np.asarray(encoded["assistant_masks"], np.int8)
        begins, ends = (np.flatnonzero(np.diff(mask, prepend=0, append=0) == edge) for edge in (1, -1))
        turns = _assistant_turns(chat)
        if chat.unlearnt and len(begins) != len(turns):
            raise RowError(
                f"{self.template} marks {len(begins)} texts, but the assistant has {len(turns)} messages: it is unclear which "
                "message `train: false` excludes"
            )
        if target == "all":
            mask[:] = 1
        elif target == "last_assistant" and mask.any():
            mask[: begins[-1]] = 0
        for turn in chat.unlearnt:
            mask[begins[turns.index(turn)] : ends[turns.index(turn)]] = 0
        return _row(encoded["input_ids"], mask)

    def _by_prefixes(self, chat: Chat, target: str) -> Row:
        whole = self._render(chat, chat.messages)
        with LibraryErrors(self._untokenised):
            encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begins = np.asarray([begin for begin, _ in encoded["offset_mapping"]], np.int64)
        ids = np.asarray(encoded["input_ids"], np.int64)
        everything = target == "all"
        mask = np.full(len(begins), int(everything), np.uint8)
        turns = _assistant_turns(chat)[-1:] if target == "last_assistant" else _assistant_turns(chat)
        asked = [turn for turn in turns if (turn in chat.unlearnt) == everything]
        for begin, end in self._spans(chat, whole, asked):
            within = np.flatnonzero((begins >= begin) & (begins < end))
            stops = np.flatnonzero(np.isin(ids[within], list(self.stop_ids)))
            # A template may add something after the stop token, such as a line break: no model generates it.
            mask[within[: stops[-1] + 1] if stops.size else within] = not everything
        return _row(ids, mask)

    def _spans(self, chat: Chat, whole: str, turns: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields characters [begin, end) of `whole` that are the assistant's messages `turns`, end-of-turn token included.
        Raises RowError if one cannot be located exactly."""
        for turn in turns:
            if turn == 0:
                raise RowError("the conversation begins with the assistant, which this chat template cannot mask")
            before = self._render(chat, chat.messages[:turn], add_generation_prompt=True)
            end = self._end_of_turn(chat, turn, whole) if whole.startswith(before) else None
            if end is None or end <= len(before):
                hint = "set dataset.loss_on to last_assistant, or mark the turns with {% generation %} in a template"
                raise RowError(f"the chat template renders message {turn + 1} differently as the chat grows; {hint}")
            yield len(before), end

    def _end_of_turn(self, chat: Chat, turn: int, whole: str) -> int | None:
        """Finds where message `turn` ends in `whole`; None if that cannot be known.

        Usually the rendering up to it is the beginning of the whole. But a template may render a turn differently once others
        follow (it drops the thinking). Then the chat is rendered without the turn: both renderings end with the text after the
        turn.
        """
        after = self._render(chat, chat.messages[: turn + 1])
        if whole.startswith(after):
            return len(after)
        base = self._render(chat, chat.messages[:turn])
        try:
            without = self._render(chat, [*chat.messages[:turn], *chat.messages[turn + 1 :]])
        except RowError:  # a template may insist on turns that alternate
            return None
        rest = without.removeprefix(base)
        located = without.startswith(base) and whole.startswith(base) and rest and whole.endswith(rest)
        return len(whole) - len(rest) if located else None


def _assistant_turns(chat: Chat) -> list[int]:
    return [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]


def decode_pieces(tokenizer: Any, row: Row, *, at_most: int = PREVIEW_TOKENS) -> list[tuple[str, bool]]:
    """Decodes the first tokens of a sample into runs (text, carries loss), special tokens shown. So a person sees what is
    learnt. Nothing predicts the first token, so it is shown without loss."""
    tokens, mask = row[0][:at_most], row[1][:at_most].astype(bool)
    mask[:1] = False
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    pieces = [(tokenizer.decode(tokens[a:b].tolist(), skip_special_tokens=False), bool(mask[a])) for a, b in pairwise(cuts)]
    more = len(row[0]) - at_most
    return [*pieces, (f" ... ({more:,} more tokens)", False)] if more > 0 else pieces


def _row(ids: Any, mask: Any) -> Row:
    return np.asarray(ids, np.int32), np.asarray(mask, np.uint8)


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
            named = read_object(file, limit=_LARGEST_SETTINGS, finite=False, hint=hint).get("eos_token_id")
            ids = named if isinstance(named, list) else [] if named is None else [named]
            if not all(isinstance(number, int) for number in ids):
                raise ValueError("eos_token_id is neither a token id nor a list of them")
        yield from ids
