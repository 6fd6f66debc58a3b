"""Watches a child's memory and I/O from outside while it runs: what its group holds, and its counters at every step.

The child is never asked. Memory is the RssAnon of every process of its group (or of its tree without a group) plus what the
kernel holds for them. Bytes are /proc/PID/io at the moment a step appears in the child's log.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from .control_groups import Group, numbers_of

LOG_SECONDS = 0.004  # how late a step's end may be noticed
MEMORY_SECONDS = 0.02
IDLE_SECONDS = 0.1  # how late the child's end may be noticed


@dataclass(slots=True)
class Peak:
    """Holds the largest sum of anonymous and kernel bytes, and its parts."""

    total: int = 0
    anonymous: int = 0
    kernel: int = 0
    processes: int = 0
    seconds: float = 0.0  # since the start
    phase: str = ""


@dataclass(slots=True)
class Seen:
    """Holds what was seen of one child."""

    peak: Peak = field(default_factory=Peak)
    phases: dict[str, int] = field(default_factory=dict)  # phase -> peak bytes
    samples: int = 0
    counters: list[tuple[int, int]] = field(default_factory=list)  # bytes read, written, at the end of each step
    before: tuple[int, int] = (0, 0)  # the same once loading is over
    after: tuple[int, int] = (0, 0)  # and when last seen alive
    seconds: float = 0.0
    ends: list[float] = field(default_factory=list)  # of each step, on the monotonic clock


def follow(child: subprocess.Popen[bytes], *, log: Path, group: Group | None, memory: bool, counters: bool, steps: int) -> Seen:
    """Watches until the child ends. `steps`: after how many steps it stops training."""
    seen, began, sampled, phase = Seen(), time.monotonic(), 0.0, "load"
    lines = LineCounter(log)
    # No oftener than it must: on two cores every look takes a thread of compute its turn.
    pause = min([LOG_SECONDS] * counters + [MEMORY_SECONDS] * memory + [IDLE_SECONDS])
    while child.poll() is None:
        now = time.monotonic()
        for line in lines.new():
            if b'"event":"loaded"' in line:
                phase, seen.before = "train", io_of(child.pid)
            if b'"event":"step"' not in line:
                continue
            if counters:
                seen.counters.append(io_of(child.pid))
            seen.ends.append(now)
            lines.steps += 1
            phase = "export" if lines.steps >= steps else "train"
        if counters:
            seen.after = max(seen.after, io_of(child.pid))
        if memory and now - sampled >= MEMORY_SECONDS:
            _sample(seen, child.pid, group, phase, now - began)
            sampled = now
        time.sleep(pause)
    seen.seconds = time.monotonic() - began
    return seen


class LineCounter:
    """Counts the lines added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.rest, self.steps = path, 0, b"", 0

    def new(self) -> list[bytes]:
        try:
            if self.path.stat().st_size == self.offset:
                return []
            with self.path.open("rb") as file:
                file.seek(self.offset)
                added = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(added)
        *whole, self.rest = (self.rest + added).split(b"\n")
        return whole


def _sample(seen: Seen, pid: int, group: Group | None, phase: str, seconds: float) -> None:
    pids = group.pids() if group is not None else tree_of(pid)
    anonymous, tables = memory_of(pids)
    kernel = group.kernel_bytes() if group is not None else tables
    total = anonymous + kernel
    seen.samples += 1
    seen.phases[phase] = max(seen.phases.get(phase, 0), total)
    if total > seen.peak.total:
        seen.peak = Peak(
            total=total, anonymous=anonymous, kernel=kernel, processes=len(pids), seconds=round(seconds, 2), phase=phase
        )


def memory_of(pids: list[int]) -> tuple[int, int]:
    """Returns anonymous bytes and page tables of these processes; one that has just ended counts nothing."""
    anonymous = tables = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = status_fields(Path(f"/proc/{pid}/status").read_text())
            anonymous += fields.get("RssAnon", 0)
            tables += fields.get("VmPTE", 0)
    return anonymous, tables


def status_fields(text: str) -> dict[str, int]:
    """Returns bytes of the lines of /proc/PID/status that are in kB."""
    fields = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
            fields[name] = int(words[0]) * 1024
    return fields


def tree_of(pid: int) -> list[int]:
    """Returns a process and everything it started that still runs."""
    tree, pending = [], [pid]
    while pending:
        one = pending.pop()
        tree.append(one)
        for task in _listed(Path(f"/proc/{one}/task")):
            with contextlib.suppress(OSError):
                pending += [int(word) for word in (task / "children").read_text().split()]
    return tree


def io_of(pid: int) -> tuple[int, int]:
    """Returns the bytes that a process, its threads included, caused to be read from and written to storage."""
    with contextlib.suppress(OSError):
        numbers = numbers_of(Path(f"/proc/{pid}/io").read_text().replace(":", " "))
        return numbers.get("read_bytes", 0), numbers.get("write_bytes", 0)
    return 0, 0


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


# ---- the machine's own speed -----------------------------------------------------------------------------------------


_PAUSE = 0.5  # seconds between looks, of 8 ms each: less than a hundredth of two cores
_WORK = """
import time, torch
torch.set_num_threads(1)
weights, rows = torch.rand(1024, 2816).to(torch.bfloat16), torch.rand(128, 1024).to(torch.bfloat16)
memory = torch.rand(8 << 20)  # beyond any cache
while True:
    began = time.thread_time()
    for _ in range(3):
        torch.mm(rows, weights)
    memory[::16].sum()
    print(time.monotonic(), time.thread_time() - began, flush=True)
    time.sleep({pause})
"""


class Pace:
    """Watches the machine's speed from now on."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORK.format(pause=_PAUSE)], stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        self._looks: list[tuple[float, float]] = []  # when, and the CPU seconds that the work took
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()
        while not self._looks:  # torch is loaded, its kernels are made
            if self._process.poll() is not None:
                raise RuntimeError(f"who looks at the machine's speed ended at once, with {self._process.returncode}")
            time.sleep(_PAUSE / 10)

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            when, seconds = map(float, line.split())
            self._looks.append((when, seconds))

    def speed(self, begin: float, end: float) -> float:
        """Returns the work done in a second of CPU time between two moments of the monotonic clock; 0 if there was no look."""
        taken = [seconds for when, seconds in list(self._looks) if begin <= when <= end]
        return 1.0 / statistics.mean(taken) if taken else 0.0

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._hearing.join()
