"""How busy a device was, and its longest gaps with what the host did meanwhile. From a profiler's trace, and from samples of
the host's stack taken beside it; times are seconds of the host's monotonic clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPUTE = ("kernel",)
COPIES = ("gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op",)  # where there is no GPU: operators in its place
MARK = "fuyou_clock_mark"
_FRAMES = 8  # of each stack seen in a gap
CUDA_MARK = "spin_kernel"  # torch.cuda._sleep's, which nobody else launches


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    begin: float
    end: float
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The host's stack at one moment, innermost frame first."""

    at: float
    stack: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Nothing was under way. `after`, `before`: what ended last and what began next; empty at the window's ends."""

    begin: float
    end: float
    after: str
    before: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def intervals(trace: Sequence[Mapping[str, Any]], kinds: Sequence[str], offset: float) -> list[Interval]:
    """The trace's events of these kinds, oldest first. Their own clock counts microseconds; `offset` makes it the host's."""
    found = [
        Interval(begin=event["ts"] / 1e6 + offset, end=(event["ts"] + event.get("dur", 0)) / 1e6 + offset, name=event["name"])
        for event in trace
        if event.get("ph") == "X" and event.get("cat") in kinds and not is_mark(event)
    ]
    return sorted(found, key=lambda one: (one.begin, one.end))


def is_mark(event: Mapping[str, Any]) -> bool:
    return MARK in str(event.get("name", "")) or CUDA_MARK in str(event.get("name", ""))


def clock_offset(trace: Sequence[Mapping[str, Any]], marked_at: float) -> tuple[float, str]:
    """What to add to the trace's seconds to have the host's, and what says so: the first mark was made at `marked_at`. Without
    a mark the first event is taken for it: shares are right then, stacks may be another moment's. Raises ValueError."""
    whole = [event for event in trace if event.get("ph") == "X"]
    if not whole:
        raise ValueError("the trace has no event")
    marks = [event["ts"] for event in whole if is_mark(event)]
    first = min(marks or (event["ts"] for event in whole))
    return marked_at - first / 1e6, "its mark" if marks else "its first event, as it has no mark"


def merged(found: Iterable[Interval], window: tuple[float, float]) -> list[Interval]:
    """When something was under way inside the window: disjoint, oldest first. A name is that of what ended last in it."""
    whole: list[Interval] = []
    for one in found:
        begin, end = max(one.begin, window[0]), min(one.end, window[1])
        if begin >= end:
            continue
        if whole and begin <= whole[-1].end:
            last = whole[-1]
            name = one.name if end >= last.end else last.name
            whole[-1] = Interval(begin=last.begin, end=max(last.end, end), name=name)
        else:
            whole.append(Interval(begin=begin, end=end, name=one.name))
    return whole


def busy_share(found: Iterable[Interval], window: tuple[float, float]) -> float:
    """The share of the window in which something was under way."""
    length = window[1] - window[0]
    return sum(one.end - one.begin for one in merged(found, window)) / length if length > 0 else 0.0


def longest_gaps(found: Sequence[Interval], window: tuple[float, float], count: int | None) -> list[Gap]:
    """The longest stretches of the window in which nothing was under way, the longest first. `count`: None for all of them."""
    whole = merged(found, window)
    if not whole:
        return [Gap(begin=window[0], end=window[1], after="", before="")] if window[1] > window[0] else []
    first = {one.begin: one.name for one in reversed(found)}  # of several that begin at once, the one listed first
    edges = [(window[0], ""), *((one.end, one.name) for one in whole)]
    starts = [*((one.begin, first.get(one.begin, "")) for one in whole), (window[1], "")]
    gaps = [
        Gap(begin=begin, end=end, after=after, before=before)
        for (begin, after), (end, before) in zip(edges, starts, strict=True)
        if end > begin
    ]
    return sorted(gaps, key=lambda gap: -gap.seconds)[:count]


def longest_in_all(found: Iterable[Interval], window: tuple[float, float], count: int) -> list[dict[str, Any]]:
    """What took longest inside the window, all of one name together: its milliseconds, and how often it ran."""
    inside = ((one.name, min(one.end, window[1]) - max(one.begin, window[0])) for one in found)
    return _summed(((name, seconds) for name, seconds in inside if seconds > 0), count)


def idle_by_next(gaps: Iterable[Gap], count: int) -> list[dict[str, Any]]:
    """What the device was idle before for longest, all gaps before one name together: their milliseconds, and how many. The
    name is empty for the end of the window."""
    return _summed(((gap.before, gap.seconds) for gap in gaps), count)


def _summed(found: Iterable[tuple[str, float]], count: int) -> list[dict[str, Any]]:
    taken, times = Counter[str](), Counter[str]()
    for name, seconds in found:
        taken[name] += seconds
        times[name] += 1
    return [
        {"name": name, "milliseconds": round(seconds * 1e3, 3), "times": times[name]}
        for name, seconds in taken.most_common(count)
    ]


def host_stack(gap: Gap, samples: Sequence[Sample]) -> tuple[tuple[str, ...], int, int]:
    """Where the host was during a gap: the stack seen most often, how often, and of how many samples. Where none fell into it,
    the stack seen next after its beginning, seen 0 times."""
    inside = [sample.stack for sample in samples if gap.begin <= sample.at <= gap.end]
    if inside:
        stack, times = Counter(inside).most_common(1)[0]
        return stack, times, len(inside)
    later = next((sample.stack for sample in samples if sample.at > gap.end), ())
    return later, 0, 0


def summary(
    trace: Sequence[Mapping[str, Any]],
    samples: Sequence[Sample],
    *,
    marked_at: float,
    window: tuple[float, float],
    on_gpu: bool,
    count: int = 10,
) -> dict[str, Any]:
    """Busy shares, the `count` operations that took longest in all, the `count` that the device was idle before for longest in
    all, and the `count` longest gaps of a window, as plain data."""
    offset, clock = clock_offset(trace, marked_at)
    compute = intervals(trace, COMPUTE if on_gpu else ON_CPU, offset)
    copies = intervals(trace, COPIES, offset)
    gaps = longest_gaps(compute, window, None)
    return {
        "seconds": window[1] - window[0],
        "clock": clock,
        "events": len(compute),
        "busy": busy_share(compute, window),
        "copies": busy_share(copies, window),
        "longest": longest_in_all(compute, window, count),
        "idle": idle_by_next(gaps, count),
        "gaps": [_described(gap, samples, window[0]) for gap in gaps[:count]],
    }


def _described(gap: Gap, samples: Sequence[Sample], zero: float) -> dict[str, Any]:
    stack, times, seen = host_stack(gap, samples)
    return {
        "milliseconds": round(gap.seconds * 1e3, 3),
        "at": round(gap.begin - zero, 4),
        "after": gap.after,
        "before": gap.before,
        "stack": list(stack),
        "seen": f"{times} of {seen} samples",
        "while": [" < ".join(one.stack[:_FRAMES]) for one in samples if gap.begin <= one.at <= gap.end],
    }
