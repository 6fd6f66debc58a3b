"""Computes, in closed form, how many seconds of work one step gives each resource. No step is faster than its busiest
resource, so this rules candidates out. How much of the work overlaps is found by the simulator.

On device cpu, compute and updates share the cores, so their seconds add up. A device with its own memory receives weights and
boundaries and sends gradients and boundaries back, always through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import add

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Numerics, Plan, StagePlan
from .costs import Costs
from .device import DeviceSide, crossing
from .schedule import Schedule, Visit, updates_traffic, visits_traffic, written_by_update

# Share of every resource's work that is added to the longest time. Of two phases that slots limit equally, the one with less
# work is then estimated as shorter.
_BESIDE = 0.02


def busy_seconds(costs: Costs, schedule: Schedule, *, stages: tuple[StagePlan, ...], device: str) -> dict[str, float]:
    """Returns seconds by resource. Resources whose rate is unknown (zero) are left out."""
    seconds = _least_seconds(costs, schedule, stages=stages, device=device)
    if device == "cpu":
        seconds["cpu"] += (schedule.traffic.read_total + schedule.traffic.written_total) * costs.hardware.io_cpu
    return seconds


def lower_bound(costs: Costs, schedule: Schedule, plan: Plan) -> float:
    """Returns a lower bound for a step of this plan, in seconds.

    Not counted: the cores' time that transfers take (none while compute waits), and fetches of weights that are still in
    memory.
    """
    in_flight = max(len(slots.weight_slots) for slots in plan.slot_classes)
    spared = sum(
        costs.model.stages[visit.owner].weight_bytes
        for visit in schedule.visits[: 2 * in_flight + 1]
        if visit.fetch and visit.owner is not None
    )
    busiest = _least_seconds(costs, schedule, stages=plan.stages, device=plan.device, spared=spared)
    return max(
        *busiest.values(),
        _turning_at_head(costs, schedule, plan),
        slot_seconds(costs, schedule, schedule.visits, plan, rates=(costs.hardware.store_read, costs.hardware.store_write)),
    )


def _turning_at_head(costs: Costs, schedule: Schedule, plan: Plan) -> float:
    """Returns the least seconds of a step on a separate device whose deferred updates end before the head is visited. None may
    begin before the step does; with clipping, the norm is not known earlier. Head and backward compute after them."""
    if plan.device == "cpu":
        return 0.0
    forward = list(takewhile(lambda visit: visit.phase == "forward", schedule.visits))
    owners = {visit.owner for visit in schedule.visits[: len(forward) + 1]}
    updated = [stage for stage in plan.stages if stage.deferred and stage.stage in owners]
    computed = costs.seconds_of(schedule.visits, plan.stages)
    busiest = [sum(computed[: len(forward)]) + sum(map(costs.device_update_seconds, updated))]
    busiest.append(sum(map(costs.update_seconds, updated)) / costs.updates_at_once)
    read, written = updates_traffic(costs.model, updated, None)
    busiest += store_seconds(costs.hardware, read, written).values()
    return max(busiest) + sum(computed[len(forward) :])


def phase_estimate(costs: Costs, schedule: Schedule, plan: Plan) -> float:
    """Estimates the seconds of a step: forward and the rest each take as long as their busiest resource or their slots.

    Not a bound, because updates run on into the next forward, but good enough to choose what to simulate first.
    """
    hardware, stages, seconds = costs.hardware, plan.stages, 0.0
    owning = [stage for stage in stages if costs.model.stages[stage.stage].trained]
    for phase in costs.once("phases", schedule.visits, stages, partial(_phases, costs, schedule, plan)):
        # Deferred updates run beside the first sweep's forward, the others beside the last one's backward.
        updated = [stage for stage in owning if (phase.is_first if stage.deferred else phase.is_last)]
        read, written = map(add, (phase.read, phase.written), updates_traffic(costs.model, updated, plan.commit_every))
        update = sum(costs.update_seconds(stage) for stage in updated) / costs.updates_at_once
        busiest = list(store_seconds(hardware, read, written).values())
        if plan.device == "cpu":
            busiest.append(phase.computing + update * _taken_by_updates(hardware, costs.numerics))
        else:
            busiest += [update, phase.computing + sum(map(costs.device_update_seconds, updated)), *phase.copied]
        memory = _dram_seconds(costs, read, written, phase.copied, updated).get("dram", 0.0)
        longest = max(*busiest, memory, slot_seconds(costs, schedule, phase.visits, plan, rates=_mixed(hardware)))
        seconds += longest + _BESIDE * sum(busiest)
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """Holds the visits of a part of a step and what they take without updates: seconds of computing and of copies up and down,
    bytes of the store."""

    visits: list[Visit]
    is_first: bool  # of the step's phases
    is_last: bool
    computing: float
    copied: tuple[float, float]
    read: int
    written: int


def _phases(costs: Costs, schedule: Schedule, plan: Plan) -> list[_Phase]:
    """Cuts a step into the first sweep's forward, the last sweep's rest without a backward that only measures, and all else."""
    first = [visit for visit in schedule.visits if visit.phase == "forward" and not visit.sweep]
    last = [visit for visit in schedule.visits if visit.phase != "forward" and visit.is_final and not visit.measures]
    ends = {visit.index for visit in (*first, *last)}
    between = [visit for visit in schedule.visits if visit.index not in ends]
    computed, phases = costs.seconds_of(schedule.visits, plan.stages), list[_Phase]()
    for visits in filter(None, (first, between, last)):
        moved = visits_traffic(costs.model, visits, plan.stages, costs.fill)
        busy = (sum(computed[visit.index] for visit in visits), 0.0, 0.0)
        if plan.device != "cpu":
            busy = _beside_copies(costs, visits, plan, computed)
        ends_of = {"is_first": visits[0] is schedule.visits[0], "is_last": visits[-1] is schedule.visits[-1]}
        phases.append(_Phase(visits=visits, computing=busy[0], copied=busy[1:], read=moved[0], written=moved[1], **ends_of))
    return phases


def _beside_copies(costs: Costs, visits: Sequence[Visit], plan: Plan, computed: Sequence[float]) -> tuple[float, float, float]:
    """Returns three times of a phase, in seconds: the device computing or waiting for its micro-batches, copies to it, and
    copies from it. Micro-batches are copied while their neighbours compute. If the batch is not on the device, nothing hides a
    visit's first upload and its last download. Weights that are still on the device from the visit before are counted as one
    more upload."""
    hardware, stages, parts = costs.hardware, plan.stages, costs.micro_batches
    up_rate, down_rate = (rate or float("inf") for rate in (hardware.h2d, hardware.d2h))
    computing = rising = falling = 0.0
    for visit in visits:
        up, down = micro_batch_crossing(costs, visit, stages[visit.stage])
        up_seconds, down_seconds = up * parts / up_rate, down * parts / down_rate
        busy = max(computed[visit.index], up_seconds, down_seconds)
        computing += busy + (0.0 if costs.batch_on_device else (up_seconds + down_seconds) / parts)
        if visit.owner is not None and stages[visit.owner].weights != "gpu":
            up_seconds += costs.model.stages[visit.owner].weight_bytes / up_rate
        owner = visit.owner if visit.owner is not None else visit.stage
        if visit.sum_gradients and not visit.measures and not stages[owner].updated_on_device:
            gradients = costs.model.stages[owner].gradient_bytes(costs.numerics.accumulate_dtype)
            down_seconds += gradients / down_rate
            up_seconds += gradients / up_rate * (visit.sweep > 0)
        rising, falling = rising + up_seconds, falling + down_seconds
    return computing, rising, falling


def micro_batch_crossing(costs: Costs, visit: Visit, stage: StagePlan) -> tuple[float, float]:
    """Returns the bytes of boundaries and kept outputs that one micro-batch of a visit copies to the device, and back."""
    up, down = _crossing(costs, visit, stage)
    size, kept = costs.boundary / costs.micro_batches, costs.kept_bytes(stage)
    return up * size + kept * visit.take, down * size + kept * visit.stash


def _crossing(costs: Costs, visit: Visit, stage: StagePlan) -> tuple[int, int]:
    """Returns `device.crossing` of a visit, which is the same in each sweep and plan."""
    key = (visit.stage, visit.phase, visit.stash, stays := stage.boundary == "gpu")
    if key not in costs.crossings:
        costs.crossings[key] = crossing(
            costs.model, visit.stage, visit.phase, stash=visit.stash, on_device=costs.batch_on_device, stays=stays
        )
    return costs.crossings[key]


def slot_seconds(costs: Costs, schedule: Schedule, visits: Sequence[Visit], plan: Plan, *, rates: tuple[float, float]) -> float:
    """Returns the least time in which a class of slots can serve these visits of a step. A slot of weights is held during
    compute and during the update. A slot of gradients is held while they are summed and until they are updated or written.
    `rates`: the store's, for reading and writing; 0 where unknown."""
    weights, gradients = ([0.0] * len(plan.slot_classes) for _ in range(2))
    seconds = costs.seconds_of(schedule.visits, plan.stages)
    in_slots = [None if stage.updated_on_device else stage for stage in plan.stages]
    for visit in visits:
        if (stage := in_slots[visit.owner if visit.owner is not None else visit.stage]) is None:
            continue
        computing = seconds[visit.index]
        updating = _update_seconds(costs, stage, rates, plan.commit_every) if visit.update != "none" else 0.0
        if stage.weights_ram is None and visit.owner is not None:
            weights[stage.slot_class] += computing + (updating if stage.trained_ram is None else 0.0)
        if stage.gradients_ram is None and visit.sum_gradients:
            # The embedding's backward continues this sum in the same slot.
            goes_on = visit.phase == "head" and costs.model.tied_head and not costs.model.head_is_cut
            resting = (
                not visit.measures and stage.gradients_extent is not None and (stage.deferred or visit.rest) and not goes_on
            )
            written = stage.gradients_extent.size / rates[1] if resting and stage.gradients_extent and rates[1] else 0.0
            gradients[stage.slot_class] += computing + (written if resting else updating)
    held = [(weights[number], slots.weight_slots) for number, slots in enumerate(plan.slot_classes)]
    held += [(gradients[number], slots.gradient_slots) for number, slots in enumerate(plan.slot_classes)]
    return max((total / len(slots) for total, slots in held if slots), default=0.0)


