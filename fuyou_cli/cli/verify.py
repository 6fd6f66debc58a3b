"""`fuyou verify`: reads every committed extent and compares it with the checksum of what was written."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core.units import gb

from .console import status_console, write_document, write_result, write_status

if TYPE_CHECKING:
    from fuyou_cli.training.state.at_rest import Verified


def run_verify(source: Path, *, json_output: bool) -> bool:
    """Prints what is whole of a store; tells whether the newest state is."""
    from rich.progress import Progress

    from fuyou_cli.training.state import manifest as manifests
    from fuyou_cli.training.state.at_rest import find_store, verify_store
    from fuyou_cli.training.state.extent_checks import size_of

    store = find_store(source)
    newest, _ = manifests.newest(store)
    with Progress(console=status_console(), transient=True) as progress:
        task = progress.add_task("reading", total=2 * size_of(newest) if newest is not None else None)
        found = verify_store(store, progress=lambda size: progress.advance(task, size), say=write_status)
    if json_output:
        write_document(json.dumps({"store": str(store), "states": [_as_data(state) for state in found]}, indent=1))
    else:
        for state in found:
            _show(state)
        if not found[0].is_whole:
            write_result(_what_follows(found))
    return found[0].is_whole


def _what_follows(found: list[Verified]) -> str:
    whole = next((state for state in found if not state.damages), None)
    if whole is None:
        return "no state is whole: put a copy of the folder back, or start over with checkpoint.resume=never"
    return f"the same recipe goes back to the state after step {whole.manifest.step}, which is intact"


def _extents(state: Verified) -> list[int]:
    return [extent.size for stage in state.manifest.stages for _, extent in stage.extents()]


def _show(state: Verified) -> None:
    sizes, damaged = _extents(state), len(state.damages)
    name = f"{'the state before it, after' if state.older else 'state after'} step {state.manifest.step}"
    if state.problem:
        write_result(f"the newest state is unreadable: {state.problem}")
    if not damaged:
        write_result(f"{name}: {len(sizes)} extents, {gb(sum(sizes))}, all checksums match")
    elif state.older:
        write_result(f"{name}: {damaged} of {len(sizes)} extents were written over since, or are damaged")
    else:
        write_result(f"{name}: {damaged} of {len(sizes)} extents are damaged")
        for damage in state.damages:
            write_result(f"  {damage}")


def _as_data(state: Verified) -> dict[str, object]:
    return {
        "step": state.manifest.step,
        "older": state.older,
        "problem": state.problem,
        "extents": len(_extents(state)),
        "damages": [asdict(damage) for damage in state.damages],
    }
