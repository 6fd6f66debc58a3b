"""Finds the shipped recipes: inside the package in a wheel, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_recipes() -> dict[str, Path]:
    """Lists them as name -> file, sorted by name. Empty if the installation has none."""
    return _named(Path())


def shipped_hardware() -> dict[str, Path]:
    """Finds the lists of parts that describe a machine: name (gpus, drives, hosts) -> file."""
    return _named(Path("hardware"))


def shipped_shapes(model: str) -> dict[str, Any] | None:
    """Returns what config.json says of the shapes of a model of the hub that a shipped recipe names; None of any other."""
    import yaml

    file = _named(Path("models")).get("shapes")
    found = None if file is None else yaml.safe_load(file.read_text(encoding="utf-8")).get(model)
    return None if found is None else dict(found)


def _named(inside: Path) -> dict[str, Path]:
    for folder in (_PACKAGE / "recipes", _PACKAGE / "shipped_recipes", _PACKAGE.parent / "recipes"):
        if folder.is_dir():
            return {path.stem: path for path in sorted((folder / inside).glob("*.yaml"))}
    return {}


def summary(path: Path) -> str:
    """Returns the first comment line of a shipped recipe, which says what it is for."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            return line.removeprefix("# ").strip()
    return ""
