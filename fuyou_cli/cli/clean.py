"""Runs `fuyou clean`: shows stores and removes their files."""

from __future__ import annotations

from pathlib import Path

from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.printable import one_line
from fuyou_cli.core.units import gib
from fuyou_cli.training.state.manifest import BEFORE
from fuyou_cli.training.state.manifest import NAME as MANIFEST
from fuyou_cli.training.state.parts import read_part
from fuyou_cli.training.state.removal import StoreFiles, find_manifests, find_unnamed, read_store, remove_store

from .console import agreed, write_last_result, write_result, write_status


def run_clean(directory: Path, *, yes: bool) -> None:
    """Shows the stores in `directory` and removes their files if the user agrees. Raises FuyouError if a store is left."""
    stores = [read_store(manifest) for manifest in find_manifests(directory)]
    unnamed = find_unnamed(directory, stores)
    for store in stores:
        _show(store)
    for file in unnamed:
        _show_unnamed(file)
    removable = [store for store in stores if not store.refused]
    total = sum(file.taken for store in removable for file in store.files)
    question = f"Remove these files and their manifests, {gib(total)}?"
    if removable and agreed(question, yes=yes, otherwise="nothing was removed"):
        freed = sum(remove_store(store) for store in removable)
        write_last_result(f"removed {gib(freed)} ({freed:,} bytes)")
    if len(removable) < len(stores):
        raise FuyouError(f"{len(stores) - len(removable)} of {len(stores)} stores were not removed, see above")
    if not stores:
        raise UsageError(f"no store under {directory}: no {MANIFEST} in it or one level below")


def _show(store: StoreFiles) -> None:
    write_result(f"{store.manifest.parent}")
    for file in store.files:
        write_result(f"  {gib(file.taken):>12}  {file.path}  ({file.taken:,} bytes)")
    if store.missing:
        write_result(f"  {store.missing} named files are gone already")
    for reason in store.refused:
        write_status(f"  refused: {reason}")


def _show_unnamed(file: Path) -> None:
    """Shows a store file that has no manifest. It is not removed, because a run may still need it."""
    taken, part = file.stat().st_blocks * 512, read_part(file.parent)
    if part is not None and part.index:
        first = one_line(str(part.first))
        why = f"part {part.index + 1} of {part.count} of the store in {first}: name that one, or mount its drive"
    else:
        why = f"its run was killed at its start, or continues from {BEFORE}: run its recipe again, or remove the file by hand"
    write_status(f"{file.parent}\n  {gib(taken):>12}  {file}  ({taken:,} bytes)")
    write_status(f"  not removed, because no {MANIFEST} names it: {why}")
