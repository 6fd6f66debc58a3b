"""Runs `fuyou data`: makes the rows that a run would train on, as a run makes them, and shows counts, the lengths of samples,
and rows with what of them is trained, readable without colour: a terminal underlines trained text, elsewhere a line of marks
runs under it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, count, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuyou_cli.checkpoint.hub import Hub, Progress
from fuyou_cli.core.disk import existing
from fuyou_cli.core.json_files import printable
from fuyou_cli.core.paths import scratch_in
from fuyou_cli.data.sources import find_sources, is_read_whole
from fuyou_cli.training.length import Epoch, cache_of, evaluation_rows, evaluation_sets, fed, mixture_of, steps_of
from fuyou_cli.training.numerics import usual_numerics

from .console import result_console, status_console, write_json, write_status
from .error_screen import like_ctrl_c
from .render.progress import TransferDisplay
from .render.theme import bar, column, encodable, heading, pairs, percent, say, show, some, symbols

if TYPE_CHECKING:
    from fuyou_cli.data.rows import DataSummary, Feed
    from fuyou_cli.data.sources import Source
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.spec.plan import TypicalStep

Pieces = Sequence[tuple[str, bool]]  # texts, and whether they are trained


@like_ctrl_c()  # so that the process that tokenises ends too
def run_data(recipe: Recipe, *, number: int, json_output: bool) -> None:
    """Shows counts, lengths and the first `number` rows of training."""
    with TransferDisplay(status_console()) as progress:
        shown = preview(recipe, number, whole=json_output, say=write_status, progress=progress)
    if json_output:
        write_json(shown.as_data())
    else:
        show_data(result_console(), shown)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRow:
    """Holds one row, decoded. `documents`: of each document that is kept apart, or of the whole row."""

    row: int  # from 0
    tokens: int
    trained: int
    documents: Sequence[Pieces]

    def as_data(self) -> dict[str, Any]:
        """Returns it for JSON."""
        documents = [[{"text": text, "trained": trained} for text, trained in document] for document in self.documents]
        return {"row": self.row, "tokens": self.tokens, "label_tokens": self.trained, "documents": documents}


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingShares:
    """Says how much of what a typical step computes is padding. Shares of all tokens, but for `step_tokens`."""

    step_tokens: int  # without padding
    end_to_end: float  # if rows lie end to end, as for most models
    padded: float  # of a model that cannot keep rows apart: each micro-batch is as wide as its longest row


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPreview:
    """Holds what is told about a recipe's data."""

    recipe: Recipe
    summary: DataSummary
    sets: dict[str, DataSummary]  # to evaluate
    steps: int  # of the run
    sources: Sequence[Source]  # of training, then of the sets to evaluate
    notes: Sequence[str]  # on how often rows are seen, where texts are cut, and what is not packed
    mixture: str | None
    padding: PaddingShares | None  # None: all rows are whole
    shown: Sequence[ShownRow]

    def as_data(self) -> dict[str, Any]:
        """Returns it for JSON."""
        left_out, of_a_set = ("preview", "pad_id", "digest", "highest_token_id", "formats"), ("rows", "tokens", "label_tokens")
        return {
            **{name: value for name, value in asdict(self.summary).items() if name not in left_out},
            "formats": [{"path": path, "format": name} for path, name in self.summary.formats],
            "files": [
                {"path": source.entry.path, "files": list(map(str, source.files)), "skipped": list(map(str, source.skipped))}
                for source in self.sources
            ],
            "notes": [*self.summary.notes, *self.notes],
            "steps": self.steps,
            "padding": None if self.padding is None else asdict(self.padding),
            "eval": {name: {key: getattr(source, key) for key in of_a_set} for name, source in self.sets.items()},
            "shown": [row.as_data() for row in self.shown],
        }


