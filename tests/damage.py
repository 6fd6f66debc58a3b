"""Damages a byte of a file, or of one read on its way from the store to the arena."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.swap.daemon import SwapDaemon


def flip(file: Path, byte: int) -> None:
    """Changes one bit, as if the drive had done it."""
    with file.open("r+b") as stream:
        stream.seek(byte)
        old = stream.read(1)[0]
        stream.seek(byte)
        stream.write(bytes([old ^ 0x10]))
        stream.flush()
        os.fsync(stream.fileno())


@dataclass(slots=True)
class Reads:
    """Counts the reads that were waited for. The one with the number `at` comes with one bit changed."""

    seen: int = 0
    at: int = 0


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    read, wait, reads = SwapDaemon.read, SwapDaemon.wait, Reads()
    spans: dict[int, tuple[int, int]] = {}

    def reading(self: SwapDaemon, arena_offset: int, store_offset: int, size: int, **more: Any) -> int:
        ticket = read(self, arena_offset, store_offset, size, **more)
        spans[ticket] = (arena_offset, size)
        return ticket

    def waiting(self: SwapDaemon, ticket: int) -> Any:
        result, (offset, size) = wait(self, ticket), spans.pop(ticket)
        reads.seen += 1
        if reads.seen == reads.at:
            self._arena.view(offset, size)[size // 2] ^= 0x40
        return result

    monkeypatch.setattr(SwapDaemon, "read", reading)
    monkeypatch.setattr(SwapDaemon, "wait", waiting)
    return reads
