"""Reads a row of data in the format that its columns show: as texts, a conversation or tokens.

`FORMATS` holds all of them. A new format needs a row there, a function that reads its rows, and its name in the recipe's
schema. A row is a dict. `columns` maps the format's own names to the data's names, e.g. {prompt: question, completion: answer}.

A column file gives every object the keys of all others, with null. So a key of null says nothing, at any depth of a message or
a tool: the same rows are the same examples whatever file holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import parsed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Columns = Mapping[str, str]
_Row = Mapping[str, object]
_MOST, _LONGEST = 9, 60  # most columns in a message, most characters of each
_UNLEARNT = -100  # the label that every loss ignores
_ROLES = {  # sharegpt's `from` -> the role in chat templates
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
_VARIABLES = "chat_template_kwargs"  # a column
_MARKS = ("loss_mask", "completion_mask", "assistant_masks")  # columns of 0 and 1 that say which tokens carry loss


class RowError(ValueError):
    """Says why a row does not fit its format. A caller that knows file and line turns it into a UsageError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Texts that follow one another with nothing between them, and whether each carries loss.

    Of a document cut into pieces, only the first piece gets the start token and only the last the end token. `bare` texts get
    neither: they hold their special tokens themselves.
    """

    parts: tuple[tuple[str, bool], ...]
    begins: bool = True
    ends: bool = True
    bare: bool = False

    def texts(self) -> Iterator[str]:
        """Yields all its texts."""
        return (text for text, _ in self.parts)

    @property
    def runs_together(self) -> bool:
        """Whether two texts meet without white space, as in "...in May?Natalia sold": seldom meant, so a note reports it."""
        pairs = () if self.bare else pairwise(self.texts())
        return any(prompt and answer and not (prompt[-1].isspace() or answer[0].isspace()) for prompt, answer in pairs)

    def answers_nothing(self, target: str) -> bool:
        """Whether an answer is asked for and has no text."""
        answers = [text for text, learnt in self.parts if learnt]
        return not self.bare and len(answers) < len(self.parts) and not any(map(str.strip, answers))

    @property
    def size(self) -> int:
        """Returns the number of characters."""
        return sum(map(len, self.texts()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A conversation for the tokenizer's chat template. `unlearnt` are the assistant's messages (by position) that carry no
    loss, whatever `loss_on` says. `prompt`: so many messages come before the completion. `options` are variables for
    the template. `noted` are kinds of `rows.NOTES`."""

    messages: tuple[dict[str, object], ...]
    tools: tuple[object, ...] = ()
    unlearnt: frozenset[int] = frozenset()
    prompt: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    noted: frozenset[str] = frozenset()
    ends: ClassVar[bool] = True
    bare: ClassVar[bool] = False
    runs_together: ClassVar[bool] = False

    def answers_nothing(self, target: str) -> bool:
        """Whether a message of the assistant that carries loss says nothing and calls no tool."""
        learnt = [turn for turn in self.answers(target) if turn not in self.unlearnt]
        contents = ([value for key, value in self.messages[turn].items() if key != "role"] for turn in learnt)
        return any(not any(map(str.strip, _texts(values))) for values in contents)

    def answers(self, target: str) -> list[int]:
        """Returns the positions of the assistant's messages that `target` means, those of `unlearnt` too."""
        answers = [turn for turn, message in enumerate(self.messages) if message["role"] == "assistant"]
        if target == "completion":
            return [turn for turn in answers if turn >= self.prompt]
        return answers[-1:] if target == "last_assistant" else answers

    def texts(self) -> Iterator[str]:
        """Yields all its texts, also nested ones and names of fields: contents in parts, tool calls."""
        yield from _texts([*self.messages, *self.tools])

    @property
    def size(self) -> int:
        """Returns the number of characters."""
        return sum(map(len, self.texts()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Tokens made elsewhere, and which of them carry loss."""

    ids: NDArray[np.int64]  # [n]
    learnt: NDArray[np.bool_]  # [n]
    ends: ClassVar[bool] = True
    bare: ClassVar[bool] = True
    runs_together: ClassVar[bool] = False

    def answers_nothing(self, target: str) -> bool:
        """Tells nothing: the tokens are not decoded."""
        return False

    def texts(self) -> Iterator[str]:
        """Yields nothing: the tokens are not decoded."""
        return iter(())

    @property
    def size(self) -> int:
        """Returns the number of tokens."""
        return len(self.ids)


Example = Texts | Chat | Tokens


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _cell(row: _Row, name: str, columns: Columns) -> str:
    column = columns.get(name, name)
    value = row.get(column)
    if isinstance(value, str):
        return value
    if value is None:
        raise RowError(f"the column {column} is {'null' if column in row else 'missing'}; {name} must be text")
    raise RowError(f"the column {column} is of type {type(value).__name__}; {name} must be text")


def _pair(row: _Row, columns: Columns) -> Texts | Chat:
    """Reads two texts, or as in TRL two lists of messages: then the assistant's messages of the completion are learnt."""
    names = [columns.get(name, name) for name in ("prompt", "completion")]
    if not any(isinstance(row.get(name), list) for name in names):
        return Texts(parts=((_cell(row, "prompt", columns), False), (_cell(row, "completion", columns), True)))
    noted = set[str]()
    (asked, unlearnt), (answer, also) = (_messages(row, name, noted) for name in names)
    many = len(asked)
    unlearnt |= {turn + many for turn in also}
    chat = replace(_talk(row, columns, [*asked, *answer], unlearnt, noted), prompt=many)
    if not chat.answers("completion"):
        raise RowError(f"the column {names[1]} has no message of the assistant, so nothing would be learnt")
    return chat


def _alpaca(row: _Row, columns: Columns) -> Texts:
    """Writes sections with headings, separated by a blank line: system text if any, instruction, input if any, response."""
    if row.get(columns.get("history", "history")):
        raise RowError("alpaca rows with a history are not supported: convert them to messages")
    sections = []
    for name, heading in (("system", ""), ("instruction", "### Instruction:\n"), ("input", "### Input:\n")):
        if name == "instruction" or row.get(columns.get(name, name)):
            sections.append(heading + _cell(row, name, columns))
    prompt = "\n\n".join([*sections, "### Response:\n"])
    return Texts(parts=((prompt, False), (_cell(row, "output", columns), True)))


def _segments(row: _Row, columns: Columns) -> Texts:
    """Reads texts with a label each that says whether it carries loss. The texts hold their own start and end tokens."""
    column = columns.get("segments", "segments")
    parts = []
    for number, segment in enumerate(_list(row, column, of="segments"), start=1):
        text, label = (segment.get("text"), segment.get("label")) if isinstance(segment, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(label, bool):
            raise RowError(f"segment {number} of {column} must have a text and a label of true or false")
        parts.append((text, label))
    return Texts(parts=tuple(parts), begins=False, bare=True)


def _tokenized(row: _Row, columns: Columns) -> Tokens:
    """Reads tokens and where loss is: labels, masks of 0 and 1, or neither (everywhere). Padding is left out."""
    import numpy as np  # here, because a plan looks at data and needs no numpy

    ids = _numbers(row, "input_ids", columns)
    assert ids is not None  # a required column: _numbers refuses a row without it
    learnt = np.ones(len(ids), np.bool_)
    for name in _MARKS:
        if (marks := _numbers(row, name, columns, like=ids)) is not None:
            learnt &= marks != 0
    if (labels := _numbers(row, "labels", columns, like=ids)) is not None:
        learnt &= labels != _UNLEARNT
        if (others := np.flatnonzero((labels != _UNLEARNT) & (labels != ids))).size:
            raise RowError(
                f"label {others[0] + 1} is {labels[others[0]]}, but its token is {ids[others[0]]}: a label is its own token or "
                f"{_UNLEARNT} (the loss shifts labels later)"
            )
    padding = _numbers(row, "attention_mask", columns, like=ids)
    kept = slice(None) if padding is None else padding != 0
    return Tokens(ids=ids[kept], learnt=learnt[kept])


def _numbers(row: _Row, name: str, columns: Columns, *, like: NDArray[np.int64] | None = None) -> NDArray[np.int64] | None:
    """Reads a column of whole numbers, as long as `like`. Returns None if an optional column is missing."""
    import numpy as np

    column = columns.get(name, name)
    values = row.get(column)
    if values is None and like is not None:
        return None
    kinds = (int,) if like is None else (int, bool)  # marks may be true and false, tokens may not
    if not isinstance(values, list) or not all(type(value) in kinds and abs(value) < 1 << 31 for value in values):
        raise RowError(f"the column {column} must be a list of whole numbers")
    if like is not None and len(values) != len(like):
        raise RowError(f"the column {column} has {len(values):,} numbers for {len(like):,} tokens")
    return np.asarray(values, np.int64)


def _list(row: _Row, column: str, *, of: str) -> list[object]:
    values = row.get(column)
    if not isinstance(values, list) or not values:
        raise RowError(f"the column {column} must be a list of {of} that is not empty")
    return values


def _conversation(name: str, row: _Row, columns: Columns) -> Chat:
    """Reads messages of role and content, or of sharegpt's from and value. A system text from its own column comes first."""
    noted = set[str]()
    messages, unlearnt = _messages(row, columns.get(name, name), noted)
    if row.get(columns.get("system", "system")) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _cell(row, "system", columns)})
        unlearnt = {number + 1 for number in unlearnt}
    return _talk(row, columns, messages, unlearnt, noted)


def _talk(row: _Row, columns: Columns, messages: list[dict[str, object]], unlearnt: set[int], noted: set[str]) -> Chat:
    """Makes the conversation of these messages, with the row's tools and, as in TRL, its variables for the chat template."""
    tools = _tools(row, columns.get("tools", "tools"), noted)
    options = _of_json(row.get(_VARIABLES) or {}, f"the column {_VARIABLES}")
    if not isinstance(options, dict):
        raise RowError(f"the column {_VARIABLES} must be an object")
    given = {name: value for name, value in options.items() if value is not None}
    return Chat(messages=tuple(messages), tools=tools, unlearnt=frozenset(unlearnt), options=given, noted=frozenset(noted))


def _messages(row: _Row, column: str, noted: set[str]) -> tuple[list[dict[str, object]], set[int]]:
    """Reads a list of messages, and which of them are not learnt."""
    messages, unlearnt = [], set()
    for number, turn in enumerate(_list(row, column, of="messages"), start=1):
        message = _message(turn, f"message {number} of {column}", noted)
        if not _is_learnt(message, f"message {number} of {column}"):
            unlearnt.add(number - 1)
        messages.append(message)
    return messages, unlearnt


def _message(turn: object, place: str, noted: set[str]) -> dict[str, object]:
    if not isinstance(turn, dict):
        raise RowError(f"{place} must be an object with role and content")
    message = {key: value if key == "tool_calls" else _filled(value) for key, value in turn.items() if value is not None}
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        if not isinstance(sender, str) or sender not in _ROLES:
            raise RowError(f"{place} is from {sender!r}; known are {', '.join(_ROLES)}")
        content = {"content": message.pop("value")} if "value" in message else {}
        message = {"role": _ROLES[sender], **content, **message}
    if not isinstance(message.get("role"), str):
        raise RowError(f"{place} has no role")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], place, noted)
    if not isinstance(message.get("content", "" if message.get("tool_calls") else None), str | list):
        raise RowError(f"{place} has no content")
    return message


