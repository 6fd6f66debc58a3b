"""Runs `fuyou finetune`: plans, shows the plan before anything is downloaded or tokenised, loads, trains, reports, exports."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.advice.facts import (
    RunFacts,
    beside_plan,
    check_export,
    check_output,
    export_folder,
    facts_of,
    of_rank,
    plan_problems,
    promises,
    room_of,
    with_evaluation,
)
from fuyou_cli.advice.planning import command_of, machine_here, warn_of_memory
from fuyou_cli.core import probe
from fuyou_cli.core.errors import FuyouError, Interrupted, PlanError, UsageError
from fuyou_cli.core.paths import open_own
from fuyou_cli.core.process import settle_allocator, settle_for_training, settle_libraries
from fuyou_cli.core.units import gb
from fuyou_cli.machine.measure.timing import BackgroundLoad
from fuyou_cli.training.adapting import configuration
from fuyou_cli.training.length import sampled_epoch
from fuyou_cli.training.loggers import LoggedRun, Loggers, Trace, libraries
from fuyou_cli.training.peers import place_of
from fuyou_cli.training.plan_step import plan, plan_downloaded, settle, with_waits
from fuyou_cli.training.prepare import check_resumed, fetch, inspect, resolve, tokenise
from fuyou_cli.training.report import EvalReport
from fuyou_cli.training.run_log import LOG, JsonlLog, holds_a_run, read_logged_plan
from fuyou_cli.training.state.at_rest import saved_store, size_of, to_compare
from fuyou_cli.training.state.kept_companions import keep_companions
from fuyou_cli.training.state.resume import in_words
from fuyou_cli.training.state.store_folders import check_same_drive

from .console import status_console, write_last_result, write_status
from .data_command import show_sample
from .error_screen import like_ctrl_c
from .launch import Rank
from .render.charts import timeline_svg
from .render.plan_screen import show_changed, show_length, show_plan
from .render.progress import RunDisplay, TransferDisplay, counting
from .render.report_screen import from_to, show_summary
from .render.theme import some

if TYPE_CHECKING:
    from fuyou_cli.data.rows import DataSummary
    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.swap.daemon import Counters
    from fuyou_cli.training.evaluation import AnyReport
    from fuyou_cli.training.peers import Peers
    from fuyou_cli.training.prepare import Planned, Ready
    from fuyou_cli.training.report import RunReport, StepReport
    from fuyou_cli.training.run import Run

_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EBADF)  # EBADF: NFS, for a folder
_GOES_ON = "the same command begins again, or goes on with the saved state"


@like_ctrl_c()
def run_finetune(
    loaded: LoadedRecipe,
    *,
    measure: bool = True,
    accept_changes: bool = False,
    verbose: bool = False,
    trace: Path | None = None,
) -> None:
    """Runs a recipe.

    `measure` measures a new machine first. `accept_changes` resumes a run with another rate, decay, schedule or length.
    `verbose` shows each step's traffic and waits. `trace` is the file for a trace of the newest steps.
    """

    offload, repeated = loaded.recipe.offload, loaded.recipe.train.deterministic
    settle_allocator()
    settle_libraries(device=offload.device, expandable_segments=offload.expandable_segments, deterministic=repeated)
    place = place_of(os.environ)
    if place is None:
        _finetune(loaded, measure=measure, accept_changes=accept_changes, verbose=verbose, trace=trace)
        return
    with Rank(place, loaded.recipe) as rank:
        rank.meet()
        _finetune(loaded, measure=measure, accept_changes=accept_changes, verbose=verbose, trace=trace, rank=rank)


def _finetune(
    loaded: LoadedRecipe, *, measure: bool, accept_changes: bool, verbose: bool, trace: Path | None, rank: Rank | None = None
) -> None:
    """Runs a recipe in this process: all of the model, or the share of one rank. Only the first rank has the output_dir, and
    logs, traces and exports."""
    check_output(loaded.recipe)
    is_first = rank is None or rank.peers.is_first
    logging = libraries(loaded.recipe.logging.backends) if is_first else {}
    # raises now if the file cannot be written, before anything is planned
    tracing = None if trace is None or not is_first else Trace(trace)
    try:
        ready = _made_ready(loaded, measure=measure, accept_changes=accept_changes, peers=None if rank is None else rank.peers)
    except KeyboardInterrupt:
        message = "stopped before the run began: nothing is lost, and a state that was saved is as it was"
        raise Interrupted(message, hint=_GOES_ON) from None
    planned = ready.planned
    out = Path(planned.recipe.output_dir).expanduser()
    with ExitStack() as stack:
        if is_first:
            stack.enter_context(claimed(out, say=write_status))
            if note := note_of_an_earlier_run(planned):
                write_status(note)
        if rank is not None:
            rank.may_write(out)
        log = _open_log(planned, stack) if is_first else None  # has what ends the run: while it loads, trains or exports
        if rank is not None:
            stack.enter_context(rank.explaining())  # before the log has it
        try:
            report, source, stopped = _train(ready, log, logging, verbose=verbose, trace=tracing)
        except KeyboardInterrupt:  # one during its steps is the run's own
            message = "stopped before the first step or after the last: nothing that the run has saved is lost"
            raise Interrupted(message, hint=_GOES_ON) from None
        try:
            _conclude(planned, report, draws=is_first)
            if stopped:
                raise Interrupted("stopped after the last step, before the export", hint=_again(source))
            if planned.recipe.export.at_end:
                _export(planned, source, rank)
        except KeyboardInterrupt:
            raise Interrupted("interrupted after the last step, before the export", hint=_again(source)) from None


# ---- from the recipe to a run -----------------------------------------------------------------------------------------


def _made_ready(loaded: LoadedRecipe, *, measure: bool, accept_changes: bool, peers: Peers | None = None) -> Ready:
    """Takes every step from the recipe to a run. A saved run's plan is shown only when nothing can refuse the run any more.
    Raises UsageError or PlanError. `peers` must have the same recipe and data before anything is written."""
    say = write_status
    try:
        with TransferDisplay(status_console()) as progress:
            resolved = resolve(loaded.recipe, say=say, progress=progress, peers=peers)
            inspected = inspect(resolved, say=say, process=probe.process_bytes)
            if peers is not None:
                from fuyou_cli.training.alike import refuse_unlike_start

                refuse_unlike_start(inspected, peers)
            check_resumed(inspected, accept_changes=accept_changes)
            warn_of_memory(loaded, say)
            machine = machine_here(loaded, inspected, say=say, measure=measure)
            is_new = inspected.manifest is None
            epoch = sampled_epoch(inspected.recipe, inspected.tokenizer_dir, say) if is_new else None
            planned = plan(inspected, *machine, epoch=epoch, say=say)
            _refuse_unfit(loaded, planned)
            shown = with_waits(planned)
            if planned.manifest is None:
                _show(loaded, shown)
            fetched = plan_downloaded(fetch(planned, say=say, progress=progress), *machine, say=say)
            tokenised = tokenise(fetched, say=say, accept_changes=accept_changes)
            if peers is not None:
                from fuyou_cli.training.alike import refuse_unlike_data

                refuse_unlike_data(tokenised, peers)
        ready = settle(tokenised, *machine_here(loaded, inspected, say=say))
        _refuse_unfit(loaded, ready.planned)
        ready = replace(ready, planned=with_waits(ready.planned))
    except PlanError as error:
        error.hint = error.hint or _advice(loaded)
        raise
    evaluated = [len(rows) for rows in ready.evaluated.values()]
    if planned.manifest is None:
        _show_changes(loaded, shown, ready.planned, evaluated)
    else:
        _show(loaded, ready.planned, evaluated)
    _show_data(tokenised.rows.summary)
    if planned.manifest is not None:
        write_status(f"resuming after step {planned.manifest.step}: weights, states, schedule and data position")
        if ready.changes:
            write_status(f"changed: {in_words(ready.changes)}")
    return ready


def _advice(loaded: LoadedRecipe) -> str:
    """Names the command that searches for changes that help. It plans each change, which takes a while."""
    return f"`{command_of(loaded, 'plan')}` finds the smallest changes that help"


def _refuse_unfit(loaded: LoadedRecipe, planned: Planned) -> None:
    """Shows a plan that does not fit, and raises."""
    if planned.peers is None or planned.peers.is_first:
        check_export(planned.recipe, planned.model_dir)
    if problems := plan_problems(planned.plan, room_of(planned)):
        _show(loaded, planned)
        raise PlanError("the run does not fit: " + "; ".join(problems))


def _show(loaded: LoadedRecipe, planned: Planned, evaluated: Sequence[int] | None = None) -> None:
    """Shows the plan. `evaluated`: rows of each set to evaluate, once they are known."""
    show_plan(status_console(), _facts(loaded, planned, evaluated), verbose=False)


def _facts(loaded: LoadedRecipe, planned: Planned, evaluated: Sequence[int] | None) -> RunFacts:
    facts = with_evaluation(facts_of(planned, room_of(planned)), planned, evaluated)
    if (peers := planned.peers) is not None and not peers.are_replicas:
        facts = of_rank(facts, peers.local_count, peers.network)
    return replace(facts, advice=_advice(loaded))


def _show_changes(loaded: LoadedRecipe, shown: Planned, now: Planned, evaluated: Sequence[int]) -> None:
    """Says what differs from the plan shown before, without the process's own growth, and what the number of steps decides."""
    same: dict[str, Any] = {"memory": (), "predicted": now.plan.predicted, "cpu_budget": now.plan.cpu_budget}
    if replace(shown.plan, **same) != replace(now.plan, memory=()):
        show_changed(status_console(), shown.plan, now.plan)
    if shown.total_steps != now.total_steps:  # the data decides it
        show_length(status_console(), _facts(loaded, now, evaluated))


