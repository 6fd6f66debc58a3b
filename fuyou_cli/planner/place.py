"""From a `Choice` to homes: which stages' tensors rest in RAM.

Everything rests on the ssd first. Outputs of operators get their share of what RAM is spare (the paper's Algorithm 1: the
most FLOPs saved per byte first); then the tensors whose home in RAM saves most bytes of traffic per byte move there, in a
fixed order; what is left goes to outputs again. `plan` is the first choice that fits, without a search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeVar

from ..core.errors import PlanError
from ..core.units import align_up, gib
from ..spec.hardware import HardwareProfile
from ..spec.model import ITEM_SIZE, STATE_SIZES, ModelSpec, OperatorSpec, StageSpec
from ..spec.plan import Plan, StagePlan, Tier
from .assemble import assembled, host_peaks
from .bound import lower_bound, phase_estimate
from .boundary_layout import Kept, every_operator
from .choice import NONE_KEPT, NONE_PICKED, Choice, pipelines
from .costs import Costs
from .defer import deferrals
from .device_memory import with_homes_on_device
from .ground import Ground
from .memory import ARENA_UNIT, Homes, Layout, layout
from .picks import MOST_TENSORS, Slots, Tensor, best_first, nearest
from .schedule import expand
from .wishes import Wishes

_KINDS = ("weights", "boundaries", "gradients", "states")
_Value = TypeVar("_Value")
_LOADED = ("weights", "states")
_HARDLY = 64  # of the largest tensor: what is smaller takes hardly anything
_HUGE_PAGES = 1 + 1 / 512  # page tables of the arena


def plan(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Plan:
    """The first choice that fits, with no outputs kept unless they are asked for, or a PlanError that says how much memory
    would be enough."""
    wishes = replace(wishes, kept=wishes.kept or "none")
    for lookahead, slots in pipelines(wishes, stages=len(model.stages)):
        made = made_of(model, hardware, wishes, Choice(lookahead=lookahead, gradient_slots=slots, defer=wishes.defer or 0.0))
        if made is not None:
            return made
    raise too_small(model, hardware, wishes)


def made_of(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, choice: Choice) -> Plan | None:
    """The plan of this choice; None where it does not fit."""
    found = Placing(model, hardware, wishes).placed(choice)
    return found.plan if found is not None else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placed:
    """A plan, and what the closed form says of its step. Seconds."""

    plan: Plan
    bound: float  # that the step cannot beat
    estimate: float


class Placing:
    """Places choices of one run: what several have in common is found once, and choices that come to the same homes come
    to one and the same object."""

    def __init__(self, model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> None:
        self.model, self.hardware, self.wishes = model, hardware, wishes
        self.costs = Costs.asked(model, hardware, wishes)
        self._ground = Ground(model, wishes.numerics, mode=wishes.store_mode, keep=wishes.keep)
        self._outputs = _outputs(model, wishes)
        self._starts: dict[tuple[object, ...], _Start] = {}
        self._placed: dict[tuple[object, ...], Placed] = {}

    def placed(self, choice: Choice) -> Placed | None:
        """The plan of this choice; None where it does not fit."""
        asked = as_chosen(self.wishes, choice)
        deferred = deferrals(self.model, asked)
        pipeline = (choice.lookahead, choice.gradient_slots, deferred)
        start = self._started(asked, choice, pipeline)
        filling = self._picked(asked, choice, start)
        if filling is None:
            if not start.fits:
                return None
            filling = self._filled(asked, choice, start)
        key = (filling.homes, pipeline)
        if key not in self._placed:
            homes, spans = self._within(filling, choice)
            same = (homes, choice.lookahead, spans.slot_classes, deferred)
            self._placed[key] = self._placed[same] = self._placed.get(same) or self._assembled(asked, spans, choice)
        return self._placed[key]

    def is_small(self, choice: Choice) -> bool:
        """Whether the model has so few tensors that sets of them can be looked at."""
        return len(self._start_of(choice).tensors) <= MOST_TENSORS

    def picks(self, choice: Choice) -> Iterator[Choice]:
        """The same choice with sets of tensors of a small model in RAM that fit there, those first that save most traffic."""
        start = self._start_of(choice)
        room = (
            start.nothing.spare
            + sum(slots.count * slots.size for slots in start.slots)
            - sum(item.size for item in start.small)
        )
        for number in best_first(start.tensors, start.slots, room=room):
            yield replace(choice, picked=number)

    def near(self, choice: Choice, plan: Plan, in_flight: Sequence[tuple[int, int]]) -> Iterator[Choice]:
        """What differs from a choice's plan in the home of one tensor or of two, or in its pipeline."""
        start = self._start_of(choice)
        fields = {"weights": "weights", "states": "states", "gradients": "gradients", "boundaries": "boundary"}
        number = _set(getattr(plan.stages[tensor.stage], fields[tensor.kind]) != "ssd" for tensor in start.tensors)
        yield from (replace(choice, picked=other) for other in nearest(number, start.tensors))
        for lookahead, slots in in_flight:
            yield replace(choice, lookahead=lookahead, gradient_slots=slots, picked=number)

    def _start_of(self, choice: Choice) -> _Start:
        asked = as_chosen(self.wishes, choice)
        return self._started(asked, choice, (choice.lookahead, choice.gradient_slots, deferrals(self.model, asked)))

    def _picked(self, asked: Wishes, choice: Choice, start: _Start) -> _Filling | None:
        """With the tensors of the choice's set in RAM, and outputs of operators in what is left; None where that does not fit,
        or where the choice has no such set."""
        if choice.picked == NONE_PICKED or choice.picked >= 1 << len(start.tensors):
            return None
        homes = start.nothing.homes
        there = (tensor for place, tensor in enumerate(start.tensors) if choice.picked >> place & 1)
        for tensor in (*there, *start.small):
            homes = replace(homes, **{tensor.kind: _with(getattr(homes, tensor.kind), tensor.stage, "cpu")})
        peaks = host_peaks(self.model, self.hardware, asked, self._layout(asked, homes, choice))
        if max(peaks.values()) > asked.cpu_budget:
            return None
        filling = _Filling.of(self._ground, asked, homes, peaks)
        if asked.kept is None and choice.activations != NONE_KEPT:
            filling.keep(self._outputs, share=1.0)
        return filling

    def _assembled(self, asked: Wishes, spans: Layout, choice: Choice) -> Placed:
        schedule = expand(
            self.model,
            stages=spans.stages,
            lookahead=choice.lookahead,
            micro_batches=self.costs.micro_batches,
            commit_every=asked.commit_every,
        )
        spans = replace(spans, stages=with_homes_on_device(self.model, asked, schedule, spans.stages))
        plan = assembled(self.costs, asked, spans, schedule, lookahead=choice.lookahead, ground=self._ground)
        return Placed(
            plan=plan,
            bound=lower_bound(self.costs, schedule, plan),
            estimate=phase_estimate(self.costs, schedule, plan),
        )

    def _layout(self, asked: Wishes, homes: Homes, choice: Choice) -> Layout:
        return layout(
            self.model, asked, homes, lookahead=choice.lookahead, gradient_slots=choice.gradient_slots, ground=self._ground
        )

    def _started(self, asked: Wishes, choice: Choice, pipeline: tuple[object, ...]) -> _Start:
        """With nothing moved to RAM yet."""
        homes = _start(self.model, asked, choice.swap)
        key = (homes.kept, pipeline)
        if key not in self._starts:
            spans = self._layout(asked, homes, choice)
            peaks = host_peaks(self.model, self.hardware, asked, spans)
            self._starts[key] = self._begun(asked, choice, homes, spans, peaks)
        return self._starts[key]

    def _begun(self, asked: Wishes, choice: Choice, homes: Homes, spans: Layout, peaks: dict[str, int]) -> _Start:
        items = sorted(traffic_items(self._ground, asked, homes, spans), key=lambda item: item.order)
        nothing = _Filling.of(self._ground, asked, homes, peaks)
        weights, boundaries, gradients, states = (_settled(homes, items, kind) for kind in _KINDS)
        everything = replace(homes, weights=weights, boundaries=boundaries, gradients=gradients, states=states)
        everything_peaks = host_peaks(self.model, self.hardware, asked, self._layout(asked, everything, choice))
        tensors, small = _tensors(items)
        everything_fits = max(everything_peaks.values()) <= asked.cpu_budget
        return _Start(
            nothing=nothing,
            fits=max(peaks.values()) <= asked.cpu_budget,
            items=tuple(items),
            tensors=tensors,
            small=small,
            slots=tuple(_slots(tensors, spans)),
            everything=_Filling.of(self._ground, asked, everything, everything_peaks) if everything_fits else None,
        )

    def _filled(self, asked: Wishes, choice: Choice, start: _Start) -> _Filling:
        if start.everything is not None and choice.activations <= 0:
            # Tensor by tensor, slots that the last one would free are in the way of it.
            filling = replace(start.everything, before=[])
        else:
            filling = replace(start.nothing, before=[])
            if choice.activations > 0:
                filling.keep(self._outputs, share=choice.activations)
            if choice.states:
                filling.settle([item for item in start.items if item.kind == "states"], share=choice.states)
            filling.settle(start.items)
        if asked.kept is None and choice.activations != NONE_KEPT:
            filling.keep(self._outputs, share=1.0)
        return filling

    def _within(self, filling: _Filling, choice: Choice) -> tuple[Homes, Layout]:
        """Takes back what moved last while the sums were a little short of what the layout takes."""
        while True:
            spans = self._layout(filling.wishes, filling.homes, choice)
            peaks = host_peaks(self.model, self.hardware, filling.wishes, spans)
            if not filling.before or max(peaks.values()) <= filling.wishes.cpu_budget:
                return filling.homes, spans
            filling.homes = filling.before.pop()