def _update_seconds(costs: Costs, stage: StagePlan, rates: tuple[float, float], commit_every: int | None) -> float:
    """Returns the seconds from an update's first byte to its last: those of the slowest of reading, computing and writing."""
    states = costs.model.stages[stage.stage].state_bytes * (stage.states == "ssd")
    read = states + (stage.gradients_extent.size if stage.deferred and stage.gradients_extent else 0)
    written = sum(written_by_update(costs.model, stage, commit_every))
    moving = [size / rate for size, rate in zip((read, written), rates, strict=True) if rate]
    return max(costs.update_seconds(stage) / costs.updates_at_once, *moving, 0.0)


def _mixed(hardware: HardwareProfile) -> tuple[float, float]:
    return hardware.store_read_mixed or hardware.store_read, hardware.store_write_mixed or hardware.store_write


def _least_seconds(
    costs: Costs, schedule: Schedule, *, stages: tuple[StagePlan, ...], device: str, spared: int = 0
) -> dict[str, float]:
    traffic, beside = schedule.traffic, _beside_store(costs, device, schedule.visits, stages)
    read, written = traffic.read_total - spared, traffic.written_total
    found = beside | store_seconds(costs.hardware, read, written)
    return found | _dram_seconds(costs, read, written, [beside.get(way, 0.0) for way in ("h2d", "d2h")], stages)