def _calls(calls: object, place: str, noted: set[str]) -> list[dict[str, object]]:
    """Reads the tool calls of a message: a list of objects, or that as JSON text. Arguments stay as they are (`tokenise`
    gives them to the template as it takes them)."""
    parsed_calls = _of_json(calls, f"{place}: tool_calls")
    if not isinstance(parsed_calls, list) or not all(isinstance(call, dict) for call in parsed_calls):
        raise RowError(f"{place}: tool_calls must be a list of objects")
    return parsed_calls if isinstance(calls, str) else [_object(call, f"{place}: tool_calls", noted) for call in parsed_calls]


def _of_json(value: object, place: str) -> object:
    """Returns what a JSON text holds, and anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parsed(value, finite=False)
    except UsageError as error:
        raise RowError(f"{place}: {error.message}") from error


def _object(value: dict[str, object], place: str, noted: set[str]) -> dict[str, object]:
    """Returns a call or a tool without keys of null. Refuses what JSON has no notation for: a template would write the name of
    its type."""
    for inner in _within(value):
        if inner is not None and not isinstance(inner, str | int | float | dict | list):
            raise RowError(f"{place}: a value is of type {type(inner).__name__}, which JSON does not have: write it as text")
        if isinstance(inner, dict) and None in inner.values():
            noted.add("nulls")
    return {key: _filled(inner) for key, inner in value.items() if inner is not None}


def _within(value: object) -> Iterator[object]:
    yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _within(inner)


def _filled(value: object) -> object:
    """Returns a value without keys of null, at any depth. In a list, null is an element like any other."""
    if isinstance(value, dict):
        return {key: _filled(inner) for key, inner in value.items() if inner is not None}
    return [_filled(inner) for inner in value] if isinstance(value, list) else value


def _is_learnt(message: dict[str, object], place: str) -> bool:
    """Takes `train`, or `weight` with the same meaning, out of a message. Tells whether the assistant's message carries
    loss."""
    for key in ("train", "weight"):
        if key in message:
            learnt = message.pop(key)
            if learnt not in (0, 1):
                raise RowError(f"{place} has {key}: {learnt!r}; it must be {'true or false' if key == 'train' else '0 or 1'}")
            if message["role"] == "assistant":
                return bool(learnt)
            if learnt and key == "train":
                raise RowError(f"{place} has train: true, but its role is {message['role']}: only the assistant's carry loss")
    return True


def _tools(row: _Row, column: str, noted: set[str]) -> tuple[object, ...]:
    """Reads the tools of a conversation: a list, or a list as JSON text. One tool, or its parameters, may be JSON text too, as
    in column files, where tools of many shapes fit no type. In JSON text, null is meant."""
    place = f"the column {column}"
    given = row.get(column) or ()
    tools = _of_json(given, place) or ()
    if not isinstance(tools, list | tuple):
        raise RowError(f"{place} must be a list")
    return tuple(_tool(tool, f"{place}: tool {n}", noted, isinstance(given, str)) for n, tool in enumerate(tools, start=1))


def _tool(tool: object, place: str, noted: set[str], of_text: bool) -> dict[str, object]:
    parsed_tool = _of_json(tool, place)
    if not isinstance(parsed_tool, dict):
        raise RowError(f"{place} must be an object")
    if not (of_text or isinstance(tool, str)):
        parsed_tool = _object(parsed_tool, place, noted)
    function = parsed_tool.get("function", parsed_tool)
    if isinstance(function, dict) and isinstance(function.get("parameters"), str):
        function["parameters"] = _of_json(function["parameters"], f"{place}: parameters")
    return parsed_tool


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Describes a format: its columns, how a row is read, and what may carry loss. The first choice is that of `auto`."""

    read: Callable[[_Row, Columns], Example]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    losses: tuple[str, ...] = ("completion", "all")


