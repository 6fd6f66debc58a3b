"""Runs the commands on what a run has left: `fuyou export` writes its store for transformers, `verify` compares it with its
checksums, `clean` removes it, and `report` shows the run's log. The last two need no extension."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fuyou_cli.checkpoint.hub import Hub
from fuyou_cli.core.disk import REMEDIES, status_of
from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.json_files import one_line
from fuyou_cli.core.paths import expanded
from fuyou_cli.core.units import gb, gib
from fuyou_cli.recipe.named import shipped_recipes
from fuyou_cli.training.run_log import History, find_log, finite, read_history, saved_of
from fuyou_cli.training.state.kept_companions import kept_adapter
from fuyou_cli.training.state.manifest import BEFORE
from fuyou_cli.training.state.manifest import NAME as MANIFEST
from fuyou_cli.training.state.store_folders import (
    StoreFiles,
    find_manifests,
    find_unnamed,
    name_of_run,
    of_any_count,
    read_part,
    read_store,
    remove_store,
    unranked,
)

from .console import agreed, result_console, status_console, write_json, write_last_result, write_result, write_status
from .recipe_commands import loaded_with_notes
from .render.progress import TransferDisplay, counting
from .render.report_screen import page, show_report

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.report import RunReport, StepReport
    from fuyou_cli.training.state.at_rest import FileCheck, SavedStore, Verified

_SHARD = 5_000_000_000  # bytes of a file of an export, unless a recipe says otherwise


def run_export(
    source: Path, out: Path, overrides: Sequence[str], *, dtype: Literal["bfloat16", "float32"] | None, merged: bool = False
) -> None:
    """Exports as `dtype`; by default as the recipe says, or in the type that the run computed in. `merged`: an adapter is
    merged into its model."""
    recipe = _recipe_of(source, overrides)
    export = None if recipe is None else recipe.export
    from fuyou_cli.training.exporting import export_store, how_to_load
    from fuyou_cli.training.prepare import store_of
    from fuyou_cli.training.state.at_rest import find_store

    store = find_store(source if recipe is None else store_of(recipe))
    manifest = store.manifest
    if store.problem:
        write_status(f"note: {store.problem}; exporting the state before it, after step {manifest.step}")
    written = dtype or (export and export.dtype) or manifest.compute_dtype
    shard = _SHARD if export is None else export.max_shard_size
    copied = manifest.untouched is not None and (merged or kept_adapter(store.folder) is None)  # from the model's checkpoint
    with TransferDisplay(status_console()) as transfers:
        model_dir = None
        if recipe is not None and copied:
            model_dir = Hub(recipe, say=write_status, progress=transfers).model(need_weights=True)
        elif recipe is not None and not Path(manifest.model_dir).is_dir():  # it has moved: nothing is downloaded
            named = expanded(recipe.model.name_or_path, key="model.name_or_path")
            model_dir = named if named.is_dir() else None
        progress = partial(transfers, f"exporting to {out.name}")
        paths = export_store(
            store, out, dtype=written, max_shard_size=shard, merged=merged, model_dir=model_dir, progress=progress,
            say=write_status,
        )  # fmt: skip
    total = sum(path.stat().st_size for path in paths)
    write_last_result(f"{out}: {len(paths)} file{'s' * (len(paths) != 1)}, {total:,} bytes of {written} weights")
    if how := how_to_load(out, store.folder):
        write_status(how)


def _recipe_of(source: Path, overrides: Sequence[str]) -> Recipe | None:
    """Loads the recipe that is to be exported, a file or a shipped name. None: it is a folder, of a store or of several."""
    named = source.suffix in (".yaml", ".yml") or source.is_file() or str(source) in shipped_recipes()
    if named and not source.is_dir():
        return loaded_with_notes(str(source), overrides).recipe
    if overrides:
        raise UsageError(f"{source} is not a recipe, so {overrides[0]} changes nothing", hint="use --dtype")
    return None


def run_verify(source: Path, *, json_output: bool) -> bool:
    """Prints what is intact in a store, and returns whether the newest state is."""
    from fuyou_cli.training.state.at_rest import find_store, size_of, to_check, verify_store

    store = find_store(source)
    verified: list[tuple[SavedStore, list[Verified]]] = []
    for share in store.shares or (store,):
        with counting("reading", 2 * size_of(share.manifest) + to_check(share.manifest)) as progress:
            verified.append((share, verify_store(share, progress=progress, say=write_status)))
    if json_output:
        data = [{"store": str(share.folder), "states": [_as_data(state) for state in states]} for share, states in verified]
        write_json({"shares": data} if store.shares else data[0])
    else:
        for share, states in verified:
            if store.shares:
                write_result(f"{share.folder}:")
            _show_states(states)
    return all(states[0].is_whole for _, states in verified)


def _show_states(states: Sequence[Verified]) -> None:
    """Shows the states of one store, and what a run would continue from."""
    for state in states:
        _show(state)
    for file in states[0].files:
        _show_file(file)
    if states[0].damages or states[0].problem:
        intact = next((state for state in states if not state.damages), None)
        if intact is None and any(damage.unreadable for state in states for damage in state.damages):
            write_result(f"no state can be read whole: {REMEDIES[errno.EIO]}; nothing is changed")
        elif intact is None:
            write_result("no state is intact: put a copy of the folder back, or start over with checkpoint.resume=never")
        else:
            write_result(
                f"a run of the same recipe continues from the state after step {intact.manifest.step}, which is intact"
            )


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
        write_result(f"{name}: {damaged} of {len(sizes)} extents have been overwritten or are damaged")
    else:
        write_result(f"{name}: {damaged} of {len(sizes)} extents are damaged")
        for damage in state.damages:
            write_result(f"  {damage}")


def _show_file(file: FileCheck) -> None:
    name = f"frozen weights in the model's file {file.path}"
    if file.changed:
        remedy = "put it back as it was, or start over with checkpoint.resume=never"
        write_result(f"{name}: its content is not what the run has read: {remedy}")
        return
    if file.same:
        write_result(f"{name}: {gb(file.same)}, all checksums match")
    if file.unknown:
        write_result(f"{name}: {'not all' if file.same else 'not'} compared: {file.unknown}")


def _as_data(state: Verified) -> dict[str, object]:
    return {
        "step": state.manifest.step,
        "older": state.older,
        "problem": state.problem,
        "extents": len(_extents(state)),
        "damages": [asdict(damage) for damage in state.damages],
        "files": [asdict(file) for file in state.files],
    }


# ---- clean -----------------------------------------------------------------------------------------------------------


def run_clean(directory: Path, *, yes: bool) -> None:
    """Shows the stores in `directory` and removes their files if the user agrees. Raises FuyouError if a store is left."""
    stores = [read_store(manifest) for manifest in find_manifests(directory) or _manifests_of_output(directory)]
    unnamed = find_unnamed(directory, stores)
    for store in stores:
        _show_store(store)
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


def _manifests_of_output(directory: Path) -> list[Path]:
    """Finds the manifests of the run with this output_dir, of all its ranks, wherever they are. Raises UsageError where it is a
    copy of another output_dir, or was moved."""
    if (store := saved_of(directory)) is None:
        return []
    if unranked(store).name != name_of_run(directory):
        raise UsageError(
            f"no store under {directory}: {store} is of a run with another output_dir, and may be all that is left of it",
            hint="remove the folder itself if it is a copy",
        )
    return [folder / MANIFEST for folder in of_any_count(store) if status_of(folder / MANIFEST) is not None]


def _show_store(store: StoreFiles) -> None:
    write_result(f"{store.manifest.parent}")
    for file in store.files:
        write_result(f"  {gib(file.taken):>12}  {file.path}  ({file.taken:,} bytes)")
    if store.missing:
        write_result(f"  {store.missing} named files are gone already")
    for reason in store.refused:
        write_status(f"  refused: {reason}")


def _show_unnamed(file: Path) -> None:
    """Shows a store file that has no manifest. It is not removed, because a run may still need it."""
    size, part = file.stat().st_blocks * 512, read_part(file.parent)
    if part is not None and part.index:
        first = one_line(str(part.first))
        why = f"part {part.index + 1} of {part.count} of the store in {first}: name that one, or mount its drive"
    else:
        why = f"its run was killed at its start, or continues from {BEFORE}: run its recipe again, or remove the file by hand"
    write_status(f"{file.parent}\n  {gib(size):>12}  {file}  ({size:,} bytes)")
    write_status(f"  not removed, because no {MANIFEST} names it: {why}")


# ---- report ----------------------------------------------------------------------------------------------------------


def run_report(source: Path, *, json_output: bool, html: Path | None) -> None:
    """Shows a run's log. With `html`, writes a page to that file instead."""
    history = read_history(find_log(source))
    if json_output:
        write_json(_run_as_data(history))
    if html is not None:
        text = page(history)
        try:
            html.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{html} cannot be written: {error.strerror}", hint="name another file") from None
        write_status(f"wrote {html}")
    elif not json_output:
        show_report(result_console(), history)


