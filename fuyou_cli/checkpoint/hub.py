"""Turns `name_or_path` into a directory with a model: a local one, one in the hub's cache, or one downloaded into it.

The network is used only when something is missing in the cache. Only what training needs is downloaded: many repositories hold
the same weights in two or three other formats too.
"""

from __future__ import annotations

import errno
import glob
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.disk import existing, remedy
from fuyou_cli.core.errors import FuyouError, OutOfSpaceError, UsageError
from fuyou_cli.core.paths import expanded, kept_folder
from fuyou_cli.core.units import gb

from .files import (
    ADAPTER_CONFIG_NAME,
    CODE_PATTERN,
    CONFIG_NAME,
    INDEX_NAME,
    PATTERNS,
    SINGLE_NAME,
    an_adapter,
    read_json,
    shard_map,
)

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe

Progress = Callable[[str, int, int], None]  # (what, bytes so far, bytes in all): from any thread, one call at a time
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")  # beginnings of their names
_LOG_IN = "log in: run `hf auth login` or set HF_TOKEN"


class Hub:
    """Finds the folders of a recipe's model and tokenizer, and downloads what is missing."""

    def __init__(self, recipe: Recipe, *, say: Callable[[str], None], progress: Progress) -> None:
        self._model, self._tokenizer, self._say, self._progress = recipe.model, recipe.tokenizer, say, progress

    def model(self, *, need_weights: bool) -> Path:
        """Returns the model's folder; with its weights only when asked for."""
        return self._resolve(self._model.name_or_path, revision=self._model.revision, need_weights=need_weights)

    def model_or_shapes(self) -> Path:
        """Returns the model's folder without its weights, for a plan. Where it is neither here nor to be fetched, returns one
        with the config.json of the shapes that are shipped, and says so."""
        name = self._model.name_or_path
        try:
            return self.model(need_weights=False)
        except UsageError as error:
            from fuyou_cli.recipe.named import shipped_shapes

            shapes = shipped_shapes(name) if self._model.revision is None else None
            if shapes is None:
                raise
            self._say(
                f"note: planned with the shapes that fuyou knows of {name}, not with its own config.json: {error.message}"
            )
            return _written(name, shapes)

    def tokenizer(self, model_dir: Path, *, needed: bool) -> Path:
        """Returns the tokenizer's folder: the model's, unless the recipe names another."""
        named = self._tokenizer.name_or_path
        return self._resolve(named or str(model_dir), tokenizer_only=True) if named or needed else model_dir

    def tokenizer_alone(self) -> Path:
        """Returns the tokenizer's folder where no model is needed: the one that `tokenizer` returns."""
        named, revision = self._tokenizer.name_or_path, self._model.revision
        return self._resolve(
            named or self._model.name_or_path, revision=None if named else revision, tokenizer_only=True
        )  # fmt: skip

    def _resolve(self, name: str, **options: Any) -> Path:
        options |= {"trust_remote_code": self._model.trust_remote_code, "say": self._say, "progress": self._progress}
        return resolve(name, **options)


def resolve(
    name_or_path: str,
    *,
    revision: str | None = None,
    need_weights: bool = True,
    tokenizer_only: bool = False,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda what, done, total: None,
) -> Path:
    """Returns the directory of a model: config.json, tokenizer, and with `need_weights` its safetensors.

    With `tokenizer_only` a tokenizer is enough; config.json may be missing (tokenizer.save_pretrained writes none). A directory
    is returned unchanged. A hub id is looked up in the local cache and downloaded only if something is missing. Raises
    UsageError (no such directory or repository, gated, offline, code of its own) or OutOfSpaceError, each with a remedy.
    """
    local = expanded(name_or_path, key="name_or_path")
    if local.is_dir():
        _check(name_or_path, local, tokenizer_only, trust_remote_code)
        return local
    if local.is_file():
        raise UsageError(f"{name_or_path}: is a file", hint="give the directory that contains it")
    if not _HUB_ID.match(name_or_path):
        raise UsageError(
            f"{name_or_path}: no such directory", hint="give a directory that exists, or a hub id such as organisation/model"
        )
    need_weights = need_weights and not tokenizer_only
    cached = _cached(name_or_path, revision, need_weights, tokenizer_only)
    code = [CODE_PATTERN] if trust_remote_code else []
    fetch = partial(_fetch, name_or_path, say=say, progress=progress)
    directory = cached or fetch(revision, [CONFIG_NAME, INDEX_NAME, *PATTERNS, *code])
    _check(name_or_path, directory, tokenizer_only, trust_remote_code)  # before gigabytes are downloaded for nothing
    if cached is None and need_weights:
        names = _weight_names(directory)
        fetch(directory.name, [glob.escape(name) for name in names])  # of the same commit
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise UsageError(
                f"{name_or_path}: the repository has no {missing[0]}",
                hint="fuyou reads safetensors only: choose a revision or another repository that has them.",
            )
    return directory


def _written(name: str, shapes: dict[str, Any]) -> Path:
    """Returns a folder of ours with these shapes as config.json."""
    folder = kept_folder() / "shapes" / name.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{os.getpid()}"
    draft.write_text(json.dumps(shapes, indent=2), encoding="utf-8")
    draft.replace(folder / CONFIG_NAME)
    return folder


def _check(name_or_path: str, directory: Path, tokenizer_only: bool, trust_remote_code: bool) -> None:
    if tokenizer_only:
        if not has_tokenizer(directory):
            hint = "name a folder or a hub id that has one (tokenizer.json) in tokenizer.name_or_path"
            raise UsageError(f"{name_or_path}: has no tokenizer", hint=hint)
        return
    if not (directory / CONFIG_NAME).is_file():
        if (directory / ADAPTER_CONFIG_NAME).is_file():
            raise an_adapter(name_or_path)
        raise UsageError(f"{name_or_path}: has no {CONFIG_NAME}", hint="give a model in the transformers format")
    if not trust_remote_code:
        refuse_remote_code(directory)


