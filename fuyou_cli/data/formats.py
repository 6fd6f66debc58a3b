"""Reads a row of data by the format that its columns show, as texts one after another or as a conversation.

`FORMATS` has all of them. A new one is a row there, the function that reads its rows, and its name in the recipe's schema.
Pure Python: a row is a dict.
`columns` maps the format's own names to those of the data, e.g. {prompt: question, completion: answer}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from fuyou_cli.core.errors import UsageError

Columns = Mapping[str, str]
_Row = Mapping[str, object]
_MOST, _LONGEST = 9, 60  # columns that are told, characters of each


class RowError(ValueError):
    """Refuses a row as its format. Whoever knows the file and the line turns it into a UsageError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Holds texts that follow one another with nothing between them, each with whether it is to be learnt.

    Of a document in pieces only the first piece gets the start token, only the last the end token."""

    parts: tuple[tuple[str, bool], ...]
    begins: bool = True
    ends: bool = True

    def texts(self) -> Iterator[str]:
        """Yields every text in it."""
        return (text for text, _ in self.parts)

    @property
    def runs_together(self) -> bool:
        """Finds whether no white space parts two texts, as in "...in May?Natalia sold": seldom what is meant, so it is said."""
        return any(one and two and not (one[-1].isspace() or two[0].isspace()) for one, two in pairwise(self.texts()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Holds a conversation for the tokenizer's chat template."""

    messages: tuple[dict[str, object], ...]
    tools: tuple[object, ...] = ()
    ends: ClassVar[bool] = True
    runs_together: ClassVar[bool] = False

    def texts(self) -> Iterator[str]:
        """Yields every text in it, names of fields included, however deep: contents in parts, calls of tools."""
        yield from _texts([*self.messages, *self.tools])


Example = Texts | Chat


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


def _document(row: _Row, columns: Columns) -> Texts:
    return Texts(parts=((_cell(row, "text", columns), True),))


def _pair(row: _Row, columns: Columns) -> Texts:
    return Texts(parts=((_cell(row, "prompt", columns), False), (_cell(row, "completion", columns), True)))


def _alpaca(row: _Row, columns: Columns) -> Texts:
    """Writes headed sections, one blank line apart: system text if any, instruction, input if any, response."""
    if row.get(columns.get("history", "history")):
        raise RowError("alpaca rows with a history are not supported: convert them to messages")
    sections = []
    for name, heading in (("system", ""), ("instruction", "### Instruction:\n"), ("input", "### Input:\n")):
        if name == "instruction" or row.get(columns.get(name, name)):
            sections.append(heading + _cell(row, name, columns))
    prompt = "\n\n".join([*sections, "### Response:\n"])
    return Texts(parts=((prompt, False), (_cell(row, "output", columns), True)))


def _chat(row: _Row, columns: Columns) -> Chat:
    column = columns.get("messages", "messages")
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise RowError(f"the column {column} must be a list of messages that is not empty")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise RowError(f"message {number} of {column} must be an object with role and content")
        # Columnar files fill keys that other rows have with null: those say nothing about this message.
        message = {key: value for key, value in turn.items() if value is not None}
        if not isinstance(message.get("role"), str):
            sharegpt = ": this looks like sharegpt (from, value), which is not built yet; rename to role and content"
            raise RowError(f"message {number} of {column} has no role" + sharegpt * ("from" in message))
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise RowError(f"message {number} of {column} has no content")
        messages.append(message)
    tools = row.get(columns.get("tools", "tools")) or ()
    if not isinstance(tools, list | tuple):
        raise RowError("the column tools must be a list")
    return Chat(messages=tuple(messages), tools=tuple(tools))


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Holds how a row of the format is read, its columns, and what may carry loss in it: the first is what `auto` means."""

    read: Callable[[_Row, Columns], Example]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    losses: tuple[str, ...] = ("completion", "all")


FORMATS = {  # in the order of detection, the most specific first
    "messages": Format(read=_chat, required=("messages",), optional=("tools",), losses=("assistant", "last_assistant", "all")),
    "prompt_completion": Format(read=_pair, required=("prompt", "completion")),
    "alpaca": Format(read=_alpaca, required=("instruction", "output"), optional=("input", "system", "history")),
    "text": Format(read=_document, required=("text",), losses=("all",)),
}


def choose_format(asked: str, present: frozenset[str], columns: Columns) -> str:
    """Returns the format of data that has the columns `present`: the one asked for, or with `auto` the first that fits.

    Raises RowError when none fits or the mapping names an unknown column."""
    candidates = FORMATS if asked == "auto" else {asked: FORMATS[asked]}
    known = {name for candidate in candidates.values() for name in candidate.required + candidate.optional}
    unknown = sorted(set(columns) - known)
    if unknown:
        raise RowError(f"columns: {unknown[0]} is no column of format {asked}; known are {', '.join(sorted(known))}")
    for name, candidate in candidates.items():
        missing = [column for one in candidate.required if (column := columns.get(one, one)) not in present]
        if not missing and set(columns) <= {*candidate.required, *candidate.optional}:
            return name
    if asked == "auto":
        wanted = "; ".join(" + ".join(candidate.required) for candidate in FORMATS.values())
        raise RowError(f"no format fits the columns found ({_listed(present)}); wanted are {wanted}")
    raise RowError(f"format {asked} needs the column {missing[0]}; found are: {_listed(present)}")


def _listed(columns: Iterable[str]) -> str:
    """Lists some of their names, each as far as it fits a line."""
    names = sorted(columns)
    told = ", ".join(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in names[:_MOST]) or "none"
    return told if len(names) <= _MOST else f"{told} and {len(names) - _MOST} more"


def mapping_hint(present: Iterable[str]) -> str | None:
    """Says how to name the columns of data that is nearly prompt_completion."""
    if {"question", "answer"} <= set(present):
        return "name the columns in the recipe: columns: {prompt: question, completion: answer}"
    return None


def loss_target(loss_on: str, format_name: str) -> str:
    """Returns what carries loss in this format: all, completion, assistant or last_assistant. Raises UsageError for a pair that
    means nothing."""
    allowed = FORMATS[format_name].losses
    if loss_on == "auto":
        return allowed[0]
    if loss_on not in allowed:
        raise UsageError(
            f"dataset.loss_on: {loss_on} does not fit data of format {format_name}",
            hint=f"use auto or one of: {', '.join(allowed)}",
        )
    return loss_on


def read_example(row: _Row, format_name: str, columns: Columns) -> Example:
    """Reads the row as an example. Raises RowError naming the column that is missing or has the wrong type."""
    return FORMATS[format_name].read(row, columns)
