"""Merges LoRA into a weight matrix piece by piece: a piece is a run of the matrix's elements, so memory stays bounded.

W' = W + s B A, and with DoRA (arXiv 2402.09353, section 4) m (W + s B A) / ||W + s B A||, the norm of each output's weights.
A product is computed in float32, and a sum is rounded once. By how much it is scaled, and how matrices lie, an adapter's
`adapter_config.json` says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from ..core.errors import UsageError
from ..core.json_files import from_json, read_object

_LARGEST = 4 << 20  # bytes of such a file
_HINT = "put back the file that the run wrote; running its recipe again writes it anew"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraWeights:
    """Holds what is merged into one matrix of (outputs, inputs), or of (inputs, outputs) if `transposed`, as Conv1D has it."""

    a: torch.Tensor  # (rank, inputs), float32
    b: torch.Tensor  # (outputs, rank), float32
    scaling: float
    transposed: bool = False
    magnitude: torch.Tensor | None = None  # (outputs,), float32; only with DoRA

    def merged(self, piece: torch.Tensor, first: int, *, norms: torch.Tensor | None = None) -> torch.Tensor:
        """Returns elements [first, first + len(piece)) of the merged matrix, in float32.

        piece: those of the matrix, 1-D, of any dtype; norms: with DoRA, `output_norms` of the whole matrix."""
        merged_piece = piece.float() + self._added(first, len(piece))
        if self.magnitude is None:
            return merged_piece
        assert norms is not None
        return merged_piece * (self.magnitude / norms)[self._outputs(first, len(piece))]

    def output_norms(self, pieces: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the norm of each output's weights with LoRA added, (outputs,). pieces: the matrix from its beginning."""
        squares, first = torch.zeros(len(self.b), dtype=torch.float64), 0
        for piece in pieces:
            summed = (piece.float() + self._added(first, len(piece))).double()
            squares.index_add_(0, self._outputs(first, len(piece)), summed.square_())
            first += len(piece)
        return squares.sqrt_().float()

    def _columns(self) -> int:
        return len(self.b) if self.transposed else self.a.shape[1]

    def _outputs(self, first: int, count: int) -> torch.Tensor:
        """Returns to which output each element belongs."""
        places, columns = torch.arange(first, first + count), self._columns()
        return places % columns if self.transposed else places // columns

    def _added(self, first: int, count: int) -> torch.Tensor:
        """Returns elements [first, first + count) of s B A: of the rows that they touch, no others are computed."""
        columns = self._columns()
        begin, end = first // columns, -(-(first + count) // columns)
        rows = self.a[:, begin:end].T @ self.b.T if self.transposed else self.b[begin:end] @ self.a
        skipped = first - begin * columns
        return rows.reshape(-1)[skipped : skipped + count] * self.scaling


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Holds keys of peft's configuration under their names there."""

    lora_alpha: float
    alpha_pattern: dict[str, float]
    use_rslora: bool
    use_dora: bool
    fan_in_fan_out: bool  # matrices are (inputs, outputs), as Conv1D has them

    def scaling(self, layer: str, rank: int) -> float:
        """Returns by what B A is multiplied in a layer, as peft does: the first pattern that matches its name counts."""
        matching = (alpha for pattern, alpha in self.alpha_pattern.items() if _of_layers(pattern).match(layer))
        alpha = next(matching, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_settings(path: Path) -> LoraSettings:
    """Reads the file. Raises UsageError naming it if a key is missing or has a wrong value."""
    content = read_object(path, limit=_LARGEST, names=True, hint=_HINT)
    try:
        settings = from_json(LoraSettings, {key.name: content[key.name] for key in fields(LoraSettings) if key.name in content})
        for pattern in settings.alpha_pattern:
            _of_layers(pattern)
    except (UsageError, re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}: {error}", hint=_HINT) from None
    return settings


def _of_layers(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern of the end of a layer's name, as peft does."""
    return re.compile(rf"(.*\.)?({pattern})$")
