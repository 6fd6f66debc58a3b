"""Computes a model forward alone, for losses and for tokens: between the steps of a run (`ForwardOnly`), or without one, by
weights that pass through memory (`WeightStream`).

The two hold weights in different ways. A run's are where its plan has them, of the generation after its last step, and an
update that is due runs when its stage is visited: so these passes are the executor's visits, in the slots of a step. Without a
run there are no states, no generations and no plan. Both compute the same: the model's own forward, stage by stage.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import PlanError, UsageError
from ..core.units import gib
from ..planner.memory import MOST_PRODUCTS, PRODUCT_CODE
from ..planner.schedule import evaluation_schedule
from ..spec.model import Piece
from ..spec.plan import MicroBatch, Numerics, even, lengths_up_to
from .activations import Recompute
from .anatomy import Anatomy, Installed
from .attention import Documents, turns
from .calls import (
    LastPosition,
    ModuleState,
    boundary_of,
    only_refusals,
    own_forward,
    replaced_forwards,
    tracing,
    with_fake_parameters,
)
from .cutting import Sent, add_outputs, holding, is_lookup, scales_rows
from .describe import LiveBytes
from .executor import Executor
from .loss import Head, TokenLoss, TokenPart, pieces, regular, shifted
from .passes import RangedPasses
from .streamed import Call, StreamedModel, place_buffers, put_back

if TYPE_CHECKING:
    from .link import Link


class ForwardBatch(Protocol):
    """Rows as arrays (`data.batches.Batch`)."""

    @property
    def documents(self) -> Documents | None: ...

    @property
    def sweeps(self) -> Sequence[tuple[MicroBatch, ...]] | None: ...

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and labels, (rows, tokens) int64 in host memory; labels hold -100 where nothing counts."""
        ...


def _micro_batches(batch: ForwardBatch, numerics: Numerics, rows: int, width: int) -> tuple[MicroBatch, ...]:
    return even(rows, numerics.micro_batch_size, width) if batch.sweeps is None else batch.sweeps[0]


