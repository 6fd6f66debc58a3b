"""A run's log, log.jsonl: one JSON object per line and step, for programs. The run writes it; `fuyou report` reads it back.

Opening the log again removes a torn last line. A resumed run may log some steps again: the last record of a step is the valid
one. A run that starts over begins a new log and keeps the old one as log.jsonl.1, or under the next free number. A log of runs
that never took a step is gone on with.

The log of a run that is still going can be read. Somebody else may have written it: a line that is no record of this layout is
an error that names the line.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from ..core.disk import failed_writing, unusable
from ..core.errors import FuyouError, Interrupted, UsageError
from ..core.json_files import from_json, parsed
from ..core.paths import is_file, open_plain
from ..recipe.load import load_recipe
from ..recipe.named import find_recipe, shipped_recipes
from .report import (
    BestReport,
    Busy,
    Compared,
    EvalReport,
    RankFigures,
    RunReport,
    SampleReport,
    Seconds,
    StepReport,
    Steps,
    run_report,
)
from .state import manifest as manifests
from .state.manifest import Change
from .state.store_folders import newest_saved, of_any_count, unranked

LOG = "log.jsonl"  # in an output_dir
SCHEMA_VERSION = 1
LONGEST_LINE = 256 << 20  # bytes; only a step's timeline is long
_PIECE = 1 << 16  # bytes read at once to find where the last whole line ends
_BEFORE_STEPS = tuple(  # as `write` begins such lines
    f'{{"schema_version":{SCHEMA_VERSION},"event":"{event}"'.encode()
    for event in ("plan", "loaded", "changed", "failed", "stopped")
)
_EVENTS: dict[type, str] = {EvalReport: "eval", SampleReport: "sample", BestReport: "best"}
LogRecord = TypeVar("LogRecord")

# ---- writing -----------------------------------------------------------------------------------------------------------


class JsonlLog:
    """An open log. Raises UsageError if the file cannot be opened, FuyouError if it cannot be written. `anew`: another
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
        """Writes a finished step: every field but the timeline, which `busy` sums up, and where its tokens were sent, which
        `experts` sums up. A model without a mixture has none of these."""
        record = asdict(replace(report, timeline=(), sent={}))
        empty = {"timeline", "sent"} | {name for name in ("router_aux_loss", "experts") if record[name] is None}
        self._sent = {"step": report.step, "sent": report.sent}
        self.write("step", {name: value for name, value in record.items() if name not in empty})

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
        intervals = [{**asdict(item), "begin": round(item.begin, 6), "end": round(item.end, 6)} for item in report.timeline]
        self.write("timeline", {"intervals": intervals, "stalls": report.timeline_stalls})

    def end(self, report: RunReport, *, moved: Mapping[str, int], saved_bytes: int) -> None:
        """Writes that the steps are over. `moved`: the store's bytes from the end of loading to the saved state, as the log of
        steps misses requests in flight at a step's end; saving writes what is kept in RAM (`saved_bytes`)."""
        self.timeline(report)
        self._experts()
        totals: dict[str, object] = {"written_total": report.written_total, "settled": report.settled}
        if report.ranks:
            totals["ranks"] = [asdict(rank) for rank in report.ranks]
        self.write(
            "end", {**moved, **totals, "saved_bytes": saved_bytes, "compared": [line.as_data() for line in report.compared]}
        )
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
    """Returns whether a log holds more than runs that ended before their first step."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return any(not line.startswith(_BEFORE_STEPS) for line in file)


def read_log(path: Path) -> list[dict[str, object]]:
    """Returns every whole record of the log, in order. A torn last line is left out."""
    lines, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in lines.splitlines()]


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
    end = size = os.fstat(file).st_size
    while end:
        begin = max(0, end - _PIECE)
        line_end = os.pread(file, end - begin, begin).rfind(b"\n") + 1
        end = begin + line_end
        if line_end:
            break
    if end < size:
        os.ftruncate(file, end)


def finite(value: object) -> object:
    """Returns the value as JSON can have it: None for NaN and infinity, inside lists and mappings too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


