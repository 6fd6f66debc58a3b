"""Records when each micro-batch of each visit computed, on the device's own time."""

from __future__ import annotations

from dataclasses import dataclass

from .devices.base import Device, Moment

_MOST = 1 << 16  # micro-batches of a step that are remembered at most


@dataclass(frozen=True, slots=True)
class ComputedMicroBatch:
    """Tells when one micro-batch computed, in monotonic seconds. `number`: its place in the visit."""

    phase: str
    stage: int
    number: int
    begin: float
    end: float


class Computing:
    """Records a visit's micro-batches. Each begins when its inputs are there, and ends when the next is asked for or the visit
    is left."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began: Moment | None = None
        self._visit: list[tuple[Moment, Moment]] = []
        self._seen: list[tuple[str, int, int, Moment, Moment]] = []

    def begin(self) -> None:
        self._began = self._device.mark()

    def end(self) -> None:
        """Ends the micro-batch under way, if there is one."""
        if self._began is not None:
            self._visit.append((self._began, self._device.mark()))
            self._began = None

    def leave(self, phase: str, stage: int) -> None:
        """Ends the visit."""
        self.end()
        room = _MOST - len(self._seen)
        self._seen += [(phase, stage, number, *marks) for number, marks in enumerate(self._visit[: max(0, room)])]
        self._visit.clear()

    def take(self) -> list[ComputedMicroBatch]:
        """Returns the micro-batches recorded since the last call. Waits for those that the device is still computing."""
        seen, self._seen = self._seen, []
        return [ComputedMicroBatch(phase, stage, number, begin(), end()) for phase, stage, number, begin, end in seen]
