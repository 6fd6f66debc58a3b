"""Tests `prepare` end to end through the worker's process, and batches made of its rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from drawn import every, examples
from hypothesis import given
from hypothesis import strategies as some

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data import cache
from fuyou_cli.data.batches import Sampler, collate
from fuyou_cli.data.cache import RowsRequest, prepare
from fuyou_cli.data.rows import NO_LOSS, Rows
from fuyou_cli.recipe.schema import DatasetSection

from .conftest import Write, section


def prepared(dataset: DatasetSection, tokenizer_dir: Path, cache_dir: Path) -> Rows:
    return prepare(RowsRequest(dataset=dataset, tokenizer_dir=tokenizer_dir), cache_dir)


@pytest.mark.usefixtures("served_here")
def test_rows_are_made_once_and_found_by_content(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    file = write("qa.jsonl", [{"prompt": f"{n} apples, less one?", "completion": f"{n - 1} apples"} for n in range(9)])
    store = tmp_path / "store"
    rows = prepared(section(file), tokenizer_dir, store)
    assert len(rows) == rows.summary.samples == 9
    assert sorted(item.name for item in store.iterdir()) == [rows.fingerprint]
    made = (rows.directory / "tokens.bin").stat().st_mtime_ns

    os.utime(file)  # touched or moved, but the same
    moved = file.rename(tmp_path / "moved.jsonl")
    again = prepared(section(moved), tokenizer_dir, store)
    assert again.fingerprint == rows.fingerprint
    assert (rows.summary.formats[0][0], again.summary.formats[0][0]) == (str(file), str(moved))  # not where it was once
    assert (again.directory / "tokens.bin").stat().st_mtime_ns == made

    moved.write_text(moved.read_text().replace("7 apples", "8 apples"))
    changed = prepared(section(moved), tokenizer_dir, store)
    longer = prepared(section(moved, max_seq_len=65), tokenizer_dir, store)
    assert len({rows.fingerprint, changed.fingerprint, longer.fingerprint}) == 3


def test_long_data_are_told_meanwhile(
    write: Write, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_TOLD_AFTER", 0.1)
    told: list[str] = []
    asked = RowsRequest(dataset=section(write("t.jsonl", [{"text": "seven apples"}])), tokenizer_dir=tokenizer_dir)
    rows = prepare(asked, tmp_path / "slow", say=told.append)
    said = [line for line in told if line.startswith("still reading and tokenising: ")]
    assert said == told and 2 <= len(said) < 20  # a worker takes a second to begin, and is told less and less often
    assert int(said[-1].split()[4].replace(",", "")) <= rows.summary.tokens

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    others = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        prepare(asked, tmp_path / "interrupted", say=interrupt)
    assert psutil.Process().children() == others and not list((tmp_path / "interrupted").iterdir())


@pytest.mark.usefixtures("served_here")
def test_a_run_that_writes_below_its_model_finds_its_rows_again(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tokenizer_dir, tmp_path / "model")
    dataset = section(write("t.jsonl", [{"text": "seven apples"}]))
    rows = prepared(dataset, model, model / "out" / "data")
    (model / "out" / "summary.json").write_text("{}")
    assert prepared(dataset, model, model / "out" / "data").fingerprint == rows.fingerprint
    (model / "generation_config.json").write_text('{"eos_token_id": 2}')  # names stop tokens
    changed = prepared(dataset, model, model / "out" / "data")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    assert len({rows.fingerprint, changed.fingerprint, prepared(dataset, model, model / "out").fingerprint}) == 3


@pytest.mark.usefixtures("served_here")
def test_damage_is_noticed(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    dataset = section(write("t.jsonl", [{"text": "seven apples"}]))
    rows = prepared(dataset, tokenizer_dir, tmp_path / "store")
    with (rows.directory / "mask.bin").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(UsageError, match="damaged"):
        prepared(dataset, tokenizer_dir, tmp_path / "store")


def test_errors_cross_the_process_with_their_words(tokenizer_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n')
    with pytest.raises(UsageError, match=r"qa.jsonl:1: no format fits") as caught:
        prepared(section(file), tokenizer_dir, tmp_path / "store")
    assert "columns: {prompt: question, completion: answer}" in (caught.value.hint or "")
    assert list((tmp_path / "store").iterdir()) == []  # nothing half-made stays


def test_a_folder_of_the_user_does_not_stand_in_for_the_library(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokenizers.py").write_text("raise SystemExit('the wrong tokenizers')")
    Path("t.txt").write_text("x y z")
    assert len(prepared(section(tmp_path / "t.txt"), tokenizer_dir, tmp_path)) == 1


def test_text_needs_no_library_of_tables(
    write: Write, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "without").mkdir()
    for name in ("datasets", "pyarrow", "pandas"):
        (tmp_path / "without" / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "without"))
    (tmp_path / "t.csv").write_text("text\nx y z\n")
    file = write("t.jsonl", [{"text": "x y z"}])
    assert len(prepared(section(file, tmp_path / "t.csv"), tokenizer_dir, tmp_path)) == 2


def test_missing_data_is_refused_at_once(tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no data files at no/such/data"):
        prepared(section("no/such/data"), tokenizer_dir, tmp_path / "store")


@pytest.mark.parametrize("packing", every(2, ["concat", False]))
@pytest.mark.slow
def test_the_workers_memory_does_not_grow_with_the_data(
    packing: str | bool, peak_of_hardly_any: int, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """The peak of a process of its own over rows of 100 kB, beside its peak over hardly any. Tokenised 256 at a time these
    rows take several hundred megabytes; the allowance is for one batch."""
    text = "A baker needs flour, water, salt and time; the oven does the rest. " * 1500
    peak = peak_of_worker(_request(tmp_path / "long", [{"text": text}] * 60, tokenizer_dir, packing))
    assert peak - peak_of_hardly_any < 120 << 20, (peak_of_hardly_any, peak)
    assert peak_of_hardly_any < 150 << 20  # with torch imported it takes 330 MiB


@pytest.fixture(scope="module")
def peak_of_hardly_any(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    return peak_of_worker(_request(tmp_path_factory.mktemp("short"), [{"text": "short"}], tokenizer_dir, False))


def _request(folder: Path, rows: list[dict[str, Any]], tokenizer_dir: Path, packing: str | bool) -> dict[str, Any]:
    (folder / "rows").mkdir(parents=True)
    (folder / "data.json").write_text(json.dumps(rows))
    source = {"files": [str(folder / "data.json")], "format": "auto", "columns": {}, "max_samples": None}
    return {
        "sources": [source], "tokenizer_dir": str(tokenizer_dir), "out": str(folder / "rows"), "chat_template": None,
        "pad_token": None, "seconds": 60, "bytes": 4 << 30, "max_seq_len": 512, "overlong": "truncate", "packing": packing,
        "loss_on": "auto", "mixed": False,
    }  # fmt: skip


# Between the tests and the worker: a child begins with the peak of the process that starts it, and that of the tests is large.
WATCH = """import resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "fuyou_cli.data.worker"]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)"""


def peak_of_worker(request: dict[str, Any]) -> int:
    """Returns the most bytes of RAM that the worker had."""
    done = subprocess.run(
        [sys.executable, "-c", WATCH], input=json.dumps(request).encode(), env=os.environ | {"RAYON_NUM_THREADS": "2"},
        capture_output=True, check=True,
    )  # fmt: skip
    reply, end = json.JSONDecoder().raw_decode(done.stdout.decode())
    assert reply == {"ok": True}
    return int(done.stdout[end:]) * 1024


def test_the_trainer_side_imports_no_heavy_library() -> None:
    heavy = "('torch', 'pyarrow', 'transformers', 'tokenizers')"
    check = f"import sys, fuyou_cli.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def rows_on_disk(directory: Path, samples: list[tuple[list[int], list[int]]]) -> Rows:
    """Makes rows of known content as the worker would leave them."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    lengths = [len(tokens) for tokens, _ in samples]
    (directory / "tokens.bin").write_bytes(b"".join(np.array(tokens, np.int32).tobytes() for tokens, _ in samples))
    (directory / "mask.bin").write_bytes(b"".join(np.array(mask, np.uint8).tobytes() for _, mask in samples))
    np.save(directory / "offsets.npy", np.cumsum([0, *lengths]).astype(np.int64))
    zeros = ["label_tokens", "samples", "truncated", "dropped", "split", "without_loss", "run_together"]
    zeros += ["highest_token_id", "pad_id", "special", "special_example", "digest", "never_stops"]
    summary = {"rows": len(samples), "tokens": sum(lengths), "longest_row": max(lengths), "formats": [], "preview": []}
    (directory / "summary.json").write_text(json.dumps(summary | dict.fromkeys(zeros, 0)))
    return Rows(directory)


