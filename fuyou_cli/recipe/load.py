"""Loads a file and overrides. Returns a checked `Recipe` or raises `RecipeErrors` for any input."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..core.disk import remedy
from ..core.json_files import show_path
from ..core.paths import read_plain
from .diagnostics import COMMAND_LINE, Diagnostic, Keys, RecipeErrors, TextPlace
from .rules import check, take_removed
from .schema import Recipe

_MOST_REFERENCES = 8  # `${...}`: enough for any recipe, too few to multiply a text beyond memory
MAX_BYTES = 256 * 1024
_MAX_DEPTH = 24
_MAX_NODES = 20_000
_STRING = "tag:yaml.org,2002:str"
_LINE_ENDS = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # line ends of YAML
_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+|\[\d{1,6}\])*")
_PART = re.compile(r"[\w-]+")


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
    source = RecipeText(file=name, text=_read(name))
    parsed, wrong = parse_overrides(overrides)
    unread = scan(source)
    data, unread = ({}, unread) if unread else _build(source)
    if unread:
        raise RecipeErrors([*unread, *wrong], name=name)
    applied = []
    for override in parsed:
        if (problem := apply_override(data, override)) is not None:
            wrong.append(problem)
        else:
            applied.append(override)
    references = _resolve(data)
    notes, removed = take_removed(data)
    recipe, findings = check(data, ignore=frozenset(finding.path for finding in references))
    findings = [*references, *removed, *findings]
    located = [replace(diagnostic, place=_place(diagnostic, source, applied), at_key=False) for diagnostic in findings]
    located = list(dict.fromkeys(located))
    located.sort(key=lambda diagnostic: (diagnostic.place.file != name, diagnostic.place.line, diagnostic.place.column))
    wrong = located + wrong
    if recipe is None or wrong:
        raise RecipeErrors(wrong, name=name)
    shown = []
    for note in notes:
        place = _place(note, source, applied)
        line = "" if place.source is None or place.file == COMMAND_LINE else f":{place.line + 1}"
        shown.append(f"{place.file}{line}: note: {note.message}")
    return LoadedRecipe(recipe=recipe, path=Path(path), text=source.text, overrides=tuple(overrides), notes=tuple(shown))


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
    return RecipeErrors([Diagnostic(place=TextPlace(file=name), code=code, message=message, help=remedy)], name=name)


def _build(source: RecipeText) -> tuple[dict[str, Any], list[Diagnostic]]:
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
    return [problem for path, text in written if (problem := _resolve_one(data, config, path, text)) is not None]


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


def _place(finding: Diagnostic, source: RecipeText, overrides: list[Override]) -> TextPlace:
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
    return TextPlace(file=source.file)


def _same(first: Keys, second: Keys) -> bool:
    """Compares paths. Overrides write list indices as keys: train.0.path."""
    return tuple(map(str, first)) == tuple(map(str, second))


# ---- places in a text, and its structure -----------------------------------------------------------------------------


# The check reads parser events, without recursion. It refuses hostile nesting, anchors (which multiply) and tags that name
# Python objects, before a loader sees them.


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    key: TextPlace | None  # None for entries of a list
    value: TextPlace


@dataclass(frozen=True, kw_only=True)
class RecipeText:
    """Holds a YAML text and the places of its keys and values. `file` is its name in diagnostics."""

    file: str
    text: str
    marks: dict[Keys, Mark] = field(default_factory=dict)

    @cached_property
    def lines(self) -> list[str]:
        return _LINE_ENDS.split(self.text)

    def place(self, start: yaml.Mark | None, end: yaml.Mark | None = None) -> TextPlace:
        """Returns the part of the first line between two of the parser's marks."""
        if self.file == COMMAND_LINE:
            return TextPlace(file=COMMAND_LINE, source=self.text)
        if start is None:
            return TextPlace(file=self.file)
        lines = self.lines
        line = min(start.line, len(lines) - 1)  # the mark "end of text" may be after the last line
        source = lines[line]
        column = min(start.column, len(source))
        stop = column + 1 if end is None else end.column if end.line == start.line else len(source.rstrip())
        return TextPlace(file=self.file, line=line, column=column, end=stop, source=source)


