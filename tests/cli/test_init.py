"""Tests that `fuyou init` writes a recipe that validates, by options or by questions on a terminal; and that the shell
completes."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from drawn import every

from fuyou_cli.recipe.load import load_recipe

from .conftest import environment


def test_options_ask_nothing(fuyou, tmp_path):
    done = fuyou("init", "--model", "Qwen/Qwen3-0.6B", "--data", "rows.jsonl", "--memory", "16GiB", "--dir", "/mnt/a b")
    assert (done.returncode, done.stdout) == (0, "") and "Next: fuyou plan recipe.yaml" in done.stderr
    assert "rows.jsonl does not exist yet" in done.stderr
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    assert (recipe.model.name_or_path, recipe.dataset.train[0].path) == ("Qwen/Qwen3-0.6B", "rows.jsonl")
    assert (recipe.offload.max_memory.cpu.text, recipe.offload.dir) == ("16GiB", ("/mnt/a b",))
    assert recipe.output_dir == "outputs/Qwen3-0.6B"
    assert fuyou("validate").returncode == 0


@pytest.mark.parametrize(
    "answer", every(3, ["no", "1e5", "12", "a: b", 'quo"te', "# x", "Ünïcode/模型", "..", "{x}", "- a", "~"])
)
def test_any_answer_is_text(fuyou, tmp_path, answer):
    done = fuyou("init", "r.yaml", "--model", answer, "--data", answer)
    assert done.returncode == 0, done.stderr
    recipe = load_recipe(tmp_path / "r.yaml").recipe
    assert recipe.model.name_or_path == recipe.dataset.train[0].path == answer


def test_what_is_wrong_leaves_nothing(fuyou, tmp_path):
    done = fuyou("init", "--model", "a", "--data", "b", "--memory", "much")
    assert done.returncode == 2 and "a size such as 24GiB" in done.stderr and not list(tmp_path.iterdir())
    done = fuyou("init", "--model", "a")
    assert done.returncode == 2 and "no terminal" in done.stderr and not list(tmp_path.iterdir())
    (tmp_path / "recipe.yaml").write_text("mine")
    done = fuyou("init", "--model", "a", "--data", "b")
    assert done.returncode == 2 and "exists" in done.stderr and (tmp_path / "recipe.yaml").read_text() == "mine"


def test_a_terminal_is_asked_three_questions(tmp_path: Path):
    near, far = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fuyou_cli", "init"], cwd=tmp_path, env=environment(), stdin=far, stderr=far, stdout=far
    ) as child:
        os.close(far)
        os.write(near, b"tiny model\nrows.jsonl\n50% /mnt/nvme/fuyou\n")
        said = b""
        try:
            while part := os.read(near, 4096):
                said += part
        except OSError:  # how the other end's closing looks
            pass
    os.close(near)
    assert child.returncode == 0 and said.count(b"?") == 3, said.decode()
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    assert recipe.model.name_or_path == "tiny model"
    assert (recipe.offload.max_memory.cpu.share, recipe.offload.dir) == (0.5, ("/mnt/nvme/fuyou",))


@pytest.mark.parametrize(
    ("words", "position", "expected"),
    every(
        2,
        [
            ("fuyou fine", 1, "finetune"),
            ("fuyou plan quick", 2, "quickstart"),
            ("fuyou recipes show llama31-8b", 3, "llama31-8b-full-24gb"),
            ("fuyou plan recipe.yaml optimizer.l", 3, "optimizer.lr="),
            ("fuyou plan my", 2, "my.yaml"),
        ],
    ),
)
def test_the_shell_completes(fuyou, tmp_path, words, position, expected):
    (tmp_path / "my.yaml").touch()
    done = fuyou(_FUYOU_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(position))
    assert expected in done.stdout.split()


def test_the_shell_is_told_how_to_complete():
    # Typer looks for a shell among the parents of a process, and there is none above a test that a daemon runs.
    command = f"{shlex.quote(sys.executable)} -m fuyou_cli --show-completion; exit $?"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, check=True)
    assert "_FUYOU_COMPLETE=complete_bash" in done.stdout


def test_a_shipped_recipe_as_json(fuyou):
    told = json.loads(fuyou("recipes", "show", "quickstart", "--json").stdout)
    assert told["name"] == "quickstart" and yaml.safe_load(told["text"])["output_dir"]
    assert told["text"].rstrip("\n") == fuyou("recipes", "show", "quickstart").stdout.rstrip("\n")
