"""Reads the sources of a request as tokenised samples. It can go on where an earlier process stopped.

Memory does not grow with the number of rows: at most `BATCH_CHARS` or one sample is tokenised at once, and the tokenizer takes
some 100 bytes per character. A text that may become several rows (packing: concat) is cut into pieces. Any other sample of more
than `LARGEST_SAMPLE` characters is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError

from .data_files import kind_of_rows
from .formats import Chat, Example, RowError, Texts, Tokens, choose_format, loss_target, mapping_hint, read_example
from .holding_back import Part
from .named_sets import is_remote, present
from .packing import Counts, Row, Sample, has_loss, lay_out
from .reading import pieces_of, read_document, read_rows
from .sandbox import Watch, watched
from .tokenise import LARGEST_SAMPLE, Tokeniser

BATCH_EXAMPLES = 256  # examples tokenised together: the tokenizer's threads share a batch
MOST_ROLES = 6  # of messages, that an error lists
BATCH_CHARS = 1 << 18  # characters of a batch: the sample that reaches this closes it

Placed = tuple[str, Example]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Says where reading goes on: behind so many rows of a file of a source, and so many pieces of the row after them."""

    source: int = 0
    file: int = 0
    rows: int = 0
    pieces: int = 0
    samples: int = 0  # of the source, in all its files

    def behind(self, batch: Iterable[Placed]) -> Position:
        """Returns the position behind these examples of the file."""
        rows, pieces, samples = self.rows, self.pieces, self.samples
        for _, example in batch:
            rows, pieces = (rows + 1, 0) if example.ends else (rows, pieces + 1)
            samples += example.ends
        return replace(self, rows=rows, pieces=pieces, samples=samples)


