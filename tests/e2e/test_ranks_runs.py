"""One model over two processes: the commands that start them, what they leave, and what is left of them when one is killed."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from proof.nursery import Child
from safetensors.torch import load_file

from fuyou_cli.machine.profile import core_count, usable_memory
from fuyou_cli.training.evaluation import kept_step
from fuyou_cli.training.state import manifest as manifests

from .conftest import HANGS, NewProject, Project, write_llama
from .conftest import ended as run_ended

STEPS = 40
# Seconds in which ranks end that have lost a peer or their launcher. A busy machine may take most of it: that they do in five
# `scripts/prove_ranks_run.py` shows. What froze is found later.
ENDS = 60.0
CHANGES = {
    "train.max_steps": STEPS, "train.peer_timeout": "5m", "export.dtype": "bfloat16", "dataset.eval_fraction": 0.2,
    "eval": {"every_steps": 10, "keep_best": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def blocks(materials: Path) -> Path:
    """A Llama with a block for each rank, and one more."""
    return write_llama(materials, "blocks", hidden_size=32, intermediate_size=64, num_hidden_layers=3)


@pytest.fixture
def project(new_project: NewProject, blocks: Path) -> Callable[[str], Project]:
    return lambda name: new_project(name, {**CHANGES, "model.name_or_path": str(blocks)})


@contextmanager
def started(project: Project, *words: str | Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a command in a group of its own. Nothing that it has started is left when the context ends."""
    environment = {**project.environment(), **variables}
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=project.folder, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    ranks: list[int] = []
    try:
        yield process
        ranks = list(ranks_of(process.pid).values())
    finally:
        for pid in (*ranks_of(process.pid).values(), *ranks):
            _kill(pid)
        process.kill()
        process.communicate()


def two_ranks(project: Project, *words: str, program: str = "") -> Child:
    """Begins two ranks without a launcher: the first one forks the other, so that neither has anything to import. In each the
    `program` runs before, and knows its `rank`."""
    variables = f"WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='{free_port()}'"
    first = f"import os\nrank = '01'[not os.fork()]\nos.environ.update(RANK=rank, LOCAL_RANK=rank, {variables})\n"
    return project.begin("finetune", project.recipe, "--assume-rates", *words, first=first + program)


def forked_by(pid: int) -> int:
    """The one process that a process has begun."""
    (child,) = (int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split())
    return child


def fuyou(project: Project, *words: str | Path) -> tuple[str | Path, ...]:
    return ("-m", "fuyou_cli", "finetune", project.recipe, "--assume-rates", *words)


def ended(process: subprocess.Popen[str]) -> str:
    """What a command that ends well has written."""
    out, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 0, out
    return out


def ranks_of(launcher: int) -> dict[int, int]:
    """The process of each rank that a launcher has started."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(one.partition(b"=")[2]): pid for one in variables if one.startswith(b"RANK=")}
    return found


def until_step(project: Project, step: int) -> None:
    """Waits until a step is in the log of the first rank."""
    until = time.monotonic() + HANGS
    while not (project.out / "log.jsonl").exists() or max(project.losses(), default=0) < step:
        assert time.monotonic() < until, "no such step"
        time.sleep(0.005)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_there(pid: int) -> bool:
    """Tells whether a process runs. Nobody may have asked for the end of one whose parent was killed."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir()) if path.is_file()}


def sums_of(project: Project, steps: int) -> dict[tuple[str, str], int]:
    """The checksum of everything that the newest manifests name, of whatever rank: by stage and tensor."""
    found = {}
    for path in project.folder.rglob(manifests.NAME):
        saved = manifests.read(path.parent)
        assert saved is not None and saved.step == steps
        found |= {(stage.name, name): extent.sum for stage in saved.stages for name, extent in stage.extents()}
    return found


def best_of(project: Project) -> tuple[int | None, dict[str, bytes]]:
    """The best weights, and after which step they were kept. Their files also name the run."""
    folder = project.out / "best"
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    return kept_step(folder), {name: value.view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}


