"""Passes the weights of a model larger than memory through it, stage by stage, to compute forward alone: losses here, tokens in
`engine/generating`.

Nothing trains, so there are no states, no generations and no plan: as many stages as the given memory has room for are read
once and stay, on the device where it has memory of its own, then in RAM. The others take turns in two slots, and one thread
reads the next while the last computes. Embeddings of tokens and positions are read by the rows that are looked up.

What takes turns is read best as it lies in the model's files (engine/in_place): a stage at once, into huge pages, without the
page cache.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..core.errors import PlanError
from ..core.units import gib
from ..spec.model import Piece
from ..spec.plan import MicroBatch, Numerics, even
from .anatomy import Anatomy, Installed
from .experts import Bank, Noting
from .forward_only import Rows
from .loss import Head, Part, TokenLoss, pieces, shifted
from .ranges import Sent, add_outputs
from .streamed import Call, StreamedModel
from .vocabulary import holding, is_lookup, scales_rows

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
        """Returns the bytes of all stages that a pass reads whole."""
        return sum(self.sizes.values())

    @property
    def largest(self) -> int:
        """Counts the largest one."""
        return max(self.sizes.values(), default=0)

    @property
    def least(self) -> int:
        """Counts the least memory that a pass needs."""
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
        self,
        anatomy: Anatomy,
        read: ReadInto,
        *,
        dtype: torch.dtype,
        memory: int,
        device: torch.device | None = None,
        device_memory: int = 0,
        pages: ReadPages | None = None,
    ) -> None:
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
        self._there: dict[int, torch.Tensor] = {}  # of stages that stay, once they are read
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
        flat = self._there[owner] if owner in self._there else self._arrived(owner)
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

    @staticmethod
    def sent(parameters: Installed) -> Sent:
        """Returns what the block that has just computed sent to its experts."""
        (noting,) = parameters.banks
        assert isinstance(noting, Noting)
        return Sent.by(noting)

    def expert_sums(self, ranges: range, sent: Sequence[Sent]) -> list[torch.Tensor]:
        """Visits ranges of experts, each for all that was `sent`, where it lies. Returns the weighted outputs of each part's
        tokens, (tokens, width) float32: rounded after each range, they would depend on where a block is cut."""
        sums = [torch.zeros(part.hidden.shape, dtype=torch.float32, device=part.hidden.device) for part in sent]
        for stage in ranges:
            with self.installed(stage) as parameters, torch.no_grad():
                (bank,) = parameters.banks
                assert isinstance(bank, Bank)
                for part, total in zip(sent, sums, strict=True):
                    computed = total.to(self.device)
                    add_outputs(self.anatomy.stages[stage], bank, part.to(self.device), computed)
                    if computed is not total:
                        total.copy_(computed)
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
            self._there[owner] = flat
            self._ask()
        elif owner in self.staying:
            self._there[owner] = flat
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
        """Asks for as many reads as slots allow, in the order of the visits."""
        while self._asked < self._end:
            owner = self._order[self._asked % len(self._order)]
            there = owner in self._there or any(other == owner for other, _, _ in self._coming)
            if owner in self.staying and not there:
                size = self.anatomy.stages[owner].params * self._dtype.itemsize
                self._begin(owner, _mapped(size).view(self._dtype))
            elif owner not in self._held or not there:
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

    def losses(self, batch: Rows, *, last: bool) -> torch.Tensor:
        """Runs one pass over the model. Returns the loss of every token, 0 where it is no label: (rows, tokens) float64, in
        host memory. `last`: no pass follows."""
        return self.folded(batch, shifted(batch.tensors()[1]), last=last).by_token()

    def folded(self, batch: Rows, targets: torch.Tensor, *, last: bool) -> TokenLoss:
        """Runs one pass over the model, for what each token's logits say of its target. targets: (rows, tokens) int64."""
        anatomy, device, numerics = self.weights.anatomy, self.weights.device, self._numerics
        input_ids, _ = batch.tensors()
        rows, width = input_ids.shape
        self.weights.begin_pass(last=last)
        self.passes += 1
        self._shared.clear()
        self._parts = even(rows, numerics.micro_batch_size, width) if batch.sweeps is None else batch.sweeps[0]
        divided = self._streamed.divided(self._parts, batch.documents, width, step=numerics.document_step)
        with torch.no_grad():
            hidden = self._streamed.hidden(input_ids, torch.arange(width).unsqueeze(0), divided)
        self._streamed.tape.forget()
        tokens = TokenLoss.of(targets.to(device))
        for index, stage in enumerate(anatomy.stages):
            if stage.kind == "head":
                self._fold(index, hidden, tokens, first=stage.vocabulary[0] if stage.vocabulary else 0)
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
                    sent.append(weights.sent(parameters).to(x.device))
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

    def _fold(self, stage: int, hidden: torch.Tensor, tokens: TokenLoss, *, first: int) -> None:
        with torch.no_grad(), self._head.stubbed(), self.weights.installed(stage):
            for part in self._parts:
                batch = part.of(hidden).contiguous().to(self.weights.device)
                for cut in pieces(batch.shape[0], batch.shape[1], self._numerics.head_chunk_tokens):
                    tokens.fold(Part(part, cut), self._head.logits(batch[cut]), first=first)


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
