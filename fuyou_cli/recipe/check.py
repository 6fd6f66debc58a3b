"""Makes a `Recipe` from plain data, or lists everything that is wrong with it."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..core.typed import reason, show_path, show_value
from .diagnostics import Diagnostic, Path
from .rules import broken_rules
from .schema import Recipe
from .suggest import suggest_choice, suggest_key
from .unbuilt import is_built, unbuilt_keys

_NEEDED = {"model": "model.name_or_path", "dataset": "dataset.train"}  # a missing section lacks this key
_EXAMPLES = {
    "output_dir": "write `output_dir: outputs/my-run`",
    "model.name_or_path": "write the folder of a model, or its hub id",
    "dataset.train": "write a list of files: `train: [{path: data.jsonl}]`",
}
_FIRST = {  # main keys
    "model": "name_or_path", "tokenizer": "name_or_path", "adapter": "type", "optimizer": "name", "lr_scheduler": "name",
}  # fmt: skip
_TRUE = {"dataset.packing": "write `concat`, or `isolated` to keep the samples of a row apart"}  # other tools' true
_OUT_OF_RANGE = {
    "greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_short", "too_long", "string_too_short",
}  # fmt: skip


def check(data: dict[str, Any], *, ignore: frozenset[Path] = frozenset()) -> tuple[Recipe | None, list[Diagnostic]]:
    """Returns the recipe, or None and the findings. Does not report keys at or below `ignore` again."""
    findings: list[Diagnostic] = []
    recipe = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        findings += [_finding(detail) for detail in error.errors(include_url=False)]
    findings += [*(broken_rules(recipe) if recipe is not None else ()), *unbuilt_keys(data)]
    findings = [finding for finding in findings if not any(finding.path[: len(path)] == path for path in ignore)]
    return (None if findings else recipe), findings


def _finding(detail: ErrorDetails) -> Diagnostic:
    path: Path = tuple(part for part in detail["loc"] if part != "[key]")
    kind, shown = detail["type"], show_path(path)
    if kind == "extra_forbidden":
        dotted = ".".join(part for part in path if isinstance(part, str))
        found = suggest_key(dotted, shown_section=show_path(path[:-1]))
        return Diagnostic(path=path, code="unknown-key", message=f"unknown key `{shown}`", help=found, at_key=True)
    if kind == "missing":
        return _missing(path)
    if kind == "literal_error":
        return _choice(path, detail["input"], str(detail["ctx"]["expected"]))
    remedy = _type_help(kind, detail["input"])
    if kind == "model_type" and shown in _FIRST and isinstance(detail["input"], str):
        remedy = f"write `{shown}: {{{_FIRST[shown]}: {show_value(detail['input'])}}}`"
        if (shown, detail["input"]) == ("adapter", "qlora"):
            remedy = "write `adapter: {type: lora}` and `model.quantize: nf4`"
    return Diagnostic(path=path, code=_code(kind), message=f"`{shown}`: {reason(detail)}", help=remedy)


def _code(kind: str) -> str:
    if kind.endswith("_type") or kind == "finite_number":
        return "wrong-type"
    return "out-of-range" if kind in _OUT_OF_RANGE else kind.replace("_", "-")


def _missing(path: Path) -> Diagnostic:
    if path and isinstance(path[-1], int):  # a pair with only one value
        shown = show_path(path[:-1])
        return Diagnostic(path=path[:-1], code="out-of-range", message=f"`{shown}`: expected two values, got one")
    key = _NEEDED.get(show_path(path), show_path(path))
    return Diagnostic(path=path, code="missing-key", message=f"`{key}` is missing", help=_EXAMPLES.get(key), at_key=True)


def _choice(path: Path, value: Any, expected: str) -> Diagnostic:
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    choices = [choice for choice in choices if is_built(path, choice)] or choices
    choices = [choice.lower() if choice in ("True", "False") else choice for choice in choices]
    listed = choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
    return Diagnostic(
        path=path,
        code="not-a-choice",
        message=f"`{show_path(path)}`: expected {listed}, got {show_value(value)}",
        help=suggest_choice(value, choices) or _type_help("literal_error", value, show_path(path)),
    )


def _type_help(kind: str, value: Any, key: str = "") -> str | None:
    if value is True and key in _TRUE:
        return _TRUE[key]
    if isinstance(value, bool) and kind in ("string_type", "literal_error"):
        return "YAML reads yes, no, on and off as true and false; quote the word"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and kind == "string_type":
        return "quote it"
    if isinstance(value, str) and value.lower() == "none":
        return "in YAML, write `null` for no value"
    if isinstance(value, str) and kind in ("float_type", "int_type") and _is_number(value):
        return "write it without quotes"
    if isinstance(value, str) and kind == "tuple_type":
        return "write a list as [a, b]"
    return None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
