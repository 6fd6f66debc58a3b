"""Tests how a run ends when nobody reads it, its log cannot be written, its terminal goes, or its output is in the way."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from drawn import every
from hooks import doing

from fuyou_cli.cli.finetune import run_finetune
from fuyou_cli.core.errors import Interrupted, NumericsError, OutOfSpaceError, UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.prepare import store_of as where_its_store_is
from fuyou_cli.training.report import StepReport
from fuyou_cli.training.run import Run
from fuyou_cli.training.run_log import JsonlLog, read_log

from .conftest import HANGS, CommandIn, NewProject, Project, WholeOf, ended
from .running import STEPS, exported, interrupt, loaded_run, manifest_of, store_of, train

LONG = {"train.max_steps": 10_000, "export.at_end": False}
UNCLIPPED = {"train.max_steps": STEPS, "train.clip_grad_norm": None}


def _signalled(project: Project, signals: Sequence[int], *, after: int, pause: float) -> tuple[int, str]:
    """The exit code and the words of a run that gets `signals` once step `after` is in its log."""
    child = project.begin("finetune", project.recipe)
    while f'"step":{after},' not in _text(project.out / "log.jsonl"):
        assert not child.is_over()
        time.sleep(0.01)
    for number in signals:
        child.send(number)
        time.sleep(pause)
    done = ended(child)
    return done.returncode, done.stderr


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_a_reader_that_is_gone_does_not_end_the_run(new_project: NewProject, whole: WholeOf) -> None:
    unread = new_project("unread")
    os.mkfifo(pipe := unread.folder / "pipe")
    into_it = (
        f"import os, sys\npipe = os.open({str(pipe)!r}, os.O_WRONLY)\nos.dup2(pipe, 1), os.dup2(pipe, 2), os.close(pipe)\n"
        "sys.stdout, sys.stderr = (open(number, 'w', buffering=1, closefd=False) for number in (1, 2))\n"
    )
    alone = "import select; reader = select.poll(); reader.register(1, 0); reader.poll()"  # until it is gone
    child = unread.begin("finetune", unread.recipe, first=into_it + doing(alone, 3))
    with pipe.open() as read:
        while not (line := read.readline()).startswith("step 2/"):
            assert line
    assert ended(child).returncode == 0
    assert sorted(unread.losses()) == list(range(1, STEPS + 1))
    assert (unread.out / "timeline.svg").exists()
    ours, theirs = unread.exported(), exported(whole().store, unread.folder / "export")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("changes", [{}, UNCLIPPED], ids=["clipped", "unclipped"])
def test_a_log_on_a_full_disk_saves_the_step_and_is_named(
    changes: dict[str, object], new_project: NewProject, whole: WholeOf
) -> None:
    project = new_project(changes={"train.max_steps": STEPS, **changes})
    log = JsonlLog(project.out / "log.jsonl")

    def on_step(report: StepReport) -> None:
        if report.step == 4:
            assert log._file is not None
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, log._file)
            os.close(full)
        log.step(report)

    with loaded_run(project) as run, pytest.raises(OutOfSpaceError, match=r"log\.jsonl: No space left") as ended:
        run.train(on_step)
    assert "the state after step 4 is saved" in str(ended.value.hint)
    assert not (store_of(project) / "spare").exists()
    losses, _ = train(project)
    assert losses == whole(changes).losses


def test_any_error_between_micro_batches_saves_the_step_before(new_project: NewProject, whole: WholeOf) -> None:
    project = new_project(changes={"train.max_steps": STEPS})

    def fail(run: Run) -> None:
        if run.step == 3:
            raise RuntimeError("out of something")

    with pytest.raises(RuntimeError) as ended:
        train(project, fail)
    assert "the state after step 3 is saved" in ended.value.__notes__[0]
    assert train(project)[0] == whole().losses


@pytest.mark.parametrize("signals", [[signal.SIGHUP], [signal.SIGUSR1], [signal.SIGINT, signal.SIGTERM, signal.SIGTERM]])
def test_signals_save_and_are_heard_to_the_end(signals: list[int], new_project: NewProject) -> None:
    project = new_project(changes=LONG)
    code, said = _signalled(project, signals, after=3, pause=0.1)
    assert (code, manifest_of(project).state) == (130, "committed")
    assert "is saved in" in said


def test_nohup_keeps_its_meaning(new_project: NewProject) -> None:
    project = new_project(changes={"export.at_end": False})
    ignored = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as a command finds it that nohup starts
    first = ignored + doing(f"os.kill(os.getpid(), {signal.SIGHUP:d})", 3)
    done = ended(project.begin("finetune", project.recipe, first=first))
    assert done.returncode == 0, done.stderr
    assert sorted(project.losses()) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("presses", [2, 3])
def test_a_step_whose_updates_have_begun_warns_before_it_is_given_up(
    presses: int, new_project: NewProject, whole: WholeOf
) -> None:
    """The first signal of `interrupt`, then others in the same micro-batch."""
    project, heard = new_project(changes=UNCLIPPED), list[str]()
    press = interrupt(3, "backward")

    def between(run: Run) -> None:
        press(run)
        for _ in range(presses - 1 if run.stopping.requested and len(heard) < 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as ended:
        train(project, between, say=heard.append)
    assert "updates have begun" in heard[0] and "loses this step" in heard[0]
    assert ended.value.exit_code == 130 and "the state after step 2 is saved" in str(ended.value.hint)
    assert train(project)[0] == whole(UNCLIPPED).losses


@pytest.mark.parametrize(("every", "code"), [(1, 130), (None, 1)])
def test_a_second_signal_stops_at_once(every: int | None, code: int, new_project: NewProject, whole: WholeOf) -> None:
    """Signals in the middle of a backward that could still be given up at the next micro-batch."""
    changes = {"train.max_steps": STEPS, "checkpoint.commit_every_steps": every}
    project, heard = new_project(changes=changes), list[str]()
    press = interrupt(4, "backward")

    def between(run: Run) -> None:
        press(run)
        if run.stopping.requested:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="stopped at once in step 4") as ended:
        train(project, between, say=heard.append)
    asked, _, lost = heard[0].partition(";\na second Ctrl-C loses ")
    assert asked == "stopping at the next micro-batch, then saving the state" and len(heard) == 1
    known = ("this step", "2 steps: the last saved step is 2")  # the commit of step 3 may be under way
    assert lost in (known if every else ("4 steps: the last saved step is 0",))
    saved = manifest_of(project).step
    assert saved == (3 if every else 0)
    known = (
        f"the state after step {saved} is saved" if saved else "no step is saved: the same command starts from the beginning"
    )
    assert ended.value.exit_code == code and known in str(ended.value.hint)
    assert train(project)[0] == whole(changes).losses


def test_a_terminal_that_closes_asks_once(new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": STEPS})

    def hang_up(run: Run) -> None:
        for _ in range(3 if run.step == 2 else 0):
            os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(Interrupted, match=f"stopped after step 2 of {STEPS}"):
        train(project, hang_up)


def test_numbers_that_fail_again_are_not_recommended(new_project: NewProject) -> None:
    project = new_project(changes={"optimizer.lr": 1e30, "lr_scheduler.warmup_steps": 0})
    with pytest.raises(NumericsError) as ended:
        train(project)
    assert "checkpoint.resume=never" in str(ended.value.hint) and "continues from there" not in str(ended.value.hint)


@pytest.mark.usefixtures("untuned")
def test_an_output_in_the_way_is_refused_before_training(new_project: NewProject, command: CommandIn) -> None:
    project = new_project()
    (project.out / "model").mkdir(parents=True)
    (project.out / "model" / "thesis.tex").write_text("precious")
    fuyou = command(project)
    for words in (("finetune",), ("plan", "--dry-run")):
        code, _, err = fuyou(*words, "recipe.yaml")
        assert code == 2 and "error: output_dir: " in err and "thesis.tex" in err
    (project.folder / "file").write_text("")
    code, _, err = fuyou("finetune", "recipe.yaml", f"output_dir={project.folder}/file/out")
    assert code == 2 and "output_dir: " in err and "is a file" in err
    assert not (project.out / "store").exists()


def test_an_export_that_fails_takes_nothing_else(new_project: NewProject) -> None:
    """The model's folder is taken while the run trains."""
    project = new_project(changes={"train.max_steps": 5})
    thesis, timeline = project.out / "model" / "thesis.tex", project.out / "timeline.svg"
    take = (
        f"Path({str(timeline)!r}).mkdir(); Path({str(thesis.parent)!r}).mkdir(); Path({str(thesis)!r}).write_text('precious')"
    )
    done = project.fuyou_doing(take, 1, "finetune", project.recipe)
    assert done.returncode == 2
    said = done.stderr
    assert "Predicted and measured" in said and "note: cannot write the timeline" in said
    assert f"fuyou export {store_of(project)} OUT" in said
    assert [record["event"] for record in read_log(project.out / "log.jsonl")[-2:]] == ["end", "failed"]
    assert thesis.read_text() == "precious"


