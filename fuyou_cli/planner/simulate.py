"""Simulates a few steps of a schedule on a virtual machine. The last one, as data (`Timeline`), is the answer.

`SimulatedRun` is the ledgers' runner: transfers, updates and copies are jobs of a virtual machine. Its `visit` does what the
executor does, in the same order: it gets the weights, the boundary and a place for gradients, starts whatever can start next,
computes, and sends the gradients to rest or to their update. The ledgers make all decisions (which slot, what is prefetched,
when an update may begin). A run uses the same ledgers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan, StagePlan
from .bound import micro_batch_crossing
from .costs import Costs, JobParts, KnownSpeeds, Resource
from .device import BOUNDARIES_ACROSS, BULK_PRIORITY, GRADIENTS_ACROSS, WEIGHTS_UP, DeviceSide
from .ledgers import FOREVER, BoundaryLedger, Lookahead, Record, Residency, update_priority
from .schedule import Schedule, Visit, filled, written_by_update

STEPS = 3  # steps simulated; the last one counts. The second is up to 1.4 % off if few updates are deferred
_FIRST = -1  # the highest priority
_LOOKS = 4  # looks per visit at most; a run looks after every micro-batch
# Visits from which half as many looks are enough: with so many, it hardly matters when in a visit something starts.
_MANY_VISITS = 150
_MOMENT = 1e-9  # seconds: no time, but in its turn


# ---- the machine -----------------------------------------------------------------------------------------------------
#
# Each job takes the time its rates say, and jobs that run at once share the rates. Time jumps from one completion to the next.
# In between every job moves at a constant speed, all its parts in step: an update reads, computes and writes chunk by chunk, so
# it is as fast as the slowest of the three. Jobs are served by priority, then in order of arrival, like the daemon does. What a
# job cannot use is left to the next.
#
# Reading and writing at once slow each other down, and so do copies to a device and back. While both run, each gets its mixed
# rate, plus part of what the other leaves. If the mixed rate is unknown (zero), it is the rate alone. Work of a resource
# without any rate takes no time. On device cpu compute and updates share cores: compute loses what one update thread takes,
# because all its threads wait for the slowest.
#
# Everything but compute moves its bytes through the host's memory. If together they want more than it gives, all of them move
# slower, each by the same share.

_PAIRS: tuple[tuple[Resource, Resource], ...] = (("ssd read", "ssd write"), ("h2d", "d2h"))  # pairs that slow each other down
_DONE = 1e-12  # share of a job that is only a rounding error
_LEAST_COMPUTE = 0.05  # share of its rate that compute keeps beside updates and transfers, however busy the cores
_HALVINGS, _CLOSE = 8, 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedJob:
    """Describes a finished job: when it first moved, and when it ended."""

    what: str
    stage: int
    begin: float
    end: float
    parts: JobParts


@dataclass(slots=True, eq=False)
class Job:
    ticket: int
    what: str
    stage: int
    order: tuple[int, int]
    parts: JobParts
    kind: int  # a number for its parts
    left: float = 1.0  # share still to do
    speed: float = 0.0  # share per second
    begin: float | None = None  # when it first moved


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Describes how compute and updates slow each other down. On a device with its own cores they do not."""

    compute_left: float = 1.0  # share of its rate that compute keeps while update threads run at full speed
    update_left: float = 1.0  # share of its rate that an update keeps while compute runs
    io_cores: float = 0.0  # seconds of compute lost per byte moved
    updates_at_once: float = 1.0  # how much faster all update threads are than one; an update is cut into chunks for all
    update_bytes: float = 0.0  # bytes of host memory per second of one update thread