def refuse_remote_code(directory: Path) -> None:
    """Raises UsageError if the model can only be built with code from its own repository.

    Many repositories still name such code although transformers now has the architecture. They are accepted, and the code does
    not run.
    """
    config = read_json(directory / CONFIG_NAME)
    if "auto_map" not in config:
        return
    from transformers import CONFIG_MAPPING

    if not isinstance(kind := config.get("model_type"), str) or kind not in CONFIG_MAPPING:
        raise UsageError(
            f"{directory / CONFIG_NAME}: the model needs code from its own repository",
            hint="read that code, then set model.trust_remote_code: true in the recipe if you trust it",
        )


def _weight_names(directory: Path) -> list[str]:
    """Lists the weight files of a snapshot from its index; without an index, the single file."""
    if (directory / INDEX_NAME).exists():
        return sorted(set(shard_map(directory).values()))
    return [SINGLE_NAME]


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer is there. A cache filled by a tool that downloads weights alone has none."""
    return any(file.name.startswith(_TOKENIZER_FILES) for file in directory.glob("*"))


def _cached(name: str, revision: str | None, need_weights: bool, tokenizer_only: bool) -> Path | None:
    """Returns the snapshot in the local cache, or None if something is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[CONFIG_NAME]))
    except LocalEntryNotFoundError:
        return None
    needed = [] if tokenizer_only else [CONFIG_NAME]
    needed += _weight_names(directory) if need_weights else []
    complete = all((directory / name).is_file() for name in needed) and has_tokenizer(directory)
    return directory if complete else None


def _fetch(name: str, revision: str | None, patterns: list[str], *, say: Callable[[str], None], progress: Progress) -> Path:
    """Downloads the files that match a pattern and are not in the cache. Checks free space first; returns the snapshot's
    folder."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The client's errors derive from those of its HTTP library. RuntimeError is all that the
    # client of the hub's faster transport raises.
    expected: tuple[type[Exception], ...] = (HFValidationError, RuntimeError, OSError, *HfHubHTTPError.__bases__)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings would overwrite our lines
    options: dict[str, Any] = {"revision": revision, "allow_patterns": patterns}
    try:
        planned = snapshot_download(name, dry_run=True, tqdm_class=_progress_bar(lambda done: None), **options)
        sizes = [file.file_size or 0 for file in planned if file.will_download]
        total = sum(sizes)
        if sizes:
            say(f"downloading {name}: {len(sizes)} files, {total:,} bytes")
        cache = existing(Path(constants.HF_HUB_CACHE))
        if total > (free := shutil.disk_usage(cache).free):
            raise OutOfSpaceError(
                f"{name}: the download takes {gb(total)}, but only {gb(free)} are free in {cache}",
                hint="free some space, or set HF_HOME to a directory on another disk",
            )

        def report(done: int) -> None:
            progress(f"downloading {name}", min(done, total), total)

        folder = snapshot_download(name, tqdm_class=_progress_bar(report), **options)
        if total:
            report(total)
        return Path(folder)
    except FuyouError:
        raise
    except expected as error:
        raise _explained(name if revision is None else f"{name}@{revision}", error) from error


def _explained(at: str, error: BaseException) -> FuyouError:
    """Turns an error of the client into ours with a remedy. The client wraps the hub's answer: the first known error counts."""
    from huggingface_hub import errors

    absent = "no such directory on this machine, and no such model on the hub"
    known = (
        (errors.GatedRepoError, "its owner restricts access", f"accept the terms on the model's page, then {_LOG_IN}"),
        (errors.RevisionNotFoundError, "no such revision on the hub", "Check model.revision in the recipe."),
        (errors.RepositoryNotFoundError, absent, f"check the spelling; for a private model {_LOG_IN}"),
    )
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and len(chain) < 16:
        chain.append(cause)
    for cause in chain:
        for kind, what, hint in known:
            if isinstance(cause, kind):
                return UsageError(f"{at}: {what}", hint=hint)
        if isinstance(cause, errors.HfHubHTTPError) and (code := cause.response.status_code) in (401, 403):
            hint = f"the token may be wrong or lack the right: {_LOG_IN}"
            return UsageError(f"{at}: the hub refuses access ({code})", hint=hint)
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return OutOfSpaceError(
                f"{at}: the disk of the hub's cache is full",
                hint=f"{remedy(cause) or 'free some space'}; then run the same command again: finished parts are kept",
            )
    name, text = type(chain[-1]).__name__, str(chain[-1]).partition("\n")[0][:160]
    why = "HF_HUB_OFFLINE is set" if name == "OfflineModeIsEnabled" else f"{name}: {text}"
    return UsageError(
        f"{at}: no such directory, not in the local cache, and the download failed ({why})",
        hint="check the connection, or copy the model to a local directory and give its path",
    )


def _progress_bar(report: Callable[[int], None]) -> type[Any]:
    """Makes a class for the client's `tqdm_class` that draws nothing and passes the bytes of a download to `report`."""
    from huggingface_hub.utils.tqdm import tqdm

    counts: dict[int, float] = {}  # by bar: newer clients have one for bytes received and one for bytes written
    lock = threading.Lock()

    class Bar(tqdm):  # type: ignore[misc,unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._of_bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call,unused-ignore]

        def update(self, n: float | None = 1) -> None:
            if self._of_bytes:
                with lock:
                    counts[id(self)] = counts.get(id(self), 0) + (n or 0)
                    report(int(max(counts.values())))

    return Bar
