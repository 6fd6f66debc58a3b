"""Reads and writes the manifest of a run's store: which extents hold which generation, and which step the run has reached.

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
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from ...core.disk import failed_writing, status_of, sync_directory, unreadable
from ...core.errors import FuyouError, UnreadableError, UsageError
from ...core.json_files import find_text, from_json, has_too_many_values, object_in
from ...core.paths import write_own
from ...spec.plan import Numerics
from .stored import Evaluated, Manifest, StoredStage

NAME = "manifest.json"
BEFORE = "manifest.before.json"  # of the commit before
DAMAGED = "manifest.damaged.json"  # was the newest, until the run fell back to an older one
COMPANIONS = "companions"  # the folder beside it with what an export needs besides weights
VERSION = 8
_DIVISION = ("padding", "width_step", "document_step", "router_aux_loss")  # numerics that some of this version do not name
_UPGRADED = (5, 6, 7)  # versions before; in the first, every parameter of a stage was trained
_NEW = ".manifest.new"  # fixed names: what a killed run leaves is written over by the next
_NEW_BEFORE = ".manifest.before.new"
EVERY_NAME = (NAME, BEFORE, DAMAGED)  # names of manifests
BESIDE = (BEFORE, DAMAGED, _NEW, _NEW_BEFORE)  # other files that may be beside a manifest
_DIGEST = ',\n"digest": '
LARGEST = 64 << 20  # bytes; a mixture of experts with a hundred thousand tensors takes a third of it
_START_OVER = "put a copy of it back, or start over with checkpoint.resume=never"
NO_FILE = (errno.EINVAL, errno.EISDIR)  # of a pipe, a device or a folder: nothing that a run wrote


class DamagedManifest(UsageError):
    """Reports a manifest that was read and is not what was written."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(directory: Path, manifest: Manifest, *, keep: bool = False) -> None:
    """Replaces the manifest in one step and returns when it is on stable storage. `keep`: the old one is kept as the one
    before."""
    path, text = directory / NAME, _text(manifest)
    _refuse_unreadable(path, text)
    try:
        write_own(directory / _NEW, [text.encode()])
        if keep:
            _set_aside(path, directory)
        else:
            for name in (BEFORE, DAMAGED):
                (directory / name).unlink(missing_ok=True)
        (directory / _NEW).replace(path)
        sync_directory(directory)
    except OSError as error:
        raise failed_writing(path, error) from error


def amend(directory: Path, manifest: Manifest) -> None:
    """Replaces the newest manifest by one of the same state that says more of its run. Older ones stay."""
    path, text = directory / NAME, _text(manifest)
    _refuse_unreadable(path, text)
    try:
        write_own(directory / _NEW, [text.encode()])
        (directory / _NEW).replace(path)
        sync_directory(directory)
    except OSError as error:
        raise failed_writing(path, error) from error


def _text(manifest: Manifest) -> str:
    """Writes one line per key, and the digest of all others last."""
    content = {"fuyou_store": VERSION, **asdict(manifest)}
    body = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(content[key])}" for key in sorted(content))
    return f'{body}{_DIGEST}"{_digest(body)}"\n}}\n'


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _refuse_unreadable(path: Path, text: str) -> None:
    """Raises FuyouError for a manifest that `read` would refuse. The run can still resume from the state before."""
    if len(text) > LARGEST or has_too_many_values(text):
        raise FuyouError(
            f"{path} would have {len(text):,} bytes, which is more than fuyou can read back: nothing is committed",
            hint="the model has more tensors than the state of a run can name",
        )


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
    found, hidden = [], None
    for folder in inside:  # of somebody else's folders beside a store nothing need be known
        try:
            found += [folder] if any(status_of(folder / name) is not None for name in names) else []
        except UnreadableError as error:
            hidden = error
    if not found and hidden is not None:
        raise hidden
    return found


def newest(directory: Path) -> tuple[Manifest | None, str]:
    """Returns the manifest to resume from, and why it is not the newest one (empty if it is).

    Raises like `read`: a manifest that cannot be read now may be whole, so no older one takes its place.
    """
    first: DamagedManifest | None = None
    for name in (NAME, BEFORE):
        try:
            if (found := read(directory, name)) is None:
                continue
        except DamagedManifest as error:
            first = first or error
            continue
        if name == NAME:
            return found, ""
        return found, f"{directory / NAME} is gone" if first is None else first.message
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
    return None if text is None else _parsed(path, text)


def _parsed(path: Path, text: str) -> Manifest:
    """Checks the digest, then the type of every value. That values fit together the digest stands for: a run wrote them."""
    try:
        content = object_in(path, text, names=True)
    except UsageError as error:
        raise DamagedManifest(error.message, hint=_START_OVER) from None
    version = content.pop("fuyou_store", None)
    body, _, _ = text.rpartition(_DIGEST)
    is_sealed = content.pop("digest", None) == _digest(body)
    if is_sealed and version in _UPGRADED:
        version = _upgraded(path, content)
    if type(version) is not int or version != VERSION:
        kind = UsageError if is_sealed else DamagedManifest
        raise kind(f"{path} is not a manifest of version {VERSION}", hint="another version of fuyou wrote it")
    if not is_sealed:
        raise DamagedManifest(f"{path} is damaged: its digest does not match its content", hint=_START_OVER)
    content.setdefault("untouched", None)  # nor these parts
    content.setdefault("evaluated_before", [])
    content.setdefault("peak_after_warmup", False)
    content.setdefault("settings", None)
    content.setdefault("changes", [])
    if isinstance(numerics := content.get("numerics"), dict):  # those of before there was a choice
        content["numerics"] = {**{key: _usual(Numerics)[key] for key in _DIVISION}, **numerics}
    if isinstance(evaluated := content.get("evaluated"), dict):  # some of this version do not name the set
        content["evaluated"] = {**_usual(Evaluated), **evaluated}
    try:
        return from_json(Manifest, content)
    except UsageError as error:
        raise DamagedManifest(f"{path} is damaged: {error.message}", hint=_START_OVER) from None


def _upgraded(path: Path, content: dict[str, Any]) -> int:
    """Adds what a version before did not say; returns the version it is of then. Raises UsageError for a store that is kept in
    another way than two extents of everything."""
    mode, states, stages = content.pop("mode", "in_place"), content.pop("keep", 1), content.get("stages")
    if (mode, states) != ("in_place", 1):
        name = "redo" if mode == "redo" else f"snapshot with the last {states} states"
        raise UsageError(
            f"{path} is of a store of checkpoint.mode {name}, which this version of fuyou does not read",
            hint="finish or export the run with the version that made it, or start over with checkpoint.resume=never",
        )
    if content.get("rule") == "sgd":
        raise UsageError(
            f"{path} is of a run of optimizer.name sgd, which this version of fuyou does not have",
            hint="finish or export the run with the version that made it, or start over with checkpoint.resume=never",
        )
    content.pop("due", None)
    for stage in stages if isinstance(stages, list) else ():
        if isinstance(stage, dict) and "params" in stage:
            stage.pop("gradients", None)
            stage |= {"trained": stage["params"], "frozen": None, **_usual(StoredStage), **stage}
    content |= {**_usual(Manifest), **content}
    return VERSION


def _usual(kind: type[Any]) -> dict[str, Any]:
    """Returns the values of the keys that came later."""
    return {item.name: item.default for item in fields(kind) if item.default is not MISSING}
