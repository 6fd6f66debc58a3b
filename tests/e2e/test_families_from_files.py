"""Families as files of transformers, in the ways of the table of models: two steps and evaluations beside plain PyTorch, of
rows shorter and longer than every length that the configuration names.

What is right for a micro-batch is what a freshly loaded model gives for it, padded to its own longest row. Here a micro-batch
is one row. All families, in an hour: `pytest -m slow tests/e2e/test_families_from_files.py`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models_table
import pytest
import torch
from drawn import every
from torch.nn.functional import cross_entropy

from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.length import learning_rate

from .conftest import NewProject, Project
from .test_evaluation import evaluated

WORDS, END = models_table.VOCABULARY, 1
LENGTHS = (5, 37, 12, 17, 23)  # tokens; beside windows of 8, other positions from 16 on, and 32 positions in all
STEPS = 2
ROWS = [line.strip("| ").split(" | ") for line in models_table.TABLE.read_text().splitlines() if line.startswith("| `")]
TABLE = {row[0].strip("`"): row for row in ROWS}
TRAINED = [name for name, row in TABLE.items() if row[2] in ("yes", "some")]
QUICK = [
    ("llama", "rope longrope"), ("llama", "rope dynamic"), ("phi3", "rope longrope"), ("gemma3_text", "rope longrope"),
    ("qwen2", "a window"), ("doge", "usual"), ("nemotron_h", "no experts"), ("lfm2", "every kind of layer"),
    ("granitemoehybrid", "no experts"), ("jamba", "no experts"), ("gptj", "usual"), ("inkling_text", "no experts"),
    ("qwen3_moe", "usual"), ("mixtral", "usual"), ("deepseek_v3", "usual"), ("granitemoe", "usual"),
]  # fmt: skip
# Their gradients are so large that float32 gives them to 3e-4 and 3e-5, in transformers as here: float64 says how far losses
# may be apart.
ROUGH = ("minicpm3", "youtu")
Row = list[int]


def write_rows(folder: Path, longest: int) -> list[Row]:
    """Writes rows as text, and a tokenizer that has a token for each word. Returns their tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *(f"w{number}" for number in range(2, WORDS))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w2"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")
    tokenizer.save_pretrained(folder / "words")
    draw = torch.Generator().manual_seed(5)
    rows = [torch.randint(2, WORDS - 1, (n - 1,), generator=draw).tolist() for n in LENGTHS if n <= longest]
    texts = [{"text": " ".join(words[token] for token in row)} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return [[*row, END] for row in rows]


def keys(folder: Path, rows: int, longest: int) -> dict[str, Any]:
    data = {"path": str(folder / "rows.jsonl"), "format": "text"}
    words = str(folder / "words")
    return {
        "model.name_or_path": str(folder), "dataset.train": [data], "dataset.eval": [{**data}], "dataset.max_seq_len": longest,
        "tokenizer.name_or_path": words, "dataset.packing": False,
        "precision.compute": "float32", "train.max_steps": STEPS, "train.batch_size": rows,
        "train.micro_batch_size": 1, "eval": {"every_steps": STEPS},
        "optimizer.eps": 1e-3,  # with the usual one, the last bits of a gradient near zero decide which way a weight goes
    }  # fmt: skip


def in_memory(project: Project, folder: Path, rows: list[Row], *, dtype: torch.dtype = torch.float32) -> list[float]:
    """Returns the losses of both steps, and those of the evaluations before and after them. Every row goes through a model
    that has seen no other."""
    recipe = load_recipe(project.recipe).recipe
    config = models_table.load_config(folder)
    untouched = models_table.auto_class(config).from_pretrained(folder, dtype=dtype)
    parameters = dict(untouched.named_parameters())
    groups = [{"params": [p for p in parameters.values() if (p.dim() >= 2) == matrix]} for matrix in (True, False)]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = recipe.optimizer.weight_decay, 0.0
    adamw = torch.optim.AdamW(groups, betas=recipe.optimizer.betas, eps=recipe.optimizer.eps)
    rates, counting = learning_rate(recipe, STEPS), sum(len(row) - 1 for row in rows)

    def losses(*, training: bool) -> Iterator[torch.Tensor]:
        for row in rows:
            fresh = copy.deepcopy(untouched).train(training)
            for name, parameter in parameters.items():
                holder, _, own = name.rpartition(".")
                fresh.get_submodule(holder)._parameters[own] = parameter
            fresh.tie_weights()
            ids = torch.tensor([row])
            logits = fresh(input_ids=ids, use_cache=False).logits[0, :-1]
            yield cross_entropy(logits.to(dtype), ids[0, 1:], reduction="sum") / counting

    def judged() -> float:
        with torch.no_grad():
            return float(sum(losses(training=False)))

    found, before = [], judged()
    for step in range(1, STEPS + 1):
        total = 0.0
        for loss in losses(training=True):
            loss.backward()
            total += float(loss.detach())
        found.append(total)
        torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.train.clip_grad_norm)
        for group in adamw.param_groups:
            group["lr"] = rates.at(step)
        adamw.step()
        adamw.zero_grad()
    return [*found, before, judged()]


def runs(folder: Path) -> bool:
    """Tells whether transformers itself computes the model: Gemma 4 with other rotary types it does not."""
    model = models_table.auto_class(models_table.load_config(folder)).from_pretrained(folder)
    try:
        model(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False)
    except RuntimeError:
        return False
    return True


def compare(name: str, label: str, new_project: NewProject, folder: Path) -> None:
    config = models_table.made(name, models_table.variants(name)[label])
    longest = max(LENGTHS)
    models_table.write(config, folder)
    rows = write_rows(folder, longest)
    project = new_project(f"{name} {label}".replace(" ", "-"), keys(folder, len(rows), longest))
    try:
        losses, reports = evaluated(project)
    except UsageError as error:
        table = getattr(config, "max_seq_len", None)  # of MPT
        if "positions of" not in error.message and table is None:
            if not runs(folder):
                return
            raise
        longest = table or config.max_position_embeddings  # looked up in a table
        rows = write_rows(folder, longest)
        project = new_project(f"{name} {label} short".replace(" ", "-"), keys(folder, len(rows), longest))
        losses, reports = evaluated(project)
    expected, found = in_memory(project, folder, rows), [*losses, *(report.loss for report in reports)]
    bound = 1e-6
    if found != pytest.approx(expected, rel=bound) and name in ROUGH:
        exact = in_memory(project, folder, rows, dtype=torch.float64)
        bound = 3 * max(abs(one - other) / one for one, other in zip(expected, exact, strict=True))
    assert found == pytest.approx(expected, rel=bound), (name, label)


@pytest.mark.parametrize(("name", "label"), every(4, QUICK))
def test_as_in_memory(name: str, label: str, new_project: NewProject, tmp_path: Path) -> None:
    compare(name, label, new_project, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_way_as_in_memory(name: str, new_project: NewProject, tmp_path: Path) -> None:
    """Leaves out the ways that the table says are refused, and those that transformers itself does not compute."""
    if name not in models_table.names():
        pytest.skip("this transformers does not have it")
    refused = TABLE[name][4] if len(TABLE[name]) > 4 else ""
    for label in models_table.variants(name):
        if label in refused or not models_table.exists(name, label):
            continue
        if models_table.computes(models_table.made(name, models_table.variants(name)[label])):
            compare(name, label, new_project, tmp_path / label)
