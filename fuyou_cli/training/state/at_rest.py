"""Opens a store that no run uses, to export or verify it, and checks that it still holds what was written.

Extents are read and summed piece by piece. So is what a run has read of the checkpoint's own files, where one has another time
of change, as a copy has.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...core.disk import status_of
from ...core.errors import ModelFileError, SwapError, UsageError
from ...core.json_files import one_line
from ...core.process import SILENT, Patience, uninterrupted
from ...core.units import MiB, align_up, gb
from ...planner.memory import READ_BACK
from ...spec.model import PAGE, SOURCES_AT, ModelSpec, SourceFile
from ...spec.plan import Span
from ...swap.daemon import DaemonOptions, SwapDaemon
from ...swap.kernels import CHECKSUM_BLOCK, checksum
from ...swap.store import Arena, Store, not_as_written
from ..run_log import saved_of
from . import manifest as manifests
from .manifest import Manifest, StoredExtent
from .store_folders import is_plain, missing_file, rank_count, refuse_copy, refuse_in_use, unranked

# ---- extents ----------------------------------------------------------------------------------------------------------

_TURNS = 2  # pieces; one is read while the other is summed
PIECE = READ_BACK // _TURNS  # bytes read at once
MODULUS = 1 << 64  # of checksums
# The drive has lost the data, or the file is shorter. Other errors say nothing about the data.
LOST = {errno.EIO, errno.ENODATA, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN}

Progress = Callable[[int], None]  # gets the number of bytes just read


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Names an extent whose bytes are not what was written. `why` is for the user. `unreadable`: they may be, but the drive
    does not give them."""

    stage: str
    tensor: str
    why: str
    unreadable: bool

    def __str__(self) -> str:
        return f"{self.tensor} of {self.stage}: {self.why}"


def size_of(manifest: Manifest, model: ModelSpec | None = None) -> int:
    """Returns the bytes that verifying reads. `model`: of its stages that are computed here."""
    stages = [stage for number, stage in enumerate(manifest.stages) if model is None or not model.stages[number].away]
    return sum(extent.size for stage in stages for _, extent in stage.extents())