@pytest.mark.usefixtures("untuned")
def test_what_ends_a_run_before_its_first_step_is_in_its_log(new_project: NewProject) -> None:
    """A log of no step is gone on with, so that trying again leaves one file."""
    project = new_project(changes={"train.max_steps": 2, "export.at_end": False})
    loaded, log = load_recipe(project.recipe), project.out / "log.jsonl"
    (store := where_its_store_is(loaded.recipe)).mkdir(parents=True)
    (store / "store.bin").touch()
    (store / "second.bin").hardlink_to(store / "store.bin")
    with pytest.raises(UsageError, match="has a second name"):
        run_finetune(loaded)
    assert [record["event"] for record in read_log(log)] == ["plan", "failed"]
    (store / "store.bin").unlink()
    run_finetune(loaded)
    events = ["plan", "failed", "plan", "loaded", "step", "step", "timeline", "end"]
    assert [record["event"] for record in read_log(log)] == events
    assert not log.with_name("log.jsonl.1").exists()


@pytest.mark.usefixtures("untuned")
def test_starting_over_keeps_the_log_of_the_run_before(new_project: NewProject, command: CommandIn) -> None:
    project = new_project(changes={"train.max_steps": 2, "export.at_end": False})
    fuyou = command(project)
    for number in range(3):
        code, _, err = fuyou("finetune", "recipe.yaml", *(["checkpoint.resume=never"] if number else []))
        assert code == 0, err
    logs = [project.out / name for name in ("log.jsonl", "log.jsonl.1", "log.jsonl.2")]
    for log in logs:
        assert [record["step"] for record in read_log(log) if record["event"] == "step"] == [1, 2]
    assert "64 samples" in err and "split" in err


