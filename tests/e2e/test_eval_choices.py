"""Tests `fuyou eval --choices`: the choices of transformers with all of the model in memory, by lm-eval-harness's two rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fuyou_cli.core.errors import UsageError
from fuyou_cli.inference.choices import read_questions

from .conftest import PLACES, NewProject

LIMIT = 24  # tokens: the recipe's dataset.max_seq_len
ROWS = [
    {"question": f"The road from the {a} to the", "choices": [*PLACES[:3], f"{a} takes {n} minutes on foot"], "answer": n % 4}
    for n, a in enumerate(PLACES)
]
ROWS += [
    {"prompt": "The mill ", "choices": ["tower", "bridge"], "answer": "B"},
    {"prompt": "minutes on foot. " * 9 + "The", "choices": ["road", "from the harbour"], "answer": "road"},
]


@torch.no_grad()
def in_memory(folder: Path, row: dict[str, object]) -> tuple[int, int]:
    """The choices by log-likelihood, and by log-likelihood per character."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    context, found = str(row.get("question") or row["prompt"]), []
    for choice in row["choices"]:  # type: ignore[attr-defined]
        before = tokenizer(context.rstrip(), add_special_tokens=False).input_ids
        whole = tokenizer(f"{context.rstrip()} {choice}", add_special_tokens=False).input_ids
        ids = torch.tensor(whole[-LIMIT:])
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        each = logits.gather(-1, ids[1:, None]).squeeze(-1)
        found.append(float(each[-(len(whole) - len(before)) :].sum()))
    normalised = [one / len(choice) for one, choice in zip(found, row["choices"], strict=True)]  # type: ignore[call-overload]
    return found.index(max(found)), normalised.index(max(normalised))


def test_as_transformers_in_memory(new_project: NewProject) -> None:
    project = new_project(changes={"precision.compute": "float32"})
    file = project.folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model = project.materials / "model"
    done = project.fuyou("eval", model, project.recipe, "--choices", file, "--json")
    assert done.returncode == 0, done.stderr
    said, right = json.loads(done.stdout)["choices"], [one.answer for one in read_questions(file)]
    assert right[-2:] == [1, 0]
    chosen = [in_memory(model, row) for row in ROWS]
    assert said["questions"] == len(ROWS) and said["cut"] == 2
    assert said["acc"] == sum(one == answer for (one, _), answer in zip(chosen, right, strict=True)) / len(ROWS)
    assert said["acc_norm"] == sum(one == answer for (_, one), answer in zip(chosen, right, strict=True)) / len(ROWS)
    assert len({one for one, _ in chosen}) > 1 and [one for one, _ in chosen] != [one for _, one in chosen]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"choices": ["a", "b"], "answer": 0}, "no text as question or prompt"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "at least two texts"),
        ({"question": "q", "choices": ["a", "b"], "answer": "C"}, "answer must be"),
        ({"question": "q", "choices": ["a", "b"], "answer": True}, "answer must be"),
    ],
)
def test_a_row_that_is_no_question_is_named(row: dict[str, object], said: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=rf"questions\.jsonl:2.*{said}"):
        read_questions(file)