class ExtentSums:
    """Sums extents as they are now, piece by piece. `window`: a span of the arena that nobody else uses meanwhile, at least two
    blocks of 4096 bytes. `progress` gets the bytes of each extent once it is compared."""

    def __init__(self, daemon: SwapDaemon, arena: Arena, window: Span, progress: Progress = lambda size: None) -> None:
        self._daemon, self._arena, self._begin, self._progress = daemon, arena, window.offset, progress
        self._piece = min(PIECE, window.size // _TURNS // CHECKSUM_BLOCK * CHECKSUM_BLOCK)
        assert self._piece > 0, window

    def of(self, extent: StoredExtent, then: Callable[[Span, int], None] | None = None) -> int:
        """Returns the checksum of what the extent holds now. If it cannot be read, raises only after all reads have ended.
        `then` gets each piece in the arena, with its position in the extent, while the next one is read."""
        under_way: list[tuple[int, int, int, int]] = []  # ticket, place in the arena, size, position
        total = 0

        def sum_one() -> int:
            ticket, place, size, position = under_way.pop(0)
            self._daemon.wait(ticket)
            if then is not None:
                then(Span(offset=place, size=size), position)
            return checksum(self._arena.view(place, size), position=position)

        try:
            for number, position in enumerate(range(0, extent.size, self._piece)):
                place, size = self._begin + number % _TURNS * self._piece, min(self._piece, extent.size - position)
                if len(under_way) == _TURNS:
                    total += sum_one()
                under_way.append((self._daemon.read(place, extent.offset + position, size), place, size, position))
            while under_way:
                total += sum_one()
        except SwapError:
            for ticket, *_ in under_way:
                with suppress(SwapError):  # the first error is raised
                    self._daemon.wait(ticket)
            raise
        return total % MODULUS

    def damages(self, manifest: Manifest) -> Iterator[Damage]:
        """Yields every damaged extent, in order. Data that a drive cannot read is damage too. Raises other read errors."""

        def wrong(extent: StoredExtent) -> tuple[str, bool] | None:
            try:
                total = self.of(extent)
            except SwapError as error:
                if error.code not in LOST:
                    raise
                return error.message, True
            return (not_as_named(manifest, extent, total), False) if total != extent.sum else None

        for stage in manifest.stages:
            for name, extent in stage.extents():
                damage = wrong(extent) and wrong(extent)  # it must show in two reads
                self._progress(extent.size)
                if damage:
                    yield Damage(stage=stage.name, tensor=name, why=damage[0], unreadable=damage[1])

    def are_as_named(self, extents: Sequence[StoredExtent]) -> bool:
        """Tells whether all of it is what was read before. What is not must show in two reads."""
        for extent in extents:
            if all(self.of(extent) != extent.sum for _ in range(2)):
                return False
            self._progress(extent.size)
        return True


def not_as_named(manifest: Manifest, extent: StoredExtent, total: int) -> str:
    """Says what is wrong with an extent that has this checksum."""
    span = Span(offset=extent.offset, size=extent.size)
    return not_as_written(manifest.files, manifest.stripe, span, total=total, wanted=extent.sum)


# ---- the checkpoint's own files ---------------------------------------------------------------------------------------


def files_now(saved: Manifest) -> tuple[SourceFile, ...]:
    """Returns the files as they are now. Raises UsageError for one that is gone or of another size, and for one with another
    time of change if its content cannot be compared."""
    files = []
    for source, problem, now in _looked_at(saved):
        if problem:
            status_of(source.path)  # raises UnreadableError where its drive or a permission is in the way
        if problem and (now is None or not saved.knows_pieces):
            raise UsageError(
                f"frozen weights of this store are in the model's file {source.path}: {problem}",
                hint=f"{how_to_put_back(source, timed=not saved.knows_pieces)}. An adapter alone can be exported without it",
            )
        files.append(now or source)
    return tuple(files)


def files_there(saved: Manifest) -> tuple[SourceFile, ...]:
    """Returns the files that may have their content, as they are now."""
    return tuple(now for _, _, now in _looked_at(saved) if now is not None)


def changed_files(saved: Manifest) -> list[str]:
    """Lists the files that are there and are not as they were."""
    return [source.path for source, problem, _ in _looked_at(saved) if problem and Path(source.path).exists()]


def _looked_at(saved: Manifest) -> Iterator[tuple[SourceFile, str, SourceFile | None]]:
    """Yields every file, what is wrong with it, and what it is now if it may have its content."""
    for source in saved.sources:
        try:
            status = Path(source.path).stat()
        except OSError as error:
            yield source, error.strerror or "it cannot be read", None
            continue
        is_like_it = status.st_size == source.size and status.st_mtime_ns >= 0
        now = replace(source, changed=status.st_mtime_ns) if is_like_it else None
        yield source, "" if now == source else "it has changed", now


def file_of(saved: Manifest, piece: StoredExtent) -> SourceFile:
    """Returns the file that a piece is of."""
    return next(file for file, begin in reversed([*_begins(saved.sources)]) if begin <= piece.offset)


def other_content(file: SourceFile) -> ModelFileError:
    """Makes the error for a file whose content the run did not read."""
    return ModelFileError(f"{file.path}: its content is not what the saved run has read")


def how_to_put_back(source: SourceFile, *, timed: bool) -> str:
    """Says how a file becomes what it was. `timed`: its time of change counts too, and a copy of it has another."""
    seconds, nanoseconds = divmod(source.changed, 10**9)
    touched = f", then `touch -d @{seconds}.{nanoseconds:09} {source.path}`" if timed else ""
    return f"put the file back as it was ({source.size:,} bytes){touched}"


def to_compare(saved: Manifest, now: Sequence[SourceFile]) -> int:
    """Returns the bytes that `compare` reads."""
    return sum(extent.size for _, extents in _touched(saved, now) for extent in extents)


def compare(saved: Manifest, now: Sequence[SourceFile], sums: ExtentSums, *, say: Callable[[str], None]) -> None:
    """Compares what a run reads of files with another time of change. Raises ModelFileError where it is not what it was."""
    for file, extents in _touched(saved, now):
        say(f"{file.path} has another time of change: comparing {gb(_covered(file, extents))} with what was read before")
        if not sums.are_as_named(extents):
            raise other_content(file)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCheck:
    """Tells what comparing a file of the checkpoint showed. `same`: bytes that are what was read before. `changed`: others are
    not. `unknown`: why not all of its frozen weights could be compared."""

    path: str
    same: int
    changed: bool = False
    unknown: str = ""


def to_check(saved: Manifest) -> int:
    """Returns the bytes that `checked_files` reads."""
    present = {file.path for file in files_there(saved)}
    return sum(extent.size for file, _, extents in _read_of(saved) if file.path in present for extent in extents)


def checked_files(saved: Manifest, there: Sequence[SourceFile], sums: ExtentSums) -> Iterator[FileCheck]:
    """Compares what a run has read of each file with what it holds now, whatever its time of change. `there`: the files that
    the daemon's store reads from, in their order."""
    begins = {file.path: begin for file, begin in _begins(there)}
    for (source, begin, extents), (_, problem, _) in zip(_read_of(saved), _looked_at(saved), strict=True):
        if source.path not in begins:
            yield FileCheck(path=source.path, same=0, unknown=problem)
            continue
        moved = [replace(extent, offset=extent.offset - begin + begins[source.path]) for extent in extents]
        is_same = sums.are_as_named(moved)
        unknown = "" if saved.knows_pieces else "the saved state has no checksums of all that its run reads of it"
        same = _covered(source, extents) if is_same else 0
        yield FileCheck(path=source.path, same=same, changed=not is_same, unknown=unknown)


def _covered(file: SourceFile, extents: Sequence[StoredExtent]) -> int:
    """Returns the bytes of a file that lie in at least one extent: neighbours share a page, and the last one ends behind it."""
    end, total = 0, 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        total += max(0, extent.offset + extent.size - max(end, extent.offset))
        end = max(end, extent.offset + extent.size)
    return min(total, file.size)


def _touched(saved: Manifest, now: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, list[StoredExtent]]]:
    """Yields the files with another time of change, and what is read of each."""
    for (was, _, extents), file in zip(_read_of(saved), now, strict=True):
        if was.changed != file.changed:
            yield file, extents


