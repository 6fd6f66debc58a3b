"""Reads from `adapter_config.json` what merging needs: by how much each layer's product is scaled, and how matrices lie."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

from ..core.errors import UsageError
from ..core.json_files import read_object
from ..core.typed import from_json

_LARGEST = 4 << 20  # bytes of such a file
_HINT = "put back the file that the run wrote; running its recipe again writes it anew"


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
        found = from_json(LoraSettings, {key.name: content[key.name] for key in fields(LoraSettings) if key.name in content})
        for pattern in found.alpha_pattern:
            _of_layers(pattern)
    except (UsageError, re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}: {error}", hint=_HINT) from None
    return found


def _of_layers(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern of the end of a layer's name, as peft does."""
    return re.compile(rf"(.*\.)?({pattern})$")
