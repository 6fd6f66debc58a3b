"""One sample as text, cut where its loss mask changes, so that a person can see what will be learnt."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from .packing import Row

PREVIEW_TOKENS = 400

Pieces = tuple[tuple[str, bool], ...]


def decode_pieces(tokenizer: Any, row: Row, *, at_most: int = PREVIEW_TOKENS) -> Pieces:
    """(text, carries loss) runs of the first tokens of a sample, special tokens shown. The first token is predicted by
    nothing and shown without loss."""
    tokens, mask = row[0][:at_most], row[1][:at_most].astype(bool)
    mask[:1] = False
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    pieces = []
    for begin, end in pairwise(cuts):
        text = tokenizer.decode(tokens[begin:end].tolist(), skip_special_tokens=False)
        pieces.append((text, bool(mask[begin])))
    if len(row[0]) > at_most:
        pieces.append((f" ... ({len(row[0]) - at_most:,} more tokens)", False))
    return tuple(pieces)
