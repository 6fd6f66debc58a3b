"""Tokenises a recipe's data once, in the worker, and finds the rows again as long as nothing they depend on changes.

The rows are in the directory `<fingerprint>` below the caller's `cache_dir`. It appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fuyou_cli
from fuyou_cli.core import errors
from fuyou_cli.core.disk import FULL, existing, unusable
from fuyou_cli.core.errors import DataSpaceError, FuyouError, UsageError
from fuyou_cli.core.paths import read_plain, scratch_in
from fuyou_cli.core.units import MiB, gb

from . import sandbox
from .batches import HeldPart
from .reading import Prompt, as_data, first_bad_line, naming, suffixes
from .rows import TOKEN_BYTES, TOKENS, Rows
from .sources import Say, find_sources, say_nothing, size_of

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import DatasetSection

LAYOUT_VERSION = 7  # increase it when the same data and options give other rows, or a summary that says less
TOKENIZER_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".codes", ".tokenizer")
TEMPLATE_FOLDER = "additional_chat_templates"  # the only folder that is part of a tokenizer
_LARGEST_TEMPLATE = 4 * MiB
_NO_MEMORY = ("memory allocation of", "bad_alloc")  # what Rust and C++ say before they abort
_TOLD_AFTER, _TOLD_EVERY = 10.0, 300.0  # seconds until a run is told how far its data is: first, and later at most
_ELSEWHERE = "set dataset.cache_dir to a writable folder (the default is inside the output directory)"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsRequest:
    """Names the rows: what is read, and with which tokenizer. `part`: of its samples; None: all."""

    dataset: DatasetSection
    tokenizer_dir: Path
    chat_template: Path | None = None
    pad_token: str | None = None
    part: HeldPart | None = None


def prepare(asked: RowsRequest, cache_dir: Path, *, say: Say = say_nothing) -> Rows:
    """Finds the rows that an earlier run made, or tokenises now.

    Call it before the arena is mapped: it starts a process. Raises UsageError for data that cannot be used.
    """
    request, paths = request_for(asked, fetching=say)
    final = cache_dir / fingerprint(request, _content)
    if not final.is_dir():
        takes = f"about as much as the text in the files ({gb(size_of(asked.dataset))})"
        with naming_space(cache_dir, takes), scratch_of(cache_dir) as scratch:
            out = scratch / "rows"
            out.mkdir()
            _serve({**request, "out": str(out)}, threads=asked.dataset.num_workers or 1, say=say)
            rename_unless_made(out, final)
    return Rows(final, paths=paths)


def rename_unless_made(rows: Path, final: Path) -> None:
    """Gives rows their name, unless another run has made the same in the meantime."""
    try:
        rows.rename(final)
    except OSError:
        if not final.is_dir():
            raise


def find(asked: RowsRequest, cache_dir: Path) -> Rows | None:
    """Finds the rows if they are there already. Starts nothing and writes nothing."""
    request, paths = request_for(asked)
    final = cache_dir / fingerprint(request, _content)
    return Rows(final, paths=paths) if final.is_dir() else None


def prompt_ids(
    prompts: Sequence[tuple[str, Prompt]], tokenizer_dir: Path, chat_template: str | None = None, pad_token: str | None = None
) -> list[list[int]]:
    """Returns the tokens of prompts, each with the place that an error names. Starts a process. Raises UsageError."""
    with tempfile.TemporaryDirectory(prefix="fuyou-prompts-") as scratch:
        request = {
            "prompts": [(place, as_data(prompt)) for place, prompt in prompts], "tokenizer_dir": str(tokenizer_dir),
            "chat_template": chat_template, "pad_token": pad_token, "out": str(Path(scratch, "rows")),
        }  # fmt: skip
        ids: list[list[int]] = _serve(request, threads=1, say=say_nothing)["ids"]
    return ids


def request_for(asked: RowsRequest, *, fetching: Say | None = None) -> tuple[dict[str, Any], list[str]]:
    """Returns the request for the worker, and the recipe's paths."""
    dataset, part = asked.dataset, asked.part
    sources = find_sources(dataset, fetching=fetching)
    return {
        "sources": [source.request for source in sources],
        "tokenizer_dir": str(asked.tokenizer_dir),
        "chat_template": read_template(asked.chat_template),
        "pad_token": asked.pad_token,
        "mixed": bool(dataset.weights),
        **dataset.model_dump(include={"packing", "overlong", "max_seq_len", "loss_on"}),
        **({"part": asdict(part)} if part is not None else {}),
        **({"paragraphs": True} if part is not None and dataset.packing == "concat" else {}),  # which are held back, or not
    }, [source.entry.path for source in sources]


