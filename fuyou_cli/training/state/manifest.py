"""What a run's store holds, as a manifest says it: which extents hold which generation, and which step the run has reached.

A manifest is written, synced and renamed once the data it names is on stable storage. While a store is filled its state is
`loading`. No update overwrites what a `committed` manifest names before the next one is on stable storage (`CommitLedger` in
planner/ledgers.py). So the newest manifest is true wherever a run ends. Older ones are kept beside it, in case the newest
state becomes unreadable; so is a damaged one that an older one replaced. The last line holds a digest of the other lines, so
that a changed manifest is never taken for a whole one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ...checkpoint.reader import NAME_LIMIT
from ...core.disk import failed_writing, status_of, sync_directory, unreadable
from ...core.errors import FuyouError, UnreadableError, UsageError
from ...core.json_files import find_text, from_json, has_too_many_values, object_in
from ...core.paths import open_plain, write_own
from ...spec.model import Piece, Rule, SourceFile, StateDtype, StateLayout
from ...spec.packed_tensors import PackedTensor, Quantised, packed_bank
from ...spec.plan import Numerics, StateTensor

State = Literal["loading", "committed"]

TENSORS = get_args(StateTensor)  # tensors of a stage, in the order of a place
ALIGN = 4096  # alignment of stripes and extents for direct I/O
MOST_CHANGES = 1000  # that are recorded; the newest ones
MOST_SETS = 16  # most sets whose losses are put aside

Aligned = Annotated[int, Field(multiple_of=ALIGN)]
Sum = Annotated[int, Field(le=(1 << 64) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Describes a tensor, or the part of its elements that a stage holds."""

    name: str  # the name in the model
    stored_as: Annotated[str, Field(min_length=1, max_length=NAME_LIMIT)]  # the name in its checkpoint and in every export
    shape: Annotated[tuple[int, ...], Field(max_length=64)]  # of the whole tensor; torch allows no more dimensions
    offset: int  # elements within the stage
    first: int  # elements of the tensor before this part
    count: int
    decay: bool  # whether AdamW's weight decay applies

    @property
    def held(self) -> tuple[int, ...]:
        """Returns the shape of this part, where it is whole rows of the tensor's first dimension."""
        return (self.count // prod(self.shape[1:]), *self.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredExtent:
    """Names bytes of the store, and the checksum (`swap.kernels.checksum`) of what was written there."""

    offset: Aligned
    size: int
    sum: Sum


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStage:
    """Describes one stage at rest: a bank of trained parameters, then one of frozen ones. Extents are None where every value is
    zero or there is no such tensor."""

    name: str
    params: int
    trained: int  # of these, in the order of offsets: the first ones; the others are frozen
    generation: int
    turn: int  # which place of its pair (spec.plan.ExtentPair) it rests in
    zero_moments: bool
    zero_remainder: bool
    weights: StoredExtent | None  # trained ones
    frozen: StoredExtent | None
    remainder: StoredExtent | None
    momentum: StoredExtent | None
    variance: StoredExtent | None
    tensors: tuple[StoredTensor, ...]
    pieces: tuple[Piece, ...] = ()  # of the checkpoint's files that hold the frozen parameters instead of an extent
    piece_sums: tuple[Sum, ...] = ()  # checksum of each piece as it was first read; none: not all were read, or none was summed
    quantised: int = 0  # of its parameters, the last ones: frozen ones that rest quantised

    def packed(self, quantisation: Quantised) -> tuple[Mapping[str, PackedTensor], int]:
        """Returns where its quantised tensors lie in their bank, by name, and the bank's bytes."""
        first = self.params - self.quantised
        return packed_bank(quantisation, ((tensor.name, tensor.held) for tensor in self.tensors if tensor.offset >= first))

    def extents(self) -> list[tuple[StateTensor, StoredExtent]]:
        """Returns the stage's tensors on the store, by name."""
        named = [(name, getattr(self, name)) for name in TENSORS]
        return [(name, extent) for name, extent in named if extent is not None]

    @property
    def summed_pieces(self) -> list[StoredExtent]:
        """Returns its pieces of the checkpoint's files, as far as their checksums are known."""
        together = zip(self.pieces, self.piece_sums, strict=False)
        return [StoredExtent(offset=piece.offset, size=piece.size, sum=total) for piece, total in together]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Holds what the best weights and early stopping go by: the loss of the first set of rows that a run evaluates."""

    step: int  # whole steps before the last evaluation
    best: float | None  # the lowest loss; None: none was finite
    best_step: int
    worse: int  # evaluations since one that was better, by more than `min_delta`
    bar: float | None = None  # the loss of that one; None: `best`
    set_name: str = ""  # of the set; empty: not known
    set_digest: str = ""  # of its rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Untouched:
    """Names the tensors of the checkpoint that a run leaves alone: of parts that do not run on text, and buffers."""

    names: tuple[Annotated[str, Field(min_length=1, max_length=NAME_LIMIT)], ...]
    mark: str  # of them (`checkpoint/reader.weights_mark`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Holds a key of the recipe with which a run went on at another value than before."""

    step: int  # whole steps before it
    key: Annotated[str, Field(min_length=1, max_length=NAME_LIMIT)]
    before: Any  # as JSON has it
    now: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """Says whose part of one model a store holds, where several ranks train it, and which of the run's commits this is. Ranks
    have the same state where their commits have the same number: an evaluation is a commit more after the same step."""

    rank: int
    count: Annotated[int, Field(ge=2)]
    owners: tuple[int, ...]  # the rank that has each stage
    commit: int  # 0: while it is loaded
    folders: tuple[str, ...]  # of the stores of all ranks, by rank, each on its rank's box


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Names what a store holds, and what a run needs to resume from it."""

    run: str  # the run's name in the part files of its folders
    files: tuple[str, ...]  # absolute paths of the store's files, in the order of the stripe
    parts: tuple[str, ...]  # paths of the part files beside them
    companions: tuple[str, ...]  # paths of the run's other files; `fuyou clean` may remove files of all three
    stripe: Annotated[int, Field(ge=ALIGN, multiple_of=ALIGN)]
    store_size: int
    state: State
    step: int  # finished steps: the generation of every stage, and the number of losses
    written_total: int
    model_dir: str
    architecture: str
    compute_dtype: Literal["float32", "bfloat16"]
    numerics: Numerics
    fingerprints: dict[str, str]  # digests of what a resumed run must agree on
    libraries: dict[str, str]  # versions of the libraries that computed it (state/resume.py)
    random: dict[str, Any]  # states of random generators (state/saver.py)
    stages: tuple[StoredStage, ...]
    skipped: int = 0  # steps that updated nothing (train.skip_nonfinite)
    skipped_in_row: int = 0  # of these, the last ones
    evaluated: Evaluated | None = None  # None: never
    evaluated_before: Annotated[
        tuple[Evaluated, ...], Field(max_length=MOST_SETS)
    ] = ()  # of other sets, for when they are back
    state_dtype: StateDtype = "float32"  # of momentum and variance
    rule: Rule = "adamw"
    quantisation: Quantised | None = None  # how frozen weights of stages with such parameters rest
    sources: tuple[SourceFile, ...] = ()  # files of the checkpoint that frozen parameters are read from
    untouched: Untouched | None = None  # None: a model of text alone
    peak_after_warmup: bool = False  # the rule of its learning rates (training/length)
    settings: dict[str, Any] | None = None  # keys of the recipe it goes by (state/resume.py); None: not recorded
    changes: Annotated[tuple[Change, ...], Field(max_length=MOST_CHANGES)] = ()  # of these, in order
    share: RankShare | None = None  # None: all of the model

    @property
    def commit(self) -> int:
        """Returns the number of the commit, where several ranks train the model."""
        return 0 if self.share is None else self.share.commit

    @property
    def knows_pieces(self) -> bool:
        """Tells whether it has the checksum of everything that is read from the checkpoint's files."""
        return all(len(stage.piece_sums) == len(stage.pieces) for stage in self.stages)

    @property
    def layout(self) -> StateLayout:
        """Returns the layout of every stage's states."""
        return StateLayout(weights=self.compute_dtype, dtype=self.state_dtype, rule=self.rule)


NAME = "manifest.json"
BEFORE = "manifest.before.json"  # of the commit before
DAMAGED = "manifest.damaged.json"  # was the newest, until the run fell back to an older one
COMPANIONS = "companions"  # the folder beside it with what an export needs besides weights
VERSION = 8
_UPGRADED = (5, 6, 7)  # versions before; in the first, every parameter of a stage was trained
_NEW = ".manifest.new"  # fixed names: what a killed run leaves is written over by the next
_NEW_BEFORE = ".manifest.before.new"
EVERY_NAME = (NAME, BEFORE, DAMAGED)  # names of manifests
BESIDE = (BEFORE, DAMAGED, _NEW, _NEW_BEFORE)  # other files that may be beside a manifest
_DIGEST = ',\n"digest": '
_SEAL = len(_DIGEST) + 69  # bytes from there to the end of a manifest
LARGEST = 64 << 20  # bytes; a mixture of experts with a hundred thousand tensors takes a third of it
_START_OVER = "put a copy of it back, or start over with checkpoint.resume=never"
NO_FILE = (errno.EINVAL, errno.EISDIR)  # of a pipe, a device or a folder: nothing that a run wrote


class DamagedManifest(UsageError):
    """Reports a manifest that was read and is not what was written."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(directory: Path, manifest: Manifest, *, keep: bool = False, amends: bool = False) -> None:
    """Replaces the manifest in one step and returns when it is on stable storage. `keep`: the old one is kept as the one
    before. `amends`: it says more of the same state, so older ones stay. Raises FuyouError for a manifest that `read` would
    refuse: the run can still resume from the state before."""
    path, text = directory / NAME, text_of(manifest)
    if len(text) > LARGEST or has_too_many_values(text):
        raise FuyouError(
            f"{path} would have {len(text):,} bytes, which is more than fuyou can read back: nothing is committed",
            hint="the model has more tensors than the state of a run can name",
        )
    try:
        write_own(directory / _NEW, [text.encode()])
        if keep:
            _set_aside(path, directory)
        elif not amends:
            for name in (BEFORE, DAMAGED):
                (directory / name).unlink(missing_ok=True)
        (directory / _NEW).replace(path)
        sync_directory(directory)
    except OSError as error:
        raise failed_writing(path, error) from error


def text_of(manifest: Manifest) -> str:
    """Writes one line per key, and the digest of all others last."""
    content = {"fuyou_store": VERSION, **asdict(manifest)}
    if manifest.share is None:
        del content["share"]  # a store that holds all of a model says nothing of ranks
    body = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(content[key])}" for key in sorted(content))
    return f'{body}{_DIGEST}"{_digest(body)}"\n}}\n'


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _set_aside(path: Path, directory: Path) -> None:
    """Gives the manifest its second name in one step. If links are refused it is moved instead, and `newest` finds it there."""
    new = directory / _NEW_BEFORE
    new.unlink(missing_ok=True)
    try:
        os.link(path, new)
    except OSError:
        path.replace(directory / BEFORE)
    else:
        new.replace(directory / BEFORE)


def go_back(directory: Path, older: Manifest) -> None:
    """Makes the manifest before the newest again. The newest is kept aside."""
    if _readable_before(directory) != older:  # it was there a moment ago
        raise FuyouError(f"{directory}: the manifest of the state after step {older.step} cannot be read any more")
    try:
        with suppress(FileNotFoundError):
            (directory / NAME).replace(directory / DAMAGED)
        (directory / BEFORE).replace(directory / NAME)
        sync_directory(directory)
    except OSError as error:
        raise failed_writing(directory / NAME, error) from error


# ---- reading ---------------------------------------------------------------------------------------------------------


def found_in(directory: Path, *names: str) -> list[Path]:
    """Returns the folders with a file of these names: the folder itself if it has one, otherwise those in it. Raises
    UnreadableError if there is none, as far as can be seen, and not all can be seen."""
    if any(status_of(directory / name) is not None for name in names):
        return [directory]
    try:
        inside = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(directory, error) from None
    folders, hidden = [], None
    for folder in inside:  # of somebody else's folders beside a store nothing need be known
        try:
            folders += [folder] if any(status_of(folder / name) is not None for name in names) else []
        except UnreadableError as error:
            hidden = error
    if not folders and hidden is not None:
        raise hidden
    return folders


def written_at(directory: Path) -> float:
    """Returns when a manifest was written there last, in seconds since 1970; 0 if there is none."""
    statuses = (status_of(directory / name) for name in (NAME, BEFORE))
    return max((status.st_mtime for status in statuses if status is not None), default=0.0)


def newest(directory: Path) -> tuple[Manifest | None, str]:
    """Returns the manifest to resume from, and why it is not the newest one (empty if it is).

    Raises like `read`: a manifest that cannot be read now may be whole, so no older one takes its place.
    """
    first: DamagedManifest | None = None
    for name in (NAME, BEFORE):
        try:
            if (manifest := read(directory, name)) is None:
                continue
        except DamagedManifest as error:
            first = first or error
            continue
        if name == NAME:
            return manifest, ""
        return manifest, f"{directory / NAME} is gone" if first is None else first.message
    if first is not None:
        raise first
    return None, ""


def before(directory: Path, manifest: Manifest) -> Manifest | None:
    """Returns the state of the run before this one, whether its data is whole or not; None if there is none or it is
    unreadable."""
    older = _readable_before(directory)
    is_older = older is not None and older.run == manifest.run and older.step <= manifest.step and older != manifest
    return older if is_older else None


def _readable_before(directory: Path) -> Manifest | None:
    with suppress(UsageError):
        return read(directory, BEFORE)
    return None


def seals(directory: Path) -> tuple[bytes | None, ...]:
    """Returns how the manifests to resume from end: with their digests, so another one ends differently. Raises
    UnreadableError."""
    return tuple(_end(directory / name) for name in (NAME, BEFORE))


def _end(path: Path) -> bytes | None:
    try:
        descriptor = open_plain(path)
        try:
            return os.pread(descriptor, _SEAL, max(0, os.fstat(descriptor).st_size - _SEAL))
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, *NO_FILE):  # `read` says what is wrong with a folder that is none
            return None
        raise unreadable(path, error) from None


def read(directory: Path, name: str = NAME) -> Manifest | None:
    """Returns the manifest, or None if there is none. Raises DamagedManifest, UsageError if it is of another version, or
    UnreadableError if it cannot be read now."""
    path = directory / name
    if (status := status_of(directory)) is not None and not stat.S_ISDIR(status.st_mode):
        hint = "offload.dir and checkpoint.resume name folders"
        raise UsageError(f"{directory} cannot hold a store: it is a file", hint=hint)
    try:
        text = find_text(path, limit=LARGEST, hint=_START_OVER)
    except UsageError as error:
        cause = error.__context__
        if isinstance(cause, OSError) and cause.errno not in NO_FILE:
            raise unreadable(path, cause) from None
        raise DamagedManifest(error.message, hint=error.hint) from None
    return None if text is None else parsed(path, text)


def parsed(path: Path, text: str) -> Manifest:
    """Checks the digest, then the type of every value. That values fit together the digest stands for: a run wrote them."""
    try:
        content = object_in(path, text, names=True)
    except UsageError as error:
        raise DamagedManifest(error.message, hint=_START_OVER) from None
    version = content.pop("fuyou_store", None)
    body, _, _ = text.rpartition(_DIGEST)
    is_sealed = content.pop("digest", None) == _digest(body)
    if is_sealed and version in _UPGRADED:
        _upgrade(path, content)
    elif type(version) is not int or version != VERSION:
        kind = UsageError if is_sealed else DamagedManifest
        raise kind(f"{path} is not a manifest of version {VERSION}", hint="another version of fuyou wrote it")
    if not is_sealed:
        raise DamagedManifest(f"{path} is damaged: its digest does not match its content", hint=_START_OVER)
    try:
        return from_json(Manifest, content, defaults=True)  # some of this version too do not name keys that came later
    except UsageError as error:
        raise DamagedManifest(f"{path} is damaged: {error.message}", hint=_START_OVER) from None


def _upgrade(path: Path, content: dict[str, Any]) -> None:
    """Has a manifest of a version before say what this one does. Raises UsageError for a store that is kept in another way than
    two extents of everything, or that an optimizer made which is gone."""
    mode, states, stages = content.pop("mode", "in_place"), content.pop("keep", 1), content.get("stages")
    refusal = ""
    if (mode, states) != ("in_place", 1):
        name = "redo" if mode == "redo" else f"snapshot with the last {states} states"
        refusal = f"a store of checkpoint.mode {name}, which this version of fuyou does not read"
    elif content.get("rule") == "sgd":
        refusal = "a run of optimizer.name sgd, which this version of fuyou does not have"
    if refusal:
        hint = "finish or export the run with the version that made it, or start over with checkpoint.resume=never"
        raise UsageError(f"{path} is of {refusal}", hint=hint)
    content.pop("due", None)
    for stage in stages if isinstance(stages, list) else ():
        if isinstance(stage, dict) and "params" in stage:
            stage.pop("gradients", None)
            stage |= {"trained": stage["params"], "frozen": None, **stage}
