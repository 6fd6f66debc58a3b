"""Shows what a recipe's data becomes: counts, the lengths of samples, and rows with what of them is trained, readable without
colour: a terminal underlines trained text, elsewhere a line of marks runs under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuyou_cli.core.json_files import printable

from .theme import bar, column, encodable, heading, pairs, percent, say, show, some, symbols

if TYPE_CHECKING:
    from fuyou_cli.training.shown_data import DataPreview, ShownRow

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
