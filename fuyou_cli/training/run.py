"""A run: store, daemon, device and executor opened together, stepped, saved and closed in order."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType

import torch

from ..core.errors import Interrupted, UsageError
from ..engine.devices import open_device
from ..engine.executor import Executor, StepAbandoned, StepOutcome
from ..engine.host_memory import HostMemory
from ..engine.updates import LearningRate, Optimizer
from ..spec.plan import Span
from ..swap.arena import Arena
from ..swap.daemon import Counters, DaemonOptions, SwapDaemon
from ..swap.store import Store
from . import manifest as manifests
from .data import collate
from .manifest import Manifest
from .prepare import Prepared
from .report import Busy, RunReport, StepReport
from .storage import STORE_FILE, StageFiles, check_space

_REQUESTS = 4096
_SAMPLE_SECONDS = 0.02


class Run:
    """An open run. `memory_now` gives the process's anonymous and kernel bytes; `free_space` a folder's."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        memory_now: Callable[[], int],
        free_space: Callable[[Path], int],
        trim: Callable[[], None] = lambda: None,
    ) -> None:
        self.prepared, self.plan, self.model = prepared, prepared.plan, prepared.model
        self.memory = MemoryWatch(memory_now)
        self._trim = trim  # gives freed memory back to the system; called after every visit
        self.losses: list[float] = list(prepared.manifest.losses) if prepared.manifest else []
        self.step = prepared.manifest.step if prepared.manifest else 0
        self.written_before = prepared.manifest.written_total if prepared.manifest else 0
        self.stop_requested = False
        self._steps: list[StepReport] = []
        self._began = time.monotonic()
        self._stack = ExitStack()
        self._stack.enter_context(self.memory)
        try:
            self._open(free_space)
        except BaseException:
            self._stack.close()
            raise

    # ---- opening and closing -------------------------------------------------------------------------------------

    def _open(self, free_space: Callable[[Path], int]) -> None:
        plan, prepared = self.plan, self.prepared
        torch.set_num_threads(plan.numerics.torch_threads)
        self.paths = [directory / STORE_FILE for directory in prepared.directories]
        if prepared.manifest is not None:
            _check_same_run(prepared.manifest, prepared, self.paths)
        for directory in prepared.directories:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_space(self.paths, plan.store_size, free_space)
        arena = self._stack.enter_context(_open_arena(plan.arena_size))
        self.device = open_device(plan.device)
        self._stack.callback(self.device.close)  # its copies reach into the arena: closed before that is unmapped
        self.store = self._stack.enter_context(
            Store.open(self.paths, stripe=plan.io.stripe, size=plan.store_size, create=True)
        )
        self.daemon = self._stack.enter_context(
            SwapDaemon(
                arena,
                self.store,
                DaemonOptions(
                    backend=plan.io.backend,
                    read_depth=plan.io.read_depth,
                    write_depth=plan.io.write_depth,
                    update_threads=plan.io.update_threads,
                    requests=_REQUESTS,
                    chunk_params=plan.io.chunk_params,
                    block_size=plan.io.block_size,
                    scratch_offset=plan.io.scratch.offset,
                    scratch_size=plan.io.scratch.size,
                ),
                label_names={stage.index: stage.name for stage in self.model.stages},
            )
        )
        memory = HostMemory(arena)
        self.device.pin(memory.tensor(Span(offset=0, size=arena.size), torch.uint8))
        self.optimizer = _optimizer(prepared)
        self.executor = Executor(
            anatomy=prepared.anatomy,
            model=self.model,
            plan=plan,
            daemon=self.daemon,
            memory=memory,
            device=self.device,
            optimizer=self.optimizer,
        )
        self._stack.callback(self.executor.close)
        self.executor.between_micro_batches = self._between_micro_batches
        self.executor.after_visit = self._trim
        self.files = StageFiles(model=self.model, plan=plan, daemon=self.daemon, memory=memory)
        self.rates = _learning_rate(prepared)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def load(self, progress: Callable[[int], None]) -> None:
        """The model's weights as the store's generation 0, or the saved run's state."""
        records = self.executor.residency.records
        saved = self.prepared.manifest
        if saved is None:
            self.save_manifest("running")  # what an earlier run committed here is about to be overwritten
            self.files.load(self.prepared.entries, records, progress)
        else:
            self.files.restore(saved.stages, records)
        self.save_manifest("running")

    # ---- stepping ------------------------------------------------------------------------------------------------

    def train(self, on_step: Callable[[StepReport], None]) -> None:
        """Steps until the last one. Raises Interrupted, state saved, after a request to stop."""
        with self._signals():
            while self.step < self.prepared.total_steps:
                if self.stop_requested:
                    self._stop()
                report = self._one_step()
                if report is None:
                    self._stop()
                    continue
                self._steps.append(report)
                on_step(report)
        self.save()

    def _one_step(self) -> StepReport | None:
        prepared = self.prepared
        assert prepared.rows is not None and prepared.sampler is not None
        batch = collate(
            prepared.rows,
            prepared.sampler.batch(self.step),
            pad_id=prepared.rows.summary.pad_id,
            max_len=self.plan.numerics.max_seq_len,
        )
        ids, labels = batch.tensors()
        number, lr = self.step + 1, self.rates.at(self.step + 1)
        before, stalls_before = self.daemon.counters(), dict(self.executor.residency.stalls)
        self.daemon.events()
        begin = time.monotonic()
        try:
            outcome = self.executor.step(ids, labels, step=number, lr=lr, last=number == prepared.total_steps)
        except StepAbandoned:
            return None
        seconds = time.monotonic() - begin
        self.step, after = number, self.daemon.counters()
        self.losses.append(outcome.loss)
        stalls = {
            cause: total - stalls_before.get(cause, 0.0)
            for cause, total in self.executor.residency.stalls.items()
            if total > stalls_before.get(cause, 0.0)
        }
        return StepReport(
            step=number,
            total_steps=prepared.total_steps,
            loss=outcome.loss,
            lr=lr,
            grad_norm=outcome.grad_norm,
            tokens=outcome.label_tokens,
            batch_tokens=batch.tokens,
            seconds=seconds,
            tflops=6.0 * self.model.parameters * batch.tokens / seconds / 1e12,
            ram_now=self.memory.now(),
            ram_peak=self.memory.peak,
            read_bytes=after.read_bytes - before.read_bytes,
            written_bytes=after.written_bytes - before.written_bytes,
            update_cpu_seconds=(after.update_cpu_ns - before.update_cpu_ns) / 1e9,
            io_cpu_seconds=(after.ring_cpu_ns - before.ring_cpu_ns) / 1e9,
            stalls=stalls,
            timeline=self._timeline(outcome, begin),
        )

    def _timeline(self, outcome: StepOutcome, begin: float) -> tuple[Busy, ...]:
        names = [stage.name for stage in self.model.stages]
        busy = [
            Busy(
                resource="compute",
                label=f"{self._direction(item.phase)} {names[item.stage]}",
                begin=item.begin - begin,
                end=item.end - begin,
            )
            for item in outcome.intervals
        ]
        resources = {"read": "ssd read", "write": "ssd write", "update": "update"}
        busy += [
            Busy(
                resource=resources[event.operation],
                label=f"{event.operation} {names[event.label]}",
                begin=max(0.0, event.begin_ns / 1e9 - begin),
                end=event.end_ns / 1e9 - begin,
                bytes=event.bytes,
            )
            for event in self.daemon.events()
            if event.end_ns / 1e9 > begin
        ]
        return tuple(busy)

    def _direction(self, phase: str) -> str:
        """Where a visit counts: a whole head, which is both at once, with forward."""
        if phase == "head":
            return "backward" if self.model.head_is_cut else "forward"
        return "forward" if phase == "logits" else phase

    def _between_micro_batches(self) -> None:
        if self.stop_requested and self.executor.may_abandon():
            raise StepAbandoned

    # ---- stopping and saving -------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM asks the run to stop and save; the second one ends it at once."""

        def request(number: int, frame: FrameType | None) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True

        before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        self.executor.abandon()
        self.save()
        raise Interrupted(
            f"stopped after step {self.step} of {self.prepared.total_steps}; the state is saved in {self.paths[0].parent}",
            hint="the same command goes on from here",
        )

    def save(self) -> None:
        """Everything at one generation, on stable storage, and a manifest that says so."""
        self.executor.drain()
        self.files.save_resident(self.executor.residency.records)
        self.store.sync()
        self.save_manifest("committed")

    def save_manifest(self, state: str) -> None:
        prepared = self.prepared
        manifests.write(
            self.paths[0].parent,
            Manifest(
                files=tuple(str(path) for path in self.paths),
                stripe=self.plan.io.stripe,
                store_size=self.plan.store_size,
                state="committed" if state == "committed" else "running",
                step=self.step,
                written_total=self.written_before + self.daemon.counters().written_bytes,
                model_dir=str(prepared.model_dir.resolve()),
                architecture=self.model.architecture,
                compute_dtype=self.model.compute_dtype,
                numerics=asdict(self.plan.numerics),
                fingerprints=prepared.fingerprints,
                losses=tuple(self.losses),
                stages=self.files.describe(self.executor.residency.records, prepared.entries),
            ),
        )

    # ---- reporting -----------------------------------------------------------------------------------------------

    def report(self) -> RunReport:
        """The run beside its plan. Medians leave out the first step, which also warms up."""
        steps = self._steps
        later = steps[1:] or steps
        tokens = sum(step.batch_tokens for step in later)
        seconds = sum(step.seconds for step in later) or 1e-9
        stalls: dict[str, float] = {}
        for step in steps:
            for cause, waited in step.stalls.items():
                stalls[cause] = stalls.get(cause, 0.0) + waited
        predicted = self.plan.predicted
        counters: Counters = self.daemon.counters()
        return RunReport(
            steps=len(steps),
            seconds=time.monotonic() - self._began,
            first_loss=self.losses[0] if self.losses else float("nan"),
            last_loss=self.losses[-1] if self.losses else float("nan"),
            losses=tuple(self.losses),
            tokens_per_second=tokens / seconds,
            tflops=6.0 * self.model.parameters * tokens / seconds / 1e12,
            ram_budget=self.plan.cpu_budget,
            ram_peak=self.memory.peak,
            ram_predicted=predicted.cpu_peak,
            step_seconds=statistics.median(step.seconds for step in later) if later else 0.0,
            step_predicted=predicted.step_seconds,
            read_per_step=round(statistics.median(step.read_bytes for step in later)) if later else 0,
            read_predicted=predicted.read_per_step,
            written_per_step=round(statistics.median(step.written_bytes for step in later)) if later else 0,
            written_predicted=predicted.written_per_step,
            written_total=self.written_before + counters.written_bytes,
            stalls=stalls,
            timeline=steps[-1].timeline if steps else (),
            output_dir=str(Path(self.prepared.recipe.output_dir).expanduser()),
        )


