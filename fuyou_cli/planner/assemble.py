"""Builds a `Plan` from homes: spans, the table of memory, and the figures of the closed form."""

from __future__ import annotations

from ..core.units import MiB, gib
from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import MemoryLine, Plan, Predicted, StagePlan, Tier
from .bound import busy_seconds
from .costs import Costs
from .device_memory import DeviceMemory, device_memory
from .memory import BASE_SLACK, Layout, compute_memory, free_pages, routing_bytes
from .plan_request import PlanRequest
from .schedule import Schedule

PLAN_VERSION = 1
_CHOSEN = "of every token, from forward to backward"


def host_peaks(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, placed: Layout) -> dict[str, int]:
    """Returns, by phase, the most anonymous and kernel bytes that the process takes."""
    base = hardware.process_bytes + BASE_SLACK
    homes_in_ram = sum(
        span.size
        for stage in placed.stages
        for span in (stage.weights_ram, stage.trained_ram, stage.remainder_ram, stage.momentum_ram, stage.variance_ram)
        if span is not None
    )
    largest_slot = max((slots.weight_size for slots in placed.slot_classes), default=0)
    compute = compute_memory(model, request).total + free_pages(model, request) + request.code_bytes
    compute += routing_bytes(model, request) if request.device == "cpu" else 0
    train = base + placed.arena_size + placed.arena_size // 512 + compute
    return {"load": base + homes_in_ram + 2 * largest_slot + 64 * MiB, "train": train, "export": train}


def assembled(costs: Costs, request: PlanRequest, placed: Layout, schedule: Schedule, *, lookahead: int) -> Plan:
    """Builds the plan of these spans, with the closed form's figures for one step."""
    device = device_memory(costs.model, request, placed.stages)
    return Plan(
        version=PLAN_VERSION,
        model=request.model_name,
        device=request.device,
        numerics=request.numerics,
        clip_grad_norm=request.clip_grad_norm,
        stages=placed.stages,
        slot_classes=placed.slot_classes,
        boundary_slots=placed.boundary_slots,
        upload_slots=placed.upload_slots,
        batch_slots=placed.batch_slots,
        staging_slots=placed.staging_slots,
        decoded=placed.decoded,
        batch_on_device=bool(request.batch_on_device),
        sweeps=request.sweeps or 1,
        free_pages=request.free_pages,
        norm_first=bool(request.norm_first),
        lookahead=lookahead,
        io=placed.io,
        arena_size=placed.arena_size,
        store_size=placed.store_size,
        cpu_budget=request.cpu_budget,
        commit_every=request.asked_interval,
        memory=_memory_lines(costs.model, costs.hardware, request, placed, device),
        predicted=_predict(costs, request, placed, schedule, device),
        sustained=request.sustained,
        typical=request.typical,
    )


def _predict(costs: Costs, request: PlanRequest, placed: Layout, schedule: Schedule, device: DeviceMemory) -> Predicted:
    model, numerics = costs.model, request.numerics
    seconds = busy_seconds(costs, schedule, stages=placed.stages, device=request.device)
    bottleneck = max(sorted(seconds), key=lambda name: seconds[name])
    return Predicted(
        cpu_peaks=host_peaks(model, costs.hardware, request, placed),
        gpu_peak=device.total,
        ssd_bytes=placed.store_size,
        export_bytes=request.export_item * (model.trained_parameters if request.exports_trained else model.parameters),
        read_per_step=schedule.traffic.read_total,
        written_per_step=schedule.traffic.written_total,
        read_by=schedule.traffic.read,
        written_by=schedule.traffic.written,
        step_flops=model.flops_per_token * (numerics.tokens if request.typical is None else request.typical.tokens),
        compute_flops=costs.fill * sum(visit.flops for visit in schedule.visits),
        seconds=seconds,
        step_seconds=seconds[bottleneck],
        bottleneck=bottleneck,
    )


