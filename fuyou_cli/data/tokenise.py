"""Turns examples into tokens with a loss mask, using the checkpoint's own tokenizer. Runs in the worker only.

Prompt and completion are tokenised separately, as in generation. A conversation is rendered and tokenised as a whole, and what
the assistant says is found by characters, in one of two ways. A template may mark what the assistant generates; or two
renderings are compared: the conversation up to the question, with the prompt to answer it, is the beginning of the whole.
Marks are taken as characters: `assistant_masks` of transformers loses or prolongs them where a token's offsets leave out
blanks. Marks that transformers misplaces are not taken.

Templates differ in what they take: content as a text or in parts, arguments as an object or as JSON text. What one takes
wrongly is seen in its text: Python's notation of a list or an object, or JSON text inside JSON. Then it gets the other form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import pairwise, product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import parsed, read_object

from . import sandbox
from .formats import Chat, Example, RowError, Texts, Tokens
from .rows import Row
from .sandbox import LibraryErrors

PREVIEW_TOKENS = 400
LARGEST_SETTINGS = 16 << 20  # bytes of generation_config.json
LARGEST_SAMPLE = 1 << 22  # most characters of a sample that cannot be cut
_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
_TAG = re.compile(r"{%[-+]?\s*(\w+)(.*?)%}", re.DOTALL)
_MOST_COMPARED = 200  # answers of a conversation whose marks are compared: each costs three renderings
_TEXT_PARTS = ("text", "input_text", "output_text", None)  # types of a part that is a text
_REASONING = ("reasoning_content", "reasoning", "thinking")

Messages = Sequence[dict[str, Any]]
CharSpan = tuple[int, int]


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
        return next((special.group() for text in texts if self._special and (special := self._special.search(text))), None)

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
        encoded = []
        for example in examples:
            if self.eos_id is None and not example.bare and not all(learnt for _, learnt in example.parts):
                raise UsageError("the tokenizer has no end token (eos_token): the model would never learn to stop")
            pieces = [(next(ids), learnt) for _, learnt in example.parts]
            start, end, noted = self._frame(example, next((piece for piece, _ in pieces if piece), []), pieces[-1][0])
            pieces = [(start, example.parts[0][1]), *pieces, (end, example.parts[-1][1])]
            mask = np.repeat([learnt or target == "all" for _, learnt in pieces], [len(piece) for piece, _ in pieces])
            encoded.append(_encoded([token for piece, _ in pieces for token in piece], mask, noted))
        return encoded

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
        by_turn, unasked = self._conversations.by_prefixes(chat, spans.text, asked)
        for turn, (begin, end) in by_turn.items():
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


# ---- conversations: rendered by the chat template, and what of them the assistant says -------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """A rendered conversation and, by the template's marks, the characters that the assistant says; none: by prefixes.

    `turns` are the marks of each of the assistant's messages by its position, None where they cannot be told apart. `noted` are
    kinds of `rows.NOTES`.
    """

    chat: Chat  # as the template takes it
    text: str
    marks: Sequence[CharSpan] = ()
    turns: Mapping[int, Sequence[CharSpan]] | None = None
    noted: frozenset[str]


class Conversations:
    """Renders conversations and finds the assistant's text in them."""

    def __init__(self, tokenizer: Any, *, template: str) -> None:
        """Takes the template's name in errors."""
        self._tokenizer, self._template = tokenizer, template
        self._reserved = {"messages", "conversations", *signature(tokenizer.apply_chat_template).parameters}

    def render(self, chat: Chat, messages: Messages, **options: Any) -> str:
        """Renders, in a process that is watched: a template may never stop. Raises RowError where it refuses."""
        if reserved := sorted(self._reserved & chat.options.keys()):
            raise RowError(f"chat_template_kwargs has {reserved[0]}, which is not the row's to say")
        options |= {"tools": list(chat.tools) or None, "tokenize": False, **chat.options}
        text: str = self._limited(lambda: self._tokenizer.apply_chat_template(list(messages), **options))
        return text

    def _limited(self, work: Callable[[], Any]) -> Any:
        with LibraryErrors(self._refused):
            rendered = work()
        text = rendered if isinstance(rendered, str) else rendered[0]
        if len(text) > LARGEST_SAMPLE:
            raise RowError(
                f"{self._template} makes {len(text):,} characters of this conversation, more than {LARGEST_SAMPLE:,}"
            )
        return rendered

    def _refused(self, why: str) -> RowError:
        return RowError(f"{self._template} refuses this conversation: {why}")

    def taken(self, chat: Chat, **options: Any) -> tuple[Chat, str, set[str]]:
        """Returns a conversation in the first form that the template takes, its rendering, and kinds of `rows.NOTES`.

        Raises RowError where it takes none."""
        refusal: RowError | None = None
        for form, noted in _forms(chat):
            try:
                text = self.render(form, form.messages, **options)
                if (fault := self._fault(form, text)) is None:
                    return self._written(form, text, noted, options)
                raise fault
            except RowError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _written(self, chat: Chat, text: str, noted: set[str], options: dict[str, Any]) -> tuple[Chat, str, set[str]]:
        """Returns a conversation, in parts if the template writes nothing of a text and writes more so."""
        contents = [message.get("content") for message in chat.messages]
        answers = [content.strip() for content in contents if isinstance(content, str) and "</think>" not in content]
        if (written := sum(content in text for content in answers)) == len(answers):
            return chat, text, noted
        parted = replace(chat, messages=tuple(_spelt(message, _same, _parted) for message in chat.messages))
        try:
            parted_text = self.render(parted, parted.messages, **options)
        except RowError:
            return chat, text, noted
        is_more = sum(content in parted_text for content in answers) > written
        return (parted, parted_text, noted | {"parts_made"}) if is_more else (chat, text, noted)

    def _fault(self, chat: Chat, text: str) -> RowError | None:
        """Tells what the template has written as no model should learn it; None if nothing."""
        own: list[str] = []

        def wrote(notation: str) -> bool:
            if notation not in text:
                return False
            own[:] = own or ["\0".join(chat.texts())]
            return text.count(notation) > own[0].count(notation)  # beyond what a message itself says

        for number, message in enumerate(chat.messages, start=1):
            content = message.get("content")
            if isinstance(content, list) and content:
                whole = not all(isinstance(part, dict) for part in content)
                if any(map(wrote, map(repr, [content] if whole else content))):
                    why = "writes content in parts in Python's notation, and not all of its parts are texts"
                    return RowError(f"message {number}: {self._template} {why}: write the content as a text")
            for function in _called(message):
                name, arguments = function.get("name"), function.get("arguments")
                if wrote(repr(function)) or (isinstance(arguments, dict) and arguments and wrote(repr(arguments))):
                    why = "in Python's notation"
                elif _is_json(arguments) and any(map(wrote, {json.dumps(arguments), _in_json(arguments)})):
                    why = "as JSON text inside JSON"
                else:
                    continue
                what = f"message {number}: {self._template} writes the arguments of {name} {why}"
                return RowError(f"{what}: write them as an object of valid JSON, or take a template that writes JSON")
        return None

    def spans(self, chat: Chat) -> Spans:
        """Returns the conversation as the template takes it, and its marks. Raises RowError where the template refuses it."""
        chat, text, noted = self.taken(chat)
        noted |= chat.noted | _left_out(chat, text)
        by_prefixes = Spans(chat=chat, text=text, noted=frozenset(noted))
        marks, answers = self._marks(chat) if self._is_marked(chat) else [], chat.answers("all")
        if not marks:
            return by_prefixes
        turns = {turn: [mark] for turn, mark in zip(answers, marks, strict=True)} if len(answers) == len(marks) else None
        by_marks = replace(by_prefixes, marks=marks, turns=turns)
        if not answers or (turns is not None and self._follow_the_prompt(chat, text, marks)):
            return by_marks
        return self._compared(by_marks, by_prefixes, answers)

    def _is_marked(self, chat: Chat) -> bool:
        """Whether the template of this conversation marks anything: with tools it may be another one."""
        with LibraryErrors(lambda why: UsageError(f"{self._template} cannot be used: {why}")):
            return _GENERATION.search(self._tokenizer.get_chat_template(tools=list(chat.tools) or None)) is not None

    def _marks(self, chat: Chat) -> list[CharSpan]:
        """Returns the characters that the template marks, those that touch as one."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = list(chat.tools) or None
        messages = [{key: value for key, value in message.items() if value is not None} for message in chat.messages]
        _, found = self._limited(lambda: [made[0] for made in render_jinja_template(
            conversations=[messages], tools=tools, chat_template=self._tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True, **{**self._tokenizer.special_tokens_map, **chat.options},
        )])  # fmt: skip
        merged: list[CharSpan] = []
        for begin, end in sorted(found):
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            elif begin < end:
                merged.append((begin, end))
        return merged

    def _follow_the_prompt(self, chat: Chat, text: str, marks: Sequence[CharSpan]) -> bool:
        """Whether every mark begins where generation would: behind the text that asks for an answer."""
        try:
            asked = self.render(chat, chat.messages, add_generation_prompt=True)
        except RowError:
            return False
        header = asked.removeprefix(text)
        return header not in (asked, "") and all(text.endswith(header, 0, begin) for begin, _ in marks)

    def _compared(self, by_marks: Spans, by_prefixes: Spans, answers: Sequence[int]) -> Spans:
        """Compares marks with the answers that renderings show, and returns which way to take.

        What a template marks is its own choice, such as a header or the reasoning that its prompt begins. But inside a macro
        transformers misplaces marks.
        """
        chat, text = by_marks.chat, by_marks.text
        if self._marks_in_macro(chat):
            return replace(by_prefixes, noted=by_prefixes.noted | {"marks_misplaced"})
        if len(answers) > _MOST_COMPARED:
            return by_marks
        try:
            ends = {turn: end for turn, (_, end) in self.by_prefixes(chat, text, answers)[0].items()}
            headers = {turn: len(self._before(chat, turn, text)) for turn in answers}
        except RowError:  # it cannot be compared
            return by_marks
        turns = {turn: [mark for mark in by_marks.marks if headers[turn] <= mark[0] < ends[turn]] for turn in answers}
        noted = set(by_marks.noted)
        if sum(map(len, turns.values())) < len(by_marks.marks):
            noted.add("marks_of_others")
        if not all(turns.values()):
            noted.add("marks_missing")
        return replace(by_marks, turns=turns, noted=frozenset(noted))

    def _marks_in_macro(self, chat: Chat) -> bool:
        """Whether the template marks inside of a block whose output is not written where it stands."""
        depth = 0
        for tag in _TAG.finditer(self._tokenizer.get_chat_template(tools=list(chat.tools) or None)):
            name, words = tag.groups()
            if name == "generation" and depth:
                return True
            if name in ("macro", "call", "filter") or (name == "set" and "=" not in words):
                depth += 1
            elif name in ("endmacro", "endcall", "endfilter", "endset"):
                depth -= 1
        return False

    def by_prefixes(self, chat: Chat, whole: str, turns: Sequence[int]) -> tuple[dict[int, CharSpan], set[int]]:
        """Returns the characters of `whole` that each of the assistant's messages `turns` is, end-of-turn token included, and
        before which of them the template ignores `add_generation_prompt`, so that the beginning is found otherwise.

        Raises RowError if one cannot be located exactly."""
        by_turn, prompt, unasked = dict[int, CharSpan](), "", set[int]()
        for turn in turns:
            if turn == 0:
                raise RowError("the conversation begins with the assistant, which this chat template cannot mask")
            before = self.render(chat, chat.messages[:turn], add_generation_prompt=True)
            end = self._end_of_turn(chat, turn, whole) if whole.startswith(before) else None
            if end is None or end <= len(before):
                hint = "mark the turns with {% generation %} in a template"
                if turn < chat.answers("all")[-1]:
                    hint = f"set dataset.loss_on to last_assistant, or {hint}"
                raise RowError(f"the chat template renders message {turn + 1} differently as the chat grows; {hint}")
            if not (prompt and before.endswith(prompt)):
                prompt = before.removeprefix(self._before(chat, turn, whole))
            begin = len(before) if prompt else self._behind_header(chat, turn, whole, before)
            if begin > len(before):
                unasked.add(turn)
            by_turn[turn] = begin, end
        return by_turn, unasked

    def _before(self, chat: Chat, turn: int, whole: str) -> str:
        """Renders the messages before `turn` as the beginning of `whole`. A template may end whatever it renders with the end
        token (Phi 3), which is not there once more messages follow."""
        text = self.render(chat, chat.messages[:turn])
        return text if whole.startswith(text) else text.removesuffix(self._tokenizer.eos_token or "")

    def _behind_header(self, chat: Chat, turn: int, whole: str, before: str) -> int:
        """Returns where an answer begins if the template asks for none: behind what it writes before two others, too. Blanks
        alone are no header: the model writes them."""
        parted = isinstance(chat.messages[turn].get("content"), list)
        contents = ([{"type": "text", "text": letter}] if parted else letter for letter in "xy")
        others = (self.render(chat, [*chat.messages[:turn], {"role": "assistant", "content": said}]) for said in contents)
        common = takewhile(lambda letters: len(set(letters)) == 1, zip(whole, *others, strict=False))
        begin = sum(1 for _ in common)
        return begin if whole[len(before) : begin].strip() else len(before)

    def _end_of_turn(self, chat: Chat, turn: int, whole: str) -> int | None:
        """Finds where message `turn` ends in `whole`; None if that cannot be known.

        Usually the rendering up to it is the beginning of the whole. But a template may render a turn differently once others
        follow (it drops the thinking). Then the chat is rendered without the turn: both renderings end with the text after the
        turn.
        """
        after = self._before(chat, turn + 1, whole)
        if whole.startswith(after):
            return len(after)
        base = self._before(chat, turn, whole)
        try:
            without = self.render(chat, [*chat.messages[:turn], *chat.messages[turn + 1 :]])
        except RowError:  # a template may insist on turns that alternate
            return None
        tail = without.removeprefix(base)
        located = without.startswith(base) and whole.startswith(base) and tail and whole.endswith(tail)
        return len(whole) - len(tail) if located else None


def _forms(chat: Chat) -> Iterator[tuple[Chat, set[str]]]:
    """Yields a conversation as it is, then with arguments and content in other forms that say the same, and what those are."""
    yield chat, set()
    arguments = {"": _same, "arguments_read": _as_object, "arguments_written": _as_text}
    contents = {"": _same, "parts_joined": _joined, "parts_made": _parted}
    for (spelling, change_calls), (parting, change_content) in list(product(arguments.items(), contents.items()))[1:]:
        messages = tuple(_spelt(message, change_calls, change_content) for message in chat.messages)
        kinds = [kind for key, kind in (("content", parting), ("tool_calls", spelling), ("function_call", spelling))
                 if any(new.get(key) != old.get(key) for new, old in zip(messages, chat.messages, strict=True))]  # fmt: skip
        if kinds:
            yield replace(chat, messages=messages), set(kinds)


def _spelt(
    message: dict[str, object], change_calls: Callable[[object], object], change_content: Callable[[object], object]
) -> dict[str, object]:
    """Returns a message with content and the arguments of its calls in another form."""
    changed = dict(message)
    if "content" in message:
        changed["content"] = change_content(message["content"])
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [_recalled(call, change_calls) for call in calls]
    if isinstance(call := message.get("function_call"), dict):
        changed["function_call"] = _recalled(call, change_calls)
    return changed


def _recalled(call: dict[str, Any], spelt: Callable[[object], object]) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _recalled(function, spelt)}
    return {**call, "arguments": spelt(call["arguments"])} if "arguments" in call else call


def _joined(content: object) -> object:
    """Returns texts in parts as one text; anything else as it is."""
    if not isinstance(content, list):
        return content
    pieces = [part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part for part in content]
    texts = [text for text in pieces if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(content) else content


def _parted(content: object) -> object:
    """Returns a text as one part; anything else as it is."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _same(value: object) -> object:
    return value


