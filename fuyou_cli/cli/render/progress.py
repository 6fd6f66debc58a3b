"""Shows the progress of a run, a live block of lines on a terminal, one plain line per step elsewhere; and that of a download
or an export, a bar on a terminal, elsewhere a line from time to time.

The block never loses a line, and fields have room to grow, so nothing jumps. Between reports only the clock and the share of
the running step change.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from fuyou_cli.core.json_files import one_line, printable
from fuyou_cli.core.units import GiB, duration, gb
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.report import BestReport, EvalReport, SampleReport, StepReport

from ..console import status_console
from .charts import worth_saying
from .theme import bar, encodable, speed, symbols, tera

LINE = 100  # columns of a plain line
RECENT_STEPS = 20  # steps whose mean gives the pace
MIN_STEP_SECONDS = 1e-9
_NAME = 24  # characters of the name of a set of rows
_SAMPLE_LINES = 3  # of what the model wrote at most; the log has all of it
_INDENT = "    "


class RunDisplay(AbstractContextManager["RunDisplay"]):
    """Shows every `StepReport` of one run inside its context.

    `resumed` counts the steps done before this process: the bar starts there. `verbose` adds traffic and waits. `clock` gives
    seconds since the epoch.
    """

    def __init__(
        self,
        console: Console,
        *,
        total_steps: int,
        plan: Plan,
        resumed: int = 0,
        verbose: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._console = console
        self._total = total_steps
        self._plan = plan
        self._verbose = verbose
        self._clock = clock
        self._done = resumed
        self._pace: list[float] = []  # seconds of recent steps, the warm-up step left out
        self._written = 0
        self._report: StepReport | None = None
        self._since = clock()
        self._live: Live | None = None
        self._rows = 0  # most lines of the block so far: it never shrinks

    def __enter__(self) -> RunDisplay:
        self._since = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Text printed on stdout moves above the block when both are the terminal, and stays out of it in a pipe.
            self._live = Live(
                get_renderable=self._block,
                console=self._console,
                refresh_per_second=4,
                vertical_overflow="crop",
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *ended: object) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, report: StepReport) -> None:
        """Shows a finished step."""
        if self._report is not None:  # the first step of a process also warms up
            self._pace = [*self._pace[1 - RECENT_STEPS :], report.seconds]
        self._done, self._report, self._since = report.step, report, self._clock()
        self._written += report.written_bytes
        if self._live is not None:
            self._live.refresh()
        else:
            for line in self._plain_lines(report):
                self._print(line)

    def evaluation(self, report: EvalReport | SampleReport | BestReport) -> None:
        """Shows what an evaluation found, on lines that stay. The time it took is not of the next step."""
        self._since = self._clock()
        if isinstance(report, SampleReport):
            lines = sample_lines(report, self._console, min(self._console.width, LINE))
        else:
            lines = [_loss_line(report) if isinstance(report, EvalReport) else _best_line(report)]
        for line in lines:
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(Text(encodable(line, self._console)), soft_wrap=True, highlight=False)

    def step_seconds(self) -> float:
        """Returns the seconds that one more step will take: the recent mean, or before that the first step's or the plan's."""
        if self._pace:
            return sum(self._pace) / len(self._pace)
        return self._report.seconds if self._report is not None else self._plan.predicted.step_seconds

    def lines(self, width: int) -> list[Text]:
        """Draws the live block at this width: a bar, then the fields packed into lines."""
        elapsed = max(self._clock() - self._since, 0.0)
        rows = [self._bar(width, elapsed)]
        if self._report is None:
            rows.append(Text(f"first step running, {duration(elapsed)} so far"))
        else:
            rows += [Text(row) for row in _packed(self._figures(self._report), width)]
            rows += [Text(row) for row in _packed(self._details(self._report), width)]
        for row in rows:
            row.truncate(width, overflow="crop")
        self._rows = max(self._rows, len(rows))
        return rows + [Text()] * (self._rows - len(rows))

    def _block(self) -> Group:
        rows = self.lines(self._console.width)
        for row in rows:
            row.plain, row.no_wrap = encodable(row.plain, self._console), True
        return Group(*rows)

    def _bar(self, width: int, elapsed: float) -> Text:
        shapes = symbols(self._console)
        running = min(elapsed / max(self.step_seconds(), MIN_STEP_SECONDS), 0.99) if self._done < self._total else 0.0
        share = (self._done + running) / self._total if self._total else 1.0
        head, tail = f"step {self._done}/{self._total}  ", f" {100 * share:4.0f}%  {self._eta(elapsed)}"
        drawn = max(width - len(head) - len(tail), 0)
        full = bar(share, drawn, shapes)
        empty = (shapes.rule if shapes.utf8 else shapes.none) * (drawn - len(full))
        return Text.assemble((head, "bold"), (full, "cyan"), (empty, "dim"), tail)

    def _eta(self, elapsed: float = 0.0, *, short: bool = False) -> str:
        left = self._total - self._done
        seconds = max(left * self.step_seconds() - elapsed, 0.0)
        if left <= 0:
            return "done"
        finish = "" if short else f" (at {datetime.fromtimestamp(self._clock() + seconds):%a %d %b %H:%M})"
        return f"eta {duration(seconds)}{finish}"

    def _plain_lines(self, report: StepReport) -> list[str]:
        """Puts the step on one line of at most `LINE` columns, with the same fields at the same columns in every step. Lines
        of details follow if asked for."""
        digits = len(str(self._total))
        *fields, ram = self._figures(report)
        fields = [f"step {report.step:>{digits}}/{self._total}", *fields, self._eta(short=True).ljust(11), ram]
        rates = next(place for place, field in enumerate(fields) if field.endswith("tok/s"))
        for place in (-1, rates - 1):  # too long: memory goes first, then the learning rate
            if len("  ".join(fields)) > LINE:
                del fields[place]
        return ["  ".join(fields).rstrip(), *(f"  {row}" for row in _packed(self._details(report), LINE - 2))]

    def _figures(self, report: StepReport) -> list[str]:
        """Returns a step's fields, each as wide in every step, the most important first."""
        seconds = max(report.seconds, MIN_STEP_SECONDS)
        budget = f"{self._plan.cpu_budget / GiB:.2f}"
        return [
            f"loss {report.loss:7.4f}",
            *([] if report.grad_norm is None else [f"gnorm {report.grad_norm:<8.3g}"]),
            "skipped    " if report.skipped else f"lr {report.lr:.2e}",
            f"{speed(report.batch_tokens / seconds):>7} tok/s",
            f"{duration(report.seconds):>7}/step",
            f"ram {report.ram_peak / GiB:{len(budget)}.2f}/{budget} GiB",
        ]

    def _details(self, report: StepReport) -> list[str]:
        """Returns memory, traffic and waits (the longest first) if asked for, each padded so that the next step's values
        fit."""
        if not self._verbose:
            return []
        seconds = max(report.seconds, MIN_STEP_SECONDS)
        flops = tera(report.tflops * 1e12) if math.isfinite(report.tflops) else "?"
        stalls = sorted(report.stalls.items(), key=lambda stall: (-stall[1], stall[0]))
        waits = [f"waited {duration(waited)} for {cause}" for cause, waited in stalls if worth_saying(waited)]
        facts = [
            f"{flops} TFLOPS (6N)",
            f"ram {report.ram_now / GiB:.2f} GiB now",
            f"ssd r {report.read_bytes / seconds / 1e9:.2f} w {report.written_bytes / seconds / 1e9:.2f} GB/s",
            f"wrote {gb(self._written)}",
            *(waits or ["no waiting"]),
        ]
        return [fact.ljust(-(-(len(fact) + 1) // 4) * 4) for fact in facts]


def sample_lines(report: SampleReport, console: Console, width: int) -> list[str]:
    """Returns a line with step and prompt, and a few with what followed, each of at most `width` columns."""
    head = Text(f"sample at step {report.step}  {one_line(report.prompt)}")
    head.truncate(width, overflow="crop")
    lines = _wrapped(report.text.strip("\n"), console, width - len(_INDENT) - len(" ..."))
    goes_on = report.ended == "length" or len(lines) > _SAMPLE_LINES
    shown = lines[:_SAMPLE_LINES] or ["(nothing)"]
    return [head.plain, *(_INDENT + line for line in shown[:-1]), _INDENT + shown[-1] + " ..." * goes_on]


def _wrapped(text: str, console: Console, width: int) -> list[str]:
    wrapped = (Text(line).wrap(console, max(width, 8), overflow="fold") for line in printable(text).split("\n"))
    lines = [part.plain.rstrip() for parts in wrapped for part in parts]
    return lines if any(lines) else []


def _loss_line(report: EvalReport) -> str:
    name = report.name if len(report.name) <= _NAME else f"{report.name[: _NAME - 3]}..."
    figures = f"loss {report.loss:7.4f}  perplexity {report.perplexity:.4g}"
    return f"eval at step {report.step}  {name}  {figures}  {report.rows:,} rows  {duration(report.seconds)}"


def _best_line(report: BestReport) -> str:
    if report.problem:
        return f"note: the best weights so far, after step {report.step}, could not be kept: {report.problem}"
    return f"best so far    loss {report.loss:7.4f}  kept in {report.folder}  {gb(report.size)}  {duration(report.seconds)}"


def _packed(fields: list[str], width: int) -> list[str]:
    """Puts fields side by side, on as many lines as they need."""
    rows = [""] if fields else []
    for field in fields:
        if rows[-1] and len(rows[-1]) + len(field.rstrip()) > width:
            rows.append("")
        rows[-1] += field + "  "
    return [row.rstrip()[:width] for row in rows]


# ---- other work -------------------------------------------------------------------------------------------


@contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, which goes away at the end. Gives what is told of each part that is done."""
    console = status_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


LINE_SECONDS = 10.0  # between two lines without a terminal; a shorter transfer prints none


class TransferDisplay(AbstractContextManager["TransferDisplay"]):
    """Shows the running transfers with bytes so far and in all. Call it from any thread inside its context."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        text, speed = TextColumn("{task.description}", markup=False), TransferSpeedColumn()
        columns = (text, BarColumn(), DownloadColumn(), speed, TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._console, self._clock = console, clock
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}  # time of the last line, or of the start

    def __exit__(self, *ended: object) -> None:
        if self._tasks:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        what = one_line(what)
        with self._lock:
            if self._console.is_terminal and not self._console.is_dumb_terminal:
                self._draw(what, done, total)
            else:
                self._tell(what, done, total)

    def _draw(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, completed=done, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)
        self._bar.start()
        if done >= total:  # other output follows and must not be drawn into a bar
            self._bar.stop()
            for task in self._tasks.values():
                self._bar.remove_task(task)
            self._tasks.clear()

    def _tell(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        begin = self._said.setdefault(what, now)
        if now - begin >= LINE_SECONDS:
            self._said[what] = now
            self._console.print(f"{what}: {gb(done)} of {gb(total)} ({100 * done // max(total, 1)}%)", soft_wrap=True)
