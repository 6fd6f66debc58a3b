"""Runs `fuyou bench --model`: measures how fast this machine trains a model of given shapes, without weights or data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import folder
from fuyou_cli.machine.scratch import scratch_folder

from .console import result_console, write_status
from .error_screen import like_ctrl_c

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from fuyou_cli.recipe.load import LoadedRecipe
    from fuyou_cli.training.modelbench.measured import Place
    from fuyou_cli.training.modelbench.sweep import Loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBenchOptions:
    """Holds the options of the command line. `model` is a named shape or a recipe; `minutes` is the longest whole run."""

    model: str
    overrides: Sequence[str]
    batch_sizes: tuple[int, ...]  # empty: the recipe's batch size, twice it and four times it
    minutes: float
    directory: Path | None
    json_output: bool
    svg: Path | None
    trace: Path | None


def parsed_batch_sizes(text: str | None) -> tuple[int, ...]:
    """Parses "8,16,32"."""
    try:
        sizes = tuple(int(size) for size in text.split(",")) if text else ()
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise UsageError(f"--batch: {text} is not a list of batch sizes", hint="write it as --batch 8,16,32")
    return sizes


@like_ctrl_c()  # so that its files are removed however it ends
def run_model_bench(options: ModelBenchOptions) -> None:
    """Measures, and prints a table or one JSON object. --svg and --trace write files."""
    from fuyou_cli.training.loggers import Trace
    from fuyou_cli.training.modelbench.recipes import shape_of
    from fuyou_cli.training.modelbench.synthetic import NAMES

    from .render.model_bench_screen import model_bench_json, show_model_bench

    with ExitStack() as stack:
        named = options.model.lower() in NAMES
        places = _store_places(options, named=named)
        scratch = stack.enter_context(scratch_folder(places[0]))
        load, config = shape_of(options.model, options.overrides, scratch, say=write_status)
        trace = None if options.trace is None else stack.enter_context(Trace(options.trace))
        _can_be_written(options.svg)
        points = _swept(options, load, config, _place(places, scratch, trace))
    if options.json_output:
        result_console().file.write(json.dumps(model_bench_json(options.model, points), indent=2) + "\n")
    else:
        show_model_bench(result_console(), options.model, points)
    if options.svg is not None:
        from .render.bench_chart import bench_svg

        options.svg.write_text(bench_svg(options.model, points), encoding="utf-8")
        write_status(f"chart: {options.svg}")
    if trace is not None:
        write_status(trace.summary)


def _swept(options: ModelBenchOptions, load: Loaded, config: PreTrainedConfig, place: Place) -> Any:
    from fuyou_cli.training.modelbench.sweep import sweep

    usual = load([]).recipe.train.batch_size
    sizes = options.batch_sizes or (usual, 2 * usual, 4 * usual)
    return sweep(config, load, place, batch_sizes=sizes, seconds=60 * options.minutes)


@contextmanager
def _store(places: Sequence[Path]) -> Iterator[str]:
    """Makes folders for one store, one on each drive, and removes them at the end."""
    with ExitStack() as stack:
        folders = [stack.enter_context(scratch_folder(place)) for place in places]
        yield f"offload.dir=[{', '.join(map(str, folders))}]"


def _place(places: Sequence[Path], scratch: Path, trace: Any) -> Place:
    from fuyou_cli.advice.planning import machine_here
    from fuyou_cli.core.heap import settle_for_training
    from fuyou_cli.training.modelbench.measured import Place

    settle_for_training()

    def machine(loaded: LoadedRecipe, inspected: Any) -> Any:
        return machine_here(loaded, inspected, say=write_status, measure=True)

    return Place(scratch=scratch, store=partial(_store, places), machine=machine, trace=trace, say=write_status)


def _store_places(options: ModelBenchOptions, *, named: bool) -> tuple[Path, ...]:
    """Names the folders that the store is striped over."""
    if options.directory is not None:
        return (folder(options.directory, key="--dir"),)
    if named:
        return (folder(os.environ.get("FUYOU_OFFLOAD_DIR") or ".", key="FUYOU_OFFLOAD_DIR"),)
    from fuyou_cli.training.modelbench.recipes import loaded

    return loaded(options.model, options.overrides).recipe.offload_directories(os.environ)


def _can_be_written(path: Path | None) -> None:
    """Refuses an unwritable chart file before anything is measured."""
    try:
        if path is not None:
            path.open("ab").close()
    except OSError as error:
        raise UsageError(f"--svg: {path} cannot be written: {error.strerror}", hint="name another file") from error
