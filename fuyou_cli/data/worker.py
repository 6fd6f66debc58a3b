"""The process that reads and tokenises: `python -m fuyou_cli.data.worker`, request on stdin, reply on stdout.

It exists so that the datasets library and the tokenizer leave no memory behind in the trainer. The request is one JSON
object (see `rows._request`); the rows go to files in its `out`, and the reply is {"ok": true} or {"error", "hint", "kind"}.

Its memory does not grow with the number of rows: what is tokenised at once is `BATCH_CHARS`, or one sample, and the
tokenizer takes some 100 bytes per character; a line of the file is held whole. A text that may become several rows
(packing: concat) is cut into pieces; any other sample of more than `LARGEST_SAMPLE` characters is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import traceback
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from fuyou_cli.core.errors import UsageError

from .bounded import Watch
from .formats import Chat, Example, Pair, RowError, Text, choose_format, loss_target, mapping_hint, read_example
from .packing import Counts, Row, Sample, has_loss, lay_out
from .preview import decode_pieces
from .reading import pieces_of, read_document, read_rows
from .special import SpecialTexts
from .tokenise import LARGEST_SAMPLE, Tokeniser, load_tokenizer
from .told import reason

BATCH_EXAMPLES = 256  # tokenised together: the tokenizer's threads share a batch
BATCH_CHARS = 1 << 18  # of a batch: it is closed by the sample that reaches this


class RowWriter:
    """Rows appended to tokens.bin and mask.bin, their bounds to offsets.npy, everything synced on close."""

    def __init__(self, directory: Path, stop_ids: frozenset[int]) -> None:
        self._directory = directory
        self._tokens = (directory / "tokens.bin").open("wb")
        self._mask = (directory / "mask.bin").open("wb")
        self._offsets = array("q", [0])
        self._digest = hashlib.sha256()
        self._stop_ids = np.asarray(sorted(stop_ids), np.int32)
        self.label_tokens = self.longest = self.highest_id = 0
        self.learns_to_stop = False

    def append(self, row: Row) -> None:
        tokens, mask = row
        self._digest.update(len(tokens).to_bytes(8, "little"))
        for file, data in ((self._tokens, tokens.tobytes()), (self._mask, mask.tobytes())):
            self._digest.update(data)
            file.write(data)
        self._offsets.append(self._offsets[-1] + len(tokens))
        self.label_tokens += int(np.count_nonzero(mask[1:]))
        self.longest = max(self.longest, len(tokens))
        self.highest_id = max(self.highest_id, int(tokens.max()))
        if not self.learns_to_stop:
            self.learns_to_stop = bool(np.isin(tokens[1:][mask[1:] != 0], self._stop_ids).any())

    @property
    def rows(self) -> int:
        return len(self._offsets) - 1

    @property
    def digest(self) -> str:
        """Of every row's length, tokens and mask, in order."""
        return self._digest.hexdigest()

    @property
    def tokens(self) -> int:
        return self._offsets[-1]

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            with (self._directory / "offsets.npy").open("wb") as file:
                np.save(file, np.frombuffer(self._offsets, np.int64))
                file.flush()
                os.fsync(file.fileno())
        for stream in (self._tokens, self._mask):
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()


