"""Special tokens that stand in the data as text: a tokenizer reads "<|end|>" in a sentence as the end itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .formats import Example, Text
from .packing import Counts


class SpecialTokens:
    """Counts samples that have one in what they say, before a chat template adds its own; a document in pieces counts once."""

    def __init__(self, tokenizer: Any, counts: Counts) -> None:
        added = tokenizer.added_tokens_decoder.values()
        names = {str(name) for name in (*tokenizer.all_special_tokens, *(token for token in added if token.special))}
        kept = () if getattr(tokenizer, "split_special_tokens", False) else sorted(names - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, kept))) if kept else None
        self._counts, self._seen = counts, False

    def count(self, place: str, example: Example) -> None:
        if self._pattern is None:
            return
        texts = () if self._seen else example.texts()
        match = next((found for text in texts if (found := self._pattern.search(text))), None)
        if match is not None:
            self._counts.special += 1
            self._counts.special_example = self._counts.special_example or f"{Path(place).name} {match.group()!r}"
        self._seen = isinstance(example, Text) and not example.ends and (self._seen or match is not None)
