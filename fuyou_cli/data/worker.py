"""Reads and tokenises in its own process: `python -m fuyou_cli.data.worker`, request on stdin, reply on stdout.

With a process of its own, the tokenizer leaves no memory behind in the trainer, and a chat template can be ended. The request
is one JSON object (see `cache`). The rows go to files in its `out`. The reply is {"ok": true} or {"error", "hint", "kind"}; an
unexpected error is one line.

Data goes one way: read (`reading`) -> examples (`formats`) -> tokens (`tokenise`) -> rows (`packing`) -> files. Memory does not
grow with the number of rows: at most `BATCH_CHARS` or one sample is tokenised at once, and the tokenizer takes some 100 bytes
per character. A text that may become several rows (packing: concat) is cut into pieces. Any other sample of more than
`LARGEST_SAMPLE` characters is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from fuyou_cli.core.errors import UsageError

from .data_files import kind_of_rows
from .formats import Chat, Example, RowError, Texts, Tokens, choose_format, loss_target, mapping_hint, read_example
from .holding_back import Part
from .packing import LABEL, Counts, Row, Sample, has_loss, lay_out
from .reading import pieces_of, read_document, read_rows
from .sandbox import reason, time_limit
from .tokenise import LARGEST_SAMPLE, Tokeniser, decode_pieces, load_tokenizer

BATCH_EXAMPLES = 256  # examples tokenised together: the tokenizer's threads share a batch
BATCH_CHARS = 1 << 18  # characters of a batch: the sample that reaches this closes it

Placed = tuple[str, Example]


def build(request: dict[str, Any]) -> None:
    """Writes the finished rows to `out`: tokens.bin, mask.bin, offsets.npy, summary.json. Raises UsageError."""
    out, directory = Path(request["out"]), Path(request["tokenizer_dir"])
    tokenizer = load_tokenizer(directory, chat_template=request["chat_template"], pad_token=request["pad_token"])
    key = None if request["chat_template"] is None else "tokenizer.chat_template"
    reading = _Reading(request, Tokeniser(tokenizer, directory=directory, template_key=key))
    options = {name: request[name] for name in ("packing", "overlong", "max_seq_len")}
    summary, learns_to_stop = _write(reading.rows(options), out, reading.tokeniser.stop_ids)
    reading.check(summary["label_tokens"], learns_to_stop)
    summary |= {
        "pad_id": reading.tokeniser.pad_id,
        "never_stops": not learns_to_stop and "marked" in reading.targets,
        "entry_rows": reading.entry_rows,
        "formats": sorted(reading.formats.items()),  # by the source's number: the rows do not depend on its path
        "preview": decode_pieces(tokenizer, reading.shown) if reading.shown else (),
        **asdict(reading.counts),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")
    for file in out.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


def _write(rows: Iterable[Row], out: Path, stop_ids: frozenset[int]) -> tuple[dict[str, Any], bool]:
    """Writes the rows and returns their description, and whether any label is a stop token. The digest covers every row's
    length, tokens and mask, in order."""
    offsets, digest, stops = array("q", [0]), hashlib.sha256(), np.asarray(sorted(stop_ids), np.int32)
    label_tokens = longest = highest_id = 0
    learns_to_stop = False
    with (out / "tokens.bin").open("wb") as tokens_file, (out / "mask.bin").open("wb") as mask_file:
        for tokens, mask in rows:
            digest.update(len(tokens).to_bytes(8, "little"))
            for file, data in ((tokens_file, tokens.tobytes()), (mask_file, mask.tobytes())):
                digest.update(data)
                file.write(data)
            offsets.append(offsets[-1] + len(tokens))
            learnt = tokens[1:][mask[1:] & LABEL != 0]
            label_tokens += len(learnt)
            longest = max(longest, len(tokens))
            highest_id = max(highest_id, int(tokens.max()))
            learns_to_stop = learns_to_stop or bool(np.isin(learnt, stops).any())
    np.save(out / "offsets.npy", np.frombuffer(offsets, np.int64))
    return {
        "rows": len(offsets) - 1,
        "tokens": offsets[-1],
        "label_tokens": label_tokens,
        "longest_row": longest,
        "highest_token_id": highest_id,
        "digest": digest.hexdigest(),
    }, learns_to_stop


class _Reading:
    """Reads the sources of a request as tokenised samples, and collects what is reported about them."""

    def __init__(self, request: dict[str, Any], tokeniser: Tokeniser) -> None:
        self.tokeniser = tokeniser
        self.counts = Counts()
        self.formats: dict[int, str] = {}  # by the source's number
        self.entry_rows: list[int] = []  # rows of each source of a mixture; otherwise one number for all
        self.shown: Row | None = None  # the first sample whose labels carry loss within a row
        self._request = request
        self._cut = request["packing"] == "concat" and request["overlong"] in ("truncate", "split")
        self._has_special = False  # whether the document read in pieces has one: it counts once
        self._part = Part(**request["part"]) if "part" in request else None
        self._seen = 0  # samples of all sources, those of the other part too

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
        longest = self._request["max_seq_len"]
        for number in numbers:
            source, done = self._request["sources"][number], 0
            left = source["max_samples"]
            for name in source["files"]:
                if left == 0:
                    break
                for batch in _batches(self._examples(Path(name), source, number), left):
                    ended = sum(example.ends for _, example in batch)
                    left, taken, done = left and left - ended, self._taken(batch, number, done), done + ended
                    for place, example in taken:
                        self._count(place, example)
                    for sample in self._encoded(taken, loss_target(self._request["loss_on"], self.formats[number])):
                        if self.shown is None and has_loss(sample.mask[:longest]):
                            self.shown = sample.tokens[:longest], sample.mask[:longest]
                        yield sample

    def _examples(self, file: Path, source: dict[str, Any], number: int) -> Iterator[Placed]:
        """Yields examples of one file with their places, small enough to be tokenised at once.

        With `auto` the first row decides the source's format. Long texts are cut where that loses nothing.
        """
        if self._cut and kind_of_rows(file) == "text":
            self.formats[number] = "text"
            yield from ((str(file), piece) for piece in _pieces(read_document(file)))
            return
        for place, row in read_rows(file):
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

    def _count(self, place: str, example: Example) -> None:
        """Counts what a person should know: texts that run together, and special tokens in a sample's own text."""
        self.counts.run_together += example.runs_together
        named = None if self._has_special else self.tokeniser.special_in(example)
        if named:
            self.counts.special += 1
            self.counts.special_example = self.counts.special_example or f"{Path(place).name} {named!r}"
        self._has_special = not example.ends and (self._has_special or named is not None)

    def _encoded(self, batch: list[Placed], target: str) -> Iterator[Sample]:
        if not batch:
            return
        first, example = batch[0]
        at, seconds = Path(self._request["out"]).with_name("at"), self._request["template_seconds"]
        is_chat = isinstance(example, Chat)
        try:
            with time_limit(f"{first}: {self.tokeniser.template}", at, seconds) if is_chat else nullcontext():
                rows = self.tokeniser.encode([example for _, example in batch], target=target)
        except RowError as error:
            if len(batch) > 1:  # a tokenizer does not say which sample it refuses
                for placed in batch:
                    yield from self._encoded([placed], target)
                return
            hint = "correct or remove the row; if every row fails, the template or the tokenizer is wrong"
            raise UsageError(f"{first}: {error}", hint=hint) from error
        for (place, example), (tokens, mask) in zip(batch, rows, strict=True):
            yield Sample(tokens=tokens, mask=mask, place=place, ends=example.ends)

    def check(self, label_tokens: int, learns_to_stop: bool) -> None:
        """Refuses data that would train nothing, or never teach the model to stop."""
        counts = self.counts
        limit = f"dataset.max_seq_len is {self._request['max_seq_len']:,}"
        if counts.samples == 0 and self._part is not None and self._seen:
            share = f"dataset.eval_fraction: {self._part.fraction:g} of {self._seen:,} samples"
            raise UsageError(
                f"{share} holds none back" if self._part.held else f"{share} leaves none to train on",
                hint="choose another share, or name a file in dataset.eval",
            )
        if counts.samples == 0:
            raise UsageError("the data has no samples", hint="check dataset.train.path and max_samples")
        if label_tokens == 0:
            lost = f"{counts.samples:,} samples, {counts.truncated:,} truncated, {counts.dropped:,} dropped"
            hint = "check dataset.train: does `columns` name the right columns, do they hold text, does loss_on fit?"
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


def _without_torch() -> None:
    """Keeps transformers from importing torch: a tokenizer does not need it, and it takes 4 s and 260 MiB."""
    cast(dict[str, ModuleType | None], sys.modules)["torch"] = None


def main() -> int:
    """Serves one request. What libraries print goes to standard error."""
    _without_torch()
    reply_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    reply: dict[str, Any]
    try:
        build(json.load(sys.stdin))
        reply = {"ok": True}
    except UsageError as error:
        reply = {"error": error.message, "hint": error.hint, "kind": "usage"}
    except MemoryError:
        reply = {
            "error": "the machine ran out of memory",
            "hint": "lower dataset.num_workers",
            "kind": "space",
        }
    except OSError as error:
        kind = "space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "usage"
        reply = {"error": f"the data cannot be read: {reason(error)}", "hint": None, "kind": kind}
    except BaseException as error:  # the traceback goes to standard error
        with reply_to:
            reply_to.write(reason(error))
        raise
    with reply_to:
        json.dump(reply, reply_to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