_SPEAKERS, _MORE = ("assistant", "last_assistant", "all"), ("tools", "system")  # of conversations
FORMATS = {  # in the order of detection, the most specific first
    "tokenized": Format(
        read=_tokenized, required=("input_ids",), optional=("labels", "attention_mask", *_MARKS), losses=("marked", "all")
    ),
    "input_output": Format(read=_segments, required=("segments",), losses=("marked", "all")),
    "messages": Format(read=partial(_conversation, "messages"), required=("messages",), optional=_MORE, losses=_SPEAKERS),
    "sharegpt": Format(
        read=partial(_conversation, "conversations"), required=("conversations",), optional=_MORE, losses=_SPEAKERS
    ),
    "prompt_completion": Format(read=_pair, required=("prompt", "completion"), optional=("tools",)),
    "alpaca": Format(read=_alpaca, required=("instruction", "output"), optional=("input", "system", "history")),
    "text": Format(
        read=lambda row, columns: Texts(parts=((_cell(row, "text", columns), True),)), required=("text",), losses=("all",)
    ),
}


def choose_format(asked: str, present: frozenset[str], columns: Columns) -> str:
    """Returns the format of data with the columns `present`: the one asked for, or with `auto` the first that fits.

    Raises RowError if none fits or the mapping names an unknown column.
    """
    candidates = FORMATS if asked == "auto" else {asked: FORMATS[asked]}
    known = {name for candidate in candidates.values() for name in candidate.required + candidate.optional}
    unknown = sorted(set(columns) - known)
    if unknown:
        raise RowError(f"columns: {unknown[0]} is not a column of format {asked}; its columns are {', '.join(sorted(known))}")
    for name, candidate in candidates.items():
        missing = [column for needed in candidate.required if (column := columns.get(needed, needed)) not in present]
        if not missing and set(columns) <= {*candidate.required, *candidate.optional}:
            return name
    if asked == "auto":
        wanted = "; ".join(" + ".join(candidate.required) for candidate in FORMATS.values())
        raise RowError(f"no format fits these columns: {_listed(present)}; formats need: {wanted}")
    raise RowError(f"format {asked} needs the column {missing[0]}; the data has: {_listed(present)}")


