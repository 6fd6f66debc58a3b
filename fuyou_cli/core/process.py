"""Changes this process: signals wait while something is opened, Python's cycle collector is spared, the C library's heap and
torch's environment are set for planned memory, and a long silent wait says what it is for."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from .errors import FuyouError
from .probe import ROOT
from .units import MiB, duration

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the end of the context.

    An exception from a handler can come between an opening call and the line that keeps its result: then nobody closes it.
    Python runs handlers on the main thread only, so other threads need no delay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived, before = list[int](), dict[int, Any]()
    try:
        for number in _SIGNALS:
            before[number] = signal.getsignal(number)
            signal.signal(number, lambda number, frame: arrived.append(number))
        yield
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)
        for late in arrived:
            signal.raise_signal(late)


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns the cycle collector off: it takes much of a plan's time and frees nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # else somebody wants it to stay as it is
                gc.freeze()  # and back: all there is counts as old, or the next new object would have all of it looked at
                gc.unfreeze()
            gc.enable()


def uncollected_at_exit() -> None:
    """Spares a process that is about to end its last collection: it looks at every object, and frees what ends anyway."""
    atexit.register(gc.freeze)


# ---- the C library's heap --------------------------------------------------------------------------------------------


MAPPED = 24 * MiB  # larger blocks are mapped on their own and go back to the system whole; smaller ones share the heap
HOLES = 1.0  # bytes in holes per byte alive in the heap, at most (measured, scripts/results/TRIED.md)
HELD = 0.5  # the same for blocks that are only held, a whole batch at a time
BESIDE = 0.1  # extra bytes per mapped byte while a matrix product works on it

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Larger blocks are mapped on their own and go back to the system when freed. Before training nearly all blocks are: the
# heap is then small and without holes when training starts. Building the model's skeleton alone left 1.4 GiB of holes, and
# activations touched their pages one after the other. In training, a limit of 4 MiB would map every activation: that needs
# the least memory, but a step spends a tenth of its CPU time on page faults (scripts/results/TRIED.md).
_MMAP_THRESHOLD_BEFORE = MiB
_TRIM_THRESHOLD = 64 * MiB
_OTHER_THREADS = 2  # that allocate and may begin before those that compute: a display's, a watch's
_PLUG = MAPPED - (256 << 10)  # too small to be mapped itself, even with what malloc adds to a block at the heap's end
_MOST_PLUGS = 1024

_C = ctypes.CDLL(None)
_C.malloc.restype = _C.sbrk.restype = ctypes.c_void_p
_C.malloc.argtypes, _C.sbrk.argtypes, _C.free.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t], [ctypes.c_void_p]
_plugs: list[int] = []  # addresses


def alive(size: int) -> int:
    """Returns the memory that a block of `size` bytes takes. A block just below MAPPED takes more than one above it."""
    return size if size >= MAPPED else int(size * (1 + HOLES))


def worked_on(size: int) -> int:
    """Returns the memory of a block while a kernel works on it. The kernel needs more, to pack a matrix."""
    return int(size * (1 + BESIDE)) if size >= MAPPED else alive(size)


def held(size: int) -> int:
    """Returns the memory of a block that no kernel works on at the memory peak, and that has few other blocks near it."""
    return size if size >= MAPPED else int(size * (1 + HELD))


def settle_allocator() -> None:
    """Fixes the thresholds that glibc would move, and the arenas: allocated memory stays close to used memory. Without glibc
    it does nothing."""
    # Threads that compute share no arena: they would wait for its lock at each small block, and a backward of short rows took
    # two to three times as long where a worker had the main thread's. glibc's eight a core are for many more threads.
    _mallopt(_M_ARENA_MAX, _OTHER_THREADS + len(os.sched_getaffinity(0)))
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BEFORE)
    _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


def settle_for_training() -> None:
    """Lets activations share the heap from now on. training/step_meter.py trims it."""
    trim()
    _mallopt(_M_MMAP_THRESHOLD, MAPPED)


def trim(apart: bool = False) -> None:
    """Gives the heap's free pages back. With `apart`, large blocks are mapped on their own until the next trim."""
    malloc_trim = getattr(_C, "malloc_trim", None)
    if malloc_trim is None:
        return
    while _plugs:
        _C.free(_plugs.pop())
    malloc_trim(0)
    if apart:
        _plug()