def scan(source: RecipeText) -> list[Diagnostic]:
    """Fills `source.marks` and returns everything that makes the text unusable as a recipe, as far as possible."""
    try:
        refused = list(_scan_events(source))
        if refused:
            return refused
        root = yaml.compose(source.text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        return [syntax_error(source, error)]
    except (ValueError, OverflowError, RecursionError) as error:  # escapes such as "\UFFFFFFFF" end up in chr()
        return [Diagnostic(place=TextPlace(file=source.file), code="syntax", message=f"not valid YAML: {error}")]
    if root is None:
        return []
    return list(_walk(source, root, (), None))


def syntax_error(source: RecipeText, error: yaml.YAMLError) -> Diagnostic:
    """Makes a diagnostic from a loader's error. OmegaConf's error has no snippet, so the place comes from the mark."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.problem, error.context) if part) or "not valid YAML"
        if repr("\t") in message:
            message = "found a tab where YAML allows only spaces"
        tab = mark is not None and mark.line < len(source.lines) and "\t" in source.lines[mark.line][: mark.column + 1]
        remedy = "YAML does not indent with tabs; use spaces" if tab else None
        return Diagnostic(place=source.place(mark), code="syntax", message=message, help=remedy)
    if isinstance(error, yaml.reader.ReaderError):
        before = _LINE_ENDS.split(source.text[: error.position])
        mark = yaml.Mark(source.file, error.position, len(before) - 1, len(before[-1]), None, None)
        code = ord(error.character) if isinstance(error.character, str) else error.character
        message, remedy = f"character U+{code:04X} is not allowed in YAML", "save the recipe as plain UTF-8 text"
        return Diagnostic(place=source.place(mark), code="syntax", message=message, help=remedy)
    return Diagnostic(place=source.place(None), code="syntax", message="not valid YAML")


def _scan_events(source: RecipeText) -> Iterator[Diagnostic]:
    nodes = depth = 0
    for event in yaml.parse(source.text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if not isinstance(event, yaml.NodeEvent):
            continue
        place = source.place(event.start_mark, event.end_mark)
        if event.anchor is not None:
            help_ = "write the value itself, or `${section.key}` for the value of another key"
            yield Diagnostic(place=place, code="syntax", message="a recipe must not have YAML anchors or aliases", help=help_)
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            yield Diagnostic(place=place, code="syntax", message=f"a recipe must not have YAML tags, found {tag}")
        nodes += 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        if depth > _MAX_DEPTH or nodes > _MAX_NODES:
            message = f"this is not a recipe: more than {_MAX_NODES} values or {_MAX_DEPTH} levels"
            yield Diagnostic(place=place, code="too-large", message=message)
            return


def _walk(source: RecipeText, node: yaml.Node, path: Keys, key: TextPlace | None) -> Iterator[Diagnostic]:
    """Records the place of `node` and of everything below it, and reports duplicate and unusable keys on the way."""
    source.marks[path] = Mark(key=key, value=_value_place(source, node, key))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(source, item, (*path, index), None)
    elif isinstance(node, yaml.MappingNode):
        yield from _walk_mapping(source, node, path)
    elif isinstance(node, yaml.ScalarNode) and any("\ud800" <= character <= "\udfff" for character in node.value):
        yield Diagnostic(place=source.marks[path].value, code="syntax", message="half of a surrogate pair is not a character")


def _walk_mapping(source: RecipeText, node: yaml.MappingNode, path: Keys) -> Iterator[Diagnostic]:
    first: dict[str, TextPlace] = {}
    for name, value in node.value:
        place = source.place(name.start_mark, name.end_mark)
        if not isinstance(name, yaml.ScalarNode) or name.tag != _STRING:
            shown = f"`{name.value}`" if isinstance(name, yaml.ScalarNode) else "this"
            yield Diagnostic(place=place, code="bad-key", message=f"{shown} is not a key: keys are words")
            continue
        below = (*path, name.value)
        if name.value in first:
            earlier = f"first written in line {first[name.value].line + 1}; keep one of them"
            yield Diagnostic(
                place=place, code="duplicate-key", message=f"`{show_path(below)}` is written twice", path=below,
                help=earlier if source.file != COMMAND_LINE else None,
            )  # fmt: skip
        else:
            first[name.value] = place
            yield from _walk(source, value, below, place)


def _value_place(source: RecipeText, node: yaml.Node, key: TextPlace | None) -> TextPlace:
    """Points at the key for a block of lines or a missing value."""
    block = isinstance(node, yaml.CollectionNode) and not node.flow_style
    empty = isinstance(node, yaml.ScalarNode) and node.start_mark.index == node.end_mark.index
    if key is not None and (block or empty):
        return key
    return source.place(node.start_mark, node.end_mark)


# ---- `key=value` on the command line ---------------------------------------------------------------------------------


# `key=null` clears a key and `key=""` is the empty text. `key=`, or an empty value inside one, is refused: a shell makes it
# from an unset variable, and it must not silently restore a default.


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    text: str
    path: Keys
    value: Any

    @property
    def place(self) -> TextPlace:
        return TextPlace(file=COMMAND_LINE, source=self.text)


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Diagnostic]]:
    """Returns the overrides that can be read, and the errors in the others."""
    overrides, wrong = [], []
    for text in texts:
        parsed = _parse(text)
        if isinstance(parsed, Override):
            overrides.append(parsed)
        else:
            wrong += parsed
    return overrides, wrong


def _parse(text: str) -> Override | list[Diagnostic]:
    key, separator, value = text.partition("=")
    if not separator or not _KEY.fullmatch(key):
        return [_problem(text, "expected key=value, such as optimizer.lr=3e-6", _help(text))]
    source = RecipeText(file=COMMAND_LINE, text=value)
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


def _unwritten(node: yaml.Node | None, path: Keys) -> Iterator[Keys]:
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
    return Diagnostic(place=TextPlace(file=COMMAND_LINE, source=text), code=code, message=message, help=remedy)


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
    key: Any = last if isinstance(at, list) else str(last)
    old = _step(at, last)
    at[key] = _merged(old, override.value) if isinstance(old, dict) and isinstance(override.value, dict) else override.value
    return None


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