def preview(recipe: Recipe, number: int, *, whole: bool, say: Callable[[str], None], progress: Progress) -> DataPreview:
    """Looks at the data of a recipe, and at the first `number` rows of training. `whole`: all of each document."""
    with _folder(recipe, say) as cache:
        tokenizer_dir = Hub(recipe, say=say, progress=progress).tokenizer_alone()
        say("reading and tokenising the data")
        rows, sampler = fed(recipe, tokenizer_dir, cache=cache, check=lambda summary: None, say=say)
        sets = evaluation_rows(recipe, tokenizer_dir, cache=cache, say=say)
        steps = steps_of(recipe, rows.summary.rows)
        order = chain.from_iterable(map(sampler.batch, count()))
        seen_often = sampler.note(steps, recipe.train.epochs)
        return DataPreview(
            recipe=recipe,
            summary=rows.summary,
            sets={name: rows.summary for name, rows in sets.items()},
            steps=steps,
            sources=[
                source for section in (recipe.dataset, *evaluation_sets(recipe).values()) for source in find_sources(section)
            ],
            notes=[*([seen_often] if seen_often else []), *_cuts(recipe)],
            mixture=mixture_of(recipe, sampler, steps),
            padding=_padding(recipe, Epoch.of(rows)),
            shown=_decoded(recipe, tokenizer_dir, rows, list(islice(order, min(number, rows.summary.rows))), whole=whole),
        )


@contextmanager
def _folder(recipe: Recipe, say: Callable[[str], None]) -> Iterator[Path]:
    """Gives the folder of the recipe's rows, if a run has made it; else one that is removed, on the same disk: the usual
    folder for temporary files may be memory."""
    if (cache := cache_of(recipe)).is_dir():
        yield cache
        return
    place = existing(cache.parent)
    if not os.access(place, os.W_OK | os.X_OK):
        place = Path(tempfile.gettempdir())
        say(f"note: rows are written to {place}, because {existing(cache.parent)} cannot be written")
    key = "output_dir" if recipe.dataset.cache_dir is None else "dataset.cache_dir"
    with scratch_in(place, what=key, hint="name another folder") as folder:
        yield folder


def _cuts(recipe: Recipe) -> Iterator[str]:
    """Says where .txt files are cut, and that sets to evaluate are not packed."""
    sets, packing = list(evaluation_sets(recipe).values()), recipe.dataset.packing
    named = [(find_sources(section), is_read_whole(section)) for section in (recipe.dataset, *sets)]
    for whole, what in ((True, "is one document"), (False, "is cut at blank lines: each paragraph is a sample")):
        sources = [source for files, is_whole in named for source in files if is_whole is whole and source.has_paragraphs]
        for path in dict.fromkeys(source.entry.path for source in sources):
            yield f"{path} {what}"
    if packing and (sets or recipe.dataset.eval_fraction):
        yield f"dataset.packing={packing} is for rows to train on: each sample to evaluate is a row of its own"


def _padding(recipe: Recipe, epoch: Epoch) -> PaddingShares | None:
    """Finds what a typical step holds, with micro-batches as they usually are: a plan may choose others."""
    from ..data.batches import typical_step

    shares: list[TypicalStep] = []
    for apart in (True, False):
        numerics = usual_numerics(recipe, apart=apart)
        if (typical := typical_step(epoch.lengths, numerics)) is None:
            return None
        shares.append(typical)
    end_to_end, padded = (1 - typical.tokens / typical.computed for typical in shares)
    return PaddingShares(step_tokens=shares[0].tokens, end_to_end=end_to_end, padded=padded)


def _decoded(recipe: Recipe, tokenizer_dir: Path, rows: Feed, chosen: Sequence[int], *, whole: bool) -> list[ShownRow]:
    """Decodes rows; of each document the first tokens, unless it is to be shown `whole`."""
    if not chosen:
        return []
    from fuyou_cli.data.tokenise import PREVIEW_TOKENS, decode_pieces, load_tokenizer  # a run does so in another process

    tokenizer = load_tokenizer(tokenizer_dir, chat_template=None, pad_token=recipe.tokenizer.pad_token)
    shown = []
    for row in chosen:
        tokens, mask = rows.tokens(row), rows.mask(row)
        bounds = pairwise(accumulate(rows.documents(row) or [len(tokens)], initial=0))
        most = len(tokens) if whole else PREVIEW_TOKENS
        documents = [decode_pieces(tokenizer, (tokens[a:b], mask[a:b]), at_most=most) for a, b in bounds]
        shown.append(ShownRow(row=row, tokens=len(tokens), trained=int(mask[1:].sum()), documents=documents))
    return shown


