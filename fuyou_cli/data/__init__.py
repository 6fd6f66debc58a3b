"""Turns the data named in a recipe into the padded batches of a run. The trainer's process needs only numpy for it."""

from .cache import find, prepare, size_of
from .holding_back import Part
from .rows import NO_LOSS, Batch, DataSummary, Rows, collate
from .sampler import Sampler
from .sources import MissingDataError, look
from .stream import Stream

__all__ = [
    "NO_LOSS", "Batch", "DataSummary", "MissingDataError", "Part", "Rows", "Sampler", "Stream", "collate", "find", "look",
    "prepare", "size_of",
]  # fmt: skip
