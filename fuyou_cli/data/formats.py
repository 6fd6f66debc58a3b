"""What a row of data means: the four formats, found by their columns, read into one of three kinds of example.

Pure Python, no libraries: a row is a dict, an example is text, a pair or a conversation. `columns` maps the format's
own names to those of the data, e.g. {prompt: question, completion: answer}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fuyou_cli.core.errors import UsageError

# Required and optional columns; the order is that of detection, the most specific first.
REQUIRED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "messages": ("tools",),
    "prompt_completion": (),
    "alpaca": ("input", "system", "history"),
    "text": (),
}
_MOST, _LONGEST = 9, 60  # columns that are told, characters of each
NOT_BUILT = {"sharegpt": "messages", "tokenized": "text"}  # with what to convert to
LOSS_CHOICES: dict[str, tuple[str, ...]] = {  # the first is what `auto` means
    "messages": ("assistant", "last_assistant", "all"),
    "prompt_completion": ("completion", "all"),
    "alpaca": ("completion", "all"),
    "text": ("all",),
}


class RowError(ValueError):
    """A row is not usable as its format. Whoever knows the file and the line turns it into a UsageError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A document, or a piece of a long one: only the first piece gets the start token, only the last the end token."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A prompt and the completion to learn, both taken as they are: nothing is put between them."""

    prompt: str
    completion: str

    @property
    def runs_together(self) -> bool:
        """Whether no white space parts the two, as in "...in May?Natalia sold": seldom what is meant, so it is said."""
        whole = self.prompt and self.completion
        return bool(whole) and not (self.prompt[-1].isspace() or self.completion[0].isspace())


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A conversation for the tokenizer's chat template."""

    messages: tuple[dict[str, object], ...]
    tools: tuple[object, ...] = field(default=())


Example = Text | Pair | Chat


def choose_format(asked: str, present: frozenset[str], columns: Mapping[str, str]) -> str:
    """The format of data that has the columns `present`: the one asked for, or with `auto` the first whose columns are
    all there. Raises RowError when none fits or the mapping names an unknown column."""
    if asked in NOT_BUILT:
        raise RowError(f"format: {asked} is not built yet; convert the data to {NOT_BUILT[asked]}")
    if asked != "auto" and asked not in REQUIRED:
        raise RowError(f"format: {asked} is unknown; use auto or one of {', '.join(REQUIRED)}")
    candidates = tuple(REQUIRED) if asked == "auto" else (asked,)
    known = {name for candidate in candidates for name in REQUIRED[candidate] + OPTIONAL[candidate]}
    unknown = sorted(set(columns) - known)
    if unknown:
        raise RowError(f"columns: {unknown[0]} is no column of format {asked}; known are {', '.join(sorted(known))}")
    for candidate in candidates:
        if all(columns.get(name, name) in present for name in REQUIRED[candidate]):
            mapped_elsewhere = set(columns) - set(REQUIRED[candidate] + OPTIONAL[candidate])
            if not mapped_elsewhere:
                return candidate
    found = _listed(present)
    if asked == "auto":
        wanted = "; ".join(" + ".join(names) for names in REQUIRED.values())
        raise RowError(f"no format fits the columns found ({found}); wanted are {wanted}")
    missing = [columns.get(name, name) for name in REQUIRED[asked] if columns.get(name, name) not in present]
    raise RowError(f"format {asked} needs the column {missing[0]}; found are: {found}")


def _listed(columns: Iterable[str]) -> str:
    """Some of their names, each as far as it fits a line."""
    names = sorted(columns)
    told = ", ".join(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in names[:_MOST]) or "none"
    return told if len(names) <= _MOST else f"{told} and {len(names) - _MOST} more"


def mapping_hint(present: Iterable[str]) -> str | None:
    """How to name the columns of data that is nearly prompt_completion."""
    if {"question", "answer"} <= set(present):
        return "name the columns in the recipe: columns: {prompt: question, completion: answer}"
    return None


def loss_target(loss_on: str, format_name: str) -> str:
    """What carries loss in this format: all, completion, assistant or last_assistant. Raises UsageError for a pair that
    means nothing."""
    allowed = LOSS_CHOICES[format_name]
    if loss_on == "auto":
        return allowed[0]
    if loss_on not in allowed:
        raise UsageError(
            f"dataset.loss_on: {loss_on} does not fit data of format {format_name}",
            hint=f"use auto or one of: {', '.join(allowed)}",
        )
    return loss_on


def read_example(row: Mapping[str, object], format_name: str, columns: Mapping[str, str]) -> Example:
    """The row as an example. Raises RowError naming the column that is missing or has the wrong type."""
    if format_name == "messages":
        return _chat(row, columns)
    if format_name == "prompt_completion":
        return Pair(prompt=_text(row, "prompt", columns), completion=_text(row, "completion", columns))
    if format_name == "alpaca":
        return _alpaca(row, columns)
    return Text(text=_text(row, "text", columns))


def _text(row: Mapping[str, object], name: str, columns: Mapping[str, str]) -> str:
    column = columns.get(name, name)
    value = row.get(column)
    if isinstance(value, str):
        return value
    if value is None:
        raise RowError(f"the column {column} is {'null' if column in row else 'missing'}; {name} must be text")
    raise RowError(f"the column {column} is of type {type(value).__name__}; {name} must be text")


def _alpaca(row: Mapping[str, object], columns: Mapping[str, str]) -> Pair:
    """Headed sections, one blank line apart: system text if any, instruction, input if any, response."""
    if row.get(columns.get("history", "history")):
        raise RowError("alpaca rows with a history are not supported: convert them to messages")
    sections = []
    for name, heading in (("system", ""), ("instruction", "### Instruction:\n"), ("input", "### Input:\n")):
        if name == "instruction" or row.get(columns.get(name, name)):
            sections.append(heading + _text(row, name, columns))
    prompt = "\n\n".join([*sections, "### Response:\n"])
    return Pair(prompt=prompt, completion=_text(row, "output", columns))


def _chat(row: Mapping[str, object], columns: Mapping[str, str]) -> Chat:
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
            raise RowError(f"message {number} of {column} has no role" + _sharegpt_advice(message))
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise RowError(f"message {number} of {column} has no content")
        messages.append(message)
    tools = row.get(columns.get("tools", "tools")) or ()
    if not isinstance(tools, list | tuple):
        raise RowError("the column tools must be a list")
    return Chat(messages=tuple(messages), tools=tuple(tools))


def _sharegpt_advice(message: Mapping[str, object]) -> str:
    if "from" in message:
        return ": this looks like sharegpt (from, value), which is not built yet; rename to role and content"
    return ""
