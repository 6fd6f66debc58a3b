"""Packs tokenised samples into rows of at most `max_seq_len` tokens, and reads rows from disk.

A sample is (tokens int32 [n], mask uint8 [n]); LABEL in a mask means that the token is a label. Nothing predicts the first
token of a row, so its mask never counts. Where documents are kept apart, BEGINS marks the first token of each; it is no label.

A directory holds tokens.bin (int32), mask.bin (uint8), offsets.npy (int64 [rows + 1]) and summary.json. They are not mapped
into memory: a drive that fails would end the process by a signal.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fuyou_cli.core.disk import unusable
from fuyou_cli.core.errors import UnreadableError, UsageError

Mask = NDArray[np.uint8]
Row = tuple[NDArray[np.int32], Mask]

LABEL, BEGINS = 1, 2  # bits of a mask
NO_LOSS = -100  # the label that torch's cross entropy and every HF model ignore
OPEN_ROWS = 32  # rows that `isolated` fills at a time
TOKENS, TOKEN_BYTES = "tokens.bin", 4
_AT_ONCE = 1 << 16  # rows whose lengths are read at once
NOTES = {  # kind of what was noted of a sample -> what it means
    "nulls": "tool calls or tools have keys of null, which column files fill in: they are left out (to keep one, write "
    "arguments or tools as JSON text)",
    "parts_joined": "content in parts is joined to one text, because the chat template takes no parts",
    "parts_made": "content is a text: the chat template gets it as one part, because it takes parts only",
    "arguments_read": "arguments of tool calls are JSON text: the chat template gets them as objects, because it writes JSON",
    "arguments_written": "arguments of tool calls are objects: the chat template gets JSON text, because it takes no objects",
    "calls_left_out": "the chat template leaves out tool calls: they are not learnt (set tokenizer.chat_template to one that "
    "writes them)",
    "content_left_out": "the chat template leaves out or changes text of the assistant: it is not learnt as it stands",
    "tools_left_out": "the chat template leaves out the tools (set tokenizer.chat_template to one that writes them)",
    "reasoning_left_out": "the chat template leaves out the reasoning of the last answer: it is not learnt",
    "marks_misplaced": "the chat template's {% generation %} marks are not where the answers are, as inside a macro: these "
    "were found by prefixes instead",
    "marks_of_others": "the chat template's {% generation %} marks hold more than the assistant's messages: that is learnt too",
    "marks_missing": "the chat template's {% generation %} marks leave out messages of the assistant: they carry no loss",
    "unasked": "the chat template ignores add_generation_prompt: what it writes before an answer, such as a name, carries no "
    "loss",
    "border": "one token joins the end of the chat template's prompt and the beginning of an answer: it carries no loss",
    "own_start": "the text brings its start token itself: no second one is added",
    "own_end": "the text brings its end token itself: no second one is added",
    "doubled": "a start or end token is doubled, because a message begins or ends with one as text: remove it there",
}


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts what happened to the samples while the rows are made. Always shown."""

    samples: int = 0
    truncated: int = 0  # cut at max_seq_len, the rest lost
    dropped: int = 0  # left out: too long
    split: int = 0  # spread over several rows, nothing lost
    without_loss: int = 0  # rows left out: no label carries loss
    run_together: int = 0  # pairs without white space between prompt and completion
    unanswered: int = 0  # samples with an answer of no text
    special: int = 0  # samples with a special token's name in their text
    special_example: str = ""  # where the first of them is, and its token
    lost: int = 0  # tokens of samples that were truncated or dropped
    longest: int = 0  # tokens of the longest sample, whole
    noted: dict[str, int] = field(default_factory=dict)  # samples by kind: those of `rows.NOTES`, and how masks were found
    noted_at: dict[str, str] = field(default_factory=dict)  # the first of them
    lengths: list[int] = field(default_factory=list)  # samples of at most 1, 2, 4, 8, ... tokens, beyond those before

    def note(self, kind: str, place: str) -> None:
        """Counts a sample of this kind."""
        self.noted[kind] = self.noted.get(kind, 0) + 1
        self.noted_at.setdefault(kind, place)

    def sample(self, size: int) -> None:
        """Counts a whole sample of `size` tokens."""
        self.samples += 1
        self.longest = max(self.longest, size)
        place = max(size - 1, 0).bit_length()
        self.lengths += [0] * (place + 1 - len(self.lengths))
        self.lengths[place] += 1


