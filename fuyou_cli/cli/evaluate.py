"""Runs `fuyou eval`: the losses of a model that passes through memory, on a recipe's eval sets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import gb, gib
from fuyou_cli.machine import probe

from .console import status_console, write_json, write_result, write_status
from .render.theme import some
from .signals import like_ctrl_c

if TYPE_CHECKING:
    from fuyou_cli.data import Rows
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.choices import Continued, Question
    from fuyou_cli.training.evaluation import Losses
    from fuyou_cli.training.inference import Found
    from fuyou_cli.training.report import EvalReport


@like_ctrl_c()
def run_eval(source: str, recipe: Recipe, *, choices: Path | None, json_output: bool) -> None:
    """Evaluates the model of `source`: a folder or hub name, a run's store, or a run's output folder. With `choices`, on the
    questions of that file and not on the recipe's sets."""
    import torch

    from fuyou_cli.training.steps import device_name, warm_up
    from fuyou_cli.training.streamed_evaluation import open_losses, room_of

    probe.highest_bytes()  # from here on
    if (device := device_name(recipe)) == "cuda" and not torch.cuda.is_available():
        raise UsageError("offload.device: torch finds no CUDA device on this machine", hint="add offload.device=cpu")
    found = _find(source, recipe)
    warm_up(recipe)
    with ExitStack() as stack:
        asked = _Sets(_rows(recipe, found, stack)) if choices is None else _Questions.read(choices, recipe, found)
        budget = recipe.offload.max_memory.cpu.resolve(
            total=probe.memory_limit(), auto=int((probe.memory_available() + probe.process_bytes()) * 0.9)
        )
        room = room_of(
            found, recipe.train, max_len=recipe.dataset.max_seq_len, budget=budget, process=probe.process_bytes(),
            rows=asked.rows, longest=asked.longest,
        )  # fmt: skip
        opened, losses = stack.enter_context(open_losses(found, room, device=device, say=write_status))
        result, lines = asked.told(losses.losses, at_once=room.rows, max_len=recipe.dataset.max_seq_len)
        opened.check()
        moved = {"passes": losses.passes, "read_bytes": opened.read_bytes()}
    parameters = sum(tensor.numel for stage in found.anatomy.stages for tensor in stage.tensors)
    memory = {"budget": budget, "peak": probe.highest_bytes(), "weights": opened.weights.memory}
    if json_output:
        where = {"model": source, "dtype": found.dtype, "parameters": parameters}
        write_json({**where, **result, **moved, "memory": memory})
        return
    for line in lines:
        write_result(line)
    passes, read = moved["passes"], moved["read_bytes"]
    each = f"{read / parameters / passes:.2f} bytes per parameter and pass"
    many = f"{passes} pass{'es' * (passes != 1)}"
    write_status(f"{many}, {gb(read)} read ({each}); {gib(memory['peak'])} of {gib(budget)} RAM")


Told = tuple[dict[str, object], list[str]]  # for JSON, and lines for people


@dataclass(frozen=True, slots=True)
class _Sets:
    """Holds the recipe's sets."""

    sets: dict[str, Rows]

    @property
    def rows(self) -> int:
        return max(map(len, self.sets.values()))

    @property
    def longest(self) -> int:
        return max(rows.summary.longest_row for rows in self.sets.values())

    def told(self, losses: Losses, *, at_once: int, max_len: int) -> Told:
        from fuyou_cli.training.jsonl import finite

        reports = _evaluated(self.sets, losses, at_once=at_once, max_len=max_len)
        as_data = [{key: finite(value) for key, value in asdict(report).items() if key != "step"} for report in reports]
        return {"sets": as_data}, [
            f"{one.name}  loss {one.loss:.6g}  perplexity {one.perplexity:.6g}  {some(one.rows, 'row')}, {one.tokens:,} tokens"
            for one in reports
        ]


