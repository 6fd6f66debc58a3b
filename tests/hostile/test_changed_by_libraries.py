"""The same of files that transformers reads: configurations, tokenizers. Loading it takes most of this file's time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from proof.fuzz import corpus_of, outcome
from proof.parsers import HEAVY, Parser

from .test_changed_files import change_and_read, laid_out, seeds_of

CORPUS = Path(__file__).resolve().parents[1] / "corpus"


@pytest.mark.parametrize("parser", HEAVY, ids=lambda parser: parser.name)
def test_what_is_changed_is_taken_unchanged(parser: Parser, tmp_path: Path) -> None:
    assert {outcome(parser, laid_out(parser, tmp_path), data) for data in seeds_of(parser)} == {"taken"}


@pytest.mark.parametrize("parser", HEAVY, ids=lambda parser: parser.name)
@examples(20, share_fixtures=True)
@given(rng=st.randoms(use_true_random=False))
def test_changed(parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    monkeypatch.chdir(tmp_path)
    change_and_read(parser, tmp_path, rng)


@pytest.mark.parametrize("parser", HEAVY, ids=lambda parser: parser.name)
def test_what_was_kept(parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads what scripts/fuzz_parsers.py kept: each of these once came to something else than all before."""
    monkeypatch.chdir(tmp_path)
    kept = corpus_of(parser, CORPUS)
    assert kept and all(outcome(parser, laid_out(parser, tmp_path), data) for data in kept)
