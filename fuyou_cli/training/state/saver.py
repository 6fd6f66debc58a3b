"""Keeps a run on stable storage: commits beside the steps, saves at the end, resumes.

A generation is committed once every stage has reached it and its step is over. The thread that runs the steps makes its
manifest. The thread of `commits` flushes the store and then writes the manifest.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.disk import REMEDIES
from ...core.errors import DamagedStateError, OutOfSpaceError, SwapError, UnreadableError, UsageError
from ...core.paths import open_own
from ...core.process import SILENT, Patience
from ...core.units import align_up
from ...engine.context import PAGE
from ...engine.devices.base import Device
from ...engine.updates import Sums
from ...planner.ledgers import Record, Residency
from ...spec.plan import Span
from ...swap.store import Store
from ..prepare import Ready
from . import manifest as manifests
from .at_rest import Damage, ExtentSums, Progress, SavedStore, compare
from .kept_companions import written_companions
from .manifest import MOST_CHANGES, Change, Evaluated, Manifest, RankShare, State
from .resume import library_versions
from .storage import OF_RECORD, StageFiles, resting, stores_of
from .store_folders import LOSSES, NEW_PART, PART_FILE, SPARE, read_losses, remove_elsewhere, write_losses

if TYPE_CHECKING:
    from ..peers import Peers

# ---- commits ----------------------------------------------------------------------------------------------------------

_SLICE = 0.2  # seconds; a wait returns to Python this often, so that Ctrl-C works


class Commits:
    """Commits manifests in order. `flush` returns when the data is on stable storage, `name` when a manifest is. `agreed`
    returns when all ranks of the run have named theirs: only then is a commit durable, and may what the one before names be
    written over. So ranks that end at any moment are at most one commit apart, and all have the older one whole."""

    def __init__(
        self,
        *,
        flush: Callable[[], None],
        name: Callable[[Manifest], None],
        agreed: Callable[[Manifest], None] = lambda manifest: None,
        durable: Manifest | None = None,
        patience: Patience = SILENT,
    ) -> None:
        self._flush, self._name, self._agreed, self._patience = flush, name, agreed, patience
        # `last` is committed. The thread sets it, so even a signal handler may read it. `newest` is committed or being
        # committed.
        self.last = self.newest = durable
        self.has_failed = False  # and the failure was raised
        self._failure: BaseException | None = None  # after it nothing is flushed or named
        self._under_way: Future[None] | None = None  # the last commit begun; the others end before it
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fuyou-commit")

    def restart(self, durable: Manifest) -> None:
        """Resumes from this state. No commit may be under way."""
        assert self._under_way is None
        self.last = self.newest = durable

    def begin(self, manifest: Manifest) -> None:
        """Begins to commit. The data that the manifest names is written, and must stay as it is until the commit is durable."""
        self._raise_failure()
        self.newest = manifest
        self._under_way = self._thread.submit(self._commit, manifest)

    def durable(self) -> Manifest | None:
        """Returns the newest committed state, without waiting. Raises the failure of a commit at every call."""
        self._raise_failure()
        return self.last

    def finish(self) -> None:
        """Waits until every commit that was begun is durable."""
        waiting = self._patience.waiting(f"the commit of step {self.newest.step if self.newest is not None else 0}")
        while self._under_way is not None and not self._under_way.done():
            wait_for([self._under_way], timeout=_SLICE)
            waiting.look()
        self._raise_failure()

    def close(self) -> None:
        """Waits until the thread has ended. A commit that has not begun never will."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _commit(self, manifest: Manifest) -> None:
        if self._failure is not None:
            return
        try:
            self._flush()
            self._name(manifest)
            self._agreed(manifest)
        except BaseException as error:
            self._failure = error
            raise
        self.last = manifest

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.has_failed = True
            raise self._failure


# ---- the state of a run -----------------------------------------------------------------------------------------------

