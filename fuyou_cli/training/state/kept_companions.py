"""Keeps the small files of a run's model and tokenizer beside its store. Every export needs them besides weights.

The folder that the run started from may be gone later, and it lacks the changes that the recipe made.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoint.files import (
    ADAPTER_CONFIG_NAME,
    CODE_PATTERN,
    CONFIG_NAME,
    MODEL_PATTERNS,
    PATTERNS,
    TEMPLATE_FOLDER,
    TOKENIZER_CONFIG_NAME,
    found_in,
    inside,
    is_companion,
    names_code,
    read_json,
)
from ...core.disk import failed_writing, file_size, sync_directory, unreadable
from ...core.paths import expanded, is_own, own_folder, pieces, write_own
from .manifest import COMPANIONS

if TYPE_CHECKING:
    from ...recipe.schema import TokenizerSection

_CONFIG, _TEMPLATE = TOKENIZER_CONFIG_NAME, "chat_template.jinja"
_OTHER_TEMPLATES = ("chat_template.json", f"{TEMPLATE_FOLDER}/")  # beginnings of names
_TOKEN_TABLES = ("tokenizer.json", _CONFIG)
_UNFINISHED = ".unfinished"
_PIECE, _LONGEST_TOKEN = 1 << 20, 1 << 16  # bytes of a token table that are searched at once, and of a token in it


def kept_companions(store: Path) -> Path | None:
    """Returns the folder that `keep_companions` filled, or None if there is none. Raises UnreadableError where nobody can tell
    now."""
    folder = store / COMPANIONS
    return folder if file_size(folder / CONFIG_NAME) is not None else None


def written_companions(store: Path) -> list[Path]:
    """Lists the files in that folder that `keep_companions` writes. Other files there belong to somebody else."""
    folder = store / COMPANIONS
    paths = [*folder.glob("*"), *_templates(folder)]
    return sorted(path for path in paths if is_kept(_name(path, folder)) and path.is_file() and not path.is_symlink())


def _templates(folder: Path) -> list[Path]:
    """Lists what is in a folder's folder of templates, unless that is a link."""
    inner = folder / TEMPLATE_FOLDER
    return [] if inner.is_symlink() else sorted(inner.glob("*"))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def kept_adapter(store: Path) -> Path | None:
    """Returns the peft configuration of the adapter that the store's run trains, or None if it trains the model itself."""
    config = store / COMPANIONS / ADAPTER_CONFIG_NAME
    return config if file_size(config) is not None else None


def keep_companions(
    store: Path, recipe: TokenizerSection, *, model_dir: Path, tokenizer_dir: Path, adapter: bytes | None = None
) -> None:
    """Copies what an export needs besides weights, so that its tokenizer is the one that the run was trained with. adapter: its
    peft configuration, for a run that trains one."""
    folder, files = store / COMPANIONS, _copies(model_dir, tokenizer_dir)
    if adapter is not None:
        files[ADAPTER_CONFIG_NAME] = adapter
    saved = read_json(inside(tokenizer_dir, _CONFIG)) if (tokenizer_dir / _CONFIG).is_file() else {}
    settings: dict[str, Any] = dict(saved)
    if tokenizer_dir != model_dir and (tokenizer_dir / "tokenizer.json").is_file():
        # without its own class it would be looked up by the model's type, which may not fit this tokenizer
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if recipe.chat_template is not None:
        # those with names too: the run was trained with this one alone, whatever a conversation's tools would choose
        files = {name: content for name, content in files.items() if not name.startswith(_OTHER_TEMPLATES)}
        files[_TEMPLATE] = expanded(recipe.chat_template, key="tokenizer.chat_template")
        settings.pop("chat_template", None)
    if recipe.pad_token is not None and _is_added(tokenizer_dir, settings, recipe.pad_token):
        settings["pad_token"] = recipe.pad_token
    if settings != saved:
        files[_CONFIG] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    try:
        _replace(folder, files)
    except OSError as error:
        if error.filename is None:  # errors of a write or a flush name no file
            raise failed_writing(folder, error) from error
        raise


