"""Tests that files of every kind give the same rows; a broken one gives one error with its place."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data import reading, worker
from fuyou_cli.data.formats import RowError, read_example
from fuyou_cli.data.reading import PIECE_CHARS, pieces_of, read_document, read_rows
from fuyou_cli.data.sources import find_sources, locate

from .conftest import Tokenise, Write, section

PAIRS = [
    {"prompt": "How many?", "completion": "1.10"},  # a number, a date and "NA" to a reader that guesses types
    {"prompt": 'a "quoted",\nlong one', "completion": "2024-01-01 00:00:00"},
    {"prompt": "漢字\u2028🙂", "completion": "NA"},
]


def written(folder: Path, kind: str) -> Path:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    file = folder / f"data.{kind}"
    table = pa.Table.from_pylist(PAIRS)
    if kind == "jsonl":
        file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in PAIRS), encoding="utf-8-sig")
    elif kind == "json":
        file.write_text(json.dumps(PAIRS, indent=2), encoding="utf-8")
    elif kind == "csv":
        with file.open("w", encoding="utf-8", newline="") as stream:
            records = csv.DictWriter(stream, PAIRS[0])
            records.writeheader()
            records.writerows(PAIRS)
    elif kind == "parquet":
        write_table(table, file)
    else:
        kept = pa.ipc.new_stream if kind == "stream.arrow" else pa.ipc.new_file
        with kept(str(file), table.schema) as batches:
            batches.write_table(table)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "stream.arrow", "file.arrow"])
def test_every_kind_of_file_gives_the_same_text(tmp_path: Path, kind: str) -> None:
    assert [row for _, row in read_rows(written(tmp_path, kind))] == PAIRS


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_packed_files_give_the_same_text(tmp_path: Path, kind: str, packing: str) -> None:
    plain = written(tmp_path, kind)
    packed = pack(plain, packing)
    assert [row for _, row in read_rows(packed)] == PAIRS
    assert [place.replace(f".{packing}", "") for place, _ in read_rows(packed)] == [place for place, _ in read_rows(plain)]


def pack(plain: Path, packing: str) -> Path:
    """Compresses a file in two members, as `cat a.gz b.gz` makes, where that may be."""
    import pyarrow as pa

    content, file = plain.read_bytes(), plain.with_name(f"{plain.name}.{packing}")
    ways = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    compress = ways.get(packing, lambda part: pa.compress(part, codec="zstd", asbytes=True))
    file.write_bytes(b"".join(compress(part) for part in (content[:7], content[7:])))
    return file


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz", "zst"])
def test_a_damaged_packed_file_is_one_error(tmp_path: Path, packing: str) -> None:
    file = pack(written(tmp_path, "jsonl"), packing)
    whole = file.read_bytes()
    for content in (whole[:-9], whole[:20] + b"\xff" * 20 + whole[40:], b"no such thing"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=rf"data.jsonl.{packing}: not valid {packing}: ") as caught:
            list(read_rows(file))
        assert "\n" not in caught.value.message


def test_a_packed_file_is_never_held_whole(tmp_path: Path) -> None:
    """Reads forty MiB of rows in a few KiB: no more than a row and some buffers are in memory."""
    row = json.dumps({"text": "x" * 9000}).encode() + b"\n"
    file = tmp_path / "rows.jsonl.gz"
    with gzip.open(file, "wb") as stream:
        for _ in range(4500):
            stream.write(row)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(file)) == 4500
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert file.stat().st_size < 1 << 20 and peak < 4 << 20


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    """Splits are its folders, and what describes them has no rows."""
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        written(folder, "stream.arrow").rename(folder / "data-00000-of-00001.arrow")
        for name in ("state.json", "dataset_info.json"):
            (folder / name).write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    found, skipped = locate(str(tmp_path / "saved"), "train")
    assert [file.parent.name for file in found] == ["train"] and [file.parent.name for file in skipped] == ["test"]
    with pytest.raises(UsageError, match="no files of split validation"):
        locate(str(tmp_path / "saved"), "validation")


def test_what_datasets_left_beside_a_set_is_no_part_of_it(tmp_path: Path, tokenise: Tokenise, tokenizer: Any) -> None:
    """Files of later calls are in the library's own folder: with the rows of a `map`, and with the indices of a `shuffle`."""
    import datasets

    folder = tmp_path / "saved"
    datasets.Dataset.from_list([{"text": f"row {number}"} for number in range(6)]).save_to_disk(folder)
    saved = datasets.load_from_disk(folder)
    saved.map(lambda row: {"text": row["text"] + "!"})
    saved.shuffle(seed=1)
    beside = sorted(folder.glob("cache-*.arrow"))
    assert len(beside) == 2
    source = find_sources(section(folder))[0]
    assert [file.name for file in source.files] == ["data-00000-of-00001.arrow"] and list(source.skipped) == beside
    assert "1 file taken (data-00000-of-00001.arrow), 2 skipped, left by `datasets` beside the set (cache-" in str(
        source.choice
    )
    assert locate(f"{folder}/*.arrow", "train") == (source.files, source.skipped)
    assert locate(str(beside[0]), "train") == ((beside[0],), ())  # asked for by its name
    rows = tokenise(*source.files)
    texts = [tokenizer.decode(rows.tokens(index).tolist()) for index in range(6)]
    assert len(rows) == 6 and texts == [f"<|bos|>row {number}<|im_end|>" for number in range(6)]

    (folder / "state.json").unlink()  # as in the library's cache of a set of the hub
    assert find_sources(section(folder))[0].files == source.files
    (folder / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}')
    with pytest.raises(UsageError, match=f"{folder}: the set is saved as a selection of rows"):
        find_sources(section(folder))


