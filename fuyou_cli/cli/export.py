"""`fuyou export`: a committed store to a folder for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import folder

from .console import status_console, write_result, write_status

_SHARD = 5_000_000_000

ExportDtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """Where the store is and what its recipe wants; `dtype` is None where no recipe says."""

    store: Path
    dtype: str | None
    max_shard_size: int


def run_export(source: Path, out: Path, overrides: Sequence[str], *, dtype: ExportDtype | None) -> None:
    """`dtype`, else the recipe's, else what the run computed in."""
    asked = _of_recipe(source, overrides) if _is_recipe(source) else _of_store(source, overrides)
    from fuyou_cli.training.exporting import export_store
    from fuyou_cli.training.state import manifest as manifests
    from fuyou_cli.training.state.at_rest import find_store

    from .render.transfer import Transfers

    store = find_store(asked.store)
    manifest, problem = manifests.newest(store)
    assert manifest is not None, "find_store found it"
    if problem:
        write_status(f"note: {problem}; exporting the state before it, after step {manifest.step}")
    written = dtype or asked.dtype or manifest.compute_dtype
    with Transfers(status_console()) as transfers:
        progress = partial(transfers, f"exporting to {out.name}")
        paths = export_store(
            store, out, dtype=written, max_shard_size=asked.max_shard_size, progress=progress, say=write_status
        )
    total = sum(path.stat().st_size for path in paths)
    write_result(f"{out}: {len(paths)} file{'s' * (len(paths) != 1)}, {total:,} bytes of {written} weights")


def _is_recipe(source: Path) -> bool:
    """A folder is a store, or holds some; a file or a shipped name is a recipe."""
    from fuyou_cli.recipe.shipped import shipped_recipes

    if source.is_dir():
        return False
    return source.suffix in (".yaml", ".yml") or source.is_file() or str(source) in shipped_recipes()


def _of_recipe(source: Path, overrides: Sequence[str]) -> _Asked:
    from fuyou_cli.recipe.load import load_recipe
    from fuyou_cli.training.steps import run_directories

    from .recipes_cmd import find_recipe

    recipe = load_recipe(*find_recipe(str(source), overrides)).recipe
    resumed = recipe.checkpoint.resume not in ("auto", "never")  # such a run goes on in the folder it names
    store = folder(recipe.checkpoint.resume, key="checkpoint.resume") if resumed else run_directories(recipe)[0]
    return _Asked(store=store, dtype=recipe.export.dtype, max_shard_size=recipe.export.max_shard_size)


def _of_store(source: Path, overrides: Sequence[str]) -> _Asked:
    if overrides:
        raise UsageError(f"{source} is no recipe, so there is nothing for {overrides[0]} to change", hint="use --dtype")
    return _Asked(store=source, dtype=None, max_shard_size=_SHARD)