@dataclass(kw_only=True, slots=True)
class DataSummary(Counts):
    """Describes the tokenised data. `formats` pairs every path of the recipe with its format; `preview` is one decoded
    sample as (text, carries loss) pieces."""

    rows: int
    tokens: int
    label_tokens: int  # labels that carry loss, first tokens of rows excluded
    longest_row: int
    highest_token_id: int
    pad_id: int
    digest: str  # of every row: a resumed run must have the same
    formats: tuple[tuple[str, str], ...]
    preview: tuple[tuple[str, bool], ...]
    entry_rows: tuple[int, ...] = ()  # rows of each entry of a mixture, stored one entry after the other
    never_stops: bool = False  # rows mark their loss themselves, and never on a stop token
    streamed: bool = False  # this is what the first parts hold (`stream`); the others are not made yet

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns what a person should know before a run trains on these rows, one sentence each."""
        together = (
            f"in {self.run_together:,} of {self.samples:,} samples no white space separates prompt and completion, and none "
            "is added (to separate them, end each prompt with a space or a line break)"
        )
        special = (
            f"{self.special:,} {'sample contains' if self.special == 1 else 'samples contain'} special tokens as text, e.g. "
            f"{self.special_example}; they become these special tokens, not plain text (if that is not meant, change the "
            "text)"
        )
        silent = (
            f"in {self.unanswered:,} of {self.samples:,} samples an answer is empty: the model learns to say nothing there (if "
            "that is not meant, remove them)"
        )
        endless = "no stop token carries loss in these rows: the model does not learn from them to stop"
        facts = ((together, self.run_together), (silent, self.unanswered), (special, self.special), (endless, self.never_stops))
        kinds = (
            f"in {self.noted[kind]:,} of {self.samples:,} samples {what}; the first is {self.noted_at[kind]}"
            for kind, what in NOTES.items()
            if kind in self.noted
        )
        return (*(note for note, count in facts if count), *kinds)


class _StoredArray:
    """Reads parts of an array in a file: one without a header, or of numpy's format."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self._path, self._dtype, self._begin = path, np.dtype(dtype), 0
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if path.suffix == ".npy":
                version = np.lib.format.read_magic(file)
                shape, _, found = np.lib.format.read_array_header_1_0(file)
                self._begin = file.tell()
                if (version, found) != ((1, 0), self._dtype) or shape != ((size - self._begin) // found.itemsize,):
                    raise ValueError(f"{path.name} does not hold what its header says")
            self._file = os.dup(file.fileno())
        weakref.finalize(self, _close, self._file)
        self.size, rest = divmod(size - self._begin, self._dtype.itemsize)
        if rest:
            raise ValueError(f"{path.name} ends within an element")

    def part(self, begin: int, end: int) -> NDArray[Any]:
        """Returns the elements from `begin` to `end`, read-only. Raises UsageError for what cannot be read."""
        wanted = (end - begin) * self._dtype.itemsize
        try:
            content = os.pread(self._file, wanted, self._begin + begin * self._dtype.itemsize)
        except OSError as error:
            raise damaged(self._path.parent, error) from error
        if len(content) != wanted:  # of a file that has become shorter
            raise damaged(self._path.parent)
        return np.frombuffer(content, self._dtype)


def _close(file: int) -> None:
    with suppress(OSError):  # of a drive that is gone: nothing was written
        os.close(file)


class Rows:
    """Reads rows when they are asked for; the pages belong to their files, not the process.

    `paths` are the recipe's paths now: found rows may come from files with other names. Every method raises UsageError for rows
    that cannot be read.
    """

    def __init__(self, directory: Path, *, paths: Sequence[str] | None = None) -> None:
        self.directory = directory
        self.fingerprint = directory.name
        try:
            self.summary = _read_summary(directory / "summary.json", paths)
            self._tokens = _StoredArray(directory / TOKENS, np.int32)
            self._mask = _StoredArray(directory / "mask.bin", np.uint8)
            self._offsets = _StoredArray(directory / "offsets.npy", np.int64)
            last = int(self._offsets.part(self._offsets.size - 1, self._offsets.size)[0])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise damaged(directory, error) from error
        if (self._offsets.size - 1, last, self._tokens.size, self._mask.size) != (len(self), *[self.summary.tokens] * 3):
            raise damaged(directory)

    def __len__(self) -> int:
        return self.summary.rows

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Returns the tokens of every row."""
        lengths = np.empty(len(self), np.int64)
        for first in range(0, len(self), _AT_ONCE):
            part = lengths[first : first + _AT_ONCE]
            part[:] = np.diff(self._offsets.part(first, first + len(part) + 1))
        return lengths

    def tokens(self, index: int) -> NDArray[np.int32]:
        """Returns the tokens, int32 [n], read-only."""
        return self._tokens.part(*self._span(index))

    def mask(self, index: int) -> NDArray[np.uint8]:
        """Returns the mask, uint8 [n]: 1 where the token, as a label, carries loss."""
        return self._mask.part(*self._span(index)) & np.uint8(LABEL)

    def documents(self, index: int) -> list[int] | None:
        """Returns the tokens of each document of a row; None if documents are not kept apart."""
        begin, end = self._span(index)
        begins = np.flatnonzero(self._mask.part(begin, end) & BEGINS)
        return np.diff([*begins, end - begin]).tolist() if len(begins) else None

    def _span(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        begin, end = self._offsets.part(index, index + 2).tolist()
        if not 0 <= begin <= end <= self._tokens.size:
            raise damaged(self.directory)
        return begin, end


def _read_summary(file: Path, paths: Sequence[str] | None) -> DataSummary:
    summary = json.loads(file.read_text(encoding="utf-8"))
    summary["formats"] = tuple(
        (f"source {number + 1}" if paths is None else paths[number], name) for number, name in summary["formats"]
    )
    summary["entry_rows"] = tuple(summary.get("entry_rows", ()))
    summary["preview"] = tuple((text, learnt) for text, learnt in summary["preview"])
    return DataSummary(**summary)


def damaged(directory: Path, error: Exception | None = None) -> UsageError:
    """Returns the error for rows that cannot be read because of `error`: damaged, or on a drive that fails."""
    what, hint = f"the tokenised data in {directory}", "remove it and run the same command again"
    if error is not None and isinstance(unreadable := unusable(f"{what} cannot be read", error), UnreadableError):
        return unreadable
    return UsageError(f"{what} is damaged", hint=hint)


class RowSource(Protocol):
    """Gives tokens, mask and documents of a row."""

    def tokens(self, index: int) -> NDArray[np.int32]: ...

    def mask(self, index: int) -> NDArray[np.uint8]: ...

    def documents(self, index: int) -> list[int] | None: ...


class Feed(RowSource, Protocol):
    """Gives rows to train on: `Rows`, or `stream.Stream`."""

    summary: DataSummary


# ---- packing: samples to rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One tokenised sample. `place` says where it came from. `ends` is False for all but the last piece of a document."""

    tokens: NDArray[np.int32]
    mask: Mask
    place: str
    ends: bool = True


def has_loss(mask: Mask) -> bool:
    """Whether any label of the row counts."""
    return bool((mask[1:] & LABEL).any())


def pack(samples: Iterable[Sample], *, packing: str | bool, overlong: str, max_seq_len: int, counts: Counts) -> Iterator[Row]:
    """Yields rows in the order of the samples. Rows without a label that counts are left out and counted.

    With `packing: concat` truncate and split are the same: the stream is cut at row ends and nothing is lost. With `isolated` a
    document without a label that counts is left out, and rows are not in the order of the samples.
    """
    fitting = _fit(samples, packing=packing == "concat", overlong=overlong, max_seq_len=max_seq_len, counts=counts)
    if packing == "concat":
        yield from _learning(concat(fitting, max_seq_len=max_seq_len, counts=counts), counts)
        return
    separate = _learning(((sample.tokens, sample.mask) for sample in fitting), counts)
    yield from isolated(separate, max_seq_len=max_seq_len) if packing else separate


def _learning(rows: Iterable[Row], counts: Counts) -> Iterator[Row]:
    for tokens, mask in rows:
        if has_loss(mask):
            yield tokens, mask
        else:
            counts.without_loss += 1


def _fit(samples: Iterable[Sample], *, packing: bool, overlong: str, max_seq_len: int, counts: Counts) -> Iterator[Sample]:
    whole = 0  # tokens of the document so far
    for sample in samples:
        size = len(sample.tokens)
        whole += size
        if sample.ends:
            counts.sample(whole)
            whole = 0
        if size <= max_seq_len or (packing and overlong in ("truncate", "split")):
            yield sample
        elif overlong == "drop":
            counts.dropped += 1
            counts.lost += size
        elif overlong == "error":
            raise UsageError(
                f"{sample.place}: {size:,} tokens, more than dataset.max_seq_len ({max_seq_len:,})",
                hint="increase max_seq_len, or set dataset.overlong to truncate, drop or split",
            )
        else:
            counts.truncated += overlong == "truncate"
            counts.split += overlong == "split"
            counts.lost += size - max_seq_len if overlong == "truncate" else 0
            for begin in range(0, max_seq_len if overlong == "truncate" else size, max_seq_len):
                end = begin + max_seq_len
                yield Sample(tokens=sample.tokens[begin:end], mask=sample.mask[begin:end], place=sample.place)


def concat(samples: Iterable[Sample], *, max_seq_len: int, counts: Counts) -> Iterator[Row]:
    """Joins the samples into one stream and cuts it into rows of exactly `max_seq_len` tokens; the last may be shorter.

    At a cut the next row's first token loses its label: one label in max_seq_len.
    """
    tokens = np.empty(max_seq_len, np.int32)
    mask = np.empty(max_seq_len, np.uint8)
    filled = 0
    begun = cut = False  # the current document: has tokens in a row; was cut by the end of a row
    for sample in samples:
        used = 0
        while used < len(sample.tokens):
            if filled == max_seq_len:
                yield tokens.copy(), mask.copy()
                filled = 0
                cut |= begun
            step = min(max_seq_len - filled, len(sample.tokens) - used)
            tokens[filled : filled + step] = sample.tokens[used : used + step]
            mask[filled : filled + step] = sample.mask[used : used + step]
            filled, used, begun = filled + step, used + step, True
        if sample.ends:
            counts.split += cut
            begun = cut = False
    if filled:
        yield tokens[:filled].copy(), mask[:filled].copy()


@dataclass(slots=True, eq=False)
class _Filling:
    """A row that has room left, and the tokens in it."""

    documents: list[Row] = field(default_factory=list)
    size: int = 0


def isolated(documents: Iterable[Row], *, max_seq_len: int) -> Iterator[Row]:
    """Puts whole documents into rows of at most `max_seq_len` tokens, each into the fullest row with room for it.

    So many rows are filled at a time; if a document fits in none, the fullest is done.
    """
    filling: list[_Filling] = []
    fullest = attrgetter("size")
    for tokens, mask in documents:
        row = max((row for row in filling if row.size + len(tokens) <= max_seq_len), key=fullest, default=None)
        if row is None:
            if len(filling) == OPEN_ROWS:
                yield _joined(filling.pop(filling.index(max(filling, key=fullest))).documents)
            filling.append(row := _Filling())
        row.documents.append((tokens, mask))
        row.size += len(tokens)
    for row in filling:
        yield _joined(row.documents)


def _joined(documents: list[Row]) -> Row:
    """Returns a row of these documents, with their beginnings marked."""
    tokens, mask = (np.concatenate(parts) for parts in zip(*documents, strict=True))
    ends = np.cumsum([len(part) for part, _ in documents])
    mask[[0, *ends[:-1]]] = BEGINS
    return tokens, mask
