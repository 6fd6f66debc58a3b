"""Makes a run take the time of another machine. The daemon's transfers and updates and a device's copies run at once, and end
when a simulated machine on the wall's clock says so.

The simulated machine shares every resource as the planner does: drives that read and write at once, copies both ways, update
threads. Threads, waits and lateness are those of the real run.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.simulate import JobParts, Sharing, VirtualMachine
from fuyou_cli.spec.model import ITEM_SIZE, STATE_NAMES, ModelSpec, StateLayout
from fuyou_cli.spec.plan import Plan
from fuyou_cli.swap.daemon import Result, SwapDaemon
from fuyou_cli.swap.native import Update


class Clockwork(Protocol):
    """Says when a job that was begun ends."""

    def begin(self, parts: JobParts, *, stage: int, priority: int) -> int: ...

    def is_over(self, ticket: int) -> bool: ...

    def wait(self, ticket: int) -> None: ...


class _OnTheWall(VirtualMachine):
    """Simulates a machine that also stops between completions."""

    def until(self, moment: float) -> None:
        while self.now < moment:
            ahead = self.ahead()
            if self.now + ahead <= moment:
                self.advance()
                continue
            for job in self.jobs:
                job.left -= job.speed * (moment - self.now)
            self.now = moment

    def ahead(self) -> float:
        """Returns the seconds to the next completion."""
        if self._stale:
            self._allot()
        return min((job.left / job.speed for job in self.jobs if job.speed > 0), default=math.inf)


class RealTime:
    """Runs a virtual machine's jobs on the wall's clock."""

    def __init__(self, costs: Costs, sharing: Sharing) -> None:
        self._machine = _OnTheWall(costs.hardware, sharing)
        self._begun, self._asked = time.monotonic(), threading.Condition()

    def begin(self, parts: JobParts, *, stage: int, priority: int) -> int:
        with self._asked:
            self._catch_up()
            ticket = self._machine.submit(parts, what="", stage=stage, priority=priority)
            self._asked.notify_all()
        return ticket

    def is_over(self, ticket: int) -> bool:
        with self._asked:
            self._catch_up()
            return self._machine.is_done(ticket)

    def wait(self, ticket: int) -> None:
        with self._asked:
            self._catch_up()
            while not self._machine.is_done(ticket):
                self._asked.wait(min(1.0, self._machine.ahead()))
                self._catch_up()

    def _catch_up(self) -> None:
        self._machine.until(time.monotonic() - self._begun)
        self._machine.log.clear()


class RandomDelays:
    """Makes everything late by times drawn from a seed: most are short, some are long."""

    def __init__(self, seed: int, mean: float) -> None:
        self._draws, self._mean, self._lock = random.Random(seed), mean, threading.Lock()
        self._over = list[float]()

    def begin(self, parts: JobParts, *, stage: int, priority: int) -> int:
        with self._lock:
            self._over.append(time.monotonic() + self._mean * self._draws.expovariate(1.0) ** 2 / 2)
            return len(self._over) - 1

    def is_over(self, ticket: int) -> bool:
        return time.monotonic() >= self._over[ticket]

    def wait(self, ticket: int) -> None:
        time.sleep(max(0.0, self._over[ticket] - time.monotonic()))


class PacedCopies:
    """Gives a device's copies the pace of a clockwork."""

    def __init__(self, clock: Callable[[], Clockwork]) -> None:
        self._clock = clock

    def copied(self, *, up: bool, begins: float, size: int) -> None:
        clock = self._clock()
        clock.wait(clock.begin((("h2d" if up else "d2h", size),), stage=0, priority=0))


class PacedDaemon:
    """Holds a daemon's results back until the clockwork says so. Passes on every other call."""

    def __init__(self, daemon: SwapDaemon, clock: Clockwork, model: ModelSpec, plan: Plan, costs: Costs) -> None:
        self._daemon, self._clock, self._model, self._plan, self._costs = daemon, clock, model, plan, costs
        self._held: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._daemon, name)

    def read(self, arena: int, store: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        ticket = self._daemon.read(arena, store, size, priority=priority, label=label)
        return self._hold(ticket, (("ssd read", size),), label, priority)

    def write(self, arena: int, store: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        ticket = self._daemon.write(arena, store, size, priority=priority, label=label)
        return self._hold(ticket, (("ssd write", size),), label, priority)

    def update(self, update: Update) -> int:
        read, written = _moved(update, self._model.layout)
        seconds = self._costs.update_seconds(self._plan.stages[update.label])
        parts: JobParts = (("update", seconds), ("ssd read", read), ("ssd write", written))
        return self._hold(self._daemon.update(update), parts, update.label, update.priority)

    def poll(self, ticket: int) -> Result | None:
        return self._daemon.poll(ticket) if self._clock.is_over(self._held[ticket]) else None

    def wait(self, ticket: int) -> Result:
        self._clock.wait(self._held[ticket])
        return self._daemon.wait(ticket)

    def _hold(self, ticket: int, parts: JobParts, stage: int, priority: int) -> int:
        self._held[ticket] = self._clock.begin(parts, stage=stage, priority=priority)
        return ticket


def _moved(update: Update, layout: StateLayout) -> tuple[int, int]:
    """Returns the bytes that an update reads from the store and writes to it."""
    read = written = 0
    for name in STATE_NAMES:
        home, size = getattr(update, name), layout.size(name, update.params)
        read += size if home.source is not None else 0
        written += size if home.target is not None else 0
    if update.gradients_source is not None:
        read += ITEM_SIZE[update.gradients_dtype] * update.params
    if update.weights_target is not None:
        written += ITEM_SIZE[update.weights_dtype] * update.params
    return read, written
