"""Fills RAM. Tensors that save most traffic per byte of RAM come first; outputs of operators are ranked by FLOPs per byte."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import inf
from typing import Any

from ..core.units import align_up
from ..spec.model import ModelSpec, OperatorSpec, StageSpec
from ..spec.plan import Numerics, StagePlan
from .bound import uploads
from .boundary_layout import OUTPUT_ALIGN, RECORD_ALIGN, Kept, device_bytes
from .costs import Costs
from .device import WEIGHTS_ON_DEVICE, stages_at_turn
from .layout import ARENA_UNIT, Homes, Layout, SharedSizes, may_take_turns, need_rest
from .memory import device_memory, most_needed, update_scratch
from .plan_request import PlanRequest
from .schedule import Schedule

SHARES = (0.0, 0.5, 1.0)  # shares of the device's spare memory
TURN = -1.0  # another value of `Candidate.there`: only stages at the turn of a step, whose updates nothing else hides
KINDS = ("weights", "boundaries", "gradients", "states")  # fields of `Homes`
_LOADED = ("weights", "states")
_HUGE_PAGES = 1 + 1 / 512  # adds the page tables of the arena
_IN_TURNS = {"gradients": "boundaries", "boundaries": "gradients"}  # kinds that may lie in the same memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Tensors of one kind that can rest in RAM instead of on the ssd: one stage's, or those of all stages that share
    slots."""

    kind: str
    stages: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes of RAM, per stage
    freed: int  # bytes of slots that are free once all of them rest in RAM
    saved: float  # bytes of traffic per step

    @property
    def order(self) -> tuple[float, int, int, int]:
        """Returns a sort key: the most traffic saved per byte of RAM first, and stages of one kind spread over the step."""
        size = sum(self.sizes) - self.freed
        per_byte = self.saved / size if size > 0 else float("inf")
        return (-per_byte, KINDS.index(self.kind), spread(self.stages[0]), len(self.stages))


@cache
def spread(stage: int) -> int:
    return int(f"{stage:016b}"[::-1], 2)


def traffic_items(shared: SharedSizes, request: PlanRequest, homes: Homes, spans: Layout) -> list[Item]:
    """Returns the tensors that may move to RAM."""
    single = [
        item
        for stage in shared.model.stages
        if stage.params
        for item in _items_of(shared, request, homes, spans.stages[stage.index], stage)
        if item.kind == "boundaries" or homes.states[stage.index] != "gpu"
    ]
    return [*single, *_together(single, homes, spans)]


def _items_of(shared: SharedSizes, request: PlanRequest, homes: Homes, plan: StagePlan, stage: StageSpec) -> Iterator[Item]:
    index = stage.index
    weights, gradients, states = stage.weight_bytes, shared.gradient_sizes[index], shared.state_sizes[index]
    sweeps = request.sweeps or 1
    rests = int(plan.deferred) + sweeps * int(shared.has_two_users[index]) + sweeps - 1
    boundary = shared.boundary_size(index, homes.kept[index])
    # Used in forward and in backward. Weights that two visits in a row need are kept, at a sweep's end too.
    uses = sweeps * (2 if stage.keeps_input else 1) + int(bool(request.norm_first) and stage.weights_in_backward)
    # If the planner chooses the commit interval, the order is the one for frequent commits. Candidates that put states first
    # stand for rare commits.
    every = 1 if request.commit_every == "auto" else request.commit_every
    spared = 1.0 - (1.0 / every if every else 0.0)  # writes saved: commits also write what rests in RAM
    options: tuple[tuple[str, tuple[int, ...], float, bool], ...] = (
        (
            "weights",
            (weights,),
            uses * (plan.looked_up or weights) + spared * stage.trained_weight_bytes,
            request.weights is None,
        ),
        ("boundaries", (boundary,), (2.0 * sweeps + bool(request.norm_first)) * boundary, request.boundaries is None),
        ("gradients", (gradients,), 2.0 * rests * gradients, request.gradients is None),
        ("states", states, (1.0 + spared) * sum(states), request.states is None),
    )
    for kind, sizes, saved, free in options:
        if free and saved:
            size = sum(align_up(size, ARENA_UNIT) for size in sizes)
            yield Item(kind=kind, stages=(index,), sizes=(size,), freed=0, saved=saved)


