"""Tests rows that are made part by part while a run trains: the same rows as all at once, wherever a process stops and goes
on."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuyou_cli.core.errors import DataError, DataSpaceError, UsageError
from fuyou_cli.data import worker
from fuyou_cli.data.cache import RowsRequest
from fuyou_cli.data.rows import Rows
from fuyou_cli.data.stream import Stream, _Worker
from fuyou_cli.data.tokenise import Tokeniser
from fuyou_cli.data.worker import NEXT, Parts
from fuyou_cli.recipe.schema import DatasetEntry, DatasetSection

from .conftest import OPTION_DEFAULTS, Write, section

SMALL = 150  # tokens of a part here
TEXTS = [f"apple {number} of the harbour " * (1 + number % 4) for number in range(400)]
LONG = ["The oven does the rest. " * 8_000, *TEXTS[:150]]  # the first is cut into pieces where that loses nothing


def _rows(rows: Rows) -> list[tuple[list[int], list[int], list[int] | None]]:
    return [(rows.tokens(n).tolist(), rows.mask(n).tolist(), rows.documents(n)) for n in range(len(rows))]


def _file(folder: Path, kind: str, texts: list[str]) -> Path:
    file = folder / f"data.{kind}"
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in texts)  # empty lines do not count
    if kind == "jsonl":
        file.write_text(lines)
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(lines.encode()))
    elif kind == "json":
        file.write_text(json.dumps([{"text": text} for text in texts]))
    elif kind == "txt":
        file.write_text("\n\n".join(texts))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), file)
    return file


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jsonl", {}), ("jsonl.gz", {"max_samples": 333}), ("json", {"overlong": "split", "max_seq_len": 9}), ("txt", {}),
        ("parquet", {}), ("jsonl", {"packing": "concat"}), ("txt", {"packing": "concat"}), ("jsonl", {"packing": "isolated"}),
    ],
)  # fmt: skip
def test_parts_are_the_rows_and_another_process_makes_the_same(
    kind: str,
    options: dict[str, Any],
    tokenise: Callable[..., Rows],
    tokenizer: Any,
    tokenizer_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part by a process that has not made the one before, as after a crash, and by one that has."""
    monkeypatch.setattr(worker, "BATCH_EXAMPLES", 16)  # what is tokenised together is not cut
    cut = options.get("packing") == "concat"
    file = _file(tmp_path, kind, LONG if cut else TEXTS)
    whole = _rows(tokenise(file, **options))
    source = {"files": [str(file)], "format": "auto", "columns": {}, "max_samples": options.pop("max_samples", None)}
    request = {"sources": [source], "mixed": False, "seconds": 60, "part_tokens": SMALL, **OPTION_DEFAULTS, **options}
    tokeniser, going_on = (
        Tokeniser(tokenizer, directory=tokenizer_dir),
        Parts(request, Tokeniser(tokenizer, directory=tokenizer_dir)),
    )
    begin, formats, made = None, {}, list[Any]()
    for number in range(10**6):
        asked = {"entry": 0, "sources": [0], "begin": begin, "formats": formats}
        outs = [tmp_path / f"{name}-{number}" for name in ("on", "fresh")]
        for out, parts in zip(outs, (going_on, Parts(request, tokeniser)), strict=True):
            out.mkdir()
            rows = parts.make({**asked, "out": str(out)})["rows"]
        assert {f.name: f.read_bytes() for f in outs[0].iterdir()} == {f.name: f.read_bytes() for f in outs[1].iterdir()}
        if rows:
            made += _rows(Rows(outs[0]))
        begin, formats = (json.loads((outs[0] / NEXT).read_text())[name] for name in ("begin", "formats"))
        if begin is None:
            break
    assert number > 0
    if options.get("packing"):  # a part ends a row
        assert [token for tokens, _, _ in made for token in tokens if options["packing"] == "concat"] == [
            token for tokens, _, _ in whole for token in tokens if options["packing"] == "concat"
        ]
        assert sum(len(tokens) for tokens, _, _ in made) == sum(len(tokens) for tokens, _, _ in whole)
    else:
        assert made == whole


