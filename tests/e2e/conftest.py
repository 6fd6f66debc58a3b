"""Makes a tiny checkpoint with its tokenizer, a few rows of text and a recipe: runs as a person starts them."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hooks import doing
from proof.nursery import Child, Nursery
from proof.tiny_runs import with_keys

from fuyou_cli.cli.app import main
from fuyou_cli.core.errors import Interrupted
from fuyou_cli.core.paths import kept_folder
from fuyou_cli.data import cache as tokenised
from fuyou_cli.training.run_log import read_log
from tests import served

ROOT = Path(__file__).resolve().parents[2]
SERVED = "from fuyou_cli.data import cache\nfrom tests import served\ncache._serve = served.serve\n"
HANGS = 280.0  # seconds after which a run is given up: nothing is judged by it
END, PAD = "<|end|>", "<|pad|>"
PLACES = ["harbour", "mill", "station", "bakery", "tower", "garden", "market", "bridge"]
ROWS = [f"The road from the {a} to the {b} takes {len(a) * len(b)} minutes on foot." for a in PLACES for b in PLACES]


@pytest.fixture(scope="session")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes model/ (GPT-2 with dropout, tied, float32), other/ (one block more) and rows.jsonl."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("materials")
    size = _write_tokenizer(folder / "model")
    for name, layers in (("model", 2), ("other", 3)):
        config = transformers.GPT2Config(
            vocab_size=size, n_embd=32, n_layer=layers, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
            embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1,
        )  # fmt: skip
        torch.manual_seed(3)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder / name)
    copy_tokenizer(folder, folder / "other")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return folder


@pytest.fixture(scope="session")
def llama(materials: Path) -> Path:
    return write_llama(materials, "llama", hidden_size=32, intermediate_size=64)


@pytest.fixture(scope="session")
def longrope(materials: Path) -> Path:
    """A Llama whose positions are others in rows of more than 16 tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0], "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    return write_llama(materials, "longrope", hidden_size=32, intermediate_size=64, rope_parameters=rope, initializer_range=0.5)


def write_llama(materials: Path, name: str, **sizes: Any) -> Path:
    usual = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}
    return write_model(materials, materials / name, "LlamaConfig", **{**usual, **ends, **sizes})


def write_model(materials: Path, folder: Path, kind: str, *, dtype: str = "float32", **sizes: Any) -> Path:
    """Writes a tiny model of this configuration as transformers does, with the tokenizer of the others, once."""
    import torch
    import transformers

    if not folder.exists():
        words = len(transformers.AutoTokenizer.from_pretrained(materials / "model"))
        config = getattr(transformers, kind)(vocab_size=words, **sizes)
        torch.manual_seed(4)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        copy_tokenizer(materials, folder)
    return folder


