"""Holds what a manifest says of a run, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ...checkpoint.header import NAME_LIMIT
from ...spec.model import Piece, Rule, SourceFile, StateDtype, StateLayout
from ...spec.packed_tensors import PackedTensor, Quantised, packed_bank
from ...spec.plan import Numerics, StateTensor

State = Literal["loading", "committed"]

TENSORS = get_args(StateTensor)  # tensors of a stage, in the order of a place
ALIGN = 4096  # alignment of stripes and extents for direct I/O
MOST_CHANGES = 1000  # that are recorded; the newest ones
MOST_SETS = 16  # most sets whose losses are put aside

Aligned = Annotated[int, Field(multiple_of=ALIGN)]
Sum = Annotated[int, Field(le=(1 << 64) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Describes a tensor, or the part of its elements that a stage holds."""

    name: str  # the name in the model
    stored_as: Annotated[str, Field(min_length=1, max_length=NAME_LIMIT)]  # the name in its checkpoint and in every export
    shape: Annotated[tuple[int, ...], Field(max_length=64)]  # of the whole tensor; torch allows no more dimensions
    offset: int  # elements within the stage
    first: int  # elements of the tensor before this part
    count: int
    decay: bool  # whether AdamW's weight decay applies

    @property
    def held(self) -> tuple[int, ...]:
        """Returns the shape of this part, where it is whole rows of the tensor's first dimension."""
        return (self.count // prod(self.shape[1:]), *self.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredExtent:
    """Names bytes of the store, and the checksum (`swap.kernels.checksum`) of what was written there."""

    offset: Aligned
    size: int
    sum: Sum


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStage:
    """Describes one stage at rest: a bank of trained parameters, then one of frozen ones. Extents are None where every value is
    zero or there is no such tensor."""

    name: str
    params: int
    trained: int  # of these, in the order of offsets: the first ones; the others are frozen
    generation: int
    turn: int  # which place of its pair (spec.plan.ExtentPair) it rests in
    zero_moments: bool
    zero_remainder: bool
    weights: StoredExtent | None  # trained ones
    frozen: StoredExtent | None
    remainder: StoredExtent | None
    momentum: StoredExtent | None
    variance: StoredExtent | None
    tensors: tuple[StoredTensor, ...]
    pieces: tuple[Piece, ...] = ()  # of the checkpoint's files that hold the frozen parameters instead of an extent
    piece_sums: tuple[Sum, ...] = ()  # checksum of each piece as it was first read; none: not all were read, or none was summed
    quantised: int = 0  # of its parameters, the last ones: frozen ones that rest quantised

    def packed(self, quantisation: Quantised) -> tuple[Mapping[str, PackedTensor], int]:
        """Returns where its quantised tensors lie in their bank, by name, and the bank's bytes."""
        first = self.params - self.quantised
        return packed_bank(quantisation, ((tensor.name, tensor.held) for tensor in self.tensors if tensor.offset >= first))

    def extents(self) -> list[tuple[str, StoredExtent]]:
        """Returns the stage's tensors on the store, by name."""
        named = [(name, getattr(self, name)) for name in TENSORS]
        return [(name, extent) for name, extent in named if extent is not None]

    @property
    def summed_pieces(self) -> list[StoredExtent]:
        """Returns its pieces of the checkpoint's files, as far as their checksums are known."""
        together = zip(self.pieces, self.piece_sums, strict=False)
        return [StoredExtent(offset=piece.offset, size=piece.size, sum=total) for piece, total in together]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Holds what the best weights and early stopping go by: the loss of the first set of rows that a run evaluates."""

    step: int  # whole steps before the last evaluation
    best: float | None  # the lowest loss; None: none was finite
    best_step: int
    worse: int  # evaluations since one that was better, by more than `min_delta`
    bar: float | None = None  # the loss of that one; None: `best`
    set_name: str = ""  # of the set; empty: not known
    set_digest: str = ""  # of its rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Untouched:
    """Names the tensors of the checkpoint that a run leaves alone: of parts that do not run on text, and buffers."""

    names: tuple[Annotated[str, Field(min_length=1, max_length=NAME_LIMIT)], ...]
    mark: str  # of them (`checkpoint/reader.weights_mark`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Holds a key of the recipe with which a run went on at another value than before."""

    step: int  # whole steps before it
    key: Annotated[str, Field(min_length=1, max_length=NAME_LIMIT)]
    before: Any  # as JSON has it
    now: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Names what a store holds, and what a run needs to resume from it."""

    run: str  # the run's name in the part files of its folders
    files: tuple[str, ...]  # absolute paths of the store's files, in the order of the stripe
    parts: tuple[str, ...]  # paths of the part files beside them
    companions: tuple[str, ...]  # paths of the run's other files; `fuyou clean` may remove files of all three
    stripe: Annotated[int, Field(ge=ALIGN, multiple_of=ALIGN)]
    store_size: int
    state: State
    step: int  # finished steps: the generation of every stage, and the number of losses
    written_total: int
    model_dir: str
    architecture: str
    compute_dtype: Literal["float32", "bfloat16"]
    numerics: Numerics
    fingerprints: dict[str, str]  # digests of what a resumed run must agree on
    libraries: dict[str, str]  # versions of the libraries that computed it (state/fingerprints.py)
    random: dict[str, Any]  # states of random generators (state/random_states.py)
    stages: tuple[StoredStage, ...]
    skipped: int = 0  # steps that updated nothing (train.skip_nonfinite)
    skipped_in_row: int = 0  # of these, the last ones
    evaluated: Evaluated | None = None  # None: never
    evaluated_before: Annotated[
        tuple[Evaluated, ...], Field(max_length=MOST_SETS)
    ] = ()  # of other sets, for when they are back
    state_dtype: StateDtype = "float32"  # of momentum and variance
    rule: Rule = "adamw"
    quantisation: Quantised | None = None  # how frozen weights of stages with such parameters rest
    sources: tuple[SourceFile, ...] = ()  # files of the checkpoint that frozen parameters are read from
    untouched: Untouched | None = None  # None: a model of text alone
    peak_after_warmup: bool = False  # the rule of its learning rates (training/length)
    settings: dict[str, Any] | None = None  # keys of the recipe it goes by (state/recipe_changes.py); None: not recorded
    changes: Annotated[tuple[Change, ...], Field(max_length=MOST_CHANGES)] = ()  # of these, in order

    @property
    def knows_pieces(self) -> bool:
        """Tells whether it has the checksum of everything that is read from the checkpoint's files."""
        return all(len(stage.piece_sums) == len(stage.pieces) for stage in self.stages)

    @property
    def layout(self) -> StateLayout:
        """Returns the layout of every stage's states."""
        return StateLayout(weights=self.compute_dtype, dtype=self.state_dtype, rule=self.rule)