class ForwardOnly:
    """Evaluates rows beside the steps of one executor. The step before has to be told that it is the `last`: what it prefetched
    would be in the way.

    Stages keep nothing: two boundaries of the rows are there at most, one going into a stage and one coming out. Dropout is
    off, and generators stay as they were."""

    def __init__(self, executor: Executor) -> None:
        self._executor, visits = executor, executor.visits
        self.schedule = evaluation_schedule(visits.model, visits.plan)
        compiled = executor.compiled
        nothing = [compiled if compiled and stage.kind == "block" else Recompute(stage) for stage in visits.model.stages]
        self._blocks = RangedPasses(visits, nothing)

    @property
    def rows(self) -> int:
        """Returns how many rows go through the model at once, as planned."""
        return self._executor.plan.group.batch_size

    @contextmanager
    def open(self) -> Iterator[None]:
        executor, model = self._executor, self._executor.anatomy.model
        blocks, random = executor.blocks, executor.device.random_state()
        executor.blocks = self._blocks
        model.eval()
        try:
            with torch.no_grad(), executor.visits.following(self.schedule):
                yield
        finally:
            executor.forget_calls()
            executor.blocks = blocks
            model.train()
            executor.device.restore_random_state(random)
            executor.visits.moves.book_waits()

    def losses(self, batch: ForwardBatch, *, last: bool) -> torch.Tensor:
        """Returns the loss of every token, 0 where it is no label: (rows, tokens) float64, in host memory. Only inside `open`.
        `batch`: no more micro-batches than a sweep has. `last` stops prefetching for rows that will not come."""
        head, (input_ids, labels) = self._executor.head, batch.tensors()
        self._executor.visits.begin_round(last=last)
        targets = head.upload_targets(shifted(labels))
        hidden, link = self._hidden(input_ids, batch), self._executor.visits.link
        if link is None:
            return head.token_losses(hidden, targets).tokens.by_token()
        return self._shared(hidden, targets, link)

    def _shared(self, hidden: torch.Tensor, targets: torch.Tensor, link: Link) -> torch.Tensor:
        """Returns the losses on all ranks. The one with the head, or its last piece, finds them."""
        head = self._executor.head
        losses = torch.zeros(targets.shape, dtype=torch.float64)
        if head.stages:
            link.all_arrived(hidden)
            losses = head.token_losses(hidden, targets).tokens.by_token().contiguous()
        link.settle()
        return link.ranks.share(losses, self._executor.model.owners[-1])

    def next_logits(self, batch: ForwardBatch, at: Sequence[tuple[int, int]], *, last: bool) -> torch.Tensor:
        """Returns the logits of the tokens that follow those `at` (row, place): (len(at), vocabulary) float32, in host memory.
        Only inside `open`. `batch`, `last`: as in `losses`."""
        visits = self._executor.visits
        assert visits.link is None, "only one of several ranks has the head (alike.refuse_keys)"
        visits.begin_round(last=last)
        hidden = self._hidden(batch.tensors()[0], batch)
        visits.divide(())
        rows, places = (torch.tensor(numbers) for numbers in zip(*at, strict=True))
        return self._executor.head.logits(hidden[rows, places].unsqueeze(1)).cpu()  # sync: as in `losses`

    def weights(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Visits all stages of this rank, and yields those that own parameters with their weights: 1-D, in the compute dtype,
        on the device. Only inside `open`. A stage's weights are there until the next one is asked for; ask for all, or
        call `stop_ahead`."""
        visits = self._executor.visits
        visits.begin_round(last=True)
        if visits.link is not None:
            visits.link.pause()
        visits.look_up(None)
        for planned in self.schedule.visits:
            visit, flat = visits.enter(planned.phase, planned.stage)
            visits.inputs([])  # there are none
            if flat is not None and visit.owner == visit.stage:
                yield visit.stage, flat
            visits.leave(visit)

    def stop_ahead(self) -> None:
        """Forgets what was prefetched for a pass that will not come. Only inside `open`."""
        self._executor.visits.abandon()

    def _hidden(self, input_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Returns the last hidden state (rows, tokens, width), where the batch is."""
        executor, (rows, width) = self._executor, input_ids.shape
        numerics = executor.plan.group
        assert rows <= self.rows, (rows, self.rows)
        parts = _micro_batches(batch, numerics, rows, width)
        executor.visits.divide(parts)
        if executor.visits.link is not None:
            executor.visits.link.begin_sweep(parts, width)
        divided = executor.streamed.divided(parts, batch.documents, width, step=numerics.document_step)
        ids, positions = executor.embeddings.place_ids(input_ids, torch.arange(width).unsqueeze(0))
        hidden = executor.streamed.hidden(ids, positions, divided)
        executor.forget_calls()
        return hidden


# ---- weights that pass through memory --------------------------------------------------------------------------------
# As many stages as the given memory has room for are read once and stay, on the device where it has memory of its own, then in
# RAM. The others take turns in two slots, and one thread reads the next while the last computes. Embeddings of tokens and
# positions are read by the rows that are looked up. What takes turns is read best as it lies in the model's files
# (`anatomy.whole_in_place`): a stage at once, into huge pages, without the page cache.

# Fills a contiguous 1-D host tensor with elements of the named tensor of the model, from the given one on.
ReadInto = Callable[[str, torch.Tensor, int], None]
# Fills 1-D host memory of bytes, which begins at a page, with a piece of a stage's source.
ReadPages = Callable[[Piece, torch.Tensor], None]

HUGE_PAGE = 2 << 20  # bytes
SLOTS = 2  # of stages that do not stay
_SPREAD = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly, however many are taken


@dataclass(frozen=True, slots=True)
class Visited:
    """Describes the stages whose weights a pass needs as a whole, in the order of its visits. Bytes."""

    by_rows: frozenset[int]  # embeddings of which only the rows that are looked up are read
    order: tuple[int, ...]  # a tied embedding comes where the head does
    sizes: dict[int, int]
    blocks: frozenset[int]

    @classmethod
    def of(cls, anatomy: Anatomy, dtype: torch.dtype) -> Visited:
        """Finds them. Call it before any forward is replaced."""
        modules = [stage.module if stage.kind == "embedding" else None for stage in anatomy.stages]
        by_rows = frozenset(i for i, m in enumerate(modules) if is_lookup(m) and scales_rows(m))
        order = [owner for i in range(len(modules)) if (owner := _owner(anatomy, i, by_rows)) is not None]
        sizes = {owner: anatomy.stages[owner].params * dtype.itemsize for owner in order}
        return cls(by_rows, tuple(order), sizes, frozenset(i for i in sizes if anatomy.stages[i].kind == "block"))

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def largest(self) -> int:
        return max(self.sizes.values(), default=0)

    @property
    def least(self) -> int:
        return min(needed for needed, _, _ in self._choices(SLOTS))

    def on_device(self, memory: int) -> frozenset[int]:
        """Chooses the stages that stay in this much memory of a device, beside one of the others at a time."""
        fitting = [(kept, chosen) for needed, kept, chosen in self._choices(slots=1) if needed <= memory]
        return max(fitting, key=lambda choice: choice[0])[1] if fitting else frozenset()

    def staying(self, memory: int, on_device: frozenset[int] = frozenset()) -> frozenset[int]:
        """Chooses the stages that stay in this much RAM, of those that are not `on_device`, which only come through it.

        Raises PlanError if it is too little for any pass."""
        fitting = [(kept, chosen) for needed, kept, chosen in self._choices(SLOTS, on_device) if needed <= memory]
        if not fitting:
            least, left = gib(self.least), gib(max(0, memory))
            raise PlanError(
                f"the model's weights need at least {least} of RAM at once, and {left} are left for them",
                hint="raise offload.max_memory.cpu, or compute in bfloat16",
            )
        return max(fitting, key=lambda choice: choice[0])[1]

    def _choices(self, slots: int, elsewhere: frozenset[int] = frozenset()) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Yields (memory needed, resident bytes, resident stages) for 0, 1, 2 ... resident stages.

        What is no block comes first: left outside, a head would set the size of the slots. Then blocks spread evenly over the
        model, so that the drive never pauses for a long run of resident ones."""
        free = self.sizes.keys() - elsewhere
        order = sorted(free, key=lambda i: (i in self.blocks, i * _SPREAD % 1 if i in self.blocks else i))
        for count in range(len(order) + 1):
            kept = sum(self.sizes[i] for i in order[:count])
            largest = max((self.sizes[i] for i in (*order[count:], *elsewhere)), default=0)
            yield kept + slots * largest, kept, frozenset(order[:count])


def _owner(anatomy: Anatomy, stage: int, by_rows: frozenset[int]) -> int | None:
    """Returns the stage whose weights a visit of `stage` needs as a whole, or None."""
    owner = anatomy.owner(stage)
    index = next(i for i, other in enumerate(anatomy.stages) if other is owner)
    return index if owner.params and stage not in by_rows else None


class WeightStream:
    """Owns the weights in memory and the thread that reads them. Close it to end the thread.

    A pass visits the stages in running order, each once: `begin_pass`, then `installed` or `looked_up` for every stage.
    """

    def __init__(
        self, anatomy: Anatomy, read: ReadInto, *, dtype: torch.dtype, memory: int, device: torch.device | None = None,
        device_memory: int = 0, pages: ReadPages | None = None,
    ) -> None:  # fmt: skip
        """Chooses what stays. `memory`: bytes of host memory for weights; slots may take a huge page more. `device`: where
        stages compute, and `device_memory`: bytes of its own for weights; 0: one stage is there at a time. `pages`: every stage
        has a source and is read by it; `read` is then for rows, and is called by the thread that looks them up.

        Raises PlanError where two slots for the largest stage do not fit. Call it before any forward is replaced."""
        self.anatomy, self.device, self._dtype = anatomy, device or torch.device("cpu"), dtype
        self._read_into, self._read_pages, visited = read, pages, Visited.of(anatomy, dtype)
        self.by_rows, self._order, sizes = visited.by_rows, visited.order, visited.sizes
        # What stays on the device comes through the slots in RAM, which its largest stage must not make too large.
        self.on_device = frozenset(i for i in visited.on_device(device_memory) if SLOTS * sizes[i] <= memory)
        self.staying = visited.staying(memory, self.on_device)
        largest = max((size for i, size in sizes.items() if i not in self.staying), default=0)
        self.memory = sum(sizes[i] for i in self.staying) + SLOTS * largest
        self.device_memory = sum(sizes[i] for i in self.on_device)
        self._held = self.staying | self.on_device
        self.streamed_bytes = sum(sizes[i] for i in self._order if i not in self._held)  # read in every pass
        slots = _mapped(SLOTS * largest, huge=pages is not None).view(dtype)
        self._free = list(slots.view(SLOTS, -1)) if largest else []
        self._resident: dict[int, torch.Tensor] = {}  # of stages that stay, once they are read
        self._coming: deque[tuple[int, torch.Tensor, Future[None]]] = deque()
        self._place = self._asked = self._end = 0  # in passes end to end: visits begun, reads asked for, reads to ask for
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ---- a pass ----------------------------------------------------------------------------------------------------

    def begin_pass(self, *, last: bool) -> None:
        """Begins a pass over all stages. `last`: none follows, so nothing is read for it."""
        assert self._place % max(1, len(self._order)) == 0, "a pass visits every stage"
        self._end = self._place + len(self._order) * (1 if last else 2)
        self._ask()

    @contextmanager
    def installed(self, stage: int) -> Iterator[Installed]:
        """Installs the weights of the next stage in the model, inside. May wait for their read. Raises what reading raised."""
        owner = _owner(self.anatomy, stage, self.by_rows)
        if owner is None:
            yield Installed()
            return
        assert owner == self._order[self._place % len(self._order)], (stage, self._place)
        self._place += 1
        flat = self._resident[owner] if owner in self._resident else self._arrived(owner)
        weights = flat[: self.anatomy.stages[owner].params].to(self.device)
        try:
            with self.anatomy.stages[owner].installed(weights) as parameters:
                yield parameters
        finally:
            if owner not in self._held:
                self._free.append(flat)
            self._ask()

    # ---- experts that are stages of their own --------------------------------------------------------------------------

    def ranges(self, stage: int) -> range:
        """Returns the stages that hold the experts of a block; none where the block holds them itself."""
        end = stage + 1
        if self.anatomy.stages[stage].cut is not None:
            while end < len(self.anatomy.stages) and self.anatomy.stages[end].expert_range is not None:
                end += 1
        return range(stage + 1, end)

    def expert_sums(self, ranges: range, sent: Sequence[Sent]) -> list[torch.Tensor]:
        """Visits ranges of experts, each for all that was `sent`, where it lies. Returns the weighted outputs of each part's
        tokens, (tokens, width) float32: rounded after each range, they would depend on where a block is cut."""
        sums = [torch.zeros(part.hidden.shape, dtype=torch.float32, device=part.hidden.device) for part in sent]
        for stage in ranges:
            with self.installed(stage) as parameters, torch.no_grad():
                for part, total in zip(sent, sums, strict=True):
                    on_device = total.to(self.device)
                    add_outputs(self.anatomy.stages[stage], parameters, part.to(self.device), on_device)
                    if on_device is not total:
                        total.copy_(on_device)
        return sums

    # ---- reading ---------------------------------------------------------------------------------------------------------

    def _arrived(self, owner: int) -> torch.Tensor:
        """Waits for the read of a stage that is not there. What stays on the device is copied there, and leaves its slot."""
        coming, flat, read = self._coming.popleft()
        assert coming == owner, (coming, owner)
        read.result()
        if owner in self.on_device:
            slot, flat = flat, flat[: self.anatomy.stages[owner].params].to(self.device, copy=True)
            self._free.append(slot)
            self._resident[owner] = flat
            self._ask()
        elif owner in self.staying:
            self._resident[owner] = flat
        return flat

    def looked_up(self, stage: int, run: Callable[[torch.Tensor], Any], ids: torch.Tensor) -> Any:
        """Runs the own forward of an embedding of `by_rows` for `ids` (any shape), with the rows that they name, read now.

        Raises ValueError for an id that no row has."""
        module = self.anatomy.stages[stage].module
        assert isinstance(module, nn.Embedding)
        distinct, places = ids.cpu().unique(return_inverse=True)
        if distinct.numel() and not 0 <= int(distinct[0]) <= int(distinct[-1]) < module.num_embeddings:
            raise ValueError(f"ids {int(distinct[0])} to {int(distinct[-1])} of {module.num_embeddings} rows")
        rows = torch.empty(distinct.numel(), module.embedding_dim, dtype=self._dtype)
        wanted = self.anatomy.stages[stage].tensors[0].name, distinct.tolist(), rows
        if self._read_pages is None:
            self._thread.submit(self._read_rows, *wanted).result()
        else:  # does not wait for the stages that are asked for
            self._read_rows(*wanted)
        with torch.no_grad(), holding(module, rows.to(self.device), padding=None):
            return run(places.to(self.device))

    # ---- reading (inside the thread) -------------------------------------------------------------------------------

    def _ask(self) -> None:
        while self._asked < self._end:
            owner = self._order[self._asked % len(self._order)]
            is_here = owner in self._resident or any(other == owner for other, _, _ in self._coming)
            if owner in self.staying and not is_here:
                size = self.anatomy.stages[owner].params * self._dtype.itemsize
                self._begin(owner, _mapped(size).view(self._dtype))
            elif owner not in self._held or not is_here:
                if not self._free:
                    return
                self._begin(owner, self._free.pop())
            self._asked += 1

    def _begin(self, owner: int, flat: torch.Tensor) -> None:
        self._coming.append((owner, flat, self._thread.submit(self._read, owner, flat)))

    def _read(self, owner: int, flat: torch.Tensor) -> None:
        if self._read_pages is not None:
            for piece in self.anatomy.stages[owner].source:
                self._read_pages(piece, flat.view(torch.uint8)[piece.place : piece.place + piece.size])
            return
        for tensor in self.anatomy.stages[owner].tensors:
            self._read_into(tensor.name, flat[tensor.offset : tensor.offset + tensor.numel], tensor.first)

    def _read_rows(self, name: str, ids: Sequence[int], rows: torch.Tensor) -> None:
        """Reads rows of a table; neighbours at once. ids: in rising order."""
        begin = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or ids[end] != ids[end - 1] + 1:
                self._read_into(name, rows[begin:end].view(-1), ids[begin] * rows.shape[1])
                begin = end


class StreamedLosses:
    """Computes losses: the model's own forward, stage by stage, for all rows of a pass. The model is in evaluation mode; its
    stages' forwards are replaced until this is closed.

    Inside a stage rows are computed micro-batch by micro-batch. Two boundaries of all rows are in host memory at most: the one
    that goes into a stage and the one that comes out."""

    def __init__(self, weights: WeightStream, numerics: Numerics) -> None:
        self.weights, self._numerics = weights, numerics
        self._parts: tuple[MicroBatch, ...] = ()
        self.passes = 0  # so far
        self._head = Head(weights.anatomy.model)
        self._streamed = StreamedModel(weights.anatomy, self, weights.device, None)
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity of the source, which is kept with it

    def __enter__(self) -> StreamedLosses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._streamed.close()

    def losses(self, batch: ForwardBatch, *, last: bool) -> torch.Tensor:
        """Runs one pass over the model. Returns the loss of every token, 0 where it is no label: (rows, tokens) float64, in
        host memory. `last`: no pass follows."""
        return self.token_losses(batch, shifted(batch.tensors()[1]), last=last).by_token()

    def token_losses(self, batch: ForwardBatch, targets: torch.Tensor, *, last: bool) -> TokenLoss:
        """Runs one pass over the model, for what each token's logits say of its target. targets: (rows, tokens) int64."""
        anatomy, device, numerics = self.weights.anatomy, self.weights.device, self._numerics
        input_ids, _ = batch.tensors()
        rows, width = input_ids.shape
        self.weights.begin_pass(last=last)
        self.passes += 1
        self._shared.clear()
        self._parts = _micro_batches(batch, numerics, rows, width)
        divided = self._streamed.divided(self._parts, batch.documents, width, step=numerics.document_step)
        with torch.no_grad():
            hidden = self._streamed.hidden(input_ids, torch.arange(width).unsqueeze(0), divided)
        self._streamed.tape.forget()
        tokens = TokenLoss.of(targets.to(device))
        for index, stage in enumerate(anatomy.stages):
            if stage.kind == "head":
                first = stage.vocabulary[0] if stage.vocabulary else 0
                with torch.no_grad(), self._head.stubbed(), self.weights.installed(index):
                    for part in self._parts:
                        some = part.of(hidden).contiguous().to(device)
                        for cut in pieces(some.shape[0], some.shape[1], numerics.head_chunk_tokens):
                            tokens.fold(TokenPart(part, cut), self._head.logits(some[cut]), first=first)
        return tokens

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """Returns a stage's output for all rows, in host memory. x: (rows, tokens, ...), ids or a boundary."""
        weights = self.weights
        if call.stage in weights.by_rows:
            rows: torch.Tensor = weights.looked_up(call.stage, call.run, x)
            return rows.cpu()
        ranges, sent = weights.ranges(call.stage), list[Sent]()
        with weights.installed(call.stage) as parameters:
            if not x.is_floating_point():  # all rows may share the ids
                return call.run(x.to(weights.device)).cpu()
            y: torch.Tensor | None = None
            for number, part in enumerate(self._parts):
                out = call.of(number)(part.of(x).contiguous().to(weights.device))
                if y is None:
                    y = torch.zeros(*x.shape[:2], *out.shape[2:], dtype=out.dtype)
                part.of(y).copy_(out)
                if ranges:
                    sent.append(Sent.by(parameters).to(x.device))
        assert y is not None
        for part, sums in zip(self._parts, weights.expert_sums(ranges, sent), strict=False):
            part.of(y).copy_(part.of(y) + sums.view(*part.of(y).shape))
        return y

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None:
        raise AssertionError("nothing goes back")

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self._shared:
            self._shared[id(value)] = (value, value.to(self.weights.device))
        return self._shared[id(value)][1]


def _mapped(size: int, *, huge: bool = False) -> torch.Tensor:
    """Returns memory that begins at a page: 1-D, uint8. `huge`: in huge pages where the kernel gives them, so that a read of a
    drive has few parts: one drive gave 2.2 GB/s for 1.0."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    room = mmap.mmap(-1, size + HUGE_PAGE if huge else size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    if not huge:
        return whole
    with suppress(OSError):  # a kernel without huge pages; this is only advice
        room.madvise(mmap.MADV_HUGEPAGE)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + size]


# ---- generating ------------------------------------------------------------------------------------------------------
# Lets transformers' own `generate` run while the weights pass through memory: its loop, its caches, its sampling.
#
# The model's forwards stay as they are: a stage's parameters are there while its own forward runs, and nothing else differs.
# So a pass gives what it gives in memory, and all rows of a batch share one read of the weights.

PROMPT_STEP = 32  # tokens
_ATTENDED_CODE = 12 << 10  # bytes of code for attention to each number of tokens, forward
_OF_A_CHOICE = 32  # bytes per row and token of the vocabulary: float32 scores, sorted, their order, and what is made of them


@contextmanager
def passing(stream: WeightStream) -> Iterator[PreTrainedModel]:
    """Gives the model to call, inside: every forward of it is one pass of `stream`. Without gradients; ids on the stream's
    device. Every `generate` begins with modules as they were loaded."""
    model = stream.anatomy.model
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    placed = place_buffers(model, stream.device)
    begins = model.register_forward_pre_hook(lambda *_: stream.begin_pass(last=False))
    model.eval()
    model.config.use_cache = True
    # `generate` sends ids to where the first parameter rests.
    nowhere = torch.empty(0, embedding.embedding_dim, dtype=embedding.weight.dtype, device=stream.device)
    own = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        state.put_back()
        return own(*args, **kwargs)

    replaced = {"generate": generate, "prepare_inputs_for_generation": _prepared(model)}
    vars(model).update(replaced)
    state = ModuleState(model)
    try:
        with replaced_forwards(_forwards(stream)), holding(embedding, nowhere, padding=None), torch.no_grad():
            yield model
    finally:
        begins.remove()
        state.put_back()
        for name in replaced:
            del vars(model)[name]
        put_back(placed)


def _prepared(model: PreTrainedModel) -> Callable[..., Any]:
    """Returns the model's own preparation of a pass, which computes all of a row anew where its positions change: what was
    cached has the old ones. In transformers only the classes of Phi do so."""
    own, changes = model.prepare_inputs_for_generation, [turn.tokens for turn in turns(model) if not turn.growing]

    @wraps(own)  # `generate` reads its arguments
    def prepared(input_ids: torch.Tensor, past_key_values: Any = None, **given: Any) -> Any:
        tokens = input_ids.shape[1]
        if past_key_values and any(past_key_values.get_seq_length() <= change < tokens for change in changes):
            past_key_values, given["next_sequence_length"] = None, None
        return own(input_ids, past_key_values=past_key_values, **given)

    return prepared


def _forwards(stream: WeightStream) -> dict[nn.Module, Callable[..., Any]]:
    """Returns what replaces the forward of every module that is a stage, or the last one's linear layer."""
    anatomy, head = stream.anatomy, stream.anatomy.model.get_output_embeddings()
    numbered = [
        (head if stage.module is None else stage.module, number)
        for number, stage in enumerate(anatomy.stages)
        if stage.expert_range is None  # visited with its block
    ]
    return {
        module: _forward(stream, own_forward(module), [number for _, number in numbers])
        for module, numbers in groupby(numbered, key=lambda one: one[0])
    }


def _forward(stream: WeightStream, own: Callable[..., Any], stages: list[int]) -> Callable[..., Any]:
    """Returns a forward with weights. Of a head that is cut along the vocabulary, each of its `stages` gives some logits."""
    name = stream.anatomy.stages[stages[0]].name

    def with_weights(*args: Any, **kwargs: Any) -> Any:
        args = tuple(regular(arg) if isinstance(arg, torch.Tensor) and arg.dim() else arg for arg in args)
        if stages[0] in stream.by_rows:
            return stream.looked_up(stages[0], own, *args, **kwargs)
        if ranges := stream.ranges(stages[0]):
            with stream.installed(stages[0]) as parameters:
                out = own(*args, **kwargs)
                sent = Sent.by(parameters)
            y, (sums,) = boundary_of(out, name), stream.expert_sums(ranges, [sent])
            y = (y + sums.view(y.shape)).to(y.dtype)
            return (y, *out[1:]) if isinstance(out, tuple) else y
        outputs = []
        for stage in stages:
            with stream.installed(stage):
                outputs.append(own(*args, **kwargs))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    return with_weights


def prompt_step(model: PreTrainedModel, device: torch.device) -> int:
    """Returns the step of `rounded_up` to which prompts are padded on the left; 0: to no more than the longest of a batch.

    On a CPU libraries keep code for each length in bfloat16. Convolutions would see the padding, and positions that depend on
    the length of a row would change.
    """
    if device.type != "cpu" or model.dtype != torch.bfloat16 or turns(model):
        return 0
    return 0 if any(isinstance(module, nn.Conv1d) for module in model.base_model.modules()) else PROMPT_STEP


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationMemory:
    """Tells what generating takes beside weights, at its peak. Bytes."""

    cache: int  # keys and values of all rows at their full length
    work: int  # outputs of modules, and what a cache needs to grow

    @property
    def total(self) -> int:
        return self.cache + self.work


def room(model: PreTrainedModel, *, rows: int, prompt: int, new: int) -> GenerationMemory:
    """Finds what `rows` prompts of `prompt` tokens take that are continued by `new` tokens: runs the first pass and the last
    one on fake tensors. Raises UsageError for a model that keeps no cache."""
    whole = prompt + new
    anew = max((turn.tokens + 1 for turn in turns(model) if not turn.growing and prompt <= turn.tokens < whole), default=0)
    with (
        only_refusals(model, shape=(rows, whole)), torch.no_grad(), tracing(model), with_fake_parameters(model),
    ):  # fmt: skip
        first = LiveBytes(*model.parameters())
        _pass(model, rows, max(prompt, anew), max(prompt, anew), None, first)
        last = LiveBytes(*model.parameters())
        cache = _pass(model, rows, whole, whole, None, last)
        kept, rests, last.peak = _nbytes(cache), last.live, 0
        _pass(model, rows, 1, whole + 1, cache, last)
    cached_before = kept * anew // whole  # what was cached stays until a row is computed anew
    choice = rows * model.config.get_text_config().vocab_size * _OF_A_CHOICE
    return GenerationMemory(cache=kept, work=max(first.peak + cached_before - kept, last.peak - rests) + choice)


def generation_code(model: PreTrainedModel, *, prompt: int, new: int) -> int:
    """Returns the bytes of code that libraries keep on a CPU in bfloat16, for prompts of up to `prompt` tokens, padded to
    `prompt_step`, and `new` tokens after each: of products for each length of a prompt, of attention for each length."""
    matrices = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2}
    products = len(matrices) * lengths_up_to(prompt, PROMPT_STEP)
    return min(products, MOST_PRODUCTS) * PRODUCT_CODE + (prompt + new) * _ATTENDED_CODE


def _pass(model: PreTrainedModel, rows: int, tokens: int, end: int, cache: Any, live: LiveBytes) -> Any:
    """Runs a pass over `tokens` tokens, up to the one at `end`, and returns the cache."""
    given: dict[str, Any] = {"input_ids": torch.zeros(rows, tokens, dtype=torch.long), "past_key_values": cache}
    given["attention_mask"] = torch.ones(rows, end, dtype=torch.long)
    given["position_ids"] = torch.arange(end - tokens, end).unsqueeze(0)
    of_last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    with LastPosition(end), live:
        out = model(**given, **of_last, use_cache=True, return_dict=True)
    cache = getattr(out, "past_key_values", None)
    if cache is None:
        raise UsageError("it keeps no cache of keys and values")
    return cache


def _nbytes(cache: Any) -> int:
    """Returns the bytes of keys and values in a cache of transformers; what it counts with is not worth counting."""
    held = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in held if tensor.is_floating_point())
