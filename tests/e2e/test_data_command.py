"""Tests `fuyou data`: transcripts of what it prints, and the same rows as a run trains on."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.cli.app import main
from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.tokenise import load_tokenizer
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.schema import reference
from fuyou_cli.training.length import tokenised_rows

from .conftest import PLACES, NewProject, Project, copy_tokenizer
from .running import prepared_run

Printed = Callable[..., str]

TRUNCATED = """
Data
  read       8 samples of rows.jsonl (prompt_completion)
  rows       7 (a sample each), on average 24 tokens
  tokens     171, trained 48 (28%)
  truncated  1 sample longer than max_seq_len 40: 74 tokens lost
  left out   1 row in which nothing is trained
  steps      4 of 2 rows, typically 49 tokens: 1.14 epochs
  padding    16% of what a step computes, rows end to end; 20% with a model that
             cannot keep rows apart
  note: 7 rows, batches of 2: 4 steps are 1.14 epochs, but train.epochs is 1
  (use a smaller train.batch_size to come closer)

Tokens of a sample  the longest has 114, before anything is cut
   17 - 32  ██████████████████████████████  7  88%
   33 - 64                                  0   0%
  65 - 128  ████▍                           1  12%  > 40

Row 1  25 tokens, 7 trained
    From the harbour to the harbour, please: 0 km.<|end|>
                                            ▔▔▔▔▔▔▔▔▔▔▔▔▔
  ▔▔▔ under text: trained; the rest is context only
"""

ISOLATED = """
Data
  read     8 samples of rows.jsonl (prompt_completion)
  rows     4 (packing: isolated), on average 43 tokens
  tokens   171, trained 48 (28%)
  dropped  1 sample longer than max_seq_len 64: 114 tokens lost
  steps    2 of 2 rows, typically 85 tokens: 1 epoch
  padding  20% of what a step computes

Tokens of a sample  the longest has 114, before anything is cut
   17 - 32  ##############################  7  88%
   33 - 64                                  0   0%
  65 - 128  #####                           1  12%  > 64

Row 1  49 tokens, 14 trained, 2 documents that do not see each other
  document 1
    From the harbour to the harbour, please: 0 km.<|end|>
                                            ^^^^^^^^^^^^^
  document 2
    From the harbour to the mill, please: 1 km.<|end|>
                                         ^^^^^^^^^^^^^
  ^^^ under text: trained; the rest is context only
"""


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Printed:
    """Returns what a command prints to a pipe of 80 columns."""

    def run(*words: str | Path, code: int = 0, encoding: str = "utf-8") -> str:
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        assert ended.value.code == code
        out.flush()
        return out.buffer.getvalue().decode()  # type: ignore[attr-defined]

    return run


@pytest.fixture
def asked(new_project: NewProject, materials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Makes a folder of a tokenizer alone, and short samples but for one whose answer is cut off."""
    copy_tokenizer(materials, tmp_path)
    monkeypatch.chdir(tmp_path)
    prompts = [f"From the harbour to the {place}, please:" for place in PLACES]
    prompts[3] *= 6
    rows = [{"prompt": prompt, "completion": f" {number} km."} for number, prompt in enumerate(prompts)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "model.name_or_path": str(tmp_path), "dataset.train": [{"path": "rows.jsonl"}], "dataset.max_seq_len": 40,
        "dataset.shuffle": False, "dataset.cache_dir": str(tmp_path / "rows"), "train.batch_size": 2, "train.max_steps": None,
        "train.epochs": 1,
    }  # fmt: skip
    return new_project(changes=changes)


def test_what_is_cut_and_left_out(asked: Project, printed: Printed) -> None:
    """Runs in a folder that is gone, from a folder without a model."""
    assert printed("data", asked.recipe, "-n", "1") == TRUNCATED
    assert not Path("rows").exists() and not asked.out.exists()


def test_documents_that_share_a_row_in_ascii(asked: Project, printed: Printed) -> None:
    changes = ["dataset.packing=isolated", "dataset.max_seq_len=64", "dataset.overlong=drop"]
    text = printed("data", asked.recipe, *changes, "-n", "1", encoding="ascii")
    assert text == ISOLATED
    assert max(map(len, text.splitlines())) <= 80