def test_asked_to_stop_after_the_last_step_the_run_has_its_report(new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": STEPS})
    with loaded_run(project) as run:
        run.train(lambda report: os.kill(os.getpid(), signal.SIGINT) if report.step == STEPS else None)
        assert run.stopping.requested
        assert run.report().steps == STEPS
    assert manifest_of(project).step == STEPS


@pytest.mark.usefixtures("untuned")
def test_asked_to_stop_after_the_last_step_the_export_waits_for_another_time(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = new_project(changes={"train.max_steps": STEPS})
    step = JsonlLog.step

    def step_and_stop(log: JsonlLog, report: StepReport) -> None:
        step(log, report)
        if report.step == STEPS:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(JsonlLog, "step", step_and_stop)
    with pytest.raises(Interrupted, match="before the export"):
        run_finetune(load_recipe(project.recipe))
    assert (project.out / "timeline.svg").exists() and not (project.out / "model").exists()
    project.done("finetune", project.recipe)
    assert (project.out / "model").is_dir()


@pytest.mark.parametrize("number", every(2, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]))
def test_stopped_before_there_is_a_run(number: int, new_project: NewProject, tmp_path: Path) -> None:
    """Stops while the data is tokenised: it is said, the worker ends, and nothing of it is left."""
    rows = tmp_path / "rows"
    project = new_project(changes={"dataset.cache_dir": str(rows)})
    child = project.begin("finetune", project.recipe, served=False)
    while not (list(rows.glob(".fuyou-rows-*")) and _workers(project)):  # before, some rows were looked at for the plan
        assert not child.is_over()
        time.sleep(0.005)
    child.send(number)
    done = ended(child)
    assert done.returncode == 130, done.stderr
    assert "stopped before the run began: nothing is lost" in done.stderr
    assert not list(rows.iterdir())
    assert all(_ends(worker, within=HANGS) for worker in _workers(project))
    assert not _workers(project)


def _workers(project: Project) -> list[Path]:
    """Returns the processes that tokenise for the project's command, whose environment they share."""
    mark = f"XDG_CACHE_HOME={project.environment()['XDG_CACHE_HOME']}\0"
    workers = [file.parent for file in Path("/proc").glob("[0-9]*/cmdline") if "fuyou_cli.data.worker" in _text(file)]
    return [worker / "environ" for worker in workers if mark in _text(worker / "environ")]


def _ends(environ: Path, *, within: float) -> bool:
    """Tells whether the process of a /proc/PID/environ is over, or will be in so many seconds."""
    try:
        process = os.pidfd_open(int(environ.parent.name))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], within)[0])
    finally:
        os.close(process)


SIGNALLED = """
import os, sys
sent = []
def when_opened(event, arguments):
    if event == "open" and str(arguments[0]).endswith("/config.json") and not sent:
        sent.append(os.kill(os.getpid(), {number}))
sys.addaudithook(when_opened)
"""


def test_a_signal_before_the_run_begins_says_that_nothing_is_lost(new_project: NewProject) -> None:
    """One of Slurm's, which ends a process that does not listen."""
    project = new_project("project")
    done = ended(project.begin("finetune", project.recipe, first=SIGNALLED.format(number=int(signal.SIGUSR1))))
    said = " ".join(done.stderr.split())
    assert done.returncode == 130 and "stopped before the run began: nothing is lost" in said, done
    assert "the same command begins again" in said and not project.out.exists()
