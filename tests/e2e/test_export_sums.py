"""Nothing damaged is exported: every sum is looked at before a model takes its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import SwapError
from fuyou_cli.swap.daemon import SwapDaemon
from fuyou_cli.training.exporting import export_store

from .conftest import Project
from .running import exported, manifest_of, store_of


def _flip(file: Path, byte: int) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 0x10
    file.write_bytes(content)


def _export(store: Path, out: Path) -> None:
    export_store(store, out, dtype="float32", max_shard_size=1 << 30)


def test_a_flipped_bit_is_never_exported(stopped: Project, tmp_path: Path) -> None:
    """The first byte of an extent, one in the middle, and the last, which may be no tensor's."""
    saved, store, out = manifest_of(stopped), store_of(stopped), tmp_path / "out"
    stage = next(stage for stage in saved.stages if stage.params)
    for tensor, extent in (("weights", stage.weights), ("remainder", stage.remainder)):
        assert extent is not None
        for byte in (extent.offset, extent.offset + extent.size // 2, extent.offset + extent.size - 1):
            _flip(Path(saved.files[0]), byte)
            with pytest.raises(
                SwapError, match=f"{tensor} of {stage.name}: bytes {extent.offset} to .* are not what was written"
            ):
                _export(store, out)
            assert list(tmp_path.iterdir()) == []
            _flip(Path(saved.files[0]), byte)
    assert exported(store, out)


def test_a_bit_flipped_on_its_way_is_not_exported(stopped: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips a bit in every third read in turn, though the store is whole."""
    read, wait, at, seen = SwapDaemon.read, SwapDaemon.wait, 0, 0
    spans: dict[int, tuple[int, int]] = {}

    def reading(self: SwapDaemon, arena_offset: int, store_offset: int, size: int, **more: Any) -> int:
        ticket = read(self, arena_offset, store_offset, size, **more)
        spans[ticket] = (arena_offset, size)
        return ticket

    def waiting(self: SwapDaemon, ticket: int) -> Any:
        nonlocal seen
        result, (offset, size) = wait(self, ticket), spans.pop(ticket)
        seen += 1
        if seen == at:
            self._arena.view(offset, size)[size // 2] ^= 0x04
        return result

    monkeypatch.setattr(SwapDaemon, "read", reading)
    monkeypatch.setattr(SwapDaemon, "wait", waiting)
    store = store_of(stopped)
    _export(store, tmp_path / "whole")
    reads = seen
    for number in range(1, reads + 1, 3):
        at, seen = number, 0
        with pytest.raises(SwapError, match="are not what was written there"):
            _export(store, tmp_path / "out")
    assert reads > 20 and not (tmp_path / "out").exists()
