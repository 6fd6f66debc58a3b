"""Runs on drives that fail, are gone or forbid: what they say, that they change nothing, and that nothing is given up that
could not be read."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from damage import flip
from drawn import every, quick_and_slow
from faulty_drive import WITHOUT, FaultyDrive, faulty_drive
from proof.nursery import Nursery

from fuyou_cli.checkpoint.files import INDEX_NAME, has_weights, open_checkpoint
from fuyou_cli.checkpoint.reader import weights_mark
from fuyou_cli.core.errors import FuyouError, UnreadableError, UsageError
from fuyou_cli.core.json_files import find_text
from fuyou_cli.core.paths import scratch_folder
from fuyou_cli.data.cache import prompt_ids
from fuyou_cli.data.formats import Texts
from fuyou_cli.data.tokenise import load_tokenizer
from fuyou_cli.machine.measure.store_rates import new_store
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.swap.store import Store
from fuyou_cli.training.prepare import run_directories
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.resume import find_saved
from fuyou_cli.training.state.store_folders import begin_parts, read_part

from .conftest import CommandIn, NewProject, Project, WholeOf
from .running import STEPS, interrupt, run_of, stop, train

COMMITS = {"train.max_steps": STEPS, "checkpoint.commit_every_steps": 1, "export.at_end": False}


@pytest.fixture(scope="module")
def mounted_drive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDrive]:
    with faulty_drive(tmp_path_factory.mktemp("drives") / "mounted", *WITHOUT) as made:
        yield made


@pytest.fixture
def drive(mounted_drive: FaultyDrive) -> Iterator[FaultyDrive]:
    """Gives an empty one."""
    yield mounted_drive
    mounted_drive.fault(*WITHOUT)
    for path in mounted_drive.behind.iterdir():  # there, files that are still open are no hidden ones
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def stopped_on(drive: FaultyDrive, project: Project) -> None:
    """Has a run stopped in step 3 whose store is on the drive."""
    project.write_recipe({**COMMITS, "offload.dir": str(drive.path / "store")})
    stop(project, interrupt(3, "forward"))


@pytest.fixture
def on_drive(drive: FaultyDrive, made_once: Callable[..., Path], materials: Path, nursery: Callable[[], Nursery]) -> Project:
    """Gives a project whose run was stopped in step 3, its store on the drive: made once, put back for every test."""

    def make(project: Project) -> None:
        stopped_on(drive, project)
        shutil.move(drive.behind / "store", project.folder / "aside")

    folder = made_once("on-drive", make)
    shutil.copytree(folder / "aside", drive.behind / "store")
    return Project(folder=folder, materials=materials, nursery=nursery)


def content(folder: Path) -> dict[str, str]:
    """Returns what is in a folder: the digest of every file by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def damage(path: Path) -> None:
    """Cuts a small file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


NOW, LOST = 1, 2  # exit codes: of what may be read another time, and of what is damaged or gone


# Of these cases another one differs in the call that fails, or in the error's number, and in no line of ours: they are slow.
ALIKE = (1, 2, 4, 6, 12, 16, 18)


@pytest.mark.parametrize(
    ("faults", "files", "change", "code", "told"),
    quick_and_slow([
        (("OPEN manifest.json EIO",), (), None, NOW, ("manifest.json: cannot be read: Input/output error", "dmesg")),
        (("READ manifest.json EIO",), (), None, NOW, ("manifest.json: cannot be read: Input/output error", "dmesg")),
        (("LOOKUP manifest.json EIO",), (), None, NOW, ("manifest.json: cannot be read: Input/output error", "dmesg")),
        (("OPEN manifest.json EACCES",), (), None, NOW, ("manifest.json: cannot be read: Permission denied", "permissions")),
        (("LOOKUP manifest.json EACCES",), (), None, NOW, ("manifest.json: cannot be read: Permission", "permissions")),
        (("OPEN manifest.json EUCLEAN",), (), None, NOW, ("manifest.json: cannot be read: Structure", "fsck")),
        (("OPEN manifest*.json EIO",), (), None, NOW, ("manifest.json: cannot be read: Input/output error", "dmesg")),
        (("OPEN manifest.before.json EIO",), ("manifest.json",), Path.unlink, NOW, ("before.json: cannot be read", "dmesg")),
        (("OPEN manifest.before.json EIO",), ("manifest.json",), damage, NOW, ("before.json: cannot be read", "dmesg")),
        ((), ("manifest.json", "manifest.before.json"), damage, LOST, ("manifest.json", "checkpoint.resume=never")),
        ((), ("manifest.json", "manifest.before.json"), None, 0, ()),
        (("OPEN part.json EIO",), (), None, NOW, ("part.json: cannot be read: Input/output error", "dmesg")),
        (("LOOKUP part.json EACCES",), (), None, NOW, ("part.json: cannot be read: Permission denied", "permissions")),
        ((), ("part.json",), Path.unlink, LOST, ("belongs to another run now", "checkpoint.resume=never")),
        ((), ("part.json",), damage, LOST, ("part.json is damaged", "checkpoint.resume=never")),
        (("LOCK store.bin EIO",), (), None, NOW, ("store.bin: cannot be locked: Input/output error", "dmesg")),
        (("LOCK store.bin EACCES",), (), None, NOW, ("store.bin: cannot be locked: Permission denied", "permissions")),
        (("LOCK store.bin ENOLCK",), (), None, NOW, ("store.bin: cannot be locked: No locks available", "NFS")),
        (("LOOKUP store.bin EIO",), (), None, NOW, ("store.bin: cannot be read: Input/output error", "dmesg")),
        (("OPEN store.bin EACCES",), (), None, NOW, ("store.bin: cannot be read: Permission denied", "permissions")),
        (("READ store.bin EIO",), (), None, NOW, ("cannot be read whole, nor an older one", "dmesg")),
        ((), ("store.bin",), Path.unlink, LOST, ("store.bin is missing", "checkpoint.resume=never")),
        ((), ("store.bin",), damage, LOST, ("but needs at least", "checkpoint.resume=never")),
        ((), ("manifest.json", "manifest.before.json"), Path.unlink, 0, ()),
    ], lambda number: number not in ALIKE),
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_a_drive_does_to_a_saved_run(
    faults: tuple[str, ...], files: tuple[str, ...], change: Callable[[Path], object] | None, code: int, told: tuple[str, ...],
    on_drive: Project, drive: FaultyDrive, command: CommandIn, whole: WholeOf,
) -> None:  # fmt: skip
    """Goes over manifest, parts, store and lock: unreadable, forbidden, missing or damaged. What is refused changes no byte."""
    (store,) = (drive.behind / "store").iterdir()
    for name in files:
        if change is not None:
            change(store / name)
    before = content(drive.behind)
    drive.fault(*WITHOUT, *faults)
    found, _, err = command(on_drive)("finetune", "recipe.yaml")
    said = " ".join(err.split())
    assert found == code and all(part in said for part in told), err
    if not code:
        assert list(on_drive.losses().values()) == whole().losses[0 if change else 2 :]  # without manifests it begins anew
        return
    assert content(drive.behind) == before
    assert code == LOST or ("never" not in said and "start over" not in said and "the same command" in said)


@pytest.mark.parametrize(("number", "remedy"), [("EIO", "dmesg"), ("EACCES", "permissions"), ("ESTALE", "mounted anew")])
def test_a_file_that_cannot_be_read_now_has_the_remedy_of_its_drive(number: str, remedy: str, drive: FaultyDrive) -> None:
    """Whatever its reader advises for a file that is damaged: "fetch it again", say."""
    path = drive.path / "config.json"
    path.write_text("{}")
    drive.fault(f"OPEN config.json {number}")
    with pytest.raises(UnreadableError, match=r"config\.json: cannot be read") as raised:
        find_text(path, limit=100, hint="fetch the file again")
    assert remedy in (raised.value.hint or "")


@pytest.fixture
def model_on_drive(drive: FaultyDrive, llama: Path) -> Path:
    return Path(shutil.copytree(llama, drive.path / "model"))


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("fault", "told", "remedy"),
    [
        ("READ tokenizer.json EIO", "Input/output error", "dmesg"),
        ("OPENDIR model EACCES", "Permission denied", "permissions"),
        *every(
            3,
            [
                ("OPEN tokenizer_config.json EIO", "Input/output error", "dmesg"),
                ("OPEN tokenizer.json EACCES", "Permission denied", "permissions"),
                ("READDIR model EIO", "Input/output error", "dmesg"),
            ],
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_read_now_has_the_remedy_of_its_drive(
    fault: str, told: str, remedy: str, model_on_drive: Path, drive: FaultyDrive
) -> None:
    """Whichever library reads it; so where the process that tokenises does."""
    drive.fault(*WITHOUT, fault)
    asked = {"chat_template": None, "pad_token": None}
    for load in (
        lambda: load_tokenizer(model_on_drive, chat_template=None, pad_token=None),
        lambda: prompt_ids([("prompt 1", Texts(parts=(("a", True),)))], model_on_drive, **asked),  # type: ignore[arg-type]
    ):
        with pytest.raises(UnreadableError) as refused:
            load()
        assert told in refused.value.message and remedy in str(refused.value.hint) and refused.value.exit_code == 1


@pytest.mark.parametrize("fault", ["OPEN", "READ"])
def test_weights_that_cannot_be_read_now_have_the_remedy_of_their_drive(
    fault: str, model_on_drive: Path, drive: FaultyDrive
) -> None:
    entries = open_checkpoint(model_on_drive).entries
    (file,) = {entry.file for entry in entries.values()}
    subprocess.run(["sync"], check=True)
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    drive.fault(*WITHOUT, f"{fault} {file.name} EIO")
    for use in (lambda: open_checkpoint(model_on_drive), lambda: weights_mark(entries)):
        with pytest.raises(UnreadableError) as refused:
            use()
        assert file.name in refused.value.message and "dmesg" in str(refused.value.hint)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_that_cannot_be_looked_up_are_not_said_to_be_missing(
    sharded: bool, model_on_drive: Path, drive: FaultyDrive
) -> None:
    """Nor is a model fetched that may be here."""
    if sharded:
        weight_map = dict.fromkeys(open_checkpoint(model_on_drive).entries, "model-1.safetensors")
        (drive.behind / "model/model.safetensors").rename(drive.behind / "model/model-1.safetensors")
        (drive.behind / "model" / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert has_weights(model_on_drive) and open_checkpoint(model_on_drive).entries
    for name in ("model-1.safetensors", INDEX_NAME) if sharded else ("model.safetensors",):
        drive.fault(*WITHOUT, f"LOOKUP {name} EACCES")
        for use in (open_checkpoint, has_weights):
            with pytest.raises(UnreadableError, match=f"{name}: cannot be read: Permission denied") as refused:
                use(model_on_drive)
            assert "permissions" in str(refused.value.hint), use


def test_what_a_store_keeps_of_its_model_and_cannot_be_read_now(
    on_drive: Project, drive: FaultyDrive, command: CommandIn
) -> None:
    """Is its drive's fault, whichever command reads it; a copy of it is not said to fail as it is written."""
    run = command(on_drive)
    assert run("finetune", "recipe.yaml")[0] == 0
    (store,) = (drive.path / "store").iterdir()
    before = content(drive.behind)
    generate, export = ("generate", str(store), "--prompt", "a", "--max-new-tokens", "1"), ("export", str(store), "ex")
    cases = (
        ("READ config.json EIO", (generate, export, ("finetune", "recipe.yaml"))),
        ("OPEN tokenizer.json EACCES", (generate, export)),
        ("READDIR companions EIO", (generate, export)),
    )
    for fault, commands in cases:
        drive.fault(*WITHOUT, fault)
        for words in commands:
            code, _, err = run(*words)
            said = " ".join(err.split())
            assert code == 1 and ("dmesg" in said or "permissions" in said) and "cannot write" not in said, (fault, words, said)
    assert content(drive.behind) == before


