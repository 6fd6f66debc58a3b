"""Reads and tokenises in its own process: `python -m fuyou_cli.data.worker`, request on stdin, reply on stdout.

With a process of its own, the tokenizer leaves no memory behind in the trainer, and what never ends can be ended (`sandbox`).
The request is one JSON object (see `cache`). The rows go to files in its `out`; tokens of `prompts` are the reply. The reply is
{"ok": true} or {"error", "hint", "kind"}; an unexpected error is one line. Where rows are made while a run trains (`Parts`),
more requests and replies follow, each in a line.

Data goes one way: read (`reading`) -> examples (`formats`) -> tokens (`tokenise`) -> rows (`rows`) -> files.
Memory does not grow with the number of rows: at most `BATCH_CHARS` or one sample is tokenised at once, and the tokenizer
takes some 100 bytes per character. A text that may become several rows (packing: concat) is cut into pieces. Any other sample
of more than `LARGEST_SAMPLE` characters is refused.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from fuyou_cli.core.disk import FULL, unusable
from fuyou_cli.core.errors import DataSpaceError, FuyouError, UsageError
from fuyou_cli.core.json_files import from_json, read_object

from .batches import HeldPart
from .formats import Chat, Example, RowError, Texts, Tokens, choose_format, loss_target, mapping_hint, read_example
from .reading import as_prompt, kind_of_rows, pieces_of, read_document, read_rows
from .rows import LABEL, TOKENS, Counts, Row, Sample, damaged, has_loss, pack
from .sandbox import Watch, limit_memory, reason, watched, writing
from .sources import is_remote, local_copy
from .tokenise import LARGEST_SAMPLE, Tokeniser, decode_pieces, load_tokenizer

BATCH_EXAMPLES = 256  # examples tokenised together: the tokenizer's threads share a batch
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
MOST_ROLES = 6  # of messages, that an error lists
BATCH_CHARS = 1 << 18  # characters of a batch: the sample that reaches this closes it

PlacedExample = tuple[str, Example]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Says where reading goes on: behind so many rows of a file of a source, and so many pieces of the row after them."""

    source: int = 0
    file: int = 0
    rows: int = 0
    pieces: int = 0
    samples: int = 0  # of the source, in all its files

    def behind(self, batch: Iterable[PlacedExample]) -> Position:
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
        self._part = HeldPart(**request["part"]) if "part" in request else None
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

    def packed(self, samples: Iterable[Sample]) -> Iterator[Row]:
        options = {name: self._request[name] for name in ("packing", "overlong", "max_seq_len")}
        return pack(samples, counts=self.counts, **options)

    def rows(self) -> Iterator[Row]:
        """Yields the rows of all sources. In a mixture no row has samples of two sources."""
        numbers = list(range(len(self._request["sources"])))
        for group in [[number] for number in numbers] if self._request["mixed"] else [numbers]:
            count = 0
            for row in self.packed(self._samples(group)):
                count += 1
                yield row
            self.entry_rows.append(count)

    def _samples(self, numbers: list[int]) -> Iterator[Sample]:
        """Yields the tokenised samples of these sources."""
        for first, batch, _ in self.batches(numbers, Position(source=numbers[0])):
            yield from self.made(first, batch)

    def batches(self, numbers: list[int], begin: Position) -> Iterator[tuple[Position, list[PlacedExample], Position]]:
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
                with local_copy(named, self._request.get("remote")) as file:
                    if is_remote(named) and not file.stat().st_size:  # nobody here can mend it
                        continue
                    examples = self._examples(file, source, number, at.rows)
                    for batch in _batches(islice(examples, at.pieces, None), left):
                        before, at = at, at.behind(batch)
                        left = left and left - (at.samples - before.samples)
                        yield before, batch, at

    def made(self, first: Position, batch: list[PlacedExample]) -> Iterator[Sample]:
        """Tokenises a batch that begins at `first`, counts it, and yields its samples."""
        longest = self._request["max_seq_len"]
        examples = self._taken(batch, first.source, first.samples)
        target = loss_target(self._request["loss_on"], self.formats[first.source]) if examples else ""
        for place, example in examples:
            self._count(place, example, target)
        for sample in self._encoded(examples, target):
            if self.shown is None and has_loss(sample.mask[:longest]):
                self.shown = sample.tokens[:longest], sample.mask[:longest]
            yield sample

    def _examples(self, file: Path, source: dict[str, Any], number: int, skipped: int) -> Iterator[PlacedExample]:
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

    def _taken(self, batch: list[PlacedExample], source: int, number: int) -> list[PlacedExample]:
        """Returns the examples of a batch that are in the part asked for. `number`: of the first one's sample in its source."""
        examples = []
        for placed in batch:
            if self._part is None or self._part.takes(source, number):
                examples.append(placed)
            number += placed[1].ends
            self._seen += placed[1].ends
        return examples

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

    def _encoded(self, batch: list[PlacedExample], target: str) -> Iterator[Sample]:
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