def test_a_column_that_python_has_no_type_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no reason to refuse a file, at any depth, until somebody uses it. (pandas would have types for some.)"""
    import sys

    import pyarrow as pa
    from pyarrow.parquet import write_table

    monkeypatch.setitem(sys.modules, "pandas", None)
    times = {
        "nanoseconds": pa.array([1, 1 << 60], pa.timestamp("ns")),
        "duration": pa.array([1, None], pa.duration("ns")),
        "far": pa.array([1 << 60, 0], pa.timestamp("us")),
        "day": pa.array([1 << 30, 0], pa.date32()),
        "zone": pa.array([1, 2], pa.timestamp("us", tz="America/Nowhere")),
        "time": pa.array([1, 2], pa.time64("ns")),
        "pairs": pa.array([[("a", 1), ("a", 2)], None], pa.map_(pa.string(), pa.int64())),
    }
    field = pa.struct([("role", pa.string()), ("content", pa.string()), ("at", pa.timestamp("ns"))])
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "at": 1}]
    messages = pa.array([talk, None], pa.list_(field))
    for name, column in times.items():
        file = tmp_path / f"{name}.parquet"
        write_table(pa.table({"text": ["one", "two"], name: column, "messages": messages}), file)
        first, second = [row for _, row in read_rows(file)]
        assert (first["text"], second["text"], second["messages"]) == ("one", "two", None), name
        assert [(turn["role"], turn["content"]) for turn in first["messages"]] == [("user", "a"), ("assistant", "b")]
        with pytest.raises(UsageError, match=rf"row 1: the column {name} is of type \w+; text must be text"):
            for place, row in read_rows(file):
                try:
                    read_example(row, "text", {"text": name})
                except RowError as error:
                    raise UsageError(f"{place}: {error}") from error


def test_places_are_lines(tmp_path: Path) -> None:
    places = [place.rsplit("/", 1)[1] for place, _ in read_rows(written(tmp_path, "csv"))]
    assert places == ["data.csv:2", "data.csv:3", "data.csv:5"]
    places = [place.rsplit("/", 1)[1] for place, _ in read_rows(written(tmp_path, "jsonl"))]
    assert places == ["data.jsonl:1", "data.jsonl:3", "data.jsonl:5"]


GOOD = '{"prompt": "a", "completion": "b"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GOOD + '{"prompt": "a", "completion": "b"\n' + GOOD, r":2: not valid JSON: .* \(column"),
        (GOOD + "\n" + '["a", "b"]\n', ":3: not a JSON object but list"),
        (GOOD + '{"prompt": "a", "completion": 3}\n', ":2: the column completion is of type int"),
        (GOOD + '{"prompt": "a"}\n', ":2: the column completion is missing"),
        (GOOD + '{"prompt": null, "completion": "b"}\n', ":2: the column prompt is null"),
        (GOOD.encode() + b'{"prompt": "\xff", "completion": "b"}\n', ":2: not UTF-8 text"),
        ('{"messages": [{"role": "user"}]}\n', ":1: message 1 of messages has no content"),
        ('{"messages": [{"from": "bing", "value": "x"}]}\n', ":1: message 1 of messages is from 'bing'; known are human, user"),
        ('{"conversations": [{"from": "gpt"}]}\n', ":1: message 1 of conversations has no content"),
        ('{"conversations": [{"from": ["gpt"], "value": "x"}]}\n', ":1: message 1 of conversations is from"),
        ('{"messages": [{"role": "user", "content": "x", "train": true}]}\n', ":1: .* only the assistant's carry loss"),
        ('{"messages": [{"role": "assistant", "content": "x", "train": "no"}]}\n', ":1: .* it must be true or false"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "{"}\n', ":1: the column tools: not valid JSON"),
        ('{"segments": [{"text": "a"}]}\n', ":1: segment 1 of segments must have a text and a label"),
        ('{"segments": "a"}\n', ":1: the column segments must be a list of segments"),
        ('{"input_ids": [1, 2, 999999]}\n', ":1: token 3 is 999999, outside the vocabulary of .* another tokenizer"),
        ('{"input_ids": [1, -1]}\n', ":1: token 2 is -1, outside the vocabulary"),
        ('{"input_ids": [1, 2.5]}\n', ":1: the column input_ids must be a list of whole numbers"),
        ('{"input_ids": [true, 2]}\n', ":1: the column input_ids must be a list of whole numbers"),
        ('{"input_ids": [1, 2], "labels": [1]}\n', ":1: the column labels has 1 numbers for 2 tokens"),
        ('{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}\n', ":1: label 1 is 2, but its token is 1: .*shifts labels later"),
        ('{"question": "a", "answer": "b"}\n', ":1: no format fits"),
        ("", "the file is empty"),
        (GOOD + '{"prompt": "hello \\ud83d half", "completion": "b"}\n', r":2: not valid JSON: \\ud83d is half of a character"),
        (GOOD + '{"prompt": "a", "completion": ' + "[" * 99999 + "]" * 99999 + "}\n", ":2: .* nested too deeply"),
        (GOOD + '{"prompt": "a", "completion": ' + "1" * 5000 + "}\n", ":2: not valid JSON: a number has 5,000 digits"),
        (GOOD + '{"prompt": "a", "completion": ' + "[" * 70 + "]" * 70 + "}\n", ":2: not valid JSON: nested too deeply"),
        (GOOD + '{"prompt": "a", "completion": "b", "prompt": "c"}\n', ":2: not valid JSON: the key 'prompt' occurs twice"),
    ],
)
def test_a_broken_row_is_one_error_with_its_place(tmp_path: Path, tokenise: Tokenise, content: str | bytes, words: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=words) as caught:
        tokenise(file)
    assert str(file) in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"text": "a"}, \n{"text": "\\uDE42"}]', ":2: .*half of a character"),
        ('[{"text": "a"},\n\n{"text": ' + "[" * 99999, ":3: .* nested too deeply"),
        ('[{"text": ' + "1" * 5000 + "}]", ":1: .*a number has 5,000 digits"),
        ('[{"text": "a"}\n {"text": "b"}]', r":2: not valid JSON: Expecting .* \(column 2\)"),
        ('[{"text": "a"}, 7]', ":1: not a JSON object but int"),
        ('[{"text": "a"}]\n{"text": "b"}', ":2: not valid JSON: Extra data"),
        ('[{"text": "a"},\n{"text": "b', ":2: not valid JSON: Unterminated string"),
        ('[{"text": "a"},\n', ":2: not valid JSON: Expecting value"),
        (b'[{"text": "a"},\n{"text": "\xff"}]', ":2: not UTF-8 text"),
    ],
)
def test_a_broken_array_is_one_error_with_its_place(tmp_path: Path, content: str | bytes, words: str) -> None:
    file = tmp_path / "rows.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=words) as caught:
        list(read_rows(file))
    assert str(file) in caught.value.message and "\n" not in caught.value.message


def test_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "\\ud83d\\ude42 and \\\\ud83d"}\n')
    assert [row for _, row in read_rows(file)] == [{"text": "🙂 and \\ud83d"}]


def test_an_array_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts the file at every place by parts of every small size: the rows and their lines stay the same."""
    rows = [{"text": "x" * number, "list": [number, -1.5e-3, None, True, {"é🙂": '\\ " \n'}]} for number in range(9)]
    file = tmp_path / "rows.json"
    file.write_text("\n [ " + " ,\n".join(json.dumps(row) for row in rows) + "\n ]\n", encoding="utf-8-sig")
    for size in (1, 2, 3, 7, 64, 4096):
        monkeypatch.setattr(reading, "_CHUNK", size)
        assert list(read_rows(file)) == [(f"{file}:{number + 2}", row) for number, row in enumerate(rows)]
    monkeypatch.setattr(reading, "LARGEST_ROW", 60)
    monkeypatch.setattr(reading, "_CHUNK", 16)
    with pytest.raises(UsageError, match=r"rows.json:5: a row has more than 60 characters"):
        list(read_rows(file))
    for text, expected in (("[]", []), ("[ ]\n", []), ('[{"a": 1}]', [{"a": 1}])):
        file.write_text(text)
        assert [row for _, row in read_rows(file)] == expected