def _read_of(saved: Manifest) -> Iterator[tuple[SourceFile, int, list[StoredExtent]]]:
    """Yields every file, where it begins, and what is known of it."""
    for file, begin in _begins(saved.sources):
        end = begin + align_up(file.size, PAGE)
        yield file, begin, [e for stage in saved.stages for e in stage.summed_pieces if begin <= e.offset < end]


def _begins(files: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, int]]:
    """Yields where each file begins in the address space of a store that reads from them."""
    begin = SOURCES_AT
    for file in files:
        yield file, begin
        begin += align_up(file.size, PAGE)


# ---- stores at rest ---------------------------------------------------------------------------------------------------

_ARENA = 2 * PIECE + 2 * MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStore:
    """A store's folder with its newest readable manifest, read once for a command. `problem`: why it is not the newest one.
    `seals`: of its manifests, as they were before they were read."""

    folder: Path
    manifest: Manifest
    problem: str
    seals: tuple[bytes | None, ...]
    # The stores of all ranks where several have trained the model. `manifest` then has every stage, and the first rank's rest.
    shares: tuple[SavedStore, ...] = ()
    moves: bool = False  # another number of ranks has made it: a run brings it into folders of its own (`storage`)

    def check_current(self) -> None:
        """Raises UsageError if another process has committed since. The store must be locked."""
        if self.seals != manifests.seals(self.folder):
            raise used_since(self.folder)