_SPARE_BYTES = 4 << 20  # disk reserved for the last manifest and its losses
_SPARE_PER_STEP = 8  # bytes of one loss
_PIECE = 1 << 24  # bytes that replicas share at once, at most
_SPARE_PER_TENSOR = 1 << 10  # bytes: a manifest says this much of one at most, in practice
# What a manifest says of a run's standing, under the same names; replicas share the first ones.
_SHARED = ("step", "skipped", "skipped_in_row", "random", "peak_after_warmup")
_OF_STANDING = (*_SHARED, "evaluated", "evaluated_before", "changes")


@dataclass(slots=True)
class Standing:
    """Holds where a run is: after `step` whole steps."""

    run: str  # the run's name in its manifest and part files
    step: int = 0
    losses: list[float] = field(default_factory=list)
    written_before: int = 0  # bytes that earlier processes wrote
    skipped: int = 0  # steps that updated nothing: the optimizer counts the others
    skipped_in_row: int = 0  # of these, the last ones
    random: dict[str, Any] = field(default_factory=dict)  # states of generators after the last step
    evaluated: Evaluated | None = None
    evaluated_before: tuple[Evaluated, ...] = ()  # of other sets of rows
    peak_after_warmup: bool = True  # the rule of its learning rates, which a saved run keeps
    changes: tuple[Change, ...] = ()  # of its recipe

    @classmethod
    def of(cls, saved: Manifest | None) -> Standing:
        """Describes a new run, or a saved one."""
        standing = cls(run=os.urandom(8).hex() if saved is None else saved.run)
        if saved is not None:
            standing.resume(saved)
        return standing

    def resume(self, saved: Manifest) -> None:
        """Takes over everything from the manifest but the losses."""
        self.written_before = saved.written_total
        for name in _OF_STANDING:
            setattr(self, name, getattr(saved, name))

    def is_over(self, *, skipped: bool) -> None:
        """Counts one more step. `skipped`: the step updated nothing."""
        self.step += 1
        self.skipped += skipped
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0


