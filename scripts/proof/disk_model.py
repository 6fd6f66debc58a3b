"""Draws what a disk may hold after a power cut, from the log of all that was done to one folder of it.

What was flushed is certain: a write that had ended when a flush of its file began, if that flush had ended. A write that had
merely begun is there, missing or torn. Names (made, renamed, linked, removed) are certain once their folder was flushed after
them. Of the other names a first part is there, in their order. A journal keeps the order of all names, but only the order
within one folder is promised, so both are drawn. A file's length follows the same rules: room set aside and a length cut are
there or not, and a missing write may still have made its file longer.

The log's clock decides what counts as begun or ended: every call takes a number when it begins and another when it ends.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .shim import Call

_SECTOR = 512
# Shares of the writes that were not flushed. One for each file after a cut: the files of a stripe are on drives of their own.
_WRITES_KEPT = (0.0, 0.1, 0.5, 0.9, 1.0)
_NAMES = ("create", "mkdir", "rename", "link", "unlink")
_LENGTHS = ("resize", "allocate")


class UnknownCall(Exception):
    """Says that the log has something that this model of a disk does not know."""


@dataclass(slots=True, eq=False)
class _File:
    """Holds what has been done to one file, under whatever names; `base` holds its content before."""

    base: Path | None = None
    done: list[Call] = field(default_factory=list)  # writes and changes of its length
    flushes: list[Call] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Folder:
    flushes: list[Call] = field(default_factory=list)


_Node = _File | _Folder


@dataclass(frozen=True, slots=True)
class _Named:
    """Describes a change of one folder's names: `gone` is no longer there, `new` is `node`."""

    call: Call
    folder: str
    gone: str
    new: str
    node: _Node | None


@dataclass(kw_only=True, slots=True)
class Left:
    """Counts what a cut did."""

    written: int = 0  # that was not flushed and is there
    torn: int = 0
    missing: int = 0
    names_missing: int = 0


def rebuild(root: Path, calls: Sequence[Call], kept: Path, *, at: int, draw: random.Random, base: Path | None = None) -> Left:
    """Fills `root`, an empty folder, with what a disk could hold after the power went at `at`. `calls`: the log of `root`, in
    order; `kept`: all bytes written; `base`: a copy of what was in `root` before."""
    history = _History(base)
    for call in calls:
        if call.begin <= at and not (call.end and call.result < 0):
            history.add(call)
    left = Left()
    names = _surviving(history, at, draw, left)
    with kept.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        made: dict[_File, Path] = {}
        for name, node in sorted(names.items()):  # a folder comes before what is in it
            path = root / name
            if not path.parent.is_dir():
                continue  # its folder's own name is missing
            if isinstance(node, _Folder):
                path.mkdir(mode=0o700)
            elif node in made:
                path.hardlink_to(made[node])
            else:
                _Written(path, node, content, at, draw, draw.choice(_WRITES_KEPT), left).make()
                made[node] = path
    return left


class _History:
    """Holds names and files as the process saw them, and every change of names in order."""

    def __init__(self, base: Path | None) -> None:
        self.base: dict[str, _Node] = {}
        self.folders: dict[str, _Folder] = {"": _Folder()}
        if base is not None:
            for path in sorted(base.rglob("*")):
                node: _Node = _Folder() if path.is_dir() else _File(base=path)
                self._appear(str(path.relative_to(base)), node, self.base)
        self.names: dict[str, _Node] = dict(self.base)
        self.changes: list[_Named] = []

    def _appear(self, path: str, node: _Node, names: dict[str, _Node]) -> None:
        names[path] = node
        if isinstance(node, _Folder):
            self.folders[path] = node

    def add(self, call: Call) -> None:
        if call.what in _NAMES:
            self._name(call)
        elif call.what == "write" or call.what in _LENGTHS:
            self._file(call.file).done.append(call)
        elif call.what == "flush":
            self._file(call.file).flushes.append(call)
        elif call.what == "flush folder":
            self.folders[call.file].flushes.append(call)

    def _name(self, call: Call) -> None:
        if call.what == "create" and call.file in self.names:
            if call.offset & os.O_TRUNC:
                self._file(call.file).done.append(call)
            return
        gone = call.file if call.what in ("rename", "unlink") else ""
        new = call.other if call.what in ("rename", "link") else "" if call.what == "unlink" else call.file
        if call.what == "create":
            node: _Node | None = _File()
        elif call.what == "mkdir":
            node = _Folder()
        else:
            node = self._file(call.file)
        folder = _folder_of(gone or new)
        if new and _folder_of(new) != folder:
            raise UnknownCall(f"{call.what} of {call.file} to {call.other}, in another folder")
        if gone and self.names.get(new) is node:
            return  # two names of one file: the kernel leaves both
        if gone:
            del self.names[gone]
        if new:
            assert node is not None
            self._appear(new, node, self.names)
        self.changes.append(_Named(call, folder, gone, new, node if new else None))

    def _file(self, name: str) -> _File:
        node = self.names.get(name)
        if not isinstance(node, _File):
            raise UnknownCall(f"{name} is not a file that was made")
        return node


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _is_sure(call: Call, flushes: Iterable[Call], at: int) -> bool:
    """Tells whether a flush that had ended began after the call had ended."""
    return any(call.end and call.end < flush.begin and flush.end <= at and flush.is_done for flush in flushes)