def assert_alike(ours: Project, theirs: Project, exported: str = "model", steps: int = STEPS) -> None:
    assert ours.losses() == theirs.losses()
    assert best_of(ours) == best_of(theirs)
    assert sums_of(ours, steps) == sums_of(theirs, steps)
    assert files_of(ours.out / exported) == files_of(theirs.out / exported)


def test_killed_ranks_end_as_one_process_does(project: Callable[[str], Project]) -> None:
    """`fuyou finetune --nproc 2`, of which a rank is killed, then the launcher: exports, states, losses of one process, bit for
    bit."""
    one, ranks = map(project, ("one", "ranks"))
    done = one.fuyou("finetune", one.recipe, "--assume-rates")
    assert done.returncode == 0, done.stderr

    with started(ranks, *fuyou(ranks, "--nproc", "2")) as launcher:
        until_step(ranks, 5)
        _kill(ranks_of(launcher.pid)[1])
        begun = time.monotonic()
        out, _ = launcher.communicate(timeout=HANGS)
        assert time.monotonic() - begun < ENDS, out
        assert launcher.returncode == 1
        assert f"rank 1 on {socket.gethostname()} was lost" in out, out
        assert "of all ranks" in " ".join(out.split()), "the step that is shown counts waits for others"
    last = json.loads((ranks.out / "log.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "failed" and "its connection closed: it was killed" in last["message"], last

    with started(ranks, *fuyou(ranks, "--nproc", "2")) as launcher:
        until_step(ranks, max(ranks.losses()) + 5)
        pids = ranks_of(launcher.pid).values()
        _kill(launcher.pid)
        begun = time.monotonic()
        while any(map(is_there, pids)):
            assert time.monotonic() - begun < ENDS, "ranks outlive their launcher"
            time.sleep(0.02)

    (scratch := ranks.folder / "tmp").mkdir()
    with started(ranks, *fuyou(ranks, "--nproc", "2"), TMPDIR=str(scratch)) as launcher:
        assert "resuming after step" in ended(launcher)
    assert not list(scratch.iterdir()), "the launcher leaves files"
    assert_alike(ranks, one)
    assert best_of(one)[0] is not None
    assert (ranks.out / "ranks" / "1.log").is_file() and not (ranks.out / "ranks" / "0.log").exists()

    figures = json.loads((ranks.out / "log.jsonl").read_text().splitlines()[-1])["ranks"]
    assert len(figures) == 2 and all(rank["written_per_step"] > 0 for rank in figures)
    assert all(0 < rank["ram_peak"] <= rank["ram_planned"] for rank in figures)
    written = [manifests.read(path.parent).written_total for path in ranks.folder.rglob(manifests.NAME)]  # type: ignore[union-attr]
    assert sorted(rank["written_total"] for rank in figures) == sorted(written)
    reported = ranks.done("report", ranks.out).stdout
    assert "by the stores of 2 ranks" in reported and f"rank 1 on {socket.gethostname()}" in reported

    verified = ranks.fuyou("verify", ranks.out)
    assert verified.returncode == 0 and verified.stdout.count("all checksums match") >= 2, verified.stdout
    exported = ranks.fuyou("export", ranks.recipe, ranks.folder / "again")
    assert exported.returncode == 0, exported.stderr
    assert files_of(ranks.folder / "again") == files_of(one.out / "model")
    assert "bringing the state after step 40" in ranks.done("finetune", ranks.recipe).stderr
    assert_alike(ranks, one)


# Ranks that share a head however little it takes, as over a link that takes no time.
IN_TURN = """from fuyou_cli.planner import ring
from fuyou_cli.spec import hardware
ring._FASTER, hardware.WITHIN_BOX, hardware.WITHIN_LATENCY = -1e9, 1e15, 0.0
"""


def test_ranks_share_a_head(project: Callable[[str], Project]) -> None:
    """Two ranks, of which one is killed, then one process: exports, states and losses of one process, bit for bit."""
    words = ("train.head_chunk_vocab=64",)
    one, ranks = map(project, ("one", "ranks"))
    one.done("finetune", one.recipe, "--assume-rates", *words)
    both = two_ranks(ranks, *words, program=IN_TURN)
    until_step(ranks, 5)
    _kill(forked_by(both.pid))
    assert run_ended(both, within=ENDS).returncode == 1
    end = run_ended(two_ranks(ranks, *words))
    assert end.returncode == 0 and "resuming after step" in end.stderr, end
    for folder in (ranks.out / "store").iterdir():
        saved = manifests.read(folder)
        assert saved is not None and saved.share is not None
        assert set(saved.share.owners[-2:]) == {0, 1}, "the last two pieces of the head have one rank"
    assert_alike(ranks, one)
    assert ranks.done("verify", ranks.out).stdout.count("all checksums match") >= 2
    assert "bringing the state after step 40" in ranks.done("finetune", ranks.recipe, *words).stderr
    assert_alike(ranks, one)


@pytest.mark.slow  # `scripts/prove_boxes.py` does it on two boxes
def test_torchrun_on_each_box_ends_as_one_process_does(project: Callable[[str], Project]) -> None:
    """The command of README for each of two boxes, whose stores are not beside one another."""
    one, torchrun = map(project, ("one", "torchrun"))
    one.done("finetune", one.recipe, "--assume-rates")
    with two_torchruns(torchrun, "offload.max_memory.cpu=auto") as boxes:
        for box in boxes:
            ended(box)
    assert_alike(torchrun, one)
    assert 0.42 * usable_memory() < budget(torchrun) < 0.46 * usable_memory(), "not a half of what one process would take"
    shutil.rmtree(torchrun.out / "model")
    assert torchrun.done("verify", torchrun.out).stdout.count("all checksums match") >= 2
    torchrun.done("export", torchrun.out, torchrun.folder / "again")
    assert files_of(torchrun.folder / "again") == files_of(one.out / "model")
    words = ("--prompt", "The road", "--max-new-tokens", "8")
    assert torchrun.done("generate", torchrun.out, *words).stdout == one.done("generate", one.out, *words).stdout

    away = torchrun.folder / "away"
    (torchrun.folder / "drive1").rename(away)
    refused = torchrun.fuyou("finetune", torchrun.recipe, f"offload.dir={torchrun.folder / 'drive0'}")
    assert refused.returncode == 2 and refused.stderr.count("error: ") == 1, refused.stderr
    assert "that of rank 1 is not in" in refused.stderr and str(torchrun.folder / "drive1") in refused.stderr
    away.rename(torchrun.folder / "drive1")

    words = (f"offload.dir={torchrun.folder / 'drive0'}",)
    assert "bringing the state after step 40" in torchrun.done("finetune", torchrun.recipe, *words).stderr
    assert_alike(torchrun, one)


def test_replicas_of_an_adapter_end_as_one_process_does(project: Callable[[str], Project]) -> None:
    """Two processes, of which one is killed, then one alone, then two again: each goes on with what the first one has saved."""
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    stops = 30  # no evaluation is better by so much
    words = ("adapter={r: 4}", "train.lanes=2", "train.early_stopping={patience: 3, min_delta: 100}")
    one, several = map(project, ("one", "several"))
    one.done("finetune", one.recipe, "--assume-rates", *words)

    both = two_ranks(several, *words)
    until_step(several, 5)
    (store,) = (several.out / "store").iterdir()  # the other replica's has no name
    _kill(forked_by(both.pid))
    end = run_ended(both, within=ENDS)
    assert end.returncode == 1 and f"rank 1 on {socket.gethostname()} was lost" in end.stderr, end
    assert "2 replicas of the model, each for 1 of 2 lanes of the rows" in end.stderr, end
    alone = several.begin("finetune", several.recipe, "--assume-rates", *words)
    until_step(several, max(several.losses()) + 5)
    alone.kill()
    assert alone.wait().code == -signal.SIGKILL
    end = run_ended(two_ranks(several, *words))
    assert end.returncode == 0 and "resuming after step" in end.stderr, end
    assert max(one.losses()) == stops
    assert_alike(several, one, "adapter", stops)
    assert (several.out / "best" / "adapter_model.safetensors").is_file()
    assert list((several.out / "store").iterdir()) == [store]

    refused = one.fuyou("finetune", one.recipe, "--nproc", "2", "adapter={r: 4}", "train.parallel=replicas")
    assert refused.returncode == 2 and "2 of them cannot share 1 lane out" in refused.stderr, refused.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def budget(project: Project) -> int:
    first, *_ = (project.out / "log.jsonl").read_text().splitlines()
    return int(json.loads(first)["budget"])


@contextmanager
def two_torchruns(project: Project, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The command of README on each of two boxes, which are this one, with a drive each."""
    common = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    project, "-m", "torch.distributed.run", *common, "--node-rank", str(rank), *fuyou(project), *words,
                    f"offload.dir={project.folder / f'drive{rank}'}",
                )
            )
            for rank in range(2)
        ]  # fmt: skip


def test_torchrun_starts_ranks_again(project: Callable[[str], Project]) -> None:
    """It keeps the store in which they meet, with what the ranks before have told."""
    one = project("one")
    words = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node", "2", *fuyou(one))
    with started(one, *words) as launcher:
        until_step(one, 5)
        _kill(ranks_of(launcher.pid)[1])
        assert "resuming after step" in ended(launcher)
    assert max(one.losses()) == STEPS


def torchrun(project: Project, count: int, *words: str) -> tuple[str | Path, ...]:
    """The command that starts so many ranks on this box. `--nproc` asks for a core each."""
    return (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(count),
        "--master-port",
        str(free_port()),
        *fuyou(project, *words),
    )


def full_drive(launcher: subprocess.Popen[str], rank: int) -> str:
    """Lets one rank write no more, and returns what all have written, who end in time."""
    ranks = ranks_of(launcher.pid)
    resource.prlimit(ranks[rank], resource.RLIMIT_FSIZE, (4096, 4096))
    begun = time.monotonic()
    while any(map(is_there, ranks.values())):
        assert time.monotonic() - begun < ENDS, "ranks go on"
        time.sleep(0.02)
    out, _ = launcher.communicate(timeout=HANGS)
    return out


@pytest.mark.slow  # eleven processes, one after the other
def test_another_number_of_ranks_goes_on_as_one_process(new_project: NewProject, materials: Path) -> None:
    """1, 2, 4, 3 and 1 processes train a run in turn, and the drive of one is full: losses, states and export of one process,
    bit for bit, and nothing is left of those before."""
    blocks = write_llama(materials, "four-blocks", hidden_size=32, intermediate_size=64, num_hidden_layers=4)
    one, many = (new_project(name, {**CHANGES, "model.name_or_path": str(blocks)}) for name in ("one", "many"))
    one.done("finetune", one.recipe, "--assume-rates")
    for number, count in enumerate((1, 2, 4, 3), start=1):
        words = {1: fuyou(many), 2: fuyou(many, "--nproc", "2")}.get(count, torchrun(many, count))
        with started(many, *words) as process:
            until_step(many, 8 * number)
            if count == 2:
                out = full_drive(process, rank=1)
                assert process.returncode == 1 and f"rank 1 on {socket.gethostname()} has failed: " in out, out
                assert "store.bin" in out, out
            else:
                os.kill(process.pid if count == 1 else ranks_of(process.pid)[0], signal.SIGUSR1)
                out, _ = process.communicate(timeout=HANGS)
                assert f"stopped after step {max(many.losses())} of {STEPS}" in out, out
        assert len(list((many.out / "store").iterdir())) == count, "folders of another number of ranks are left"
    done = many.done("finetune", many.recipe, "--assume-rates")
    assert "bringing the state after step" in done.stderr
    assert_alike(many, one)
    assert len(list((many.out / "store").iterdir())) == 1


def test_what_cannot_be_started_is_refused_before_it_is(project: Callable[[str], Project]) -> None:
    one = project("one")
    for words, message in (
        (["--nproc", "0"], "there is no run of 0 processes"),
        (["--nproc", "-1"], "there is no run of -1 processes"),
        (["--nproc", "9999"], f"this box lets them use {core_count()}"),
        (["--nproc", "2", "train.compile=true"], "several ranks cannot train with train.compile=true yet"),
    ):
        refused = one.fuyou("finetune", one.recipe, *words)
        assert refused.returncode == 2 and refused.stderr.count("error: ") == 1 and message in refused.stderr, refused.stderr
    assert not one.out.exists()


def test_ranks_that_have_just_begun_can_be_stopped(project: Callable[[str], Project]) -> None:
    """They do not take a signal as their own yet, and end by it."""
    one = project("one")
    with started(one, *fuyou(one, "--nproc", "2")) as launcher:
        while not ranks_of(launcher.pid):
            time.sleep(0.005)
        launcher.terminate()
        out, _ = launcher.communicate(timeout=ENDS)
    assert launcher.returncode == 130 and "error: stopped" in out, out


SOON_TOLD = """
import atexit, os, signal, sys
from fuyou_cli.cli import error_screen
from fuyou_cli.cli.app import main
from fuyou_cli.training import peers
report = error_screen.report
def report_and_be_told_again(error):
    code = report(error)
    os.kill(os.getpid(), signal.SIGTERM)
    return code
error_screen.report = report_and_be_told_again
atexit.register(print, "Python ends")
peers._LATE = 1.0
main(sys.argv[1:])
"""


def test_a_rank_that_waits_for_others_can_be_stopped(project: Callable[[str], Project]) -> None:
    one, port = project("one"), free_port()
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with started(one, "-c", SOON_TOLD, *fuyou(one)[2:], RANK="0", LOCAL_RANK="0", **place) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == f"waiting for all 2 ranks at 127.0.0.1:{port}\n"
        until = time.monotonic() + HANGS
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < until and first.poll() is None
            time.sleep(0.05)
        first.terminate()
        out, _ = first.communicate(timeout=ENDS)
    assert first.returncode == 130 and out.endswith("interrupted\n"), out


CONNECTS = """
import atexit, os, sys
import torch.distributed as dist
from fuyou_cli.cli.app import main

def connect(*_, **__):
    if os.environ["RANK"] == sys.argv[1]:
        os._exit(9)
    raise RuntimeError("Connection closed by peer")

dist.init_process_group = connect
atexit.register(print, "Python ends")
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("dies", "says"),
    [("0", "the store on 127.0.0.1"), ("1", "rank 1 on HOST was lost (it ended"), ("neither", "rank 0 on HOST cannot connect")],
)
def test_a_rank_that_dies_while_ranks_connect_is_lost(project: Callable[[str], Project], dies: str, says: str) -> None:
    """gloo then fails as it does where boxes do not reach one another. The first rank holds the store. While Python ends, a
    thread that came back from the store would abort the process."""
    one = project("one")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("-c", CONNECTS, dies, *fuyou(one)[2:])
    with (
        started(one, *words, RANK="0", LOCAL_RANK="0", **place) as first,
        started(one, *words, RANK="1", LOCAL_RANK="1", **place) as second,
    ):
        ranks = (first, second)
        texts = [rank.communicate(timeout=ENDS)[0] for rank in ranks]
    lives = 1 if dies == "0" else 0
    assert ranks[lives].returncode == (2 if dies == "neither" else 1), texts
    assert f"error: {says.replace('HOST', socket.gethostname())}" in texts[lives], texts
    assert "Python ends" not in texts[lives], texts


def test_a_rank_that_somebody_started_says_what_ended_it(project: Callable[[str], Project]) -> None:
    """The first rank was killed, so nobody else can."""
    one = project("one")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        started(one, *fuyou(one), RANK="0", LOCAL_RANK="0", **place) as first,
        started(one, *fuyou(one), RANK="1", LOCAL_RANK="1", **place) as second,
    ):
        until_step(one, 5)
        _kill(first.pid)
        out, _ = second.communicate(timeout=ENDS)
    assert second.returncode == 1 and out.startswith("error: ") and "the last commit" in out, out


def test_a_rank_that_trains_nothing_commits_with_the_others(project: Callable[[str], Project]) -> None:
    one, two = project("one"), project("two")
    words = ("freeze=[model.*]",)
    one.done("finetune", one.recipe, "--assume-rates", *words)
    end = run_ended(two_ranks(two, *words))
    assert end.returncode == 0, end
    assert_alike(two, one)


def test_a_signal_that_comes_twice_stops_once(project: Callable[[str], Project]) -> None:
    """Slurm and systemd send theirs to all processes of a job, and the launcher passes its own on."""
    one = project("one")
    both = two_ranks(one)
    until_step(one, 5)
    both.send(signal.SIGUSR1)
    both.send(signal.SIGTERM)
    end = run_ended(both)
    assert end.returncode == 130 and f"stopped after step {max(one.losses())} of {STEPS}" in end.stderr, end


TOKENISES = """
import os, time
from fuyou_cli.data import cache
serve = cache._serve
def served(request, **options):
    os.close(os.open(f"tokenised-by-{rank}", os.O_CREAT))
    time.sleep(1.0)
    return serve(request, **options)
cache._serve = served
"""


def test_one_rank_of_a_box_tokenises(project: Callable[[str], Project]) -> None:
    """The others find its rows: a large corpus is read once, and lies once in the folder for rows in progress."""
    one = project("one")
    words = (
        "train.max_steps=3",
        "dataset.packing=concat",
        f"dataset.cache_dir={one.folder / 'rows'}",
        "precision.master=float32",
    )
    end = run_ended(two_ranks(one, *words, "precision.master=float32", program=TOKENISES))
    assert end.returncode == 0, end
    assert end.stderr.count("has no effect any more") == 1, "what all ranks find in the recipe is told once"
    assert [path.name for path in one.folder.glob("tokenised-by-*")] == ["tokenised-by-0"]


def test_the_newer_run_is_the_recipes(project: Callable[[str], Project]) -> None:
    """A run that was given up for one of another number of processes is not taken for it."""
    ranks = project("ranks")
    assert run_ended(two_ranks(ranks, "train.max_steps=2")).returncode == 0
    ranks.done("finetune", ranks.recipe, "--assume-rates", "train.max_steps=3", "checkpoint.resume=never")
    (alone,) = (folder for folder in (ranks.out / "store").iterdir() if not folder.name.endswith("of2"))
    written = ranks.done("export", ranks.recipe, ranks.folder / "again")
    assert files_of(ranks.folder / "again") == files_of(ranks.out / "model"), written.stderr
    assert "already finished" in ranks.done("finetune", ranks.recipe, "train.max_steps=3").stderr
    end = run_ended(two_ranks(ranks, "train.max_steps=3"))
    assert end.returncode == 0 and f"bringing the state after step 3 from {alone}" in end.stderr, end
    assert not alone.exists()


ONE_GPU = """
import importlib.metadata, types, torch
from fuyou_cli.training import prepare
installed = importlib.metadata.version
importlib.metadata.version = lambda name: "2.13.0" if name == "torch" else installed(name)
prepare._DRIVERS = ("/dev/null",) if rank == "1" else ()
for name, value in {"is_available": rank == "1", "device_count": 1, "current_device": 0, "set_device": None}.items():
    setattr(torch.cuda, name, lambda *_, value=value: value)
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="GPU-1")
"""


def test_a_box_with_a_gpu_and_one_without_are_refused(project: Callable[[str], Project]) -> None:
    """One would be of a ring, the other a replica, and what they tell one another first differs."""
    both = two_ranks(project("both"), "adapter={r: 4}", "train.lanes=2", "offload.device=auto", program=ONE_GPU)
    end = run_ended(both)
    assert end.returncode == 2, end
    host = socket.gethostname()
    assert f'rank 1 on {host} has another kind of device than rank 0 on {host}: "cuda", not "cpu"' in end.stderr, end


def test_unlike_ranks_are_refused_before_a_byte_is_written(project: Callable[[str], Project]) -> None:
    """Even in what decides which stores are looked at."""
    one, other = project("one"), project("other")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        started(one, *fuyou(one), RANK="0", LOCAL_RANK="0", **place) as first,
        started(other, *fuyou(other, "checkpoint.resume=never"), RANK="1", LOCAL_RANK="1", **place) as second,
    ):
        out, _ = first.communicate(timeout=HANGS)
        second.communicate(timeout=HANGS)
    assert (first.returncode, second.returncode) == (2, 2), out
    assert "rank 1 on" in out and "has another checkpoint.resume than rank 0" in out and '"never", not "auto"' in out
    for each in (one, other):
        assert not each.out.exists()
        assert not list(each.folder.rglob("store.bin"))