def fingerprint(request: dict[str, Any], content: Callable[[Path], str]) -> str:
    """Digests everything that the rows depend on (contents, options, library versions) as 32 hexadecimal digits. The places
    and times of files do not count."""
    described = {
        **request,
        "layout": LAYOUT_VERSION,
        "libraries": {name: version(name) for name in ("tokenizers", "transformers")},
        "tokenizer": _tokenizer_content(Path(request["tokenizer_dir"])),
        "sources": [
            {**source, "files": [("".join(suffixes(Path(file))), content(Path(file))) for file in source["files"]]}
            for source in request["sources"]
        ],
    }
    del described["tokenizer_dir"]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


def _content(file: Path) -> str:
    with naming(file), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _tokenizer_content(directory: Path) -> dict[str, str]:
    """Maps the name of every file that may shape the tokens to its SHA-256. Folders are ignored: a run may write into one
    below its model."""
    if not directory.is_dir():
        raise UsageError(f"tokenizer: {directory} is not a directory")
    files = [*directory.iterdir(), *(directory / TEMPLATE_FOLDER).glob("*.jinja")]
    kept = sorted(
        file for file in files if file.suffix in TOKENIZER_SUFFIXES and not file.name.endswith(".index.json") and file.is_file()
    )
    return {str(file.relative_to(directory)): _content(file) for file in kept}


def scratch_of(cache_dir: Path) -> AbstractContextManager[Path]:
    """Makes a folder for rows in progress. Raises UsageError if it cannot."""
    return scratch_in(cache_dir, what="dataset.cache_dir", hint=_ELSEWHERE)


@contextmanager
def naming_space(cache_dir: Path, takes: str) -> Iterator[None]:
    """Says what rows take where no room is left for them. Raises DataSpaceError."""
    try:
        yield
    except (DataSpaceError, OSError) as error:
        if error.hint if isinstance(error, DataSpaceError) else error.errno not in FULL:  # a hint: of memory
            raise
        reason = error.message if isinstance(error, DataSpaceError) else error.strerror
        free = gb(shutil.disk_usage(existing(cache_dir)).free)
        raise DataSpaceError(
            f"no room for data in {cache_dir}, whose disk has {free} free: {reason}",
            hint=f"a token takes 5 bytes, {takes}: free some space there, or set dataset.cache_dir to a folder on another disk",
        ) from error


def read_template(path: Path | None) -> str | None:
    """Returns a chat template's text. Raises UsageError for a file that is none."""
    if path is None:
        return None
    try:
        text = read_plain(path, limit=_LARGEST_TEMPLATE + 1).decode()
    except OSError as error:
        raise unusable(f"tokenizer.chat_template: {path}: {error.strerror}", error, hint="name a .jinja file") from error
    except UnicodeDecodeError as error:
        place = f"tokenizer.chat_template: {first_bad_line(path)}"
        raise UsageError(f"{place}: not UTF-8 text: {error.reason}", hint="save it as UTF-8") from error
    if len(text) > _LARGEST_TEMPLATE:
        most = f"{_LARGEST_TEMPLATE // MiB} MiB"
        raise UsageError(f"tokenizer.chat_template: {path}: larger than {most}, so not a template", hint="name a .jinja file")
    return text


def _serve(request: dict[str, Any], *, threads: int, say: Say) -> dict[str, Any]:
    """Returns the reply of a worker of its own, and tells meanwhile how far it is. Raises its error with the same text."""
    out = Path(request["out"])

    def tell_tokens() -> None:
        written = (out / TOKENS).stat().st_size // TOKEN_BYTES if (out / TOKENS).exists() else 0
        say(f"still reading and tokenising: {written:,} tokens so far")

    process = WorkerProcess(threads)
    try:
        return process.answer(request_line(request), at=out.with_name("at"), meanwhile=tell_tokens)
    finally:
        process.end()