def build(request: dict[str, Any]) -> None:
    """Files of the finished rows in `out`: tokens.bin, mask.bin, offsets.npy, summary.json. Raises UsageError."""
    out, directory = Path(request["out"]), Path(request["tokenizer_dir"])
    tokenizer = load_tokenizer(directory, chat_template=request["chat_template"], pad_token=request["pad_token"])
    key = None if request["chat_template"] is None else "tokenizer.chat_template"
    tokeniser = Tokeniser(tokenizer, directory=directory, template_key=key)
    counts, formats = Counts(), dict[int, str]()
    shown: list[Row] = []
    watch = SpecialWatch(SpecialTexts(tokenizer), counts)
    samples = _watched(_samples(request, tokeniser, formats, counts, watch), shown, request["max_seq_len"])
    with RowWriter(out, tokeniser.stop_ids) as writer:
        options = {name: request[name] for name in ("packing", "overlong", "max_seq_len")}
        for row in lay_out(samples, counts=counts, **options):
            writer.append(row)
        _check(writer, counts, formats, request, tokeniser)
    summary = {
        "rows": writer.rows,
        "tokens": writer.tokens,
        "label_tokens": writer.label_tokens,
        "longest_row": writer.longest,
        "highest_token_id": writer.highest_id,
        "pad_id": tokeniser.pad_id,
        "digest": writer.digest,
        "formats": sorted(formats.items()),  # by number of the source: the rows do not depend on where it is
        "preview": decode_pieces(tokenizer, shown[0]) if shown else (),
        **asdict(counts),
    }
    with (out / "summary.json").open("w", encoding="utf-8") as file:
        json.dump(summary, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


class SpecialWatch:
    """Counts samples that have a special token as text; a document that comes in pieces counts once."""

    def __init__(self, texts: SpecialTexts, counts: Counts) -> None:
        self._texts, self._counts, self._seen = texts, counts, False

    def __call__(self, place: str, example: Example) -> None:
        found = None if self._seen else self._texts.first(example)
        if found is not None:
            self._counts.special += 1
            self._counts.special_example = self._counts.special_example or f"{Path(place).name} {found!r}"
        self._seen = isinstance(example, Text) and not example.ends and (self._seen or found is not None)


def _samples(
    request: dict[str, Any], tokeniser: Tokeniser, formats: dict[int, str], counts: Counts, watch: SpecialWatch
) -> Iterator[Sample]:
    timed = request.get("watch")
    clock = Watch(Path(timed["at"]), timed["seconds"]) if timed else None
    whole_documents = bool(request["packing"]) and request["overlong"] in ("truncate", "split")
    for number, source in enumerate(request["sources"]):
        left = source["max_samples"]
        for name in source["files"]:
            if left == 0:
                break
            file = Path(name)
            if file.suffix.lower() == ".txt" and whole_documents:
                examples = _document(file)
                formats[number] = "text"
                loss_target(request["loss_on"], "text")
            else:
                examples = _bounded(_examples(file, source, formats, number), cut=whole_documents)
            for batch in _batches(examples, left):
                counts.run_together += sum(isinstance(example, Pair) and example.runs_together for _, example in batch)
                for place, example in batch:
                    watch(place, example)
                target = loss_target(request["loss_on"], formats[number])
                yield from _encoded(batch, tokeniser, target, clock)
                if left is not None:
                    left -= sum(not isinstance(example, Text) or example.ends for _, example in batch)


def _document(file: Path) -> Iterator[tuple[str, Example]]:
    for text, begins, ends in read_document(file):
        yield str(file), Text(text=text, begins=begins, ends=ends)


def _examples(file: Path, source: dict[str, Any], formats: dict[int, str], number: int) -> Iterator[tuple[str, Example]]:
    """Rows of one file read as the source's format, which its first row decides when it is `auto`."""
    for place, row in read_rows(file):
        try:
            if number not in formats:
                formats[number] = choose_format(source["format"], frozenset(row), source["columns"])
            example = read_example(row, formats[number], source["columns"])
        except RowError as error:
            raise UsageError(f"{place}: {error}", hint=mapping_hint(row)) from error
        yield place, example


def _bounded(examples: Iterator[tuple[str, Example]], *, cut: bool) -> Iterator[tuple[str, Example]]:
    """Examples of a size that may be tokenised at once: long texts in pieces where `cut` says that nothing is lost."""
    for place, example in examples:
        if cut and isinstance(example, Text):
            for text, begins, ends in pieces_of([example.text]):
                yield place, Text(text=text, begins=begins, ends=ends)
        elif (size := _size(example)) > LARGEST_SAMPLE:
            raise UsageError(
                f"{place}: a sample of {size:,} characters, more than {LARGEST_SAMPLE:,}",
                hint="cut it into several rows; data of format text may be longer with dataset.packing: concat",
            )
        else:
            yield place, example


def _size(example: Example) -> int:
    """Characters that the tokenizer will see, near enough."""
    if isinstance(example, Text):
        return len(example.text)
    if isinstance(example, Pair):
        return len(example.prompt) + len(example.completion)
    return sum(_characters(message) for message in example.messages) + _characters(list(example.tools))


def _characters(value: object) -> int:
    if isinstance(value, dict):
        return sum(_characters(key) + _characters(inner) for key, inner in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else len(str(value))


def _batches(examples: Iterator[tuple[str, Example]], limit: int | None) -> Iterator[list[tuple[str, Example]]]:
    batch: list[tuple[str, Example]] = []
    samples = characters = 0
    for placed in examples:
        batch.append(placed)
        characters += _size(placed[1])
        samples += not isinstance(placed[1], Text) or placed[1].ends
        if samples == limit:
            break
        if len(batch) == BATCH_EXAMPLES or characters >= BATCH_CHARS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(batch: list[tuple[str, Example]], tokeniser: Tokeniser, target: str, clock: Watch | None) -> Iterator[Sample]:
    try:
        if clock is not None and isinstance(batch[0][1], Chat):
            rows = _within_time(batch, tokeniser, target, clock)
        else:
            rows = tokeniser.encode([example for _, example in batch], target=target)
    except RowError as error:
        at = batch[error.args[1]][0] if len(error.args) > 1 else _refused_at(batch, tokeniser, target)
        hint = "mend the row, or leave it out; a template or a tokenizer that fails on every row is itself at fault"
        raise UsageError(f"{at}: {error.args[0]}", hint=hint) from error
    for (place, example), (tokens, mask) in zip(batch, rows, strict=True):
        ends = not isinstance(example, Text) or example.ends
        yield Sample(tokens=tokens, mask=mask, place=place, ends=ends)


def _within_time(batch: list[tuple[str, Example]], tokeniser: Tokeniser, target: str, clock: Watch) -> list[Row]:
    """One conversation after the other, each with its time."""
    rows = []
    for number, (place, example) in enumerate(batch):
        try:
            with clock(f"{place}: {tokeniser.template}"):
                rows += tokeniser.encode([example], target=target)
        except RowError as error:
            raise RowError(error.args[0], number) from error
    return rows


def _refused_at(batch: list[tuple[str, Example]], tokeniser: Tokeniser, target: str) -> str:
    """Where the sample is that a tokenizer refuses: of a batch it does not say which."""
    for place, example in batch:
        try:
            tokeniser.encode([example], target=target)
        except RowError:
            return place
    return f"{batch[0][0]} or one of the {len(batch) - 1:,} samples after it"


def _watched(samples: Iterator[Sample], shown: list[Row], max_seq_len: int) -> Iterator[Sample]:
    """The samples unchanged; the first whose labels carry loss within a row is kept to be shown."""
    for sample in samples:
        if not shown and has_loss(sample.mask[:max_seq_len]):
            shown.append((sample.tokens[:max_seq_len], sample.mask[:max_seq_len]))
        yield sample


def _without_loss(counts: Counts) -> str:
    if counts.truncated:
        return "raise dataset.max_seq_len, or check loss_on"
    return "check dataset.train: is `columns` mapped to the right ones, is there text in them, and what says loss_on?"


def _check(writer: RowWriter, counts: Counts, formats: dict[int, str], request: dict[str, Any], tokeniser: Tokeniser) -> None:
    """Refuses data that would train nothing, or never teach the model to stop."""
    limit = f"dataset.max_seq_len is {request['max_seq_len']:,}"
    if counts.samples == 0:
        raise UsageError("the data has no samples", hint="check dataset.train.path and max_samples")
    if writer.label_tokens == 0:
        lost = f"{counts.samples:,} samples, {counts.truncated:,} truncated, {counts.dropped:,} dropped"
        raise UsageError(f"no token of the data carries loss ({lost}; {limit})", hint=_without_loss(counts))
    targets = {loss_target(request["loss_on"], name) for name in formats.values()}
    if targets - {"all"} and not writer.learns_to_stop:
        names = ", ".join(str(number) for number in sorted(tokeniser.stop_ids)) or "none"
        cut = f"{counts.truncated:,} of {counts.samples:,} samples were truncated; {limit}"
        raise UsageError(
            f"the stop token (id {names}) never carries loss: the model would not learn to stop ({cut})",
            hint="raise max_seq_len, or use a chat template that ends every assistant turn with the stop token",
        )


def main() -> int:
    """Serve one request. Libraries may print: their standard output goes to standard error."""
    reply_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.excepthook = partial(_unforeseen, reply_to)
    reply: dict[str, Any]
    try:
        build(json.load(sys.stdin))
        reply = {"ok": True}
    except UsageError as error:
        reply = {"error": error.message, "hint": error.hint, "kind": "usage"}
    except MemoryError:
        reply = {"error": "memory ran out while the data was read", "hint": "lower dataset.num_workers", "kind": "space"}
    except OSError as error:
        kind = "space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "usage"
        reply = {"error": f"the data cannot be read: {reason(error)}", "hint": None, "kind": kind}
    with reply_to:
        json.dump(reply, reply_to)
    return 0


def _unforeseen(reply_to: TextIO, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What nobody expected, in one line, and the rest for whoever debugs."""
    rest = "".join(traceback.format_exception(kind, error, trace))
    with reply_to:
        json.dump({"error": reason(error), "hint": None, "kind": "unforeseen", "trace": rest}, reply_to)


if __name__ == "__main__":
    sys.exit(main())
