"""Runs a recipe: opens store, daemon, device and executor, runs the steps, saves, and closes everything in order.

`Run.train` is the loop. A step can be given up until its first update begins; whatever ends the run, the last whole state is
saved. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 (Slurm's, before a job's time is over) are handled by what the run is doing
(`StopRequests`): nothing that could be saved is lost without a warning.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..core.disk import status_of
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
    UnreadableError,
    UsageError,
)
from ..core.json_files import from_json
from ..core.paths import own_folder
from ..core.process import Patience
from ..core.units import gib
from ..data.batches import lay_out
from ..engine.compiled import CompiledBlocks
from ..engine.context import HostMemory
from ..engine.devices import compute_repeatably, naming_operators, open_device
from ..engine.devices.base import Device
from ..engine.executor import Executor, StepAbandoned
from ..engine.updates import Optimizer
from ..planner.schedule import Visit
from ..spec.model import ModelSpec
from ..spec.plan import Plan, Span
from ..swap.daemon import DaemonOptions, SwapDaemon
from ..swap.store import Arena, Store
from .adapting import added_values
from .evaluation import AnyReport, Evaluations
from .length import LearningRate, RunLimits, check_loading, learning_rate, writes, written_by_step
from .loggers import Trace
from .numerics import gpu_most
from .peers import box_sums
from .prepare import Planned, Ready
from .report import RankFigures, RunReport, StepReport, Steps, run_report, settling_steps
from .state import manifest as manifests
from .state.resume import check_same_stages, check_same_store, check_stages, check_still_new
from .state.saver import Saver, Standing, seed_generators
from .state.storage import StageFiles
from .state.store_folders import STORE_FILE, begin_parts, check_space, discard_parts, remember_drives, write_parts
from .step_meter import MemoryWatch, StepMeter, Trimming

if TYPE_CHECKING:
    from ..engine.replicas import Replicas

# What a run is doing, or was doing when an error ended it. "over": it has trained to its end.
Activity = Literal["loading", "between steps", "step", "evaluating", "reporting", "saving", "over"]
_FIRST = 3  # steps within which every parameter should get a gradient
_NAMED = 5  # parameters without a gradient that a note names
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_KEY = "offload.max_memory.gpu"
_MORE = 1.02  # a smaller excess over the limit does not count as free memory
# Messages of libraries that do not use torch's allocator.
_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stop:
    """Says why a run stops before its next step. `limit`: what is said of the recipe's that is reached; `asked_by`: the
    first rank with a reason."""

    limit: str | None
    asked_by: int | None = None


class Run:
    """An open run. `announce` shows a message. `ends_process`: signals are ignored once the run has failed, while its opener
    reports why."""

    def __init__(
        self, ready: Ready, *, announce: Callable[[str], None] = lambda text: None, ends_process: bool = False
    ) -> None:
        planned = ready.planned
        self.ready, self.planned, self.plan, self.model = ready, planned, planned.plan, planned.model
        self.memory = MemoryWatch()
        self._trimming = Trimming(self.model, self.plan, self.memory)
        self._peers = planned.peers
        self.standing = Standing.of(planned.manifest)
        if self._peers is not None:  # a new run has one name
            self.standing.run = self._peers.of_first("run", lambda: self.standing.run)
        self._announce = announce
        self.stopping = StopRequests(
            announce, may_abandon=self._may_abandon, at_stake=self._at_stake, to_the_end=ends_process,
            passed_on=self._peers is not None,
        )  # fmt: skip
        self._limits = RunLimits(planned.recipe, planned.plan)
        self._steps = Steps(settling=settling_steps(planned.plan, resumed=planned.manifest is not None))
        self._began = time.monotonic()
        self._announced_peak = 0  # bytes of RAM over the budget that were said
        with ExitStack() as opening:
            opening.enter_context(self.stopping)  # closed last
            opening.enter_context(self.memory)
            self._stack = opening
            self._open()
            self._stack = opening.pop_all()

    @property
    def step(self) -> int:
        """Returns the number of finished steps."""
        return self.standing.step

    @property
    def losses(self) -> list[float]:
        return self.standing.losses

    # ---- opening and closing -------------------------------------------------------------------------------------

    def _open(self) -> None:
        plan, planned = self.plan, self.planned
        torch.set_num_threads(plan.numerics.torch_threads)
        seed_generators(planned.recipe.seed)
        self._folders = RunFolders(planned, self.standing.run)
        self._folders.claim()
        arena = self._stack.enter_context(Arena(max(plan.arena_size, 1 << 21)))
        self._device_most = gpu_most(planned.recipe, planned.hardware)
        if planned.recipe.train.deterministic and plan.device != "cpu":
            self._stack.callback(compute_repeatably())
        self.device = open_device(plan.device, memory=self._device_most)
        self._stack.callback(self.device.close)  # closed before the arena is unmapped, because its copies use the arena
        self.store = self._folders.open_store(self._stack)
        names = {stage.index: stage.name for stage in self.model.stages}
        patience = Patience(self._announce, progress=self._moved, where=self._where)
        options = DaemonOptions.of(plan.io, data_sums=planned.recipe.offload.verify_reads)
        self.daemon = self._stack.enter_context(SwapDaemon(arena, self.store, options, label_names=names, patience=patience))
        self.host_memory = HostMemory(arena)
        self._open_engine(patience)

    def _open_engine(self, patience: Patience) -> None:
        """Opens what computes and what saves, over the store, the daemon and the device."""
        plan, planned, memory = self.plan, self.planned, self.host_memory
        self.device.pin(memory.tensor(Span(offset=0, size=memory.arena.size), torch.uint8))
        asked = planned.recipe.optimizer
        beta1, beta2 = asked.betas
        rule = Optimizer(lr=asked.lr, beta1=beta1, beta2=beta2, epsilon=asked.eps, weight_decay=asked.weight_decay)
        with self._naming_device_errors():
            self.executor = Executor(
                anatomy=planned.anatomy, model=self.model, plan=plan, daemon=self.daemon, memory=memory, device=self.device,
                optimizer=rule, patience=patience,
                compiled=CompiledBlocks(say=self._announce) if planned.recipe.train.compile else None,
                between_micro_batches=self._between_micro_batches, after_visit=self._after_visit,
                ranks=None if planned.ring is None else planned.ring.ranks, replicas=self._replicas(),
            )  # fmt: skip
        self._stack.callback(self.executor.close)
        visits = self.executor.visits
        self.files = StageFiles(model=self.model, plan=plan, daemon=self.daemon, memory=memory, states=visits.states)
        self.saver = Saver(
            self.ready, self.standing, files=self.files, residency=visits.residency, store=self.store, device=self.device,
            say=self._announce, patience=patience,
        )  # fmt: skip
        self._stack.callback(self.saver.commits.close)
        # The ledger asks the saver which generation is durable, and the saver reads the ledger: one must come after the other.
        visits.moves.committing = self.saver
        stalls = visits.residency.stalls
        self._meter = StepMeter(
            model=self.model, daemon=self.daemon, device=self.device, stalls=stalls, memory=self.memory,
            flops_per_token=planned.whole.flops_per_token,
        )  # fmt: skip
        self.rates = self._learning_rate()
        self._evaluations = Evaluations(self.ready, self.standing, self.executor, store=self.store.paths[0].parent)

    def _learning_rate(self) -> LearningRate:
        planned = self.planned
        return learning_rate(planned.recipe, planned.total_steps, peak_after_warmup=self.standing.peak_after_warmup)

    def _replicas(self) -> Replicas | None:
        if self._peers is None or not self._peers.are_replicas:
            return None
        from ..engine.replicas import Replicas  # loads torch.distributed, which one process does not need

        return Replicas(self._peers.ranks, self._peers.exchange)

    @contextmanager
    def _naming_device_errors(self) -> Iterator[None]:
        with naming_device_errors(self.device, self.plan, self._device_most, self._where), naming_operators():
            yield

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def load(self, progress: Callable[[int], None]) -> None:
        """Loads the model's weights as generation 0, or restores the saved state. `progress` gets the parameters loaded, or the
        bytes of saved state that were read and checked."""
        saved = self.planned.saved
        with self._saving_what_is_whole():
            if not self.planned.is_copy:
                self._folders.keep()
                remember_drives(self.planned.directories, say=self._announce)
            if saved is not None and not saved.moves:
                self.saver.restore(saved, progress)
            else:
                self._begin(progress)
            if self._peers is not None and self._peers.are_replicas:
                self.saver.share_saved(self._peers, resumed=saved is not None)
                self.rates = self._learning_rate()

    def _begin(self, progress: Callable[[int], None]) -> None:
        """Fills the store for a new run."""
        if not self.planned.is_copy:
            self.saver.give_up_what_was()
            write_parts(self.standing.run, self.planned.directories)
        if (saved := self.planned.saved) is not None:
            self.saver.bring(saved, progress)
            return
        added = added_values(self.planned.recipe, self.planned.anatomy.model)
        self.files.load(self.ready.entries, added, self.executor.visits.residency.records, progress)

    def trace(self, trace: Trace) -> None:
        """Passes every later step to `trace`."""
        self._meter.trace(trace, self.executor.visits)

    # ---- stepping ------------------------------------------------------------------------------------------------

    def train(self, on_step: Callable[[StepReport], None], on_evaluation: Callable[[AnyReport], None] = lambda _: None) -> None:
        """Trains until the last step. Raises Interrupted, state saved, after a request to stop with steps left to do, or where
        the next one would pass a limit of the recipe; what `on_step` or `on_evaluation` raises ends the run in the same
        way."""
        self.stopping.doing = "between steps"
        with self._saving_what_is_whole():
            self.host_memory.take()
            self.saver.begin_training()
            self.executor.skipped = self.standing.skipped
            self._limits.begin(self.step, self._written)
            self._evaluations.begin(self._announce)
            stop: _Stop | None = None
            self._evaluate(on_evaluation)
            ends_early = self._agree_to_end_early()
            while self.step < self.planned.total_steps and not ends_early:
                stop = self._agree_to_stop()
                self._announce_stop(stop)
                report = self._one_step() if stop is None else None
                if report is None:
                    self.executor.abandon()
                    break
                self._steps.add(report)
                self._limits.took(report)
                self.stopping.doing = "reporting"
                on_step(report)
                self.stopping.doing = "between steps"
                self._evaluate(on_evaluation)
                ends_early = self._agree_to_end_early()
                self._announce_over_budget()
            self.save()
            if ends_early:
                if not self.planned.is_copy:  # which has evaluated nothing
                    self._announce(self._evaluations.told)
            elif self.step < self.planned.total_steps:
                why = f": {stop.limit}" if stop is not None and stop.limit else ""
                if self._peers is not None:
                    self._peers.ends_together = True  # every rank stops here, with this step saved
                raise Interrupted(f"stopped after step {self.step} of {self.planned.total_steps}{why}")
        self.stopping.doing = "over"

    def _agree_to_stop(self) -> _Stop | None:
        """Returns why the run stops before its next step; None: it goes on. Ranks stop together, before the same step, as soon
        as one has a reason."""
        seconds = time.monotonic() - self._began
        if self._peers is None:
            limit = self._limits.reached(seconds=seconds, written=self._written)
            return _Stop(limit=limit) if limit or self.stopping.requested else None
        limit = self._limits.time(seconds)
        most = self.planned.recipe.offload.ssd_write_limit
        tells = (most or 0, self._written, self._limits.due(self._written), written_by_step(self.plan))
        asked_by, of_ranks = self._peers.asking(self.stopping.requested or limit is not None, tells)
        limit = limit or next(filter(None, (writes(*sums) for sums in box_sums(self._peers.boxes, of_ranks))), None)
        return None if limit is None and asked_by is None else _Stop(limit=limit, asked_by=asked_by)

    def _announce_stop(self, stop: _Stop | None) -> None:
        """Says what stops the run, unless it was asked to here, which has been said."""
        if stop is None:
            return
        if stop.limit:
            self._announce(f"{stop.limit};\nstopping and saving the state")
        elif stop.asked_by is not None and not self.stopping.requested and self._peers is not None:
            self._announce(f"{self._peers.named(stop.asked_by)} stops: stopping and saving the state")

    def _agree_to_end_early(self) -> bool:
        """Tells whether the last evaluation ends the run. Of replicas the first one evaluates, and all ask it."""
        ends = self._evaluations.stop
        if self._peers is None or not self._peers.are_replicas or self.planned.recipe.train.early_stopping is None:
            return ends
        first: bool = self._peers.ranks.gather(ends)[0]
        return first

    def _evaluate(self, on_evaluation: Callable[[AnyReport], None]) -> None:
        """Evaluates where that is due after the last step; a request to stop ends it at once."""
        for part in self._evaluations.due(self.step):
            self.stopping.doing = "evaluating"
            try:
                with self._naming_device_errors():
                    reports = part(self.step)
            except StepAbandoned:
                self.stopping.doing = "between steps"
                return
            self.stopping.doing = "reporting"
            for report in reports:
                on_evaluation(report)
            self.stopping.doing = "between steps"

    def _announce_over_budget(self) -> None:
        """Says that the process takes more than it may, when that happens, and again when it has grown by a tenth."""
        peak, budget = self.memory.peak, self.plan.cpu_budget
        if peak > max(budget, self._announced_peak * 1.1):
            self._announced_peak = peak
            self._announce(
                f"note: after step {self.step} the process has taken {gib(peak)} of RAM, {gib(peak - budget)} more than "
                f"offload.max_memory.cpu ({gib(budget)}) allows; the plan has {gib(self.plan.predicted.cpu_peak)}"
            )

    @property
    def _written(self) -> int:
        """Returns the bytes written to the store by this process and those before it."""
        return self.standing.written_before + self.daemon.counters().written_bytes

    def _moved(self) -> tuple[int, ...]:
        """Returns numbers that change whenever data moves or updates run."""
        counters = self.daemon.counters()
        return counters.read_bytes, counters.written_bytes, counters.update_params

    def _where(self) -> str:
        """Says what the run is doing."""
        doing = self.stopping.doing
        if doing == "loading":
            return doing
        if doing != "step":
            return f"{'evaluating ' if doing == 'evaluating' else ''}after step {self.step}"
        visit = self.executor.visits.schedule.visits[self.executor.visits.lookahead.cursor]
        return f"step {self.step + 1}, {visit.phase} of {self.model.stages[visit.stage].name}"

    def _one_step(self) -> StepReport | None:
        """Runs one step. Returns None if it was given up on request."""
        planned, rows, sampler = self.planned, self.ready.rows, self.ready.sampler
        if not sampler.is_ready(self.step, lambda: self.stopping.requested):
            return None
        plan, indices = self.plan, sampler.batch(self.step)
        batch = lay_out(rows, indices, pad_id=rows.summary.pad_id, numerics=plan.numerics, sweeps=plan.sweeps)
        ids, labels = batch.tensors()
        number, lr = self.step + 1, self.rates.at(self.step + 1)
        last = number == planned.total_steps or bool(self._evaluations.due(number))
        self._meter.begin()
        self.stopping.doing = "step"
        self.executor.may_skip = self.standing.skipped_in_row < planned.recipe.train.skip_nonfinite
        try:
            with self._naming_device_errors():
                outcome = self.executor.step(
                    ids, labels, step=number, lr=lr, last=last, documents=batch.documents, sweeps=batch.sweeps,
                    real=batch.real() if self.executor.anatomy.has_experts else None,
                )  # fmt: skip
        except StepAbandoned:
            self.stopping.doing = "between steps"
            return None
        self._meter.end()
        self.standing.is_over(skipped=bool(outcome.skipped))
        self.stopping.doing = "between steps"
        self.losses.append(outcome.loss)
        self.saver.step_is_over()
        is_new = planned.manifest is None
        if is_new and self.step == _FIRST and (unreached := _unreached(self.model, self.executor.reached)):
            self._announce(unreached)
        if outcome.skipped:
            row, most = self.standing.skipped_in_row, planned.recipe.train.skip_nonfinite
            self._announce(
                f"{outcome.skipped};\nthe step is skipped and changes nothing ({row} in a row, at most {most} are allowed)"
            )
        return self._meter.report(outcome, step=self.step, total_steps=planned.total_steps, lr=lr, tokens=batch.tokens)

    def _between_micro_batches(self) -> None:
        self._trimming.between_micro_batches()
        self._stop_here()

    def _stop_here(self) -> None:
        if self._peers is not None:
            self._peers.check()  # others wait for this step: it is given up only where a peer is lost
            return
        if self.stopping.requested and (self.stopping.doing == "evaluating" or self.executor.may_abandon()):
            raise StepAbandoned

    def _after_visit(self, visit: Visit) -> None:
        visits = self.executor.visits.schedule.visits
        self._trimming.between_visits(visit, visits[(visit.index + 1) % len(visits)])
        self._stop_here()  # a step of one micro-batch can stop only here

    # ---- ending --------------------------------------------------------------------------------------------------

    @contextmanager
    def _saving_what_is_whole(self) -> Iterator[None]:
        """Saves the last whole state, whatever ends the run inside the context, and says what is saved."""
        try:
            try:
                yield
            except Exception as error:
                self._rescue(error)
                raise
        except KeyboardInterrupt:
            self.stopping.end()
            self.saver.commits.close()  # waits for a commit under way, which then counts
            hint = what_is_saved(self.planned, self.saver)
            raise Interrupted(self._stopped_where(), hint=hint, lost=self._unsaved_steps > 1) from None
        except Exception as error:
            self.stopping.end()
            add_what_is_saved(error, self.planned, self.saver, training=self.stopping.doing != "loading")
            raise

    def _rescue(self, error: Exception) -> None:
        """Saves the last whole step when an error ends the training, unless the error may have damaged the state."""
        # of several ranks the others may be elsewhere, and would not commit this step
        is_in_vain = self.stopping.doing in ("loading", "saving") or self.saver.commits.has_failed or self._peers is not None
        if is_in_vain or isinstance(error, Interrupted) or not self._is_whole(error):
            return
        try:
            self.executor.abandon()
            self.save()
        except (FuyouError, OSError, RuntimeError, MemoryError, ValueError) as failure:  # the first error is the one to fix
            error.add_note(f"saving the state also failed: {failure}")
        except KeyboardInterrupt:
            error.add_note("saving the state was interrupted")

    def _is_whole(self, error: Exception) -> bool:
        """Returns whether the state is still as the last step left it."""
        if isinstance(error, NumericsError | RecomputeError):
            return not error.changed  # True if the error was found before any update
        if isinstance(error, DeviceMemoryError):
            return self._may_abandon()
        if isinstance(error, SwapError | OutOfSpaceError) and not isinstance(error, DataSpaceError):
            # An error of a log is harmless; after one of the store its content is not known.
            return self.stopping.doing == "reporting"
        return self.stopping.doing != "step" or (self.executor.may_abandon() and not isinstance(error, FuyouError))

    def _may_abandon(self) -> bool:
        """Returns whether the state can be saved once the micro-batch under way is done."""
        return self.stopping.doing != "step" or self.executor.may_abandon()

    @property
    def _unsaved_steps(self) -> int:
        """Returns how many whole steps would be computed again if the process ended now."""
        return self.step - (self.saver.saved_step or 0)

    def _at_stake(self) -> str:
        """Says what stopping at once would lose: the steps to compute again, including the one under way."""
        lost = self._unsaved_steps + (self.stopping.doing == "step")
        return "this step" if lost <= 1 else f"{lost} steps: the last saved step is {self.saver.saved_step or 0}"

    def _stopped_where(self) -> str:
        if self.stopping.doing == "loading":
            return "stopped while loading"
        if self.stopping.doing == "saving":
            return f"stopped while saving the state after step {self.step}"
        return f"stopped at once in step {self.step + 1}"

    # ---- saving and reporting ------------------------------------------------------------------------------------

    def save(self) -> None:
        """Brings all stages to one generation, on stable storage, with a manifest that names it."""
        self.stopping.doing = "saving"
        self.executor.drain()
        self.saver.save()
        self.stopping.doing = "between steps"

    def report(self) -> RunReport:
        """Sums up the run."""
        implementation, kernel = self.planned.anatomy.model.config._attn_implementation, self.executor.attention.kernel
        report = run_report(
            self._steps,
            losses=self.losses,
            flops_per_token=self.planned.whole.flops_per_token,
            seconds=time.monotonic() - self._began,
            ram_budget=self.plan.cpu_budget,
            ram_peak=self.memory.peak,
            written_total=self._written,
            output_dir=self.planned.recipe.output_dir,
            commit_interval=self.plan.commit_every if self.plan.has_apart_commits else None,
            attention=f"{implementation}, {kernel}" if kernel else str(implementation),
            best=self._evaluations.best,
        )
        if (peers := self._peers) is None:
            return report
        told = peers.all_gather("figures", asdict(report.of_rank(peers.hosts[peers.rank], self.plan.predicted.cpu_peak)))
        return replace(report, ranks=tuple(from_json(RankFigures, one) for one in told))


def _unreached(model: ModelSpec, reached: set[str]) -> str:
    """Returns a note that names the parameters without any gradient so far, empty if there are none."""
    tensors = dict.fromkeys(tensor.name for stage in model.stages for tensor in stage.trained_tensors)
    names = [name for name in tensors if name not in reached]
    more = f" and {len(names) - _NAMED:,} others" if len(names) > _NAMED else ""
    listed = ", ".join(names[:_NAMED]) + more
    return f"note: {listed} got no gradient in {_FIRST} steps, so they are not trained" if names else ""


# ---- signals -----------------------------------------------------------------------------------------------------------


class StopRequests:
    """Sets `requested` at the first signal while training or saving, and says what a second one would lose. A second one raises
    KeyboardInterrupt, wherever the run is. While loading nothing can be lost, so the first one raises it.

    `doing` decides what a signal means. `may_abandon` tells whether the step under way can be given up, `at_stake` what a
    second signal would lose: both are asked while training. Signals are caught from enter to exit. With `to_the_end`, an exit
    by an error leaves them ignored, because the process is about to report how it ended, and to end.

    `passed_on`: a launcher gives them to this process, and so may what ends the job (Slurm, systemd), which gives them to every
    process: then nothing but Ctrl-C is a second one.
    """

    def __init__(
        self, announce: Callable[[str], None], *, may_abandon: Callable[[], bool], at_stake: Callable[[], str],
        to_the_end: bool = False, passed_on: bool = False,
    ) -> None:  # fmt: skip
        self.requested = False
        self.doing: Activity = "loading"
        self._announce, self._may_abandon, self._at_stake, self._to_the_end = announce, may_abandon, at_stake, to_the_end
        self._passed_on = passed_on
        self._before: dict[int, Any] = {}
        self._has_ended, self._insisted = False, 0  # signals since `end`

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

    def end(self) -> None:
        """Ignores signals from now on, because all that can be saved is saved. Two more Ctrl-C end a wait for a drive that may
        never answer."""
        self._has_ended = True

    def _request(self, number: int, frame: FrameType | None) -> None:
        repeats = number == signal.SIGHUP or (self._passed_on and number != signal.SIGINT)  # a closing terminal may send two
        if self._has_ended and not repeats:
            self._insisted += 1
            if self._insisted > 1:
                os._exit(Interrupted.exit_code)
            self._say("waiting for the drives; a second Ctrl-C ends the process at once (the committed state is safe)")
        elif not self._has_ended and (self.doing in ("loading", "over") or (self.requested and not repeats)):
            raise KeyboardInterrupt
        elif not self._has_ended and not self.requested:
            self.requested = True
            self._say(f"{self._what_follows()};\na second Ctrl-C loses {self._at_stake()}")

    def _what_follows(self) -> str:
        if self.doing == "saving":
            return "saving the state"
        if self._may_abandon():
            return "stopping at the next micro-batch, then saving the state"
        return "finishing this step, whose updates have begun, then saving the state"

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # the signal came while Python was writing another line; it cannot write now
            self._announce(text)


# ---- device memory -----------------------------------------------------------------------------------------------------


@contextmanager
def naming_device_errors(device: Device, plan: Plan, most: int | None, where: Callable[[], str]) -> Iterator[None]:
    """Turns a lack of device memory inside the context into an error that says what to do. `most`: bytes allowed."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in _OUT_OF_MEMORY):
            raise
        raise _out_of_memory(error, device, plan, most, where()) from error


