"""Data: from files named in the recipe to the padded batch of a step. The trainer's side needs numpy alone."""

from .batches import NO_LOSS, Batch, collate
from .first_look import look
from .rows import DataSummary, Rows, find, prepare, size_of
from .sampler import Sampler
from .sources import MissingDataError

__all__ = [
    "NO_LOSS", "Batch", "DataSummary", "MissingDataError", "Rows", "Sampler", "collate", "find", "look", "prepare", "size_of",
]  # fmt: skip