@dataclass(slots=True)
class VirtualMachine:
    """Runs jobs. `now` is in seconds. `in_use` sums, by resource, seconds times the share of it that is in use."""

    hardware: HardwareProfile
    sharing: Sharing
    known: KnownSpeeds = field(default_factory=KnownSpeeds)
    now: float = 0.0
    in_use: dict[Resource, float] = field(default_factory=dict)
    log: list[FinishedJob] | None = field(default_factory=list)  # None: nobody wants it
    jobs: list[Job] = field(default_factory=list)
    _finished: set[int] = field(default_factory=set)
    _tickets: int = 0
    _stale: bool = True  # the jobs have changed since their speeds were set
    _shares: dict[Resource, float] = field(default_factory=dict)  # share of each resource that is in use now
    _alone: dict[Resource, float] = field(default_factory=dict)
    _mixed: dict[Resource, float] = field(default_factory=dict)  # rate while the other of the pair moves

    def __post_init__(self) -> None:
        machine = self.hardware
        self._alone = {
            "ssd read": machine.store_read, "ssd write": machine.store_write, "h2d": machine.h2d, "d2h": machine.d2h,
        }  # fmt: skip
        known: dict[Resource, float] = {
            "ssd read": machine.store_read_mixed, "ssd write": machine.store_write_mixed, "h2d": machine.h2d_mixed,
            "d2h": machine.d2h_mixed,
        }  # fmt: skip
        self._mixed = {name: rate or self._alone[name] for name, rate in known.items()}

    def submit(self, parts: JobParts, *, what: str, stage: int, priority: int = 0) -> int:
        """Starts a job and returns its ticket. An empty job is done at once."""
        self._tickets += 1
        parts = tuple([part for part in parts if part[1] > 0 and self._alone.get(part[0], 1.0)])
        if not parts:
            self._finished.add(self._tickets)
            return self._tickets
        job = Job(self._tickets, what, stage, (priority, self._tickets), parts, self.known.kind(parts))
        place = len(self.jobs)
        while place and self.jobs[place - 1].order > job.order:
            place -= 1
        self.jobs.insert(place, job)
        self._stale = True
        return self._tickets

    def collect(self, ticket: int) -> bool:
        """Tells whether the job is done, and then forgets it."""
        if ticket not in self._finished:
            return False
        self._finished.discard(ticket)
        return True

    def is_done(self, ticket: int) -> bool:
        """Tells whether the job is done, without forgetting it: several may wait for it."""
        return ticket in self._finished

    def advance(self, until: float | None = None) -> None:
        """Advances to the next completion, at most `until` some time. Raises RuntimeError if nothing moves, because something
        waits for ever."""
        if self._stale:
            self._allot()
        ahead = min([job.left / job.speed for job in self.jobs if job.speed > 0], default=None)
        if until is not None:
            ahead = until - self.now if ahead is None else min(ahead, until - self.now)
        if ahead is None:
            waiting = ", ".join(f"{job.what} of stage {job.stage}" for job in self.jobs) or "nothing"
            raise RuntimeError(f"nothing moves on this machine; under way: {waiting}")
        self.now += ahead
        for name, share in self._shares.items():
            self.in_use[name] = self.in_use.get(name, 0.0) + share * ahead
        going = []
        for job in self.jobs:
            job.left -= job.speed * ahead
            if job.left <= _DONE and job.speed > 0:
                self._finish(job)
            else:
                going.append(job)
        self.jobs = going

    def _finish(self, job: Job) -> None:
        self._finished.add(job.ticket)
        assert job.begin is not None
        if self.log is not None:
            self.log.append(FinishedJob(what=job.what, stage=job.stage, begin=job.begin, end=self.now, parts=job.parts))
        self._stale = True

    # ---- rates ---------------------------------------------------------------------------------------------------

    def _allot(self) -> None:
        """Sets the speeds of all jobs until one of them ends. They follow from the jobs' parts, in order."""
        self._stale = False
        kinds, speeds = tuple([job.kind for job in self.jobs]), self.known.speeds
        known = speeds.get(kinds)
        if known is None:
            known = speeds[kinds] = self._speeds()
        job_speeds, self._shares = known
        for job, speed in zip(self.jobs, job_speeds, strict=True):
            job.speed = speed
            if job.begin is None and speed > 0:
                job.begin = self.now

    def _speeds(self) -> tuple[tuple[float, ...], dict[Resource, float]]:
        wanted = {name for job in self.jobs for name, _ in job.parts}
        together = [pair for pair in _PAIRS if wanted.issuperset(pair)]
        rates = self._rates(wanted, together)
        used = self._serve(rates)
        for pair in together:
            used = self._settle(pair, rates, used)
        self._slow_compute(used)
        shares = {name: used[name] / rates[name] for name in rates if name in wanted and rates[name]}
        if self.hardware.dram:
            self._share_memory(used, shares)
        return tuple([job.speed for job in self.jobs]), shares

    def _rates(self, wanted: set[Resource], together: list[tuple[Resource, Resource]]) -> dict[Resource, float]:
        rates: dict[Resource, float] = {
            "compute": 1.0,
            "update": self.sharing.updates_at_once * (self.sharing.update_left if "compute" in wanted else 1.0),
            **self._alone,
        }
        for pair in together:
            rates |= {name: self._mixed[name] for name in pair}
        return rates

    def _serve(self, rates: dict[Resource, float]) -> dict[Resource, float]:
        """Gives each job, in order, what is left of each resource. Returns the rates used."""
        left = dict(rates)
        for job in self.jobs:
            speed = float("inf")
            for name, amount in job.parts:
                possible = left[name] / amount
                if possible < speed:
                    speed = possible
            job.speed = speed
            if speed:
                for name, amount in job.parts:
                    remaining = left[name] - speed * amount
                    left[name] = remaining if remaining > 0 else 0.0
        return {name: rate - left[name] for name, rate in rates.items()}

    def _settle(
        self, pair: tuple[Resource, Resource], rates: dict[Resource, float], used: dict[Resource, float]
    ) -> dict[Resource, float]:
        """Settles two directions that slow each other down. If one does not take all of its mixed rate, the other gets more
        than its own: at most the point on the line between both mixed rates and one direction alone. What a job takes of both
        moves that point, so a few halvings find it."""
        alone, mixed = self._alone, self._mixed
        if all(alone[name] == mixed[name] for name in pair):
            return used
        slack, full = min((pair, pair[::-1]), key=lambda pair: used[pair[0]] / mixed[pair[0]])
        if used[slack] >= mixed[slack] * (1 - _DONE):
            return used
        low, high = used[slack] / mixed[slack], 1.0  # share of its mixed rate that the slack direction takes
        share = low
        for _ in range(_HALVINGS):
            rates[full] = alone[full] - (alone[full] - mixed[full]) * share
            used = self._serve(rates)
            used_share = used[slack] / mixed[slack]
            if abs(used_share - share) < _CLOSE:
                break
            low, high = (share, high) if used_share > share else (low, share)
            share = (low + high) / 2
        return used

    def _slow_compute(self, used: dict[Resource, float]) -> None:
        """Subtracts from compute what updates and transfers take from its cores."""
        sharing = self.sharing
        if sharing.update_left <= 0:
            return
        lost = (1 - sharing.compute_left) * used["update"] / (sharing.update_left * sharing.updates_at_once)
        lost += sharing.io_cores * (used["ssd read"] + used["ssd write"])
        for job in self.jobs:
            if job.parts[0][0] == "compute":
                job.speed *= max(_LEAST_COMPUTE, 1.0 - lost)

    def _share_memory(self, used: dict[Resource, float], shares: dict[Resource, float]) -> None:
        """Slows down all that moves bytes to what the host's memory gives. Threads that wait for it keep their cores."""
        limit = self.hardware.dram
        wanted = sum(used[name] for name in self._alone) + used["update"] * self.sharing.update_bytes
        shares["dram"] = min(1.0, wanted / limit)
        if wanted <= limit:
            return
        for name in self._alone:
            if name in shares:
                shares[name] *= limit / wanted
        for job in self.jobs:
            if job.parts[-1][0] != "compute":
                job.speed *= limit / wanted


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRequest:
    """Describes one request to the store's daemon: "read weights", "write boundary", "update", ... of a stage."""

    what: str
    stage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Describes one steady-state step. Times are in seconds. `work` ends within the step; longer jobs may have begun before it.

    `in_use` counts how much of a resource was taken (half its rate for a minute: 30 s); `under_way` counts how long it was in
    use.
    """

    begin: float  # on the clock of `work`
    step_seconds: float
    forward_seconds: float  # to the end of the last forward visit, of all sweeps; the rest is head and backward
    in_use: dict[str, float]  # resource -> seconds times the share in use
    stalls: dict[str, float]  # what compute waited for -> seconds
    read: int  # bytes of the store
    written: int
    work: tuple[FinishedJob, ...]
    asked: tuple[StoreRequest, ...]  # requests in order

    @property
    def end(self) -> float:
        """Returns when the step ended, on the clock of `work`."""
        return self.begin + self.step_seconds

    @property
    def under_way(self) -> dict[str, float]:
        """Returns, by resource, the seconds of the step in which at least one job of `work` used it."""
        spans: dict[str, list[tuple[float, float]]] = {}
        for done in self.work:
            for name, _ in done.parts:
                spans.setdefault(name, []).append((max(done.begin, self.begin), done.end))
        return {name: _covered(intervals) for name, intervals in sorted(spans.items())}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Returns the seconds that at least one of the spans covers."""
    seconds, until = 0.0, float("-inf")
    for first, last in sorted(spans):
        seconds += max(0.0, last - max(first, until))
        until = max(until, last)
    return seconds


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
    run = begun(
        model, hardware, plan, schedule, costs, state_bytes=state_bytes, batch_on_device=batch_on_device, commits=commits,
        jobs=jobs,
    )  # fmt: skip
    for number in range(1, steps):
        _step(run, number, len(schedule.visits))
    before = Before(run)
    forward = _step(run, steps, len(schedule.visits))
    timeline = before.timeline(run, forward)
    run.let_go()
    return timeline


