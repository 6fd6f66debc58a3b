"""Captures and restores every random generator that a model's own code may draw from, as data for a manifest.

fuyou's own random numbers need no generator: dropout and shuffles are functions of (seed, step, stage, micro-batch).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ...core.errors import UsageError


def seed(number: int) -> None:
    """Seeds all generators, including torch's on every device."""
    random.seed(number)
    np.random.seed(number % (1 << 32))
    torch.manual_seed(number)


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the states of Python, NumPy and torch, and of the device if it has its own."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, _hex(torch.from_numpy(np.asarray(keys))), int(position), int(has_gauss), float(cached)],
        "torch": _hex(torch.get_rng_state()),
    }
    if device.type == "cuda":
        found["device"] = _hex(torch.cuda.get_rng_state(device))
    return found


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Restores captured states. A device without a captured state keeps its own. Raises UsageError if a generator refuses its
    state."""
    if not states:
        return
    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_bytes(states["torch"]))
        if device.type == "cuda" and "device" in states:
            torch.cuda.set_rng_state(_bytes(states["device"]), device)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise UsageError(
            f"the store's states of random generators cannot be restored: {error}",
            hint="start over with checkpoint.resume=never",
        ) from error


def _hex(values: torch.Tensor) -> str:
    return values.numpy().tobytes().hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
