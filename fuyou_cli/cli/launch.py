"""Starts the ranks of `fuyou finetune --nproc N` by torch's launcher, and gives each rank's messages their place."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from fuyou_cli.core.errors import FuyouError, Interrupted, PeerLost, UsageError
from fuyou_cli.core.paths import open_own
from fuyou_cli.machine.profile import core_count, take_card

from . import error_screen
from .console import write_status

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.peers import Place

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LOOK = 0.2  # seconds between looks at the launcher
_LOGS = "ranks"  # in an output_dir


def run_ranks(recipe: Recipe, count: int, words: Sequence[str]) -> None:
    """Runs `fuyou WORDS` in `count` processes on this box, the ranks of one run. Raises the error of the first that fails."""
    from fuyou_cli.training.alike import refuse_keys
    from fuyou_cli.training.peers import LAUNCHER

    if count > (cores := core_count()):
        what = f"{count} processes need a core each, and this box lets them use {cores}"
        raise UsageError(what, hint=f"--nproc {cores} or fewer (train.nproc)")
    refuse_keys(recipe, count)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # whatever ends a rank is said once
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    package = str(Path(__file__).resolve().parents[2])  # so that the ranks run this very fuyou
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=os.urandom(8).hex(), rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else every run leaves a folder in /tmp
    )  # fmt: skip
    # in a thread of its own: in the main one the launcher would end all ranks at the first signal, unsaved after 30 s
    passed = set[int]()
    with _signals_held() as held, ThreadPoolExecutor(max_workers=1) as thread:
        # -P: a file tokenizers.py in the current directory must not stand in for the library
        launched = thread.submit(elastic_launch(config, sys.executable), "-P", "-m", "fuyou_cli", *words)
        while not launched.done():
            wait([launched], timeout=_LOOK)  # a signal is taken between two of these
            passed |= _pass_on(held)
    error = launched.exception()
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        raise _ended(rank, failure.exitcode, passed)
    if error is not None:
        raise FuyouError(f"torch's launcher failed: {error}") from error


def _ended(rank: int, code: int, passed: Set[int]) -> FuyouError:
    """Makes the error of a rank that ended with a code, or by a signal where that is below 0. `passed`: signals that it was
    passed, and may have had before it could tell that it stops."""
    if code == error_screen.INTERRUPTED or -code in passed:
        return Interrupted("stopped: what is saved is said above", hint="the same command goes on")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    goes_on = "" if code in (error_screen.USAGE, error_screen.DOES_NOT_FIT) else "; the same command goes on"
    error = FuyouError(f"rank {rank} {how}", hint=f"why is said above, or in output_dir/ranks{goes_on}")
    error.exit_code = max(code, 1)
    return error


def _pass_on(held: deque[int]) -> set[int]:
    """Passes what would stop a run on to the ranks, which have sessions of their own: they save, and end. Before they are
    started it waits. Returns what was passed."""
    passed = set[int]()
    while held and (children := _children()):
        passed.add(number := held.popleft())
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, number)
    return passed


@contextmanager
def _signals_held() -> Iterator[deque[int]]:
    """Gives the signals that come, in order."""
    held = deque[int]()

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(number, hold)
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children() -> list[int]:
    """Returns the processes that any thread of this one has started."""
    pids = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            pids += [int(word) for word in (task / "children").read_text().split()]
    return pids


class QuietRank:
    """Keeps what a rank other than the first writes away from the terminal: in memory until its run may write, then in
    output_dir/ranks. So one run has one display."""

    def __init__(self) -> None:
        self._held, self._terminal = os.memfd_create("fuyou-rank"), os.dup(2)
        self._send_to(self._held)

    def write_to(self, out: Path, rank: int) -> None:
        """From now on, and what was written so far, goes to a file of `out`."""
        folder = out / _LOGS
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_own(folder / f"{rank}.log", anew=True), "wb") as file:
            file.write(self._so_far())
            file.flush()
            self._send_to(file.fileno())

    def back(self) -> None:
        """Gives the rank the terminal again."""
        self._send_to(self._terminal)

    def _so_far(self) -> bytes:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        size = os.fstat(self._held).st_size
        return os.pread(self._held, size, 0)

    def _send_to(self, file: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(file, number)


class Rank:
    """One rank in this process, with the place for its messages. An error ends the process with the context: its connections
    would wait for peers that are lost."""

    def __init__(self, place: Place, recipe: Recipe) -> None:
        from fuyou_cli.training.alike import are_replicas, refuse_keys
        from fuyou_cli.training.peers import Peers
        from fuyou_cli.training.prepare import device_name

        refuse_keys(recipe, place.count)
        replicas = are_replicas(recipe, place.count)
        self._recipe = recipe
        self._card = take_card(place.local) if device_name(recipe) == "cuda" else None
        timeout = recipe.train.peer_timeout
        with ExitStack() as joining:
            joining.push(lambda kind, error, trace: None if error is None else _end(error))
            self.peers = Peers(place, peer_timeout=timeout, are_replicas=replicas, say=write_status)
        self._quiet = None if self.peers.is_first else QuietRank()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            try:
                self.peers.all_gather("over", None)
                self.peers.part(None)
                return
            except FuyouError as lost:
                error = lost
        _ignore_signals()
        error = self.peers.explained(error)
        self.peers.part(error)
        self._show_if_nobody_else_does()
        _end(error)

    def meet(self) -> None:
        """Compares recipes, measures the link between boxes, and learns which other ranks compute on the same GPU. Call it
        inside the context: a peer may be lost meanwhile. Raises UsageError."""
        from fuyou_cli.training.alike import refuse_unlike_recipe

        refuse_unlike_recipe(self._recipe, self.peers)
        if not self.peers.are_replicas:  # whose plan counts no link
            self.peers.measure_link()
        self.peers.share_card(self._card)

    def may_write(self, out: Path) -> None:
        """Goes on once the first rank has claimed its output_dir, and nothing refuses the run any more."""
        self.peers.all_gather("claimed", None)
        if self._quiet is not None:
            self._quiet.write_to(out, self.peers.rank)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raises why a peer is lost in place of what its connection says."""
        try:
            yield
        except (PeerLost, Interrupted) as error:
            if (why := self.peers.explained(error)) is error:
                raise
            raise why from error

    def may_export(self) -> None:
        """Goes on once the stores of all ranks are closed."""
        self.peers.all_gather("closed", None)

    def _show_if_nobody_else_does(self) -> None:
        """Gives a rank the terminal for what ended it, where the first rank has another box and another terminal, or may have
        been killed with no launcher to tell so."""
        from fuyou_cli.training.peers import has_launcher

        peers = self.peers
        if self._quiet is not None and (peers.boxes[peers.rank] != peers.boxes[0] or not has_launcher(os.environ)):
            self._quiet.back()


def _end(error: BaseException) -> NoReturn:
    """Reports an error, and ends the process without Python's own end: threads of a rank wait inside torch, and one that comes
    back meanwhile aborts the process."""
    _ignore_signals()
    code = error_screen.report(error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _ignore_signals() -> None:
    """Has one more signal change nothing in a rank that ends: an exception would lead it to Python's own end."""
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)


def options_of(options: Mapping[str, Any]) -> list[str]:
    """Returns the words of the options that were set."""
    return [word for name, value in options.items() if value for word in ((name,) if value is True else (name, str(value)))]