def _together(single: list[Item], homes: Homes, spans: Layout) -> Iterator[Item]:
    """Joins the tensors of all stages that share slots, because the slots are free only once the last of these stages rests in
    RAM. For a few large stages (an embedding and a head) the slots take as much as the homes."""
    shared: dict[tuple[str, int], list[Item]] = {}
    for item in single:
        stage = spans.stages[item.stages[0]]
        if item.kind in ("weights", "gradients") and getattr(homes, item.kind)[stage.stage] == "ssd":
            shared.setdefault((item.kind, stage.slot_class), []).append(item)
        elif item.kind == "boundaries":
            shared.setdefault((item.kind, 0), []).append(item)
    for (kind, number), items in sorted(shared.items()):
        members = [s for s in spans.stages if s.slot_class == number and s.momentum_at.size and not s.updated_on_device]
        slots = {
            "weights": spans.slot_classes[number].weight_slots,
            "gradients": spans.slot_classes[number].gradient_slots if len(items) == len(members) else (),
            "boundaries": spans.boundary_slots,
        }[kind]
        if slots:
            yield Item(
                kind=kind,
                stages=tuple(item.stages[0] for item in items),
                sizes=tuple(item.sizes[0] for item in items),
                freed=sum(align_up(span.size, ARENA_UNIT) for span in slots),
                saved=sum(item.saved for item in items),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """An operator's output for all rows of a sweep."""

    stage: int
    operator: OperatorSpec
    size: int
    record: int  # bytes that it takes in the record of one micro-batch

    @property
    def order(self) -> tuple[float, int, int, int]:
        return (-self.operator.flops / max(1, self.operator.bytes), spread(self.stage), self.stage, self.operator.index)


def outputs_of(model: ModelSpec, request: PlanRequest) -> list[Output]:
    """Lists outputs, the most FLOPs saved per byte first."""
    outputs = [
        Output(
            stage=stage.index,
            operator=operator,
            size=operator.bytes * request.group.micro_batches,
            record=align_up(operator.bytes, OUTPUT_ALIGN),
        )
        for stage in model.stages
        for operator in stage.operators
    ]
    return sorted(outputs, key=lambda output: output.order)


def worth_most(outputs: list[Output], share: float) -> list[Output]:
    """Returns those of these outputs that are left within `share` of their bytes. Those that save least per byte are left out
    first, and of equal ones the smallest: so all blocks copy alike, as each waits for its own copies."""

    def worth(output: Output) -> tuple[float, int, int]:
        operator = output.operator
        return -operator.flops / max(1, operator.bytes), -operator.bytes, spread(output.stage)

    left, chosen = share * sum(output.size for output in outputs), set[tuple[int, int]]()
    for output in sorted(outputs, key=worth):
        left -= output.size
        if left < 0:
            break
        chosen.add((output.stage, output.operator.index))
    return [output for output in outputs if (output.stage, output.operator.index) in chosen]


def fitting(model: ModelSpec, outputs: list[Output], numerics: Numerics, room: int) -> Kept:
    """Returns, by stage, the outputs that fit in `room` bytes of the device, taken in order."""
    chosen: list[list[int]] = [[] for _ in model.stages]
    for output in outputs:
        size = align_up(output.operator.bytes, RECORD_ALIGN) * numerics.micro_batches
        if size <= room:
            room -= size
            chosen[output.stage].append(output.operator.index)
    return tuple(tuple(sorted(kept)) for kept in chosen)


@dataclass(slots=True)
class _Filled:
    """Says what a stage's boundary holds while outputs are chosen."""

    there: set[int]  # operators whose outputs are kept, here or on the device
    outputs: int  # bytes of those kept here, in the record of one micro-batch
    size: int  # bytes of RAM of the boundary with them
    refused: float = inf  # bytes of an output that did not fit


@dataclass(slots=True)
class GreedyFill:
    """Moves tensors to RAM while there is room. `moves` remembers what each move changed, so that moves can be undone."""

    shared: SharedSizes
    request: PlanRequest
    fields: dict[str, list[Any]]  # fields of `Homes`
    spare: int
    turns: tuple[int, ...]  # by stage: bytes of gradients that may lie where its boundary does, in turns with it
    spare_loading: int  # spare RAM while a checkpoint is read directly into the homes of weights and states
    moves: list[list[tuple[str, int, Any]]] = field(default_factory=list)  # each a list of (field, stage, value before)

    @classmethod
    def of(cls, shared: SharedSizes, request: PlanRequest, homes: Homes, peaks: dict[str, int]) -> GreedyFill:
        """Begins with homes that take `peaks`."""
        return cls(
            shared=shared,
            request=request,
            fields={name.name: list(getattr(homes, name.name)) for name in fields(Homes)},
            turns=tuple(
                size if may_take_turns(shared, request, index) else 0 for index, size in enumerate(shared.gradient_sizes)
            ),
            spare=int((request.cpu_budget - peaks["train"]) / _HUGE_PAGES),
            spare_loading=request.cpu_budget - peaks["load"],
        )

    def copy(self) -> GreedyFill:
        """Returns a copy that makes its own moves."""
        return replace(self, fields={name: list(values) for name, values in self.fields.items()}, moves=[])

    @property
    def homes(self) -> Homes:
        return Homes(**{name: tuple(values) for name, values in self.fields.items()})

    def settle(self, items: Sequence[Item], *, share: float = 1.0) -> None:
        """Moves tensors to RAM in order, as long as they fit in `share` of the spare RAM."""
        limit = self.spare - int(self.spare * share)  # RAM that must stay free
        for item in items:
            kind, tiers = item.kind, self.fields[item.kind]
            left = [(stage, size) for stage, size in zip(item.stages, item.sizes, strict=True) if tiers[stage] == "ssd"]
            if not left:
                continue
            homes = sum([size for _, size in left])
            size, loaded = homes - item.freed, homes if kind in _LOADED else 0
            if kind in _IN_TURNS:
                size -= sum([self._in_turns(kind, stage) for stage, _ in left])
            if self.spare - size < limit or loaded > self.spare_loading:
                continue
            self.spare_loading -= loaded
            self._take(size, [(kind, stage, "cpu") for stage, _ in left])

    def keep(self, outputs: list[Output], *, share: float) -> None:
        """Keeps outputs of operators in order, within `share` of the spare RAM. Their boundary moves to RAM with them."""
        limit = self.spare - int(self.spare * share)  # RAM that must stay free
        boundaries, gradients = self.fields["boundaries"], self.fields["gradients"]
        stages: dict[int, _Filled] = {}
        for output in outputs:
            stage = output.stage
            if (filled := stages.get(stage)) is None:
                filled = stages[stage] = self._filled(stage)
            # What did not fit beside this stage's outputs does not fit later, when others have taken more.
            if output.record >= filled.refused or output.operator.index in filled.there:
                continue
            at_home = boundaries[stage] == "cpu"
            if not at_home and self.request.boundaries is not None:
                continue
            whole = align_up(self.shared.filled_size(stage, filled.outputs + output.record), ARENA_UNIT)
            in_turns = self.turns[stage] if gradients[stage] == "cpu" else 0
            size = max(whole, in_turns) - max(filled.size if at_home else 0, in_turns)
            if self.spare - size < limit:
                filled.refused = output.record
                continue
            kept, index = self.fields["kept"][stage], output.operator.index
            place = bisect(kept, index)
            moved: list[tuple[str, int, Any]] = [("kept", stage, (*kept[:place], index, *kept[place:]))]
            if not at_home:
                moved.append(("boundaries", stage, "cpu"))
            self._take(size, moved)
            filled.there.add(index)
            filled.outputs, filled.size, filled.refused = filled.outputs + output.record, whole, inf

    def _filled(self, stage: int) -> _Filled:
        kept = self.fields["kept"][stage]
        return _Filled(
            there={*kept, *self.fields["kept_there"][stage]},
            outputs=self.shared.outputs_size(stage, kept),
            size=self._size(stage, kept),
        )

    def _in_turns(self, kind: str, stage: int) -> int:
        """Returns the bytes of RAM that tensors of this kind share with others of the stage that are in RAM already."""
        if not self.turns[stage] or self.fields[_IN_TURNS[kind]][stage] != "cpu":
            return 0
        return min(self.turns[stage], self._size(stage, self.fields["kept"][stage]))

    def _size(self, stage: int, kept: tuple[int, ...]) -> int:
        """Returns the bytes of RAM that the stage's boundary takes with these outputs."""
        return align_up(self.shared.boundary_size(stage, kept), ARENA_UNIT)

    def _take(self, size: int, moved: list[tuple[str, int, Any]]) -> None:
        self.moves.append([(name, stage, self.fields[name][stage]) for name, stage, _ in moved])
        self._put(moved)
        self.spare -= size

    def take_back(self) -> bool:
        """Undoes the last move. Returns False if there is none."""
        if self.moves:
            self._put(self.moves.pop())
            return True
        return False

    def _put(self, values: list[tuple[str, int, Any]]) -> None:
        for name, stage, value in values:
            self.fields[name][stage] = value


# ---- a device's own memory -------------------------------------------------------------------------------------------


def may_fill(model: ModelSpec, request: PlanRequest) -> bool:
    """Whether the planner chooses which stages rest on the device, and has room for one of them."""
    asked = (request.weights, request.states, request.gradients, request.device_states)
    if request.device == "cpu" or request.gpu_budget is None or any(asked):
        return False
    if request.kept_there == "room":  # the recipe wants all spare memory for outputs
        return False
    return bool(request.device_states is None and stages_filling(model, request, 1.0))


def stages_filling(model: ModelSpec, request: PlanRequest, share: float) -> tuple[int, ...]:
    """Returns the stages that fill `share` of the device's spare memory. Blocks and the head come first: their weights are
    needed twice in a step, an embedding's once. Stages of one kind are spread over the step, as they are for RAM. If all stages
    fit, all are taken: then weights and sums need no other memory.

    `TURN` takes embeddings and the first block, as far as they fit. Their gradients come last, and the next forward needs them
    first. On the host, compute waits while they come down, are updated and go up."""
    every = [stage.index for stage in model.stages if stage.params]
    if share == 0 or request.gpu_budget is None or not model.layout.on_device or model.quantisation is not None:
        return ()
    outputs = device_bytes(model, request.group, request.kept_there) if isinstance(request.kept_there, tuple) else 0
    everything = replace(request, device_states=tuple(every))
    if share >= 1 and most_needed(model, everything).total + outputs <= request.gpu_budget:
        return tuple(every)
    left = abs(share) * (request.gpu_budget - outputs - most_needed(model, replace(request, device_states=())).total)
    left -= update_scratch(max(model.stages[stage].trained for stage in every))
    sums_rest, chosen = need_rest(model, request), list[int]()
    for stage in stages_at_turn(model) if share == TURN else _by_traffic(model, every):
        spec = model.stages[stage]
        size = spec.weight_bytes + spec.state_bytes + spec.gradient_bytes(request.numerics.accumulate_dtype) * sums_rest[stage]
        if size <= left:
            chosen.append(stage)
            left -= size
    return tuple(sorted(chosen))


def _by_traffic(model: ModelSpec, every: list[int]) -> list[int]:
    return sorted(every, key=lambda stage: (model.stages[stage].kind == "embedding", spread(stage)))


def with_homes_on_device(
    costs: Costs, request: PlanRequest, schedule: Schedule, stages: tuple[StagePlan, ...]
) -> tuple[StagePlan, ...]:
    """Lets weights that rest in RAM also stay on the device, as far as it has room beside all else. Weights that would be
    uploaded most often come first. It takes no room from anything else, so the plan is no slower. It changes nothing that the
    recipe pins, and keeps nothing on a device whose memory is not known."""
    if request.device == "cpu" or request.gpu_budget is None or request.weights is not None:
        return stages
    model, sizes = costs.model, [stage.weight_bytes for stage in costs.model.stages]
    uploaded_again = {owner: times for owner, times in uploads(costs, schedule.visits, stages).items() if times > 1}
    movable = [owner for owner in uploaded_again if stages[owner].weights == "cpu"]
    if not movable:
        return stages
    order = sorted(movable, key=lambda owner: (-uploaded_again[owner], sizes[owner], owner))
    turning = [size for owner, size in enumerate(sizes) if owner not in movable and stages[owner].weights != "gpu"]
    streamed = max(turning, default=0)
    memory = device_memory(model, request, stages)
    homes, left = sum(sizes[owner] for owner in order), request.gpu_budget - (memory.total - memory.turns)
    count = len(order)  # how many stay; with fewer streamed stages the spans may be smaller
    while count and homes + WEIGHTS_ON_DEVICE * streamed > left:
        count -= 1
        homes -= sizes[order[count]]
        streamed = max(streamed, sizes[order[count]])
    if not (chosen := set(order[:count])):
        return stages
    return tuple(replace(stage, weights="gpu") if stage.stage in chosen else stage for stage in stages)