row = some.integers(2, 30).flatmap(
    lambda n: some.tuples(
        some.lists(some.integers(0, 99), min_size=n, max_size=n), some.lists(some.integers(0, 1), min_size=n, max_size=n)
    )
)


@examples(share_fixtures=True)
@given(samples=some.lists(row, min_size=1, max_size=6), multiple=some.sampled_from([1, 8]))
def test_a_batch_gives_its_rows_back(tmp_path: Path, samples: list[tuple[list[int], list[int]]], multiple: int) -> None:
    rows = rows_on_disk(tmp_path / "rows", samples)
    indices = list(range(len(samples)))[::-1]
    batch = collate(rows, indices, pad_id=7, multiple=multiple, max_len=32)
    longest = max(len(tokens) for tokens, _ in samples)
    assert batch.input_ids.dtype == batch.labels.dtype == np.int64
    assert batch.input_ids.shape == batch.labels.shape == (len(samples), -(-longest // multiple) * multiple)
    labels = 0
    for number, index in enumerate(indices):
        tokens, mask = samples[index]
        assert batch.input_ids[number].tolist() == tokens + [7] * (batch.input_ids.shape[1] - len(tokens))
        expected = [token if kept else NO_LOSS for token, kept in zip(tokens, mask, strict=True)]
        assert batch.labels[number].tolist() == expected + [NO_LOSS] * (batch.labels.shape[1] - len(tokens))
        labels += sum(mask[1:])
    assert (batch.tokens, batch.label_tokens) == (sum(len(tokens) for tokens, _ in samples), labels)


def test_padding_stops_at_max_len(tmp_path: Path) -> None:
    rows = rows_on_disk(tmp_path / "rows", [([1] * 13, [1] * 13), ([2] * 3, [0] * 3)])
    assert collate(rows, [0, 1], pad_id=0, max_len=13).input_ids.shape == (2, 13)
    assert collate(rows, [1], pad_id=0, max_len=13).input_ids.shape == (1, 8)
    with pytest.raises(ValueError, match="13 tokens does not fit max_len 12"):
        collate(rows, [0], pad_id=0, max_len=12)
    with pytest.raises(IndexError):
        rows.tokens(2)


def test_labels_count_as_the_shifted_loss_counts_them(tmp_path: Path) -> None:
    import torch

    rows = rows_on_disk(tmp_path / "rows", [([1, 2, 3, 4], [1, 0, 1, 1]), ([5, 6], [1, 1])])
    ids, labels = collate(rows, [0, 1], pad_id=0, max_len=8).tensors()
    logits = torch.zeros(*ids.shape, 10)
    total = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 10), labels[:, 1:].reshape(-1), ignore_index=NO_LOSS, reduction="sum"
    )
    assert total.item() / np.log(10) == pytest.approx(collate(rows, [0, 1], pad_id=0, max_len=8).label_tokens)