def _memory_lines(
    model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, placed: Layout, device: DeviceMemory
) -> tuple[MemoryLine, ...]:
    """Lists what each kind takes in each tier. Weights with a home on a device are in RAM as well, where updates write them."""
    weights, states = model.stored_weight_bytes, model.stored_state_bytes
    frozen = sum(stage.frozen_weight_bytes for stage in model.stages)
    imported = sum(stage.imported_bytes for stage in model.stages)
    lines: list[MemoryLine] = []

    def add(what: str, tier: Tier, size: int, total: int, policy: str) -> None:
        if size:
            lines.append(MemoryLine(what=what, tier=tier, size=size, total=total, policy=policy))

    slots = sum(span.size for slot in placed.slot_classes for span in slot.weight_slots)
    weights_ram = sum(span.size for stage in placed.stages for span in (stage.weights_ram, stage.trained_ram) if span)
    add("weights", "cpu", weights_ram + slots, weights, "home and slots")
    often, why = 2, "two extents"
    once = ", frozen ones once" if imported else ", frozen ones in the model's files" if frozen else ""
    add("weights", "ssd", often * (weights - frozen) + imported, weights, why + once)
    in_ram = sum(model.stages[stage.stage].state_bytes for stage in placed.stages if stage.states == "cpu")
    add("optimizer states", "cpu", in_ram, states, "home")
    add("optimizer states", "ssd", often * states, states, why)
    gradient_slots = sum(span.size for slot in placed.slot_classes for span in slot.gradient_slots)
    resting = sum(stage.gradients_ram.size for stage in placed.stages if stage.gradients_ram)
    on_ssd = sum(stage.gradients_extent.size for stage in placed.stages if stage.gradients_extent)
    total = sum(stage.gradient_bytes(request.numerics.accumulate_dtype) for stage in model.stages)
    policy = _gradients_policy(model, request, placed)
    if any(model.has_two_users(stage.index) for stage in model.stages):
        policy += "; tied pieces rest from head to embedding"
    add("gradients", "cpu", gradient_slots + resting, total, policy)
    add("gradients", "ssd", on_ssd, total, policy)
    kept_in = [(stage.boundary_ram.size, _in_turns(stage)) for stage in placed.stages if stage.boundary_ram]
    in_ram, in_turns = sum(size for size, _ in kept_in), sum(turns for _, turns in kept_in)
    on_ssd = sum(stage.boundary_extent.size for stage in placed.stages if stage.boundary_extent)
    slots = sum(span.size for span in placed.boundary_slots)
    policies = _boundaries_policies(model, placed, in_turns)
    add("boundaries", "cpu", in_ram - in_turns + slots, in_ram + on_ssd, policies[0])
    add("boundaries", "ssd", on_ssd, in_ram + on_ssd, policies[1])
    crossing = sum(span.size for span in (*placed.upload_slots, *(() if request.batch_on_device else placed.batch_slots)))
    staging = sum(span.size for span in placed.staging_slots)
    if placed.decoded is not None:
        add("decoded weights", "cpu", placed.decoded.size, 0, "of the block that computes")
    add("staging", "cpu", staging, 0, "commits of what rests on the GPU")
    add("crossing", "cpu", crossing, 0, "the batch between stages, to and from the device")
    add("compute", "cpu", compute_memory(model, request).total, 0, "activations of one micro-batch")
    if request.device == "cpu":
        add("chosen experts", "cpu", routing_bytes(model, request), 0, _CHOSEN)
    add("free pages", "cpu", free_pages(model, request), 0, "of the heap, from one block to the next")
    add("compiled products", "cpu", request.code_bytes, 0, "of libraries, for micro-batches of other widths")
    add("update chunks", "cpu", placed.io.scratch.size, 0, "read, update, write")
    add("process", "cpu", hardware.process_bytes + BASE_SLACK + placed.arena_size // 512, 0, "Python, torch, threads")
    lines += _device_lines(model, request, device)
    return tuple(lines)


def _in_turns(stage: StagePlan) -> int:
    """Returns the bytes of a boundary that lie where its stage's gradients will rest."""
    if not stage.takes_turns:
        return 0
    assert stage.boundary_ram is not None and stage.gradients_ram is not None
    return min(stage.boundary_ram.size, stage.gradients_ram.size)


def _device_lines(model: ModelSpec, request: PlanRequest, device: DeviceMemory) -> list[MemoryLine]:
    """Lists what each kind takes of a device with memory of its own."""
    weights, states = model.stored_weight_bytes, model.stored_state_bytes
    gradients = sum(stage.gradient_bytes(request.numerics.accumulate_dtype) for stage in model.stages)
    found = (
        ("weights", device.homes + device.turns, weights, "on the GPU home and two turns"),
        ("decoded weights", device.decoded, 0, "of the block that computes"),
        ("optimizer states", device.states, states, "home, updated there"),
        ("gradients", device.sums + device.gradients, gradients, "sums on the GPU"),
        ("kept graphs" if model.compiled else "kept outputs", device.outputs, 0, "from forward to backward, never copied"),
        ("chosen experts", device.routing, 0, _CHOSEN),
        ("boundaries", device.boundaries, device.boundaries, "from forward to backward, never copied"),
        ("crossing", device.batch, 0, "the batch between stages, on the device"),
        ("update chunks", device.scratch, 0, "AdamW on the GPU"),
        ("compute", device.compute, 0, "a micro-batch and its neighbours"),
    )
    return [MemoryLine(what=what, tier="gpu", size=size, total=total, policy=why) for what, size, total, why in found if size]


def _boundaries_policies(model: ModelSpec, placed: Layout, in_turns: int) -> tuple[str, str]:
    """Returns what is beside boundaries in RAM and on the ssd. `in_turns`: bytes that lie where gradients will."""
    swapped = any(stage.kept for stage in placed.stages)
    policies = ("with kept outputs", "with kept outputs") if swapped else ("recompute the rest", "recompute")
    graphs = [stage.kept_there for stage in placed.stages if model.stages[stage.stage].operators]
    if model.compiled and graphs and all(graphs):
        policies = ("beside kept graphs", "beside kept graphs")
    return (f"{policies[0]}, {gib(in_turns)} more in the place of gradients",) * 2 if in_turns else policies


def _gradients_policy(model: ModelSpec, request: PlanRequest, placed: Layout) -> str:
    if request.clip_grad_norm is not None and not request.norm_first:
        return "rest until the norm is known" + ", and between sweeps" * request.is_swept
    deferred = sum(model.stages[stage.stage].trained for stage in placed.stages if stage.deferred)
    if request.is_swept:
        return f"rest between {request.sweeps} sweeps" + ", some until the next forward" * (deferred > 0)
    if not deferred:
        return "updated at once"
    return f"{deferred / model.updated_parameters:.0%} rest until the next forward"
