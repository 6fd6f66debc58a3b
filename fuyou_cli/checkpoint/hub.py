"""Turns `name_or_path` into a directory with a model: as given, from the hub's local cache, or downloaded into it.

The network is asked only when the cache cannot answer. Only what training needs is fetched: many repositories hold the
same weights two or three times in other formats.
"""

from __future__ import annotations

import errno
import glob
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import FuyouError, OutOfSpaceError, UsageError
from fuyou_cli.core.paths import expanded
from fuyou_cli.core.units import gb

from .companions import CODE_PATTERN, CONFIG_NAME, PATTERNS
from .files import INDEX_NAME, SINGLE_NAME, read_json, shard_map

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

POLL_SECONDS = 0.5
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Download:
    """What is about to be fetched. Handed to `announce` before the first byte."""

    name: str
    revision: str | None
    files: int
    total: int  # bytes, without what the cache already has
    free: int  # bytes on the cache's disk
    directory: Path  # the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    name: str
    revision: str | None
    cache: Path
    endpoint: str | None
    tokenizer_only: bool
    announce: Callable[[Download], None] | None
    progress: Callable[[int, int], None] | None


def resolve(
    name_or_path: str,
    *,
    revision: str | None = None,
    need_weights: bool = True,
    tokenizer_only: bool = False,
    trust_remote_code: bool = False,
    announce: Callable[[Download], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The directory of a model: config.json, tokenizer, and with `need_weights` its safetensors. With `tokenizer_only` a
    tokenizer is enough: no config.json (tokenizer.save_pretrained writes none), no weights, and no model to build.

    A directory is returned as it is. A hub id is looked up in the local cache and downloaded only if something is
    missing there; `progress` then hears bytes so far and bytes in all, from another thread. Raises UsageError (no such
    directory or repository, gated, offline, code of its own) or OutOfSpaceError, each with what to do.
    """
    local = expanded(name_or_path, key="name_or_path")
    if local.is_dir():
        directory = local
    elif local.is_file():
        raise UsageError(f"{name_or_path}: is a file", hint="Give the directory that it is in.")
    elif not _HUB_ID.match(name_or_path):
        raise UsageError(
            f"{name_or_path}: there is no such directory",
            hint="Give a directory that exists, or a hub id such as organisation/model.",
        )
    else:
        from huggingface_hub.constants import HF_HUB_CACHE

        request = _Request(
            name=name_or_path,
            revision=revision,
            cache=Path(cache_dir or HF_HUB_CACHE).expanduser(),
            endpoint=endpoint,
            tokenizer_only=tokenizer_only,
            announce=announce,
            progress=progress,
        )
        need_weights = need_weights and not tokenizer_only
        found = _cached(request, need_weights)
        directory = found or _fetch(request, _small_files(trust_remote_code))
        _check(name_or_path, directory, tokenizer_only, trust_remote_code)  # before gigabytes are fetched in vain
        if found is None and need_weights:
            _fetch_weights(request, directory)
        return directory
    _check(name_or_path, directory, tokenizer_only, trust_remote_code)
    return directory


def _check(name_or_path: str, directory: Path, tokenizer_only: bool, trust_remote_code: bool) -> None:
    if tokenizer_only:
        if not _has_tokenizer(directory):
            hint = "Name a folder or a hub id that has one (tokenizer.json) in tokenizer.name_or_path."
            raise UsageError(f"{name_or_path}: has no tokenizer", hint=hint)
        return
    if not (directory / CONFIG_NAME).is_file():
        raise UsageError(f"{name_or_path}: has no {CONFIG_NAME}", hint="Give a model in the transformers format.")
    if not trust_remote_code:
        refuse_remote_code(directory)


def refuse_remote_code(directory: Path) -> None:
    """Raises UsageError when the model can only be built with code from its own repository.

    Many repositories still name such code although transformers has had the architecture for long; those are fine, and
    their code is not run.
    """
    config = read_json(directory / CONFIG_NAME)
    if "auto_map" not in config:
        return
    from transformers import CONFIG_MAPPING

    if not isinstance(kind := config.get("model_type"), str) or kind not in CONFIG_MAPPING:
        raise UsageError(
            f"{directory / CONFIG_NAME}: the model needs code from its own repository",
            hint="Read that code, then set model.trust_remote_code: true in the recipe if you trust it.",
        )


def _small_files(trust_remote_code: bool) -> list[str]:
    """Patterns of everything but weights."""
    code = [CODE_PATTERN] if trust_remote_code else []
    return [CONFIG_NAME, INDEX_NAME, *PATTERNS, *code]


def _weight_names(directory: Path) -> list[str]:
    """The weight files a snapshot needs, by its index; without one, the single file."""
    if (directory / INDEX_NAME).exists():
        return sorted(set(shard_map(directory).values()))
    return [SINGLE_NAME]


def _cached(request: _Request, need_weights: bool) -> Path | None:
    """The snapshot in the local cache, if it has what is needed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            request.name,
            revision=request.revision,
            cache_dir=request.cache,
            local_files_only=True,
            allow_patterns=[CONFIG_NAME],
        )
    except LocalEntryNotFoundError:
        return None
    directory = Path(found)
    needed = [] if request.tokenizer_only else [CONFIG_NAME]
    needed += _weight_names(directory) if need_weights else []
    if all((directory / name).is_file() for name in needed) and _has_tokenizer(directory):
        return directory
    return None


def _has_tokenizer(directory: Path) -> bool:
    """Whether anything of a tokenizer is there: a cache filled by a tool that wanted weights alone lacks all of it."""
    beginnings = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")
    return any(file.name.startswith(beginnings) for file in directory.glob("*"))


def _fetch_weights(request: _Request, directory: Path) -> None:
    """Exactly the weights that the index of the snapshot names, into the same snapshot."""
    names = _weight_names(directory)
    weights = _fetch(request, [glob.escape(name) for name in names])
    missing = [name for name in names if not (weights / name).is_file()]
    if missing:
        raise UsageError(
            f"{request.name}: the repository has no {missing[0]}",
            hint="fuyou reads safetensors only: choose a revision or another repository that has them.",
        )
    if weights != directory:
        raise UsageError(f"{request.name}: changed while it was downloaded", hint="Run the same command again.")


def _fetch(request: _Request, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    where: dict[str, Any] = {
        "repo_id": request.name,
        "revision": request.revision,
        "cache_dir": request.cache,
        "endpoint": request.endpoint,
        "allow_patterns": patterns,
    }
    with _explained(request), _quiet_client():
        planned: list[DryRunFileInfo] = [file for file in snapshot_download(dry_run=True, **where) if file.will_download]
        _check_space(request, planned)
        with _watched(request, sum(file.file_size or 0 for file in planned)):
            return Path(snapshot_download(**where))


def _check_space(request: _Request, files: list[DryRunFileInfo]) -> None:
    place = request.cache
    while not place.exists():
        place = place.parent
    total, free = sum(file.file_size or 0 for file in files), shutil.disk_usage(place).free
    if files and request.announce is not None:
        request.announce(
            Download(
                name=request.name,
                revision=request.revision,
                files=len(files),
                total=total,
                free=free,
                directory=request.cache,
            )
        )
    if total > free:
        raise OutOfSpaceError(
            f"{request.name}: the download takes {gb(total)}, {gb(free)} are free in {place}",
            hint="Free some space, or set HF_HOME to a directory on another disk.",
        )


@contextmanager
def _watched(request: _Request, total: int) -> Iterator[None]:
    """Reports progress by the growth of the files: the same for every transport that the hub's client may choose."""
    if request.progress is None or total == 0:
        yield
        return
    blobs = request.cache / f"models--{request.name.replace('/', '--')}" / "blobs"
    begin, report, done = _bytes_in(blobs), request.progress, threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            report(max(0, min(total, _bytes_in(blobs) - begin)), total)

    watcher = threading.Thread(target=watch, name="fuyou-download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    report(total, total)


def _bytes_in(directory: Path) -> int:
    """Bytes that the files of a directory take on disk; files vanish and appear meanwhile."""
    size = 0
    if not directory.is_dir():
        return size
    for path in directory.iterdir():
        try:
            size += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return size


@contextmanager
def _quiet_client() -> Iterator[None]:
    """The client's own progress bars and warnings off: they would write over ours."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, had_bars = logging.getLogger("huggingface_hub"), not are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    if had_bars:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            enable_progress_bars()


@contextmanager
def _explained(request: _Request) -> Iterator[None]:
    """Turns what the hub's client raises into one error that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The client has changed its HTTP library before; whichever it is, its errors are a base of the client's own.
    # RuntimeError is all that the client of the hub's faster transport raises.
    expected: tuple[type[Exception], ...] = (HFValidationError, RuntimeError, OSError, *HfHubHTTPError.__bases__)
    try:
        yield
    except FuyouError:
        raise
    except expected as error:
        raise _explanation(request, error) from error


def _explanation(request: _Request, error: BaseException) -> FuyouError:
    """The client wraps the answer of the hub in what it was doing at the time: the innermost one it knows counts."""
    from huggingface_hub import errors

    at = request.name if request.revision is None else f"{request.name}@{request.revision}"
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and len(chain) < 16:
        chain.append(cause)
    for one in chain:
        if isinstance(one, errors.GatedRepoError):
            return UsageError(
                f"{at}: access is restricted by its owner",
                hint="Accept the terms on the model's page, then log in: hf auth login (or set HF_TOKEN).",
            )
        if isinstance(one, errors.RevisionNotFoundError):
            return UsageError(f"{at}: there is no such revision", hint="Check model.revision in the recipe.")
        if isinstance(one, errors.RepositoryNotFoundError):
            return UsageError(
                f"{at}: no such directory here and no such model on the hub",
                hint="Check the spelling. A private model needs a login: hf auth login (or set HF_TOKEN).",
            )
        if isinstance(one, errors.HfHubHTTPError) and one.response.status_code in (401, 403):
            return UsageError(
                f"{at}: the hub refuses access ({one.response.status_code})",
                hint="The token is wrong or lacks the right: hf auth login (or set HF_TOKEN).",
            )
        if isinstance(one, errors.HFValidationError):
            return UsageError(f"{at}: is neither a directory nor a hub id", hint="Write a hub id as organisation/model.")
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            return OutOfSpaceError(
                f"{at}: the disk of {request.cache} became full during the download",
                hint="Free some space and run the same command: what has arrived is kept.",
            )
    kind, text = type(chain[-1]).__name__, str(chain[-1]).partition("\n")[0][:160]
    why = "HF_HUB_OFFLINE is set" if kind == "OfflineModeIsEnabled" else f"{kind}: {text}"
    return UsageError(
        f"{at}: is not in the local cache and cannot be downloaded ({why})",
        hint="Check the connection, or copy the model to a local directory and give its path.",
    )
