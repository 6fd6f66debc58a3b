"""The mark of a checkpoint's weights: the same for the same weights in any files, another for others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fuyou_cli.checkpoint.header import TensorEntry, parse_file
from fuyou_cli.checkpoint.reader import SAMPLE, weights_mark


def _entries(folder: Path, *shards: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    folder.mkdir()
    found: dict[str, TensorEntry] = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"{number}.safetensors")
        found |= parse_file(folder / f"{number}.safetensors").entries
    return found


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"a": torch.randn(300, 40), "b": torch.randn(7), "c": torch.randn(64, 64).bfloat16(), "empty": torch.zeros(0)}


def test_files_do_not_matter(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    whole = weights_mark(_entries(tmp_path / "whole", weights))
    parts = [{name: value} for name, value in reversed(weights.items())]
    assert weights_mark(_entries(tmp_path / "sharded", *parts)) == whole


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_weights_trained_a_little_differ(name: str, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    before = weights_mark(_entries(tmp_path / "before", weights))
    weights[name] = weights[name] * 1.01
    assert weights_mark(_entries(tmp_path / "after", weights)) != before


def test_first_and_last_bytes_are_looked_at(tmp_path: Path) -> None:
    values = torch.zeros(100 * SAMPLE, dtype=torch.float32)
    marks = {weights_mark(_entries(tmp_path / "zero", {"a": values}))}
    for number, place in enumerate((0, -1)):
        changed = values.clone()
        changed[place] = 1.0
        marks.add(weights_mark(_entries(tmp_path / str(number), {"a": changed})))
    assert len(marks) == 3


@pytest.mark.parametrize("other", [torch.zeros(4, 2), torch.zeros(2, 4, dtype=torch.float64)])
def test_shape_and_dtype_count(other: torch.Tensor, tmp_path: Path) -> None:
    one = weights_mark(_entries(tmp_path / "one", {"a": torch.zeros(2, 4)}))
    assert weights_mark(_entries(tmp_path / "other", {"a": other})) != one
