"""Reads a run's log: its plan, its steps, and how it ended. The log of a run that is still going is enough.

Somebody else may have written the log. A line that is no record of this layout is an error that names the line.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..core.disk import unusable
from ..core.errors import UsageError
from ..core.json_files import parsed
from ..core.paths import is_file
from ..core.plain_files import open_plain
from ..core.typed import from_json
from ..recipe.load import load_recipe
from ..recipe.named import find_recipe
from ..recipe.shipped import shipped_recipes
from .report import Busy, Compared, RunReport
from .reporting import medians
from .state import manifest as manifests
from .state.stored import Change

LOG = "log.jsonl"  # in an output_dir
LONGEST_LINE = 256 << 20  # bytes; only a step's timeline is long

Number = Annotated[float, Field(le=1e30)]
Seconds = Annotated[float, Field(le=1e10)]
Signed = Annotated[float, Field(ge=-1e30, le=1e30)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Holds what a plan keeps in one tier, in bytes."""

    what: str
    tier: Literal["gpu", "cpu", "ssd"]
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedDrive:
    """Holds the bytes a drive had written when the run began, and the bytes it is rated for. 0 means not known."""

    model: str
    rated_bytes: int
    used_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Promised:
    """Holds what the run's plan said. Logs of older versions hold less."""

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
    memory: tuple[Place, ...] = ()
    drives: tuple[RatedDrive, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Holds how evenly a step's tokens were sent to experts, from `Spread`."""

    entropy: Annotated[float, Field(ge=-1, le=2)]
    least: Annotated[float, Field(ge=0, le=1e9)]
    most: Annotated[float, Field(ge=0, le=1e9)]
    unused: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SentTo:
    """Holds how many tokens of a step each expert got, by mixture."""

    step: Annotated[int, Field(ge=1)]
    sent: dict[str, tuple[Annotated[int, Field(ge=0, le=2**53)], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Holds the figures of one step from `StepReport`. None means that a figure was not finite."""

    step: Annotated[int, Field(ge=1)]
    loss: Number | None
    lr: Number
    grad_norm: Number | None
    batch_tokens: int
    seconds: Seconds
    ram_peak: int
    read_bytes: int
    written_bytes: int
    stalls: dict[str, Seconds]
    skipped: str = ""
    busy: dict[str, Seconds]
    experts: Experts | None = None  # of a mixture
    router_aux_loss: Number | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Holds one evaluation of one set from `EvalReport`. None means that a figure was not finite."""

    step: Annotated[int, Field(ge=0)]
    name: str
    loss: Number | None
    perplexity: Annotated[float, Field(ge=0)] | None
    tokens: int
    rows: int
    seconds: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Holds what the model wrote after one of the fixed prompts, from `SampleReport`."""

    step: Annotated[int, Field(ge=0)]
    number: Annotated[int, Field(ge=1)]
    prompt: str
    text: str
    tokens: int
    ended: Literal["end", "length"]
    seconds: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Holds a copy of the weights of the lowest loss, from `BestReport`. With a `problem` it was not written."""

    step: Annotated[int, Field(ge=0)]
    loss: Number
    folder: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    what: str
    unit: Literal["bytes", "seconds"]
    predicted: Number
    measured: Number
    difference: Signed | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Holds what a log has only if the run ended well."""

    compared: tuple[_Line, ...] = ()
    written_total: int = 0
    settled: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failed:
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Interval:
    resource: str
    label: str
    begin: Signed
    end: Signed
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Holds when each resource was busy in the last step."""

    intervals: tuple[_Interval, ...]
    stalls: dict[str, Seconds]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Holds a run as its log shows it."""

    log: Path
    promised: Promised
    steps: tuple[Step, ...]  # in order; a repeated step counts as it was the last time
    report: RunReport
    ended: bool
    failed: str = ""  # the error that ended its last process
    stopped: bool = False  # by a person or a limit
    evaluations: tuple[Evaluated, ...] = ()  # in order; a repeated one counts as it was the last time
    samples: tuple[Sample, ...] = ()  # the same
    best: Best | None = None  # the last one, kept or not
    sent: SentTo | None = None  # in the last step of a process that was not killed
    changes: tuple[Change, ...] = ()  # of the recipe, with which it went on

    @property
    def typical(self) -> Sequence[Step]:
        """Returns the steps without the first of this process, if there are others."""
        return self.steps[1:] or self.steps


class _Reading:
    """Takes one record after another."""

    def __init__(self) -> None:
        self.promised, self.end, self.timeline = Promised(), End(), Timeline(intervals=(), stalls={})
        self.steps: list[Step] = []
        self.evaluations: dict[tuple[int, str], Evaluated] = {}
        self.samples: dict[tuple[int, int], Sample] = {}
        self.best: Best | None = None
        self.sent: SentTo | None = None
        self.changes: list[Change] = []
        self.ended, self.failed, self.stopped = False, "", False

    def take(self, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event == "plan":
            self.promised, self.ended, self.failed, self.stopped = _of(Promised, record), False, "", False
        elif event == "step":
            step = _of(Step, record)
            self.end = End()
            while self.steps and self.steps[-1].step >= step.step:  # a resumed run goes back to the saved step
                self.steps.pop()
            self.steps.append(step)
            _go_back(self.evaluations, step.step)
            _go_back(self.samples, step.step)
        elif event == "eval":
            found = _of(Evaluated, record)
            _go_back(self.evaluations, found.step + 1)
            self.evaluations[found.step, found.name] = found
        elif event == "sample":
            sample = _of(Sample, record)
            _go_back(self.samples, sample.step + 1)
            self.samples[sample.step, sample.number] = sample
        elif event == "changed":
            self.changes.append(_of(Change, record))
        elif event == "best":
            self.best = _of(Best, record)
        elif event == "experts":
            self.sent = _of(SentTo, record)
        elif event == "timeline":
            timeline = _of(Timeline, record)
            self.timeline = timeline if timeline.intervals else self.timeline
        elif event == "end":
            end, self.ended = _of(End, record), True
            self.end = end if end.compared else self.end  # a finished run that is begun again measures nothing
        elif event == "failed":
            self.failed = _of(_Failed, record).message
        elif event == "stopped":
            self.stopped = True


def _go_back(found: dict[tuple[int, Any], Any], step: int) -> None:
    """Removes what was found at `step` and behind it: a resumed run finds it anew."""
    while found and (last := next(reversed(found)))[0] >= step:
        del found[last]


def read_history(log: Path) -> History:
    """Reads a log. Raises UsageError if it does not exist, has no step, or has a line that is no record."""
    reading = _read(log)
    if not reading.steps:
        raise _without_steps(log, reading)
    return History(
        log=log,
        promised=reading.promised,
        steps=tuple(reading.steps),
        report=_report(reading, log),
        ended=reading.ended,
        failed=reading.failed,
        stopped=reading.stopped,
        evaluations=tuple(reading.evaluations.values()),
        samples=tuple(reading.samples.values()),
        best=reading.best,
        sent=reading.sent,
        changes=tuple(reading.changes),
    )


def _without_steps(log: Path, reading: _Reading) -> UsageError:
    """Says why there is nothing to report."""
    if reading.failed:
        told = f"an error ended its run before the first step: {' '.join(reading.failed.split())}"
        return UsageError(f"{log}: {told}", hint="what to do is in its output; then run the recipe again")
    if reading.stopped:
        return UsageError(f"{log}: its run was stopped before the first step", hint="run the recipe again")
    return UsageError(f"{log} has no step yet", hint="a run logs its first figures after its first step")


def read_promised(log: Path) -> Promised:
    """Reads what the plan of the last run in a log said. Raises UsageError as `read_history` does, but needs no step."""
    return _read(log).promised


def saved_of(output_dir: Path) -> Path | None:
    """Returns the store of the last run in an output_dir, wherever its recipe put it. None: it is not there, or not known."""
    stores = {path.parent for path in output_dir.glob(f"store/*/{manifests.NAME}")}
    with suppress(UsageError):
        told = Path(read_promised(output_dir / LOG).store)
        stores = {told} if is_file(told / manifests.NAME) else stores
    return min(stores) if len(stores) == 1 else None


def _read(log: Path) -> _Reading:
    reading = _Reading()
    for number, line in enumerate(_lines(log), start=1):
        try:
            record = parsed(line.decode(), names=True)
            if not isinstance(record, dict):
                raise UsageError("this line is not a JSON object")
            reading.take(record)
        except (UsageError, UnicodeDecodeError) as error:
            told = error.message if isinstance(error, UsageError) else "this line is not UTF-8"
            raise UsageError(
                f"{log}:{number}: {told}", hint="this is not the log of a fuyou run, or somebody changed it"
            ) from None
    return reading


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


def _of(kind: Any, record: dict[str, Any]) -> Any:
    """Makes a `kind` of the keys that it needs. A newer version may write more keys."""
    return from_json(kind, {item.name: record[item.name] for item in fields(kind) if item.name in record}, defaults=True)


def _report(reading: _Reading, log: Path) -> RunReport:
    """Sums up the steps as the run itself does at its end."""
    steps, promised = reading.steps, reading.promised
    settled = min(reading.end.settled, len(steps))
    typical = steps[-settled:] if settled else steps[1:] or steps
    rate = sum(step.batch_tokens for step in typical) / (sum(step.seconds for step in typical) or 1e-9)
    stalls: dict[str, float] = {}
    for step in steps:
        for cause, waited in step.stalls.items():
            stalls[cause] = stalls.get(cause, 0.0) + waited
    report = RunReport(
        steps=len(steps),
        settled=settled,
        seconds=sum(step.seconds for step in steps),
        losses=tuple(math.nan if step.loss is None else step.loss for step in steps),
        tokens_per_second=rate,
        tflops=(6.0 * promised.parameters - 2.0 * promised.frozen_parameters) * rate / 1e12,
        ram_budget=promised.budget,
        ram_peak=max(step.ram_peak for step in steps),
        step_seconds=statistics.median(step.seconds for step in typical),
        read_per_step=round(statistics.median(step.read_bytes for step in typical)),
        written_per_step=round(statistics.median(step.written_bytes for step in typical)),
        written_total=reading.end.written_total or sum(step.written_bytes for step in steps),
        stalls=stalls,
        timeline=tuple(Busy(**asdict(item)) for item in reading.timeline.intervals),
        timeline_stalls=reading.timeline.stalls,
        output_dir=str(log.parent),
        busy=medians([step.busy for step in typical]),
        assumed=promised.assumed,
    )
    return replace(report, compared=_compared(report, reading))


def _compared(report: RunReport, reading: _Reading) -> tuple[Compared, ...]:
    """Pairs each predicted figure with the measured one: as the run did at its end, or from what its plan says of a step."""
    promised = reading.promised
    lines = [
        ("  " * line.what.startswith("for ") + line.what, line.unit, line.predicted, line.measured)
        for line in reading.end.compared
    ]
    if not lines and promised.predicted_step_seconds:
        lines = [
            ("peak RAM", "bytes", promised.predicted_cpu_peak, report.ram_peak),
            ("step", "seconds", promised.predicted_step_seconds, report.step_seconds),
            ("ssd read", "bytes", promised.predicted_read_per_step, report.read_per_step),
            ("ssd written", "bytes", promised.predicted_written_per_step, report.written_per_step),
        ]
    return tuple(Compared(what=what, unit=unit, predicted=plan, measured=run) for what, unit, plan, run in lines)


def find_log(source: Path) -> Path:
    """Returns the log of an output_dir or of a recipe, or the file itself."""
    if source.is_dir():
        return source / LOG
    if source.suffix not in (".yaml", ".yml") and str(source) not in shipped_recipes():
        return source
    return Path(load_recipe(*find_recipe(str(source), ())).recipe.output_dir).expanduser() / LOG
