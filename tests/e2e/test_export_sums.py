"""Nothing damaged is exported: every sum is looked at before a model takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuyou_cli.core.errors import SwapError
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.state.at_rest import saved_store
from tests.damage import counted_reads, flip

from .conftest import Project
from .running import exported, manifest_of, store_of


def _export(store: Path, out: Path) -> None:
    export_store(saved_store(store), out, dtype="float32", max_shard_size=1 << 30)


def test_a_flipped_bit_is_never_exported(stopped: Project, tmp_path: Path) -> None:
    """The first byte of an extent, one in the middle, and the last, which may be no tensor's."""
    saved, store, out = manifest_of(stopped), store_of(stopped), tmp_path / "out"
    stage = next(stage for stage in saved.stages if stage.params)
    for tensor, extent in (("weights", stage.weights), ("remainder", stage.remainder)):
        assert extent is not None
        for byte in (extent.offset, extent.offset + extent.size // 2, extent.offset + extent.size - 1):
            flip(Path(saved.files[0]), byte)
            with pytest.raises(
                SwapError, match=f"{tensor} of {stage.name}: bytes {extent.offset} to .* are not what was written"
            ):
                _export(store, out)
            assert list(tmp_path.iterdir()) == []
            flip(Path(saved.files[0]), byte)
    assert exported(store, out)


def test_a_bit_flipped_on_its_way_is_not_exported(stopped: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips a bit in every third read in turn, though the store is whole."""
    reads = counted_reads(monkeypatch)
    store = store_of(stopped)
    _export(store, tmp_path / "whole")
    count = reads.seen
    for number in range(1, count + 1, 3):
        reads.seen, reads.at = 0, number
        with pytest.raises(SwapError, match="are not what was written there"):
            _export(store, tmp_path / "out")
    assert count > 20 and not (tmp_path / "out").exists()