def _surviving(history: _History, at: int, draw: random.Random, left: Left) -> dict[str, _Node]:
    """Returns the names that are found. Whole folders may be missing, and files whose folder is."""
    changes = history.changes
    sure = [_is_sure(change.call, history.folders[change.folder].flushes, at) for change in changes]
    together = draw.random() < 0.5
    groups = [changes] if together else [[c for c in changes if c.folder == name] for name in sorted(history.folders)]
    kept: set[_Named] = set()
    number = {change: place for place, change in enumerate(changes)}
    for group in groups:
        least = max((place for place, change in enumerate(group, 1) if sure[number[change]]), default=0)
        kept |= set(group[: draw.randint(least, len(group))])
    names = dict(history.base)
    for change in changes:
        if change not in kept:
            left.names_missing += 1
            continue
        names.pop(change.gone, None)
        if change.node is not None:
            names[change.new] = change.node
    return names


class _Written:
    """Writes one file again."""

    def __init__(
        self, path: Path, node: _File, content: mmap.mmap, at: int, draw: random.Random, share: float, left: Left
    ) -> None:
        self.path, self.node, self.content, self.at, self.draw, self.share, self.left = (
            path, node, content, at, draw, share, left,
        )  # fmt: skip
        self.descriptor = -1

    def make(self) -> None:
        if self.node.base is not None:
            shutil.copyfile(self.node.base, self.path)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            ends = [flush.begin for flush in self.node.flushes if flush.end <= self.at and flush.is_done]
            flushed = max(ends, default=0)
            for call in self.node.done:
                self._do(call, is_sure=0 < call.end < flushed)
        finally:
            os.close(self.descriptor)

    def _do(self, call: Call, *, is_sure: bool) -> None:
        if call.what == "write":
            self._write(call, is_sure=is_sure)
        elif is_sure or self.draw.random() < 0.5:
            if call.what == "allocate":
                self._reach(call.offset + call.size)
            else:  # cut to a length, or to nothing as it was opened
                os.ftruncate(self.descriptor, call.size if call.what == "resize" else 0)

    def _reach(self, size: int) -> None:
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)

    def _write(self, call: Call, *, is_sure: bool) -> None:
        size = call.result if call.end else call.size
        luck = self.draw.random()
        if is_sure or luck < self.share:
            self.left.written += not is_sure
            self._put(call, 0, size)
            return
        if self.draw.random() < 0.5:
            self._reach(call.offset + size)
        if luck < (1 + self.share) / 2:
            self.left.missing += 1
            return
        self.left.torn += 1
        sectors = size // _SECTOR
        part = self.draw.randint(0, sectors) * _SECTOR
        first = 0 if size % _SECTOR or self.draw.random() < 0.5 else size - part
        self._put(call, first, part)

    def _put(self, call: Call, first: int, size: int) -> None:
        begin, done = call.bytes_at + first, 0
        while done < size:
            piece = self.content[begin + done : begin + size]
            done += os.pwrite(self.descriptor, piece, call.offset + first + done)