def _dram_seconds(
    costs: Costs, read: int, written: int, copied: Sequence[float], updated: Sequence[StagePlan]
) -> dict[str, float]:
    """Returns the least time in which the host's memory moves these bytes of the store, what copies up and down bring in
    `copied` seconds, and what AdamW moves of the stages `updated`. Empty if its rate is not known."""
    hardware = costs.hardware
    if not hardware.dram:
        return {}
    stored = read * bool(hardware.store_read) + written * bool(hardware.store_write)
    crossed = copied[0] * hardware.h2d + copied[1] * hardware.d2h
    adamw = sum(map(costs.update_seconds, updated)) * costs.update_bytes_rate
    return {"dram": (stored + crossed + adamw) / hardware.dram}


def _beside_store(costs: Costs, device: str, visits: tuple[Visit, ...], stages: tuple[StagePlan, ...]) -> dict[str, float]:
    """Returns the seconds of every resource but the store."""
    hardware = costs.hardware
    compute = sum(costs.seconds_of(visits, stages))
    compute += sum(map(costs.device_update_seconds, stages))
    update = sum(costs.update_seconds(stage) for stage in stages) / costs.updates_at_once
    if device == "cpu":
        return {"cpu": compute + update * _taken_by_updates(hardware, costs.numerics)}
    seconds = {"compute": compute, "update": update}
    to_device, to_host = costs.once("copied", visits, stages, partial(copied_bytes, costs, visits, stages=stages))
    if hardware.h2d:
        seconds["h2d"] = to_device / hardware.h2d
    if hardware.d2h:
        seconds["d2h"] = to_host / hardware.d2h
    return seconds


