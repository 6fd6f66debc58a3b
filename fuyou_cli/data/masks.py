"""Renders conversations by the tokenizer's chat template, and finds which characters the assistant says. Runs in the worker.

They are found in one of two ways. A template may mark what the assistant generates; or two renderings are compared: the
conversation up to the question, with the prompt to answer it, is the beginning of the whole. Marks are taken as characters:
`assistant_masks` of transformers loses or prolongs them where a token's offsets leave out blanks. Marks that transformers
misplaces are not taken.

Templates differ in what they take: content as a text or in parts, arguments as an object or as JSON text. What one takes
wrongly is seen in its text: Python's notation of a list or an object, or JSON text inside JSON. Then it gets the other form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import product, takewhile
from typing import Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import parsed

from .formats import Chat, RowError
from .sandbox import LibraryErrors

LARGEST_SAMPLE = 1 << 22  # most characters of a sample that cannot be cut
_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
_TAG = re.compile(r"{%[-+]?\s*(\w+)(.*?)%}", re.DOTALL)
_MOST_COMPARED = 200  # answers of a conversation whose marks are compared: each costs three renderings
_TEXT_PARTS = ("text", "input_text", "output_text", None)  # types of a part that is a text
_REASONING = ("reasoning_content", "reasoning", "thinking")

Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """A rendered conversation and, by the template's marks, the characters that the assistant says; none: by prefixes.

    `turns` are the marks of each of the assistant's messages by its position, None where they cannot be told apart. `noted` are
    kinds of `rows.NOTES`.
    """

    chat: Chat  # as the template takes it
    text: str
    marks: Sequence[Span] = ()
    turns: Mapping[int, Sequence[Span]] | None = None
    noted: frozenset[str]


class Conversations:
    """Renders conversations and finds the assistant's text in them."""

    def __init__(self, tokenizer: Any, *, template: str) -> None:
        """Takes the template's name in errors."""
        self._tokenizer, self._template = tokenizer, template
        self._reserved = {"messages", "conversations", *signature(tokenizer.apply_chat_template).parameters}

    def render(self, chat: Chat, messages: Messages, **options: Any) -> str:
        """Renders, in a process that is watched: a template may never stop. Raises RowError where it refuses."""
        if taken := sorted(self._reserved & chat.options.keys()):
            raise RowError(f"chat_template_kwargs has {taken[0]}, which is not the row's to say")
        options |= {"tools": list(chat.tools) or None, "tokenize": False, **chat.options}
        text: str = self._limited(lambda: self._tokenizer.apply_chat_template(list(messages), **options))
        return text

    def _limited(self, work: Callable[[], Any]) -> Any:
        with LibraryErrors(self._refused):
            made = work()
        text = made if isinstance(made, str) else made[0]
        if len(text) > LARGEST_SAMPLE:
            raise RowError(
                f"{self._template} makes {len(text):,} characters of this conversation, more than {LARGEST_SAMPLE:,}"
            )
        return made

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
        said = [content.strip() for content in contents if isinstance(content, str) and "</think>" not in content]
        if (written := sum(content in text for content in said)) == len(said):
            return chat, text, noted
        parted = replace(chat, messages=tuple(_spelt(message, _same, _parted) for message in chat.messages))
        try:
            found = self.render(parted, parted.messages, **options)
        except RowError:
            return chat, text, noted
        is_more = sum(content in found for content in said) > written
        return (parted, found, noted | {"parts_made"}) if is_more else (chat, text, noted)

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

    def _marks(self, chat: Chat) -> list[Span]:
        """Returns the characters that the template marks, those that touch as one."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = list(chat.tools) or None
        messages = [{key: value for key, value in message.items() if value is not None} for message in chat.messages]
        _, found = self._limited(lambda: [made[0] for made in render_jinja_template(
            conversations=[messages], tools=tools, chat_template=self._tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True, **{**self._tokenizer.special_tokens_map, **chat.options},
        )])  # fmt: skip
        merged: list[Span] = []
        for begin, end in sorted(found):
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            elif begin < end:
                merged.append((begin, end))
        return merged

    def _follow_the_prompt(self, chat: Chat, text: str, marks: Sequence[Span]) -> bool:
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
            name, rest = tag.groups()
            if name == "generation" and depth:
                return True
            if name in ("macro", "call", "filter") or (name == "set" and "=" not in rest):
                depth += 1
            elif name in ("endmacro", "endcall", "endfilter", "endset"):
                depth -= 1
        return False

    def by_prefixes(self, chat: Chat, whole: str, turns: Sequence[int]) -> tuple[dict[int, Span], set[int]]:
        """Returns the characters of `whole` that each of the assistant's messages `turns` is, end-of-turn token included, and
        before which of them the template ignores `add_generation_prompt`, so that the beginning is found otherwise.

        Raises RowError if one cannot be located exactly."""
        found, prompt, unasked = dict[int, Span](), "", set[int]()
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
            found[turn] = begin, end
        return found, unasked

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
        rest = without.removeprefix(base)
        located = without.startswith(base) and whole.startswith(base) and rest and whole.endswith(rest)
        return len(whole) - len(rest) if located else None


def _forms(chat: Chat) -> Iterator[tuple[Chat, set[str]]]:
    """Yields a conversation as it is, then with arguments and content in other forms that say the same, and what those are."""
    yield chat, set()
    arguments = {"": _same, "arguments_read": _as_object, "arguments_written": _as_text}
    contents = {"": _same, "parts_joined": _joined, "parts_made": _parted}
    for (spelling, spelt), (parting, said) in list(product(arguments.items(), contents.items()))[1:]:
        messages = tuple(_spelt(message, spelt, said) for message in chat.messages)
        kinds = [kind for key, kind in (("content", parting), ("tool_calls", spelling), ("function_call", spelling))
                 if any(new.get(key) != old.get(key) for new, old in zip(messages, chat.messages, strict=True))]  # fmt: skip
        if kinds:
            yield replace(chat, messages=messages), set(kinds)


def _spelt(
    message: dict[str, object], spelt: Callable[[object], object], said: Callable[[object], object]
) -> dict[str, object]:
    """Returns a message with content and the arguments of its calls in another form."""
    changed = dict(message)
    if "content" in message:
        changed["content"] = said(message["content"])
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [_recalled(call, spelt) for call in calls]
    if isinstance(call := message.get("function_call"), dict):
        changed["function_call"] = _recalled(call, spelt)
    return changed


def _recalled(call: dict[str, Any], spelt: Callable[[object], object]) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _recalled(function, spelt)}
    return {**call, "arguments": spelt(call["arguments"])} if "arguments" in call else call


def _joined(content: object) -> object:
    """Returns texts in parts as one text; anything else as it is."""
    if not isinstance(content, list):
        return content
    found = [part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part for part in content]
    texts = [text for text in found if isinstance(text, str)]
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
        found = parsed(arguments, finite=False)
    except UsageError:
        return arguments
    return found if isinstance(found, dict) else arguments


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
    return [found for call in calls if isinstance(found := _function(call), dict)]


def _left_out(chat: Chat, text: str) -> set[str]:
    """Returns what the template writes nothing of, as kinds of `rows.NOTES`."""
    found = set()
    answers = [chat.messages[turn] for turn in chat.answers("all")]
    if any(str(call.get("name")) not in text for message in answers for call in _called(message)):
        found.add("calls_left_out")
    if any(
        isinstance(content := message.get("content"), str) and "</think>" not in content and content.strip() not in text
        for message in answers
    ):
        found.add("content_left_out")
    names = [str(function.get("name")) for tool in chat.tools if isinstance(function := _function(tool), dict)]
    if names and not any(name in text for name in names):
        found.add("tools_left_out")
    thought = next((answers[-1][key] for key in _REASONING if key in answers[-1]), "") if answers else ""
    if isinstance(thought, str) and thought.strip() not in text:
        found.add("reasoning_left_out")
    return found


def _function(tool: object) -> object:
    return tool.get("function", tool) if isinstance(tool, dict) else None
