"""Ends a run before its last step: saves the last whole state and tells what is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..core.errors import (
    DamagedStateError,
    DataError,
    DataSpaceError,
    DeviceMemoryError,
    FuyouError,
    Interrupted,
    ModelFileError,
    NumericsError,
    OutOfSpaceError,
    RecomputeError,
    SwapError,
    UsageError,
)
from ..engine.executor import Executor
from .prepared import Planned
from .state.saver import Saver
from .stopping import StopRequests


@dataclass(slots=True)
class Doing:
    """Holds what a run is doing at the moment."""

    training: bool = False  # False: it loads
    step: bool = False  # one is under way
    evaluating: bool = False  # between two steps
    telling: bool = False  # a log or a display hears of the last one
    saving: bool = False


class Endings:
    """Ends one run. `save` writes its state to stable storage."""

    def __init__(
        self, planned: Planned, doing: Doing, executor: Executor, saver: Saver, stopping: StopRequests, save: Callable[[], None]
    ) -> None:
        self._planned, self._doing, self._executor, self._saver = planned, doing, executor, saver
        self._stopping, self._save = stopping, save
        stopping.may_abandon, stopping.at_stake = self._may_abandon, self._at_stake

    @contextmanager
    def telling_what_is_saved(self) -> Iterator[None]:
        """Saves the last whole state and tells what is saved, whatever ends the run inside the context."""
        try:
            try:
                yield
            except Exception as error:
                self._rescue(error)
                raise
        except KeyboardInterrupt:
            self._stopping.end()
            self._saver.commits.close()  # waits for a commit under way, which then counts
            lost = self._whole_steps_at_stake > 1
            raise Interrupted(self._stopped_where(), hint=self._what_is_saved(), lost=lost) from None
        except Exception as error:
            self._stopping.end()
            self._tell(error)
            raise

    @property
    def _step(self) -> int:
        return self._saver.standing.step

    @property
    def _whole_steps_at_stake(self) -> int:
        return self._step - (self._saver.saved_step or 0)

    def _may_abandon(self) -> bool:
        """Tells whether the state can be saved once the micro-batch under way is done."""
        return not self._doing.step or self._executor.may_abandon()

    def _at_stake(self) -> str:
        """Says what stopping at once would lose: the steps to compute again, including the one under way."""
        lost = self._whole_steps_at_stake + self._doing.step
        return "this step" if lost <= 1 else f"{lost} steps: the last saved step is {self._saver.saved_step or 0}"

    def _stopped_where(self) -> str:
        if not self._doing.training:
            return "stopped while loading"
        if self._doing.saving:
            return f"stopped while saving the state after step {self._step}"
        return f"stopped at once in step {self._step + 1}"

    def _rescue(self, error: Exception) -> None:
        """Saves the last whole step when an error ends the training, unless the error may have damaged the state."""
        doing, interrupted = self._doing, isinstance(error, Interrupted)
        if not doing.training or doing.saving or self._saver.commits.has_failed or interrupted or not self._is_whole(error):
            return
        try:
            self._executor.abandon()
            self._save()
        except (FuyouError, OSError, RuntimeError, MemoryError, ValueError) as failure:  # the first error is the one to fix
            error.add_note(f"saving the state also failed: {failure}")
        except KeyboardInterrupt:
            error.add_note("saving the state was interrupted")

    def _is_whole(self, error: Exception) -> bool:
        """Tells whether the state is still as the last step left it."""
        if isinstance(error, NumericsError | RecomputeError):
            return not error.changed  # True if the error was found before any update
        if isinstance(error, DeviceMemoryError):
            return self._may_abandon()
        if isinstance(error, SwapError | OutOfSpaceError) and not isinstance(error, DataSpaceError):
            return self._doing.telling  # an error of a log is harmless; after one of the store its content is not known
        return not self._doing.step or (self._executor.may_abandon() and not isinstance(error, FuyouError))

    def _tell(self, error: Exception) -> None:
        """Adds to the error what is saved of the run."""
        saved = self._what_is_saved()
        if isinstance(error, NumericsError):
            error.hint = self._after_bad_numbers(error)
        elif isinstance(error, UsageError) and not self._doing.training:
            return  # the same command finds this error again
        elif isinstance(error, DamagedStateError):
            return  # what is saved is what is damaged
        elif isinstance(error, ModelFileError):
            error.hint = self._after_a_changed_file()
        elif isinstance(error, DataError):
            error.hint = f"{error.hint}; {self._after_bad_data()}" if error.hint else self._after_bad_data()
        elif isinstance(error, FuyouError):
            error.hint = f"{error.hint}; {saved}" if error.hint else saved
        else:
            error.add_note(saved)

    def _after_bad_numbers(self, error: NumericsError) -> str:
        """Says what to do: the same command would compute the same numbers, and a saved run accepts no other rate or data."""
        step, row = self._saver.saved_step or 0, self._saver.standing.skipped_in_row
        hint = f"{error.hint}; both need checkpoint.resume=never, which starts over"
        if error.changed:
            hint = f"updates of the step had begun, so the run goes back to its last commit, after step {step}; {hint}"
        elif self._planned.plan.clip_grad_norm is not None:
            skipping = f"the {row} steps before were skipped too" if row else "nothing was updated"
            hint = f"{skipping}: train.skip_nonfinite={row + 1} skips such a step and goes on; or {hint}"
        return f"{hint} (the state after step {step} is saved: fuyou export {self._saver.folder} OUT)"

    def _after_a_changed_file(self) -> str:
        """Says what to do: what is saved was computed with the file as it was."""
        saved = self._saver.commits.last
        compared = saved is None or saved.knows_pieces
        back = "put the file back as it was" + ("" if compared else ", with its time of change (cp -p)")
        where = f"continues from the state after step {saved.step}" if saved is not None and saved.step else "starts over"
        return f"{back}: then the same command{self._without} {where}. With another file, start over: checkpoint.resume=never"

    def _after_bad_data(self) -> str:
        """Says what to do: the same command would find the same data, and a saved run accepts no other."""
        step = self._saver.saved_step or 0
        saved = f"the state after step {step} is saved: fuyou export {self._saver.folder} OUT; " if step else ""
        onward = (
            ", and model.name_or_path=OUT to begin with that model" if step and self._planned.recipe.adapter is None else ""
        )
        return f"{saved}with other data a run starts over: checkpoint.resume=never{onward}"

    @property
    def _without(self) -> str:
        """Names the option that the same command must leave out to go on."""
        return ", without checkpoint.resume=never," if self._planned.recipe.checkpoint.resume == "never" else ""

    def _what_is_saved(self) -> str:
        folder, step = self._saver.folder, self._saver.saved_step
        if not step:
            return (
                f"{'no step is saved' if self._step else 'nothing was trained yet'}: the same command starts from the beginning"
            )
        return f"the state after step {step} is saved in {folder}: the same command{self._without} continues from there"
