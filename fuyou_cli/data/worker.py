"""The process that reads and tokenises: `python -m fuyou_cli.data.worker`, request on stdin, reply on stdout.

It exists so that the tokenizer leaves no memory behind in the trainer, and so that a chat template can be ended. The request
is one JSON object (see `cache`); the rows go to files in its `out`, and the reply is {"ok": true} or {"error", "hint", "kind"}.

One straight way: read (`reading`) -> examples (`formats`) -> tokens (`tokenise`) -> rows (`packing`) -> files. Its memory does
not grow with the number of rows: what is tokenised at once is `BATCH_CHARS`, or one sample, and the tokenizer takes some
100 bytes per character. A text that may become several rows (packing: concat) is cut into pieces; any other sample of more
than `LARGEST_SAMPLE` characters is refused.
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
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from fuyou_cli.core.errors import UsageError

from .formats import Chat, Example, Pair, RowError, Text, choose_format, loss_target, mapping_hint, read_example
from .packing import Counts, Row, Sample, has_loss, lay_out
from .reading import pieces_of, read_document, read_rows
from .sandbox import TimeLimit, reason
from .special import SpecialTokens
from .tokenise import LARGEST_SAMPLE, Tokeniser, decode_pieces, load_tokenizer

BATCH_EXAMPLES = 256  # tokenised together: the tokenizer's threads share a batch
BATCH_CHARS = 1 << 18  # of a batch: it is closed by the sample that reaches this

Batch = list[tuple[str, Example]]  # each with its place


class RowWriter:
    """Rows appended to tokens.bin and mask.bin, their bounds to offsets.npy, everything synced on close."""

    def __init__(self, directory: Path, stop_ids: frozenset[int]) -> None:
        self._directory = directory
        self._tokens = (directory / "tokens.bin").open("wb")
        self._mask = (directory / "mask.bin").open("wb")
        self._offsets = array("q", [0])
        self._digest = hashlib.sha256()
        self._stop_ids = np.asarray(sorted(stop_ids), np.int32)
        self.label_tokens = self._longest = self._highest_id = 0
        self.learns_to_stop = False

    def append(self, row: Row) -> None:
        tokens, mask = row
        self._digest.update(len(tokens).to_bytes(8, "little"))
        for file, data in ((self._tokens, tokens.tobytes()), (self._mask, mask.tobytes())):
            self._digest.update(data)
            file.write(data)
        self._offsets.append(self._offsets[-1] + len(tokens))
        self.label_tokens += int(np.count_nonzero(mask[1:]))
        self._longest = max(self._longest, len(tokens))
        self._highest_id = max(self._highest_id, int(tokens.max()))
        if not self.learns_to_stop:
            self.learns_to_stop = bool(np.isin(tokens[1:][mask[1:] != 0], self._stop_ids).any())

    def summary(self) -> dict[str, Any]:
        """Describes the rows; the digest is of every row's length, tokens and mask, in order."""
        return {
            "rows": len(self._offsets) - 1,
            "tokens": self._offsets[-1],
            "label_tokens": self.label_tokens,
            "longest_row": self._longest,
            "highest_token_id": self._highest_id,
            "digest": self._digest.hexdigest(),
        }

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
    """Writes the finished rows to `out`: tokens.bin, mask.bin, offsets.npy, summary.json. Raises UsageError."""
    out, directory = Path(request["out"]), Path(request["tokenizer_dir"])
    tokenizer = load_tokenizer(directory, chat_template=request["chat_template"], pad_token=request["pad_token"])
    key = None if request["chat_template"] is None else "tokenizer.chat_template"
    tokeniser = Tokeniser(tokenizer, directory=directory, template_key=key)
    counts, formats = Counts(), dict[int, str]()
    shown: list[Row] = []
    samples = _first_shown(_samples(request, tokeniser, formats, counts), shown, request["max_seq_len"])
    with RowWriter(out, tokeniser.stop_ids) as writer:
        options = {name: request[name] for name in ("packing", "overlong", "max_seq_len")}
        for row in lay_out(samples, counts=counts, **options):
            writer.append(row)
        _check(writer, counts, formats, request, tokeniser)
    summary = {
        **writer.summary(),
        "pad_id": tokeniser.pad_id,
        "formats": sorted(formats.items()),  # by number of the source: the rows do not depend on where it is
        "preview": decode_pieces(tokenizer, shown[0]) if shown else (),
        **asdict(counts),
    }
    with (out / "summary.json").open("w", encoding="utf-8") as file:
        json.dump(summary, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def _samples(request: dict[str, Any], tokeniser: Tokeniser, formats: dict[int, str], counts: Counts) -> Iterator[Sample]:
    """Yields the tokenised samples of all sources; `formats` gets the format of each by its number."""
    timed = request.get("watch")
    limit = TimeLimit(Path(timed["at"]), timed["seconds"]) if timed else None
    special = SpecialTokens(tokeniser.tokenizer, counts)
    cut = bool(request["packing"]) and request["overlong"] in ("truncate", "split")
    for number, source in enumerate(request["sources"]):
        left = source["max_samples"]
        for name in source["files"]:
            if left == 0:
                break
            for batch in _batches(_examples(Path(name), source, formats, number, cut=cut), left):
                target = loss_target(request["loss_on"], formats[number])
                for place, example in batch:
                    special.count(place, example)
                    counts.run_together += isinstance(example, Pair) and example.runs_together
                    left = left and left - _ends(example)
                yield from _encoded(batch, tokeniser, target, limit)


def _examples(
    file: Path, source: dict[str, Any], formats: dict[int, str], number: int, *, cut: bool
) -> Iterator[tuple[str, Example]]:
    """Yields examples of one file with their places, of a size that may be tokenised at once.

    The first row decides the source's format when it is `auto`. With `cut` long texts come in pieces: nothing is lost."""
    if cut and file.suffix.lower() == ".txt":
        formats[number] = "text"
        for text, begins, ends in read_document(file):
            yield str(file), Text(text=text, begins=begins, ends=ends)
        return
    for place, row in read_rows(file):
        try:
            if number not in formats:
                formats[number] = choose_format(source["format"], frozenset(row), source["columns"])
            example = read_example(row, formats[number], source["columns"])
        except RowError as error:
            raise UsageError(f"{place}: {error}", hint=mapping_hint(row)) from error
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
    return sum(map(len, example.texts()))


def _ends(example: Example) -> bool:
    return not isinstance(example, Text) or example.ends


def _batches(examples: Iterator[tuple[str, Example]], limit: int | None) -> Iterator[Batch]:
    """Yields what is tokenised together, up to `limit` samples in all; a conversation is alone, for its time is limited."""
    batch: Batch = []
    samples = characters = 0
    for place, example in examples:
        batch.append((place, example))
        characters += _size(example)
        samples += _ends(example)
        if samples == limit:
            break
        if len(batch) == BATCH_EXAMPLES or characters >= BATCH_CHARS or isinstance(example, Chat):
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(batch: Batch, tokeniser: Tokeniser, target: str, limit: TimeLimit | None) -> Iterator[Sample]:
    first, example = batch[0]
    timed = limit is not None and isinstance(example, Chat)
    try:
        with limit(f"{first}: {tokeniser.template}") if limit is not None and timed else nullcontext():
            rows = tokeniser.encode([example for _, example in batch], target=target)
    except RowError as error:
        if len(batch) > 1:  # a tokenizer does not say which of them it refuses
            for placed in batch:
                yield from _encoded([placed], tokeniser, target, limit)
            return
        hint = "mend the row, or leave it out; a template or a tokenizer that fails on every row is itself at fault"
        raise UsageError(f"{first}: {error}", hint=hint) from error
    for (place, example), (tokens, mask) in zip(batch, rows, strict=True):
        yield Sample(tokens=tokens, mask=mask, place=place, ends=_ends(example))


def _first_shown(samples: Iterator[Sample], shown: list[Row], max_seq_len: int) -> Iterator[Sample]:
    """Yields the samples unchanged; the first whose labels carry loss within a row is kept to be shown."""
    for sample in samples:
        if not shown and has_loss(sample.mask[:max_seq_len]):
            shown.append((sample.tokens[:max_seq_len], sample.mask[:max_seq_len]))
        yield sample


def _check(writer: RowWriter, counts: Counts, formats: dict[int, str], request: dict[str, Any], tokeniser: Tokeniser) -> None:
    """Refuses data that would train nothing, or never teach the model to stop."""
    limit = f"dataset.max_seq_len is {request['max_seq_len']:,}"
    if counts.samples == 0:
        raise UsageError("the data has no samples", hint="check dataset.train.path and max_samples")
    if writer.label_tokens == 0:
        lost = f"{counts.samples:,} samples, {counts.truncated:,} truncated, {counts.dropped:,} dropped"
        hint = "check dataset.train: is `columns` mapped to the right ones, is there text in them, and what says loss_on?"
        if counts.truncated:
            hint = "raise dataset.max_seq_len, or check loss_on"
        raise UsageError(f"no token of the data carries loss ({lost}; {limit})", hint=hint)
    targets = {loss_target(request["loss_on"], name) for name in formats.values()}
    if targets - {"all"} and not writer.learns_to_stop:
        names = ", ".join(str(number) for number in sorted(tokeniser.stop_ids)) or "none"
        cut = f"{counts.truncated:,} of {counts.samples:,} samples were truncated; {limit}"
        raise UsageError(
            f"the stop token (id {names}) never carries loss: the model would not learn to stop ({cut})",
            hint="raise max_seq_len, or use a chat template that ends every assistant turn with the stop token",
        )


def main() -> int:
    """Serves one request. Libraries may print: their standard output goes to standard error."""
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
    """Tells what nobody expected in one line, and the rest for whoever debugs."""
    rest = "".join(traceback.format_exception(kind, error, trace))
    with reply_to:
        json.dump({"error": reason(error), "hint": None, "kind": "unforeseen", "trace": rest}, reply_to)


if __name__ == "__main__":
    sys.exit(main())
