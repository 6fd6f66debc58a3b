"""Makes the rows of a stream part by part, in the worker: a part is what comes of about `PART_TOKENS` tokens of an entry.

A part's folder holds rows like any other (`row_files`), and next.json: where the entry's next part begins (`samples.Position`,
null behind the last one) and the formats found so far. So another process goes on without the parts before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import read_object
from fuyou_cli.core.typed import from_json

from .packing import Counts, Sample, lay_out
from .row_files import write_rows
from .rows import damaged
from .samples import Position, Reading
from .tokenise import Tokeniser

PART_TOKENS = 1 << 22  # about: the samples tokenised together are not cut
PART_SAMPLES = 1 << 17
NEXT = "next.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Next:
    """Says where an entry goes on behind a part: None, if that was its last."""

    begin: Position | None
    formats: Mapping[str, str]


def read_next(folder: Path) -> Next:
    """Reads how an entry goes on behind the part in a folder. Raises UsageError if that is damaged."""
    try:
        found = from_json(Next, read_object(folder / NEXT, limit=1 << 20))
    except (UsageError, OSError) as error:
        raise damaged(folder, error) from error
    if found.begin is not None and min(astuple(found.begin)) < 0:
        raise damaged(folder)
    return found


class Parts:
    """Makes parts of the entries of a request. An entry is a number of its sources."""

    def __init__(self, request: dict[str, Any], tokeniser: Tokeniser) -> None:
        self._request, self._tokeniser = request, tokeniser
        self._entries: dict[int, _Entry] = {}

    def make(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Makes the part of an entry that begins at a position (None: at its data's beginning) in the folder `out`, and returns
        its number of rows. Raises UsageError."""
        begin = Position(**asked["begin"]) if asked["begin"] else Position(source=asked["sources"][0])
        entry = self._entries.get(asked["entry"])
        if entry is None or entry.next != begin:
            entry = _Entry(self._request, self._tokeniser, asked["sources"], begin, formats=asked["formats"])
            self._entries[asked["entry"]] = entry
        try:
            return {"rows": entry.make(Path(asked["out"]), is_first=asked["begin"] is None)}
        except UsageError as error:  # a file of the hub is named by its set, not by where it lies for a while
            folder = self._request.get("remote", {}).get("folder", "")
            raise UsageError(error.message.replace(f"{folder}/", "") if folder else error.message, hint=error.hint) from error


class _Entry:
    """Reads one entry from a position on."""

    def __init__(
        self, request: dict[str, Any], tokeniser: Tokeniser, sources: list[int], begin: Position, *, formats: dict[str, str]
    ) -> None:
        self._request = dict(request)  # `out` changes from part to part
        self._reading = Reading(self._request, tokeniser)
        self._reading.formats |= {int(number): name for number, name in formats.items()}
        self._batches = self._reading.batches(sources, begin)
        self._file = request["sources"][sources[0]]["files"][0]
        self.next: Position | None = begin

    def make(self, out: Path, *, is_first: bool) -> int:
        """Makes a part with rows, unless the data ends before, and returns how many there are."""
        reading, rows = self._reading, 0
        self._request["out"] = str(out)
        options = {name: self._request[name] for name in ("packing", "overlong", "max_seq_len")}

        def counted() -> Iterator[Any]:
            nonlocal rows
            for row in lay_out(self._samples(), counts=reading.counts, **options):
                rows += 1
                yield row

        with reading.watched():
            while True:
                reading.counts, reading.shown, reading.entry_rows = Counts(), None, []
                learnt = write_rows(counted(), reading, out)
                if rows or self.next is None:
                    break
        if is_first:
            self._check(rows, *learnt)
        goes_on = {"begin": self.next and asdict(self.next), "formats": reading.formats}
        with (out / NEXT).open("w", encoding="utf-8") as file:
            json.dump(goes_on, file)
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
