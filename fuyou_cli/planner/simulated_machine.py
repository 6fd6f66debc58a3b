"""Simulates a machine that runs jobs. Each job takes the time its rates say, and jobs that run at once share the rates.

Time jumps from one completion to the next. In between every job moves at a constant speed, all its parts in step: an update
reads, computes and writes chunk by chunk, so it is as fast as the slowest of the three. Jobs are served by priority, then in
order of arrival, like the daemon does. What a job cannot use is left to the next.

Reading and writing at once slow each other down, and so do copies to a device and back. While both run, each gets its mixed
rate, plus part of what the other leaves. If the mixed rate is unknown (zero), it is the rate alone. Work of a resource without
any rate takes no time. On device cpu compute and updates share cores: compute loses what one update thread takes, because all
its threads wait for the slowest.

Everything but compute moves its bytes through the host's memory. If together they want more than it gives, all of them move
slower, each by the same share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..spec.hardware import HardwareProfile

Resource = Literal["compute", "update", "ssd read", "ssd write", "h2d", "d2h", "dram"]
# What a job takes, all parts at once: bytes of transfers, seconds of one update thread, or seconds of compute (always a job of
# its own). Times are those without any other job.
JobParts = tuple[tuple[Resource, float], ...]

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
class _Speeds:
    """Holds the speed of every job, in order, and the share of each resource that they use together."""

    jobs: tuple[float, ...]
    shares: dict[Resource, float]


@dataclass(slots=True)
class KnownSpeeds:
    """Is a cache: equal blocks make the same jobs again and again."""

    kinds: dict[JobParts, int] = field(default_factory=dict)
    speeds: dict[tuple[int, ...], _Speeds] = field(default_factory=dict)  # by the kinds of all jobs, in order

    def kind(self, parts: JobParts) -> int:
        return self.kinds.setdefault(parts, len(self.kinds))


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
        self._shares = known.shares
        for job, speed in zip(self.jobs, known.jobs, strict=True):
            job.speed = speed
            if job.begin is None and speed > 0:
                job.begin = self.now

    def _speeds(self) -> _Speeds:
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
        return _Speeds(jobs=tuple(job.speed for job in self.jobs), shares=shares)

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
