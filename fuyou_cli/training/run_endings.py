"""What ends a run before its last step, and what is said then: signals, a full device, and what of the run is saved.

The run handles Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 (Slurm's, before a job's time is over) by what it is doing. Nothing that
could be saved is lost without a warning.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Literal

import torch

from ..core.errors import (
    DamagedStateError,
    DataError,
    DeviceMemoryError,
    FuyouError,
    Interrupted,
    ModelFileError,
    NumericsError,
    UsageError,
)
from ..core.units import gib
from ..engine.devices.base import Device
from ..spec.plan import Plan
from .prepare import Planned
from .state.saver import Saver

Activity = Literal["nothing", "loading", "training", "saving", "ended"]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_EXIT_CODE = Interrupted.exit_code
_KEY = "offload.max_memory.gpu"
_MORE = 1.02  # a smaller excess over the limit does not count as free memory
# Messages of libraries that do not use torch's allocator.
_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")

# ---- signals -----------------------------------------------------------------------------------------------------------


class StopRequests:
    """Sets `requested` at the first signal while training or saving, and says what a second one would lose. A second one raises
    KeyboardInterrupt, wherever the run is. While loading nothing can be lost, so the first one raises it.

    `may_abandon` tells whether the step under way can be given up, `at_stake` what a second signal would lose: both are asked
    while training. Signals are caught from enter to exit. With `to_the_end`, an exit by an error leaves them ignored, because
    the process is about to report how it ended, and to end.
    """

    def __init__(
        self, announce: Callable[[str], None], *, may_abandon: Callable[[], bool], at_stake: Callable[[], str],
        to_the_end: bool = False,
    ) -> None:  # fmt: skip
        self.requested = False
        self._announce, self._may_abandon, self._at_stake, self._to_the_end = announce, may_abandon, at_stake, to_the_end
        self._doing: Activity = "nothing"
        self._before: dict[int, Any] = {}
        self._insisted = 0  # signals since `end`

    def __enter__(self) -> StopRequests:
        for number in _SIGNALS:
            # nohup sets SIGHUP to be ignored
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ignored = kind is not None and self._to_the_end  # set in the system, because Python removes its own handlers as it ends
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignored else handler)

    @contextmanager
    def during(self, doing: Activity) -> Iterator[None]:
        """Gives signals the meaning they have while `doing`, inside the context. May be nested."""
        doing_before, self._doing = self._doing, doing
        try:
            yield
        finally:
            if self._doing != "ended":
                self._doing = doing_before

    def end(self) -> None:
        """Ignores signals from now on, because all that can be saved is saved. Two more Ctrl-C end a wait for a drive that may
        never answer."""
        self._doing = "ended"

    def _insist(self, number: int) -> None:
        if number == signal.SIGHUP:
            return
        self._insisted += 1
        if self._insisted > 1:
            os._exit(_EXIT_CODE)
        self._say("waiting for the drives; a second Ctrl-C ends the process at once (the committed state is safe)")

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._doing == "ended":
            self._insist(number)
            return
        if self._doing in ("nothing", "loading"):
            raise KeyboardInterrupt
        if self.requested:
            if number == signal.SIGHUP:  # a closing terminal may send it twice
                return
            raise KeyboardInterrupt
        self.requested = True
        self._say(f"{self._what_follows()};\na second Ctrl-C loses {self._at_stake()}")

    def _what_follows(self) -> str:
        if self._doing == "saving":
            return "saving the state"
        if self._may_abandon():
            return "stopping at the next micro-batch, then saving the state"
        return "finishing this step, whose updates have begun, then saving the state"

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # the signal came while Python was writing another line; it cannot write now
            self._announce(text)


# ---- device memory -----------------------------------------------------------------------------------------------------


def unpinned(refused: int, size: int) -> str:
    """Explains the effect of host memory that could not be pinned. Sizes are in bytes."""
    return (
        f"note: {gib(refused)} of {gib(size)} of host memory could not be pinned. Copies between it and the device go through "
        "small pinned buffers, and the CPU copies each byte once more, so they are slower than planned. `fuyou doctor` "
        "shows how much can be pinned; offload.max_memory.cpu sets how much is used"
    )


@contextmanager
def naming_device_errors(device: Device, plan: Plan, most: int | None, where: Callable[[], str]) -> Iterator[None]:
    """Turns a lack of device memory inside the context into an error that says what to do. `most`: bytes allowed."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise _out_of_memory(error, device, plan, most, where()) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def _out_of_memory(error: RuntimeError, device: Device, plan: Plan, most: int | None, where: str) -> DeviceMemoryError:
    used, free = 0, None
    with suppress(RuntimeError):  # the device's context may have failed
        used, free = device.memory(), device.free_memory()
    said = (str(error).strip().splitlines() or ["no details"])[0].partition(". GPU ")[0].rstrip(".")
    allowed = f", {gib(most)} are allowed ({_KEY})" if most is not None else f" ({_KEY} sets no limit)"
    numbers = f"{gib(plan.predicted.gpu_peak)} are planned, {gib(used)} in use{allowed}"
    return DeviceMemoryError(f"{where}: out of device memory: {said}; {numbers}", hint=_advice(plan, used, free, most))