def _as_object(arguments: object) -> object:
    """Returns the object that JSON text holds; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = parsed(arguments, finite=False)
    except UsageError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else _in_json(arguments)


def _in_json(arguments: object) -> str:
    """Returns arguments as JSON text, as the filter `tojson` of chat templates writes it."""
    return json.dumps(arguments, ensure_ascii=False)


def _is_json(arguments: object) -> bool:
    """Whether arguments are the JSON text of an object, valid or not."""
    return isinstance(arguments, str) and arguments.lstrip().startswith("{")


def _called(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns name and arguments of every call of a message."""
    calls = [*(message.get("tool_calls") or ()), *filter(None, [message.get("function_call")])]
    return [function for call in calls if isinstance(function := _function(call), dict)]


def _left_out(chat: Chat, text: str) -> set[str]:
    """Returns what the template writes nothing of, as kinds of `rows.NOTES`."""
    notes = set()
    answers = [chat.messages[turn] for turn in chat.answers("all")]
    if any(str(call.get("name")) not in text for message in answers for call in _called(message)):
        notes.add("calls_left_out")
    if any(
        isinstance(content := message.get("content"), str) and "</think>" not in content and content.strip() not in text
        for message in answers
    ):
        notes.add("content_left_out")
    names = [str(function.get("name")) for tool in chat.tools if isinstance(function := _function(tool), dict)]
    if names and not any(name in text for name in names):
        notes.add("tools_left_out")
    thought = next((answers[-1][key] for key in _REASONING if key in answers[-1]), "") if answers else ""
    if isinstance(thought, str) and thought.strip() not in text:
        notes.add("reasoning_left_out")
    return notes


def _function(tool: object) -> object:
    return tool.get("function", tool) if isinstance(tool, dict) else None