def test_losses_that_cannot_be_read_now_are_not_told_as_numbers(
    on_drive: Project, drive: FaultyDrive, command: CommandIn
) -> None:
    run = command(on_drive)
    assert run("finetune", "recipe.yaml")[0] == 0
    drive.fault(*WITHOUT, "READ losses.bin EIO")
    code, _, err = run("finetune", "recipe.yaml")
    said = " ".join(err.split())
    assert code == 0 and "losses.bin: Input/output error" in said and "steps are done, loss not known" in said, said
    assert "nan" not in said.split()


@pytest.mark.parametrize("name", ["tokens.bin", "mask.bin"])
def test_rows_that_cannot_be_read_in_a_step(name: str, drive: FaultyDrive, new_project: NewProject, command: CommandIn) -> None:
    """They are no part of the process's memory, where a drive that fails would end it by SIGBUS."""
    changes = {**COMMITS, "dataset.cache_dir": str(drive.path / "tokenised"), "offload.dir": "store"}
    run = command(new_project("project", changes))
    assert run("data", "recipe.yaml")[0] == 0
    subprocess.run(["sync"], check=True)
    for file in drive.path.glob(f"tokenised/*/{name}"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    drive.fault(*WITHOUT, f"READ {name} EIO")
    code, _, err = run("finetune", "recipe.yaml")
    said = " ".join(err.split())
    assert code == 1 and "the tokenised data in " in said and "cannot be read" in said and "dmesg" in said, said
    drive.fault(*WITHOUT)
    assert run("finetune", "recipe.yaml")[0] == 0


@pytest.mark.parametrize(
    ("fault", "told", "remedy"),
    [
        ("FSYNC tokens.bin EIO", "cannot write {}tokens.bin: Input/output error", "dmesg"),
        ("CREATE mask.bin EROFS", "cannot write {}mask.bin: Read-only file system", "read-only"),
        ("CREATE at EROFS", "cannot write {}at: Read-only file system", "read-only"),
        ("WRITE tokens.bin EFBIG", "cannot write {}tokens.bin: File too large", "ulimit -f"),
        ("WRITE offsets.npy EDQUOT", "cannot write {}offsets.npy: Disk quota exceeded", "quota"),
        ("READ data.jsonl ESTALE", "{}data.jsonl: cannot be read: Stale file handle", "mounted anew"),
        ("READ data.jsonl.gz EIO", "{}data.jsonl.gz: cannot be read: Input/output error", "dmesg"),
    ],
)
@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_that_cannot_be_made_name_the_file(
    fault: str, told: str, remedy: str, streaming: bool, drive: FaultyDrive, new_project: NewProject, command: CommandIn
) -> None:
    """Says whether it is read or written, whichever call fails: what the system says of an open file has no name."""
    name = "data.jsonl.gz" if ".gz" in fault else "data.jsonl"
    text = b"".join(b'{"text": "%d and so on"}\n' % number for number in range(40))
    (drive.behind / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    changes = {
        "dataset.cache_dir": str(drive.path / "tokenised"), "dataset.streaming": streaming,
        "dataset.train": [{"path": str(drive.path / name), "format": "text"}],
    }  # fmt: skip
    run = command(new_project("project", {**COMMITS, **changes}))
    drive.fault(*WITHOUT, fault)
    code, _, err = run("finetune", "recipe.yaml")
    said = "".join(err.split())
    verb, _, rest = "".join(told.split()).partition("{}")
    assert code == (4 if "EDQUOT" in fault else 1) and verb in said and rest in said and remedy in " ".join(err.split()), err
    assert str(drive.path) in said and ("READ" in fault or "cannotberead" not in said), err


@pytest.mark.parametrize("unreadable", [False, True])
def test_a_state_of_which_nothing_is_whole_is_not_said_to_continue(
    unreadable: bool, on_drive: Project, drive: FaultyDrive, command: CommandIn
) -> None:
    store = next(drive.path.glob("store/*/store.bin"))
    if unreadable:
        drive.fault(*WITHOUT, "READ store.bin EIO")
    else:
        behind = next(drive.behind.rglob("store.bin"))
        for byte in range(0, store.stat().st_size, 4096):
            flip(behind, byte)
    before = content(drive.behind)
    run = command(on_drive)
    code, _, err = run("finetune", "recipe.yaml")
    said = " ".join(err.split())
    assert code == 1 and "the same command continues from there" not in said and "is saved in" not in said, err
    assert ("checkpoint.resume=never" in said) != unreadable
    code, out, err = run("verify", str(store.parent))
    assert code == 1 and ("checkpoint.resume=never" in out) != unreadable
    assert content(drive.behind) == before


def test_verify_and_export_without_permission_do_not_say_that_nothing_is_there(
    on_drive: Project, drive: FaultyDrive, command: CommandIn
) -> None:
    (store,) = (drive.path / "store").iterdir()
    run = command(on_drive)
    for fault in ("LOOKUP manifest*.json EACCES", f"LOOKUP {store.name} EACCES", "LOOKUP store EACCES"):
        drive.fault(*WITHOUT, fault)
        for words in (
            ("verify", str(store)),
            ("verify", str(store.parent)),
            ("export", str(store), "out"),
            ("clean", str(store)),
        ):
            code, out, err = run(*words)
            said = " ".join(f"{out} {err}".split())
            assert code == 1 and "Permission denied" in said and "there is no store" not in said, (fault, words, said)
    drive.fault(*WITHOUT)
    assert run("verify", str(store.parent))[0] == 0


def mount(folder: Path, *options: str) -> None:
    """Mounts the ext4 of a folder with these options, a new one the first time. Skips where that cannot be."""
    image = folder.with_suffix(".image")
    if not image.exists():
        folder.mkdir()
        subprocess.run(["truncate", "-s", "64M", image], check=True)
        if shutil.which("mkfs.ext4") is None or subprocess.run(["mkfs.ext4", "-q", "-F", image], check=False).returncode != 0:
            pytest.skip("no mkfs.ext4")
    words = ["mount", "-o", ",".join(("loop", *options)), image, folder]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")


def unmount(folder: Path) -> None:
    """Waits until the kernel has let go of what ended processes had open."""
    until = time.monotonic() + 20
    while subprocess.run(["umount", folder], capture_output=True, check=False).returncode != 0:
        assert time.monotonic() < until, folder
        time.sleep(0.1)


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    mount(folder, *options)
    try:
        yield folder
    finally:
        unmount(folder)


def test_a_drive_that_is_not_mounted_is_not_taken_for_a_new_one(
    new_project: NewProject, tmp_path: Path, whole: WholeOf
) -> None:
    """Tells by what it noted for this user, and where that is lost by the log of the run."""
    place = tmp_path / "drive"
    mount(place)
    try:
        project = new_project("project", {**COMMITS, "offload.dir": str(place / "store")})
        assert project.fuyou_doing("os.kill(os.getpid(), 2)", 3, "finetune", project.recipe).returncode == 130
        saved = content(place)
        unmount(place)
        for is_noted in (True, False):
            if not is_noted:
                shutil.rmtree(project.folder / "cache/fuyou/stores")
            refused = project.fuyou("finetune", project.recipe)
            said = " ".join(refused.stderr.split())
            assert refused.returncode == 2 and "was on another drive" in said and "checkpoint.resume=never" in said, refused
            assert not any(place.iterdir())
        project.done("plan", project.recipe)
        mount(place)
        assert content(place) == saved
        whole_run = project.fuyou("finetune", project.recipe)
        assert whole_run.returncode == 0 and "resuming after step" in whole_run.stderr, whole_run
        unmount(place)
        project.done("finetune", project.recipe, "checkpoint.resume=never")
        assert list(project.losses().values()) == whole().losses
        again = project.fuyou("finetune", project.recipe)  # the state on this drive is the run's now
        assert again.returncode == 0, again
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True, check=False)


def test_what_is_hidden_while_it_is_open_is_waited_for(drive: FaultyDrive, new_project: NewProject, command: CommandIn) -> None:
    """Removes the folders of `doctor` and of a measurement where the end of a file is told late; says what stays for good."""
    drive.fault(*WITHOUT, "RELEASE * -200")
    code, out, err = command(new_project("project"))("doctor", "--dir", str(drive.path))
    assert code == 0, out + err
    assert "not empty" not in out + err and drive.left() == []
    with new_store([drive.path], 1 << 22) as (_, store):
        (held,) = (path for path in drive.path.rglob("store.bin"))
        held.unlink()  # the store has it open
        assert store.size == 1 << 22 and any(drive.path.rglob(".fuse_hidden*"))
    assert drive.left() == []
    drive.fault(*WITHOUT, "RMDIR fuyou-bench-* EBUSY")
    with pytest.raises(FuyouError, match=r"cannot remove .*busy") as refused, scratch_folder(drive.path):
        pass
    assert refused.value.hint


def test_a_drive_without_its_server_and_one_over_quota_say_what_to_do(
    tmp_path: Path, new_project: NewProject, command: CommandIn
) -> None:
    with faulty_drive(tmp_path / "mounted", *WITHOUT) as drive:
        stopped_on(drive, project := new_project("project"))
        run = command(project)
        drive.fault(*WITHOUT, "WRITE .manifest.new EDQUOT", "CREATE .manifest.new EDQUOT")
        code, _, err = run("finetune", "recipe.yaml")
        assert code == 4 and "quota" in err and "the same command" in " ".join(err.split()), err
        drive.lose()
        store = str(drive.path / "store")
        for words in (("finetune", "recipe.yaml"), ("verify", store), ("clean", store)):
            code, out, err = run(*words)
            said = " ".join(err.split())
            assert code == 1 and "Transport endpoint is not connected" in said and "mount it again" in said, (words, out, err)
            assert "never" not in said and "is missing" not in said


def test_a_bad_first_block_does_not_end_a_run_that_does_not_need_it(
    on_drive: Project, drive: FaultyDrive, whole: WholeOf
) -> None:
    """Finds out whether direct I/O works all the same. What the block holds is the state before, or comes from there."""
    drive.fault(*WITHOUT, "READ store.bin EIO 0 4096")
    with run_of(on_drive) as run:
        assert run.store.direct
        run.load(lambda count: None)
        assert run.step in (1, 2)
    drive.fault(*WITHOUT)
    assert train(on_drive)[0] == whole().losses


def test_direct_io_that_is_none_is_not_said_to_work(tmp_path: Path, new_project: NewProject, command: CommandIn) -> None:
    """ext4 takes O_DIRECT with data=journal as well, and goes through the page cache."""
    with mounted(tmp_path / "journalled", "data=journal") as place:
        _, out, _ = command(new_project("project"))("doctor", "--dir", str(place))
        assert "the page cache is used" in " ".join(out.split()), out
    with (
        mounted(tmp_path / "ordered") as place,
        Store.open([place / "store.bin"], stripe=1 << 20, size=1 << 20, create=True) as store,
    ):
        assert store.direct


def test_without_proc_a_process_is_not_taken_for_an_empty_one(new_project: NewProject) -> None:
    project = new_project("project")
    hidden = "mount -t tmpfs none /proc && exec"
    words = " ".join(project.command("plan", project.recipe, "--json"))
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{hidden} {words}"],
        env=project.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert done.returncode == 0 and "/proc" in done.stderr, done
    limited = "from fuyou_cli.data.sandbox import limit_memory; limit_memory(1 << 28); bytearray(1 << 20); bytearray(1 << 30)"
    child = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{hidden} {sys.executable} -c '{limited}'"],
        env=project.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.stderr.rstrip().endswith("MemoryError"), "the process that tokenises is limited all the same"
    plan = json.loads(done.stdout)
    seen = project.fuyou("plan", project.recipe, "--json")
    known = json.loads(seen.stdout)
    assert "/proc" not in seen.stderr
    assert plan["hardware"]["process_bytes"] >= known["hardware"]["process_bytes"]


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_run_killed_in_its_first_second_is_never_refused(
    kills: int, drive: FaultyDrive, new_project: NewProject, whole: WholeOf
) -> None:
    """Kills at any moment from the store's first file on, half of them within 40 ms, on a drive that takes 2 ms per request."""
    project = new_project("project", {**COMMITS, "offload.dir": str(drive.path / "store")})
    directories = run_directories(load_recipe(project.recipe).recipe)
    rng, found = random.Random(7), set[tuple[str, ...]]()
    for number in range(kills):
        shutil.rmtree(drive.behind / "store", ignore_errors=True)
        shutil.rmtree(project.out, ignore_errors=True)
        drive.fault(*WITHOUT, "* store* -2", "* *.json -2", "* *.new -2")
        run = project.begin("finetune", project.recipe)
        while not any(drive.behind.glob("store/*/store.bin")):
            assert not run.is_over(0.0), run.wait()
        time.sleep(rng.uniform(0.0, 0.04 if number % 2 else 1.0))
        run.kill()
        run.wait()
        drive.fault(*WITHOUT)
        found.add(tuple(sorted(path.name for path in directories[0].iterdir())))
        find_saved("auto", directories, say=print)  # raises where a run would be refused
    assert len(found) > 2  # moments
    project.done("finetune", project.recipe)
    assert list(project.losses().values()) == whole().losses


def test_what_a_run_leaves_that_was_killed_before_it_named_itself(new_project: NewProject, drive: FaultyDrive) -> None:
    """An empty file, then one with a part file beside it, then one that has its size: each is begun anew."""
    project = new_project("project", {**COMMITS, "offload.dir": str(drive.path / "store"), "train.max_steps": 3})
    directories = run_directories(load_recipe(project.recipe).recipe)
    directories[0].mkdir(parents=True)
    assert begin_parts("a" * 16, directories) == [directories[0] / "store.bin"]
    assert begin_parts("b" * 16, directories) == []
    part = read_part(directories[0])
    assert part is not None and part.run == "a" * 16
    (directories[0] / "part.json").rename(drive.path / "part.json")
    assert find_saved("auto", directories, say=print) is None
    os.truncate(directories[0] / "store.bin", 1 << 20)
    with pytest.raises(UsageError, match="holds data that does not belong to any known run"):  # nobody says that it is empty
        find_saved("auto", directories, say=print)
    (drive.path / "part.json").rename(directories[0] / "part.json")
    assert find_saved("auto", directories, say=print) is None
    train(project)
    assert manifests.read(directories[0]) is not None


def test_a_store_that_cannot_be_made_leaves_nothing(new_project: NewProject, drive: FaultyDrive) -> None:
    project = new_project("project", {**COMMITS, "offload.dir": str(drive.path / "store")})
    for fault in ("SETATTR store.bin ENOSPC", "LOCK store.bin ENOLCK", "CREATE .part.new EDQUOT", "RENAME .part.new EIO"):
        drive.fault(*WITHOUT, fault)
        with pytest.raises(FuyouError) as refused:
            train(project)
        assert refused.value.hint, fault
        drive.fault(*WITHOUT)
        assert [path for path in drive.left() if path.is_file() and path.name != ".part.new"] == [], fault
