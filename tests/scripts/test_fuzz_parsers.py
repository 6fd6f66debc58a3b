"""scripts/fuzz_parsers.py: the inputs it kept are taken or refused still, it finds what is neither, and repeats itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import fuzz_parsers
import pytest
from proof import fuzz as fuzzing
from proof.fuzz import LARGEST_KEPT, MOST_KEPT, Crashed, TooSlow, fuzz, mutated, outcome, shape
from proof.parsers import HEAVY, LIGHT, Parser

from fuyou_cli.core.errors import FuyouError, UsageError

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
RUNS = 300  # of all parsers, what was kept among them


def test_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads as many changed inputs of each as make up the rest; the parsers that need torch are in tests/hostile."""
    monkeypatch.chdir(tmp_path)
    tallies = {
        parser.name: fuzz(parser, folder=tmp_path / parser.name, runs=RUNS // len(LIGHT) + 1, seed=1, corpus=CORPUS, keep=False)
        for parser in LIGHT
    }
    assert sum(tally.runs for tally in tallies.values()) >= RUNS
    assert sum(len(tally.outcomes) for tally in tallies.values()) > 5 * len(LIGHT)
    assert {path.name for path in tmp_path.iterdir()} == {parser.name for parser in LIGHT}


def test_the_corpus_is_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert 50 < len(files) <= 200 and max(path.stat().st_size for path in files) <= LARGEST_KEPT
    assert {path.parent.name for path in files} <= {parser.name for parser in (*LIGHT, *HEAVY)}
    assert MOST_KEPT * len((*LIGHT, *HEAVY)) <= 230


def _reads(folder: Path) -> object:
    text = (folder / "input").read_bytes()
    if text.startswith(b"bug"):
        raise KeyError("nobody caught this")
    if text.startswith(b"exit"):
        raise FuyouError("another exit code")
    if text.startswith(b"leave"):
        (folder / "left").touch()
    if text.startswith(b"for ever"):
        while True:
            pass
    if not text.startswith(b"seed"):
        raise UsageError(f"{folder}: line {len(text)}: {text[:4]!r} is wrong")
    return text


def _parser(*seeds: bytes) -> Parser:
    return Parser(name="small", file="input", read=_reads, seeds=lambda: list(seeds))


def test_the_same_seed_makes_the_same_inputs(tmp_path: Path) -> None:
    parser = next(parser for parser in LIGHT if parser.name == "manifest")
    assert [mutated(parser.seeds()[0], random.Random(seed)) for seed in range(50)] == [
        mutated(parser.seeds()[0], random.Random(seed)) for seed in range(50)
    ]
    first, second = tmp_path / "first", tmp_path / "second"
    for corpus in (first, second):
        fuzz(parser, folder=tmp_path / "scratch", runs=60, seed=3, corpus=corpus, keep=True)
    kept = [{path.name for path in (corpus / parser.name).iterdir()} for corpus in (first, second)]
    assert kept[0] == kept[1] and 1 < len(kept[0]) <= MOST_KEPT


def test_what_comes_to_the_same_is_kept_once(tmp_path: Path) -> None:
    tally = fuzz(_parser(b"seed"), folder=tmp_path / "scratch", runs=200, seed=0, corpus=tmp_path / "corpus", keep=True)
    assert tally.outcomes == {"taken", "/x: line 0: b'x' is wrong"} and tally.kept == 1
    assert len(list((tmp_path / "corpus" / "small").iterdir())) == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"bug", "KeyError: 'nobody caught this'"),
        (b"exit", "exit code 1: another exit code"),
        (b"leave", "it left \\['left'\\] behind"),
        (b"for ever", "more than 0 s"),
    ],
)
def test_the_first_crash_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, words: str) -> None:
    monkeypatch.setattr(fuzzing, "PATIENCE", 0.05)
    with pytest.raises(Crashed, match=words):
        fuzz(_parser(b"seed", data), folder=tmp_path / "scratch", runs=2, seed=0, corpus=tmp_path, keep=True)
    found = list(fuzz_parsers.rows([_parser(b"seed", data)], runs=2, seed=0, corpus=tmp_path / "corpus"))
    (saved,) = (tmp_path / "corpus" / "small").iterdir()
    assert saved.read_bytes() == data and [row.verdict for row in found] == ["FAIL"] and str(saved) in found[0].note


def test_no_parser_catches_the_end_of_patience() -> None:
    assert not issubclass(TooSlow, Exception)


def test_a_shape_is_the_error_without_the_input(tmp_path: Path) -> None:
    parser = _parser()
    assert outcome(parser, _laid(parser, tmp_path), b"abc") == outcome(parser, tmp_path, b"defgh")
    assert shape("a.b: 'x' is 12 of 1,024, /tmp/y: \"z\"") == shape("a.b: 'other' is -7 of 0.5e3, /var/y/z: \"\"")
    assert shape("a: missing") != shape("b: missing") and shape("\x00é: unknown key") == shape("other: unknown key")


def _laid(parser: Parser, folder: Path) -> Path:
    parser.lay_out(folder)
    return folder


def test_the_command_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--runs", "40", "--seed", "5", "--corpus", str(tmp_path / "corpus"), "--results", str(tmp_path)]
    assert fuzz_parsers.main([*words, "--parsers", "part", "header"]) == 0
    record = json.loads((tmp_path / "fuzz_parsers-5.json").read_text())
    assert [(row["what"], row["measured"].split(",")[0]) for row in record["rows"]] == [
        ("part", "20 runs"), ("header", "20 runs"), ("executions without a crash", "40"),
    ]  # fmt: skip
    assert record["rows"][-1]["verdict"] == "pass" and "executions without a crash" in capsys.readouterr().out