def store_seconds(hardware: HardwareProfile, read: int, written: int) -> dict[str, float]:
    """Returns the least time to move these bytes: both directions run at once while both have work, then one runs alone."""
    reading, writing = hardware.store_read, hardware.store_write
    both_read, both_write = _mixed(hardware)
    seconds: dict[str, float] = {}
    together = min(read / both_read if both_read else 0.0, written / both_write if both_write else 0.0)
    if reading and read:
        seconds["ssd read"] = together + (read - together * both_read) / reading
    if writing and written:
        seconds["ssd write"] = together + (written - together * both_write) / writing
    return seconds


def _taken_by_updates(hardware: HardwareProfile, numerics: Numerics) -> float:
    """Returns how much compute time one second of updates costs, with all update threads: while both run, or while compute
    waits."""
    if hardware.cores > numerics.torch_threads or not hardware.shared_adamw:
        return 0.0
    return min(1.0, (1 - hardware.shared_compute) / hardware.shared_adamw)


def copied_bytes(costs: Costs, visits: tuple[Visit, ...], *, stages: tuple[StagePlan, ...]) -> tuple[int, int]:
    """Returns bytes of one step to a device with memory of its own, and back from it."""
    model, numerics, again = costs.model, costs.numerics, costs.sweeps - 1
    gradients = [stage.gradient_bytes(numerics.accumulate_dtype) for stage in model.stages]
    # Bytes of gradients that leave the device.
    leaving = [0 if plan.updated_on_device else size for size, plan in zip(gradients, stages, strict=True)]
    # These gradients rest between two visits.
    shared = sum(leaving[stage.index] for stage in model.stages if model.has_two_users(stage.index))
    boundary = costs.boundary
    moved = [_crossing(costs, visit, stages[visit.stage]) for visit in visits]
    weights = sum(model.stages[owner].weight_bytes * often for owner, often in uploads(costs, visits, stages).items())
    resumed, brought = shared + again * (sum(leaving) + shared), (1 + again) * (sum(leaving) + shared)
    to_device = weights + resumed + boundary * sum(into for into, _ in moved)
    to_host = brought + boundary * sum(back for _, back in moved)
    kept = sum(map(costs.kept_bytes, stages)) * numerics.micro_batches
    often = 1 + any(visit.measures for visit in visits)
    return to_device + kept * often, to_host + kept


def uploads(costs: Costs, visits: tuple[Visit, ...], stages: tuple[StagePlan, ...]) -> dict[int, int]:
    """Returns, by stage, how often a step uploads its weights (of one generation)."""
    return costs.once("uploads", visits, stages, partial(_uploads, costs.model, visits, stages))


def _uploads(model: ModelSpec, visits: Sequence[Visit], stages: Sequence[StagePlan]) -> dict[int, int]:
    side, times = DeviceSide(model, stages), dict.fromkeys(range(len(stages)), 0)
    begun = 0

    def begin() -> int:
        nonlocal begun
        begun += 1
        return begun

    for visit in visits:
        if visit.owner is not None:
            before = begun
            side.upload(visit.owner, 1, begin)
            times[visit.owner] += begun - before
    return times
