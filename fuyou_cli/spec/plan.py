"""Defines `Plan`: every decision about one run, as data. Derived values (the schedule, the timeline) are computed from it.

Sizes are bytes. Offsets are bytes from the start of the arena or of the store's address space.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

from .model import Dtype, Piece

Tier = Literal["gpu", "cpu", "ssd"]
StateTensor = Literal["weights", "frozen", "remainder", "momentum", "variance"]  # what survives a run; `frozen`: weights
# Which rows are padded to one length: all of a step, those of a micro-batch, or none, as rows are laid end to end.
Padding = Literal["step", "micro_batch", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Holds the settings that the result depends on. They are stored with the run, kept on resume, and never changed to save
    memory."""

    compute_dtype: Dtype
    accumulate_dtype: Dtype  # of gradients summed over micro-batches
    batch_size: int  # sequences per step
    micro_batch_size: int
    max_seq_len: int
    head_chunk_tokens: int  # 0: a whole micro-batch at once
    torch_threads: int
    seed: int
    vocabulary_rows: int = 0  # rows of a piece of embedding and head; 0: not cut
    # The defaults are those of runs saved before there was a choice.
    range_experts: int = 0  # experts of a range; 0: a block computes its own
    padding: Padding = "step"
    width_step: int = 8  # tokens: the width of what is padded is a multiple of it, or max_seq_len
    document_step: int = 0  # tokens: attention computes documents of such lengths (`rounded_up`); 0: of any length
    router_aux_loss: float = 0.0  # coefficient of the loss that balances a mixture's experts; 0: without
    # Groups of micro-batches, a power of two: gradients are summed within each, then group by group in a binary tree.
    lanes: int = 1

    @property
    def micro_batches(self) -> int:
        """Returns the micro-batches of a step."""
        return -(-self.batch_size // self.micro_batch_size)

    @property
    def micro_batch_tokens(self) -> int:
        """Returns the tokens of a micro-batch, with padding."""
        return self.micro_batch_size * self.max_seq_len

    @property
    def tokens(self) -> int:
        """Returns the tokens of a step, with padding."""
        return self.batch_size * self.max_seq_len

    @property
    def widest(self) -> int:
        """Returns the most tokens that a row of a micro-batch can have."""
        return self.micro_batch_tokens if self.padding == "none" else self.max_seq_len

    def of_sweep(self, sweeps: int) -> Numerics:
        """Returns the numerics of one sweep, if a step passes over the model in this many sweeps."""
        return self if sweeps == 1 else _of_sweep(self, sweeps)


class Computed(NamedTuple):
    """Says what a micro-batch computes."""

    tokens: int  # with padding
    width: int  # tokens of the row, or of the document, that a token attends to, in the mean
    rows: int  # or documents


@dataclass(frozen=True, kw_only=True, slots=True)
class TypicalStep:
    """Describes a step of a run's own rows, where they are of unlike length: memory is planned for rows of `max_seq_len`, time
    for these."""

    parts: tuple[Computed, ...]  # of each micro-batch
    tokens: int  # without padding

    @property
    def computed(self) -> int:
        """Returns the tokens that a step computes, padding included."""
        return sum(part.tokens for part in self.parts)


@lru_cache  # a search asks for it a hundred thousand times
def _of_sweep(numerics: Numerics, sweeps: int) -> Numerics:
    return replace(numerics, batch_size=numerics.batch_size // sweeps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtentPair:
    """Describes the two places of the store in which a stage's states lie in turn: what is committed is in one, and the next
    commit is written to the other."""

    offset: int  # of the first place; the second lies behind it
    size: int  # of each

    def place(self, turn: int) -> int:
        """Returns the offset of the place at a turn."""
        return self.offset + self.size * (turn % 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Holds the homes of one stage's tensors and the spans they occupy.

    The `_at` spans count from the beginning of the stage's place at a turn, and are of what updates write; frozen weights have
    an extent of their own, which is written once. RAM spans are None unless the home is cpu; weights on the GPU whose states
    are elsewhere have one as well, which updates write. In RAM frozen weights follow the trained ones. Trained weights may
    have a home in RAM while the frozen ones of the stage are on the ssd: then they are copied into its slot. A boundary may lie
    where gradients will rest (`takes_turns`).
    """

    stage: int
    weights: Tier
    states: Tier
    gradients: Tier  # where they wait for a deferred update or a tied embedding's own backward; cpu if they never wait
    boundary: Tier  # the stage's input, kept for backward; cpu if the stage keeps none
    slot_class: int  # which weight and gradient slots it uses
    deferred: bool  # True: its update waits for the next forward, just before its use; False: it follows its backward at once
    pair: ExtentPair
    weights_at: Span
    remainder_at: Span | None
    momentum_at: Span
    variance_at: Span | None
    gradients_extent: Span | None
    boundary_extent: Span | None
    weights_ram: Span | None
    remainder_ram: Span | None
    momentum_ram: Span | None
    variance_ram: Span | None
    gradients_ram: Span | None
    boundary_ram: Span | None
    frozen_extent: Span | None = None  # of the store; frozen weights
    frozen_source: tuple[Piece, ...] = ()  # instead: where they lie in the checkpoint's files
    trained_ram: Span | None = None  # home of trained weights alone
    looked_up: int = 0  # bytes that a visit reads at most of a frozen table, if only rows of the step's tokens; 0: all
    kept: tuple[int, ...] = ()  # operators whose outputs rest with the boundary, by index
    kept_there: tuple[int, ...] = ()  # operators whose outputs stay in the device's memory; those of neither are recomputed

    @property
    def given(self) -> tuple[int, ...]:
        """Returns the operators that backward does not compute again, because their outputs are kept."""
        return tuple(sorted((*self.kept, *self.kept_there)))

    @property
    def takes_turns(self) -> bool:
        """Tells whether boundary and resting gradients share their memory: one from forward to backward, the others from there
        until the next forward."""
        gradients, boundary = self.gradients_ram, self.boundary_ram
        return gradients is not None and boundary is not None and gradients.offset == boundary.offset

    @property
    def updated_on_device(self) -> bool:
        """Tells whether weights, states and gradients rest on the device and are updated there. Then none of them is in RAM."""
        return self.states == "gpu"

    def extent(self, tensor: StateTensor, turn: int) -> Span | None:
        """Returns where a tensor lies at a turn; None where there is no such tensor."""
        if tensor == "frozen":
            return self.frozen_extent
        at: Span | None = getattr(self, f"{tensor}_at")
        return None if at is None or not at.size else Span(offset=self.pair.place(turn) + at.offset, size=at.size)

    def ram(self, tensor: StateTensor) -> Span | None:
        """Returns where a tensor rests in RAM; None where it does not, or there is no such tensor."""
        if tensor == "weights" and self.trained_ram is not None:
            return self.trained_ram
        if tensor not in ("weights", "frozen") or self.weights_ram is None:
            span: Span | None = None if tensor in ("weights", "frozen") else getattr(self, f"{tensor}_ram")
            return span
        trained = Span(offset=self.weights_ram.offset, size=self.weights_at.size)
        frozen = Span(offset=trained.offset + trained.size, size=self.weights_ram.size - trained.size)
        span = trained if tensor == "weights" else frozen
        return span if span.size else None

    @property
    def writes_weights(self) -> bool:
        """Tells whether every update writes the trained weights to the store."""
        return self.weights == "ssd" and self.trained_ram is None

    def fetched(self, turn: int) -> list[tuple[int, Span]]:
        """Returns the extents that are read into a slot at a turn, each with its place in the slot."""
        trained = self.extent("weights", turn)
        first_fetch = [] if trained is None or self.trained_ram is not None else [(0, trained)]
        return [*first_fetch, *((self.weights_at.size + place, span) for place, span in self.frozen)]

    @property
    def frozen(self) -> list[tuple[int, Span]]:
        """Returns where frozen weights are read from, each with its place from the first frozen byte on."""
        if self.frozen_extent is not None:
            return [(0, self.frozen_extent)]
        return [(piece.place, Span(offset=piece.offset, size=piece.size)) for piece in self.frozen_source]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotClass:
    """Holds interchangeable arena spans for weights and gradients in use, of stages of similar size."""

    weight_size: int
    gradient_size: int
    weight_slots: tuple[Span, ...]
    gradient_slots: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class IoPlan:
    backend: Literal["auto", "io_uring", "threads"]
    read_depth: int
    write_depth: int
    block_size: int
    stripe: int
    update_threads: int
    chunk_params: int
    scratch: Span


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """Holds one line of the memory table: what, where, how many bytes."""

    what: str
    tier: Tier
    size: int
    total: int  # of this kind over all tiers; 0 if the line is not part of a state
    policy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Holds what the plan predicts. The report compares each figure with the measurement."""

    cpu_peaks: dict[str, int]  # phase (load, train, export) -> anonymous + kernel bytes of the process
    gpu_peak: int
    ssd_bytes: int  # disk taken by the store
    export_bytes: int
    read_per_step: int
    written_per_step: int  # like all figures per step, a mean over the steps from one commit to the next
    read_by: dict[str, int]  # weights, states, gradients, boundaries
    written_by: dict[str, int]
    step_flops: float  # 6 N per token, where N is the parameters that one token uses
    compute_flops: float  # with recompute
    seconds: dict[str, float]  # resource -> seconds of work per step
    step_seconds: float  # simulated; before the simulation, the busiest resource's seconds
    bottleneck: str
    forward_seconds: float = 0.0  # part of step_seconds
    stalls: dict[str, float] = field(default_factory=dict)  # what compute waits for -> simulated seconds per step
    commit_seconds: float = 0.0  # seconds that one commit adds if not every step is committed; each step has its share of them

    @property
    def cpu_peak(self) -> int:
        return max(self.cpu_peaks.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    version: int
    model: str
    device: str
    numerics: Numerics
    clip_grad_norm: float | None
    stages: tuple[StagePlan, ...]
    slot_classes: tuple[SlotClass, ...]
    boundary_slots: tuple[Span, ...]  # for boundaries in flight to and from the ssd
    # For a micro-batch's inputs on their way to a device with its own memory, if they rest unpinned.
    upload_slots: tuple[Span, ...]
    lookahead: int
    io: IoPlan
    arena_size: int
    store_size: int
    cpu_budget: int
    memory: tuple[MemoryLine, ...]
    predicted: Predicted
    sustained: bool = False  # True: predicted with the rates of drives whose fast region is full
    commit_every: int | None = None  # steps between commits; None: only where the run ends
    # For the whole batch's outputs between stages, beside a device with its own memory: spans of the arena, or of the device.
    batch_slots: tuple[Span, ...] = ()
    batch_on_device: bool = False  # True: stages pass outputs on in device memory, and only what is kept for backward crosses
    decoded: Span | None = None  # of the arena, on device cpu: where quantised weights are decoded for compute
    staging_slots: tuple[Span, ...] = ()  # for loading and committing tensors that rest only on the device
    norm_first: bool = False  # a step's first backward only measures the norm; updates run beside a second one
    sweeps: int = 1  # passes over the model in a step, forward and backward, each over an equal share of the micro-batches
    typical: TypicalStep | None = None  # None: all rows are taken to have `max_seq_len` tokens
    replicas: int = 1  # processes that each compute the whole model, for as many rows of a step; all else is of one of them
    free_pages: bool = False  # on device cpu: a block finds its pages in the heap, so none is given back between two of them

    @property
    def step_tokens(self) -> int:
        """Returns the tokens of a step, without padding."""
        return self.numerics.tokens if self.typical is None else self.typical.tokens * self.replicas

    @property
    def fill(self) -> float:
        """Returns the share of the planned tokens that a step computes."""
        return 1.0 if self.typical is None else self.typical.computed * self.replicas / self.numerics.tokens

    @property
    def own(self) -> Numerics:
        """Returns the numerics of what one process computes."""
        return self.numerics.of_sweep(self.replicas)

    @property
    def group(self) -> Numerics:
        """Returns the numerics of one sweep. Stages pass on and keep only its rows."""
        return self.own.of_sweep(self.sweeps)

    @property
    def has_apart_commits(self) -> bool:
        """Tells whether only some steps are committed."""
        return self.commit_every is not None and self.commit_every > 1

    @property
    def plain_seconds(self) -> float:
        """Returns the seconds of a step without a commit."""
        each = self.predicted.commit_seconds / self.commit_every if self.has_apart_commits and self.commit_every else 0.0
        return self.predicted.step_seconds - each


# ---- micro-batches -----------------------------------------------------------------------------------------------------

_Whole = TypeVar("_Whole")  # an array or a tensor (rows, tokens, ...)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Holds some rows of a whole batch. Only their first `width` tokens are computed: what follows pads them to other rows."""

    first: int
    end: int
    width: int
    longest: int  # tokens of its longest row, or document, without padding

    @property
    def rows(self) -> slice:
        return slice(self.first, self.end)

    @property
    def tokens(self) -> int:
        """Returns the tokens that are computed, with padding."""
        return (self.end - self.first) * self.width

    def of(self, whole: _Whole) -> _Whole:
        """Returns its part of a whole batch, as a view."""
        part: _Whole = whole[self.first : self.end, : self.width]  # type: ignore[index]
        return part

    def after(self, rows: int) -> MicroBatch:
        """Returns the same part, counted from a row that comes `rows` later."""
        return MicroBatch(first=self.first - rows, end=self.end - rows, width=self.width, longest=self.longest)


def whole_rows(rows: int, width: int) -> MicroBatch:
    """Returns the one micro-batch of rows that are computed at once."""
    return MicroBatch(first=0, end=rows, width=width, longest=width)


def even(rows: int, size: int, width: int) -> tuple[MicroBatch, ...]:
    """Divides whole rows of `width` tokens into micro-batches of `size` rows, in order."""
    firsts = range(0, rows, size)
    return tuple(MicroBatch(first=first, end=min(first + size, rows), width=width, longest=width) for first in firsts)


def rounded_up(tokens: int, step: int) -> int:
    """Returns the length that attention computes a document of `tokens` in: a multiple of `step`, of twice of it beyond eight
    steps, and so on. So there are few of them however long documents are. `step` 0: the length itself."""
    if not step:
        return tokens
    while tokens > 8 * step:
        step *= 2
    return -(-tokens // step) * step


def lengths_up_to(longest: int, step: int) -> int:
    """Returns how many lengths `rounded_up` can give for documents of at most so many tokens."""
    if not step:
        return longest
    return len({rounded_up(tokens, step) for tokens in range(1, longest + 1)})
