"""Holds what a manifest says of a run, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ...checkpoint.header import NAME_LIMIT
from ...spec.plan import Numerics, StateTensor, StoreMode

State = Literal["loading", "committed"]

TENSORS = get_args(StateTensor)  # of a stage, in the order of a place
_EXTENTS = (*TENSORS, "gradients")
ALIGN = 4096  # of stripes and extents, as direct I/O wants them
MOST_KEPT = 16  # states of a store; recipe/schema knows it too

Aligned = Annotated[int, Field(multiple_of=ALIGN)]
Sum = Annotated[int, Field(le=(1 << 64) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Describes a tensor, or the run of its elements that a stage holds."""

    name: str  # in the model
    stored_as: Annotated[str, Field(min_length=1, max_length=NAME_LIMIT)]  # in the checkpoint it came from, and in every export
    shape: Annotated[tuple[int, ...], Field(max_length=64)]  # of the whole tensor; torch can hold no more dimensions
    offset: int  # elements within the stage
    first: int  # elements of the tensor before these
    count: int
    decay: bool  # whether AdamW's weight decay is of it


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredExtent:
    """Names bytes of the store, and the sum (`swap.kernels.checksum`) of what was written there."""

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
    turn: int  # of its ring (spec.plan.Ring), which says where
    zero_moments: bool
    zero_remainder: bool
    weights: StoredExtent | None  # trained ones
    frozen: StoredExtent | None
    remainder: StoredExtent | None
    momentum: StoredExtent | None
    variance: StoredExtent | None
    gradients: StoredExtent | None  # of the step behind `generation`, whose update is to be done
    tensors: tuple[StoredTensor, ...]

    def extents(self) -> list[tuple[str, StoredExtent]]:
        """Returns what of the stage is on the store, by name."""
        named = [(name, getattr(self, name)) for name in _EXTENTS]
        return [(name, extent) for name, extent in named if extent is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DueUpdate:
    """Holds the AdamW settings of the stages whose gradients make a step durable, as the step began it."""

    lr: float
    gradient_scale: float  # the clipping factor
    step: Annotated[int, Field(ge=1)]  # 1 for the first: bias corrections
    skipped: bool  # every value stays as it is
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Holds what early stopping goes by: the loss of the first set of rows that a run evaluates."""

    step: int  # whole steps before the last evaluation
    best: float | None  # the lowest loss; None: none was finite
    best_step: int
    worse: int  # evaluations since that one


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Names what a store holds, and what a run needs to resume from it."""

    run: str  # names this run in the part files of its folders
    files: tuple[str, ...]  # absolute paths of the store's files, in the order of the stripe
    parts: tuple[str, ...]  # of the part files beside them
    companions: tuple[str, ...]  # of what else there is of the run; all three are what `fuyou clean` may remove
    stripe: Annotated[int, Field(ge=ALIGN, multiple_of=ALIGN)]
    store_size: int
    state: State
    step: int  # finished steps, the generation of every stage without gradients; as many losses are in training/losses.py
    written_total: int
    model_dir: str
    architecture: str
    compute_dtype: Literal["float32", "bfloat16"]
    numerics: Numerics
    fingerprints: dict[str, str]  # model, data, recipe: what a resumed run must agree on
    libraries: dict[str, str]  # versions of what computed it (state/fingerprints.py)
    random: dict[str, Any]  # states of generators (state/random_states.py)
    mode: StoreMode
    keep: Annotated[int, Field(ge=1, le=MOST_KEPT)]  # states that are there whole at any time, this one among them
    due: DueUpdate | None  # of stages with gradients
    stages: tuple[StoredStage, ...]
    skipped: int = 0  # of these steps, that updated nothing (train.skip_nonfinite)
    skipped_in_row: int = 0  # of these, the last ones
    evaluated: Evaluated | None = None  # None: never
