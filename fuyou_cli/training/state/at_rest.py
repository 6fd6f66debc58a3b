"""A store that no run uses, opened to be read: exported, or verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import UsageError
from ...core.patience import SILENT, Patience
from ...core.units import MiB
from ...spec.plan import Span
from ...swap.arena import Arena
from ...swap.daemon import DaemonOptions, SwapDaemon
from ...swap.store import Store
from . import manifest as manifests
from .manifest import Manifest
from .parts import lacking
from .saved import refuse_copy, refuse_in_use
from .verify import PIECE, Damage, Progress, damages

_ARENA = 2 * PIECE + 2 * MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class AtRest:
    """An open store and the newest manifest it has that can be read; `problem`: why that is not the newest."""

    manifest: Manifest
    problem: str
    arena: Arena
    daemon: SwapDaemon


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A committed state and what of it is not what was written. `older`: it is one of those before the newest. `problem`: it
    is the newest whose manifest can be read, and why that is not the newest."""

    manifest: Manifest
    damages: tuple[Damage, ...]
    older: bool
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it is the newest, and all of it is there."""
        return not self.damages and not self.problem


def find_store(source: Path) -> Path:
    """The folder of the one store `source` is, or holds."""
    if any((source / name).is_file() for name in (manifests.NAME, manifests.BEFORE)):
        return source
    found = sorted(path.parent for path in source.glob(f"*/{manifests.NAME}")) if source.is_dir() else []
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{source} holds {len(found)} stores", hint="name one: " + ", ".join(map(str, found[:4])))
    raise UsageError(f"there is no store in {source}", hint="give a run's store folder, or the recipe of the run")


@contextmanager
def at_rest(source: Path, *, arena_size: int, say: Callable[[str], None] | None = None) -> Iterator[AtRest]:
    """The committed state of the store in `source`; `say` hears of a drive that is silent. Raises FuyouError while a run uses
    it, and where there is none."""
    manifest, problem = manifests.newest(source)
    if manifest is None:
        raise UsageError(f"there is no store in {source}")
    refuse_copy(manifest, source)
    refuse_in_use(manifest)
    if manifest.state != "committed":
        raise UsageError(
            f"nothing is saved in {source} yet: its run was stopped while the model was loaded",
            hint="run its recipe again",
        )
    if missing := lacking(manifest):
        raise UsageError(f"the store in {source} is not whole: {missing}", hint="mount its drive, or put the file back")
    paths = [Path(name) for name in manifest.files]
    patience = SILENT if say is None else Patience(say, where=lambda: str(source))
    with (
        Arena(arena_size) as arena,
        Store.open(paths, stripe=manifest.stripe, size=manifest.store_size, read_only=True) as store,
        SwapDaemon(arena, store, DaemonOptions(update_threads=0), patience=patience) as daemon,
    ):
        if manifests.newest(source)[0] != manifest:  # read before the store was locked
            raise UsageError(f"another process has used the store in {source} meanwhile", hint="run the same command again")
        yield AtRest(manifest=manifest, problem=problem, arena=arena, daemon=daemon)


def verify_store(
    source: Path, *, progress: Progress = lambda size: None, say: Callable[[str], None] | None = None
) -> list[Verified]:
    """The newest committed state of a store, and those before it that are kept: every extent is read and summed. What the
    step that was under way has written over is damage of one before."""
    with at_rest(source, arena_size=_ARENA, say=say) as store:
        window = Span(offset=0, size=_ARENA)
        states = [store.manifest, *manifests.before(source, store.manifest)]
        return [
            Verified(
                manifest=state,
                damages=tuple(damages(state, store.daemon, store.arena, window, progress=progress)),
                older=number > 0,
                problem="" if number else store.problem,
            )
            for number, state in enumerate(states)
        ]
