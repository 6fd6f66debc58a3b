"""Tests `fuyou quickstart` as a person starts it, with a model of a few thousand weights: what it refuses, never writes over,
and shows the second time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hooks import doing

from fuyou_cli.advice.facts import export_folder
from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.units import MiB
from fuyou_cli.quickstart import demonstration, toy
from fuyou_cli.quickstart.demonstration import Ended
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.named import shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "train.batch_size=16", "train.micro_batch_size=auto", "train.threads=auto",
    "lr_scheduler.warmup_steps=null", "lr_scheduler.warmup_ratio=0.4", "offload.max_memory.cpu=90%", "offload.measure=false",
]  # fmt: skip


def _quickstart(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fuyou_cli", "quickstart", *overrides], cwd=folder, env=_environment(folder),
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def _environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FUYOU_")}
    home = str(folder / "people")
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "HOME": home}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("dataset.train[0].path=my.jsonl", "dataset.train"),
        ("dataset.train=[{path: my.jsonl}]", "dataset.train"),
        ("model.name_or_path=mine", "model.name_or_path"),
        ("export.at_end=false", "export.at_end"),
        ("logging.backends=[console]", "logging.backends"),
        ("offload.device=emulated", "offload.device"),
        ("checkpoint.resume=elsewhere", "checkpoint.resume"),
    ],
)
def test_what_it_cannot_show_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, named: str
) -> None:
    """Runs without a process: that a refusal is told and ends with 2, the test of somebody's text shows."""
    (tmp_path / "my.jsonl").write_text("precious\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        demonstration.demonstrate([override], say=print)
    assert refused.value.exit_code == 2
    assert f"`{named}` cannot be changed" in refused.value.message and "recipes cp quickstart" in str(refused.value.hint)
    assert (tmp_path / "my.jsonl").read_text() == "precious\n"
    assert [path.name for path in tmp_path.iterdir()] == ["my.jsonl"]


def test_somebodys_text_in_its_place_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "outputs" / "quickstart" / "train.jsonl"
    text.parent.mkdir(parents=True)
    text.write_text("precious\n")
    done = _quickstart(tmp_path)
    assert done.returncode == 2
    assert "is not the quickstart's text" in done.stderr
    assert text.read_text() == "precious\n" and [path.name for path in text.parent.iterdir()] == ["train.jsonl"]


def test_a_processor_slow_in_bfloat16_computes_in_float32_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "has_fast_bfloat16", lambda: False)
    assert demonstration._for_this_processor(["seed=1"]) == ["seed=1", "precision.compute=float32"]
    assert demonstration._for_this_processor(["precision.compute=bfloat16"]) == ["precision.compute=bfloat16"]
    monkeypatch.setattr(demonstration, "has_fast_bfloat16", lambda: True)
    assert demonstration._for_this_processor(["seed=1"]) == ["seed=1"]


# What is looked at of an earlier log: how much memory its steps took, and how it ended
EARLIER = [{"event": "plan"}, {"event": "step", "step": 1, "loss": 99.0, "ram_peak": 1 << 50}, {"event": "end"}]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """Holds what quickstarts of a small model left below `folder`."""

    folder: Path
    stopped: subprocess.CompletedProcess[str]
    again: subprocess.CompletedProcess[str]  # the same command after that

    @property
    def out(self) -> Path:
        return self.folder / "people" / "here"