def as_chosen(wishes: Wishes, choice: Choice) -> Wishes:
    return replace(wishes, defer=choice.defer) if wishes.clip_grad_norm is None else wishes


def least_memory(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> int:
    """Bytes of the whole process with nothing at home in RAM that may rest on the ssd."""
    return min(
        _host_peak(model, hardware, wishes, _start(model, wishes, 0.0), lookahead, slots)
        for lookahead, slots in pipelines(wishes, stages=len(model.stages))
    )


def too_small(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> PlanError:
    """What would help is not known here: whoever can plan changed recipes says so."""
    smallest = least_memory(model, hardware, wishes)
    return PlanError(
        f"does not fit: {gib(smallest)} of RAM is the least this run needs, offload.max_memory.cpu is {gib(wishes.cpu_budget)}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Tensors of one kind, of one stage or of all that share slots, which may rest in RAM instead of on the ssd."""

    kind: str
    stages: tuple[int, ...]
    sizes: tuple[int, ...]  # bytes of RAM, per stage
    freed: int  # bytes of slots that nobody needs once all of them rest in RAM
    saved: float  # bytes of traffic per step

    @property
    def order(self) -> tuple[float, int, int, int]:
        """The most traffic saved per byte of RAM first. Stages of one kind are taken spread out over the step, so that what
        stays on the ssd is spread out too."""
        size = sum(self.sizes) - self.freed
        per_byte = self.saved / size if size > 0 else float("inf")
        return (-per_byte, _KINDS.index(self.kind), _spread(self.stages[0]), len(self.stages))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """Where the filling of RAM begins, and what may move there, in the order in which it does."""

    nothing: _Filling  # in RAM yet
    fits: bool  # even that may be too much
    everything: _Filling | None  # that may be; None where it does not fit
    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]  # of the items, one by one
    small: tuple[Tensor, ...]  # that take hardly anything, and are in RAM wherever others are picked
    slots: tuple[Slots, ...]  # that they pass through


def _settled(homes: Homes, items: list[Item], kind: str) -> tuple[Tier, ...]:
    """Tiers of a kind, all that may be in RAM there."""
    tiers: tuple[Tier, ...] = getattr(homes, kind)
    moved = {stage for item in items if item.kind == kind for stage in item.stages}
    return tuple("cpu" if stage in moved else tier for stage, tier in enumerate(tiers))


def _tensors(items: Sequence[Item]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """In an order that does not depend on what they save; those apart that take hardly anything."""
    alone = [item for item in items if len(item.stages) == 1 and not item.freed]
    found = [Tensor(kind=item.kind, stage=item.stages[0], size=item.sizes[0], saved=item.saved) for item in alone]
    found.sort(key=lambda tensor: (tensor.kind, tensor.stage))
    least = max((tensor.size for tensor in found), default=0) // _HARDLY
    large = tuple(tensor for tensor in found if tensor.size > least)
    return large, tuple(tensor for tensor in found if tensor.size <= least)


def _slots(tensors: Sequence[Tensor], spans: Layout) -> Iterator[Slots]:
    """Of weights and of boundaries, which are as many as the tensors that pass through (`memory.layout`)."""
    for number, slots in enumerate(spans.slot_classes):
        members = _set(t.kind == "weights" and spans.stages[t.stage].slot_class == number for t in tensors)
        if slots.weight_slots:
            size = align_up(slots.weight_size, ARENA_UNIT)
            yield Slots(members=members, count=len(slots.weight_slots), more=0, size=size)
    if spans.boundary_slots:
        members = _set(tensor.kind == "boundaries" for tensor in tensors)
        size = align_up(spans.boundary_slots[0].size, ARENA_UNIT)
        yield Slots(members=members, count=len(spans.boundary_slots), more=1, size=size)


def _set(members: Iterable[bool]) -> int:
    return sum(1 << place for place, member in enumerate(members) if member)


@cache
def _spread(stage: int) -> int:
    return int(f"{stage:016b}"[::-1], 2)


def traffic_items(ground: Ground, wishes: Wishes, homes: Homes, spans: Layout) -> list[Item]:
    """What may move to RAM."""
    single = [
        item
        for stage in ground.model.stages
        if stage.params
        for item in _items_of(ground, wishes, homes, spans.stages[stage.index], stage)
    ]
    return [*single, *_together(single, homes, spans)]


def _items_of(ground: Ground, wishes: Wishes, homes: Homes, plan: StagePlan, stage: StageSpec) -> Iterator[Item]:
    model, index, params = ground.model, stage.index, stage.params
    item, gradient = ITEM_SIZE[model.compute_dtype], ITEM_SIZE[wishes.numerics.accumulate_dtype]
    states = STATE_SIZES[model.compute_dtype]
    rests = int(plan.deferred) + int(model.has_two_users(index))
    boundary = ground.boundary_size(index, homes.kept[index])
    uses = 2 if stage.kind in ("block", "norm") else 1  # in forward and in backward; what is visited twice in a row is kept
    spared = 1.0 - (1.0 / wishes.commit_every if wishes.commit_every else 0.0)  # writes: commits have theirs from RAM as well
    options: tuple[tuple[str, tuple[int, ...], float, bool], ...] = (
        ("weights", (item * params,), (uses + spared) * item * params, wishes.weights is None),
        ("boundaries", (boundary,), 2.0 * boundary, wishes.boundaries is None),
        ("gradients", (gradient * params,), 2.0 * rests * gradient * params, wishes.gradients is None),
        ("states", tuple(size * params for size in states), (1.0 + spared) * sum(states) * params, wishes.states is None),
    )
    for kind, sizes, saved, free in options:
        if free and saved:
            size = sum(align_up(size, ARENA_UNIT) for size in sizes)
            yield Item(kind=kind, stages=(index,), sizes=(size,), freed=0, saved=saved)


def _together(single: list[Item], homes: Homes, spans: Layout) -> Iterator[Item]:
    """All stages that share slots: once the last of them rests in RAM, the slots are not needed. Of a few large stages (an
    embedding and a head) that is as much as they take at home."""
    shared: dict[tuple[str, int], list[Item]] = {}
    for item in single:
        stage = spans.stages[item.stages[0]]
        if item.kind in ("weights", "gradients") and getattr(homes, item.kind)[stage.stage] == "ssd":
            shared.setdefault((item.kind, stage.slot_class), []).append(item)
        elif item.kind == "boundaries":
            shared.setdefault((item.kind, 0), []).append(item)
    for (kind, number), items in sorted(shared.items()):
        members = [stage for stage in spans.stages if stage.slot_class == number and stage.momentum_at.size]
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
class _Output:
    """An operator's outputs of the whole batch."""

    stage: int
    operator: OperatorSpec
    size: int

    @property
    def order(self) -> tuple[float, int, int, int]:
        return (-self.operator.flops / max(1, self.operator.bytes), _spread(self.stage), self.stage, self.operator.index)


def _outputs(model: ModelSpec, wishes: Wishes) -> list[_Output]:
    """The most FLOPs saved per byte first."""
    numerics = wishes.numerics
    micro_batches = -(-numerics.batch_size // numerics.micro_batch_size)
    found = [
        _Output(stage=stage.index, operator=operator, size=operator.bytes * micro_batches)
        for stage in model.stages
        for operator in stage.operators
    ]
    return sorted(found, key=lambda output: output.order)


@dataclass(slots=True)
class _Filling:
    """Moves tensors to RAM while there is room. `before` holds the homes before each move, to take moves back."""

    ground: Ground
    wishes: Wishes
    homes: Homes
    spare: int
    spare_loading: int  # while a checkpoint is read straight to the homes of weights and states
    before: list[Homes] = field(default_factory=list)

    @classmethod
    def of(cls, ground: Ground, wishes: Wishes, homes: Homes, peaks: dict[str, int]) -> _Filling:
        """From homes that take `peaks`."""
        return cls(
            ground=ground,
            wishes=wishes,
            homes=homes,
            spare=int((wishes.cpu_budget - peaks["train"]) / _HUGE_PAGES),
            spare_loading=wishes.cpu_budget - peaks["load"],
        )

    def settle(self, items: Sequence[Item], *, share: float = 1.0) -> None:
        """Tensors, in their order, as far as they fit in `share` of what is spare."""
        limit = self.spare - int(self.spare * share)  # what is to be left
        for item in items:
            tiers = getattr(self.homes, item.kind)
            left = [place for place, stage in enumerate(item.stages) if tiers[stage] == "ssd"]
            homes = sum(item.sizes[place] for place in left)
            size, loaded = homes - item.freed, homes if item.kind in _LOADED else 0
            if not left or self.spare - size < limit or loaded > self.spare_loading:
                continue
            self.spare_loading -= loaded
            for place in left:
                tiers = _with(tiers, item.stages[place], "cpu")
            self._take(size, replace(self.homes, **{item.kind: tiers}))

    def keep(self, outputs: list[_Output], *, share: float) -> None:
        """Outputs of operators, in their order, within `share` of what is spare; the boundary they rest with comes along."""
        limit = self.spare - int(self.spare * share)  # what is to be left
        for output in outputs:
            kept = self.homes.kept[output.stage]
            if output.operator.index in kept:
                continue
            taken = tuple(sorted((*kept, output.operator.index)))
            at_home = self.homes.boundaries[output.stage] == "cpu"
            if not at_home and self.wishes.boundaries is not None:
                continue
            size = self._size(output.stage, taken) - (self._size(output.stage, kept) if at_home else 0)
            if self.spare - size < limit:
                continue
            kept_with = _with(self.homes.kept, output.stage, taken)
            boundaries = self.homes.boundaries if at_home else _with(self.homes.boundaries, output.stage, "cpu")
            self._take(size, replace(self.homes, kept=kept_with, boundaries=boundaries))

    def _size(self, stage: int, kept: tuple[int, ...]) -> int:
        """Bytes of RAM that the stage's boundary takes with these outputs."""
        return align_up(self.ground.boundary_size(stage, kept), ARENA_UNIT)

    def _take(self, size: int, homes: Homes) -> None:
        self.before.append(self.homes)
        self.homes, self.spare = homes, self.spare - size


def _with(values: tuple[_Value, ...], index: int, value: _Value) -> tuple[_Value, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _start(model: ModelSpec, wishes: Wishes, swap: float) -> Homes:
    """All on the ssd except what the recipe pins elsewhere; stages without such a tensor say cpu. `swap` of the outputs
    rest with the boundaries there."""
    count = len(model.stages)
    keeps = [stage.kind in ("block", "norm") for stage in model.stages]
    deferred = deferrals(model, wishes)
    boundaries: tuple[Tier, ...] = tuple((wishes.boundaries or "ssd") if kept else "cpu" for kept in keeps)
    return Homes(
        weights=(wishes.weights or "ssd",) * count,
        states=(wishes.states or "ssd",) * count,
        gradients=tuple(
            (wishes.gradients or "ssd") if deferred[index] or model.has_two_users(index) else "cpu" for index in range(count)
        ),
        boundaries=boundaries,
        kept=_kept(model, wishes, swap),
    )


def _kept(model: ModelSpec, wishes: Wishes, swap: float) -> Kept:
    every = every_operator(model)
    if wishes.kept == "all":
        return every
    if wishes.kept == "none":
        return ((),) * len(model.stages)
    if wishes.kept is not None:
        assert all(set(some) <= set(known) for some, known in zip(wishes.kept, every, strict=True)), (wishes.kept, every)
        return wishes.kept
    return tuple(_swapped(stage.operators, swap) for stage in model.stages)


def _swapped(operators: tuple[OperatorSpec, ...], share: float) -> tuple[int, ...]:
    """The most FLOPs saved per byte first, as long as they are within `share` of all the bytes."""
    left = share * sum(operator.bytes for operator in operators)
    chosen: list[int] = []
    for operator in sorted(operators, key=lambda operator: (-operator.flops / max(1, operator.bytes), operator.index)):
        if share and operator.bytes <= left:
            left -= operator.bytes
            chosen.append(operator.index)
    return tuple(sorted(chosen))


def _host_peak(
    model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, homes: Homes, lookahead: int, gradient_slots: int
) -> int:
    spans = layout(model, wishes, homes, lookahead=lookahead, gradient_slots=gradient_slots)
    return max(host_peaks(model, hardware, wishes, spans).values())
