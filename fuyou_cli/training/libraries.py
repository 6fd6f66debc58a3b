"""Which versions compute a run's steps: another one may give other last bits, which a resumed run is told."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from .. import __version__

_COMPUTING = ("torch", "transformers")


def versions() -> dict[str, str]:
    """Name -> version. A build's own part (`+cpu`) belongs to it."""
    return {"fuyou": __version__, **{name: importlib.metadata.version(name) for name in _COMPUTING}}


def change(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What has another version now than in a manifest, as a note; empty where nothing has."""
    changed = [f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if not changed:
        return ""
    return f"{'; '.join(changed)}: the steps from here on may differ in their last bits from those of an uninterrupted run"
