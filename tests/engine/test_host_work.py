"""What the launching thread does itself with the host's memory, as it is counted."""

from __future__ import annotations

import torch

from fuyou_cli.engine.host_work import HostWork


def test_bytes_read_and_written_by_kind() -> None:
    work = HostWork()
    work.copied("inputs staged", torch.zeros(3, 5))
    work.copied("inputs staged", torch.zeros(2, dtype=torch.bfloat16))
    work.added(torch.zeros(7), torch.zeros(7, dtype=torch.bfloat16))
    work.read(torch.zeros(11, dtype=torch.bfloat16))
    assert work.take() == {"inputs staged": 2 * 60 + 2 * 4, "added": 2 * 28 + 14, "looked at": 22}
    assert work.take() == {}