def _listed(columns: Iterable[str]) -> str:
    """Lists some of the names, shortened to fit a line."""
    names = sorted(columns)
    listed = ", ".join(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in names[:_MOST]) or "none"
    return listed if len(names) <= _MOST else f"{listed} and {len(names) - _MOST} more"


def mapping_hint(present: Iterable[str]) -> str | None:
    """Tells how to map the columns if the data is nearly prompt_completion."""
    if {"question", "answer"} <= set(present):
        return "name the columns in the recipe: columns: {prompt: question, completion: answer}"
    return None


def loss_target(loss_on: str, format_name: str) -> str:
    """Returns what carries loss in this format: all, completion, assistant, last_assistant, or marked (by the rows
    themselves). Raises UsageError if `loss_on` does not fit the format."""
    allowed = FORMATS[format_name].losses
    if loss_on == "auto":
        return allowed[0]
    if loss_on not in allowed:
        raise UsageError(
            f"dataset.loss_on: {loss_on} does not fit data of format {format_name}",
            hint=f"use auto or one of: {', '.join(name for name in allowed if name != 'marked')}",
        )
    return loss_on


def read_example(row: _Row, format_name: str, columns: Columns) -> Example:
    """Reads the row as an example. Raises RowError naming the column that is missing or of the wrong type."""
    return FORMATS[format_name].read(row, columns)