def _out_of_memory(error: RuntimeError, device: Device, plan: Plan, most: int | None, where: str) -> DeviceMemoryError:
    used, free = 0, None
    with suppress(RuntimeError):  # the device's context may have failed
        used, free = device.memory(), device.free_memory()
    reason = (str(error).strip().splitlines() or ["no details"])[0].partition(". GPU ")[0].rstrip(".")
    allowed = f", {gib(most)} are allowed ({_KEY})" if most is not None else f" ({_KEY} sets no limit)"
    numbers = f"{gib(plan.predicted.gpu_peak)} are planned, {gib(used)} in use{allowed}"
    return DeviceMemoryError(f"{where}: out of device memory: {reason}; {numbers}", hint=_advice(plan, used, free, most))


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
    if step is None and planned.saved is not None and planned.moves:
        before = planned.saved
        return (
            f"the state after step {before.manifest.step} is still saved in {before.folder}: the same command goes on from it"
        )
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
        if error.hint is not None and added in error.hint:
            return  # another rank's, which has said it
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


# ---- the folders of a store -------------------------------------------------------------------------------------------


class RunFolders:
    """Holds the folders of a run's store, one per striped directory."""

    def __init__(self, planned: Planned, run: str) -> None:
        self._planned, self._run = planned, run
        self._first = planned.directories[0]  # where the manifest is
        self._paths = [directory / STORE_FILE for directory in planned.directories]
        self._unnamed: list[Path] = []  # files that this run made and no manifest names yet

    def claim(self) -> None:
        """Checks that a saved run is still the one in the plan, and that the folders have room for the store."""
        planned, plan = self._planned, self._planned.plan
        if planned.manifest is not None and planned.moves:
            check_same_stages(planned.manifest, planned.model)
        elif planned.manifest is not None:
            check_same_store(planned.manifest, self._paths, stripe=plan.io.stripe)
            check_stages(planned.manifest, planned.model, plan)
        else:
            check_loading(planned.recipe, plan)
        for directory, path in zip(planned.directories, self._paths, strict=True):
            own_folder(directory)
            if path.is_file() and path.stat().st_nlink > 1:
                raise UsageError(f"{path} has a second name (hard link), which would be overwritten", hint="move it away")
        check_space(self._paths, plan.store_size)

    def open_store(self, closing: ExitStack) -> Store:
        """Opens and locks the store until `closing` ends. Only then is its manifest sure to stay as it is."""
        planned, io = self._planned, self._planned.plan.io
        if planned.manifest is None or planned.moves:
            self._unnamed = begin_parts(self._run, planned.directories)
        try:
            opened = Store.open(self._paths, stripe=io.stripe, size=planned.plan.store_size, create=True)
        except BaseException:
            self._remove_unnamed(held=False)
            raise
        store = closing.enter_context(opened)
        closing.callback(self._remove_unnamed, held=True)
        store.attach(planned.model.sources)
        if planned.is_copy:  # nobody goes on from it: it goes with this process, however that ends
            self._unnamed = self._paths
            self._remove_unnamed(held=True)
            for directory in planned.directories:
                with suppress(OSError):
                    directory.rmdir()
        elif planned.saved is not None:
            planned.saved.check_current()
        elif planned.recipe.checkpoint.resume != "never":
            check_still_new(self._first)
        return store

    def keep(self) -> None:
        """Keeps the store's files from now on: a manifest names them, or will do so next."""
        self._unnamed.clear()

    def _remove_unnamed(self, *, held: bool) -> None:
        """Removes store files that this run made but never loaded into, while they are locked (`held`: by the open store). No
        manifest says whose they are.

        If there is a manifest beside them, another run has made them meanwhile; if one is locked, another run has it.
        """
        # the reason the run ended matters more; what cannot be removed stays
        with suppress(OSError, UnreadableError), ExitStack() as locked:
            if self._unnamed and status_of(self._first / manifests.NAME, follow=False) is None:
                for path in self._unnamed if not held else ():
                    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    locked.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                discard_parts(self._unnamed)
