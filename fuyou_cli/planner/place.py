"""`plan(model, hardware, wishes)`: a deterministic placement. RAM is filled by store traffic saved per byte.

Everything rests on the ssd first; then, as long as the budget of the whole process holds, the tensors whose home in RAM
saves most bytes of traffic per byte of RAM move there, in a fixed order. Search over alternatives is not done here.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import PlanError
from ..core.units import MiB, gib
from ..spec.hardware import HardwareProfile
from ..spec.model import ITEM_SIZE, ModelSpec
from ..spec.plan import MemoryLine, Plan, Predicted, Tier
from .memory import BASE_SLACK, Homes, Layout, boundary_size, compute_memory, layout
from .schedule import expand
from .simulate import busy_seconds
from .wishes import Wishes

PLAN_VERSION = 1
_KINDS = ("weights", "boundaries", "gradients", "states")


def plan(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Plan:
    """The plan, or a PlanError that says how much memory would be enough."""
    smallest = 0
    for lookahead, gradient_slots in _pipelines(wishes, stages=len(model.stages)):
        homes = _start(model, wishes)
        needed = _host_peak(model, hardware, wishes, homes, lookahead, gradient_slots)
        if needed <= wishes.cpu_budget:
            homes = _fill(model, hardware, wishes, homes, lookahead, gradient_slots)
            return _assemble(model, hardware, wishes, homes, lookahead, gradient_slots)
        smallest = min(smallest or needed, needed)
    raise PlanError(
        f"does not fit: {gib(smallest)} of RAM is the least this run needs, offload.max_memory.cpu is {gib(wishes.cpu_budget)}",
        hint=_smaller(wishes, smallest),
    )


def _pipelines(wishes: Wishes, *, stages: int) -> list[tuple[int, int]]:
    """(lookahead, gradient slots) from most overlap to least memory. Looking ahead further than every stage buys nothing."""
    if wishes.lookahead is not None:
        lookahead = min(wishes.lookahead, stages)
        return [(lookahead, 2), (lookahead, 1)]
    return [(2, 2), (1, 2), (1, 1)]


def _smaller(wishes: Wishes, smallest: int) -> str:
    """What would help; the least memory was planned, a smaller run is not planned again here."""
    numerics = wishes.numerics
    if numerics.micro_batch_size > 1:
        return (
            f"give offload.max_memory.cpu={-(-smallest // MiB)}MiB, or halve train.micro_batch_size "
            f"({numerics.micro_batch_size}), which changes the run's numerics"
        )
    return f"give offload.max_memory.cpu={-(-smallest // MiB)}MiB, or lower dataset.max_seq_len ({numerics.max_seq_len})"


def _start(model: ModelSpec, wishes: Wishes) -> Homes:
    """All on the ssd except what the recipe pins elsewhere; stages without such a tensor say cpu."""
    count = len(model.stages)
    keeps = [stage.kind in ("block", "norm") for stage in model.stages]
    two_phase = wishes.clip_grad_norm is not None
    boundaries: tuple[Tier, ...] = tuple((wishes.boundaries or "ssd") if kept else "cpu" for kept in keeps)
    return Homes(
        weights=(wishes.weights or "ssd",) * count,
        states=(wishes.states or "ssd",) * count,
        gradients=tuple(
            (wishes.gradients or "ssd") if two_phase or model.has_two_users(index) else "cpu" for index in range(count)
        ),
        boundaries=boundaries,
    )


def _host_peak(
    model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, homes: Homes, lookahead: int, gradient_slots: int
) -> int:
    placed = layout(model, wishes, homes, lookahead=lookahead, gradient_slots=gradient_slots)
    return max(_host_peaks(model, hardware, wishes, placed).values())


def _host_peaks(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, placed: Layout) -> dict[str, int]:
    """Phase -> anonymous and kernel bytes of the process at most."""
    base = hardware.process_bytes + BASE_SLACK
    homes_in_ram = sum(
        span.size
        for stage in placed.stages
        for span in (stage.weights_ram, stage.remainder_ram, stage.momentum_ram, stage.variance_ram)
        if span is not None
    )
    largest_slot = max((slots.weight_size for slots in placed.slot_classes), default=0)
    train = base + placed.arena_size + placed.arena_size // 512 + compute_memory(model, wishes).total
    return {"load": base + homes_in_ram + 2 * largest_slot + 64 * MiB, "train": train, "export": train}


def _fill(
    model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, homes: Homes, lookahead: int, gradient_slots: int
) -> Homes:
    """Moves tensors to RAM by traffic saved per byte while the whole process stays inside the budget."""
    for _, _, _, kind, index in sorted(_candidates(model, wishes, homes, lookahead)):
        moved = _moved(homes, kind, index)
        if _host_peak(model, hardware, wishes, moved, lookahead, gradient_slots) <= wishes.cpu_budget:
            homes = moved
    return homes


def _candidates(model: ModelSpec, wishes: Wishes, homes: Homes, lookahead: int) -> list[tuple[float, int, int, str, int]]:
    """(-traffic saved per byte, kind order, spread, kind, stage). Stages of one kind are taken spread out over the step,
    so that what stays on the ssd is spread out too."""
    two_phase = wishes.clip_grad_norm is not None
    visits = expand(
        model,
        stages=layout(model, wishes, homes, lookahead=lookahead, gradient_slots=1).stages,
        two_phase=two_phase,
        lookahead=lookahead,
        micro_batches=1,
    ).visits
    candidates: list[tuple[float, int, int, str, int]] = []
    for stage in model.stages:
        if stage.params == 0:
            continue
        fetches = sum(visit.fetch and visit.owner == stage.index for visit in visits)
        keeps_boundary = stage.kind in ("block", "norm")
        rests = int(two_phase) + int(model.has_two_users(stage.index))
        options = [
            ("weights", float(fetches + 1), wishes.weights is None),
            ("boundaries", 2.0, wishes.boundaries is None and keeps_boundary),
            ("gradients", 2.0 * rests, wishes.gradients is None and rests > 0),
            ("states", 2.0, wishes.states is None),
        ]
        for kind, saved, free in options:
            if free:
                spread = int(f"{stage.index:016b}"[::-1], 2)
                candidates.append((-saved, _KINDS.index(kind), spread, kind, stage.index))
    return candidates


def _moved(homes: Homes, kind: str, index: int) -> Homes:
    tiers = getattr(homes, kind)
    return replace(homes, **{kind: (*tiers[:index], "cpu", *tiers[index + 1 :])})


def _assemble(
    model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, homes: Homes, lookahead: int, gradient_slots: int
) -> Plan:
    placed = layout(model, wishes, homes, lookahead=lookahead, gradient_slots=gradient_slots)
    return Plan(
        version=PLAN_VERSION,
        model=wishes.model_name,
        device=wishes.device,
        numerics=wishes.numerics,
        clip_grad_norm=wishes.clip_grad_norm,
        stages=placed.stages,
        slot_classes=placed.slot_classes,
        boundary_slots=placed.boundary_slots,
        lookahead=lookahead,
        io=placed.io,
        arena_size=placed.arena_size,
        store_size=placed.store_size,
        cpu_budget=wishes.cpu_budget,
        memory=_memory_lines(model, hardware, wishes, placed),
        predicted=_predict(model, hardware, wishes, placed, lookahead),
    )


def _predict(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, placed: Layout, lookahead: int) -> Predicted:
    numerics = wishes.numerics
    micro_batches = -(-numerics.batch_size // numerics.micro_batch_size)
    schedule = expand(
        model,
        stages=placed.stages,
        two_phase=wishes.clip_grad_norm is not None,
        lookahead=lookahead,
        micro_batches=micro_batches,
    )
    tokens = numerics.batch_size * numerics.max_seq_len
    compute_flops = sum(visit.flops for visit in schedule.visits)
    seconds = busy_seconds(model, hardware, schedule, stages=placed.stages, numerics=numerics, device=wishes.device)
    bottleneck = max(sorted(seconds), key=lambda name: seconds[name])
    return Predicted(
        cpu_peaks=_host_peaks(model, hardware, wishes, placed),
        gpu_peak=_device_peak(model, wishes, placed),
        ssd_bytes=placed.store_size,
        export_bytes=model.parameters * wishes.export_item,
        read_per_step=schedule.traffic.read_total,
        written_per_step=schedule.traffic.written_total,
        read_by=schedule.traffic.read,
        written_by=schedule.traffic.written,
        step_flops=6.0 * model.active_parameters * tokens,
        compute_flops=compute_flops,
        seconds=seconds,
        step_seconds=seconds[bottleneck],
        bottleneck=bottleneck,
    )


def _device_peak(model: ModelSpec, wishes: Wishes, placed: Layout) -> int:
    """Weights that rest there, two more stages' weights and sums that take turns (a tied head that is not cut keeps a
    third sum through backward), and the hungriest stage."""
    if wishes.device == "cpu":
        return 0
    item = ITEM_SIZE[model.compute_dtype]
    homes = [model.stages[stage.stage].params for stage in placed.stages if stage.weights == "gpu"]
    streamed = [model.stages[stage.stage].params for stage in placed.stages if stage.weights != "gpu"]
    sums = 3 if model.tied_head and not model.head_is_cut else 2
    largest = max(stage.params for stage in model.stages) * ITEM_SIZE[wishes.numerics.accumulate_dtype]
    weights = item * (sum(homes) + 2 * max(streamed, default=0))
    return weights + sums * largest + max(stage.backward_peak for stage in model.stages)


def _memory_lines(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, placed: Layout) -> tuple[MemoryLine, ...]:
    """The placement matrix: what each kind takes in each tier."""
    item = ITEM_SIZE[model.compute_dtype]
    states_item = 8 if model.compute_dtype == "float32" else 10
    params = model.stored_parameters
    lines: list[MemoryLine] = []

    def add(what: str, tier: Tier, size: int, total: int, policy: str) -> None:
        if size:
            lines.append(MemoryLine(what=what, tier=tier, size=size, total=total, policy=policy))

    def home(kind: str, bytes_per_parameter: int, tier: Tier) -> int:
        return sum(
            model.stages[stage.stage].params * bytes_per_parameter for stage in placed.stages if getattr(stage, kind) == tier
        )

    slots = sum(span.size for slot in placed.slot_classes for span in slot.weight_slots)
    weights_ram = home("weights", item, "cpu") + home("weights", item, "gpu")
    add("weights", "cpu", weights_ram + slots, params * item, "home and slots")
    add("weights", "ssd", 2 * params * item, params * item, "two extents")
    add("optimizer states", "cpu", home("states", states_item, "cpu"), params * states_item, "home")
    add("optimizer states", "ssd", 2 * params * states_item, params * states_item, "two extents")
    gradient_slots = sum(span.size for slot in placed.slot_classes for span in slot.gradient_slots)
    resting = sum(stage.gradients_ram.size for stage in placed.stages if stage.gradients_ram)
    on_ssd = sum(stage.gradients_extent.size for stage in placed.stages if stage.gradients_extent)
    total = params * ITEM_SIZE[wishes.numerics.accumulate_dtype]
    policy = "rest until the norm is known" if wishes.clip_grad_norm is not None else "updated at once"
    if any(model.has_two_users(stage.index) for stage in model.stages):
        policy += "; tied pieces rest from head to embedding"
    add("gradients", "cpu", gradient_slots + resting, total, policy)
    add("gradients", "ssd", on_ssd, total, policy)
    kept = [stage for stage in placed.stages if stage.boundary_ram or stage.boundary_extent]
    boundary_total = len(kept) * boundary_size(model, wishes)
    in_ram = sum(stage.boundary_ram.size for stage in kept if stage.boundary_ram)
    in_ram += sum(span.size for span in placed.boundary_slots)
    add("boundaries", "cpu", in_ram, boundary_total, "recompute the rest")
    add("boundaries", "ssd", sum(s.boundary_extent.size for s in kept if s.boundary_extent), boundary_total, "recompute")
    add("compute", "cpu", compute_memory(model, wishes).total, 0, "activations of one micro-batch")
    add("update chunks", "cpu", placed.io.scratch.size, 0, "read, AdamW, write")
    add("process", "cpu", hardware.process_bytes + BASE_SLACK + placed.arena_size // 512, 0, "Python, torch, threads")
    if wishes.device != "cpu":
        add("compute", "gpu", _device_peak(model, wishes, placed), 0, "two stages and one micro-batch")
    return tuple(lines)
