"""Special tokens that stand in the data as text: a tokenizer reads "<|end|>" in a sentence as the end itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .formats import Chat, Example, Pair


class SpecialTexts:
    """Finds them in what a sample says, before a chat template adds its own."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder.values()
        names = {str(name) for name in (*tokenizer.all_special_tokens, *(token for token in added if token.special))}
        kept = () if getattr(tokenizer, "split_special_tokens", False) else sorted(names - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, kept))) if kept else None

    def first(self, example: Example) -> str | None:
        """The first special token in the sample's text, None where there is none."""
        if self._pattern is None:
            return None
        found = (self._pattern.search(text) for text in _texts(example))
        return next((match.group() for match in found if match), None)


def _texts(example: Example) -> Iterator[str]:
    if isinstance(example, Pair):
        yield from (example.prompt, example.completion)
    elif isinstance(example, Chat):
        yield from _strings([*example.messages, *example.tools])
    else:
        yield example.text


def _strings(value: object) -> Iterator[str]:
    """Every text in a message, however deep: contents in parts, calls of tools."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
