"""Reads `key=value` on the command line: `optimizer.lr=3e-6`, `dataset.train[0].path=rows.jsonl`, `train.max_steps=null`.

`key=null` clears a key and `key=""` is the empty text. `key=`, or an empty value inside one, is refused: a shell makes it from
an unset variable, and it must not silently restore a default.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..core.printable import one_line
from ..core.typed import show_path
from .diagnostics import COMMAND_LINE, Diagnostic, Path, Place
from .marks import Source, scan, syntax_error

_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+|\[\d{1,6}\])*")
_SHOWN = 60  # characters of a value
_PART = re.compile(r"[\w-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    text: str
    path: Path
    value: Any

    @property
    def place(self) -> Place:
        return Place(file=COMMAND_LINE, source=self.text)


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Diagnostic]]:
    """Returns the overrides that can be read, and the errors in the others."""
    overrides, wrong = [], []
    for text in texts:
        found = _parse(text)
        if isinstance(found, Override):
            overrides.append(found)
        else:
            wrong += found
    return overrides, wrong


def _parse(text: str) -> Override | list[Diagnostic]:
    key, separator, value = text.partition("=")
    if not separator or not _KEY.fullmatch(key):
        return [_problem(text, "expected key=value, such as optimizer.lr=3e-6", _help(text))]
    source = Source(file=COMMAND_LINE, text=value)
    if wrong := scan(source):
        return [
            _problem(text, f"the value is not valid: {problem.message}", 'quote it for YAML: key="text"', problem.code)
            for problem in wrong
        ]
    for path in _unwritten(yaml.compose(value, Loader=yaml.SafeLoader), ()):
        what = f"the value of `{show_path(path)}`" if path else "the value"
        null = f"{show_path(path)}: null" if path else f"{key}=null"
        remedy = f"write `{null}` to clear the key, or give a value (is a shell variable unset?)"
        return [_problem(text, f"{what} is empty", remedy)]
    try:
        loaded = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except yaml.YAMLError as error:
        return [_problem(text, f"the value is not valid: {syntax_error(source, error).message}")]
    except (OmegaConfBaseException, ValueError, OverflowError, RecursionError) as error:
        return [_problem(text, f"the value is not valid: {first_line(error)}")]
    at = tuple(int(part) if part.isdecimal() and part.isascii() else part for part in _PART.findall(key))
    return Override(text=text, path=at, value=loaded["value"] if isinstance(loaded, dict) else None)


def _unwritten(node: yaml.Node | None, path: Path) -> Iterator[Path]:
    """Lists the places with no value at all. A quoted empty text is a value."""
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value and node.style is None):
        yield path
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _unwritten(value, (*path, str(name.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _unwritten(value, (*path, index))


def _problem(text: str, message: str, remedy: str | None = None, code: str = "override") -> Diagnostic:
    return Diagnostic(place=Place(file=COMMAND_LINE, source=text), code=code, message=message, help=remedy)


def _help(text: str) -> str | None:
    bare = text.lstrip("-")
    if bare != text and "=" in bare:
        return f"write overrides without dashes: {bare}"
    if ":" in text and "=" not in text:
        return f"write {text.replace(': ', '=').replace(':', '=', 1)}"
    return None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def apply_override(data: dict[str, Any], override: Override) -> Diagnostic | None:
    """Changes `data` in place. Merges sections, replaces lists and values, and creates missing sections."""
    at: Any = data
    for depth, part in enumerate(override.path[:-1], start=1):
        if isinstance(at, dict) and at.get(str(part)) is None:
            at[str(part)] = {}
        below = _step(at, part)
        if not isinstance(below, (dict, list)):
            return _no_way(override, depth, at, below)
        at = below
    last = override.path[-1]
    if isinstance(at, list) and (not isinstance(last, int) or last >= len(at)):
        return _no_way(override, len(override.path), at, None)
    here: Any = last if isinstance(at, list) else str(last)
    old = _step(at, last)
    at[here] = _merged(old, override.value) if isinstance(old, dict) and isinstance(override.value, dict) else override.value
    return None


def spelt(value: Any) -> str:
    """Shows a value as a recipe has it, on one short line."""
    text = one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def as_override(key: str, value: Any) -> str:
    """Returns the word of a shell's command line that gives a key this value."""
    value = None if value == {} else value  # sections are merged, so an empty one changes nothing
    return shlex.quote(f"{key}={value if _is_plain(value) else json.dumps(value)}")


def _is_plain(value: Any) -> bool:
    """Tells whether YAML reads a text as itself without quotes."""
    try:
        return isinstance(value, str) and value.isprintable() and bool(yaml.safe_load(value) == value)
    except yaml.YAMLError:
        return False


def _step(at: Any, part: str | int) -> Any:
    if isinstance(at, list):
        return at[part] if isinstance(part, int) and part < len(at) else None
    return at.get(str(part))


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _no_way(override: Override, depth: int, at: Any, below: Any) -> Diagnostic:
    shown = show_path(override.path[:depth])
    if isinstance(at, list):
        message = f"`{show_path(override.path[: depth - 1])}` is a list of {len(at)}, counted from 0"
        remedy = f"write `{show_path((*override.path[: depth - 1], 0))}` for the first" if at else None
        return _problem(override.text, message, remedy)
    return _problem(override.text, f"`{shown}` is a value and has no keys below it")
