"""Tests what blocks of memory are charged with."""

from __future__ import annotations

import pytest

from fuyou_cli.core.heap import BESIDE, HELD, HOLES, MAPPED, alive, held, worked_on
from fuyou_cli.core.units import MiB


@pytest.mark.parametrize("size", [0, 1, MiB, MAPPED - 1])
def test_a_block_in_the_heap_brings_its_part_of_the_holes(size: int) -> None:
    assert worked_on(size) == alive(size) == int(size * (1 + HOLES)) >= held(size) == int(size * (1 + HELD)) >= size


@pytest.mark.parametrize("size", [MAPPED, 10 * MAPPED + 1])
def test_a_mapped_block_is_itself_and_what_works_on_it(size: int) -> None:
    assert alive(size) == held(size) == size
    assert worked_on(size) == int(size * (1 + BESIDE)) > size
