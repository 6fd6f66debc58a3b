"""Gives what the first of several replicas has saved to the others, which keep nothing of their own.

Frozen weights each has from the checkpoint. What is trained goes from the first one's store to theirs, through a part of the
arena; afterwards all read what rests in RAM from their stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from ...engine.context import PAGE
from ...engine.updates import Sums
from ...planner.ledgers import Record
from ...spec.plan import Span, StateTensor
from .saver import Saver
from .storage import at_rest

if TYPE_CHECKING:
    from ..peers import Peers

_PIECE = 1 << 24  # bytes at once, at most
_OF_RECORD = ("generation", "turn", "zero_moments", "zero_remainder")
_OF_STANDING = ("step", "skipped", "skipped_in_row", "random", "peak_after_warmup")


def share_saved(peers: Peers, saver: Saver, *, resumed: bool) -> None:
    """Makes the others go on from where the first replica does, if that has `resumed` a run. All call it once they have loaded
    their weights. Raises PeerLost."""
    records, standing = saver.residency.records, saver.standing
    own = None
    if resumed:
        of_records = [
            {name: getattr(record, name) for name in _OF_RECORD} | {"sums": asdict(record.sums)} for record in records
        ]
        own = {"standing": {name: getattr(standing, name) for name in _OF_STANDING}, "records": of_records}
    every = peers.all_gather("saved state", [saver.window().size, own])
    of_first, most = every[0][1], min(_PIECE, *(size for size, _ in every)) // PAGE * PAGE
    if of_first is None:
        return
    for record, known in zip(records, of_first["records"], strict=True):
        if peers.is_copy:  # its frozen weights stay as they were loaded here
            for name in _OF_RECORD:
                setattr(record, name, known[name])
            record.sums = replace(Sums(**known["sums"]), frozen=record.sums and record.sums.frozen)
        for _, extent in _trained(saver, record):
            for begin in range(0, extent.size, most):
                piece = Span(offset=extent.offset + begin, size=min(most, extent.size - begin))
                _share(peers, saver, piece, record.stage)
    if peers.is_copy:
        for name, value in of_first["standing"].items():
            setattr(standing, name, value)
        saver.take_over()
    else:
        assert saver.commits.last is not None
        saver.files.restore(saver.commits.last, records)


def _trained(saver: Saver, record: Record) -> Iterator[tuple[StateTensor, Span]]:
    """Yields what is trained of a stage, and where it rests in the store."""
    if saver.files.model.stages[record.stage].trained:
        for name in at_rest(record):
            extent = saver.files.plan.stages[record.stage].extent(name, record.turn)
            if name != "frozen" and extent is not None:
                yield name, extent


def _share(peers: Peers, saver: Saver, piece: Span, stage: int) -> None:
    """Brings a piece of the store from the first replica to the others."""
    daemon, place = saver.files.daemon, saver.window().offset
    if peers.is_first:
        daemon.wait(daemon.read(place, piece.offset, piece.size, label=stage, compared=False))
    peers.ranks.share(saver.files.memory.tensor(Span(offset=place, size=piece.size), torch.uint8), 0)
    if peers.is_copy:
        daemon.wait(daemon.write(place, piece.offset, piece.size, label=stage))