def used_since(folder: Path) -> UsageError:
    return UsageError(
        f"another process has used the store in {folder} since this one read its manifest", hint="run the same command again"
    )


def find_saved_store(folder: Path) -> SavedStore | None:
    """Reads the newest manifest of a store. Returns None if there is none."""
    seals = manifests.seals(folder)
    manifest, problem = manifests.newest(folder)
    return None if manifest is None else SavedStore(folder=folder, manifest=manifest, problem=problem, seals=seals)


def saved_store(folder: Path) -> SavedStore:
    """Reads the newest manifest of a store. Raises UsageError if there is none."""
    if (store := find_saved_store(folder)) is None:
        raise UsageError(f"there is no store in {folder}")
    return store


def whole_store(folder: Path) -> SavedStore:
    """Reads the store in a folder. Where several ranks have trained the model it is a share of it, and the others are read too:
    all of the newest commit that every rank has. Raises UsageError if one is not there."""
    store = saved_store(folder)
    if store.manifest.share is None:
        return store
    shares = [_share(store, rank) for rank in range(store.manifest.share.count)]
    if (loading := next((share for share in shares if share.manifest.state != "committed"), None)) is not None:
        return loading
    least = min(share.manifest.commit for share in shares)
    shares = [share if share.manifest.commit == least else _before(share, least) for share in shares]
    if len({len(share.manifest.stages) for share in shares}) > 1:
        raise UsageError(
            f"{folder}: the stores of its ranks do not name the same stages", hint="put the folders of one run back"
        )
    same_stages = zip(*(share.manifest.stages for share in shares), strict=True)
    stages = tuple(next((stage for stage in same if stage.params), same[0]) for same in same_stages)
    written = sum(share.manifest.written_total for share in shares)
    joined = replace(shares[0].manifest, stages=stages, written_total=written)
    return replace(shares[0], manifest=joined, shares=tuple(shares))


def _share(store: SavedStore, rank: int) -> SavedStore:
    """Returns the store of one of the ranks that trained the model of `store`."""
    share, run = store.manifest.share, store.manifest.run
    assert share is not None
    if rank == share.rank:
        return store
    folder = share.folders[rank] if rank < len(share.folders) else ""
    share_store = find_saved_store(Path(folder)) if is_plain(folder) else None
    other = None if share_store is None else share_store.manifest.share
    if share_store is None or other is None or (share_store.manifest.run, other.rank, other.count) != (run, rank, share.count):
        raise UsageError(
            f"{store.folder} holds the share of rank {share.rank} of {share.count}; that of rank {rank} is not in "
            f"{one_line(folder)}",
            hint="bring the folders of all ranks of the run to this box, each at the path that it had on its own",
        )
    return share_store


def _before(store: SavedStore, commit: int) -> SavedStore:
    """Returns the store of a rank that has named one commit more than others, at the one before."""
    older = manifests.before(store.folder, store.manifest)
    if older is None or older.commit != commit:
        raise UsageError(
            f"{store.folder} holds the state after step {store.manifest.step}, and not the one before it that other ranks hold",
            hint="put back folders that were saved together",
        )
    return replace(store, manifest=older)


def _are_shares(folders: Sequence[Path]) -> bool:
    """Tells whether folders are named as those of the ranks of one run."""
    return len({unranked(folder) for folder in folders}) == 1 and all(unranked(folder) != folder for folder in folders)


