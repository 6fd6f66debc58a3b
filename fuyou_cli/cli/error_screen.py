"""Maps errors to exit codes and text, in one place.

0 ok, 1 failed, 2 usage or recipe, 3 does not fit, 4 out of memory or disk, 130 stopped (at most one finished step lost).
fuyou's own errors carry their code. Tracebacks are shown only with FUYOU_DEBUG=1.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

from fuyou_cli.core.disk import REMEDIES, remedy
from fuyou_cli.core.errors import NO_THREADS, FuyouError, Interrupted

from .console import styled, write_status

FAILED, USAGE, DOES_NOT_FIT, OUT_OF_SPACE, INTERRUPTED = 1, 2, 3, 4, 130
REMOVED_OPTIONS = {  # by the command that had them: what to do instead
    ("plan", "-o"): "`fuyou plan RECIPE --json` prints the plan; a run plans again, and keeps to the keys that you set",
    ("plan", "--compare"): "plan with other keys and compare the figures, as `fuyou plan RECIPE optimizer.state_dtype=int8`",
    ("plan", "--calibrated"): "`fuyou bench` measures this machine again",
    ("finetune", "--plan"): "leave it out: a run plans by itself, and keeps to the keys that you set, as offload.weights=ssd",
    ("finetune", "--calibrated"): "`fuyou bench` measures this machine again",
    ("bench", "--minutes"): "leave it out: --model always trains a few blocks and adds the others",
    ("bench", "--svg"): "`fuyou bench --model 8b --json` prints what the chart showed",
    ("bench", "--trace"): "`fuyou finetune RECIPE --trace FILE` traces a run",
}
REMOVED_OPTIONS["plan", "--out"] = REMOVED_OPTIONS["plan", "-o"]
_NO_THREAD = "cannot start another thread or process"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_OPEN_FILES = re.compile(rf"{os.strerror(errno.EMFILE)}(?! in)")  # not ENFILE, "... in system"


def report(error: BaseException) -> int:
    """Prints on stderr what happened and what to do. Returns the exit code."""
    if os.environ.get("FUYOU_DEBUG", "") not in ("", "0"):
        write_status("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, (KeyboardInterrupt, Interrupted)) and not _may_start_threads():
        _write_error(_NO_THREAD, NO_THREADS)  # OpenBLAS, which numpy loads, sends the process a SIGINT then
        return FAILED
    if isinstance(error, KeyboardInterrupt):
        write_status("interrupted")
        return INTERRUPTED
    message, hint, code = _explained(error)
    _write_error(message, hint)
    for note in getattr(error, "__notes__", ()):
        write_status(f"  note: {note}")
    return code


def report_usage(error: Exception, words: Sequence[str]) -> int:
    """Prints what is wrong with a command line. Returns the exit code."""
    message = getattr(error, "format_message", lambda: str(error))()
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        write_status(message)
        return USAGE
    command = context.command_path.rpartition(" ")[2] if context is not None else ""
    if (instead := REMOVED_OPTIONS.get((command, getattr(error, "option_name", "")))) is not None:
        write_status(f"error: {getattr(error, 'option_name', '')} was removed from `fuyou {command}`\n  help: {instead}")
        return USAGE
    write_status(f"error: {message}")
    if dashed := next((word for word in words if word.startswith("--") and "." in word.partition("=")[0]), None):
        key, _, value = dashed.lstrip("-").partition("=")
        write_status(f"  help: keys of the recipe have no dashes: {key}={value or 'value'}")
    if context is not None:
        write_status(f"{context.get_usage()}\nTry '{context.command_path} --help'.")
    return USAGE


def _explained(error: BaseException) -> tuple[str, str | None, int]:
    """Returns the message, the hint and the exit code."""
    raise_limit = REMEDIES[errno.EMFILE] if _is_out_of_files(error) else ""  # whatever else its reader or writer advises
    if isinstance(error, FuyouError):
        return error.message, error.hint if raise_limit in (error.hint or "") else raise_limit, error.exit_code
    if raise_limit:
        return _text(error), raise_limit, FAILED
    torch = sys.modules.get("torch")  # not imported for this: the device's error has a class, the host's only a text
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    on_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    if isinstance(error, MemoryError) or on_device or on_host:
        which = "gpu" if on_device else "cpu"
        return f"out of memory: {_text(error)}", f"lower offload.max_memory.{which}; see `fuyou plan`", OUT_OF_SPACE
    if _is_out_of_threads(error):
        return _NO_THREAD, NO_THREADS, FAILED
    if isinstance(error, OSError) and error.errno == errno.EDQUOT:
        return _text(error), remedy(error), OUT_OF_SPACE
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return _text(error), "free some space: `fuyou clean DIR` lists what old runs have left", OUT_OF_SPACE
    if isinstance(error, OSError):
        return _text(error), remedy(error), FAILED
    hint = "this is a bug in fuyou; set FUYOU_DEBUG=1 to see the traceback"
    return f"internal error: {type(error).__name__}: {_text(error)}", hint, FAILED


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Reports an unexpected exception in short, as `sys.excepthook`."""
    report(error)


def _is_out_of_threads(error: BaseException) -> bool:
    """Recognises what Python raises where a thread or a process cannot be started."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN and error.filename is None
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def _is_out_of_files(error: BaseException | None) -> bool:
    """Recognises the limit on open files as the cause of an error, of a library's too."""
    while error is not None and not _OPEN_FILES.search(str(error)):
        error = error.__cause__ or error.__context__
    return error is not None


def _may_start_threads() -> bool:
    """Tries to start one."""
    try:
        threading.Thread(target=bool).start()
    except RuntimeError:
        return False
    return True


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename is not None else error.strerror
    return (str(error).strip().splitlines() or ["no details"])[0]


def _write_error(message: str, hint: str | None) -> None:
    if "error[" in message.partition("\n")[0]:  # a recipe's error has its own place and code: shown unchanged
        write_status(message)
    else:
        inner = re.sub(r"\n(?=\S)", "\n  ", message)  # a name that contains a line end must not start a new line
        write_status(f": {inner}", lead=styled("error", "1;31", sys.stderr))
    if hint:
        write_status(f"  help: {hint}")


# Slurm sends SIGUSR1 (`--signal`) before a job's time is over.
_LIKE_CTRL_C = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def like_ctrl_c() -> Iterator[None]:
    """Ends a command at SIGTERM, SIGUSR1 or a closed terminal as Ctrl-C does: with a message, without leaving processes or
    scratch files. Signals that are handled or ignored already stay so (nohup ignores)."""
    before = {number: signal.getsignal(number) for number in _LIKE_CTRL_C}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _interrupt:
                signal.signal(number, handler)
