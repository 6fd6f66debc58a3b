"""The arena's pages: all taken before the first step, with what they hold."""

from __future__ import annotations

import pytest
import torch

from fuyou_cli.core.probe import process_bytes
from fuyou_cli.core.units import MiB
from fuyou_cli.engine.context import HostMemory, whole_batch
from fuyou_cli.engine.crossings import WholeBatches
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
        assert [memory.all_of(dtype).numel() for dtype in (torch.uint8, torch.bfloat16, torch.int64)] == [4099, 2049, 512]
        memory.all_of(torch.int64)[1] = -1
        assert memory.tensor(Span(offset=8, size=8), torch.uint8).tolist() == [255] * 8


# ---- tensors of a whole batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (4, 512, 512), (3, 700, 513)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = whole_batch(shape, dtype)
    assert (tuple(made.shape), made.dtype, made.is_contiguous()) == (shape, dtype, True)
    values = torch.rand(shape).to(dtype)
    made.copy_(values)
    assert torch.equal(made, values)


def test_its_pages_go_back_with_the_last_view() -> None:
    before = process_bytes()
    view = whole_batch((16, 1024, 1024), torch.float32).fill_(1.0)[3]
    assert process_bytes() - before >= 63 * MiB
    del view
    assert process_bytes() - before <= 8 * MiB


def test_a_span_is_lent_again_when_its_last_view_is_gone() -> None:
    shape, size = (4, 8), 4 * 8 * 4
    with Arena(2 * MiB) as arena:
        memory = HostMemory(arena)
        batches = WholeBatches.in_arena(memory, (Span(offset=0, size=size), Span(offset=4096, size=size)))
        first, second = (batches.lend(shape, torch.float32) for _ in range(2))
        assert memory.holds(first) and memory.holds(second) and first.data_ptr() != second.data_ptr()
        row, place = first[2], first.data_ptr()
        del first
        assert not memory.holds(batches.lend(shape, torch.float32))  # a view of each is somewhere
        del row
        assert not memory.holds(batches.lend((1, 8), torch.float32))  # of one row: it would keep a whole span
        assert not memory.holds(batches.lend((8, 8), torch.float32))
        assert batches.lend(shape, torch.float32).data_ptr() == place
        del second
