"""Records where everything in a YAML text is, and checks its structure before anything is built from it.

The check reads parser events, without recursion. It refuses hostile nesting, anchors (which multiply) and tags that name Python
objects, before a loader sees them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import yaml

from ..core.typed import show_path
from .diagnostics import COMMAND_LINE, Diagnostic, Path, Place

MAX_BYTES = 256 * 1024
_MAX_DEPTH = 24
_MAX_NODES = 20_000
_STRING = "tag:yaml.org,2002:str"
_LINE_ENDS = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # line ends of YAML


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    key: Place | None  # None for entries of a list
    value: Place


@dataclass(frozen=True, kw_only=True)
class Source:
    """Holds a YAML text and the places of its keys and values. `file` is its name in diagnostics."""

    file: str
    text: str
    marks: dict[Path, Mark] = field(default_factory=dict)

    @cached_property
    def lines(self) -> list[str]:
        return _LINE_ENDS.split(self.text)

    def place(self, start: yaml.Mark | None, end: yaml.Mark | None = None) -> Place:
        """Returns the part of the first line between two of the parser's marks."""
        if self.file == COMMAND_LINE:
            return Place(file=COMMAND_LINE, source=self.text)
        if start is None:
            return Place(file=self.file)
        lines = self.lines
        line = min(start.line, len(lines) - 1)  # the mark "end of text" may be after the last line
        source = lines[line]
        column = min(start.column, len(source))
        stop = column + 1 if end is None else end.column if end.line == start.line else len(source.rstrip())
        return Place(file=self.file, line=line, column=column, end=stop, source=source)


def scan(source: Source) -> list[Diagnostic]:
    """Fills `source.marks` and returns everything that makes the text unusable as a recipe, as far as possible."""
    try:
        found = list(_scan_events(source))
        if found:
            return found
        root = yaml.compose(source.text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        return [syntax_error(source, error)]
    except (ValueError, OverflowError, RecursionError) as error:  # escapes such as "\UFFFFFFFF" end up in chr()
        return [Diagnostic(place=Place(file=source.file), code="syntax", message=f"not valid YAML: {error}")]
    if root is None:
        return []
    return list(_walk(source, root, (), None))


def syntax_error(source: Source, error: yaml.YAMLError) -> Diagnostic:
    """Makes a diagnostic from a loader's error. OmegaConf's error has no snippet, so the place comes from the mark."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.problem, error.context) if part) or "not valid YAML"
        if repr("\t") in message:
            message = "found a tab where YAML allows only spaces"
        return Diagnostic(place=source.place(mark), code="syntax", message=message, help=_syntax_help(source, mark))
    if isinstance(error, yaml.reader.ReaderError):
        before = _LINE_ENDS.split(source.text[: error.position])
        mark = yaml.Mark(source.file, error.position, len(before) - 1, len(before[-1]), None, None)
        code = ord(error.character) if isinstance(error.character, str) else error.character
        message, remedy = f"character U+{code:04X} is not allowed in YAML", "save the recipe as plain UTF-8 text"
        return Diagnostic(place=source.place(mark), code="syntax", message=message, help=remedy)
    return Diagnostic(place=source.place(None), code="syntax", message="not valid YAML")


def _syntax_help(source: Source, mark: yaml.Mark | None) -> str | None:
    lines = source.lines
    if mark is not None and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        return "YAML does not indent with tabs; use spaces"
    return None


def _scan_events(source: Source) -> Iterator[Diagnostic]:
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


def _walk(source: Source, node: yaml.Node, path: Path, key: Place | None) -> Iterator[Diagnostic]:
    """Records the place of `node` and of everything below it, and reports duplicate and unusable keys on the way."""
    source.marks[path] = Mark(key=key, value=_value_place(source, node, key))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(source, item, (*path, index), None)
    elif isinstance(node, yaml.MappingNode):
        yield from _walk_mapping(source, node, path)
    elif isinstance(node, yaml.ScalarNode) and any("\ud800" <= character <= "\udfff" for character in node.value):
        yield Diagnostic(place=source.marks[path].value, code="syntax", message="half of a surrogate pair is not a character")


def _walk_mapping(source: Source, node: yaml.MappingNode, path: Path) -> Iterator[Diagnostic]:
    first: dict[str, Place] = {}
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


def _value_place(source: Source, node: yaml.Node, key: Place | None) -> Place:
    """Points at the key for a block of lines or a missing value."""
    block = isinstance(node, yaml.CollectionNode) and not node.flow_style
    empty = isinstance(node, yaml.ScalarNode) and node.start_mark.index == node.end_mark.index
    if key is not None and (block or empty):
        return key
    return source.place(node.start_mark, node.end_mark)