# ---- the screen ------------------------------------------------------------------------------------------------------

_BAR = 30  # columns
_WAYS = {
    "marks": "the chat template's {% generation %} marks",
    "prefixes": "comparing what the chat template makes of prefixes",
}
_DOCUMENTS = 3  # of a row that are shown


def show_data(console: Console, seen: DataPreview) -> None:
    """Prints counts, a histogram and the decoded rows, in the order of training."""
    heading(console, "Data", "the first part; a run makes the others while it trains" if seen.summary.streamed else "")
    pairs(console, [*_made(seen), *_left_out(seen), *_used(seen)])
    for note in (*seen.summary.notes, *seen.notes):
        say(console, f"note: {note}", indent=2)
    _show_lengths(console, seen)
    for row in seen.shown:
        _show_row(console, row)
    if seen.shown:
        show_key(console)


def _made(seen: DataPreview) -> Iterator[tuple[str, str]]:
    summary, packing = seen.summary, seen.recipe.dataset.packing
    formats = ", ".join(f"{path} ({name})" for path, name in summary.formats)
    yield "read", f"{some(summary.samples, 'sample')} of {formats}"
    for source in seen.sources:
        if source.choice is not None:
            yield "files", source.choice
    if ways := [f"{some(summary.noted[way], 'sample')} by {what}" for way, what in _WAYS.items() if way in summary.noted]:
        yield "masks", f"of {' and of '.join(ways)}"
    packed = f"packing: {packing}" if packing else "a sample each"
    yield "rows", f"{summary.rows:,} ({packed}), on average {summary.tokens / summary.rows:,.0f} tokens"
    yield "tokens", f"{summary.tokens:,}, trained {summary.label_tokens:,} ({percent(summary.label_tokens, summary.tokens)})"


def _left_out(seen: DataPreview) -> Iterator[tuple[str, str]]:
    """Says what was cut or dropped, and why."""
    summary, dataset = seen.summary, seen.recipe.dataset
    longer = f"longer than max_seq_len {dataset.max_seq_len:,}"
    if summary.truncated:
        yield "truncated", f"{some(summary.truncated, 'sample')} {longer}: {some(summary.lost, 'token')} lost"
    if summary.dropped:
        yield "dropped", f"{some(summary.dropped, 'sample')} {longer}: {some(summary.lost, 'token')} lost"
    if summary.split:
        why = "at the end of a row" if dataset.packing == "concat" else longer
        then = "each part is a document of its own" if dataset.packing == "isolated" else "continued in another row"
        yield "split", f"{some(summary.split, 'sample')} {why}, {then}"
    if summary.without_loss:
        yield (
            "left out",
            f"{some(summary.without_loss, 'document' if dataset.packing == 'isolated' else 'row')} in which nothing is trained",
        )
    if not (summary.truncated or summary.dropped or summary.without_loss):
        yield "left out", "nothing"


def _used(seen: DataPreview) -> Iterator[tuple[str, str]]:
    batch = seen.recipe.train.batch_size
    epochs = f"{seen.steps * batch / seen.summary.rows:,.2f}".rstrip("0").rstrip(".")
    seen_times = "of a stream" if seen.summary.streamed else f"{epochs} epoch{'s' * (epochs != '1')}"
    typically = "" if seen.padding is None else f", typically {seen.padding.step_tokens:,} tokens"
    yield "steps", f"{seen.steps:,} of {some(batch, 'row')}{typically}: {seen_times}"
    if seen.padding is not None:
        least, most, of = seen.padding.end_to_end, seen.padding.padded, "of what a step computes"
        if seen.recipe.dataset.packing:
            yield "padding", f"{most:.0%} {of}"
        else:
            yield "padding", f"{least:.0%} {of}, rows end to end; {most:.0%} with a model that cannot keep rows apart"
    if seen.mixture:
        yield "mixture", seen.mixture
    for name, evaluated in seen.sets.items():
        yield (
            "eval",
            f"{name}: {some(evaluated.rows, 'row')}, {evaluated.tokens:,} tokens, {evaluated.label_tokens:,} of them count",
        )