def copy_tokenizer(materials: Path, folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(materials / "model" / file, folder / file)


def _write_tokenizer(directory: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[END, PAD], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator(ROWS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=PAD, model_max_length=64)
    tokenizer.save_pretrained(directory)
    return len(tokenizer)


def share_models(cache: Path) -> None:
    """Has a user's cache know the models that any test has described."""
    if not (models := cache / "fuyou/models").is_symlink():
        models.parent.mkdir(parents=True, exist_ok=True)
        models.symlink_to(kept_folder() / "models")


@dataclass(kw_only=True, slots=True)
class Project:
    """Holds a folder with recipe.yaml; runs write below it."""

    folder: Path
    materials: Path
    nursery: Callable[[], Nursery] | None = None  # of processes that have imported all a run imports

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def write_recipe(self, changes: Mapping[str, Any] | None = None) -> Path:
        """The recipe with dotted keys replaced."""
        content: dict[str, Any] = {
            "output_dir": str(self.out),
            "model": {"name_or_path": str(self.materials / "model")},
            "dataset": {
                "train": [{"path": str(self.materials / "rows.jsonl"), "format": "text"}],
                "max_seq_len": 24,
                "cache_dir": str(self.materials / "tokenised"),
            },
            "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
            "lr_scheduler": {"name": "cosine", "warmup_steps": 2},
            "train": {"max_steps": 6, "batch_size": 4, "micro_batch_size": 2, "threads": 1, "clip_grad_norm": 0.5},
            "offload": {
                "device": "cpu", "max_memory": {"cpu": "4GiB"}, "weights": "ssd", "optimizer_states": "ssd",
                "gradients": "ssd", "boundaries": "ssd", "measure": False,
            },
            "export": {"dtype": "float32"},
        }  # fmt: skip
        self.recipe.write_text(yaml.safe_dump(with_keys(content, changes or {})))
        return self.recipe

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "fuyou_cli", *map(str, arguments)]

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FUYOU_")}
        kept["XDG_CACHE_HOME"] = str(self.folder / "cache")  # this machine as nobody has measured it
        share_models(self.folder / "cache")
        return {**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}

    def fuyou(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs `fuyou ARGUMENTS` to its end in this process, with nothing to read: `begin` starts one of its own."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        with (
            pytest.MonkeyPatch.context() as patched,
            Path(os.devnull).open() as nothing,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            environment = self.environment()
            for name in os.environ.keys() - environment.keys():
                patched.delenv(name)
            for name, value in environment.items():
                patched.setenv(name, value)
            patched.chdir(self.folder)
            patched.setattr(sys, "stdin", nothing)
            with pytest.raises(SystemExit) as end:
                main([*map(str, arguments)])
        texts = [(stream.flush(), stream.buffer.getvalue().decode())[1] for stream in (out, err)]  # type: ignore[attr-defined]
        return subprocess.CompletedProcess("fuyou", int(end.value.code or 0), *texts)

    def done(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """The same of a command that ends well."""
        ended = self.fuyou(*arguments)
        assert ended.returncode == 0, ended.stderr
        return ended

    def begin(self, *arguments: str | Path, first: str = "", served: bool = True) -> Child:
        """Begins `fuyou ARGUMENTS` in a process of its own with nothing to read, after the program `first`. One at a time.
        `served`: it tokenises itself, and starts no worker."""
        assert self.nursery is not None
        words, environment = [*map(str, arguments)], self.environment()
        return self.nursery().begin(words, folder=self.folder, environment=environment, first=SERVED * served + first)

    def fuyou_with_free(self, free: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """The same on a machine whose disks say that `free` bytes are left."""
        first = f"from fuyou_cli.core import disk\ndisk.free_space = lambda path: {free}\n"
        return ended(self.begin(*arguments, first=first))

    def fuyou_doing(self, action: str, step: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """The same in a process that does `action` as soon as `step` is in its log, before it goes on."""
        return ended(self.begin(*arguments, first=doing(action, step)))

    def losses(self) -> dict[int, float]:
        """Returns step -> loss of the log; of a step logged twice the later record."""
        records: list[dict[str, Any]] = read_log(self.out / "log.jsonl")
        return {record["step"]: record["loss"] for record in records if record["event"] == "step"}

    def exported(self) -> dict[str, Any]:
        """Every tensor of the export."""
        from safetensors.torch import load_file

        found: dict[str, Any] = {}
        for file in sorted((self.out / "model").glob("*.safetensors")):
            found |= load_file(file)
        return found


NewProject = Callable[..., Project]


def ended(child: Child, within: float = HANGS) -> subprocess.CompletedProcess[str]:
    """Returns the exit code and what the process wrote; kills it where it takes longer than so many seconds."""
    if not child.is_over(within):
        child.kill()
    end = child.wait()
    return subprocess.CompletedProcess("fuyou", end.code, end.out, end.err)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory, materials: Path) -> Iterator[Callable[[], Nursery]]:
    """Makes the nursery when it is first asked for."""
    folder = tmp_path_factory.mktemp("nursery")
    with ExitStack() as made:
        environment = Project(folder=folder, materials=folder).environment()
        models = [(materials / "model", 2, 24)]  # as recipes here have it
        yield cache(lambda: made.enter_context(Nursery(folder=folder, environment=environment, models=models)))


@pytest.fixture
def new_project(tmp_path: Path, materials: Path, nursery: Callable[[], Nursery]) -> NewProject:
    """Gives new_project(name, {dotted key: value}), which makes a project with its recipe written."""

    def make(name: str = "project", changes: Mapping[str, Any] | None = None) -> Project:
        folder = tmp_path / name
        folder.mkdir()
        project = Project(folder=folder, materials=materials, nursery=nursery)
        project.write_recipe(changes)
        return project

    return make


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Holds what a run left that nobody stopped. Others look at it too: it stays as it is."""

    losses: list[float]
    store: Path


WholeOf = Callable[..., Whole]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, materials: Path) -> WholeOf:
    """Gives whole({dotted key: value}), a run of six steps that nobody stopped, made once for all tests of this process."""
    from .running import STEPS, train  # which speaks of this file's Project

    made: dict[str, Whole] = {}

    def once(changes: Mapping[str, Any] | None = None) -> Whole:
        everything = {"train.max_steps": STEPS, **(changes or {})}
        key = json.dumps(everything, sort_keys=True)
        if key not in made:
            project = Project(folder=tmp_path_factory.mktemp("whole"), materials=materials)
            project.write_recipe(everything)
            losses, store = train(project)
            made[key] = Whole(losses=losses, store=store)
        return made[key]

    return once


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, materials: Path) -> Callable[[str, Callable[[Project], None]], Path]:
    """Gives made_once(name, make), the folder of a project as `make` left it: made once, put back for every test that asks."""
    copies: dict[str, tuple[Path, Path]] = {}

    def put_back(name: str, make: Callable[[Project], None]) -> Path:
        if name not in copies:
            folder = tmp_path_factory.mktemp(name)
            make(Project(folder=folder, materials=materials))
            copies[name] = folder, folder.with_name(f"{folder.name}-kept")
            folder.rename(copies[name][1])
        folder, kept = copies[name]
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder, symlinks=True)
        return folder

    return put_back


@pytest.fixture
def stopped(made_once: Callable[..., Path], materials: Path, nursery: Callable[[], Nursery]) -> Project:
    """Gives a project whose run was stopped in step 3."""
    from .running import STEPS, interrupt, train

    def make(project: Project) -> None:
        project.write_recipe({"train.max_steps": STEPS})
        with pytest.raises(Interrupted):
            train(project, interrupt(3, "forward"))

    return Project(folder=made_once("stopped", make), materials=materials, nursery=nursery)


class Command:
    """Runs commands of `fuyou` in this process; gives the exit code, and what was written."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys = capsys
        monkeypatch.chdir(folder)
        share_models(folder / "kept")
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "kept"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("FUYOU_OFFLOAD_DIR", raising=False)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = self._capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    def machine(self, **drive: object) -> tuple[str, str]:
        """Describes a machine with one small drive; returns the options that name it."""
        drives = [{"model": "small", "capacity": "1TB", **drive}]
        Path("machine.yaml").write_text(yaml.safe_dump({"parts": "1xgen4,64GiB", "drives": drives}))
        return "--hardware", "machine.yaml"

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        found, out, err = self("plan", "recipe.yaml", "--json", *arguments)
        assert found == code, err
        data: dict[str, Any] = json.loads(out)
        return data


CommandIn = Callable[[Project], Command]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandIn:
    """Gives command(project), which runs `fuyou` in its folder."""
    return lambda project: Command(capsys, monkeypatch, project.folder)


@pytest.fixture
def worker() -> None:
    """Has a test read and tokenise in a process of its own, as whoever runs a command does."""


@pytest.fixture(autouse=True)
def served_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and tokenises in this process else, by the worker's own entries: a process takes a second to start."""
    if "worker" not in request.fixturenames:
        monkeypatch.setattr(tokenised, "_serve", served.serve)


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves this process's allocator as it is when a run's command is called in it."""
    for name in ("settle_allocator", "settle_for_training"):
        monkeypatch.setattr(f"fuyou_cli.cli.finetune.{name}", lambda: None)
