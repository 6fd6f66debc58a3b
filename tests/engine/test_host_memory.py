"""The arena's pages: all taken before the first step, with what they hold."""

from __future__ import annotations

import torch

from fuyou_cli.core.probe import process_bytes
from fuyou_cli.core.units import MiB
from fuyou_cli.engine.host_memory import HostMemory
from fuyou_cli.spec.plan import Span
from fuyou_cli.swap.store import Arena

SIZE = 96 * MiB


def test_every_page_is_taken_and_keeps_what_it_holds() -> None:
    with Arena(SIZE) as arena:
        memory = HostMemory(arena)
        memory.tensor(Span(offset=8 * MiB, size=MiB), torch.uint8).copy_(torch.arange(MiB) % 251)
        before = process_bytes()
        memory.take()
        assert process_bytes() - before >= SIZE - 8 * MiB  # huge pages: what was written to had some of its neighbours
        whole = memory.tensor(Span(offset=0, size=SIZE), torch.uint8)
        assert torch.equal(whole[8 * MiB : 9 * MiB], (torch.arange(MiB) % 251).to(torch.uint8))
        assert int(whole[: 8 * MiB].sum()) == int(whole[9 * MiB :].sum(dtype=torch.int64)) == 0


def test_all_of_an_arena_that_ends_amid_an_element() -> None:
    with Arena(4099) as arena:
        memory = HostMemory(arena)
        assert [memory.whole(dtype).numel() for dtype in (torch.uint8, torch.bfloat16, torch.int64)] == [4099, 2049, 512]
        memory.whole(torch.int64)[1] = -1
        assert memory.tensor(Span(offset=8, size=8), torch.uint8).tolist() == [255] * 8