class Reading:
    """Reads the sources of a request as tokenised samples, and collects what is reported about them."""

    def __init__(self, request: dict[str, Any], tokeniser: Tokeniser) -> None:
        self.tokeniser = tokeniser
        self.counts = Counts()
        self.formats: dict[int, str] = {}  # by the source's number
        self._roles: set[str] = set()  # of messages, a few of them
        self.entry_rows: list[int] = []  # rows of each source of a mixture; otherwise one number for all
        self.shown: Row | None = None  # the first sample whose labels carry loss within a row
        self._request = request
        self._cut = request["packing"] == "concat" and request["overlong"] in ("truncate", "split")
        self._has_special = False  # whether the document read in pieces has one: it counts once
        self._part = Part(**request["part"]) if "part" in request else None
        self._seen = 0  # samples of all sources, those of the other part too
        self._watch: Watch | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches what is read and tokenised inside, for rows in the request's `out`. Raises UsageError that names the row."""
        with watched(Path(self._request["out"]).with_name("at"), self._request["seconds"]) as self._watch:
            yield

    def _begin(self, what: str) -> None:
        if self._watch is not None:
            self._watch.on(what)

    @property
    def targets(self) -> set[str]:
        """Returns what carries loss in the sources that were read."""
        return {loss_target(self._request["loss_on"], name) for name in self.formats.values()}

    def rows(self, options: dict[str, Any]) -> Iterator[Row]:
        """Yields the rows of all sources. In a mixture no row has samples of two sources."""
        numbers = list(range(len(self._request["sources"])))
        for group in [[number] for number in numbers] if self._request["mixed"] else [numbers]:
            made = 0
            for row in lay_out(self._samples(group), counts=self.counts, **options):
                made += 1
                yield row
            self.entry_rows.append(made)

    def _samples(self, numbers: list[int]) -> Iterator[Sample]:
        """Yields the tokenised samples of these sources."""
        for first, batch, _ in self.batches(numbers, Position(source=numbers[0])):
            yield from self.made(first, batch)

    def batches(self, numbers: list[int], begin: Position) -> Iterator[tuple[Position, list[Placed], Position]]:
        """Yields what is tokenised together, from `begin` on, between the positions before and behind it."""
        for number in numbers[numbers.index(begin.source) :]:
            at = begin if number == begin.source else Position(source=number)
            source = self._request["sources"][number]
            left = None if source["max_samples"] is None else source["max_samples"] - at.samples
            for place in range(at.file, len(source["files"])):
                if left == 0:
                    break
                if place > at.file:
                    at = replace(at, file=place, rows=0, pieces=0)
                named = Path(source["files"][place])
                with present(named, self._request.get("remote")) as file:
                    if is_remote(named) and not file.stat().st_size:  # nobody here can mend it
                        continue
                    examples = self._examples(file, source, number, at.rows)
                    for batch in _batches(islice(examples, at.pieces, None), left):
                        before, at = at, at.behind(batch)
                        left = left and left - (at.samples - before.samples)
                        yield before, batch, at

    def made(self, first: Position, batch: list[Placed]) -> Iterator[Sample]:
        """Tokenises a batch that begins at `first`, counts it, and yields its samples."""
        longest = self._request["max_seq_len"]
        taken = self._taken(batch, first.source, first.samples)
        target = loss_target(self._request["loss_on"], self.formats[first.source]) if taken else ""
        for place, example in taken:
            self._count(place, example, target)
        for sample in self._encoded(taken, target):
            if self.shown is None and has_loss(sample.mask[:longest]):
                self.shown = sample.tokens[:longest], sample.mask[:longest]
            yield sample

    def _examples(self, file: Path, source: dict[str, Any], number: int, skipped: int) -> Iterator[Placed]:
        """Yields examples of one file behind `skipped` rows with their places, small enough to be tokenised at once.

        With `auto` the first row decides the source's format. Long texts are cut where that loses nothing.
        """
        by_line = source.get("by_line", False)
        self._begin(f"{file}: the beginning of the file")
        if self._cut and not self._request.get("paragraphs") and kind_of_rows(file) == "text" and not by_line:
            self.formats[number] = "text"
            if not skipped:
                yield from ((str(file), piece) for piece in _pieces(read_document(file)))
            return
        for place, row in read_rows(file, skipped=skipped, by_line=by_line):
            self._begin(f"{place}, or what follows it,")
            try:
                if number not in self.formats:
                    self.formats[number] = choose_format(source["format"], frozenset(row), source["columns"])
                example = read_example(row, self.formats[number], source["columns"])
            except RowError as error:
                raise UsageError(f"{place}: {error}", hint=mapping_hint(row)) from error
            if self._cut and self.formats[number] == "text":
                yield from ((place, piece) for piece in _pieces(pieces_of(example.texts())))
            elif example.size > LARGEST_SAMPLE:
                unit = "tokens" if isinstance(example, Tokens) else "characters"
                raise UsageError(
                    f"{place}: the sample has {example.size:,} {unit}, more than {LARGEST_SAMPLE:,}",
                    hint="cut it into several rows; with dataset.packing: concat data of format text may be longer",
                )
            else:
                yield place, example

    def _taken(self, batch: list[Placed], source: int, number: int) -> list[Placed]:
        """Returns the examples of a batch that are in the part asked for. `number`: of the first one's sample in its source."""
        taken = []
        for placed in batch:
            if self._part is None or self._part.takes(source, number):
                taken.append(placed)
            number += placed[1].ends
            self._seen += placed[1].ends
        return taken

    def _count(self, place: str, example: Example, target: str) -> None:
        """Counts what a person should know: texts that run together, and special tokens in a sample's own text."""
        self.counts.run_together += example.runs_together
        self.counts.unanswered += example.answers_nothing(target)
        if isinstance(example, Chat) and len(self._roles) < MOST_ROLES:
            self._roles.update(str(message["role"]) for message in example.messages)
        named = None if self._has_special else self.tokeniser.special_in(example)
        if named:
            self.counts.special += 1
            self.counts.special_example = self.counts.special_example or f"{Path(place).name} {named!r}"
        self._has_special = not example.ends and (self._has_special or named is not None)

    def _encoded(self, batch: list[Placed], target: str) -> Iterator[Sample]:
        if not batch:
            return
        first, example = batch[0]
        self._begin(f"{first}: {self.tokeniser.template if isinstance(example, Chat) else 'tokenising this sample'}")
        try:
            rows = self.tokeniser.encode([example for _, example in batch], target=target)
        except RowError as error:
            if len(batch) > 1:  # a tokenizer does not say which sample it refuses
                for placed in batch:
                    yield from self._encoded([placed], target)
                return
            hint = "correct or remove the row; if every row fails, the template or the tokenizer is wrong"
            raise UsageError(f"{first}: {error}", hint=hint) from error
        for (place, example), (tokens, mask, noted) in zip(batch, rows, strict=True):
            for kind in sorted(noted):
                self.counts.note(kind, Path(place).name)
            yield Sample(tokens=tokens, mask=mask, place=place, ends=example.ends)

    def check(self, label_tokens: int, learns_to_stop: bool) -> None:
        """Refuses data that would train nothing, or never teach the model to stop."""
        counts = self.counts
        has_samples = counts.samples > 0 or label_tokens > 0  # a part may end within its only sample
        limit = f"dataset.max_seq_len is {self._request['max_seq_len']:,}"
        if not has_samples and self._part is not None and self._seen:
            share = f"dataset.eval_fraction: {self._part.fraction:g} of {self._seen:,} samples"
            raise UsageError(
                f"{share} holds none back" if self._part.held else f"{share} leaves none to train on",
                hint="choose another share, or name a file in dataset.eval",
            )
        if not has_samples:
            raise UsageError("the data has no samples", hint="check dataset.train.path and max_samples")
        if label_tokens == 0:
            lost = f"{counts.samples:,} samples, {counts.truncated:,} truncated, {counts.dropped:,} dropped"
            hint = "check dataset.train: does `columns` name the right columns, do they hold text, does loss_on fit?"
            if self.targets & {"assistant", "last_assistant"}:
                roles = ", ".join(map(repr, sorted(self._roles)[:MOST_ROLES]))
                hint = f"only the role 'assistant' carries loss, here are {roles}: check the roles, `train` and loss_on"
            if counts.truncated:
                hint = "increase dataset.max_seq_len, or check loss_on"
            raise UsageError(f"no token of the data carries loss, so nothing would be trained ({lost}; {limit})", hint=hint)
        if not all(self.entry_rows):
            empty = self._request["sources"][self.entry_rows.index(0)]["files"][0]
            hint = "remove the entry, or check its columns, loss_on and max_seq_len"
            raise UsageError(f"{empty}: no token of this entry of the mixture carries loss", hint=hint)
        if self.targets - {"all", "marked"} and not learns_to_stop:
            names = ", ".join(str(number) for number in sorted(self.tokeniser.stop_ids)) or "none"
            cut = f"{counts.truncated:,} of {counts.samples:,} samples were truncated; {limit}"
            raise UsageError(
                f"the stop token (id {names}) never carries loss: the model would not learn to stop ({cut})",
                hint="increase max_seq_len, or use a chat template that ends every assistant turn with the stop token",
            )


def _pieces(pieces: Iterable[tuple[str, bool, bool]]) -> Iterator[Texts]:
    return (Texts(parts=((text, True),), begins=begins, ends=ends) for text, begins, ends in pieces)


def _batches(examples: Iterator[Placed], limit: int | None) -> Iterator[list[Placed]]:
    """Yields what is tokenised together, at most `limit` samples in all. A conversation is alone, because its time is
    limited."""
    batch: list[Placed] = []
    samples = characters = 0
    for place, example in examples:
        if batch and isinstance(example, Chat):
            yield batch
            batch, characters = [], 0
        batch.append((place, example))
        characters += example.size
        samples += example.ends
        if samples == limit:
            break
        if len(batch) == BATCH_EXAMPLES or characters >= BATCH_CHARS or isinstance(example, Chat):
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
