"""A step's rows as one padded rectangle of token ids and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fuyou_cli.core.units import align_up

from .rows import Rows

if TYPE_CHECKING:
    import torch

NO_LOSS = -100  # the label that torch's cross entropy and every HF model leave out


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Right-padded. Labels are aligned with `input_ids`; the loss shifts them, so a row's first label is never used."""

    input_ids: NDArray[np.int64]  # [B, S]
    labels: NDArray[np.int64]  # [B, S], NO_LOSS where a label does not count
    tokens: int  # without padding
    label_tokens: int  # labels that count, at positions >= 1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, labels) as torch tensors that share this batch's memory."""
        import torch

        return torch.from_numpy(self.input_ids), torch.from_numpy(self.labels)


def collate(rows: Rows, indices: Sequence[int], *, pad_id: int, max_len: int, multiple: int = 8) -> Batch:
    """The rows `indices`, padded to the longest of them rounded up to `multiple`, but not beyond `max_len`."""
    lengths = [rows.length(index) for index in indices]
    longest = max(lengths)
    if longest > max_len:
        raise ValueError(f"a row of {longest} tokens does not fit max_len {max_len}")
    width = min(align_up(longest, multiple), max_len)
    input_ids = np.full((len(lengths), width), pad_id, np.int64)
    labels = np.full((len(lengths), width), NO_LOSS, np.int64)
    for number, (index, length) in enumerate(zip(indices, lengths, strict=True)):
        tokens = rows.tokens(index)
        input_ids[number, :length] = tokens
        labels[number, :length] = np.where(rows.mask(index) != 0, tokens, NO_LOSS)
    counting = int(np.count_nonzero(labels[:, 1:] != NO_LOSS))
    return Batch(input_ids=input_ids, labels=labels, tokens=sum(lengths), label_tokens=counting)
