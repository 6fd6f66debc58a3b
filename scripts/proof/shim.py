"""Builds the preloaded library of `shim_*.c` and reads its log: every call on files below a folder, in order."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SOURCES = sorted(Path(__file__).parent.glob("shim_*.c"))
_CALLS = ("", "open", "create", "read", "write", "flush", "flush folder", "rename", "link", "unlink", "resize", "allocate",
          "mkdir")  # fmt: skip
_HEADER = struct.Struct("<5Q")  # capacity, clock, count, names, faults
_NAMES, _NAME_SIZE = 512, 400
_RECORDS_AT = _HEADER.size + _NAMES * _NAME_SIZE
_RECORD = np.dtype([
    ("begin", "<u8"), ("end", "<u8"), ("time_ns", "<u8"), ("call", "<u4"), ("file", "<u4"), ("other", "<u4"),
    ("fault", "<u4"), ("offset", "<u8"), ("size", "<u8"), ("result", "<i8"), ("bytes_at", "<u8"),
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """Describes one call. `end` is 0 if the process was killed inside it; `begin` and `end` count calls that began or ended."""

    begin: int
    end: int
    seconds: float  # on the monotonic clock, when it began
    what: str
    file: str  # below the folder
    other: str  # a rename's or link's new name
    offset: int
    size: int
    result: int  # or -errno
    bytes_at: int
    fault: bool = False  # one was done to it

    @property
    def is_done(self) -> bool:
        return self.end > 0 and self.result >= 0


def build(folder: Path) -> Path:
    """Compiles the library and returns its path."""
    made = folder / "shim.so"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    command = ["cc", *flags, "-o", str(made), *map(str, _SOURCES), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return made


class Trace:
    """Holds the log of one process over `root`."""

    def __init__(self, path: Path, root: Path, *, capacity: int = 1 << 17) -> None:
        self.path, self.root = path, root
        with path.open("wb") as file:
            file.truncate(_RECORDS_AT + capacity * _RECORD.itemsize)
            file.seek(0)
            file.write(_HEADER.pack(capacity, 0, 0, 0, 0))

    def environment(self, *, fault: str = "", kept: Path | None = None, kept_of: str = "") -> dict[str, str]:
        """Returns the environment for the process. `fault`: FIRST:LAST:HOW; `kept`: the file for written bytes, or for those
        written to files whose names end with `kept_of`."""
        found = {"FUYOU_SHIM_ROOT": str(self.root), "FUYOU_SHIM_TRACE": str(self.path)}
        if fault:
            found["FUYOU_SHIM_FAULT"] = fault
        if kept is not None:
            found["FUYOU_SHIM_BYTES"] = str(kept)
        if kept_of:
            found["FUYOU_SHIM_BYTES_OF"] = kept_of
        return found

    @property
    def faults(self) -> int:
        """Returns how many faults were done so far."""
        return self._header()[4]

    def calls(self, *, last: int | None = None) -> list[Call]:
        """Returns the calls that have begun, or the last so many of them, in the order in which the log has them."""
        capacity, _, count, _, _ = self._header()
        if count > capacity:
            raise RuntimeError(f"{count} calls, and room for {capacity}")
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            first = 0 if last is None else max(0, count - last)
            records = np.frombuffer(mapped, dtype=_RECORD, count=count, offset=_RECORDS_AT)[first:].copy()
            names_count = self._header()[3]  # asked last: a call that was begun meanwhile may be of a new file
            texts = [_name(mapped, number) for number in range(names_count)]
        return [_call(record, texts) for record in records if record["begin"]]

    def _header(self) -> tuple[int, int, int, int, int]:
        with self.path.open("rb") as file:
            return _HEADER.unpack(file.read(_HEADER.size))  # type: ignore[return-value]


def _name(mapped: mmap.mmap, number: int) -> str:
    begin = _HEADER.size + number * _NAME_SIZE
    return mapped[begin : begin + _NAME_SIZE].split(b"\0", 1)[0].decode()


def _call(record: np.void, names: list[str]) -> Call:
    what = _CALLS[int(record["call"])]
    pair = what in ("rename", "link")
    return Call(
        begin=int(record["begin"]), end=int(record["end"]), seconds=float(record["time_ns"]) / 1e9, what=what,
        file=names[int(record["file"])], other=names[int(record["other"])] if pair else "", offset=int(record["offset"]),
        size=int(record["size"]), result=int(record["result"]), bytes_at=int(record["bytes_at"]), fault=bool(record["fault"]),
    )  # fmt: skip


def namings(calls: list[Call], manifest: str) -> Iterator[tuple[Call, Call]]:
    """Yields every time `manifest` (a name's end) was replaced and its folder flushed after that: both calls."""
    renamed: Call | None = None
    for call in sorted(calls, key=lambda call: call.begin):
        if call.what == "rename" and call.other.endswith(manifest) and call.is_done:
            renamed = call
        elif renamed is None or call.what != "flush folder" or call.file != renamed.other.rpartition("/")[0]:
            continue
        elif call.is_done and call.begin > renamed.end:
            yield renamed, call
            renamed = None


def preloaded(environment: dict[str, str], library: Path) -> dict[str, str]:
    """Returns the environment of a process that has the library in it."""
    before = os.environ.get("LD_PRELOAD", "")
    return {**environment, "LD_PRELOAD": f"{library}:{before}" if before else str(library)}
