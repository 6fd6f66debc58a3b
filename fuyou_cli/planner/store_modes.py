"""What makes a step durable: other extents for everything (`in_place`), or its gradients and a few spare places (`redo`).

In place costs no traffic and twice the disk. Redo has everything once: the gradients of a step go to the ssd, which they do
with clipping anyway, and a crash updates again what had not been updated.
"""

from __future__ import annotations

from dataclasses import replace

from ..spec.model import ModelSpec
from ..spec.plan import StoreMode
from .ground import Ground
from .wishes import Wishes


def at_rest(model: ModelSpec, wishes: Wishes, mode: StoreMode) -> int:
    """Bytes of the store that survive a run, the gradients of redo among them."""
    return Ground(model, wishes.numerics, mode=mode, keep=wishes.keep).durable_size


def with_fitting_mode(model: ModelSpec, wishes: Wishes, disk: int) -> Wishes:
    """In place where `disk` (bytes) has room for its extents, or has none for redo's either, or where gradients are to be in
    RAM; else redo."""
    if at_rest(model, wishes, "in_place") <= disk or at_rest(model, wishes, "redo") > disk or wishes.gradients == "cpu":
        return wishes
    return replace(wishes, store_mode="redo", gradients="ssd")