@dataclass(frozen=True, slots=True)
class _Questions:
    """Holds questions, and each of their choices as tokens."""

    questions: list[Question]
    sequences: list[Continued]

    @classmethod
    def read(cls, file: Path, recipe: Recipe, found: Found) -> _Questions:
        from fuyou_cli.data.tokenise import load_tokenizer
        from fuyou_cli.training.choices import encoded, read_questions

        questions = read_questions(file)
        tokenizer = load_tokenizer(_tokenizer_dir(recipe, found), chat_template=None, pad_token=None)
        return cls(questions, encoded(questions, lambda text: list(tokenizer.encode(text, add_special_tokens=False))))

    @property
    def rows(self) -> int:
        return len(self.sequences)

    @property
    def longest(self) -> int:
        return max(len(one.ids) for one in self.sequences)

    def told(self, losses: Losses, *, at_once: int, max_len: int) -> Told:
        from fuyou_cli.training.choices import scored

        with _progress(self.rows) as advance:
            score = scored(self.questions, self.sequences, losses, at_once=at_once, max_len=max_len, progress=advance)
        if score.cut:
            write_status(f"note: {some(score.cut, 'choice')} longer than dataset.max_seq_len: the question's beginning is cut")
        line = f"acc {score.acc:.4f}  acc_norm {score.acc_norm:.4f}  {some(score.questions, 'question')}"
        return {"choices": asdict(score)}, [line]


@contextmanager
def _progress(rows: int) -> Iterator[Callable[[int], None]]:
    """Shows how many rows are done; gives what is told of each pass."""
    from rich.progress import Progress

    console = status_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("evaluating", total=rows)
        yield lambda count: progress.advance(task, count)


def _find(source: str, recipe: Recipe) -> Found:
    """Finds the model; one of the hub is fetched, as of a recipe's model."""
    from fuyou_cli.checkpoint.hub import resolve
    from fuyou_cli.core.paths import expanded
    from fuyou_cli.training.inference import find

    from .render.transfer import Transfers

    model, trusted = expanded(source, key="MODEL"), recipe.model.trust_remote_code
    if model.suffix in (".yaml", ".yml"):
        raise UsageError(f"{source} is a recipe, not a model", hint="fuyou eval MODEL RECIPE")
    if not model.is_dir():
        with Transfers(status_console()) as progress:
            model = resolve(source, trust_remote_code=trusted, say=write_status, progress=progress)
    dtype = recipe.precision.compute
    assert dtype != "float16", "a recipe's rules refuse it"
    return find(model, dtype=dtype, attention=recipe.model.attn_implementation, trusted=trusted)


def _rows(recipe: Recipe, found: Found, stack: ExitStack) -> dict[str, Rows]:
    """Returns the sets, tokenised for this model: found where a run has made them, else made in a folder that is removed."""
    from fuyou_cli.training.length import cache_of, evaluation_rows
    from fuyou_cli.training.limits import check_positions, check_tokens, positions_of

    if not (recipe.dataset.eval or recipe.dataset.eval_fraction):
        raise UsageError(
            "the recipe has nothing to evaluate",
            hint="name files in dataset.eval, or set dataset.eval_fraction of dataset.train",
        )
    check_positions(recipe, *positions_of(found.anatomy.model), write_status)
    cache = cache_of(recipe)
    if not cache.is_dir():
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuyou-rows-")))
    write_status("reading and tokenising the data")
    sets = evaluation_rows(recipe, _tokenizer_dir(recipe, found), cache=cache)
    vocabulary = int(found.anatomy.model.get_input_embeddings().weight.shape[0])
    for rows in sets.values():
        check_tokens(recipe, vocabulary, rows.summary)
        for note in rows.summary.notes:
            write_status(f"note: {note}")
    return sets


def _tokenizer_dir(recipe: Recipe, found: Found) -> Path:
    """Returns the folder of the recipe's tokenizer, or of the model's own."""
    from fuyou_cli.checkpoint.hub import resolve

    named = recipe.tokenizer.name_or_path
    return found.folder if named is None else resolve(named, tokenizer_only=True, say=write_status)


def _evaluated(sets: dict[str, Rows], losses: Losses, *, at_once: int, max_len: int) -> list[EvalReport]:
    from fuyou_cli.training.evaluation import evaluated

    names = list(sets)
    options = {"at_once": at_once, "max_len": max_len}
    with _progress(sum(map(len, sets.values()))) as advance:
        return [
            evaluated(name, rows, losses, last=name == names[-1], progress=advance, **options) for name, rows in sets.items()
        ]
