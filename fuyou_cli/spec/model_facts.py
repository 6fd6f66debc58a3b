"""Defines what a plan needs to know of a model beside its `ModelSpec`, whatever the size of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .model import SourceFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Holds what was found out about a recipe's model."""

    refusal: str | None  # why it cannot be trained yet
    attention: str  # the implementation that it was built with
    positions: int | None  # that its configuration allows; None: it names no limit
    learns_positions: bool  # whether each has an embedding
    embeddings: int  # tokens with an embedding; 0: the model has no plain one
    logits: int  # columns of its logits
    head_rows: int  # of the matrix that gives them; 0: it has none
    vocabulary_rows: int  # rows of a piece of the vocabulary, 0: it is not cut
    has_frozen: bool  # whether some parameters are not trained
    frozen_with: tuple[tuple[str, str], ...]  # names that `freeze` does not match, each with what it is tied to
    keeps_apart: bool = False  # whether its attention can keep documents of a row apart
    without_aux_loss: str = ""  # why it cannot be trained with the auxiliary loss of a mixture's routers
    untouched: tuple[str, ...] = ()  # its parts that do not run on text
    untouched_parameters: int = 0  # in them
    loaded_bytes: int | None = None  # by which a process grows that loads the libraries and builds the model; None: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Lying:
    """Says where a tensor of the checkpoint lies."""

    dtype: str
    source: int  # which file
    address: int  # of its first byte, in the store's address space


@dataclass(frozen=True, kw_only=True, slots=True)
class InPlace:
    """Holds where the checkpoint's tensors lie, or why none is read there (`refusal`). `alignment`: of a tensor that can be
    computed with where it lies, in bytes."""

    tensors: Mapping[str, Lying]
    sources: tuple[SourceFile, ...]
    alignment: int = 1
    refusal: str = ""
