"""Runs `fuyou eval`: the losses of a model that passes through memory, on a recipe's eval sets."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import gb, gib
from fuyou_cli.machine import probe

from .console import status_console, write_json, write_result, write_status
from .signals import like_ctrl_c

if TYPE_CHECKING:
    from fuyou_cli.data import Rows
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.evaluation import Losses
    from fuyou_cli.training.inference import Found
    from fuyou_cli.training.report import EvalReport


@like_ctrl_c()
def run_eval(source: str, recipe: Recipe, *, json_output: bool) -> None:
    """Evaluates the model of `source`: a folder or hub name, a run's store, or a run's output folder."""
    from fuyou_cli.training.steps import device_name, warm_up
    from fuyou_cli.training.streamed_evaluation import open_losses, room_of

    probe.highest_bytes()  # from here on
    device, found = device_name(recipe), _find(source, recipe)
    warm_up(recipe)
    with ExitStack() as stack:
        sets = _rows(recipe, found, stack)
        rows, longest = max(map(len, sets.values())), max(rows.summary.longest_row for rows in sets.values())
        budget = recipe.offload.max_memory.cpu.resolve(
            total=probe.memory_limit(), auto=int((probe.memory_available() + probe.process_bytes()) * 0.9)
        )
        room = room_of(found, recipe, budget=budget, process=probe.process_bytes(), rows=rows, longest=longest)
        opened, losses = stack.enter_context(open_losses(found, room, device=device, say=write_status))
        reports = _evaluated(sets, losses.losses, at_once=room.rows, max_len=recipe.dataset.max_seq_len)
        opened.check()
        moved = {"passes": losses.passes, "read_bytes": opened.read_bytes()}
    parameters = sum(tensor.numel for stage in found.anatomy.stages for tensor in stage.tensors)
    memory = {"budget": budget, "peak": probe.highest_bytes(), "weights": opened.weights.memory}
    if json_output:
        sets_as_data = [{key: value for key, value in asdict(report).items() if key != "step"} for report in reports]
        where = {"model": source, "dtype": found.dtype, "parameters": parameters}
        write_json({**where, "sets": sets_as_data, **moved, "memory": memory})
        return
    for report in reports:
        write_result(_told(report))
    passes, read = moved["passes"], moved["read_bytes"]
    each = f"{read / parameters / passes:.2f} bytes per parameter and pass"
    many = f"{passes} pass{'es' * (passes != 1)}"
    write_status(f"{many}, {gb(read)} read ({each}); {gib(memory['peak'])} of {gib(budget)} RAM")


def _told(report: EvalReport) -> str:
    rows = f"{report.rows:,} row{'s' * (report.rows != 1)}"
    return f"{report.name}  loss {report.loss:.6g}  perplexity {report.perplexity:.6g}  {rows}, {report.tokens:,} tokens"


def _find(source: str, recipe: Recipe) -> Found:
    """Finds the model; one of the hub is fetched, as of a recipe's model."""
    from fuyou_cli.checkpoint.hub import resolve
    from fuyou_cli.core.paths import expanded
    from fuyou_cli.training.inference import find

    from .render.transfer import Transfers

    model, trusted = expanded(source, key="MODEL"), recipe.model.trust_remote_code
    if not model.is_dir():
        with Transfers(status_console()) as progress:
            model = resolve(source, trust_remote_code=trusted, say=write_status, progress=progress)
    dtype = recipe.precision.compute
    assert dtype != "float16", "a recipe's rules refuse it"
    return find(model, dtype=dtype, attention=recipe.model.attn_implementation, trusted=trusted)


def _rows(recipe: Recipe, found: Found, stack: ExitStack) -> dict[str, Rows]:
    """Returns the sets, tokenised for this model: found where a run has made them, else made in a folder that is removed."""
    from fuyou_cli.training.length import cache_of, evaluation_rows
    from fuyou_cli.training.limits import check_positions, check_tokens

    if not (recipe.dataset.eval or recipe.dataset.eval_fraction):
        raise UsageError(
            "the recipe has nothing to evaluate",
            hint="name files in dataset.eval, or set dataset.eval_fraction of dataset.train",
        )
    named = recipe.tokenizer.name_or_path
    tokenizer_dir = found.folder
    if named is not None:
        from fuyou_cli.checkpoint.hub import resolve

        tokenizer_dir = resolve(named, tokenizer_only=True, say=write_status)
    check_positions(recipe, found.anatomy, write_status)
    cache = cache_of(recipe)
    if not cache.is_dir():
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuyou-rows-")))
    write_status("reading and tokenising the data")
    sets = evaluation_rows(recipe, tokenizer_dir, cache=cache)
    for rows in sets.values():
        check_tokens(recipe, found.anatomy, rows.summary)
        for note in rows.summary.notes:
            write_status(f"note: {note}")
    return sets


def _evaluated(sets: dict[str, Rows], losses: Losses, *, at_once: int, max_len: int) -> list[EvalReport]:
    from rich.progress import Progress

    from fuyou_cli.training.evaluation import evaluated

    reports, names = [], list(sets)
    with Progress(console=status_console(), transient=True) as progress:
        task = progress.add_task("evaluating", total=sum(map(len, sets.values())))
        for name, rows in sets.items():
            reports.append(
                evaluated(
                    name, rows, losses, at_once=at_once, max_len=max_len, last=name == names[-1],
                    progress=lambda count: progress.advance(task, count),
                )
            )  # fmt: skip
    return reports