def _batches(examples: Iterator[PlacedExample], limit: int | None) -> Iterator[list[PlacedExample]]:
    """Yields what is tokenised together, at most `limit` samples in all. A conversation is alone, because its time is
    limited."""
    batch: list[PlacedExample] = []
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


# ---- files of rows ---------------------------------------------------------------------------------------------------


class _File:
    """A new file. Raises FuyouError that names it, also where the system refuses what was held back until it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("wb")

    def __enter__(self) -> _File:
        return self

    def write(self, data: bytes) -> None:
        with writing(self._path):
            self._file.write(data)

    def __exit__(self, *_: object) -> None:
        with writing(self._path):
            self._file.close()


def write_rows(rows: Iterable[Row], reading: Reading, out: Path) -> tuple[int, int, bool]:
    """Writes rows of a reading, their description last, and flushes them. Returns how many they are, the labels that carry
    loss, and whether one of these is a stop token. The digest covers every row's length, tokens and mask, in order."""
    tokeniser, offsets, digest = reading.tokeniser, array("q", [0]), hashlib.sha256()
    stops = np.asarray(sorted(tokeniser.stop_ids), np.int32)
    label_tokens = longest = highest_id = 0
    learns_to_stop = False
    with _File(out / TOKENS) as tokens_file, _File(out / "mask.bin") as mask_file:
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
    with _File(out / "offsets.npy") as offsets_file:
        np.save(offsets_file, np.frombuffer(offsets, np.int64))
    summary = {
        "rows": len(offsets) - 1,
        "tokens": offsets[-1],
        "label_tokens": label_tokens,
        "longest_row": longest,
        "highest_token_id": highest_id,
        "digest": digest.hexdigest(),
        "pad_id": tokeniser.pad_id,
        "never_stops": not learns_to_stop and "marked" in reading.targets,
        "entry_rows": reading.entry_rows,
        "formats": sorted(reading.formats.items()),  # by the source's number: the rows do not depend on its path
        "preview": decode_pieces(tokeniser.tokenizer, reading.shown) if reading.shown else (),
        **asdict(reading.counts),
    }
    with writing(out / "summary.json"):
        (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")  # names may not be UTF-8
    for path in out.iterdir():
        with writing(path), path.open("rb") as written:
            os.fsync(written.fileno())
    return len(offsets) - 1, label_tokens, learns_to_stop


# ---- parts of a stream -----------------------------------------------------------------------------------------------


PART_TOKENS = 1 << 22  # about: the samples tokenised together are not cut
PART_SAMPLES = 1 << 17
NEXT = "next.json"


def read_next(folder: Path) -> tuple[Position | None, dict[str, str]]:
    """Returns where an entry goes on behind the part in a folder (None, if that was its last), and the formats of the sources
    so far, by their number. Raises UsageError if that is damaged."""
    try:
        goes_on = read_object(folder / NEXT, limit=1 << 20)
        begin = goes_on["begin"]
        return None if begin is None else from_json(Position, begin), from_json(dict[str, str], goes_on["formats"])
    except (UsageError, OSError, LookupError, TypeError, ValueError) as error:
        raise damaged(folder, error) from error


class Parts:
    """Makes parts of the entries of a request. An entry is a number of its sources."""

    def __init__(self, request: dict[str, Any], tokeniser: Tokeniser) -> None:
        self._request, self._tokeniser = request, tokeniser
        self._entries: dict[int, _EntryParts] = {}

    def make(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Makes the part of an entry that begins at a position (None: at its data's beginning) in the folder `out`, and returns
        its number of rows. Raises UsageError."""
        begin = Position(**asked["begin"]) if asked["begin"] else Position(source=asked["sources"][0])
        entry = self._entries.get(asked["entry"])
        if entry is None or entry.next != begin:
            entry = _EntryParts(self._request, self._tokeniser, asked, begin)
            self._entries[asked["entry"]] = entry
        try:
            return {"rows": entry.make(Path(asked["out"]), is_first=asked["begin"] is None)}
        except UsageError as error:  # a file of the hub is named by its set, not by where it lies for a while
            folder = self._request.get("remote", {}).get("folder", "")
            raise UsageError(error.message.replace(f"{folder}/", "") if folder else error.message, hint=error.hint) from error


class _EntryParts:
    """Reads one entry from a position on."""

    def __init__(self, request: dict[str, Any], tokeniser: Tokeniser, asked: dict[str, Any], begin: Position) -> None:
        self._request = dict(request)  # `out` changes from part to part
        self._reading = Reading(self._request, tokeniser)
        self._reading.formats |= {int(number): name for number, name in asked["formats"].items()}
        self._batches = self._reading.batches(asked["sources"], begin)
        self._file = request["sources"][asked["sources"][0]]["files"][0]
        self.next: Position | None = begin

    def make(self, out: Path, *, is_first: bool) -> int:
        """Makes a part with rows, unless the data ends before, and returns how many there are."""
        reading, rows = self._reading, 0
        self._request["out"] = str(out)
        with reading.watched():
            while not rows and self.next is not None:
                reading.counts, reading.shown, reading.entry_rows = Counts(), None, []
                rows, label_tokens, learns_to_stop = write_rows(reading.packed(self._samples()), reading, out)
        if is_first:
            self._check(rows, label_tokens, learns_to_stop)
        with writing(out / NEXT), (out / NEXT).open("w", encoding="utf-8") as file:
            json.dump({"begin": self.next and asdict(self.next), "formats": reading.formats}, file)
            file.flush()
            os.fsync(file.fileno())
        return rows

    def _check(self, rows: int, label_tokens: int, learns_to_stop: bool) -> None:
        """Refuses an entry that would train nothing. Names it in a mixture."""
        self._reading.entry_rows = [rows]
        try:
            self._reading.check(label_tokens, learns_to_stop)
        except UsageError as error:
            if not self._request["mixed"]:
                raise
            raise UsageError(f"{self._file.removeprefix('hf:/datasets/')}: {error.message}", hint=error.hint) from error

    def _samples(self) -> Iterator[Sample]:
        tokens = samples = 0
        for before, batch, behind in self._batches:
            for sample in self._reading.made(before, batch):
                tokens += len(sample.tokens)
                yield sample
            samples += len(batch)
            self.next = behind
            if tokens >= self._request["part_tokens"] or samples >= PART_SAMPLES:
                return
        self.next = None


# ---- the process -----------------------------------------------------------------------------------------------------


Reply = dict[str, Any]


def build(request: dict[str, Any]) -> None:
    """Writes the finished rows to `out`. Raises UsageError."""
    reading = Reading(request, _tokeniser(request))
    with reading.watched():
        _, label_tokens, learns_to_stop = write_rows(reading.rows(), reading, Path(request["out"]))
    reading.check(label_tokens, learns_to_stop)


def continue_prompts(request: dict[str, Any]) -> Reply:
    """Returns the tokens of each prompt. Raises UsageError at the place of one that cannot be rendered or tokenised."""
    tokeniser, ids = _tokeniser(request), list[list[int]]()
    with watched(_at(request), request["seconds"]) as watch:
        for place, fields in request["prompts"]:
            prompt = as_prompt(fields)
            watch.on(f"{place}: {tokeniser.template if isinstance(prompt, Chat) else 'tokenising it'}")
            try:
                ids.append(tokeniser.prompt(prompt))
            except RowError as error:
                raise UsageError(f"{place}: {error}") from None
    return {"ids": ids}


def _tokeniser(request: dict[str, Any]) -> Tokeniser:
    directory = Path(request["tokenizer_dir"])
    with watched(_at(request), request["seconds"]) as watch:
        watch.on(f"tokenizer: loading {directory}")
        tokenizer = load_tokenizer(directory, chat_template=request["chat_template"], pad_token=request["pad_token"])
        key = None if request["chat_template"] is None else "tokenizer.chat_template"
        return Tokeniser(tokenizer, directory=directory, template_key=key)


def _at(request: dict[str, Any]) -> Path:
    """Returns the file that says what this process is doing."""
    return Path(request["out"]).with_name("at") if "out" in request else Path(request["at"])


def _answered(work: Callable[[], Reply | None], tell: Callable[[str], object]) -> None:
    """Does some work and tells its reply, as JSON. `tell` gets one line before an unexpected error ends the process, with its
    traceback on standard error."""
    try:
        reply = {"ok": True, **(work() or {})}
    except FuyouError as error:
        reply = _refusal(error)
    except MemoryError:
        reply = _refusal(DataSpaceError("the machine ran out of memory", hint="lower dataset.num_workers"))
    except OSError as error:
        refused = unusable(f"the data cannot be read: {reason(error)}", error)
        reply = _refusal(DataSpaceError(refused.message, hint=refused.hint) if error.errno in FULL else refused)
    except BaseException as error:
        tell(reason(error))
        raise
    tell(json.dumps(reply))


def _refusal(error: FuyouError) -> Reply:
    """Returns an error as a reply. `kind`: its class in `core.errors`, as `cache.read_reply` raises it."""
    kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == FuyouError.__module__)
    return {"error": error.message, "hint": error.hint, "kind": kind}


def main() -> int:
    """Serves one request, or those of a run until it closes standard input. What libraries print goes to standard error."""
    # Keeps transformers from importing torch: a tokenizer does not need it, and it takes 4 s and 260 MiB.
    cast(dict[str, ModuleType | None], sys.modules)["torch"] = None
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as reply_to:
        os.dup2(2, 1)

        def tell(line: str) -> None:
            reply_to.write(line + "\n")
            reply_to.flush()

        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process of a job; the run decides
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody else would end it where the run was killed
        request = json.loads(sys.stdin.readline())
        limit_memory(request["bytes"])
        if "prompts" in request:
            _answered(lambda: continue_prompts(request), tell)
            return 0
        if "out" in request:
            _answered(lambda: build(request), tell)
            return 0
        parts: list[Parts] = []
        _answered(lambda: parts.append(Parts(request, _tokeniser(request))), tell)
        for line in sys.stdin:
            _answered(partial(parts[0].make, json.loads(line)), tell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
