"""Compares two runs: their losses, and their weights by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Outcome = tuple[list[float], dict[str, torch.Tensor]]  # losses and weights of a run


def relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference."""
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Returns ||ours - theirs|| / ||theirs|| over all tensors together."""
    assert ours.keys() == theirs.keys()
    gap = sum(float((ours[name].double() - theirs[name].double()).pow(2).sum()) for name in ours)
    return (gap / sum(float(value.double().pow(2).sum()) for value in theirs.values())) ** 0.5


def unequal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    assert ours.keys() == theirs.keys()
    return [n for n in ours if not torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8))]


def assert_near(ours: Outcome, theirs: Outcome, *, losses: float = 1e-6, weights: float = 1e-6) -> None:
    assert relative(ours[0], theirs[0]) <= losses
    assert distance(ours[1], theirs[1]) <= weights


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    """Compares bit for bit."""
    assert ours[0] == theirs[0]
    assert unequal(ours[1], theirs[1]) == []
