"""Brings a run's state into the folders of another number of ranks.

Each number of ranks has folders of its own (`store_folders.of_rank`), and where a stage lies in a store follows from the plan
of the rank that computes it. So every stage is copied, from the store of its owner before into that of its owner now, and
compared with the checksums in the old manifest on the way, and read back from here before it is committed (`Saver.bring`). What
is there stays as it is until all ranks have committed what is here: whatever ends the run before, the same command begins again
from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...core.errors import DamagedStateError, FuyouError, UsageError
from ...engine.updates import MODULUS
from ...planner.ledgers import Record
from ...spec.plan import Span
from ...swap.kernels import CHECKSUM_BLOCK, checksum
from . import manifest as manifests
from .at_rest import PIECE, OpenStore, Progress, SavedStore, at_rest, not_as_named
from .manifest import TENSORS, Manifest, StoredExtent, StoredStage
from .storage import StageFiles, set_as_saved
from .store_folders import of_any_count, rank_count, read_store, refuse_in_use, remove_store

_TURNS = 2  # pieces; one is read while the other is written


def stores_of(saved: SavedStore) -> tuple[SavedStore, ...]:
    """Returns the stores that hold a state: those of all ranks that have trained it."""
    return saved.shares or (saved,)


def bring_stages(
    saved: SavedStore, files: StageFiles, records: Sequence[Record], window: Span, *, say: Callable[[str], None],
    progress: Progress,
) -> None:  # fmt: skip
    """Copies the stages that are computed here into their places of the same turn. `window`: a span of the arena that nobody
    else uses; `progress` gets the bytes copied. Raises DamagedStateError where one is not what was written."""
    for share in stores_of(saved):
        together = zip(share.manifest.stages, records, files.model.stages, strict=True)
        own = [(stage, record) for stage, record, spec in together if stage.params and not spec.away]
        if not own:
            continue
        with at_rest(share, arena=files.memory.arena, say=say, model_files="none") as store:
            for stage, record in own:
                _bring_stage(store, stage, files, record, window, progress)


def _bring_stage(
    store: OpenStore, stage: StoredStage, files: StageFiles, record: Record, window: Span, progress: Progress
) -> None:
    set_as_saved(record, stage)
    for name in TENSORS:
        if (extent := getattr(stage, name)) is None:
            continue
        to = files.plan.stages[record.stage].extent(name, stage.turn)
        assert to is not None and to.size == extent.size, (stage.name, name, extent, to)
        if (total := _copied(store, extent, files, to, window)) != extent.sum:
            raise DamagedStateError(
                f"{name} of {stage.name}: {not_as_named(store.manifest, extent, total)}",
                hint="start as many ranks as before: they go back to the state before, where that is whole",
            )
        progress(extent.size)
    if files.daemon.written is not None:
        for piece in stage.summed_pieces:
            files.daemon.written.expect(Span(offset=piece.offset, size=piece.size), piece.sum)


def _copied(store: OpenStore, extent: StoredExtent, files: StageFiles, to: Span, window: Span) -> int:
    """Copies an extent, and returns the checksum of what was read."""
    most = min(PIECE, window.size // _TURNS // CHECKSUM_BLOCK * CHECKSUM_BLOCK)
    total, writing = 0, list[int]()
    for number, position in enumerate(range(0, extent.size, most)):
        place, size = window.offset + number % _TURNS * most, min(most, extent.size - position)
        if len(writing) == _TURNS:
            files.daemon.wait(writing.pop(0))
        store.daemon.wait(store.daemon.read(place, extent.offset + position, size))
        total += checksum(store.arena.view(place, size), position=position)
        writing.append(files.daemon.write(place, to.offset + position, size))
    for ticket in writing:
        files.daemon.wait(ticket)
    return total % MODULUS


def remove_elsewhere(folder: Path, run: str, step: int, *, also: Sequence[Path], say: Callable[[str], None]) -> None:
    """Removes the stores that other numbers of ranks have of a run that is committed in `folder` after `step`. `also`: where
    they may be, but beside it.

    Killed at any moment, it leaves nothing that ranks would go on from or be refused for in place of what is in `folder`: a
    rank that was a commit ahead of the others first goes back, and then no store says that it holds a state."""
    places = list(dict.fromkeys((*of_any_count(folder), *also)))
    ahead, given_up = list[tuple[Path, Manifest]](), list[tuple[Path, Manifest]]()
    for place in places:
        with suppress(UsageError):  # what cannot be read is left alone
            if rank_count(place) == rank_count(folder):
                continue
            saved, _ = manifests.newest(place)
            if saved is None or saved.run != run:
                continue
            older = manifests.before(place, saved)
            if min(saved.step, saved.step if older is None else older.step) > step:
                continue
            places += [Path(other) for other in (saved.share.folders if saved.share else ()) if Path(other) not in places]
            if older is not None and saved.step > step:
                ahead.append((place, saved := older))
            given_up.append((place, saved))
    try:
        for _, saved in given_up:
            refuse_in_use(saved)
        for place, older in ahead:
            manifests.go_back(place, older)
        for place, saved in given_up:
            manifests.write(place, replace(saved, state="loading"))
    except FuyouError as error:
        say(f"note: what other numbers of ranks have saved of this run is no longer needed and could not be removed: {error}")
        return
    for place, _ in given_up:
        _remove(place, say)


def _remove(place: Path, say: Callable[[str], None]) -> None:
    store = read_store(place / manifests.NAME)
    try:
        if store.refused:
            raise FuyouError(store.refused[0])
        remove_store(store)
    except (FuyouError, OSError) as error:
        say(f"note: {place} is no longer needed and could not be removed: {error}")
        return
    with suppress(OSError):
        place.rmdir()
