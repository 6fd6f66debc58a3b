"""Keeps on disk what plans found out about a model, so that planning it again loads neither torch nor transformers.

Whatever a description depends on is in the name of its file: the model's configuration, the recipe's keys that change the
model, every installed package, and fuyou's own code. A file that is damaged, or of another version, counts as absent.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import UsageError
from ..core.json_files import find_text, object_in
from ..core.paths import kept_folder, machine_id
from ..core.safe_files import read_plain, write_own
from ..core.typed import from_json
from .stored_quantised import quantised_keys, stored_in

if TYPE_CHECKING:
    from ..recipe.schema import Recipe

Kind = TypeVar("Kind")
LARGEST = 32 << 20  # bytes of a file; the one of 405B parameters with an adapter has under 1 MB
_PLAIN = (str, int, float, type(None))
MOST = 100  # files; more push out those that were not used for longest
_DESCRIBING = (
    "adapters",
    "checkpoint",
    "core",
    "engine",
    "planner",
    "recipe",
    "spec",
    "training",
)  # folders with the code that makes what is kept


class Descriptions:
    """Finds and keeps what is known of one model with one recipe. With an empty key, nothing is found or kept."""

    def __init__(self, key: str) -> None:
        self._key = key

    @classmethod
    def of(cls, recipe: Recipe, model_dir: Path) -> Descriptions:
        """Returns those of the model in a folder. Nothing is known of a model with code of its own: that may do anything."""
        if recipe.model.trust_remote_code or _may_change():
            return cls("")
        try:
            return cls(_key(recipe, model_dir))
        except (OSError, ValueError, UsageError):  # whoever builds the model says what is wrong
            return cls("")

    def find(self, kind: type[Kind], *about: object) -> Kind | None:
        """Returns what was kept under `about`, or None."""
        if not self._key:
            return None
        path = self._path(kind, about)
        try:
            found = read_description(kind, path)
        except UsageError:
            return None
        if found is not None:
            with suppress(OSError):
                os.utime(path)  # used now
        return found

    def keep(self, value: Any, *about: object) -> None:
        """Keeps a value, if its folder can be written to."""
        if not self._key:
            return
        path = self._path(type(value), about)
        whole = path.with_name(f"{path.name}.{os.getpid()}")  # renamed when complete: nobody reads half of it
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                write_own(whole, [written(value)])
                whole.replace(path)
            finally:
                whole.unlink(missing_ok=True)
            _remove_oldest(path.parent)

    def _path(self, kind: type[Any], about: tuple[object, ...]) -> Path:
        return kept_folder() / "models" / f"{_digest([self._key, kind.__name__, *map(repr, about)])[:32]}.json"


def written(value: Any) -> bytes:
    """Returns the content of a file: a digest of the rest, and the value without what is as its type has it anyway."""
    body = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def read_description(kind: type[Kind], path: Path) -> Kind | None:
    """Reads such a file. Returns None if there is none. Raises UsageError for one that is damaged."""
    text = find_text(path, limit=LARGEST)
    if text is None:
        return None
    digest, _, body = text.partition("\n")
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        raise UsageError(f"{path}: is damaged")
    return from_json(kind, object_in(path, body), defaults=True)


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    found = {}
    for name, default in _fields(type(value)):  # type: ignore[arg-type]  # mypy takes the class for an instance
        one = getattr(value, name)
        if one is None or one != default:
            found[name] = _plain(one)
    return found


@cache  # a large model has a hundred thousand of a kind
def _fields(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the names of a dataclass's fields that it is made from, with what they are by default."""
    return tuple((field.name, field.default) for field in fields(kind) if field.init)


def _remove_oldest(folder: Path) -> None:
    """Removes the files above `MOST`, and what a process left that was killed while it wrote."""
    used = sorted((file.lstat().st_mtime_ns, file) for file in folder.iterdir())
    for _, file in used[:-MOST]:
        with suppress(OSError):  # what is no file is not ours
            file.unlink()


# ---- what a description depends on -----------------------------------------------------------------------------------


def _key(recipe: Recipe, model_dir: Path) -> str:
    train, model = recipe.train, recipe.model
    return _digest(
        [
            {file.name: _sum(file) for file in sorted(model_dir.glob("config*.json"))},
            [model.attn_implementation, model.quantisation, model.kernels, recipe.precision.compute, train.head_chunk_vocab],
            [recipe.dataset.packing == "isolated", list(recipe.freeze)],
            quantised_keys(model_dir) if stored_in(model_dir) is not None else None,
            None if recipe.adapter is None else recipe.adapter.model_dump(mode="json", exclude={"start"}),
            [sys.version, platform.platform(), machine_id(), list(_installed()), _own_code()],
        ]
    )


def _sum(file: Path) -> str:
    return hashlib.sha256(read_plain(file, limit=LARGEST)).hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _installed() -> Iterator[tuple[str, int]]:
    """Yields the name, with the version, of every installed package, and when it was installed."""
    for place in dict.fromkeys(sys.path):
        with suppress(OSError), os.scandir(place or ".") as entries:
            yield from sorted(
                (entry.name, entry.stat().st_mtime_ns) for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))
            )


def _may_change() -> bool:
    """Tells whether one of the libraries is a folder that somebody works on: its version does not say what is in it."""
    return any(map(_is_worked_on, ("transformers", "torch", "peft")))


def _is_worked_on(name: str) -> bool:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return name != "peft"  # which need not be there
    return not any(Path(found.origin).parents[1].glob(f"{name}-*.dist-info"))


def _own_code() -> str:
    package, code = Path(__file__).parents[1], hashlib.sha256()
    for folder in _DESCRIBING:
        for file in sorted((package / folder).rglob("*.py")):
            code.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return code.hexdigest()