class Saver:
    """Keeps the state of one run. `say` gets messages about a damaged state."""

    def __init__(
        self,
        ready: Ready,
        standing: Standing,
        *,
        files: StageFiles,
        residency: Residency,
        store: Store,
        device: Device,
        say: Callable[[str], None],
        patience: Patience = SILENT,
    ) -> None:
        self.ready, self.standing, self.files, self.residency = ready, standing, files, residency
        self.device, self.say = device, say
        self.paths = store.paths
        self.folder = store.paths[0].parent
        self.saved_bytes = 0  # bytes that saving wrote, beside the steps
        self._complete = -1  # the newest generation that every stage has reached
        self._trains = any(stage.trained for stage in files.model.stages)
        peers, self._is_copy = ready.planned.ring, ready.planned.is_copy
        self._peers = peers  # that have stages each
        self._sync = store.sync
        self._folders = () if peers is None else tuple(peers.all_gather("store", str(self.folder)))
        self.commits = Commits(
            flush=self._sync if not self._is_copy else lambda: None,
            name=self._name if not self._is_copy else lambda manifest: None,
            agreed=(lambda manifest: None) if peers is None else (lambda manifest: peers.named_by_all(manifest.commit)),
            durable=None if ready.planned.moves else ready.planned.manifest,
            patience=patience,
        )

    @property
    def saved_step(self) -> int | None:
        """Returns the last committed step, whatever happened after it, or None if there is none."""
        return None if self.commits.last is None else self.commits.last.step

    # ---- beside the steps ----------------------------------------------------------------------------------------

    def complete(self, generation: int) -> None:
        """Notes that every stage has reached a generation. Updates may be over before their step is."""
        assert generation >= self.standing.step, (generation, self.standing.step)
        self._complete = generation
        self._commit_what_is_complete()

    def step_is_over(self) -> None:
        """Notes that a step is over; `standing` counts it."""
        self.standing.random = captured_generators(self.device.torch_device)
        if not self._trains and self.residency.commits.is_written(self.standing.step):
            self._complete = self.standing.step  # all stages of this rank are frozen: no update comes to the step's generation
        self._commit_what_is_complete()

    def _commit_what_is_complete(self) -> None:
        """Begins to commit the last step, if every stage has its generation."""
        if self._complete == self.standing.step and self._is_news():
            self.commits.begin(self._manifest("committed"))

    def durable(self, stage: int) -> int:
        """Returns the committed turn of a stage, or -1 if there is none."""
        saved = self.commits.durable()
        return -1 if saved is None else saved.stages[stage].turn

    def _is_news(self) -> bool:
        """Tells whether a stage has a newer generation than the last manifest names."""
        newest = self.commits.newest
        if newest is None or newest.step < self.standing.step:
            return True
        together = zip(newest.stages, self.residency.records, strict=True)
        return any(stage.generation < record.generation for stage, record in together)

    # ---- where a run begins and ends -----------------------------------------------------------------------------

    def give_up_what_was(self) -> None:
        """Marks a store that is about to be filled again. From now on nothing in it can be resumed."""
        assert not self._is_copy
        self._name(self._manifest("loading"))

    def begin_training(self) -> None:
        """Commits the loaded state. From here on, a killed run resumes from its store, and the files that it reads in place."""
        # First, so that it is saved if a later call fails.
        self.standing.random = captured_generators(self.device.torch_device)
        if not self._is_copy:
            self._reserve_disk()
            write_losses(self.folder, (), first=self.standing.step)  # fails now, before any step is computed
        if self.commits.newest is None:
            self.complete(self.standing.step)

    def save(self) -> None:
        """Returns when the last step is committed. All stages must be drained."""
        if self._is_news():
            self.saved_bytes += self.files.save_resident(self.residency.records)
            self.complete(self.standing.step)
        self.commits.finish()
        self._add_evaluation()
        self._release_disk()

    def _add_evaluation(self) -> None:
        """Commits an evaluation that ended after the commit of its step."""
        newest, standing = self.commits.newest, self.standing
        is_news = newest is not None and newest.evaluated != standing.evaluated
        if self._peers is not None:  # some may have it in the commit of the step: all commit it, or none
            is_news = any(self._peers.all_gather("evaluation to commit", is_news))
        if newest is not None and is_news:
            share = newest.share and replace(newest.share, commit=newest.commit + 1)
            self.commits.begin(
                replace(newest, share=share, evaluated=standing.evaluated, evaluated_before=standing.evaluated_before)
            )
            self.commits.finish()

    def restore(self, store: SavedStore, progress: Progress) -> None:
        """Restores the newest committed state that is whole: the one that was read, or an older one. `progress` gets the bytes
        read."""
        saved = self._as_all_have(self._intact(store.manifest, progress))
        if saved != store.manifest or store.problem:  # the next commit would keep the other manifest
            manifests.go_back(self.folder, saved)
        # of the checkpoint's files, what the run had read of those with another time of change
        compare(saved, self.files.model.sources, self._extent_sums(progress), say=self.say)
        self.files.restore(saved, self.residency.records)
        self.standing.resume(saved)
        self.standing.losses, note = read_losses(self.folder, saved.step)
        if note:
            self.say(f"note: {note}")
        self.commits.restart(self._as_it_goes_on(saved))
        self._go_on_from(saved)
        self._remove_elsewhere()

    def bring(self, store: SavedStore, progress: Progress) -> None:
        """Brings the state of another number of ranks here, reads it back, commits it, and only then removes it there.
        `progress` gets the bytes copied."""
        saved, standing = store.manifest, self.standing
        if self._peers is not None:
            self._peers.all_gather("given up what was here", None)  # so that a folder without a manifest is a lost one
            if not self._peers.is_first:
                standing.written_before = 0  # the first rank counts what all have written so far
        self.say(f"bringing the state after step {saved.step} from {', '.join(str(one.folder) for one in stores_of(store))}")
        standing.losses, note = read_losses(store.folder, saved.step)
        if note:
            self.say(f"note: {note}")
        standing.changes = (*saved.changes, *self.ready.changes)[-MOST_CHANGES:]
        compare(saved, self.files.model.sources, self._extent_sums(progress), say=self.say)
        self.files.bring(store, self.residency.records, self.window(), say=self.say, progress=progress)
        brought = self._manifest("committed")
        self._sync()
        damage: object
        try:
            damage = self._first_damage(brought)
        except SwapError as error:  # the daemon knows what it has written
            damage = error.message
        if damage is not None:
            raise DamagedStateError(
                f"what was brought to {self.folder} does not read back as it was written: {damage}",
                hint="nothing is removed where it was: the same command brings it again. If that fails too, name a folder on "
                "another drive in offload.dir",
            )
        self.commits.begin(brought)
        self.commits.finish()
        assert self.commits.last is not None
        self.files.restore(self.commits.last, self.residency.records)
        self._go_on_from(saved)
        self._remove_elsewhere(*(one.folder for one in stores_of(store)))

    def _go_on_from(self, saved: Manifest) -> None:
        """Keeps what the manifest names until the next commit, and draws on where it ended."""
        self.residency.commits.base = saved.step
        restore_generators(saved.random, self.device.torch_device)

    def _remove_elsewhere(self, *also: Path) -> None:
        """Removes what other numbers of ranks have of this run: all of it is here, committed by all."""
        if self._peers is None or self._peers.is_first:
            remove_elsewhere(self.folder, self.standing.run, self.standing.step, also=also, say=self.say)

    def share_saved(self, peers: Peers, *, resumed: bool) -> None:
        """Makes the other replicas, which keep nothing of their own, go on from where the first one does, if that has `resumed`
        a run. All call it once they have loaded their weights. Frozen ones each has from the checkpoint. What is trained goes
        from the first one's store to theirs; afterwards all read what rests in RAM from their stores. Raises PeerLost."""
        records, standing, window = self.residency.records, self.standing, self.window()
        own = None
        if resumed:
            of_records = [
                {name: getattr(record, name) for name in OF_RECORD} | {"sums": asdict(record.sums)} for record in records
            ]
            own = {"standing": {name: getattr(standing, name) for name in _SHARED}, "records": of_records}
        every = peers.all_gather("saved state", [window.size, own])
        of_first, most = every[0][1], min(_PIECE, *(size for size, _ in every)) // PAGE * PAGE
        if of_first is None:
            return
        for record, known in zip(records, of_first["records"], strict=True):
            if self._is_copy:  # its frozen weights stay as they were loaded here
                for name in OF_RECORD:
                    setattr(record, name, known[name])
                record.sums = replace(Sums(**known["sums"]), frozen=record.sums and record.sums.frozen)
            for extent in self._trained_extents(record):
                for begin in range(0, extent.size, most):
                    piece = Span(offset=window.offset, size=min(most, extent.size - begin))
                    self._share(peers, piece, extent.offset + begin, record.stage)
        if self._is_copy:
            for name, value in of_first["standing"].items():
                setattr(standing, name, value)
            given = self._manifest("committed")
            self.commits.restart(given)
            self._go_on_from(given)
        assert self.commits.last is not None
        self.files.restore(self.commits.last, records)

    def _trained_extents(self, record: Record) -> Iterator[Span]:
        """Yields where what is trained of a stage rests in the store."""
        if self.files.model.stages[record.stage].trained:
            for name in resting(record):
                extent = self.files.plan.stages[record.stage].extent(name, record.turn)
                if name != "frozen" and extent is not None:
                    yield extent

    def _share(self, peers: Peers, piece: Span, offset: int, stage: int) -> None:
        """Brings a piece of the store at `offset` from the first replica to the others, through the arena's `piece`."""
        daemon = self.files.daemon
        if peers.is_first:
            daemon.wait(daemon.read(piece.offset, offset, piece.size, label=stage, compared=False))
        peers.ranks.share(self.files.memory.tensor(piece, torch.uint8), 0)
        if self._is_copy:
            daemon.wait(daemon.write(piece.offset, offset, piece.size, label=stage))

    def _as_all_have(self, newest: Manifest) -> Manifest:
        """Returns the newest commit that is whole on every rank; `newest` is on this one."""
        if self._peers is None:
            return newest
        while len({*(commits := self._peers.all_gather("whole state", newest.commit))}) > 1:
            if newest.commit == (least := min(commits)):
                continue
            older = manifests.before(self.folder, newest)
            damage = None if older is None else self._first_damage(older)
            if older is None or older.commit != least or damage is not None:
                raise DamagedStateError(
                    f"the state after step {newest.step} is damaged on another rank, and {self.folder} does not hold the one "
                    f"before it{f' whole: {damage}' if damage else ''}",
                    hint="put back folders that were saved together, or start over with checkpoint.resume=never",
                )
            self.say(f"falling back to the state after step {older.step}, which is intact on every rank")
            newest = older
        return newest

    def _as_it_goes_on(self, saved: Manifest) -> Manifest:
        """Records at once what the recipe says now, so that the next run need not be told of its changes again."""
        ready, standing = self.ready, self.standing
        # those of the newest state, which may be newer than `saved`
        known = ready.planned.manifest.changes if ready.planned.manifest is not None else ()
        changes = [replace(change, step=min(change.step, saved.step)) for change in (*known, *ready.changes)]
        standing.changes = tuple(changes[-MOST_CHANGES:])
        named = replace(saved, settings=ready.settings, fingerprints=ready.fingerprints, changes=standing.changes)
        if named != saved:
            manifests.write(self.folder, named, amends=True)
        return named

    def _intact(self, saved: Manifest, progress: Progress) -> Manifest:
        """Compares every extent with its checksum before anything is computed from it."""
        damage = self._first_damage(saved, progress)
        if damage is None:
            return saved
        unreadable = damage.unreadable
        if (older := manifests.before(self.folder, saved)) is not None:
            if (other := self._first_damage(older)) is None:
                self.say(f"the state after step {saved.step} is damaged: {damage}")
                self.say(f"falling back to the state after step {older.step}, which is intact")
                return older
            unreadable = unreadable or other.unreadable
        if unreadable:  # it may be whole
            raise UnreadableError(
                f"the state after step {saved.step} in {self.folder} cannot be read whole, nor an older one: {damage}",
                hint=f"{REMEDIES[errno.EIO]}; nothing is changed: run the same command again once it can be read",
            )
        raise DamagedStateError(
            f"the state after step {saved.step} in {self.folder} is damaged, and no older one is whole: {damage}",
            hint="put a copy of the folder back, or start over with checkpoint.resume=never",
        )

    def _first_damage(self, saved: Manifest, progress: Progress = lambda size: None) -> Damage | None:
        return next(self._extent_sums(progress).damages(saved), None)

    def _extent_sums(self, progress: Progress) -> ExtentSums:
        return ExtentSums(self.files.daemon, self.files.memory.arena, self.window(), progress)

    def window(self) -> Span:
        """Returns the larger part of the arena beside the daemon's scratch. It is unused before a state is restored."""
        scratch, arena = self.files.plan.io.scratch, self.files.memory.arena
        behind = align_up(scratch.offset + scratch.size, PAGE)
        parts = (Span(offset=0, size=scratch.offset), Span(offset=behind, size=max(0, arena.size - behind)))
        return max(parts, key=lambda part: part.size)

    # ---- manifests -----------------------------------------------------------------------------------------------

    def _reserve_disk(self) -> None:
        """Reserves disk. Otherwise a disk that the run's log has filled would keep the run from being saved. A run works
        without it too."""
        tensors = sum(len(stage.tensors) for stage in self.files.model.stages)
        size = _SPARE_BYTES + _SPARE_PER_STEP * self.ready.planned.total_steps + _SPARE_PER_TENSOR * tensors
        with suppress(OSError), os.fdopen(open_own(self.folder / SPARE, anew=True), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def _manifest(self, state: State) -> Manifest:
        """Makes the manifest of what the store holds after the last step. For `loading` it names no stage."""
        ready, standing, plan, model = self.ready, self.standing, self.files.plan, self.files.model
        names = (SPARE, LOSSES, *manifests.BESIDE)
        files = [*(self.folder / name for name in names), *(path.with_name(NEW_PART) for path in self.paths)]
        is_whole = state == "committed"
        share = None
        if (peers := self._peers) is not None:
            newest = self.commits.newest
            commit = 1 + (0 if newest is None else newest.commit) if is_whole else 0
            share = RankShare(
                rank=peers.rank, count=peers.count, owners=self.files.model.owners, commit=commit, folders=self._folders
            )  # fmt: skip
        stages = self.files.describe(self.residency.records, ready.stored_as) if is_whole else ()
        return Manifest(
            run=standing.run,
            files=tuple(str(path) for path in self.paths),
            parts=tuple(str(path.with_name(PART_FILE)) for path in self.paths),
            companions=tuple(str(path) for path in (*written_companions(self.folder), *files)),
            stripe=plan.io.stripe,
            store_size=plan.store_size,
            state=state,
            written_total=standing.written_before + self.files.daemon.counters().written_bytes,
            model_dir=str(ready.planned.model_dir.resolve()),
            architecture=model.architecture,
            compute_dtype=model.compute_dtype,
            state_dtype=model.layout.dtype,
            rule=model.layout.rule,
            quantisation=model.quantisation,
            sources=model.sources,
            numerics=plan.numerics,
            fingerprints=ready.fingerprints,
            libraries=library_versions(ready.planned.recipe),
            stages=stages,
            untouched=ready.untouched,
            settings=ready.settings,
            share=share,
            **{name: getattr(standing, name) for name in _OF_STANDING},
        )

    def _release_disk(self) -> None:
        with suppress(OSError):  # a file that is no longer needed must not stop a commit
            (self.folder / SPARE).unlink()

    def _name(self, manifest: Manifest) -> None:
        """Writes the manifest. On a full disk it uses the reserved disk. Runs in the thread of commits."""
        try:
            self._write(manifest)
        except OutOfSpaceError:
            self._release_disk()
            self._write(manifest)

    def _write(self, manifest: Manifest) -> None:
        last = self.commits.last
        known = 0 if last is None else last.step
        # The manifest counts these losses.
        write_losses(self.folder, self.standing.losses[known : manifest.step], first=known)
        # An evaluation names the same extents again: the state before stays the one to fall back to.
        amends = last is not None and (last.commit, last.stages) == (manifest.commit, manifest.stages)
        manifests.write(self.folder, manifest, keep=last is not None and not amends, amends=amends)


# ---- random generators ------------------------------------------------------------------------------------------------


def seed_generators(number: int) -> None:
    """Seeds all generators, including torch's on every device."""
    random.seed(number)
    np.random.seed(number % (1 << 32))
    torch.manual_seed(number)


def captured_generators(device: torch.device) -> dict[str, Any]:
    """Returns the states of Python, NumPy and torch, and of the device if it has its own."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, _hex(torch.from_numpy(np.asarray(keys))), int(position), int(has_gauss), float(cached)],
        "torch": _hex(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["device"] = _hex(torch.cuda.get_rng_state(device))
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Restores captured states. A device without a captured state keeps its own. Raises UsageError if a generator refuses its
    state."""
    if not states:
        return
    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_bytes(states["torch"]))
        if device.type == "cuda" and "device" in states:
            torch.cuda.set_rng_state(_bytes(states["device"]), device)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise UsageError(
            f"the store's states of random generators cannot be restored: {error}",
            hint="start over with checkpoint.resume=never",
        ) from error


def _hex(values: torch.Tensor) -> str:
    return values.numpy().tobytes().hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
