"""Takes data from files named in the recipe to the padded batch of a step. The trainer's side needs numpy alone."""

from .cache import find, prepare, size_of
from .rows import NO_LOSS, Batch, DataSummary, Rows, collate
from .sampler import Sampler
from .sources import MissingDataError, look

__all__ = [
    "NO_LOSS", "Batch", "DataSummary", "MissingDataError", "Rows", "Sampler", "collate", "find", "look", "prepare", "size_of",
]  # fmt: skip