def _begun(folder: Path) -> list[str]:
    """Makes a small model where the quickstart would make its own, which is left alone, and the log of an earlier one that
    ended in another folder than usual. Returns the overrides for that folder."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HIDDEN", 32), ("INTERMEDIATE", 64), ("LAYERS", 2), ("HEADS", 4), ("KV_HEADS", 4)):
            patch.setattr(toy, name, value)
        toy.make_model(folder / "outputs" / "quickstart" / "model", seed=1)
    (folder / "people" / "here").mkdir(parents=True)
    (folder / "people" / "here" / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in EARLIER))
    return [*QUICK, "train.max_steps=null", "train.epochs=1", "output_dir=~/here", "export.dtype=float32"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs one that began after an earlier one had ended, was stopped in its second step, and started again went on to its
    end."""
    folder = tmp_path_factory.mktemp("ran")
    overrides = _begun(folder)
    hook = folder / "hook"
    hook.mkdir()
    # As a terminal does: to everyone in the foreground, the run that the quickstart has started among them.
    (hook / "sitecustomize.py").write_text(doing(f"os.killpg(0, {signal.SIGINT:d})", 2))
    environment = _environment(folder)
    stopped = subprocess.run(
        [sys.executable, "-m", "fuyou_cli", "quickstart", *overrides], cwd=folder, stdin=subprocess.DEVNULL,
        env={**environment, "PYTHONPATH": f"{hook}{os.pathsep}{environment['PYTHONPATH']}"},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return Ran(folder=folder, stopped=stopped, again=_quickstart(folder, *overrides))


@pytest.mark.slow
def test_stopped_and_started_again_it_goes_on_in_another_folder(ran: Ran) -> None:
    assert ran.stopped.returncode == 130, ran.stopped.stderr
    assert ran.again.returncode == 0, ran.again.stderr
    assert "resuming after step" in ran.again.stderr and "starting over" not in ran.again.stderr
    assert (
        "in 8 steps" in ran.again.stderr[ran.again.stderr.index("Quickstart  ") :]
    )  # 126 rows: seven times sixteen, and fourteen
    assert f"{ran.out}/model: Auto" in ran.again.stdout
    assert (ran.out / "model" / "config.json").exists()
    assert not (ran.folder / "~").exists()
    assert (ran.folder / "outputs" / "quickstart" / "train.jsonl").read_bytes() == toy.CORPUS.read_bytes()


@pytest.mark.slow
def test_the_second_time_shows_its_own_run(tmp_path: Path) -> None:
    done, out = _quickstart(tmp_path, *_begun(tmp_path)), tmp_path / "people" / "here"
    assert done.returncode == 0, done.stderr
    assert ("computing in float32" in done.stderr) != demonstration.has_fast_bfloat16()
    assert "an earlier quickstart ended" in done.stderr and "starting over" in done.stderr
    shown = done.stderr[done.stderr.index("Quickstart  ") :]
    assert "in 8 steps" in shown  # 126 rows: seven times sixteen, and fourteen
    assert "1048576" not in shown.replace(",", "")  # GiB, the peak of the run before
    compared = re.search(r"equal within (\S+) \(losses of the first 5 steps\)", shown)
    assert compared is None or float(compared[1]) < 1e-2
    assert f"{out}/model: Auto" in done.stdout and (out / "model" / "config.json").exists() and not (tmp_path / "~").exists()
    # What starts over next time is told by the last record that a run writes
    assert demonstration._start_over(out, print) == ["checkpoint.resume=never"]


@pytest.mark.slow
def test_a_child_that_refuses_has_said_why_and_its_code_is_ours(ran: Ran) -> None:
    done = _quickstart(ran.folder, *QUICK, "train.max_steps=3", "offload.max_memory.ssd=1MB")
    assert done.returncode == 3, done.stderr
    assert "offload.max_memory.ssd allows 1 MB" in done.stderr


def test_the_model_it_started_from_is_not_written_over() -> None:
    recipe = load_recipe(shipped_recipes()["quickstart"]).recipe
    assert export_folder(recipe, Path(recipe.model.name_or_path)) == Path("outputs/quickstart/model-finetuned")


def test_a_peak_above_the_budget_is_an_error_where_nothing_held_it() -> None:
    over = demonstration.FinishedRun(plan={"budget": 100 << 20}, losses=(1.0,), peak=101 << 20)
    demonstration._refuse_excess(Ended(code=0, enforced=True), over)
    demonstration._refuse_excess(Ended(code=0, enforced=False), replace(over, peak=100 << 20))
    with pytest.raises(FuyouError, match="101 MiB of memory, but its budget is 100 MiB"):
        demonstration._refuse_excess(Ended(code=0, enforced=False), over)


# ---- what it makes before it trains --------------------------------------------------------------------------------------


ROWS = [json.loads(line) for line in toy.CORPUS.read_text(encoding="utf-8").splitlines()]


def contents(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HIDDEN", 64), ("INTERMEDIATE", 128), ("LAYERS", 2), ("HEADS", 4), ("KV_HEADS", 4)):
        monkeypatch.setattr(toy, name, value)
    monkeypatch.setattr(toy, "SHARD_SIZE", "64KB")


def test_every_fact_is_asked_in_three_ways() -> None:
    """No two islands share a fact, so that an answer is known by heart or wrong."""
    facts = {row["completion"] for row in ROWS}
    assert len({row["prompt"] for row in ROWS}) == len(ROWS) == 3 * len(facts) == 126


@pytest.mark.usefixtures("small")
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        toy.make_model(tmp_path / name, seed=seed)
    first, again, other = (contents(tmp_path / name) for name in "abc")
    assert first == again
    shards = {name for name in first if name.endswith(".safetensors")}
    assert len(shards) > 1
    assert {name for name in first if first[name] != other[name]} == shards
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a", "b", "c"]  # nothing half-made stays


@pytest.mark.usefixtures("small")
def test_a_finished_checkpoint_is_left_alone(tmp_path: Path) -> None:
    toy.make_model(tmp_path / "a", seed=7)
    before = contents(tmp_path / "a")
    toy.make_model(tmp_path / "a", seed=8)
    assert contents(tmp_path / "a") == before


@pytest.mark.usefixtures("small")
def test_transformers_loads_it_with_every_weight(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    toy.make_model(tmp_path / "a", seed=7)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    row = ROWS[0]
    ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
    assert max(ids) < model.config.vocab_size and len(tokenizer) <= model.config.vocab_size
    assert tokenizer.decode(ids) == row["prompt"] + row["completion"]
    loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert loss.item() == pytest.approx(torch.tensor(float(model.config.vocab_size)).log().item(), abs=0.5)


def test_its_training_states_do_not_fit_the_budget() -> None:
    parameters = sum(parameter.numel() for parameter in toy.skeleton(0, 1).parameters())
    assert 1.0 < 16 * parameters / (600 * MiB) < 1.1
