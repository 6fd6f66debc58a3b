"""Opens a store that no run uses, to export or verify it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...core.errors import UsageError
from ...core.process import SILENT, Patience, uninterrupted
from ...core.units import MiB
from ...spec.model import SourceFile
from ...spec.plan import Span
from ...swap.daemon import DaemonOptions, SwapDaemon
from ...swap.store import Arena, Store
from ..run_log import saved_of
from . import manifest as manifests
from .extent_checks import PIECE, Damage, Progress, damages
from .parts import lacking
from .resume import refuse_copy, refuse_in_use
from .source_checks import FileCheck, checked_files, compare, files_now, files_there
from .stored import Manifest

_ARENA = 2 * PIECE + 2 * MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class AtRest:
    """Holds an open store and its newest readable manifest. `problem`: why that is not the newest one. `sources`: the model's
    own files that it reads from."""

    manifest: Manifest
    problem: str
    sources: tuple[SourceFile, ...]
    arena: Arena
    daemon: SwapDaemon


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Holds a committed state and its damage. `older`: it is not the newest state. `problem`: why the newest one is
    unreadable. `files`: of the newest state, what became of the model's own files that it reads from."""

    manifest: Manifest
    damages: tuple[Damage, ...]
    older: bool
    problem: str = ""
    files: tuple[FileCheck, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Tells whether this is the newest state and all of it is readable, as far as it could be compared."""
        return not self.damages and not self.problem and not any(file.changed for file in self.files)


def find_store(source: Path) -> Path:
    """Returns the folder of the one store that `source` is or contains, or that a run with this output_dir has elsewhere.
    Raises UsageError, or UnreadableError where that cannot be seen now."""
    found = manifests.found_in(source, manifests.NAME, manifests.BEFORE)
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{source} holds {len(found)} stores", hint="name one: " + ", ".join(map(str, found[:4])))
    if (saved := saved_of(source)) is not None:
        return saved
    raise UsageError(
        f"there is no store in {source}", hint="give a run's output_dir, its store, or the offload.dir that it is in"
    )


@contextmanager
def at_rest(
    source: Path,
    *,
    arena_size: int,
    say: Callable[[str], None] | None = None,
    model_files: Literal["compared", "there", "none"] = "compared",
) -> Iterator[AtRest]:
    """Opens the committed state of a store. `say` gets a message about a drive that does not answer. `model_files`: the model's
    own, which have to be as they were; or those that are there; or none. Raises FuyouError while a run uses the store."""
    manifest, problem = manifests.newest(source)
    if manifest is None:
        raise UsageError(f"there is no store in {source}")
    refuse_copy(manifest, source)
    refuse_in_use(manifest)
    if manifest.state != "committed":
        raise UsageError(
            f"nothing is saved in {source} yet: its run was stopped while it loaded the model",
            hint="run its recipe again",
        )
    if missing := lacking(manifest):
        raise UsageError(f"the store in {source} is incomplete: {missing}", hint="mount its drive, or put the file back")
    sources: tuple[SourceFile, ...] = ()
    if model_files != "none":
        sources = files_now(manifest) if model_files == "compared" else files_there(manifest)
    paths = [Path(name) for name in manifest.files]
    patience = SILENT if say is None else Patience(say, where=lambda: str(source))
    with ExitStack() as stack:
        with uninterrupted():
            arena = stack.enter_context(Arena(arena_size))
            opened = Store.open(paths, stripe=manifest.stripe, size=manifest.store_size, read_only=True, sources=sources)
            store = stack.enter_context(opened)
            daemon = stack.enter_context(SwapDaemon(arena, store, DaemonOptions(update_threads=0), patience=patience))
        if manifests.newest(source)[0] != manifest:  # the manifest was read before the store was locked
            raise UsageError(f"another process has used the store in {source} since", hint="run the same command again")
        if model_files == "compared":
            compare(manifest, sources, daemon, arena, Span(offset=0, size=arena_size), say=say or (lambda text: None))
        yield AtRest(manifest=manifest, problem=problem, sources=sources, arena=arena, daemon=daemon)
        store.check_sources()


def verify_store(
    source: Path, *, progress: Progress = lambda size: None, say: Callable[[str], None] | None = None
) -> list[Verified]:
    """Reads and checks every extent of the newest committed state and of the one before, and what the newest one
    reads of the model's own files. Extents of an older state that the current step has overwritten count as damage."""
    with at_rest(source, arena_size=_ARENA, say=say, model_files="there") as store:
        window = Span(offset=0, size=_ARENA)
        files = checked_files(store.manifest, store.sources, store.daemon, store.arena, window, progress)
        older = manifests.before(source, store.manifest)
        states = [store.manifest, *([older] if older is not None else [])]
        return [
            Verified(
                manifest=state,
                damages=tuple(damages(state, store.daemon, store.arena, window, progress=progress)),
                older=number > 0,
                problem="" if number else store.problem,
                files=() if number else tuple(files),
            )
            for number, state in enumerate(states)
        ]