def _copies(model_dir: Path, tokenizer_dir: Path) -> dict[str, bytes | Path]:
    """Finds the model's files in its folder and the tokenizer's in its own."""
    patterns: tuple[str, ...] = (CONFIG_NAME, *MODEL_PATTERNS)
    if "auto_map" in read_json(inside(model_dir, CONFIG_NAME)):
        patterns = (*patterns, CODE_PATTERN)
    tokenizer = tuple(pattern for pattern in PATTERNS if pattern not in MODEL_PATTERNS)
    if names_code(tokenizer_dir, _CONFIG):
        tokenizer = (*tokenizer, CODE_PATTERN)
    return {
        name: inside(directory, name)
        for directory, wanted in ((tokenizer_dir, tokenizer), (model_dir, patterns))
        for name in found_in(directory, wanted)
    }


def _is_added(tokenizer_dir: Path, settings: dict[str, Any], token: str) -> bool:
    """Tells whether the tokenizer treats `token` as one token in a text. Naming another token would change the ids of texts."""
    if token in [value for name, value in settings.items() if name.endswith("_token")]:
        return True
    spelled = "|".join(re.escape(json.dumps(token, ensure_ascii=ascii_only)) for ascii_only in (False, True))
    pattern = re.compile(rf'"content"\s*:\s*(?:{spelled})'.encode())
    return any(_holds(tokenizer_dir / name, pattern) for name in _TOKEN_TABLES)


def _holds(file: Path, pattern: re.Pattern[bytes]) -> bool:
    if not file.is_file() or file.stat().st_size == 0:
        return False
    seen = b""
    try:
        with file.open("rb") as stream:  # not mapped: a drive that fails would end the process by a signal
            while piece := stream.read(_PIECE):
                seen = seen[-_LONGEST_TOKEN:] + piece
                if pattern.search(seen):
                    return True
    except OSError as error:
        raise unreadable(file, error) from error
    return False


def _replace(folder: Path, files: dict[str, bytes | Path]) -> None:
    """Makes `files` the folder's companions. Each is replaced in one step, config.json last: a folder that has it is
    complete."""
    folders = [folder, *{(folder / name).parent for name in files if "/" in name}]
    for each in folders:
        own_folder(each)
    changed = (name for name in files if not _is_kept_already(folder / name, files[name]))
    names = sorted(changed, key=lambda name: (name == CONFIG_NAME, name))
    for name in names:
        write_own(folder / _unfinished(name), pieces(files[name]))
    for name in names:
        (folder / _unfinished(name)).replace(folder / name)
    for each in folders:
        sync_directory(each)
    for path in (*sorted(folder.iterdir()), *_templates(folder)):
        name = _name(path, folder)
        if name not in files and is_kept(name):  # no longer needed, or left by a run that was killed
            path.unlink()
    if len(folders) == 1 and not (folder / TEMPLATE_FOLDER).is_symlink():
        with suppress(OSError):  # it is not there, or holds what is not ours
            (folder / TEMPLATE_FOLDER).rmdir()
    for each in folders:
        sync_directory(each)


def _is_kept_already(path: Path, content: bytes | Path) -> bool:
    """Tells whether the same content is there already. So a run that needs no new room can resume on a full disk."""
    if not is_own(path):
        return False
    return all(kept == wanted for kept, wanted in zip_longest(pieces(path), pieces(content)))


def _unfinished(name: str) -> str:
    """Returns the name of a file while it is written. It matches no pattern of companions, so it is never exported."""
    folder, slash, alone = name.rpartition("/")
    return f"{folder}{slash}.{alone}{_UNFINISHED}"


def is_kept(name: str) -> bool:
    """Tells whether a companion, or one that is being written, can have this name."""
    folder, slash, alone = name.rpartition("/")
    is_unfinished = alone.endswith(_UNFINISHED)
    return is_companion(name) or (is_unfinished and is_companion(folder + slash + alone[1 : -len(_UNFINISHED)]))