def _show_data(summary: DataSummary) -> None:
    """Prints the numbers of samples, rows and tokens, and one decoded sample with its mask."""
    formats = ", ".join(f"{Path(path).name}: {name}" for path, name in summary.formats)
    data = "the first part of the data" if summary.streamed else "data"
    write_status(
        f"{data}: {some(summary.samples, 'sample')} ({formats}) in {some(summary.rows, 'row')}, "
        f"{some(summary.tokens, 'token')}, {summary.label_tokens:,} with loss; {summary.truncated:,} truncated, "
        f"{summary.split:,} split, {summary.dropped:,} dropped, {some(summary.without_loss, 'row')} without loss skipped"
    )
    show_sample(status_console(), summary.preview)


# ---- the output_dir ---------------------------------------------------------------------------------------------------


@contextmanager
def claimed(out: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Makes the folder if needed, and locks it for the length of the context, so that two runs never mix their logs and
    models. A file system without folder locks is accepted. Raises UsageError if another run has the lock."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"output_dir: another run uses {out}", hint="wait until it ends, or give this run its own output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            say(f"note: {out} cannot be locked ({error.strerror}): make sure that no other run uses it")
        yield
    finally:
        os.close(descriptor)


def note_of_an_earlier_run(planned: Planned) -> str | None:
    """Returns a note if a new run starts where an earlier one wrote its log and nobody asked to start over: the saved state
    is not where this recipe looks for it. Raises UsageError if the earlier one's store was there, on another drive."""
    log = Path(planned.recipe.output_dir).expanduser() / "log.jsonl"
    begins = planned.manifest is None and planned.recipe.checkpoint.resume != "never"
    if not begins or not holds_a_run(log):
        return None
    check_same_drive(planned.directories[0], _store_was_on(log, planned.directories[0]))
    return (
        f"note: {log} belongs to an earlier run that has no saved state in {planned.directories[0]}. This run starts "
        "at step 1 and keeps the old log beside its own. To resume the old run, stop now and set its offload.dir"
    )


def _store_was_on(log: Path, directory: Path) -> tuple[str, ...]:
    """Returns what a log says of the file system of a run's store, if its folder was this one."""
    try:
        promised = read_logged_plan(log)
    except UsageError:  # not the log of a run
        return ()
    return promised.store_on if promised.store == str(directory.absolute()) else ()


# ---- the run ----------------------------------------------------------------------------------------------------------


def _open_log(planned: Planned, stack: ExitStack) -> JsonlLog | None:
    """Opens the log where the recipe asks for it, and writes what is planned."""
    if "jsonl" not in planned.recipe.logging.backends:
        return None
    path = Path(planned.recipe.output_dir).expanduser() / LOG
    log = stack.enter_context(JsonlLog(path, anew=planned.manifest is None))
    log.write("plan", promises(planned))
    return log


def _train(
    ready: Ready, log: JsonlLog | None, logging: Mapping[str, Any], *, verbose: bool, trace: Trace | None
) -> tuple[RunReport, Path, bool]:
    """Trains to the end and saves. Returns the report, the store's folder, and whether to stop before the export."""
    from fuyou_cli.training.run import Run

    planned = ready.planned
    with Run(ready, announce=write_status, ends_process=True) as run:
        write_status(f"swap daemon: {run.daemon.description}")
        _load(planned, run)
        if not planned.is_copy:
            keep_companions(
                run.store.paths[0].parent,
                planned.recipe.tokenizer,
                model_dir=planned.model_dir,
                tokenizer_dir=planned.tokenizer_dir,
                adapter=configuration(planned.recipe, planned.anatomy.model, planned.model_dir),
            )
        if log is not None:
            log.write("loaded", {})
            for change in ready.changes:
                log.write("changed", {**asdict(change), "step": min(change.step, run.step)})  # an older state may be whole
        settle_for_training()
        before, others = run.daemon.counters(), BackgroundLoad()
        with ExitStack() as traced:
            if trace is not None:
                run.trace(trace)
                traced.callback(lambda: write_status(trace.summary))
                traced.enter_context(trace)  # written however the steps end
            _steps(planned, run, log, logging, verbose=verbose)
        gpu_peak = run.device.peak_memory() if run.plan.device == "cuda" else 0  # other devices do not count freed memory
        peers = planned.peers
        own = None if peers is None else sum(peers.gather_on_box("seconds of compute", others.own()))
        report = beside_plan(planned, run.report(), others.cores(own), gpu_peak=gpu_peak, say=write_status)
        stopped = run.stopping.requested and planned.recipe.export.at_end  # the next run of this command exports
        if log is not None and not stopped:
            _end_log(log, run, before, report)
        return report, run.store.paths[0].parent, stopped


def _end_log(log: JsonlLog, run: Run, before: Counters, report: RunReport) -> None:
    """Ends the log. The run is over, so a log that cannot be written does not stop its report and export."""
    after = run.daemon.counters()
    moved = {key: getattr(after, key) - getattr(before, key) for key in ("read_bytes", "written_bytes")}
    try:
        log.end(report, moved=moved, saved_bytes=run.saver.saved_bytes)
    except FuyouError as error:
        write_status(f"note: {error.message}")


def _load(planned: Planned, run: Run) -> None:
    saved, model = planned.manifest, planned.model
    total = model.parameters if saved is None else size_of(saved, model) + to_compare(saved, model.sources)
    what = "loading weights" if saved is None else "reading the saved state"
    with counting(what, total) as progress:
        run.load(progress)
    if saved is None:
        write_status(f"{what}: done, {gb(run.daemon.counters().written_bytes)} written")
    else:
        write_status(f"{what}: done, all checksums match" if run.step == saved.step else f"resuming after step {run.step}")


def _steps(planned: Planned, run: Run, log: JsonlLog | None, libraries: Mapping[str, Any], *, verbose: bool) -> None:
    """Sends every step to the backends that the recipe names."""
    logging = planned.recipe.logging
    with ExitStack() as stack:
        logged = LoggedRun(recipe=planned.recipe, identity=run.standing.run, done=run.step)
        loggers = stack.enter_context(Loggers(libraries, logged, say=write_status))
        display = None
        if "console" in logging.backends:
            total, done = planned.total_steps, run.step
            live = RunDisplay(status_console(), total_steps=total, plan=planned.plan, resumed=done, verbose=verbose)
            display = stack.enter_context(live)

        def on_step(report: StepReport) -> None:
            if log is not None:
                log.step(report)
                if report.skipped:
                    log.write("skipped", {"step": report.step, "reason": report.skipped})
            if report.step % logging.every_steps and report.step != planned.total_steps:
                return
            loggers.step(report)
            if display is not None:
                display.step(report)

        def on_evaluation(report: AnyReport) -> None:
            if log is not None:
                log.evaluation(report)
            if isinstance(report, EvalReport):
                loggers.evaluation(report)
            if display is not None:
                display.evaluation(report)

        run.train(on_step, on_evaluation)


# ---- after the last step ----------------------------------------------------------------------------------------------


def _export(planned: Planned, source: Path, rank: Rank | None = None) -> None:
    """Writes the model. A failure leaves the trained state unharmed: the export can be repeated without training. Of several
    ranks the first writes it. Those of a ring give it what they have."""
    from fuyou_cli.training.exporting import UntouchedError, export_store, give_weights, how_to_load

    if rank is not None:
        rank.may_export()
    ranks, options = None if planned.ring is None else planned.ring.ranks, planned.recipe.export
    if rank is not None and not rank.peers.is_first:
        if ranks is not None:
            give_weights(saved_store(source), ranks, dtype=options.dtype, model_dir=planned.model_dir, say=write_status)
        return

    out, how_to_repeat = export_folder(planned.recipe, planned.model_dir), _again(source)
    if ranks is not None:
        how_to_repeat = "the trained state is saved: the same command exports it"
    try:
        with TransferDisplay(status_console()) as transfers, nullcontext() if ranks is None else ranks.asking():
            export_store(
                saved_store(source), out, dtype=options.dtype, max_shard_size=options.max_shard_size, ranks=ranks,
                model_dir=planned.model_dir, progress=partial(transfers, f"exporting to {out.name}"), say=write_status,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise Interrupted("interrupted while writing the model", hint=how_to_repeat) from None
    except FuyouError as error:
        if not isinstance(error, UntouchedError):  # which happens wherever the model is written to
            error.hint = f"{error.hint}; {how_to_repeat}" if error.hint else how_to_repeat
        raise
    except Exception as error:
        error.add_note(how_to_repeat)
        raise
    computed = planned.model.compute_dtype
    rounded = f", rounded from {computed} (export.dtype={computed} keeps it)" if options.dtype != computed == "float32" else ""
    write_last_result(f"exported to {out} in {options.dtype}{rounded}")
    if how := how_to_load(out, source):
        write_status(how)


def _again(source: Path) -> str:
    return f"the trained state is saved: `fuyou export {source} OUT` writes the model elsewhere"


def _conclude(planned: Planned, report: RunReport, *, draws: bool) -> None:
    if not report.steps:  # nothing was measured, and the earlier run's timeline is still right
        write_status(
            f"the run is already finished: all {len(report.losses)} steps are done, loss {from_to(report.losses)}; "
            "to start over, add checkpoint.resume=never"
        )
        return
    show_summary(status_console(), report)
    if not draws:
        return
    out = Path(planned.recipe.output_dir).expanduser() / "timeline.svg"
    try:
        with os.fdopen(open_own(out, anew=True), "w", encoding="utf-8") as file:
            file.write(timeline_svg(report.timeline, title="One training step", stalls=report.timeline_stalls))
        write_status(f"timeline: {out}")
    except OSError as error:
        write_status(f"note: cannot write the timeline to {out}: {error.strerror}")
