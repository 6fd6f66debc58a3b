"""Tests real files of every kind, changed at random: each is taken, or refused with one error and exit code 2; nothing is
written."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from proof.fuzz import corpus_of, mutated, outcome
from proof.parsers import HEAVY, LIGHT, Parser

CORPUS = Path(__file__).resolve().parents[1] / "corpus"


@cache
def seeds_of(parser: Parser) -> list[bytes]:
    return parser.seeds()


def laid_out(parser: Parser, tmp_path: Path) -> Path:
    folder = tmp_path / parser.name
    parser.lay_out(folder)
    return folder


def change_and_read(parser: Parser, tmp_path: Path, rng: random.Random) -> None:
    """Reads one changed file in the folder `tmp_path`, where nothing is left."""
    folder, seeds = laid_out(parser, tmp_path), seeds_of(parser)
    outcome(parser, folder, mutated(rng.choice(seeds), rng, seeds))
    assert {path.name for path in folder.iterdir()} == {*parser.beside, parser.file}
    assert [path.name for path in tmp_path.iterdir()] == [parser.name]


@pytest.mark.parametrize("parser", (*LIGHT, *HEAVY), ids=lambda parser: parser.name)
def test_what_is_changed_is_taken_unchanged(parser: Parser, tmp_path: Path) -> None:
    """Takes it unchanged: else no change of it would get past its first mistake."""
    assert {outcome(parser, laid_out(parser, tmp_path), data) for data in seeds_of(parser)} == {"taken"}


@pytest.mark.parametrize("parser", LIGHT, ids=lambda parser: parser.name)
@examples(60, share_fixtures=True)
@given(rng=st.randoms(use_true_random=False))
def test_changed(parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    monkeypatch.chdir(tmp_path)
    change_and_read(parser, tmp_path, rng)


@pytest.mark.parametrize("parser", HEAVY, ids=lambda parser: parser.name)
@examples(20, share_fixtures=True)
@given(rng=st.randoms(use_true_random=False))
def test_changed_for_libraries(parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """What transformers reads: configurations, tokenizers."""
    monkeypatch.chdir(tmp_path)
    change_and_read(parser, tmp_path, rng)


@pytest.mark.parametrize("parser", HEAVY, ids=lambda parser: parser.name)
def test_what_was_kept(parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads what scripts/fuzz_parsers.py kept: each of these once came to something else than all before."""
    monkeypatch.chdir(tmp_path)
    kept = corpus_of(parser, CORPUS)
    assert kept and all(outcome(parser, laid_out(parser, tmp_path), data) for data in kept)
