"""Data: from files named in the recipe to the padded batch of a step. The trainer's side needs numpy alone."""

from .batches import NO_LOSS, Batch, collate
from .rows import DataSummary, Rows, prepare
from .sampler import Sampler

__all__ = ["NO_LOSS", "Batch", "DataSummary", "Rows", "Sampler", "collate", "prepare"]
