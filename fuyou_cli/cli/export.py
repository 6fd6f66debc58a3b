"""`fuyou export`: a committed store to a folder for transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .console import status_console, write_result


def run_export(source: Path, out: Path) -> None:
    from fuyou_cli.training.exporting import export_store, find_store

    from .render.transfer import Transfers

    dtype, shard = "bfloat16", 5_000_000_000
    if source.suffix in (".yaml", ".yml"):
        from fuyou_cli.recipe.load import load_recipe
        from fuyou_cli.training.prepare import run_directories

        recipe = load_recipe(source).recipe
        dtype, shard = recipe.export.dtype, recipe.export.max_shard_size
        source = run_directories(recipe)[0]
    with Transfers(status_console()) as transfers:
        progress = partial(transfers, f"exporting to {out.name}")
        paths = export_store(find_store(source), out, dtype=dtype, max_shard_size=shard, progress=progress)
    total = sum(path.stat().st_size for path in paths)
    write_result(f"{out}: {len(paths)} file{'s' * (len(paths) != 1)}, {total:,} bytes of {dtype} weights")
