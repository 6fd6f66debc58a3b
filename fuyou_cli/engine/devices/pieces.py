"""Large copies in pieces, so that small ones need not wait for them.

Weights and gradients of a stage are hundreds of MiB, and nobody waits for them soon. A micro-batch's boundary is what compute
waits for next, and is small. So of what a direction carries, at most `PIECE` bytes of large copies are before a boundary.
"""

from __future__ import annotations

import torch

PIECE = 32 << 20  # bytes: 1.5 ms of PCIe 4, a quarter of a micro-batch's forward; what a copy costs to begin is nothing to it


def in_pieces(source: torch.Tensor, target: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The copy from `source` to `target` (both 1-D) as copies of at most `size` bytes each, in order."""
    count = max(1, size // source.element_size())
    return list(zip(source.split(count), target.split(count), strict=True))