def test_other_broken_files(tmp_path: Path, tokenise: Tokenise) -> None:
    for name, content, words in [
        ("a.json", '{\n "prompt": "a"\n}', ":1: an object spans several lines"),
        ("b.json", '[{"prompt": "a", "completion": "b"},\n{"prompt"]', ":2: not valid JSON"),
        ("c.csv", "prompt,completion\na,b\nc\n", ":3: 1 cells, but the header has 2"),
        ("f.csv", 'prompt,completion\na,b\n"c\nd,e\n', "f.csv:3: a quoted cell has no closing quote"),
        ("g.csv", "prompt,prompt\na,b\n", "g.csv:1: a column name occurs twice"),
        ("h.csv", b"prompt,completion\na,b\n\xff,b\n", "h.csv:3: not UTF-8 text"),
        ("i.arrow", "no arrow", "i.arrow: not valid arrow"),
        ("j.txt", b"one\n\xff\n", "j.txt:2: not UTF-8 text"),
        ("k.parquet", "", "k.parquet: the file is empty"),
        ("d.parquet", "no parquet", "not valid parquet"),
        ("e.csv", "prompt,completion\0\na,b\n", "e.csv"),
    ]:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UsageError, match=words):
            tokenise(file)


def test_a_text_file_is_one_document_when_packed(tmp_path: Path, tokenise: Tokenise, tokenizer: Any) -> None:
    lines = [f"Line {number}: the ferry leaves at nine.\n" + "\n" * (number % 3 == 0) for number in range(4000)]
    file = tmp_path / "book.txt"
    file.write_text("".join(lines))
    pieces = list(read_document(file))
    assert "".join(text for text, _, _ in pieces) == "".join(lines) and len(pieces) > 2
    assert all(text.endswith("\n") and len(text) < PIECE_CHARS + 100 for text, _, _ in pieces)
    rows = tokenise(file, packing="concat", max_seq_len=512)
    stream = [token for index in range(len(rows)) for token in rows.tokens(index).tolist()]
    assert stream == tokenizer("".join(lines))["input_ids"] + [tokenizer.eos_token_id]
    assert (rows.summary.samples, rows.summary.split) == (1, 1)