# ---- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMemory:
    """What a plan keeps in one tier, in bytes."""

    what: str
    tier: Literal["gpu", "cpu", "ssd"]
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedDrive:
    """The bytes a drive had written when the run began, and the bytes it is rated for. 0 means not known."""

    model: str
    rated_bytes: int
    used_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedPlan:
    """What the run's plan said. Logs of older versions hold less."""

    budget: int = 0
    parameters: int = 0
    frozen_parameters: int = 0
    total_steps: int = 0
    choice: str = ""
    model: str = ""
    device: str = ""
    began: str = ""
    store: str = ""  # the first folder of its store
    store_on: tuple[str, ...] = ()  # its file system: what identifies it, and its name for people
    assumed: bool = False  # whether the plan's rates were assumed
    predicted_cpu_peak: int = 0
    predicted_gpu_peak: int = 0
    predicted_ssd_bytes: int = 0
    predicted_step_seconds: Seconds = 0.0
    predicted_read_per_step: int = 0
    predicted_written_per_step: int = 0
    memory: tuple[PlannedMemory, ...] = ()
    drives: tuple[RatedDrive, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTokens:
    """How many tokens of a step each expert got, by mixture."""

    step: Annotated[int, Field(ge=1)]
    sent: dict[str, tuple[Annotated[int, Field(le=2**53)], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedEnd:
    """What a log has only if the run ended well."""

    compared: tuple[dict[str, Any], ...] = ()  # `Compared.as_data`
    written_total: int = 0
    settled: int = 0
    ranks: tuple[RankFigures, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedTimeline:
    """When each resource was busy in the last step."""

    intervals: tuple[Busy, ...]
    stalls: dict[str, Seconds]


class History:
    """A run as its log shows it, record by record. A resumed run takes some steps again: the last ones count."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.plan, self._end, self._timeline = LoggedPlan(), LoggedEnd(), LoggedTimeline(intervals=(), stalls={})
        self.steps: list[StepReport] = []
        self._compared: tuple[Compared, ...] = ()
        self._evaluations: dict[tuple[int, str], EvalReport] = {}  # by step and name
        self._samples: dict[tuple[int, int], SampleReport] = {}  # by step and number
        self.best: BestReport | None = None  # the last one, kept or not
        self.sent: ExpertTokens | None = None  # in the last step of a process that was not killed
        self.changes: list[Change] = []  # of the recipe, with which it went on
        self.ended, self.stopped, self.failed = False, False, ""  # how its last process ended: well, by request, by what error

    @property
    def evaluations(self) -> list[EvalReport]:
        return list(self._evaluations.values())

    @property
    def samples(self) -> list[SampleReport]:
        return list(self._samples.values())

    def take(self, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event == "plan":
            self.plan, self.ended, self.failed, self.stopped = _read_as(LoggedPlan, record), False, "", False
        elif event == "step":
            step = _read_as(StepReport, record)
            self._end, self._compared = LoggedEnd(), ()
            while self.steps and self.steps[-1].step >= step.step:  # a resumed run goes back to the saved step
                self.steps.pop()
            self.steps.append(step)
            _go_back(self._evaluations, step.step)
            _go_back(self._samples, step.step)
        elif event == "eval":
            evaluation = _read_as(EvalReport, record)
            _go_back(self._evaluations, evaluation.step + 1)
            self._evaluations[evaluation.step, evaluation.name] = evaluation
        elif event == "sample":
            sample = _read_as(SampleReport, record)
            _go_back(self._samples, sample.step + 1)
            self._samples[sample.step, sample.number] = sample
        elif event == "changed":
            self.changes.append(_read_as(Change, record))
        elif event == "best":
            self.best = _read_as(BestReport, record)
        elif event == "experts":
            self.sent = _read_as(ExpertTokens, record)
        elif event == "timeline":
            timeline = _read_as(LoggedTimeline, record)
            self._timeline = timeline if timeline.intervals else self._timeline
        elif event == "end":
            end, self.ended = _read_as(LoggedEnd, record), True
            if end.compared:  # a finished run that is begun again measures nothing
                self._end, self._compared = end, tuple(map(_compared_line, end.compared))
        elif event == "failed":
            self.failed = from_json(str, record.get("message"))
        elif event == "stopped":
            self.stopped = True

    @cached_property
    def report(self) -> RunReport:
        """Sums up the steps as the run itself does at its end. Read it once all records are taken."""
        plan, steps = self.plan, Steps(settling=max(0, len(self.steps) - self._end.settled), most=None)
        for step in self.steps:
            steps.add(step)
        report = run_report(
            steps,
            losses=[step.loss for step in self.steps],
            flops_per_token=6.0 * plan.parameters - 2.0 * plan.frozen_parameters,
            seconds=sum(step.seconds for step in self.steps),
            ram_budget=plan.budget,
            ram_peak=max(step.ram_peak for step in self.steps),
            written_total=self._end.written_total or sum(step.written_bytes for step in self.steps),
            output_dir=str(self.log.parent),
        )
        compared = self._compared
        if not compared and plan.predicted_step_seconds:
            pairs = (
                ("peak RAM", plan.predicted_cpu_peak, report.ram_peak),
                ("step", plan.predicted_step_seconds, report.step_seconds),
                ("ssd read", plan.predicted_read_per_step, report.read_per_step),
                ("ssd written", plan.predicted_written_per_step, report.written_per_step),
            )
            compared = tuple(
                Compared(what=what, unit="seconds" if what == "step" else "bytes", predicted=predicted, measured=measured)
                for what, predicted, measured in pairs
            )
        timeline, stalls = self._timeline.intervals, self._timeline.stalls
        return replace(
            report, timeline=timeline, timeline_stalls=stalls, assumed=plan.assumed, compared=compared, ranks=self._end.ranks
        )


def _read_as(kind: type[LogRecord], record: dict[str, Any]) -> LogRecord:
    """Makes a `kind` of the keys that it needs. A newer version may write more keys."""
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]  # all are dataclasses
    return from_json(kind, {name: record[name] for name in names if name in record}, defaults=True)


def _compared_line(record: dict[str, Any]) -> Compared:
    line = _read_as(Compared, record)
    return replace(line, what="  " * line.what.startswith("for ") + line.what)


def _go_back(reports: dict[tuple[int, Any], Any], step: int) -> None:
    """Removes reports of `step` and behind it: a resumed run makes them anew."""
    while reports and (last := next(reversed(reports)))[0] >= step:
        del reports[last]


def read_history(log: Path) -> History:
    """Reads a log. Raises UsageError if it does not exist, has no step, or has a line that is no record."""
    history = _read(log)
    if history.steps:
        return history
    if history.failed:
        why = f"an error ended its run before the first step: {' '.join(history.failed.split())}"
        raise UsageError(f"{log}: {why}", hint="what to do is in its output; then run the recipe again")
    if history.stopped:
        raise UsageError(f"{log}: its run was stopped before the first step", hint="run the recipe again")
    raise UsageError(f"{log} has no step yet", hint="a run logs its first figures after its first step")


def read_logged_plan(log: Path) -> LoggedPlan:
    """Reads what the plan of the last run in a log said. Raises UsageError as `read_history` does, but needs no step."""
    return _read(log).plan


def saved_of(output_dir: Path) -> Path | None:
    """Returns the store of the last run in an output_dir, wherever its recipe put it; of several ranks the first one's. None:
    it is not there, or not known."""
    stores = [path.parent for path in output_dir.glob(f"store/*/{manifests.NAME}")]
    with suppress(UsageError):
        logged = read_logged_plan(output_dir / LOG).store
        found = of_any_count(Path(logged)) if logged else []
        stores = [store for store in found if is_file(store / manifests.NAME)] or stores
    return newest_saved(stores) if len({*map(unranked, stores)}) == 1 else None


def _read(log: Path) -> History:
    history = History(log)
    for number, line in enumerate(_lines(log), start=1):
        try:
            record = parsed(line.decode(), names=True)
            if not isinstance(record, dict):
                raise UsageError("this line is not a JSON object")
            history.take(record)
        except (UsageError, UnicodeDecodeError) as error:
            why = error.message if isinstance(error, UsageError) else "this line is not UTF-8"
            raise UsageError(
                f"{log}:{number}: {why}", hint="this is not the log of a fuyou run, or somebody changed it"
            ) from None
    return history


def _lines(log: Path) -> Iterator[bytes]:
    """Yields whole lines. A line that a run is just writing, or that a crash cut short, is left out."""
    try:
        with os.fdopen(open_plain(log), "rb") as file:
            while line := file.readline(LONGEST_LINE):
                if line.endswith(b"\n"):
                    yield line
                elif len(line) >= LONGEST_LINE:
                    raise UsageError(f"{log}: a line has more than {LONGEST_LINE:,} bytes, which no log has")
    except FileNotFoundError:
        hint = "name a run's output_dir, its recipe or its log.jsonl; logging.backends must include jsonl"
        hint += ", and a run that was refused before it loaded has none"
        raise UsageError(f"{log} does not exist", hint=hint) from None
    except (OSError, ValueError) as error:
        raise unusable(f"{log} cannot be read: {getattr(error, 'strerror', None) or error}", error) from None


def find_log(source: Path) -> Path:
    """Returns the log of an output_dir or of a recipe, or the file itself."""
    if source.is_dir():
        return source / LOG
    if source.suffix not in (".yaml", ".yml") and str(source) not in shipped_recipes():
        return source
    return Path(load_recipe(*find_recipe(str(source), ())).recipe.output_dir).expanduser() / LOG
