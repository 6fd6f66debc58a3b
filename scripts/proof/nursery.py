"""Runs the real command many times without paying for its imports each time.

One process imports what a run imports and computes nothing. Every run is a child forked from it, with its own threads, memory
and files, that calls the command's own `main` and ends. A child is killed like any process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PARENT = Path(__file__).with_name("forks.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    code: int  # minus the signal's number where one ended it
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """Returns all it wrote."""
        return self.out + self.err


class Child:
    """Controls a run under way."""

    def __init__(self, parent: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self._parent, self._out, self._err, self._began = parent, out, err, time.monotonic()
        assert parent.stdout is not None
        self.pid = int(parent.stdout.readline())
        self.waited = False

    def is_over(self, within: float = 0.0) -> bool:
        """Tells whether `wait` would return at once; `within`: seconds to wait for that."""
        assert self._parent.stdout is not None
        return bool(select.select([self._parent.stdout], [], [], within)[0])

    def send(self, number: int) -> None:
        """Sends a signal to the child alone, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the child and what it has started; the child alone if it has just begun and leads no group yet."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.send(signal.SIGKILL)

    def wait(self) -> Ended:
        assert self._parent.stdout is not None
        code = int(self._parent.stdout.readline())
        self.waited = True
        seconds = time.monotonic() - self._began
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in (self._out, self._err))
        return Ended(code=code, out=out, err=err, seconds=seconds)


class Nursery:
    """Starts `fuyou WORDS` in a child by `begin`, one at a time: one that nobody waited for is killed. `folder` holds what they
    write. Their environment is `environment`, all of it, unless `begin` gives another; what is read while modules are imported
    is always the parent's. Runs of the `models` (folder, rows and tokens of a micro-batch) find what torch learns of their
    operators."""

    def __init__(
        self, *, folder: Path, environment: Mapping[str, str], under: Path | None = None,
        models: Sequence[tuple[Path, int, int]] = (),
    ) -> None:  # fmt: skip
        self._child: Child | None = None
        self._folder, self._environment, self._under = folder, dict(environment), under
        self._parent = subprocess.Popen(  # without a buffer, so that what can be read is seen to be there
            [sys.executable, str(_PARENT), json.dumps(models, default=str)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0, cwd=folder, env=self._environment,
            start_new_session=True,  # Ctrl-C is for who asked: this one ends when its input does
        )  # fmt: skip
        assert self._parent.stdout is not None
        if self._parent.stdout.readline() != b"ready\n":
            raise RuntimeError("the process that runs are forked from did not start")

    def begin(
        self, words: Sequence[str], *, folder: Path | None = None, environment: Mapping[str, str] | None = None,
        first: str = "", package: str = "",
    ) -> Child:  # fmt: skip
        """Starts `fuyou WORDS`. The program `first` runs before it in its process. `package` is imported by the parent."""
        assert self._parent.stdin is not None
        if self._child is not None and not self._child.waited:
            self._child.kill()
            self._child.wait()
        out, err = self._folder / "out.txt", self._folder / "err.txt"
        for path in (out, err):
            path.write_bytes(b"")
        request = {
            "words": [*words],
            "first": first,
            "package": package,
            "folder": str(folder or self._folder),
            "environment": self._environment if environment is None else {**environment},
            "out": str(out),
            "err": str(err),
            "under": str(self._under or ""),
        }
        self._parent.stdin.write(json.dumps(request).encode() + b"\n")
        self._child = Child(self._parent, out, err)
        return self._child

    def run(self, words: Sequence[str]) -> Ended:
        return self.begin(words).wait()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._parent.stdin is not None
        if self._child is not None and not self._child.waited:  # interrupted: the next proof wants the folder to itself
            self._child.kill()
        self._parent.stdin.close()
        self._parent.wait(timeout=60)