def begun(
    model: ModelSpec, hardware: HardwareProfile, plan: Plan, schedule: Schedule, costs: Costs | None = None, *,
    state_bytes: int | None = None, batch_on_device: bool = False, commits: bool = False, jobs: bool = False,
) -> SimulatedRun:  # fmt: skip
    """Returns a run before its first step."""
    costs = costs or Costs.of(model, hardware, plan)
    machine = VirtualMachine(costs.hardware, sharing_of(costs.hardware, plan, costs), costs.speeds)
    if not jobs:
        machine.log = None
    return SimulatedRun(
        model, plan, schedule, costs, machine, state_bytes=state_bytes, batch_on_device=batch_on_device, commits=commits
    )


class Before:
    """Holds what had happened when the step began."""

    def __init__(self, run: SimulatedRun) -> None:
        self.begin, self.in_use, self.stalls = run.machine.now, dict(run.machine.in_use), dict(run.residency.stalls)
        self.read, self.written, self.asked = run.moved_in, run.moved_out, len(run.asked)

    def timeline(self, run: SimulatedRun, forward: float) -> Timeline:
        """Returns the step, which ends now."""
        machine = run.machine
        return Timeline(
            begin=self.begin,
            step_seconds=machine.now - self.begin,
            forward_seconds=forward,
            in_use={name: seconds - self.in_use.get(name, 0.0) for name, seconds in sorted(machine.in_use.items())},
            stalls={
                cause: seconds - self.stalls.get(cause, 0.0)
                for cause, seconds in sorted(run.residency.stalls.items())
                if seconds > self.stalls.get(cause, 0.0)
            },
            read=run.moved_in - self.read,
            written=run.moved_out - self.written,
            work=tuple(done for done in machine.log or () if done.end > self.begin),
            asked=() if machine.log is None else tuple(run.asked[self.asked :]),
        )


