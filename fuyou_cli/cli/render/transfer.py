"""Shows the progress of a download or an export: a bar on a terminal, elsewhere a line from time to time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fuyou_cli.core.printable import one_line
from fuyou_cli.core.units import gb

LINE_SECONDS = 10.0  # between two lines without a terminal; a shorter transfer prints none


class Transfers(AbstractContextManager["Transfers"]):
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