def stream(dataset: DatasetSection, tokenizer_dir: Path, cache_dir: Path, **options: Any) -> Stream:
    return Stream(
        RowsRequest(dataset=dataset, tokenizer_dir=tokenizer_dir), cache_dir=cache_dir, seed=7, part_tokens=SMALL,
        **{"batch_size": 5, "check": lambda summary: None, "say": lambda text: None, **options},
    )  # fmt: skip


def _batches(made: Stream, steps: range) -> list[list[list[int]]]:
    return [[made.tokens(index).tolist() for index in made.batch(step)] for step in steps]


def test_a_weighted_packed_stream_goes_on_with_the_same_batches(
    write: Write, tokenizer: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """Goes past the end of an entry's data too, and without the parts that an earlier process made."""
    weights = {"a": 3.0, "b": 1.0}
    files = {name: write(f"{name}.jsonl", [{"text": f"{name} {text}"} for text in TEXTS[:40]]) for name in weights}
    train = tuple(DatasetEntry(path=str(files[name]), weight=weight) for name, weight in weights.items())
    dataset = DatasetSection(train=train, max_seq_len=64, num_workers=1, packing="isolated", streaming=True)
    whole = _batches(stream(dataset, tokenizer_dir, tmp_path / "one"), range(60))
    assert _batches(stream(dataset, tokenizer_dir, tmp_path / "one"), range(23, 60)) == whole[23:]
    assert _batches(stream(dataset, tokenizer_dir, tmp_path / "other"), range(31, 33)) == whole[31:33]
    given = np.cumsum([tokenizer.decode(row, skip_special_tokens=True).strip()[0] == "a" for batch in whole for row in batch])
    assert all(abs(count - (n + 1) * 3 / 4) <= 1 for n, count in enumerate(given))


def test_what_was_noted_of_all_entries_is_added(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    files = [write(f"{name}.jsonl", [{"messages": talk}] * many) for name, many in (("one", 2), ("two", 3))]
    train = tuple(DatasetEntry(path=str(file), weight=1.0) for file in files)
    dataset = DatasetSection(train=train, max_seq_len=64, num_workers=1, streaming=True)
    told = asdict(stream(dataset, tokenizer_dir, tmp_path / "cache").summary)
    assert told["noted"] == {"marks": 5, "parts_joined": 5} and told["noted_at"]["marks"] == "one.jsonl:1"


def test_every_row_is_seen_once_in_an_epoch_and_in_another_order_in_the_next(
    write: Write, tokenizer_dir: Path, tmp_path: Path
) -> None:
    files = [write(f"{name}.jsonl", [{"text": f"{name} {text}"} for text in TEXTS[:20]]) for name in "abc"]
    made = stream(section(tmp_path / "*.jsonl", streaming=True), tokenizer_dir, tmp_path / "cache")
    assert len(files) == 3 and made.summary.streamed and made.summary.rows < 60
    epochs = [[row for batch in _batches(made, range(begin, begin + 12)) for row in batch] for begin in (0, 12)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and len({tuple(row) for row in epochs[0]}) == 60
    assert epochs[0] != epochs[1]


def test_a_bad_row_is_named_when_its_part_is_reached(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    file = write("t.jsonl", [{"text": text} for text in TEXTS])
    file.write_text(file.read_text() + "{no json\n")
    made = stream(section(file, streaming=True, shuffle=False), tokenizer_dir, tmp_path / "cache")
    assert len(_batches(made, range(40))) == 40
    with pytest.raises(DataError, match=r"t\.jsonl:401: not valid JSON"):
        made.is_ready(79, lambda: False)


def test_a_part_that_does_not_fit_the_model_is_refused(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    def check(summary: Any) -> None:
        if summary.highest_token_id > 300:
            raise UsageError("too high")

    file = write(
        "t.jsonl", [{"tokens": [5, 6, 7, 8] * 20, "text": ""} for _ in range(300)] + [{"tokens": [399, 5], "text": ""}]
    )
    dataset = section(file, streaming=True, shuffle=False, entry={"format": "tokenized", "columns": {"input_ids": "tokens"}})
    made = stream(dataset, tokenizer_dir, tmp_path / "cache", check=check)
    with pytest.raises(DataError, match="too high"):
        made.is_ready(60, lambda: False)


def test_what_is_damaged_of_a_part_is_refused(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    dataset = section(write("t.jsonl", [{"text": text} for text in TEXTS]), streaming=True)
    stream(dataset, tokenizer_dir, tmp_path).is_ready(70, lambda: False)
    (file,) = tmp_path.glob("*/0-000000/next.json")
    begin = '"source": 0, "file": 0, "pieces": 0, "samples": 0'
    for text in (
        "",
        "{",
        "{}",
        f'{{"begin": {{{begin}, "rows": -3}}, "formats": {{}}}}',
        '{"begin": {"foo": 0}, "formats": {}}',
        '{"begin": {"rows": true}, "formats": {}}',
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=r"tokenised data in .*0-000000 is damaged"):
            stream(dataset, tokenizer_dir, tmp_path)


def test_a_process_that_is_ended_is_replaced_and_a_wait_can_be_given_up(
    write: Write, tokenizer_dir: Path, tmp_path: Path
) -> None:
    dataset = section(write("t.jsonl", [{"text": text} for text in TEXTS]), streaming=True)
    wanted = _batches(stream(dataset, tokenizer_dir, tmp_path / "one"), range(80))
    made = stream(dataset, tokenizer_dir, tmp_path / "other")
    worker = made._entries[0]._worker
    process = worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert not made.is_ready(79, lambda: True)
    process.kill()
    assert _batches(made, range(80)) == wanted and worker._process is not process


STALLED = """
import atexit, pathlib, sys, time
from fuyou_cli.data.stream import _Worker
here = pathlib.Path(sys.argv[1])
sys.executable = str(here / "python")
worker = _Worker({}, here, "", threads=1)
atexit.register(worker.end)
worker.make({}, here / "part")
while not (here / "begun").exists():
    time.sleep(0.01)
"""


def test_the_end_of_a_process_does_not_wait_for_a_part(tmp_path: Path) -> None:
    (python := tmp_path / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 60\n")
    python.chmod(0o700)
    assert subprocess.run([sys.executable, "-c", STALLED, str(tmp_path)], timeout=30).returncode == 0


@pytest.mark.parametrize(("hint", "said"), [(None, "no room for data in .* free: "), ("lower", "^full$")])
def test_a_full_disk_or_memory_of_the_process_that_tokenises(
    hint: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = json.dumps({"error": "full", "hint": hint, "kind": "DataSpaceError"})
    (python := tmp_path / "python").write_text(f"#!/bin/sh\nread a; echo '{reply}'\ncat")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    worker = _Worker({}, tmp_path, "so 1,000 steps up to 1 GB", threads=1)
    with pytest.raises(DataSpaceError, match=said) as full:
        worker.make({}, tmp_path / "rows" / "0-000000").result()
    assert ("5 bytes, so 1,000 steps up to 1 GB" in str(full.value.hint)) == (hint is None) and full.value.exit_code == 4
    worker.end()


def test_a_file_that_changes_within_has_other_parts(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    file = write("t.jsonl", [{"text": text} for text in TEXTS * 160])
    dataset = section(file, streaming=True)
    before = stream(dataset, tokenizer_dir, tmp_path).fingerprint
    content = file.read_bytes()
    assert len(content) > 4 << 20
    file.write_bytes(content.replace(b"harbour", b"HARBOUR"))
    assert stream(dataset, tokenizer_dir, tmp_path).fingerprint != before
