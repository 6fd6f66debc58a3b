"""Reads and tokenises in the process that asks, by the worker's own entries: its own process takes a second to start.
`Labelled` are rows given by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuyou_cli.data import cache, worker
from fuyou_cli.data.batches import Sequences


def serve(request: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Stands in for `cache._serve`, and replies as over its pipe."""
    asked, told = json.loads(cache.request_line(request)), list[str]()
    work = worker.continue_prompts if "prompts" in asked else worker.build
    worker._answered(lambda: work(asked), told.append)
    return cache.read_reply(told[0])


class Labelled(Sequences):
    """Rows of which the last `scored` tokens of each are labels."""

    def __init__(self, sequences: Sequence[Sequence[int]], scored: Sequence[int]) -> None:
        super().__init__(sequences)
        self._scored = scored

    def mask(self, index: int) -> NDArray[np.uint8]:
        mask = super().mask(index)
        mask[len(mask) - self._scored[index] :] = 1
        return mask