def _run_as_data(history: History) -> dict[str, Any]:
    report: RunReport = history.report
    left_out = ("losses", "timeline", "timeline_stalls", "compared", "waits")
    best = history.best
    data = {
        "log": str(history.log),
        "ended": history.ended,
        "failed": history.failed or None,
        "stopped": history.stopped,
        "planned": asdict(history.plan),
        "measured": {name: value for name, value in asdict(report).items() if name not in left_out},
        "compared": [line.as_data() for line in report.compared],
        "evaluations": [asdict(evaluation) for evaluation in history.evaluations],
        "best": None if best is None else {name: getattr(best, name) for name in ("step", "loss", "folder", "problem")},
        "changes": [asdict(change) for change in history.changes],
        "samples": [asdict(sample) for sample in history.samples],
        "steps": [_step(step) for step in history.steps],
        **({} if history.sent is None else {"experts": asdict(history.sent)}),
    }
    return {name: finite(value) for name, value in data.items()}


def _step(step: StepReport) -> dict[str, Any]:
    """Returns a step's figures. Those of mixtures are left out where there is none."""
    names = (
        "step", "loss", "lr", "grad_norm", "batch_tokens", "seconds", "ram_peak", "read_bytes", "written_bytes", "stalls",
        "skipped", "busy",
    )  # fmt: skip
    of_mixtures = {"experts": step.experts and asdict(step.experts), "router_aux_loss": step.router_aux_loss}
    return {name: getattr(step, name) for name in names} | {
        name: value for name, value in of_mixtures.items() if value is not None
    }
