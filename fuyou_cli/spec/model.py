"""Defines `ModelSpec`: what the planner knows about a model, without its weights.

A model is an ordered list of stages (embedding, decoder blocks, final norm, head). Each stage owns its parameters,
packed one after the other into one flat array: tensor t lives at [offset, offset + numel) of its stage. Offsets are
multiples of 64 elements.

The array is cut into banks: runs of parameters with one storage and one fate. A trained bank has states and gradients and is
written by updates; a frozen one is only read, from the store or from the checkpoint's own files. There its tensors lie as they
do in those files, at no multiple of 64. Trained ones come first, so that what an update touches begins where the stage begins.
Frozen weights may rest quantised (`quantised`), behind all others: compute sees them in its own dtype. Banks are padded to a
multiple of `STAGE_ALIGN` elements, so that every extent of every dtype is aligned for O_DIRECT.

Embedding and head may be cut along the vocabulary. Then each piece, a range of rows, is a stage of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard, get_args

from ..core.units import align_up
from .packed_tensors import QUANTISED, PackedTensor, Quantised, packed_bank

StageKind = Literal["embedding", "block", "norm", "head"]
Dtype = Literal["float32", "bfloat16"]
StateName = Literal["remainder", "momentum", "variance"]  # what an update keeps beside the weights
StateDtype = Literal["float32", "bfloat16", "int8"]  # of momentum and variance
Rule = Literal["adamw", "lion"]  # the optimizer

ITEM_SIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "int16": 2}
TENSOR_ALIGN = 64  # elements
STAGE_ALIGN = 2048  # elements: 4096 bytes of bfloat16
STATE_BLOCK = TENSOR_ALIGN  # elements of an int8 state with one float32 scale: all of one tensor
STATE_TILE = 65536  # elements of an int8 state that follow a page with the scales of their blocks
PAGE = 4096  # bytes: what extents, chunks and pieces are aligned to
SOURCES_AT = 1 << 48  # FY_SOURCES_AT in native/include/fuyou.h
STATE_NAMES: tuple[StateName, ...] = get_args(StateName)  # in the order of a place
MOMENTS: tuple[StateName, ...] = ("momentum", "variance")  # what starts as zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """Says which states an update keeps beside weights of a dtype, and how many bytes they take.

    Beside bfloat16 weights there is the int16 remainder of their float32 masters. All rules keep a momentum, AdamW also a
    variance. An int8 state is a row of tiles: a page of scales, then the codes of up to `STATE_TILE` elements. So a tile's
    bytes are one aligned span."""

    weights: Dtype
    dtype: StateDtype = "float32"
    rule: Rule = "adamw"

    def size(self, name: StateName, params: int) -> int:
        """Returns the bytes of one state of `params` elements, 0 where there is no such state. A run of tiles must be whole but
        for a stage's last."""
        if name == "remainder":
            return 2 * params if self.weights == "bfloat16" else 0
        if name == "variance" and self.rule != "adamw":
            return 0
        if self.dtype == "int8":
            return PAGE * -(-params // STATE_TILE) + align_up(params, PAGE)
        return ITEM_SIZE[self.dtype] * params

    @property
    def on_device(self) -> bool:
        """Tells whether a device can run the update: AdamW with float32 states."""
        return (self.dtype, self.rule) == ("float32", "adamw")

    def total(self, params: int) -> int:
        """Returns the bytes of all states of `params` elements."""
        return sum(self.size(name, params) for name in STATE_NAMES)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Describes one parameter of a stage, or the rows of one that the stage holds."""

    name: str  # name in the model's state dict
    shape: tuple[int, ...]  # shape of what the stage holds
    offset: int  # elements within the stage
    numel: int
    decay: bool  # weight decay applies (matrices, not biases or norms)
    first: int = 0  # elements of the model's tensor before what the stage holds
    whole: tuple[int, ...] | None = None  # shape of the model's tensor where the stage holds a part of it
    frozen: bool = False  # no gradient is computed, and no update changes it
    quantised: bool = False  # rests quantised; then it is frozen
    transposed: bool = False  # rests quantised, and is decoded, with its last two dimensions exchanged
    routed: bool = False  # of one expert or of all: a token computes with it if it is sent there

    @property
    def model_shape(self) -> tuple[int, ...]:
        return self.shape if self.whole is None else self.whole


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSpec:
    """Describes a matrix product or attention whose output can be kept for backward, at one micro-batch of the planned
    shape."""

    index: int  # position among such operators of one forward, in running order; some may not be listed
    name: str  # its kind, and the weight it uses: "mm self_attn.q_proj", "attention"
    flops: float
    bytes: int  # of its output and of what its own backward needs beside it
    weight: int = -1  # where its weight begins, in elements of the stage; -1 if it uses none
    overwritten: bool = False  # whether the model's code writes into its output
    of_weights: bool = False  # whether it depends on weights alone, as products of DoRA's norm do: as large for any tokens

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def follows_tokens(self) -> bool:
        """Tells whether half of the tokens make half of the output. A product of activations may be of chunks of tokens, the
        last one padded, or of one more than there are."""
        return (self.weight >= 0 and not self.of_weights) or self.kind == "attention"

    @property
    def stays(self) -> bool:
        """Tells whether it stands for a whole compiled block, whose graph can be kept on the device alone."""
        return self.kind == "graph"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWork:
    """Describes the products of one forward with experts, for one micro-batch of the planned shape."""

    flops: float  # a part of the stage's forward_flops
    rows: float  # of an expert, if tokens are sent to all alike
    products: int  # each with the matrix of one expert
    frozen_flops: float = 0.0  # of frozen ones

    def __add__(self, other: ExpertWork) -> ExpertWork:
        """Returns the work of both. `rows` become the mean over FLOPs."""
        flops = self.flops + other.flops
        rows = (self.flops * self.rows + other.flops * other.rows) / flops
        frozen = self.frozen_flops + other.frozen_flops
        return ExpertWork(flops=flops, rows=rows, products=self.products + other.products, frozen_flops=frozen)

    @property
    def backward_passes(self) -> float:
        """Returns how often backward multiplies as much: recompute, the input's gradient, and that of trained matrices."""
        return 3.0 - self.frozen_flops / self.flops


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """Names a file of the checkpoint that frozen weights are read from, and how to tell that it is still the same."""

    path: str  # absolute
    size: int  # bytes
    changed: int  # when, in nanoseconds
    header: str  # digest of what its header says


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Describes whole pages of one source file that lie one after the other in a bank."""

    place: int  # bytes from the bank's beginning
    offset: int  # in the store's address space; the model's sources begin at `SOURCES_AT`, each at a whole page
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BankSpec:
    """Describes a run of a stage's parameters with one storage and one fate."""

    name: str
    storage: Dtype | Quantised  # how an element rests and crosses
    elements: int  # with padding
    layout: StateLayout | None  # of the states of a trained bank; None: frozen
    packed: int = 0  # bytes of a quantised bank as it rests
    source: tuple[Piece, ...] = ()  # of a frozen bank that is read from the checkpoint's files; none: it is in the store

    @property
    def is_trained(self) -> bool:
        return self.layout is not None

    @property
    def weight_bytes(self) -> int:
        """Counts the bytes of its weights as they rest."""
        return self.packed or ITEM_SIZE[self.storage] * self.elements

    def state_size(self, name: StateName) -> int:
        """Returns the bytes of one state, 0 where there is no such state."""
        return 0 if self.layout is None else self.layout.size(name, self.elements)


def is_quantised(storage: Dtype | Quantised) -> TypeGuard[Quantised]:
    return storage in QUANTISED


def banks_of(
    dtype: Dtype, *, trained: int, frozen: int = 0, source: tuple[Piece, ...] = (), quantised: BankSpec | None = None
) -> tuple[BankSpec, ...]:
    """Returns the banks of a stage with so many elements; a stage without parameters has none."""
    banks = (
        BankSpec(name="trained", storage=dtype, elements=trained, layout=StateLayout(weights=dtype)),
        BankSpec(name="frozen", storage=dtype, elements=frozen, layout=None, source=source),
        quantised,
    )
    return tuple(bank for bank in banks if bank is not None and bank.elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """Describes one stage. Byte and FLOP figures are for one micro-batch of the planned shape."""

    index: int
    kind: StageKind
    name: str
    banks: tuple[BankSpec, ...]  # trained ones first
    tensors: tuple[TensorSpec, ...]
    forward_flops: float  # one micro-batch, forward
    forward_peak: int  # most bytes that a forward takes beside the weights, holes of the heap included
    backward_peak: int  # the same for recompute and backward, with the gradients of one tensor at a time
    forward_mapped: int = 0  # most bytes of forward_peak in blocks that never fit a hole of the heap
    backward_mapped: int = 0  # the same for backward_peak
    vocabulary: tuple[int, int] | None = None  # first row and end of a piece of the vocabulary; None: not a piece
    # Of a range of experts: first, end, and how many the mixture has; a block's ranges follow it. None: no range.
    expert_range: tuple[int, int, int] | None = None
    operators: tuple[OperatorSpec, ...] = ()  # of a block, in running order
    unneeded: tuple[OperatorSpec, ...] = ()  # of a block: whose outputs no backward looks at, so never computed again
    goes_back: bool = True  # backward visits it: it has something to learn, or a stage below has
    passes_on: bool = True  # backward needs its input's gradient: a stage below goes back
    frozen_flops: float = 0.0  # of forward, with frozen weights: their gradient's product, as large, is not computed
    graph_bytes: int = 0  # of a block: most bytes that a forward saves for backward beside input and weights; 0: not known
    choices: int = 0  # experts that a token is sent to, of all its mixtures; 0: it has none
    experts: int = 0  # in a mixture of it, at most
    looked_up: bool = False  # nothing but its frozen table of tokens, or rows of it: a step needs the rows of its tokens
    expert_work: ExpertWork | None = None  # of a block that sends tokens to experts
    # Its backward depends on its weights. That of an embedding does not, if it only looks rows up (`engine/cutting`).
    weights_in_backward: bool = True
    away: bool = False  # another rank computes it (`ModelSpec.of_rank`)
    # Derived; kept, because a search asks for them all the time.
    params: int = field(init=False)  # elements of all, with padding
    trained: int = field(init=False)  # elements that an update changes, with padding
    weight_bytes: int = field(init=False)  # of all, as they rest
    trained_weight_bytes: int = field(init=False)
    state_bytes: int = field(init=False)
    quantised: int = field(init=False)  # elements that rest quantised, with padding: the last ones
    # Pieces of files that hold its frozen weights, with places from the first frozen byte on; none where they are in the store.
    source: tuple[Piece, ...] = field(init=False)
    keeps_input: bool = field(init=False)  # its input, a boundary, is kept from forward to backward
    numel: int = field(init=False)  # elements without padding
    frozen_numel: int = field(init=False)  # those of them that are frozen

    def __post_init__(self) -> None:
        trained = [bank for bank in self.banks if bank.is_trained]
        assert list(self.banks[: len(trained)]) == trained, self.banks
        kept = {
            "params": sum(bank.elements for bank in self.banks),
            "trained": sum(bank.elements for bank in trained),
            "weight_bytes": sum(bank.weight_bytes for bank in self.banks),
            "trained_weight_bytes": sum(bank.weight_bytes for bank in trained),
            "state_bytes": sum(bank.state_size(name) for bank in trained for name in STATE_NAMES),
            "quantised": sum(bank.elements for bank in self.banks if bank.packed),
            "source": next((bank.source for bank in self.banks if bank.source), ()),
            # The last range of a block, whose backward comes first, keeps what all of them have from the block.
            "keeps_input": self.goes_back
            and not self.away
            and self.kind in ("block", "norm")
            and (self.expert_range is None or self.is_last_range),
            "numel": sum(tensor.numel for tensor in self.tensors),
            "frozen_numel": sum(tensor.numel for tensor in self.tensors if tensor.frozen),
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    @property
    def is_last_range(self) -> bool:
        """Tells whether it is the range of a block's last experts."""
        return self.expert_range is not None and self.expert_range[1] == self.expert_range[2]

    @property
    def frozen_weight_bytes(self) -> int:
        return self.weight_bytes - self.trained_weight_bytes

    @property
    def packed_bytes(self) -> int:
        """Returns the bytes of its quantised weights as they rest."""
        return sum(bank.packed for bank in self.banks)

    @property
    def quantisation(self) -> Quantised | None:
        """Returns how weights of it rest quantised; None where none do."""
        return next((bank.storage for bank in self.banks if is_quantised(bank.storage)), None)

    def packed(self) -> Mapping[str, PackedTensor]:
        """Returns where its quantised tensors lie in their bank, by name."""
        if (kind := self.quantisation) is None:
            return {}
        return packed_bank(kind, ((tensor.name, tensor.shape) for tensor in self.tensors if tensor.quantised))[0]

    @property
    def imported_bytes(self) -> int:
        """Counts the bytes of frozen weights that are copied into the store."""
        return 0 if self.source else self.frozen_weight_bytes

    def state_size(self, name: StateName) -> int:
        """Returns the bytes of one state of all its banks, 0 where there is no such state."""
        return sum(bank.state_size(name) for bank in self.banks)

    def with_layout(self, layout: StateLayout) -> StageSpec:
        """Returns the stage with states of this layout beside every trained bank."""
        banks = (replace(bank, layout=layout) if bank.is_trained else bank for bank in self.banks)
        return replace(self, banks=tuple(banks))

    def gradient_bytes(self, dtype: Dtype) -> int:
        """Returns bytes of its gradients, summed in `dtype`."""
        return ITEM_SIZE[dtype] * self.trained

    def left_to_another(self) -> StageSpec:
        """Returns the stage as a rank sees it that does not compute it: in its place, with nothing to keep or to do."""
        return replace(
            self, away=True, banks=(), tensors=(), operators=(), unneeded=(), forward_flops=0.0, frozen_flops=0.0,
            forward_peak=0, backward_peak=0, forward_mapped=0, backward_mapped=0, graph_bytes=0, choices=0, experts=0,
            looked_up=False, expert_work=None,
        )  # fmt: skip

    @property
    def trained_tensors(self) -> tuple[TensorSpec, ...]:
        """Returns the tensors of the trained banks, in their order; they come before all others."""
        return tuple(tensor for tensor in self.tensors if not tensor.frozen)

    @property
    def unneeded_flops(self) -> float:
        return sum(operator.flops for operator in self.unneeded)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Describes the whole model at one batch shape."""

    architecture: str
    compute_dtype: Dtype
    hidden_size: int
    vocab_size: int
    stages: tuple[StageSpec, ...]
    tied_head: bool  # the head uses the embedding stage's weights
    boundary_bytes_per_token: int
    choreography_bytes_per_token: int  # held by the model's own forward between stages, whole batch
    sent_bytes_per_token: int = 0  # what a block sends to its experts where these are stages of their own
    may_sweep: bool = False  # its sums are of single rows or micro-batches, in their order, however a batch is grouped
    draws_between: bool = False  # its own forward draws random numbers for all rows, between stages
    inactive_parameters: int = 0  # of experts that one token is not sent to
    inactive_frozen: int = 0  # those of them that are frozen
    float32_parameters: int = 0  # that the family keeps in float32 whatever the compute dtype
    sources: tuple[SourceFile, ...] = ()  # in the order of their places in the store's address space
    imported_because: str = ""  # why frozen weights are copied into the store; empty: they are not, or there are none
    compiled: bool = False  # its blocks
    owners: tuple[int, ...] = ()  # the rank that computes each stage; none: one process computes all
    rank: int = 0  # whose view this is, where there are owners

    def of_rank(self, owners: tuple[int, ...], rank: int) -> ModelSpec:
        """Returns the model as one of several ranks sees it (`planner/ring`): every stage in its place, others' without banks,
        FLOPs and operators."""
        assert not self.owners and len(owners) == len(self.stages), (self.owners, owners)
        stages = tuple(stage if owners[stage.index] == rank else stage.left_to_another() for stage in self.stages)
        view = replace(self, stages=stages, owners=owners, rank=rank)
        whole, here = (sum(t.numel for stage in model.stages for t in stage.tensors if t.routed) for model in (self, view))
        return replace(
            view,
            inactive_parameters=self.inactive_parameters * here // max(1, whole),
            inactive_frozen=self.inactive_frozen * here // max(1, whole),
            float32_parameters=min(self.float32_parameters, view.trained_parameters),
        )

    def owner(self, stage: int) -> int:
        """Returns the stage whose weights `stage` uses. For a tied head that is the embedding, or its piece with the same
        rows."""
        spec = self.stages[stage]
        if not self.tied_head or spec.kind != "head":
            return stage
        if spec.vocabulary is None:
            return 0
        return next(s.index for s in self.stages if s.kind == "embedding" and s.vocabulary == spec.vocabulary)

    def has_two_users(self, stage: int) -> bool:
        """Tells whether this embedding piece shares its weights with a piece of a tied head. Gradients then rest from one's
        backward to the other's."""
        spec = self.stages[stage]
        return self.tied_head and spec.kind == "embedding" and spec.vocabulary is not None and spec.trained > 0

    @property
    def widest_bytes_per_token(self) -> int:
        """Returns the bytes of the widest tensor that passes between stages, or is kept for backward."""
        return max(self.boundary_bytes_per_token, self.sent_bytes_per_token)

    def ranges(self, stage: int) -> range:
        """Returns the stages that are the experts of block `stage`; none where it was not cut."""
        end = stage + 1
        while (
            self.stages[stage].expert_range is None and self.stages[end : end + 1] and self.stages[end].expert_range is not None
        ):
            end += 1
        return range(stage + 1, end)

    @property
    def has_ranges(self) -> bool:
        """Tells whether experts of some block are stages of their own."""
        return any(stage.expert_range is not None for stage in self.stages)

    @property
    def head_is_cut(self) -> bool:
        return self.stages[-1].vocabulary is not None

    @property
    def head_is_shared(self) -> bool:
        """Tells whether several ranks have pieces of the head."""
        return len({owner for owner, stage in zip(self.owners, self.stages, strict=False) if stage.kind == "head"}) > 1

    @property
    def quantisation(self) -> Quantised | None:
        """Returns how frozen weights of its blocks rest quantised; None where they do not."""
        return next((quantised for stage in self.stages if (quantised := stage.quantisation)), None)

    @property
    def quantised_parameters(self) -> int:
        """Counts the parameters that rest so."""
        return sum(tensor.numel for stage in self.stages for tensor in stage.tensors if tensor.quantised)

    @property
    def decoded_bytes(self) -> int:
        """Returns the bytes of the largest stage with quantised weights, in the compute dtype; 0 where there is none."""
        item = ITEM_SIZE[self.compute_dtype]
        return max((item * stage.params for stage in self.stages if stage.quantised), default=0)

    @property
    def parameters(self) -> int:
        return sum(stage.numel for stage in self.stages)

    @property
    def frozen_parameters(self) -> int:
        return sum(stage.frozen_numel for stage in self.stages)

    @property
    def trained_parameters(self) -> int:
        return self.parameters - self.frozen_parameters

    @property
    def active_parameters(self) -> int:
        """Returns the parameters that one token uses: in a mixture of experts, its experts and everything else."""
        return self.parameters - self.inactive_parameters

    @property
    def flops_per_token(self) -> float:
        """Returns what a step's speed is told by: 6 FLOPs per parameter, 4 per frozen one, without recompute."""
        return 6.0 * self.active_parameters - 2.0 * (self.frozen_parameters - self.inactive_frozen)

    @property
    def layout(self) -> StateLayout:
        """Returns the layout of the states of every trained bank."""
        layouts = (bank.layout for stage in self.stages for bank in stage.banks if bank.layout is not None)
        return next(layouts, StateLayout(weights=self.compute_dtype))

    def with_layout(self, layout: StateLayout) -> ModelSpec:
        """Returns the model with states of this layout beside every trained bank."""
        return replace(self, stages=tuple(stage.with_layout(layout) for stage in self.stages))

    @property
    def state_bytes(self) -> int:
        """Returns the bytes that an update keeps beside the weights, without padding."""
        kept = self.float32_parameters
        return self.layout.total(self.trained_parameters - kept) + replace(self.layout, weights="float32").total(kept)

    @property
    def stored_parameters(self) -> int:
        """Counts with padding: what the store sees."""
        return sum(stage.params for stage in self.stages)

    @property
    def updated_parameters(self) -> int:
        """Counts with padding: what the update sees."""
        return sum(stage.trained for stage in self.stages)

    @property
    def stored_weight_bytes(self) -> int:
        """Counts with padding the bytes of all weights as they rest."""
        return sum(stage.weight_bytes for stage in self.stages)

    @property
    def stored_state_bytes(self) -> int:
        """Counts with padding the bytes of all states."""
        return sum(stage.state_bytes for stage in self.stages)


# ---- beside the specification ------------------------------------------------------------------------------------------


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
