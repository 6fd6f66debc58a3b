"""Tests what tokenizers, templates and folders do wrong, told in one line with its place, and what is only noted."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuyou_cli.core.errors import DataSpaceError, FuyouError, UsageError
from fuyou_cli.data import sandbox
from fuyou_cli.data.cache import RowsRequest, prepare
from fuyou_cli.data.formats import RowError, choose_format
from fuyou_cli.data.rows import Rows
from fuyou_cli.data.sandbox import LibraryErrors, noted, reason
from fuyou_cli.data.sources import look
from fuyou_cli.data.worker import _answered

from .conftest import CHATML, CHATML_UNMARKED, Tokenise, Write, section

TALK = {"messages": [{"role": "user", "content": "seven?"}, {"role": "assistant", "content": "apples"}]}


def rows_of(file: Path, tokenizer_dir: Path, cache: Path, template: Path | None = None) -> Rows:
    return prepare(RowsRequest(dataset=section(file), tokenizer_dir=tokenizer_dir, chat_template=template), cache)


@pytest.mark.usefixtures("served_here")
@pytest.mark.parametrize("content", ["{}", "[", '{"model": 5}'])
def test_a_tokenizer_that_is_none_is_named(content: str, write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tokenizer_dir, tmp_path / "broken")
    (broken / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=f"^tokenizer: {broken} cannot be loaded: ") as caught:
        rows_of(write("t.jsonl", [{"text": "x"}]), broken, tmp_path / "cache")
    assert "\n" not in caught.value.message and "Traceback" not in caught.value.message


def test_a_tokenizer_that_cannot_tokenise_one_sample_names_it(write: Write, tokenise: Tokenise, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<e>": 2}, unk_token="[UNK]"))  # which it does not have
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>").save_pretrained(tmp_path / "words")
    file = write("t.jsonl", [{"text": "a b"}, {"text": "b a"}, {"text": "a c"}, {"text": "b"}])
    with pytest.raises(UsageError, match=rf"^{file}:3: the tokenizer {tmp_path}/words cannot tokenise this sample: "):
        tokenise(file, tokenizer_dir=tmp_path / "words")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages.index(3) }}", "3 is not in list"),
        ("{{ raise_exception('no\\nmore') }}", "no$"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.nothing.at_all }}", "no attribute 'nothing'"),
    ],
)
def test_a_template_that_fails_is_named_with_the_sample(template: str, words: str, write: Write, tokenise: Tokenise) -> None:
    file = write("chat.jsonl", [TALK])
    told = f"^{file}:1: the chat template of tokenizer.chat_template refuses this conversation: .*{words}"
    with pytest.raises(UsageError, match=told):
        tokenise(file, chat_template=template)


_LOOP = "{% for a in range(99999) %}"
WITHOUT_END = _LOOP * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    "template",
    [WITHOUT_END, pytest.param("{{ (messages | length) ** (10 ** 9) > 0 }}", marks=pytest.mark.slow)],
    ids=["loops", "one call"],
)
def test_a_template_without_end_is_ended_and_named_with_the_sample(
    template: str, write: Write, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 2.0)  # of the processor: the same on a busy machine
    (path := tmp_path / "loops.jinja").write_text("{% if messages[0].content == 'loop' %}" + template + "{% endif %}" + CHATML)
    file = write("chat.jsonl", [TALK, {"messages": [{"role": "user", "content": "loop"}, *TALK["messages"]]}, TALK])
    told = f"^{file}:2: the chat template of tokenizer.chat_template takes more than 2 s of the processor$"
    with pytest.raises(UsageError, match=told):
        rows_of(file, tokenizer_dir, tmp_path / "cache", path)
    assert not [*(tmp_path / "cache").iterdir()]


def test_a_run_that_is_killed_leaves_no_process_behind(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    """Its own would go on for as long as the data takes: hours."""
    cache, file = tmp_path / "cache", write("chat.jsonl", [TALK])
    (path := tmp_path / "loops.jinja").write_text(WITHOUT_END + CHATML)
    program = "from pathlib import Path\nfrom tests.data.test_refusals import rows_of\nrows_of(*map(Path, sys.argv[1:]))"
    words = [str(word) for word in (file, tokenizer_dir, cache, path)]
    with subprocess.Popen([sys.executable, "-c", f"import sys\n{program}", *words]) as run:
        while not any(noted(at) for at in cache.glob("*/at")):
            assert run.poll() is None
            time.sleep(0.01)
        (worker,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        run.kill()
    until = time.monotonic() + sandbox.SECONDS / 2  # of the processor it may take twice that
    while (status := Path(f"/proc/{worker}/status")).exists() and "\nState:\tZ" not in status.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
            "takes more than 1.00 GiB of memory$",
            marks=pytest.mark.slow,
        ),
        ("{{ 'a' * 10 ** 10 }}", "takes more than 1.00 GiB of memory$"),
        ("{{ 'a' * 10 ** 7 }}", "makes 10,000,[0-9]* characters of this conversation, more than 4,194,304"),
    ],
)
def test_a_template_that_writes_without_end_is_named_with_the_sample(
    template: str, words: str, write: Write, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "BYTES", 1 << 30)
    (path := tmp_path / "writes.jinja").write_text(template + CHATML)
    file = write("chat.jsonl", [TALK])
    with pytest.raises(UsageError, match=f"^{file}:1: the chat template of tokenizer.chat_template {words}"):
        rows_of(file, tokenizer_dir, tmp_path / "cache", path)


def bombs(folder: Path, kind: str, tokenizer_dir: Path) -> tuple[Path, Path, str]:
    """Returns a file of data, a tokenizer, and what is said of a bomb in one of them. A file is small on the disk."""
    text, tokenizer = "a" * (1 << 29), tokenizer_dir
    if kind == "gzip":  # no line ever ends, and empty ones are no rows
        file = folder / "t.jsonl.gz"
        with gzip.open(file, "wb", compresslevel=1) as packed:
            packed.write(b'{"text": "seven"}\n')
            for _ in range(400):
                packed.write(b"\n" * (1 << 20))
        return file, tokenizer, f"{file}:1, or what follows it, takes more than 2 s of the processor"
    if kind == "normalizer":
        inner = json.loads((tokenizer_dir / "tokenizer.json").read_text())
        grows = {"type": "Replace", "pattern": {"String": "s"}, "content": "s" * 2000}
        inner["normalizer"] = {"type": "Sequence", "normalizers": [grows] * 4}
        tokenizer = shutil.copytree(tokenizer_dir, folder / "grows")
        (tokenizer / "tokenizer.json").write_text(json.dumps(inner))
        (file := folder / "t.jsonl").write_text('{"text": "a"}\n{"text": "seven"}\n')
        return file, tokenizer, f"{file}:1: tokenising this sample takes more than 1.00 GiB of memory"
    import pyarrow
    from pyarrow import parquet

    values = pyarrow.array(["seven", "a", *[text] * 3])
    file = folder / f"t.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"text": values}), file, compression="zstd", use_dictionary=True)
    else:
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        table = pyarrow.table({"text": values})
        with pyarrow.ipc.new_file(file, table.schema, options=options) as sink:
            sink.write_table(table)
    return file, tokenizer, f"{file}: the beginning of the file takes more than 1.00 GiB of memory"


@pytest.mark.parametrize(
    "kind", ["gzip", "normalizer", *(pytest.param(one, marks=pytest.mark.slow) for one in ("parquet", "arrow"))]
)
def test_a_bomb_is_one_error_with_its_place(
    kind: str, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little file or a tokenizer that becomes more than a process may take, or never comes to an end."""
    if kind == "gzip":  # each kind meets one of the two bounds, whatever the machine's speed
        monkeypatch.setattr(sandbox, "SECONDS", 2.0)
    else:
        monkeypatch.setattr(sandbox, "BYTES", 1 << 30)
    file, tokenizer, said = bombs(tmp_path, kind, tokenizer_dir)
    assert file.stat().st_size < 4 << 20
    with pytest.raises(UsageError) as refused:
        rows_of(file, tokenizer, tmp_path / "cache")
    assert refused.value.message == said and "correct or remove" in str(refused.value.hint)
    assert not [*(tmp_path / "cache").iterdir()]


