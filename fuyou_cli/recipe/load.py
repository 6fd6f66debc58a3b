"""Loads a file and overrides. Returns a checked `Recipe` or raises `RecipeErrors` for any input."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..core.disk import remedy
from ..core.safe_files import read_plain
from ..core.typed import show_path
from .check import check
from .diagnostics import COMMAND_LINE, Diagnostic, Place, RecipeErrors
from .diagnostics import Path as Keys
from .marks import MAX_BYTES, Source, scan, syntax_error
from .overrides import Override, apply_override, first_line, parse_overrides
from .removed import take_removed
from .schema import Recipe

_MOST_REFERENCES = 8  # `${...}`: enough for any recipe, too few to multiply a text beyond memory


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRecipe:
    """Holds a recipe with its source: the text as written, the overrides applied to it, and notes for the user."""

    recipe: Recipe
    path: Path
    text: str
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Loads a recipe. Raises RecipeErrors with everything that is wrong, each with its place."""
    name = os.fspath(path)
    source = Source(file=name, text=_read(name))
    parsed, wrong = parse_overrides(overrides)
    structure = scan(source)
    if structure:
        raise RecipeErrors([*structure, *wrong], name=name)
    data, unread = _build(source)
    if unread:
        raise RecipeErrors([*unread, *wrong], name=name)
    applied = []
    for override in parsed:
        problem = apply_override(data, override)
        wrong += [problem] if problem is not None else []
        applied += [override] if problem is None else []
    references = _resolve(data)
    notes, removed = take_removed(data)
    recipe, findings = check(data, ignore=frozenset(finding.path for finding in references))
    findings = [*references, *removed, *findings]
    located = [replace(found, place=_place(found, source, applied), at_key=False) for found in findings]
    wrong = sorted({diagnostic: None for diagnostic in located}, key=lambda found: _order(found, name)) + wrong
    if recipe is None or wrong:
        raise RecipeErrors(wrong, name=name)
    told = tuple(f"{_where(_place(note, source, applied))}: note: {note.message}" for note in notes)
    return LoadedRecipe(recipe=recipe, path=Path(path), text=source.text, overrides=tuple(overrides), notes=told)


def _where(place: Place) -> str:
    return place.file if place.source is None or place.file == COMMAND_LINE else f"{place.file}:{place.line + 1}"


def _order(diagnostic: Diagnostic, name: str) -> tuple[bool, int, int]:
    return (diagnostic.place.file != name, diagnostic.place.line, diagnostic.place.column)


def _read(name: str) -> str:
    """Reads the text of the file. Raises RecipeErrors if it cannot be a recipe."""
    try:
        raw = read_plain(Path(name), limit=MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        code = "not-found" if isinstance(error, FileNotFoundError) else "unreadable"
        raise _refused(name, code, f"cannot be read: {reason}", remedy(error)) from None
    if len(raw) > MAX_BYTES:
        raise _refused(name, "too-large", f"this is not a recipe: more than {MAX_BYTES // 1024} KiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"byte {raw[error.start]:#04x} in line {line} is not UTF-8"
        raise _refused(name, "encoding", message, "save the recipe as UTF-8 text") from None
    if "\0" in text:
        raise _refused(name, "encoding", "this is a binary file, not a recipe")
    return text


def _refused(name: str, code: str, message: str, remedy: str | None = None) -> RecipeErrors:
    return RecipeErrors([Diagnostic(place=Place(file=name), code=code, message=message, help=remedy)], name=name)


def _build(source: Source) -> tuple[dict[str, Any], list[Diagnostic]]:
    """Reads the text as plain data without resolving references. OmegaConf reads numbers as people write them (1e-5)."""
    root = source.marks.get(())
    if root is None:
        return {}, []
    try:
        loaded = yaml_to_data(source.text)
    except yaml.YAMLError as error:
        return {}, [syntax_error(source, error)]
    except OmegaConfBaseException as error:
        place = source.place(None)
        key = getattr(error, "full_key", None)
        for path, mark in source.marks.items():
            place = mark.value if key and show_path(path) == key else place
        return {}, [Diagnostic(place=place, code="reference", message=first_line(error))]
    except (ValueError, OverflowError, RecursionError) as error:
        return {}, [Diagnostic(place=source.place(None), code="syntax", message=f"not readable: {first_line(error)}")]
    if not isinstance(loaded, dict):
        message = "a recipe consists of sections and keys, such as `output_dir: outputs/my-run`"
        return {}, [Diagnostic(place=root.value, code="wrong-type", message=message)]
    return loaded, []


def yaml_to_data(text: str) -> Any:
    """Reads YAML with OmegaConf; None if the text is a single value. `???` and `${...}` stay as they are."""
    if isinstance(yaml.compose(text, Loader=yaml.SafeLoader), yaml.ScalarNode):
        return None
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def _resolve(data: dict[str, Any]) -> list[Diagnostic]:
    """Replaces `${...}` in `data` by its target. Returns references that cannot be resolved and values still to be filled
    in."""
    written = list(_unresolved(data, ()))
    references = sum(text.count("${") for _, text in written)
    if references > _MOST_REFERENCES:
        message = f"a recipe may have at most {_MOST_REFERENCES} references `${{...}}`, but this one has {references}"
        return [Diagnostic(code="too-large", message=message)]
    try:
        config = OmegaConf.create(data)
    except (OmegaConfBaseException, RecursionError) as error:
        return [Diagnostic(code="reference", message=first_line(error))]
    return [found for path, text in written if (found := _resolve_one(data, config, path, text)) is not None]


def _unresolved(value: Any, path: Keys) -> Iterator[tuple[Keys, str]]:
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unresolved(item, (*path, key))
    elif isinstance(value, str) and ("${" in value or value == "???"):
        yield path, value


def _resolve_one(data: Any, config: Any, path: Keys, text: str) -> Diagnostic | None:
    for part in path[:-1]:
        data, config = data[part], config[part]
    data[path[-1]] = None
    if text == "???":
        return Diagnostic(path=path, code="missing-key", message=f"`{show_path(path)}` has no value yet: replace ???")
    try:
        value = config[path[-1]]
        data[path[-1]] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        # resolvers (oc.decode and others) raise any error about the user's text
        reason = "it refers to itself" if isinstance(error, RecursionError) else first_line(error)
        return Diagnostic(path=path, code="reference", message=f"`{show_path(path)}`: {reason}")
    return None


def _place(finding: Diagnostic, source: Source, overrides: list[Override]) -> Place:
    """Finds the override that wrote the key, else its line in the file, else the nearest override, else the nearest section."""
    path = finding.path
    for override in reversed(overrides):
        if _same(override.path, path[: len(override.path)]):
            return override.place
    if mark := source.marks.get(path) if path else None:
        return mark.key if finding.at_key and mark.key is not None else mark.value
    for override in reversed(overrides):
        if path and _same(override.path[: len(path)], path):
            return override.place
    for end in range(len(path) - 1, 0, -1):
        if mark := source.marks.get(path[:end]):
            return mark.key or mark.value
    return Place(file=source.file)


def _same(one: Keys, other: Keys) -> bool:
    """Compares paths. Overrides write list indices as keys: train.0.path."""
    return tuple(map(str, one)) == tuple(map(str, other))