@pytest.mark.skipif("FUYOU_TEST_DATA" not in os.environ, reason="FUYOU_TEST_DATA does not name the data folder")
def test_real_questions_and_answers(tokenizer_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    """The packed stream decodes to the file's text, every answer carrying loss, and one epoch visits all of it. (No
    question fills a row, so none is left out for want of labels.)"""
    folder = Path(os.environ["FUYOU_TEST_DATA"], "gsm8k")
    columns = {"prompt": "question", "completion": "answer"}
    dataset = section(folder, entry={"columns": columns}, packing="concat", max_seq_len=1024)
    rows = prepared(dataset, tokenizer_dir, tmp_path)
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert rows.summary.samples == len(lines)
    tokens = np.concatenate([rows.tokens(index) for index in range(len(rows))])
    mask = np.concatenate([rows.mask(index) for index in range(len(rows))])
    expected = "".join(f"<|bos|>{line['question']}{line['answer']}<|im_end|>" for line in lines)
    assert tokenizer.decode(tokens.tolist()).split("<|im_end|>") == expected.split("<|im_end|>")
    learnt = tokenizer.decode(tokens[mask == 1].tolist())
    assert learnt == "".join(f"{line['answer']}<|im_end|>" for line in lines)
    sampler = Sampler(len(rows), batch_size=16, shuffle=True, seed=42)
    batches = [collate(rows, sampler.batch(step), pad_id=rows.summary.pad_id, max_len=1024) for step in range(sampler.steps(1))]
    assert sum(batch.label_tokens for batch in batches) >= rows.summary.label_tokens


@pytest.mark.usefixtures("served_here")
def test_another_library_makes_the_same_rows_the_same_data(
    write: Write, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes on with a saved run after an upgrade that changes no token; one that changes some is another run."""
    file = write("text.jsonl", [{"text": f"{n} apples"} for n in range(9)])
    dataset = section(file)
    rows = prepared(dataset, tokenizer_dir, tmp_path / "store")
    monkeypatch.setattr("fuyou_cli.data.cache.version", lambda name: "99.9")
    again = prepared(dataset, tokenizer_dir, tmp_path / "store")
    assert again.fingerprint != rows.fingerprint and again.summary.digest == rows.summary.digest
    other = write("other.jsonl", [{"text": f"{n} pears"} for n in range(9)])
    changed = prepared(section(other), tokenizer_dir, tmp_path / "store")
    assert changed.summary.digest != rows.summary.digest
