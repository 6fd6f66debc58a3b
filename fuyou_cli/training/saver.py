"""What of a run is on stable storage: committed beside the steps, saved where it stops, and gone on from.

A generation is committed once every stage has come to it (the residency ledger says when) and its step is over. The manifest is
made here, in the thread that steps; flushing and naming is `commits`' thread's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import SwapError, UsageError
from ..core.patience import SILENT, Patience
from ..core.units import align_up
from ..engine.devices.base import Device
from ..engine.host_memory import PAGE, HostMemory
from ..planner.residency import Residency
from ..spec.plan import Span
from ..swap.daemon import SwapDaemon
from ..swap.store import Store
from . import losses as loss_files
from . import manifest as manifests
from . import random_states
from .commits import Commits
from .manifest import COMPANIONS, Manifest, State
from .prepare import Prepared
from .saved import PART_FILE
from .storage import StageFiles
from .verify import Damage, damages

_SPARE_FILE, _SPARE_BYTES = "spare", 4 << 20  # disk for the last manifest and its losses when the disk has run full
_SPARE_PER_STEP = 8  # a loss


@dataclass(slots=True)
class Standing:
    """Where a run stands: after `step` whole steps."""

    run: str  # its name in manifest and part files
    step: int = 0
    losses: list[float] = field(default_factory=list)
    written_before: int = 0  # bytes that earlier processes wrote
    skipped: int = 0  # steps that updated nothing: AdamW counts the others
    skipped_in_row: int = 0  # of these, the last ones
    random: dict[str, Any] = field(default_factory=dict)  # states of generators after the last step

    @classmethod
    def of(cls, saved: Manifest | None) -> Standing:
        """Of a new run, or a saved one."""
        if saved is None:
            return cls(run=os.urandom(8).hex())
        standing = cls(run=saved.run)
        standing.goes_on_from(saved)
        return standing

    def goes_on_from(self, saved: Manifest) -> None:
        """All but the losses."""
        self.step, self.written_before, self.random = saved.step, saved.written_total, saved.random
        self.skipped, self.skipped_in_row = saved.skipped, saved.skipped_in_row

    def is_over(self, *, skipped: bool) -> None:
        """One step more. `skipped`: it updated nothing."""
        self.step += 1
        self.skipped += skipped
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0


class Saver:
    """Keeps the state of one run. `say` hears what became of a damaged state."""

    def __init__(
        self,
        prepared: Prepared,
        standing: Standing,
        *,
        files: StageFiles,
        residency: Residency,
        store: Store,
        daemon: SwapDaemon,
        memory: HostMemory,
        device: Device,
        say: Callable[[str], None],
        patience: Patience = SILENT,
    ) -> None:
        self.prepared, self.standing, self.files, self.residency = prepared, standing, files, residency
        self.daemon, self.memory, self.device, self.say = daemon, memory, device, say
        self.paths = store.paths
        self.folder = store.paths[0].parent
        self.saved_bytes = 0  # that saving wrote, beside the steps
        self.began: Callable[[Manifest], None] = lambda manifest: None  # hears of every commit
        self._complete = -1  # the newest generation that every stage has come to
        durable = prepared.manifest.step if prepared.manifest else -1
        self.commits = Commits(flush=store.sync, name=self._name, durable=durable, patience=patience)

    def close(self) -> None:
        self.commits.close()

    @property
    def saved_step(self) -> int | None:
        """The last one that is committed, whatever became of those behind it; None where there is none."""
        last = self.commits.seen()
        return last if last >= 0 else None

    # ---- beside the steps ----------------------------------------------------------------------------------------

    def complete(self, generation: int) -> None:
        """Every stage has come to it. Updates may be over before their step is."""
        self._complete = generation
        if generation <= self.standing.step:
            self._begin()

    def durable(self) -> int:
        return self.commits.durable()

    def step_is_over(self) -> None:
        """`standing` says so."""
        self.standing.random = random_states.capture(self.device.torch_device)
        if self._complete == self.standing.step:
            self._begin()

    def _begin(self) -> None:
        """Every stage rests at the generation of the last step."""
        assert self._complete == self.standing.step, (self._complete, self.standing.step)
        if self.commits.newest < self.standing.step:
            manifest = self._manifest("committed")
            self.commits.begin(manifest)
            self.began(manifest)

    # ---- where a run begins and ends -----------------------------------------------------------------------------

    def give_up_what_was(self) -> None:
        """The store is about to be filled anew: from now on nothing in it can be gone on from."""
        self._name(self._manifest("loading"))

    def begin_training(self) -> None:
        """What was loaded is committed too: a run that is killed from here on goes on without its checkpoint."""
        self._set_room_aside()
        if self.commits.newest < 0:
            self._complete = self.standing.step
            self._begin()

    def save(self) -> None:
        """The last step is committed when this returns. All stages are drained."""
        self._complete = self.standing.step
        if self.commits.newest < self.standing.step:
            self.saved_bytes += self.files.save_resident(self.residency.records)
            self._begin()
        self.spare.unlink(missing_ok=True)
        self.commits.finish()

    def restore(self, saved: Manifest) -> None:
        """The newest committed state that is whole: `saved`, or the one before."""
        saved = self._intact(saved)
        self.files.restore(saved.stages, self.residency.records)
        standing = self.standing
        standing.goes_on_from(saved)
        standing.losses, note = loss_files.read(self.folder, saved.step)
        if note:
            self.say(f"note: {note}")
        self.residency.commits.base = saved.step
        self.commits.restart(saved.step)
        random_states.restore(saved.random, self.device.torch_device)

    def _intact(self, saved: Manifest) -> Manifest:
        """Every extent is read and compared with its sum before anything is computed on it."""
        damage = self._first_damage(saved)
        if damage is None:
            return saved
        older = self._older(saved)
        if older is None:
            raise SwapError(
                f"the state after step {saved.step} in {self.folder} is damaged, and no older one is whole: {damage}",
                hint="put a copy of the folder back, or start over with checkpoint.resume=never",
            )
        manifests.go_back(self.folder)
        self.say(f"the state after step {saved.step} is damaged: {damage}")
        self.say(f"going back to the state after step {older.step}, which is whole")
        return older

    def _older(self, saved: Manifest) -> Manifest | None:
        """The state before, where all of it is still there."""
        try:
            older = manifests.read(self.folder, manifests.BEFORE)
        except UsageError:
            return None
        if older is None or older.run != saved.run or self._first_damage(older) is not None:
            return None
        return older

    def _first_damage(self, saved: Manifest) -> Damage | None:
        return next(damages(saved, self.daemon, self.memory.arena, self._window()), None)

    def _window(self) -> Span:
        """The larger part of the arena beside the update chunks, which are the daemon's: nothing is in it before a state is
        restored."""
        scratch, size = self.files.plan.io.scratch, self.memory.arena.size
        behind = align_up(scratch.offset + scratch.size, PAGE)
        parts = (Span(offset=0, size=scratch.offset), Span(offset=behind, size=max(0, size - behind)))
        return max(parts, key=lambda part: part.size)

    # ---- manifests -----------------------------------------------------------------------------------------------

    @property
    def spare(self) -> Path:
        return self.folder / _SPARE_FILE

    def _set_room_aside(self) -> None:
        """Without this a full disk, which ends a run by its log, would keep it from being saved. Where there is no room for
        it the run goes on without."""
        with suppress(OSError), self.spare.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _SPARE_BYTES + _SPARE_PER_STEP * self.prepared.total_steps)

    def _manifest(self, state: State) -> Manifest:
        """What the store holds after the last step; nothing yet where it is `loading`."""
        prepared, standing, plan, model = self.prepared, self.standing, self.files.plan, self.files.model
        beside = (self.spare, self.folder / loss_files.NAME, self.folder / manifests.BEFORE)
        is_whole = state == "committed"
        return Manifest(
            run=standing.run,
            files=tuple(str(path) for path in self.paths),
            parts=tuple(str(path.with_name(PART_FILE)) for path in self.paths),
            companions=tuple(str(path) for path in (*sorted((self.folder / COMPANIONS).glob("*")), *beside)),
            stripe=plan.io.stripe,
            store_size=plan.store_size,
            state=state,
            step=standing.step,
            written_total=standing.written_before + self.daemon.counters().written_bytes,
            model_dir=str(prepared.model_dir.resolve()),
            architecture=model.architecture,
            compute_dtype=model.compute_dtype,
            numerics=asdict(plan.numerics),
            fingerprints=prepared.fingerprints,
            random=standing.random,
            stages=self.files.describe(self.residency.records, prepared.entries) if is_whole else (),
            skipped=standing.skipped,
            skipped_in_row=standing.skipped_in_row,
        )

    def _name(self, manifest: Manifest) -> None:
        """Losses first, which the manifest counts. In the thread of commits."""
        known = self.commits.last
        loss_files.write(self.folder, self.standing.losses[max(0, known) : manifest.step], first=max(0, known))
        manifests.write(self.folder, manifest, keep=known >= 0)