def _step(run: SimulatedRun, number: int, visits: int) -> float:
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


class LinkOfVisits(Protocol):
    """What a visit does for other ranks (`ring`)."""

    def turn(self, visit: Visit) -> None:
        """Waits for what the visit has to have before it begins."""

    def enter(self, visit: Visit) -> int:
        """Begins a visit. Returns in how many parts its micro-batches are looked at; 0 if nothing crosses."""

    def before(self, part: int) -> None:
        """Waits for what a part computes from."""

    def after(self, part: int) -> None:
        """Sends what a part has computed."""


# ---- the run ---------------------------------------------------------------------------------------------------------


class SimulatedRun:
    """Runs the ledgers on a virtual machine. Transfers and updates become jobs, and waiting advances the clock."""

    def __init__(
        self,
        model: ModelSpec,
        plan: Plan,
        schedule: Schedule,
        costs: Costs,
        machine: VirtualMachine,
        *,
        state_bytes: int | None,
        batch_on_device: bool,
        commits: bool,
    ) -> None:
        self.model, self.plan, self.costs, self.machine = model, plan, costs, machine
        self.residency = Residency(model=model, plan=plan, transfers=self, runner=self)
        self.boundaries = BoundaryLedger(plan=plan, transfers=self)
        self.lookahead = Lookahead(schedule=schedule, residency=self.residency, boundaries=self.boundaries, tick=self.tick)
        self.device = DeviceSide(model, plan.stages) if plan.device != "cpu" else None
        self.moved_in, self.moved_out = 0, 0  # bytes read from the store, and written
        self.updates = 0  # begun
        self.asked: list[StoreRequest] = []
        # Downloads of gradients under way: ticket, stage, and whether the sum then rests.
        self.after: list[tuple[int, int, bool]] = []
        self.sums_up: dict[int, int] = {}  # tickets of sums that are uploaded to continue there
        self._crossings: dict[int, tuple[float, float]] = {}  # by visit
        self._state_bytes = state_bytes
        if not commits and plan.commit_every != 1:
            self.residency.commits.every = None
        # Micro-batches at each end of a visit whose copies nothing hides.
        self._unhidden = 0 if batch_on_device or plan.batch_on_device else 1
        self._looks = _LOOKS if len(schedule.visits) < _MANY_VISITS else _LOOKS // 2
        self.link: LinkOfVisits | None = None  # to other ranks
        # The backward of an embedding is taken to need no time, but it runs after the updates submitted before it.
        self._least = _MOMENT if any(stage.updated_on_device for stage in plan.stages) else 0.0

    def let_go(self) -> None:
        """Breaks the reference cycle with the ledgers, so that memory is freed at once and not by the cycle collector."""
        del self.residency, self.boundaries, self.lookahead

    # ---- transfers (the ledgers call these) ------------------------------------------------------------------------

    def read(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        self.moved_in += size
        what = self._ask("read", store_offset, label)
        return self.machine.submit((("ssd read", size),), what=what, stage=label, priority=priority)

    def write(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        self.moved_out += size
        what = self._ask("write", store_offset, label)
        return self.machine.submit((("ssd write", size),), what=what, stage=label, priority=priority)

    def poll(self, ticket: int) -> object | None:
        return ticket if self.machine.collect(ticket) else None

    def _ask(self, direction: str, store_offset: int, stage: int) -> str:
        what = f"{direction} {_content(self.plan.stages[stage], store_offset)}"
        self.asked.append(StoreRequest(what=what, stage=stage))
        return what

    # ---- updates and waiting (the residency ledger calls these) ----------------------------------------------------

    def update(self, record: Record) -> int:
        plan, stage = self.plan.stages[record.stage], self.model.stages[record.stage]
        is_written = self.residency.commits.is_written(record.generation + 1)
        weights, states = written_by_update(self.model, plan, 1 if is_written else None)
        read = 0
        if plan.states == "ssd":
            read = states = stage.state_bytes if self._state_bytes is None else self._state_bytes * stage.trained
        written = weights + states
        if record.gradient_slot is None and plan.gradients_ram is None and plan.gradients_extent is not None:
            read += plan.gradients_extent.size
        self.moved_in += read
        self.moved_out += written
        self.updates += 1
        self.asked.append(StoreRequest(what="update", stage=record.stage))
        if plan.updated_on_device:  # compute submitted later runs after the update
            on_device: JobParts = (
                ("compute", self.costs.device_update_seconds(plan)),
                ("d2h", written),
                ("ssd write", written),
            )
            return self.machine.submit(on_device, what="update", stage=record.stage, priority=_FIRST)
        parts: JobParts = (("update", self.costs.update_seconds(plan)), ("ssd read", read), ("ssd write", written))
        return self.machine.submit(parts, what="update", stage=record.stage, priority=update_priority(plan))

    def end_update(self, record: Record, result: object) -> None:
        pass

    def join(self, record: Record) -> None:
        pass  # a copy of little

    def complete_generation(self, generation: int) -> None:
        pass

    def durable(self, stage: int) -> int:
        return FOREVER  # flushing and writing a manifest is short and delays nothing

    def pass_time(self) -> None:
        """Advances to the next completion."""
        self.machine.advance()

    def wait_until_time(self, time: float, cause: str) -> None:
        """Goes on with everything else until some time on the clock of all ranks."""
        begin = self.machine.now
        while self.machine.now < time:
            self.machine.advance(until=time)
            self.tick()
        self.residency.add_stall(cause, self.machine.now - begin)

    def wait(self, condition: Callable[[], bool], cause: str) -> None:
        begin = self.machine.now
        while not condition():
            self.pass_time()
            self.tick()
        self.residency.add_stall(cause, self.machine.now - begin)

    # ---- one visit -------------------------------------------------------------------------------------------------

    def visit(self) -> Visit:
        """Runs the next visit as the executor does."""
        if self.link is not None:
            self.link.turn(self.lookahead.visits[self.lookahead.cursor + 1])
        visit = self.lookahead.enter(self._stash)
        crossing = 0 if self.link is None else self.link.enter(visit)
        if visit.take:
            self.boundaries.ready(visit.stage, self.residency.wait_until)
        total = visit.owner if visit.owner is not None else visit.stage
        summed = visit.sum_gradients
        if summed and visit.resume:
            self.residency.resume_gradients(total)
            if self.device is not None and visit.sweep and not self.plan.stages[total].updated_on_device:
                self._wait_for_sum(total)
        if self.device is not None and visit.owner is not None:
            self._wait_for_upload(visit.owner)
        up, down = self.crossing(visit)
        first = self._begin_copies(visit, up=up * self._unhidden)
        self.lookahead.on_device()
        self._compute(visit, first, up=up, down=down, crossing=crossing)
        if visit.stash and not self._seals_at_once(visit.stage):
            self.boundaries.seal(visit.stage)
        if visit.take:
            (self.boundaries.leave if visit.measures else self.boundaries.drop)(visit.stage)
        if summed and not self._stays(visit):
            self._close_sum(visit, total)
        self.residency.release(visit)
        self.tick()
        return visit

    def _stash(self, visit: Visit) -> None:
        span = self.boundaries.room(visit.stage, self.residency.wait_until)
        self.boundaries.place(visit.stage, span, self.kept_bytes(visit.stage))
        if self._seals_at_once(visit.stage):
            self.boundaries.seal(visit.stage)

    def _seals_at_once(self, stage: int) -> bool:
        """Tells whether a boundary is complete when its visit begins. On a separate device it is copied to its place during the
        visit."""
        return self.device is None and not self.plan.stages[stage].kept

    def tick(self) -> None:
        """Moves everything that can move."""
        self.residency.advance()
        self.boundaries.advance()
        while self.after and self.machine.collect(self.after[0][0]):
            _, stage, rests = self.after.pop(0)
            self._hand_over(stage, rests=rests)
            self.residency.let_go(self.residency.records[stage])
        self.lookahead.advance(self._begin_upload)

    def _stays(self, visit: Visit) -> bool:
        """Tells whether the sum stays on the device: a tied head that is not cut continues it in the embedding's backward."""
        return visit.phase == "head" and self.model.tied_head and not self.model.head_is_cut

    def _hand_over(self, stage: int, *, rests: bool) -> None:
        """Sends a sum of gradients to its home, or begins the update."""
        if rests or self.plan.stages[stage].deferred:
            self.residency.rest_gradients(stage)
        else:
            self.residency.update_now(stage, True)

    def _close_sum(self, visit: Visit, total: int) -> None:
        if visit.measures:
            self.residency.drop_gradients(total)
            return
        if self.device is None or self.plan.stages[total].updated_on_device:
            self._hand_over(total, rests=visit.rest)
            return
        self.residency.hold(self.residency.records[total])  # as in a run: the update that follows uses the host's weights
        size = self.model.stages[total].gradient_bytes(self.plan.numerics.accumulate_dtype)
        ticket = self.machine.submit((("d2h", size),), what="gradients", stage=total, priority=BULK_PRIORITY)
        self.after.append((ticket, total, visit.rest))
        if len(self.after) > 1:  # the next sum needs the span of the oldest download
            first = self.after[0]
            self.residency.wait_until(lambda: first not in self.after, GRADIENTS_ACROSS)

    # ---- compute ---------------------------------------------------------------------------------------------------

    def _compute(self, visit: Visit, first: list[int], *, up: float, down: float, crossing: int) -> None:
        """Computes micro-batch by micro-batch. While one computes, the next one's inputs are uploaded and the results of the
        one before are downloaded. Nothing hides the `first` upload and the last download. The download of a kept input is
        hidden: it runs while its micro-batch computes. `up`, `down`: bytes of one micro-batch. `crossing`: the parts in which
        something crosses between ranks."""
        seconds = max(self.compute_seconds(visit), self._least)
        looks = crossing or min(self._looks, self.costs.micro_batches)
        share = self.costs.micro_batches / looks  # micro-batches between two looks
        last = (down - self.costs.boundary / self.costs.micro_batches * (visit.stash and down > 0)) * self._unhidden
        self._cross(first)
        for look in range(looks):
            if self.link is not None and crossing:
                self.link.before(look)
            rising = up * (share - self._unhidden * (look == looks - 1))
            copies = self._begin_copies(visit, up=rising, down=down * share - last * (look == 0))
            ticket = self.machine.submit((("compute", seconds / looks),), what=visit.phase, stage=visit.stage)
            while not self.machine.collect(ticket):
                self.pass_time()
            self._cross(copies)
            self.tick()
            if self.link is not None and crossing:
                self.link.after(look)
        self._cross(self._begin_copies(visit, down=last))

    def _cross(self, copies: list[int]) -> None:
        """Waits for copies of boundaries."""
        if copies:
            self._stand_still(lambda: all(self.machine.is_done(copy) for copy in copies), BOUNDARIES_ACROSS)
        for copy in copies:
            self.machine.collect(copy)

    def compute_seconds(self, visit: Visit) -> float:
        return self.costs.compute_seconds(visit, self.costs.kept_bytes(self.plan.stages[visit.stage]))

    def crossing(self, visit: Visit) -> tuple[float, float]:
        """Returns the bytes that one micro-batch copies to the device and back: boundaries and kept outputs."""
        if self.device is None:
            return 0.0, 0.0
        if visit.index not in self._crossings:
            self._crossings[visit.index] = self._crossed(visit)
        return self._crossings[visit.index]

    def _crossed(self, visit: Visit) -> tuple[float, float]:
        up, down = micro_batch_crossing(self.costs, visit, self.plan.stages[visit.stage])
        twice = visit.stash and not self._unhidden and not self.plan.batch_on_device
        return up, down - twice * self.costs.boundary / self.costs.micro_batches

    def _begin_copies(self, visit: Visit, *, up: float = 0.0, down: float = 0.0) -> list[int]:
        """Begins copies and returns their tickets. The two directions do not wait for each other."""
        copies: tuple[JobParts, ...] = ((("h2d", up),), (("d2h", down),))
        return [self.machine.submit(copy, what="boundary", stage=visit.stage) for copy in copies if copy[0][1] > 0]

    def _wait_for_upload(self, owner: int) -> None:
        ticket = self._upload(owner, self.residency.records[owner].generation)
        self._stand_still(lambda: ticket is None or self.machine.is_done(ticket), WEIGHTS_UP)

    def _stand_still(self, condition: Callable[[], bool], cause: str) -> None:
        """Waits for copies as a run does: nothing else starts in the meantime."""
        begin = self.machine.now
        while not condition():
            self.pass_time()
        self.residency.add_stall(cause, self.machine.now - begin)

    def settle(self) -> None:
        """Waits until all gradients have arrived and are handed over."""
        self.residency.wait_until(lambda: not self.after, GRADIENTS_ACROSS)

    def _wait_for_sum(self, owner: int) -> None:
        self._send_sum(owner)
        self._stand_still(lambda: self.machine.is_done(self.sums_up[owner]), GRADIENTS_ACROSS)
        self.machine.collect(self.sums_up.pop(owner))

    def _send_sum(self, owner: int) -> None:
        """Uploads the sum of a stage's gradients, so that the device continues it."""
        if owner not in self.sums_up:
            size = self.model.stages[owner].gradient_bytes(self.plan.numerics.accumulate_dtype)
            self.sums_up[owner] = self.machine.submit((("h2d", size),), what="gradients", stage=owner, priority=BULK_PRIORITY)

    def _begin_upload(self, visit: Visit, next_step: bool) -> None:
        if self.device is None:
            return
        if visit.sweep and visit.resume:
            record = self.residency.records[visit.stage if visit.owner is None else visit.owner]
            back = record.gradients == "resumed" and record.gradient_read is None
            if back and not self.plan.stages[record.stage].updated_on_device:
                self._send_sum(record.stage)
        if visit.owner is None:
            return
        record = self.residency.records[visit.owner]
        ready = record.span is not None and not record.fetches and record.update is None and record.due is None
        if ready and not (next_step and not self._updated(record)):
            self._upload(visit.owner, record.generation)

    def _updated(self, record: Record) -> bool:
        return record.generation >= self.generation or not self.model.stages[record.stage].trained

    def _upload(self, owner: int, generation: int) -> int | None:
        """Returns the ticket of the copy under way, or None if the weights are there."""
        assert self.device is not None
        size = self.model.stages[owner].weight_bytes

        def begin() -> int:
            return self.machine.submit((("h2d", size),), what="weights", stage=owner, priority=BULK_PRIORITY)

        return self.device.upload(owner, generation, begin)

    def kept_bytes(self, stage: int) -> int:
        plan = self.plan.stages[stage]
        span = plan.boundary_ram or plan.boundary_extent
        return 0 if span is None else filled(span.size, self.plan.fill)  # on the device

    generation = 0  # the generation after this step's updates


def _content(plan: StagePlan, store_offset: int) -> str:
    """Names what this place of the store holds."""
    if plan.gradients_extent is not None and store_offset == plan.gradients_extent.offset:
        return "gradients"
    if plan.boundary_extent is not None and store_offset == plan.boundary_extent.offset:
        return "boundary"
    return "weights"