def find_store(source: Path) -> SavedStore:
    """Reads the one store that `source` is or contains, or that a run with this output_dir has elsewhere; of a run of several
    ranks all that are there. Raises UsageError, or UnreadableError where that cannot be seen now."""
    folders = manifests.found_in(source, manifests.NAME, manifests.BEFORE)
    if len(folders) > 1 and not _are_shares(folders):
        raise UsageError(f"{source} holds {len(folders)} stores", hint="name one: " + ", ".join(map(str, folders[:4])))
    newest = rank_count(max(folders, key=manifests.written_at)) if folders else 0
    folder = next((one for one in folders if rank_count(one) == newest), None) or saved_of(source)
    if folder is not None:
        return whole_store(folder)
    raise UsageError(
        f"there is no store in {source}", hint="give a run's output_dir, its store, or the offload.dir that it is in"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStore:
    """A store that is locked and can be read. `sources`: the model's own files that it reads from."""

    manifest: Manifest
    sources: tuple[SourceFile, ...]
    arena: Arena
    daemon: SwapDaemon


@contextmanager
def at_rest(
    saved: SavedStore,
    *,
    arena_size: int = 0,
    arena: Arena | None = None,
    say: Callable[[str], None] | None = None,
    model_files: Literal["compared", "there", "none"] = "compared",
) -> Iterator[OpenStore]:
    """Opens the committed state of a store. `arena`: one to read into, in place of its own of `arena_size`. `say` gets a
    message about a drive that does not answer. `model_files`: the model's own, which have to be as they were; or those that are
    there; or none. Raises FuyouError while a run uses the store."""
    folder, manifest = saved.folder, saved.manifest
    if saved.shares:
        names = ", ".join(str(share.folder) for share in saved.shares)
        raise UsageError(f"the model is in the stores of {len(saved.shares)} ranks: {names}", hint="`fuyou export` joins them")
    refuse_copy(manifest, folder)
    refuse_in_use(manifest)
    if manifest.state != "committed":
        raise UsageError(
            f"nothing is saved in {folder} yet: its run was stopped while it loaded the model", hint="run its recipe again"
        )
    if missing := missing_file(manifest):
        raise UsageError(f"the store in {folder} is incomplete: {missing}", hint="mount its drive, or put the file back")
    sources: tuple[SourceFile, ...] = ()
    if model_files != "none":
        sources = files_now(manifest) if model_files == "compared" else files_there(manifest)
    paths = [Path(name) for name in manifest.files]
    patience = SILENT if say is None else Patience(say, where=lambda: str(folder))
    with ExitStack() as stack:
        with uninterrupted():
            arena = arena or stack.enter_context(Arena(arena_size))
            opened = Store.open(paths, stripe=manifest.stripe, size=manifest.store_size, read_only=True, sources=sources)
            store = stack.enter_context(opened)
            daemon = stack.enter_context(SwapDaemon(arena, store, DaemonOptions(update_threads=0), patience=patience))
        saved.check_current()  # the manifest was read before the store was locked
        if model_files == "compared":
            compare(
                manifest, sources, ExtentSums(daemon, arena, Span(offset=0, size=arena_size)), say=say or (lambda text: None)
            )
        yield OpenStore(manifest=manifest, sources=sources, arena=arena, daemon=daemon)
        store.check_sources()


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


def verify_store(
    saved: SavedStore, *, progress: Progress = lambda size: None, say: Callable[[str], None] | None = None
) -> list[Verified]:
    """Reads and checks every extent of the newest committed state and of the one before, and what the newest one
    reads of the model's own files. Extents of an older state that the current step has overwritten count as damage."""
    with at_rest(saved, arena_size=_ARENA, say=say, model_files="there") as store:
        sums = ExtentSums(store.daemon, store.arena, Span(offset=0, size=_ARENA), progress)
        newest = Verified(
            manifest=saved.manifest,
            damages=tuple(sums.damages(saved.manifest)),
            older=False,
            problem=saved.problem,
            files=tuple(checked_files(saved.manifest, store.sources, sums)),
        )
        if (older := manifests.before(saved.folder, saved.manifest)) is None:
            return [newest]
        return [newest, Verified(manifest=older, damages=tuple(sums.damages(older)), older=True)]
