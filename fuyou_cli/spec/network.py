"""Defines `Network`: what connects the ranks of a run, as it is described, or measured where ranks join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Assumptions. Of an Ethernet's bits TCP delivers 94 % with packets of 1,500 bytes, and a message takes a tenth of a millisecond
# through both hosts' kernels and a switch. Ranks on one box send through its loopback: every byte is copied four times.
PAYLOAD, LATENCY = 0.94, 1e-4
WITHIN_BOX, WITHIN_LATENCY = 3e9, 3e-5
ASSUMED_NAME, ASSUMED_LINK = "10GbE", 10e9 / 8 * PAYLOAD  # where none is described or measured
MEASURED_NAME = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Describes boxes with as many ranks each. Ranks are counted box by box."""

    boxes: int = 1
    ranks_per_box: int = 1
    link: float = ASSUMED_LINK  # bytes per second, each way, of a box
    link_name: str = ""
    latency: float = LATENCY  # seconds

    @classmethod
    def between(cls, boxes: Sequence[object]) -> Network:
        """Describes what connects ranks whose boxes these are. Where boxes have unlike numbers of ranks, or ranks are not
        counted box by box, every message is taken to cross between two."""
        count = len(boxes)
        each = boxes.count(boxes[0])
        alike = count % each == 0 and all(boxes[rank] == boxes[rank // each * each] for rank in range(count))
        if alike and boxes.count(boxes[-1]) == each:
            return cls(boxes=count // each, ranks_per_box=each)
        return cls(boxes=count)

    @property
    def assumed(self) -> Network:
        """Returns the network with the link that is assumed where this one's was measured: what results depend on may not
        depend on that."""
        is_measured = self.link_name == MEASURED_NAME
        return replace(self, link=ASSUMED_LINK, latency=LATENCY, link_name="") if is_measured else self

    @property
    def ranks(self) -> int:
        return self.boxes * self.ranks_per_box

    def box(self, rank: int) -> int:
        return rank // self.ranks_per_box

    def way(self, sender: int, receiver: int) -> tuple[float, float]:
        """Returns the rate and the latency between two ranks."""
        if self.box(sender) == self.box(receiver):
            return WITHIN_BOX, WITHIN_LATENCY
        return self.link, self.latency

    def seconds(self, sender: int, receiver: int, size: float) -> float:
        """Returns the seconds that a message takes once both are ready for it."""
        rate, latency = self.way(sender, receiver)
        return size / rate + 2 * latency