def test_long_rows_of_text_are_cut_into_pieces_when_packed(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    """Cuts rows with line breaks, with spaces only, and with neither: nothing is lost, and a piece is no longer than it may
    be."""
    lines = "The ferry leaves at nine.\n\nNot so.\n" * 9000
    for text in (lines, "The ferry leaves at nine. " * 9000, "x" * 4 * PIECE_CHARS, "short", ""):
        pieces = list(pieces_of([text]))
        assert "".join(piece for piece, _, _ in pieces) == text
        assert max(len(piece) for piece, _, _ in pieces) < 3 * PIECE_CHARS
        assert [(begins, ends) for _, begins, ends in pieces] == [
            (number == 0, number == len(pieces) - 1) for number in range(len(pieces))
        ]
        assert (len(pieces) > 1) == (len(text) > 2 * PIECE_CHARS)
    rows = tokenise(write("t.jsonl", [{"text": lines}, {"text": "Noon."}]), packing="concat", max_seq_len=512)
    stream = [token for index in range(len(rows)) for token in rows.tokens(index).tolist()]
    expected = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in (lines, "Noon.")]
    assert stream == expected[0] + expected[1]
    assert (rows.summary.samples, rows.summary.split) == (2, 1)


def test_a_row_has_a_largest_size(write: Write, tokenise: Tokenise, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads no more of a line than is allowed, however long it is."""
    monkeypatch.setattr(reading, "LARGEST_ROW", 1000)
    file = write("t.jsonl", [{"text": "a" * 900}, {"text": "b" * 1000}])
    with pytest.raises(UsageError, match=rf"^{file}:2: a row has more than 1,000 characters$") as caught:
        tokenise(file)
    assert caught.value.hint is not None and "cut it into several rows" in caught.value.hint
    assert [place for place, _ in read_rows(write("u.jsonl", [{"text": "a" * 987}]))] == [f"{file.with_name('u.jsonl')}:1"]


def test_records_and_paragraphs_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses them also where every line is short; a document is cut and may have any size."""
    monkeypatch.setattr(reading, "LARGEST_ROW", 100)
    lines = "some words\n" * 20
    for name, content, place in (("a.csv", f'text\nx\n"{lines}"\n', "a.csv:3"), ("a.txt", lines, "a.txt: paragraph 1")):
        (tmp_path / name).write_text(content)
        with pytest.raises(UsageError, match=f"{place}: a row has more than 100 characters"):
            list(read_rows(tmp_path / name))
    assert "".join(text for text, _, _ in read_document(tmp_path / "a.txt")) == lines


def test_a_sample_that_cannot_be_cut_has_a_largest_size(
    write: Write, tokenise: Tokenise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LARGEST_SAMPLE", 1000)
    message = {"role": "user", "content": [{"type": "text", "text": "a" * 999}]}
    for row in ({"text": "a" * 1001}, {"prompt": "a" * 900, "completion": "b" * 101}, {"messages": [message]}):
        with pytest.raises(UsageError, match=r"rows.jsonl:1: the sample has 1,0\d\d characters, more than 1,000"):
            tokenise(write("rows.jsonl", [row]))
    assert tokenise(write("rows.jsonl", [{"text": "a" * 1001}]), packing="concat").summary.samples == 1


def test_paragraphs_of_a_text_file_otherwise(tmp_path: Path, tokenise: Tokenise, tokenizer: Any) -> None:
    file = tmp_path / "book.txt"
    file.write_text("First one,\ntwo lines.\n\n\n\nSecond.\n\nThird.")
    rows = tokenise(file, max_samples=2)
    texts = [tokenizer.decode(rows.tokens(index).tolist()) for index in range(len(rows))]
    assert texts == ["<|bos|>First one,\ntwo lines.<|im_end|>", "<|bos|>Second.<|im_end|>"]


def test_max_samples_counts_over_the_files_of_a_source(tmp_path: Path, tokenise: Tokenise) -> None:
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text(GOOD * 300)
    assert tokenise(*files, max_samples=500).summary.samples == 500
    assert tokenise(*files).summary.samples == 900


def test_files_directories_and_globs(tmp_path: Path) -> None:
    for name in ("a/train-1.jsonl", "a/train-0.jsonl", "a/test.jsonl", "b/x.json", "b/y.txt", "b/.hidden.json", "b/R.md"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")

    def names(path: str, split: str = "train") -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in locate(str(tmp_path / path), split)[0]]

    assert names("a") == ["a/train-0.jsonl", "a/train-1.jsonl"]
    assert names("a", "test") == ["a/test.jsonl"]
    assert names("b") == ["b/x.json", "b/y.txt"]
    assert names("*/*.json*") == ["a/test.jsonl", "a/train-0.jsonl", "a/train-1.jsonl", "b/.hidden.json", "b/x.json"]
    assert names("a/test.jsonl") == ["a/test.jsonl"]
    for path, words in (("c", "no data files"), ("b/R.md", "unknown file suffix .md"), ("*.csv", "no data files")):
        with pytest.raises(UsageError, match=words):
            names(path)
    with pytest.raises(UsageError, match=r"dataset\.train: ~no-such-user/x.jsonl: "):
        locate("~no-such-user/x.jsonl", "train")
    with pytest.raises(UsageError, match="no files of split validation") as caught:
        names("a", "validation")
    assert "test, train" in (caught.value.hint or "")


def test_which_files_of_a_directory_were_taken_is_said(tmp_path: Path) -> None:
    for name in ("a_train.jsonl", "extra.jsonl", "test_x.jsonl", "train_sft-0.jsonl"):
        (tmp_path / name).write_text("{}")

    def choice(split: str, path: Path = tmp_path) -> str | None:
        return find_sources(section(path, entry={"split": split}))[0].choice

    assert choice("train") == (
        f"{tmp_path}: 2 files taken (a_train.jsonl, train_sft-0.jsonl), "
        "2 skipped, not of split train (extra.jsonl, test_x.jsonl)"
    )
    assert (choice("train_sft") or "").startswith(f"{tmp_path}: 1 file taken (train_sft-0.jsonl), 3 skipped")
    assert choice("train", tmp_path / "extra.jsonl") is None
    assert choice("train", tmp_path / "*.jsonl") == (
        f"{tmp_path}/*.jsonl: 4 files taken (a_train.jsonl, extra.jsonl, test_x.jsonl, train_sft-0.jsonl)"
    )
    with pytest.raises(UsageError, match="no files of split train_gen"):
        choice("train_gen")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "txt"])
@pytest.mark.parametrize("name", ["a[1]", "s*", "which?", "[x]* y"])
def test_a_name_is_no_pattern(tmp_path: Path, kind: str, name: str) -> None:
    """Takes neither the file's name nor its folder's for a pattern, with files that it would fit beside it."""
    (tmp_path / name).mkdir()
    if kind == "txt":
        file, other = tmp_path / name / f"{name}.txt", "another"
        file.write_text("this one")
        expected: list[Any] = [{"text": "this one"}]
    else:
        file, other = tmp_path / name / f"{name}.{kind}", "{}"
        written(tmp_path, kind).rename(file)
        expected = PAIRS
    for decoy in ("a1", "sx", "which1", "x y"):
        (file.parent / decoy).with_suffix(file.suffix).write_text(other)
    assert [row for _, row in read_rows(file)] == expected
