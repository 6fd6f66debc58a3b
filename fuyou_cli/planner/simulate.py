"""Simulates a few steps of a schedule. The last one is the answer."""

from __future__ import annotations

from dataclasses import replace

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .costs import Costs
from .imagined import Imagined
from .schedule import Schedule
from .simulated_machine import Sharing, VirtualMachine
from .timeline import Timeline

STEPS = 3  # steps simulated; the last one counts. The second is up to 1.4 % off if few updates are deferred


def sharing_of(hardware: HardwareProfile, plan: Plan, costs: Costs) -> Sharing:
    """Tells how compute and updates share the cores. On device cpu they share them unless there are more cores than compute
    takes."""
    threads = plan.io.update_threads
    alone = Sharing(updates_at_once=costs.updates_at_once, update_bytes=costs.update_bytes_rate)
    if plan.device == "cuda":
        return alone
    spare = hardware.cores - plan.numerics.torch_threads
    if spare >= threads:
        return replace(alone, io_cores=0.0 if spare > threads else hardware.io_cpu)
    return replace(alone, compute_left=hardware.shared_compute, update_left=hardware.shared_adamw, io_cores=hardware.io_cpu)


def simulate(
    model: ModelSpec,
    hardware: HardwareProfile,
    plan: Plan,
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    steps: int = STEPS,
    state_bytes: int | None = None,
    batch_on_device: bool = False,
    commits: bool = False,
    jobs: bool = True,
) -> Timeline:
    """Returns the last of `steps` steps. If commits are more than a step apart, it contains none, unless `commits` puts them
    where the plan has them. `costs`: the plan's, reused from one simulation to the next. Without `jobs` the timeline has no
    list of them.

    Two arguments describe steps of other systems than fuyou: `state_bytes` per parameter beside the weights, and
    `batch_on_device`, which keeps whole-batch tensors on the device, so that all copies run beside compute.
    """
    costs = costs or Costs.of(model, hardware, plan)
    machine = VirtualMachine(costs.hardware, sharing_of(costs.hardware, plan, costs), costs.speeds)
    if not jobs:
        machine.log = None
    run = Imagined(
        model, plan, schedule, costs, machine, state_bytes=state_bytes, batch_on_device=batch_on_device, commits=commits
    )
    for number in range(1, steps):
        _step(run, number, len(schedule.visits))
    before, begin = _Before(run), machine.now
    forward = _step(run, steps, len(schedule.visits))
    found = Timeline(
        begin=begin,
        step_seconds=machine.now - begin,
        forward_seconds=forward,
        in_use={name: seconds - before.in_use.get(name, 0.0) for name, seconds in sorted(machine.in_use.items())},
        stalls={
            cause: seconds - before.stalls.get(cause, 0.0)
            for cause, seconds in sorted(run.residency.stalls.items())
            if seconds > before.stalls.get(cause, 0.0)
        },
        read=run.moved_in - before.read,
        written=run.moved_out - before.written,
        work=tuple(done for done in machine.log or () if done.end > begin),
        asked=tuple(run.asked[before.asked :]) if jobs else (),
    )
    run.let_go()
    return found


class _Before:
    """Holds what had happened when the step began."""

    def __init__(self, run: Imagined) -> None:
        self.in_use, self.stalls = dict(run.machine.in_use), dict(run.residency.stalls)
        self.read, self.written, self.asked = run.moved_in, run.moved_out, len(run.asked)


def _step(run: Imagined, number: int, visits: int) -> float:
    """Runs one step (the first has number 1). Returns the seconds of forward, over all sweeps."""
    run.generation, forward, begin = number, 0.0, run.machine.now
    run.lookahead.begin_step(last=False)
    sweep, turn = 0, begin  # when the sweep's forward ended
    for _ in range(visits):
        before = run.machine.now
        visit = run.visit()
        if visit.sweep > sweep:
            sweep, forward, begin = visit.sweep, forward + turn - begin, before
        if visit.phase == "forward":
            turn = run.machine.now
    run.settle()
    run.residency.update_later(True)
    return forward + (turn - begin)