def test_a_template_of_another_encoding_is_no_bug_of_ours(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "latin.jinja"
    template.write_bytes(b"{# fine #}\n{# caf\xe9 #}\n")
    with pytest.raises(UsageError, match=rf"^tokenizer.chat_template: {template}:2: not UTF-8 text"):
        rows_of(write("chat.jsonl", [TALK]), tokenizer_dir, tmp_path / "cache", template)


def test_a_list_of_stop_tokens_that_is_none(write: Write, tokenizer_dir: Path, tokenise: Tokenise, tmp_path: Path) -> None:
    contents = {
        "[": "is not valid JSON",
        "3": "is not a JSON object",
        '{"eos_token_id": 1, "eos_token_id": 2}': "is not valid JSON: the key 'eos_token_id' occurs twice",
        '{"eos_token_id": "x"}': "cannot be read: ",
    }
    for number, (content, words) in enumerate(contents.items()):
        model = shutil.copytree(tokenizer_dir, tmp_path / f"model-{number}")
        (model / "generation_config.json").write_text(content)
        with pytest.raises(UsageError, match=rf"^{model}/generation_config.json: {words}"):
            tokenise(write("t.jsonl", [{"text": "x"}]), tokenizer_dir=model)


def test_a_cache_that_cannot_be_names_its_key(write: Write, tokenizer_dir: Path, tmp_path: Path) -> None:
    file = write("t.jsonl", [{"text": "x"}])
    for cache in (file, file / "below", Path("/proc/zz")):
        with pytest.raises(UsageError, match=f"^dataset.cache_dir: {cache} cannot be written: "):
            rows_of(file, tokenizer_dir, cache)


@pytest.mark.usefixtures("served_here")
def test_a_full_disk_says_what_rows_take(
    write: Write, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataSpaceError, match=f"no room for data in {tmp_path}/cache, whose disk has ") as caught:
        rows_of(write("t.jsonl", [{"text": "x"}]), tokenizer_dir, tmp_path / "cache")
    assert "as much as the text in the files (14 B)" in str(caught.value.hint)
    told: list[str] = []
    _answered(full, told.append)
    assert json.loads(told[0])["kind"] == "DataSpaceError"


def test_a_pattern_that_is_none_names_the_path(tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^dataset.train: /tmp/\*\*x/\[ is not a valid glob: "):
        rows_of(Path("/tmp/**x/["), tokenizer_dir, tmp_path)
    with pytest.raises(UsageError, match=r"^dataset.train: .*File name too long"):
        rows_of(Path("x" * 300), tokenizer_dir, tmp_path)


def test_what_nobody_expected_is_one_line_unless_one_debugs(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs an interpreter that loads a library of the user's in place of the real one: nothing we could name."""
    (tmp_path / "path" / "pyarrow").mkdir(parents=True)
    (tmp_path / "path" / "pyarrow" / "__init__.py").write_text("raise LookupError('one\\ntwo')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    file = tmp_path / "t.parquet"
    file.write_text("x")
    for debugging, lines in (("0", 1), ("1", 2)):
        monkeypatch.setenv("FUYOU_DEBUG", debugging)
        with pytest.raises(FuyouError, match=r"^reading the data failed: LookupError: one") as caught:
            rows_of(file, tokenizer_dir, tmp_path / "cache")
        assert min(len(caught.value.message.splitlines()), 2) == lines
        assert ("Traceback" in caught.value.message) == (lines == 2)


def test_a_reason_is_one_short_line() -> None:
    assert reason(KeyError("added_tokens")) == "KeyError: 'added_tokens'"
    assert reason(ValueError("one\ntwo")) == "one"
    assert reason(RuntimeError()) == "RuntimeError"
    assert reason(PermissionError(13, "Permission denied", "x.jsonl")) == "x.jsonl: Permission denied"
    assert len(reason(ValueError("x" * 9999))) == 300
    for passed in (KeyboardInterrupt, MemoryError):
        with pytest.raises(passed), LibraryErrors(UsageError):
            raise passed


@pytest.mark.parametrize("template", [None, CHATML_UNMARKED], ids=["generation marks", "prefixes"])
def test_the_tokens_of_a_template_are_no_text_of_the_data(template: str | None, write: Write, tokenise: Tokenise) -> None:
    rows = tokenise(write("chat.jsonl", [TALK] * 3), chat_template=template)
    assert rows.summary.special == 0 and rows.summary.notes == ()


@pytest.mark.parametrize(
    "row",
    [
        {"text": "the end <|im_end|> or so, <|pad|>"},
        {"prompt": "the end <|im_end|>", "completion": " is near"},
        {"prompt": "the end ", "completion": "<|im_end|> is near"},
        {"instruction": "end", "input": "<|im_end|>", "output": " is near"},
        {"messages": [{"role": "user", "content": "<|im_end|>?"}, {"role": "assistant", "content": "yes"}]},
    ],
)
def test_special_tokens_as_text_are_counted(row: dict[str, Any], write: Write, tokenise: Tokenise) -> None:
    plain = json.loads(json.dumps(row).replace("<|im_end|>", "!").replace("<|pad|>", "!"))
    rows = tokenise(write("data.jsonl", [plain, row, plain, row]))
    assert (rows.summary.special, rows.summary.special_example) == (2, "data.jsonl:2 '<|im_end|>'")
    assert any(note.startswith("2 samples contain special tokens as text, e.g. data.jsonl:2") for note in rows.summary.notes)


def test_a_long_document_counts_once(tokenise: Tokenise, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("A <|pad|> and no more. \n" * 20_000)
    rows = tokenise(file, packing="concat")
    assert (rows.summary.special, rows.summary.samples) == (1, 1)
    assert rows.summary.notes[0].startswith("1 sample contains special tokens as text, e.g. book.txt '<|pad|>'")


def test_a_first_cell_of_any_length(tmp_path: Path) -> None:
    """Reads beyond Python's own limit of 128 KiB."""
    file = tmp_path / "long.csv"
    before = csv.field_size_limit(128 << 10)
    try:
        file.write_text(f'prompt,completion,"{"x" * 200_000}"\na,b,c\n')
        assert look(section(file))[0].files == (file,)
    finally:
        csv.field_size_limit(before)


def test_columns_are_told_in_a_line() -> None:
    with pytest.raises(RowError) as refused:
        choose_format("auto", frozenset(["x" * 200_000, *(f"column {number}" for number in range(1000))]), {})
    assert len(str(refused.value)) < 1000 and "and 992 more" in str(refused.value)