def test_which_files_were_read_and_how_masks_were_found(asked: Project, printed: Printed) -> None:
    """Beside the notes, which say of how many samples each is true."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    for folder, file in (("set", "data.jsonl"), ("set", "test.jsonl"), ("eval", "more.jsonl")):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, file).write_text((json.dumps({"messages": talk}) + "\n") * 2)
    each = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    Path("chat.jinja").write_text(each + "{% if add_generation_prompt %}assistant:{% endif %}")
    changes = ["dataset.train=[{path: set, split: test}]", "dataset.eval=[{path: eval}]", "tokenizer.chat_template=chat.jinja"]
    text = " ".join(printed("data", asked.recipe, *changes).split())
    assert "files set: 1 file taken (test.jsonl), 1 skipped, not of split test (data.jsonl)" in text
    assert "files eval: 1 file taken (more.jsonl)" in text
    assert "masks of 2 samples by comparing what the chat template makes of prefixes" in text
    assert "note: in 2 of 2 samples content in parts is joined to one text" in text and "the first is test.jsonl:1" in text
    found = json.loads(printed("data", asked.recipe, *changes, "--json"))
    assert found["files"] == [
        {"path": "set", "files": ["set/test.jsonl"], "skipped": ["set/data.jsonl"]},
        {"path": "eval", "files": ["eval/more.jsonl"], "skipped": []},
    ]
    assert found["noted"] == {"parts_joined": 2, "prefixes": 2}


def test_where_texts_are_cut_and_that_sets_to_evaluate_are_not_packed(asked: Project, printed: Printed) -> None:
    """As the rows are: two paragraphs to train on, or one document; each to evaluate is a row of its own."""
    for name in ("book.txt", "kept.txt"):
        Path(name).write_text("The harbour is near.\n\nThe mill is far.\n")
    changes = ["dataset.train=[{path: book.txt}]", "dataset.eval=[{path: kept.txt}]"]
    paragraphs = "is cut at blank lines: each paragraph is a sample"
    apart = json.loads(printed("data", asked.recipe, *changes, "--json"))
    assert apart["samples"] == apart["eval"]["kept"]["rows"] == 2
    assert apart["notes"][-2:] == [f"book.txt {paragraphs}", f"kept.txt {paragraphs}"]
    packed = json.loads(printed("data", asked.recipe, *changes, "dataset.packing=concat", "--json"))
    assert (packed["samples"], packed["rows"], packed["eval"]["kept"]["rows"]) == (1, 1, 2)
    alone = "dataset.packing=concat is for rows to train on: each sample to evaluate is a row of its own"
    assert packed["notes"][-3:] == ["book.txt is one document", f"kept.txt {paragraphs}", alone]
    assert f"note: {alone}" in " ".join(printed("data", asked.recipe, *changes, "dataset.packing=concat").split())
    line = next(line for line in reference().splitlines() if line.startswith("| `packing`"))
    assert "a sample to evaluate is a row of its own" in line and "A .txt file is cut at blank lines" in reference()


def test_no_paragraph_that_is_held_back_is_trained_on(asked: Project, printed: Printed) -> None:
    """Not even where rows are cut from whole documents."""
    texts = [f"The harbour is {number} km away." for number in range(16)]
    for name, some in (("one.txt", texts[:8]), ("two.txt", texts[8:])):
        Path(name).write_text("\n\n".join(some) + "\n")
    changes = ["dataset.train=[{path: one.txt}, {path: two.txt}]", "dataset.packing=concat", "dataset.eval_fraction=0.25"]
    found = json.loads(printed("data", asked.recipe, *changes, "-n", "99", "--json"))
    assert found["samples"] == 12 and found["eval"]["held-back"]["rows"] == 4
    shown = "".join(piece["text"] for row in found["shown"] for document in row["documents"] for piece in document)
    assert sum(text in shown for text in texts) == 12
    assert found["notes"][-3:-1] == [f"{name}.txt is cut at blank lines: each paragraph is a sample" for name in ("one", "two")]


@pytest.mark.usefixtures("worker")
def test_the_rows_of_a_run(new_project: NewProject, printed: Printed) -> None:
    """Finds the rows where the run has put them, in its order, with its labels; also those it holds back."""
    changes = {"dataset.packing": "concat", "dataset.eval_fraction": 0.1, "train.batch_size": 3, "train.micro_batch_size": 1}
    project = new_project(changes=changes)
    ready = prepared_run(project)
    found = json.loads(printed("data", project.recipe, "-n", "4", "--json"))
    rows, kept = ready.rows, ("rows", "tokens", "label_tokens", "samples", "split", "longest_row")
    assert {name: found[name] for name in kept} == {name: getattr(rows.summary, name) for name in kept}
    assert found["schema_version"] == 1 and found["steps"] == 6 and sum(found["lengths"]) == found["samples"]
    assert found["eval"]["held-back"]["rows"] == len(ready.evaluated["held-back"])
    order = [*ready.sampler.batch(0), *ready.sampler.batch(1)][:4]
    tokenizer = load_tokenizer(project.materials / "model", chat_template=None, pad_token=None)
    assert [row["row"] for row in found["shown"]] == order
    for row, shown in zip(order, found["shown"], strict=True):
        pieces = [piece for document in shown["documents"] for piece in document]
        assert "".join(piece["text"] for piece in pieces) == tokenizer.decode(rows.tokens(row).tolist())
        assert shown["label_tokens"] == int(rows.mask(row)[1:].sum()) and shown["tokens"] == len(rows.tokens(row))


def test_mistakes_are_those_of_a_run(asked: Project, printed: Printed, capfd: pytest.CaptureFixture[str]) -> None:
    assert printed("data", asked.recipe, "dataset.train[0].columns={prompt: ask}", code=2) == ""
    told = capfd.readouterr().err
    with pytest.raises(UsageError) as refused:
        tokenised_rows(load_recipe(asked.recipe, ["dataset.train[0].columns={prompt: ask}"]).recipe, Path())
    assert refused.value.message in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is told that /proc could be written")
def test_a_folder_in_which_nothing_can_be_made_names_its_key(asked: Project, printed: Printed, capfd: Any) -> None:
    printed("data", asked.recipe, "dataset.cache_dir=null", "output_dir=/proc/out", code=2)
    assert "error: output_dir: /proc cannot be written: No such file" in " ".join(capfd.readouterr().err.split())