def _advice(plan: Plan, used: int, free: int | None, most: int | None) -> str:
    available = used + free if free is not None else None
    if most is not None and available is not None and available < most / _MORE:
        return f"other processes now use some of the GPU's memory: set {_KEY} to less than {gib(available)}, or end them"
    if most is not None and available is not None and available > most * _MORE:
        return f"raise {_KEY}: this process can use {gib(available)} of the GPU"
    if any(stage.weights == "gpu" for stage in plan.stages):
        return f"the step needs more than planned, and {_KEY} is all the GPU has: offload.weights=cpu keeps no weights there"
    return f"the step needs more than planned, and {_KEY} is all the GPU has: start a new run with a smaller micro-batch"


# ---- what is saved -----------------------------------------------------------------------------------------------------


def what_is_saved(planned: Planned, saver: Saver) -> str:
    """Says what the same command will continue from."""
    step = saver.saved_step
    if not step:
        nothing = "no step is saved" if saver.standing.step else "nothing was trained yet"
        return f"{nothing}: the same command starts from the beginning"
    return f"the state after step {step} is saved in {saver.folder}: the same command{_without(planned)} continues from there"


def add_what_is_saved(error: Exception, planned: Planned, saver: Saver, *, training: bool) -> None:
    """Adds to an error that ended the run what is saved of it, and how to go on."""
    if isinstance(error, NumericsError):
        error.hint = _after_bad_numbers(error, planned, saver)
    elif isinstance(error, UsageError) and not training:
        return  # the same command finds this error again
    elif isinstance(error, DamagedStateError):
        return  # what is saved is what is damaged
    elif isinstance(error, ModelFileError):
        error.hint = _after_a_changed_file(planned, saver)
    elif isinstance(error, FuyouError):
        added = _after_bad_data(planned, saver) if isinstance(error, DataError) else what_is_saved(planned, saver)
        error.hint = f"{error.hint}; {added}" if error.hint else added
    else:
        error.add_note(what_is_saved(planned, saver))


def _after_bad_numbers(error: NumericsError, planned: Planned, saver: Saver) -> str:
    """Says what to do: the same command would compute the same numbers, and a saved run accepts no other rate or data."""
    step, row = saver.saved_step or 0, saver.standing.skipped_in_row
    hint = f"{error.hint}; both need checkpoint.resume=never, which starts over"
    if error.changed:
        hint = f"updates of the step had begun, so the run goes back to its last commit, after step {step}; {hint}"
    elif planned.plan.clip_grad_norm is not None:
        skipping = f"the {row} steps before were skipped too" if row else "nothing was updated"
        hint = f"{skipping}: train.skip_nonfinite={row + 1} skips such a step and goes on; or {hint}"
    return f"{hint} (the state after step {step} is saved: fuyou export {saver.folder} OUT)"


def _after_a_changed_file(planned: Planned, saver: Saver) -> str:
    """Says what to do: what is saved was computed with the file as it was."""
    saved = saver.commits.last
    compared = saved is None or saved.knows_pieces
    back = "put the file back as it was" + ("" if compared else ", with its time of change (cp -p)")
    where = f"continues from the state after step {saved.step}" if saved is not None and saved.step else "starts over"
    return f"{back}: then the same command{_without(planned)} {where}. With another file, start over: checkpoint.resume=never"


def _after_bad_data(planned: Planned, saver: Saver) -> str:
    """Says what to do: the same command would find the same data, and a saved run accepts no other."""
    step = saver.saved_step or 0
    saved = f"the state after step {step} is saved: fuyou export {saver.folder} OUT; " if step else ""
    onward = ", and model.name_or_path=OUT to begin with that model" if step and planned.recipe.adapter is None else ""
    return f"{saved}with other data a run starts over: checkpoint.resume=never{onward}"


def _without(planned: Planned) -> str:
    """Names the option that the same command must leave out to go on."""
    return ", without checkpoint.resume=never," if planned.recipe.checkpoint.resume == "never" else ""
