"""Writes the log for programs: one JSON object per line and step.

Opening the log again removes a torn last line. A resumed run may log some steps again: the last record of a step is the valid
one. A run that starts over begins a new log and keeps the old one as log.jsonl.1, or under the next free number. A log of runs
that never took a step is gone on with.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

from ..core.disk import failed_writing
from ..core.errors import FuyouError, Interrupted, UsageError
from .report import BestReport, EvalReport, RunReport, SampleReport, Spread, StepReport
from .reporting import as_records

SCHEMA_VERSION = 1
_PIECE = 1 << 16  # bytes read at once to find where the last whole line ends
_BEFORE_STEPS = tuple(  # as `write` begins such lines
    f'{{"schema_version":{SCHEMA_VERSION},"event":"{event}"'.encode()
    for event in ("plan", "loaded", "changed", "failed", "stopped")
)
_EVENTS: dict[type, str] = {EvalReport: "eval", SampleReport: "sample", BestReport: "best"}


class JsonlLog:
    """Holds an open log. Raises UsageError if the file cannot be opened, FuyouError if it cannot be written. `anew`: another
    run wrote the log that is there."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        self.path, self._is_whole = path, True
        self._sent: dict[str, object] = {}  # where tokens were sent in the last step
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if anew:
                _set_aside(path)
            self._file: int | None = _opened(path)
        except OSError as error:
            raise UsageError(
                f"cannot open the log {path}: {error.strerror}", hint="choose another output_dir, or move that file away"
            ) from error

    def __enter__(self) -> JsonlLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Writes what ended the run, if it was not its end."""
        if error is not None and self._is_whole and self._file is not None:
            with suppress(FuyouError):  # as below
                self._experts()
            is_stop = isinstance(error, Interrupted) or not isinstance(error, Exception)
            message = error.message if isinstance(error, FuyouError) else f"{type(error).__name__}: {error}"
            message = "interrupted" if isinstance(error, KeyboardInterrupt) else message
            with suppress(FuyouError):  # the first error matters more
                self.write("stopped" if is_stop else "failed", {"message": message})
        try:
            self.close()
        except FuyouError:
            if error is None and self._is_whole:  # otherwise the first error matters more
                raise

    def step(self, report: StepReport) -> None:
        """Writes a finished step: every field but the timeline, which `busy` sums up, and a few numbers of where its tokens
        were sent. A model without a mixture has none of these."""
        fields = asdict(replace(report, timeline=(), sent={}))
        del fields["timeline"], fields["sent"]
        if report.router_aux_loss is None:
            del fields["router_aux_loss"]
        if report.sent:
            fields["experts"] = asdict(Spread.of(report.sent))
        self._sent = {"step": report.step, "sent": report.sent}
        self.write("step", fields)

    def _experts(self) -> None:
        """Writes how many tokens each expert got in the last step that was written."""
        if self._sent.get("sent"):
            self.write("experts", self._sent)
        self._sent = {}

    def evaluation(self, report: EvalReport | SampleReport | BestReport) -> None:
        """Writes the loss of one set of rows, what the model wrote after one prompt, or that its weights were kept."""
        self.write(_EVENTS[type(report)], asdict(report))

    def timeline(self, report: RunReport) -> None:
        """Writes when each resource was busy in the last step, to the microsecond."""
        places = [{**asdict(item), "begin": round(item.begin, 6), "end": round(item.end, 6)} for item in report.timeline]
        self.write("timeline", {"intervals": places, "stalls": report.timeline_stalls})

    def end(self, report: RunReport, *, moved: Mapping[str, int], saved_bytes: int) -> None:
        """Writes that the steps are over. `moved`: the store's bytes from the end of loading to the saved state, as the log of
        steps misses requests in flight at a step's end; saving writes what is kept in RAM (`saved_bytes`)."""
        self.timeline(report)
        self._experts()
        totals = {"written_total": report.written_total, "settled": report.settled}
        self.write("end", {**moved, **totals, "saved_bytes": saved_bytes, "compared": as_records(report.compared)})
        self._sync(self._file)

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        """Writes one line: schema_version, event, then `fields`. Numbers that are not finite become null."""
        record = {"schema_version": SCHEMA_VERSION, "event": event, **fields}
        line = json.dumps(finite(record), allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"
        data = line.encode(errors="backslashreplace")  # bytes of a path that are not UTF-8: as `json` writes them
        if self._file is None:
            raise ValueError(f"the log {self.path} is closed")
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._is_whole = False  # its last line may be torn
            raise failed_writing(self.path, error) from error

    def close(self) -> None:
        """Puts everything on stable storage. Closing twice is fine."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            self._sync(file)
        finally:
            os.close(file)

    def _sync(self, file: int | None) -> None:
        assert file is not None, "a log that is written to is open"
        try:
            os.fsync(file)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a pipe or a device has no storage to sync
                raise failed_writing(self.path, error) from error


def holds_a_run(path: Path) -> bool:
    """Tells whether a log holds more than runs that ended before their first step."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return any(not line.startswith(_BEFORE_STEPS) for line in file)


def read_log(path: Path) -> list[dict[str, object]]:
    """Returns every whole record of the log, in order. A torn last line is left out."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def _set_aside(path: Path) -> None:
    """Renames the log of an earlier run to the next free number."""
    if not holds_a_run(path):
        return
    older = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    path.rename(next(name for name in older if not name.exists()))


def _opened(path: Path) -> int:
    """Opens a plain file, not a link to one, and removes a torn last line."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link")
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file")
        _drop_torn_line(file)
    except BaseException:
        os.close(file)
        raise
    return file


def _drop_torn_line(file: int) -> None:
    """Cuts the file after its last newline."""
    whole = size = os.fstat(file).st_size
    while whole:
        begin = max(0, whole - _PIECE)
        found = os.pread(file, whole - begin, begin).rfind(b"\n") + 1
        whole = begin + found
        if found:
            break
    if whole < size:
        os.ftruncate(file, whole)


def finite(value: object) -> object:
    """Returns the value as JSON can have it: None for NaN and infinity, inside lists and mappings too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