class MemoryWatch:
    """Samples the process's memory from a thread of its own, so that peaks inside a computation are seen."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.now, self.peak = now, now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, self.now())

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _open_arena(size: int) -> Arena:
    return Arena(max(size, 1 << 21))


def _optimizer(prepared: Prepared) -> Optimizer:
    optimizer = prepared.recipe.optimizer
    return Optimizer(
        lr=optimizer.lr,
        beta1=optimizer.betas[0],
        beta2=optimizer.betas[1],
        epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )


def _learning_rate(prepared: Prepared) -> LearningRate:
    schedule, total = prepared.recipe.lr_scheduler, prepared.total_steps
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = round((schedule.warmup_ratio or 0.0) * total)
    return LearningRate(
        name=schedule.name,
        peak=prepared.recipe.optimizer.lr,
        warmup_steps=min(warmup, total),
        total_steps=total,
        min_ratio=schedule.min_lr_ratio,
        decay_steps=max(1, total // 10) if schedule.name == "wsd" else 0,
    )


def _check_same_run(saved: Manifest, prepared: Prepared, paths: list[Path]) -> None:
    """Raises UsageError naming what changed since the run was saved, before the store is touched."""
    stripe = prepared.plan.io.stripe
    if saved.files != tuple(map(str, paths)) or saved.stripe != stripe:
        raise UsageError(
            f"the saved run is striped over {', '.join(saved.files)} by {saved.stripe} bytes, not over "
            f"{', '.join(map(str, paths))} by {stripe}",
            hint="name the same folders in offload.dir, in the same order, or start over with checkpoint.resume=never",
        )
    changed = [name for name, value in prepared.fingerprints.items() if saved.fingerprints.get(name) != value]
    if changed:
        raise UsageError(
            f"the saved run cannot be resumed: {', '.join(sorted(changed))} changed since",
            hint="put it back as it was, or start over with checkpoint.resume=never",
        )
    if saved.step > prepared.total_steps:
        raise UsageError(f"the saved run has done {saved.step} steps, the recipe asks for {prepared.total_steps}")