class WorkerProcess(subprocess.Popen[str]):
    """The process that reads and tokenises (`worker`)."""

    def __init__(self, threads: int) -> None:
        package_root = str(Path(fuyou_cli.__file__).resolve().parents[1])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH")))),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "true",
            "RAYON_NUM_THREADS": str(min(threads, os.cpu_count() or 1)),
        }
        # -P: a file tokenizers.py in the current directory must not stand in for the library.
        command, pipe = [sys.executable, "-P", "-m", "fuyou_cli.data.worker"], subprocess.PIPE
        self._trace = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        super().__init__(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=self._trace, text=True, process_group=0
        )  # a process group of its own: Ctrl-C is for the run

    def answer(self, line: str, *, at: Path, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Returns the reply to a line. Calls `meanwhile` less and less often until it is there. Raises the reply's error with
        the same text, or that of a process that has ended. `at`: the file that says what it was doing."""
        assert self.stdin is not None and self.stdout is not None
        words, seconds, ready = "", _TOLD_AFTER, select.poll()  # any number of open files: `select` takes 1,024
        ready.register(self.stdout, select.POLLIN | select.POLLHUP)
        try:
            self.stdin.write(line)
            self.stdin.flush()
            while not ready.poll(1000 * seconds):
                meanwhile()
                seconds = min(2 * seconds, _TOLD_EVERY)
            words = self.stdout.readline()
            return read_reply(words)
        except (BrokenPipeError, ValueError):  # it has ended, or said what ends it
            code = self.wait()
            self._trace.seek(0)  # now that it has ended: the place in the file is that of its standard error
            _raise_failed(code, words, self._trace.read(), at=at)
            raise

    def end(self) -> None:
        """Ends the process, and those that it started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()
        for stream in (self.stdin, self.stdout, self._trace):
            with suppress(OSError):  # what it did not read
                if stream is not None:
                    stream.close()


def request_line(request: dict[str, Any]) -> str:
    """Returns the first line for a worker."""
    return json.dumps({**request, "seconds": sandbox.SECONDS, "bytes": sandbox.BYTES}, default=str) + "\n"


def read_reply(line: str) -> dict[str, Any]:
    """Returns a worker's reply. Raises its error with the same text, ValueError where it is none."""
    reply: Any = json.loads(line)
    if not isinstance(reply, dict):
        raise ValueError("no reply")
    if "error" in reply:
        raise getattr(errors, reply["kind"])(reply["error"], hint=reply["hint"])
    return reply


def _raise_failed(code: int, last_words: str, trace: str, *, at: Path) -> None:
    """Raises the error of a worker that ended otherwise than with 0."""
    doing = sandbox.noted(at)
    if code == -sandbox.OVERDUE:
        raise UsageError(
            sandbox.too_slow(doing),
            hint=f"{sandbox.HINT}. A conversation of thousands of turns is much faster with {{% generation %}} marks in the "
            "template, or with dataset.loss_on: last_assistant",
        )
    if code == -signal.SIGABRT and any(words in trace for words in _NO_MEMORY):
        raise UsageError(sandbox.too_large(doing), hint=sandbox.HINT)
    if code == -signal.SIGINT and "pthread_create failed" in trace:  # OpenBLAS sends it; Ctrl-C is for the run alone
        raise FuyouError("cannot start another thread or process", hint=errors.NO_THREADS)
    if code < 0:
        raise FuyouError(
            f"the process that reads the data was ended by signal {-code}{f' ({doing})' if doing else ''}",
            hint="signal 9 usually means that the machine ran out of memory" if code == -9 else None,
        )
    if code:  # nobody expected it
        message = f"reading the data failed: {last_words.strip() or (trace.strip().splitlines() or ['it says nothing'])[-1]}"
        if os.environ.get("FUYOU_DEBUG", "") in ("", "0"):
            raise FuyouError(message, hint="set FUYOU_DEBUG=1 to see the traceback")
        raise FuyouError(f"{message}\n{trace.strip()}")
