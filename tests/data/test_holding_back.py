"""Tests `dataset.eval_fraction`: each sample is either trained on or held back, by the seed alone, before anything is
packed."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.rows import Rows
from fuyou_cli.data.sampler import Part, is_held

TEXTS = [f"sample {number} of {number * 7} words" for number in range(40)]


@given(fraction=some.floats(0.001, 0.999), seed=some.integers(0, 2**63), entry=some.integers(0, 9))
def test_as_many_as_the_fraction_says_at_any_prefix(fraction: float, seed: int, entry: int) -> None:
    held = 0
    for number in range(300):
        held += is_held(fraction, seed=seed, entry=entry, number=number)
        assert abs(held - Fraction(str(fraction)) * (number + 1)) < 1


def test_another_seed_or_entry_holds_other_samples_back() -> None:
    def held(**place: int) -> list[int]:
        return [number for number in range(1000) if is_held(0.05, number=number, **place)]

    assert held(seed=1, entry=0) == held(seed=1, entry=0)
    assert len({tuple(held(seed=seed, entry=entry)) for seed in (1, 2) for entry in (0, 1)}) == 4


def part(*, held: bool, fraction: float = 0.2) -> dict[str, Any]:
    return Part(fraction=fraction, seed=3, held=held).asked()["part"]  # type: ignore[return-value]


@pytest.mark.parametrize("apart", [False, True], ids=["entries end to end", "a mixture"])
def test_every_sample_is_in_one_of_both(
    apart: bool, write: Callable[..., Path], tokenise: Callable[..., Rows], tokenizer: Any
) -> None:
    """The number of a sample counts over the files of its entry; packing and the most samples come after and before."""
    files = [write("one.jsonl", [{"text": text} for text in TEXTS[:25]]), write("two.jsonl", [{"text": t} for t in TEXTS[25:]])]
    held = tokenise(*files, apart=apart, part=part(held=True))
    rest = tokenise(*files, apart=apart, part=part(held=False), packing="concat")
    texts = [tokenizer.decode(held.tokens(row), skip_special_tokens=True) for row in range(len(held))]
    packed = "".join(tokenizer.decode(rest.tokens(row), skip_special_tokens=True) for row in range(len(rest)))
    assert texts == [text for text in TEXTS if text in texts] and len(texts) == len(TEXTS) // 5
    assert packed == "".join(text for text in TEXTS if text not in texts)
    if apart:
        assert held.summary.entry_rows == (5, 3)
    else:
        some = tokenise(*files, part=part(held=True), max_samples=20)
        assert [some.tokens(row).tolist() for row in range(len(some))] == [held.tokens(row).tolist() for row in range(4)]


@pytest.mark.parametrize(("fraction", "held", "said"), [(0.01, True, "holds none back"), (0.99, False, "leaves none to train")])
def test_a_part_without_samples_is_said(
    fraction: float, held: bool, said: str, write: Callable[..., Path], tokenise: Callable[..., Rows]
) -> None:
    file = write("few.jsonl", [{"text": TEXTS[0]}])
    with pytest.raises(UsageError, match=said):
        tokenise(file, part=part(held=held, fraction=fraction))