def _plug() -> None:
    """Fills every hole that has room for a mapped block. Nothing touches a plug, so it takes no memory."""
    # malloc looks for holes before it maps, and a hole keeps the pages of a block freed in it: a peak had a head's logits,
    # 62 MiB, twice. The first plug that finds no hole lies beyond the heap's end.
    while len(_plugs) < _MOST_PLUGS:
        end = _C.sbrk(0)
        plug = _C.malloc(_PLUG)
        if not plug or _C.sbrk(0) != end or plug > end:
            _C.free(plug)
            return
        _plugs.append(plug)


def _mallopt(what: int, value: int) -> None:
    mallopt = getattr(_C, "mallopt", None)
    if mallopt is not None:
        mallopt(what, value)


# ---- waiting ---------------------------------------------------------------------------------------------------------


_Made = TypeVar("_Made")


def in_thread(make: Callable[[], _Made], *, look: Callable[[], None] = lambda: None) -> _Made:
    """Returns what `make` returns, which waits inside a library, where no signal ends it. In a thread it is left alone with
    what Python raises for a signal, or `look`, which is called once a second meanwhile."""
    made = Future[_Made]()

    def work() -> None:
        try:
            made.set_result(make())
        except (FuyouError, RuntimeError, OSError, ValueError) as error:
            made.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=_LOOK)
        look()
    return made.result(timeout=0)


FIRST = 30.0  # seconds of silence before the first message; each further one comes after twice the silence
_LOOK = 1.0  # seconds between checks of what has moved


class Patience:
    """Watches waits. `progress` returns a value that changes when anything moves. `where` returns what is being done."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        progress: Callable[[], object] = lambda: None,
        where: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
        first: float | None = None,
    ) -> None:
        self.say, self.progress, self.where, self.clock = say, progress, where, clock
        self.first = FIRST if first is None else first

    def waiting(self, what: str) -> Wait:
        """Begins one wait."""
        return Wait(self, what)


class Wait:
    """Checks now and then whether anything moved during one wait."""

    def __init__(self, patience: Patience, what: str) -> None:
        self._patience, self._what = patience, what
        self._begin = self._still_since = patience.clock()
        self._next_look, self._silence = self._begin + min(_LOOK, patience.first), patience.first
        self._seen: object = self  # a value that nothing equals

    def look(self) -> None:
        """Says something if nothing has moved for long. Cheap, so call it as often as you like during the wait."""
        patience, now = self._patience, self._patience.clock()
        if now < self._next_look:
            return
        self._next_look = now + min(_LOOK, patience.first)
        seen = patience.progress()
        if seen != self._seen:
            self._seen, self._still_since, self._silence = seen, now, patience.first
        elif now - self._still_since >= self._silence:
            self._silence *= 2
            self._speak(now)

    def _speak(self, now: float) -> None:
        where = self._patience.where()
        waited, still = duration(now - self._begin), duration(now - self._still_since)
        self._patience.say(
            f"waiting for {self._what}{f' ({where})' if where else ''} for {waited};\n"
            f"nothing was read, written or updated for {still}"
        )


SILENT = Patience(lambda text: None)


# ---- torch's environment ---------------------------------------------------------------------------------------------


_NVIDIA = ("dev/nvidiactl", "dev/dxg")  # the driver's device; the second is WSL2's
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # torch reads the first that is set

# Rounds that a thread of torch spins for work before it sleeps; libgomp's own are 300,000. Beside other programs a thread that
# spins keeps the one that it waits for off its core: a token took twice as long (scripts/results/TRIED.md).
_SPINS = "20000"

# For matrix products, and for flash-attn (used by transformers).
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


def settle_libraries(*, device: str, expandable_segments: bool = True, deterministic: bool = False, root: Path = ROOT) -> None:
    """Sets the environment for compute on a GPU (`device` is the recipe's). For other devices only says how long threads spin.

    Stages allocate tensors of different sizes one after the other. Memory segments of fixed size leave holes that add up, and
    no plan counts them. Growing segments leave none; each growth costs one driver call. torch's threads have little to do
    beside a GPU: if they spun for milliseconds waiting for work, they would take cores from the update.
    """
    if device not in ("auto", "cuda") or not any((root / name).exists() for name in _NVIDIA):
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name, value in _DETERMINISTIC.items() if deterministic else ():
        os.environ.setdefault(name, value)
    if expandable_segments and not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
