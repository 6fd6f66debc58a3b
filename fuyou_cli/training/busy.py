"""Arithmetic on `Busy` intervals: how long a resource worked, and where forward ends and backward begins."""

from __future__ import annotations

from collections.abc import Sequence

from .report import Busy


def merged(intervals: Sequence[Busy]) -> list[tuple[float, float]]:
    """The union of the intervals, in order: several requests in flight at once count once."""
    spans: list[tuple[float, float]] = []
    for begin, end in sorted((item.begin, item.end) for item in intervals if item.end > item.begin):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def busy_seconds(timeline: Sequence[Busy]) -> dict[str, float]:
    """Seconds each resource was busy, in order of first appearance."""
    by_resource: dict[str, list[Busy]] = {}
    for item in timeline:
        by_resource.setdefault(item.resource, []).append(item)
    return {name: sum(end - begin for begin, end in merged(items)) for name, items in by_resource.items()}


def phases(timeline: Sequence[Busy]) -> list[tuple[str, float, float]]:
    """(name, begin, end) of forward and backward, from the labels of the compute intervals."""
    found: dict[str, tuple[float, float]] = {}
    for item in timeline:
        if item.resource != "compute":
            continue
        for name in ("forward", "backward"):
            if item.label.startswith(name):
                begin, end = found.get(name, (item.begin, item.end))
                found[name] = (min(begin, item.begin), max(end, item.end))
    return [(name, *found[name]) for name in ("forward", "backward") if name in found]
