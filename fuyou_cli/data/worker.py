"""Reads and tokenises in its own process: `python -m fuyou_cli.data.worker`, request on stdin, reply on stdout.

With a process of its own, the tokenizer leaves no memory behind in the trainer, and what never ends can be ended (`sandbox`).
The request is one JSON object (see `cache`). The rows go to files in its `out`; tokens of `prompts` are the reply. The reply is
{"ok": true} or {"error", "hint", "kind"}; an unexpected error is one line. Where rows are made while a run trains
(`stream_parts`), more requests and replies follow, each in a line.

Data goes one way: read (`reading`) -> examples (`formats`) -> tokens (`tokenise`, `samples`) -> rows (`packing`) -> files
(`row_files`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fuyou_cli.core.disk import FULL, unusable
from fuyou_cli.core.errors import DataSpaceError, FuyouError, UnreadableError, UsageError

from .formats import RowError
from .prompts import as_prompt
from .row_files import write_rows
from .samples import Reading
from .sandbox import limit_memory, reason, watched
from .stream_parts import Parts
from .tokenise import Tokeniser, load_tokenizer

Reply = dict[str, Any]


def build(request: dict[str, Any]) -> None:
    """Writes the finished rows to `out`. Raises UsageError."""
    reading = Reading(request, _tokeniser(request))
    options = {name: request[name] for name in ("packing", "overlong", "max_seq_len")}
    with reading.watched():
        learnt = write_rows(reading.rows(options), reading, Path(request["out"]))
    reading.check(*learnt)


def continue_prompts(request: dict[str, Any]) -> Reply:
    """Returns the tokens of each prompt. Raises UsageError at the place of one that cannot be rendered or tokenised."""
    tokeniser, found = _tokeniser(request), list[list[int]]()
    with watched(_at(request), request["seconds"]) as watch:
        for place, kind, fields in request["prompts"]:
            watch.on(f"{place}: {tokeniser.template if kind == 'Chat' else 'tokenising it'}")
            try:
                found.append(tokeniser.prompt(as_prompt(kind, fields)))
            except RowError as error:
                raise UsageError(f"{place}: {error}") from None
    return {"ids": found}


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


def _without_torch() -> None:
    """Keeps transformers from importing torch: a tokenizer does not need it, and it takes 4 s and 260 MiB."""
    cast(dict[str, ModuleType | None], sys.modules)["torch"] = None


def _answered(work: Callable[[], Reply | None], tell: Callable[[str], object]) -> None:
    """Does some work and tells its reply, as JSON. `tell` gets one line before an unexpected error ends the process, with its
    traceback on standard error."""
    try:
        reply = {"ok": True, **(work() or {})}
    except FuyouError as error:
        reply = {"error": error.message, "hint": error.hint, "kind": _kind(error)}
    except MemoryError:
        reply = {"error": "the machine ran out of memory", "hint": "lower dataset.num_workers", "kind": "memory"}
    except OSError as error:
        told = unusable(f"the data cannot be read: {reason(error)}", error)
        reply = {"error": told.message, "hint": told.hint, "kind": "disk" if error.errno in FULL else _kind(told)}
    except BaseException as error:
        tell(reason(error))
        raise
    tell(json.dumps(reply))


def _kind(error: FuyouError) -> str:
    """Names the kind of an error for `cache.replied`."""
    kinds = {"unreadable": UnreadableError, "usage": UsageError, "disk": DataSpaceError}
    return next((kind for kind, one in kinds.items() if isinstance(error, one)), "network")


def main() -> int:
    """Serves one request, or those of a run until it closes standard input. What libraries print goes to standard error."""
    _without_torch()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as reply_to:
        os.dup2(2, 1)

        def tell(line: str) -> None:
            reply_to.write(line + "\n")
            reply_to.flush()

        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process of a job; the run decides
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
