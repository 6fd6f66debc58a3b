"""Defines `Timeline`: one simulated step, as data."""

from __future__ import annotations

from dataclasses import dataclass

from .simulated_machine import Done


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
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
    work: tuple[Done, ...]
    asked: tuple[Asked, ...]  # requests in order

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
        return {name: _covered(found) for name, found in sorted(spans.items())}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Returns the seconds that at least one of the spans covers."""
    seconds, until = 0.0, float("-inf")
    for first, last in sorted(spans):
        seconds += max(0.0, last - max(first, until))
        until = max(until, last)
    return seconds
