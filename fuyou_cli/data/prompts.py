"""Reads what a model is to continue: a text, or a conversation up to where the assistant speaks.

A row has the columns of data for training, and its answer may be missing: it is left out, so that a file of examples will do.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError

from .data_files import kind_of_rows
from .formats import Chat, RowError, Texts, read_example
from .reading import read_rows

Prompt = Texts | Chat
_ANSWERS = {"messages": "", "conversations": "", "prompt": "completion", "instruction": "output"}  # column -> of the answer
_FORMATS = {
    "messages": "messages", "conversations": "sharegpt", "prompt": "prompt_completion", "instruction": "alpaca",
}  # fmt: skip


def read_prompts(file: Path, *, chat: bool) -> list[tuple[str, dict[str, Any], Prompt]]:
    """Returns place, row and prompt of every row of a file. `chat`: a prompt that is a text is a user's message.

    Raises UsageError that names the file, and the line."""
    if not file.is_file() or kind_of_rows(file) is None:
        what = "no such file" if not file.exists() else "not a file of rows"
        raise UsageError(f"{file}: {what}", hint='give a file of lines such as {"prompt": "..."} with the suffix .jsonl')
    found = []
    for place, row in read_rows(file):
        try:
            found.append((place, row, prompt_of(row, chat=chat)))
        except RowError as error:
            raise UsageError(f"{place}: {error}") from None
    if not found:
        raise UsageError(f"{file}: the file has no rows", hint='give lines such as {"prompt": "..."}')
    return found


def prompt_of(row: dict[str, Any], *, chat: bool) -> Prompt:
    """Returns the prompt of a row. Raises RowError where it has none."""
    column = next((name for name in _FORMATS if name in row), None)
    if column is None:
        raise RowError(f"the row has none of the columns {', '.join(_FORMATS)}")
    if column == "prompt" and isinstance(row[column], list):  # of messages
        row, column = {"messages": row[column], "tools": row.get("tools")}, "messages"
    answer = _ANSWERS[column]
    example = read_example({**row, answer: ""} if answer else row, _FORMATS[column], {})
    if isinstance(example, Chat):
        messages = example.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise RowError("the conversation has no message to answer")
        return replace(example, messages=messages, unlearnt=frozenset())
    assert isinstance(example, Texts)
    text = "".join(text for text, learnt in example.parts if not learnt)
    return said(text) if chat else written(text)


def as_data(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Returns a prompt as JSON can hold it; `as_prompt` makes the same of it."""
    if isinstance(prompt, Texts):
        return "Texts", {"parts": prompt.parts, "begins": prompt.begins, "ends": prompt.ends, "bare": prompt.bare}
    return "Chat", {"messages": prompt.messages, "tools": prompt.tools, "options": dict(prompt.options)}


def as_prompt(kind: str, fields: dict[str, Any]) -> Prompt:
    if kind == "Texts":
        return Texts(**{**fields, "parts": tuple((text, learnt) for text, learnt in fields["parts"])})
    return Chat(messages=tuple(fields["messages"]), tools=tuple(fields["tools"]), options=fields["options"])


def written(text: str) -> Texts:
    """Returns the text that the model goes on writing."""
    return Texts(parts=((text, True),), ends=False)


def said(text: str) -> Chat:
    """Returns the conversation that begins with this message of a user."""
    return Chat(messages=({"role": "user", "content": text},))