def _show_lengths(console: Console, seen: DataPreview) -> None:
    """Draws how many samples have how many tokens, before anything is cut."""
    shapes, lengths, limit = symbols(console), seen.summary.lengths, seen.recipe.dataset.max_seq_len
    heading(console, "Tokens of a sample", f"the longest has {seen.summary.longest:,}, before anything is cut")
    table = Table.grid(padding=(0, 2, 0, 0))
    column(table, right=True)
    column(table)
    column(table, right=True)
    column(table, right=True)
    column(table, style="dim")
    first = next((place for place, samples in enumerate(lengths) if samples), 0)
    for place, samples in list(enumerate(lengths))[first:]:
        least, most = (1 << place >> 1) + 1 if place else 0, 1 << place
        beyond = f"> {limit:,}" if least > limit else ""
        share = bar(samples / max(lengths), _BAR, shapes)
        table.add_row(f"{least:,} - {most:,}", share, f"{samples:,}", percent(samples, seen.summary.samples), beyond)
    show(console, table, indent=2)


def _show_row(console: Console, row: ShownRow) -> None:
    apart = f", {len(row.documents)} documents that do not see each other" if len(row.documents) > 1 else ""
    heading(console, f"Row {row.row + 1:,}", f"{some(row.tokens, 'token')}, {row.trained:,} trained{apart}")
    for number, pieces in enumerate(row.documents[:_DOCUMENTS], start=1):
        if len(row.documents) > 1:
            say(console, f"document {number}", style="dim", indent=2)
        show_pieces(console, pieces)
    if (more := len(row.documents) - _DOCUMENTS) > 0:
        say(console, f"... {some(more, 'document')} more ...", style="dim", indent=2)


# ---- a sample --------------------------------------------------------------------------------------------------------


MAX_LINES = 24  # of the sample; a longer one loses its middle
_TRAINED = "bold underline"


def show_sample(console: Console, pieces: Sequence[tuple[str, bool]]) -> None:
    """Prints (text, in_loss) pieces in order, without the middle of a long sample."""
    trained = sum(len(text) for text, in_loss in pieces if in_loss)
    heading(console, "One sample", f"{trained:,} of {sum(len(text) for text, _ in pieces):,} characters are trained")
    show_pieces(console, pieces)
    show_key(console)


def show_pieces(console: Console, pieces: Sequence[tuple[str, bool]]) -> None:
    """Prints the pieces alone."""
    shapes, styled = symbols(console), _is_styled(console)
    sample = Text()
    for text, in_loss in pieces:
        plain = encodable(printable(text.replace("\t", "    ")), console)
        if in_loss:  # otherwise a trained line end is invisible
            plain = plain.replace("\n", f"{shapes.newline}\n")
        sample.append(plain, style=_TRAINED if in_loss else "dim")
    lines = list(sample.wrap(console, max(console.width - 6, 8), overflow="fold"))
    half, left_out = MAX_LINES // 2, len(lines) - MAX_LINES
    for number, line in enumerate(lines):
        if left_out > 0 and half <= number < len(lines) - half:
            if number == half:
                say(console, f"... {left_out:,} lines left out ...", style="dim", indent=4)
            continue
        show(console, line, indent=4)
        if not styled and (marks := _marks(line, shapes.mark)):
            show(console, Text(marks), indent=4)


def show_key(console: Console) -> None:
    """Says how trained text is shown."""
    mark = symbols(console).mark * 3
    under = ("underlined", "bold underline") if _is_styled(console) else f"{mark} under text"
    say(console, Text.assemble(under, ": trained; the rest is context only"), indent=2)


def _is_styled(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _marks(line: Text, mark: str) -> str:
    """Draws a mark under every trained cell; returns nothing if no cell is trained."""
    marks = ""
    for span in sorted(line.spans):
        if span.style == _TRAINED:
            marks = marks.ljust(cell_len(line.plain[: span.start])) + mark * cell_len(line.plain[span.start : span.end])
    return marks
