"""Holds the options of `fuyou generate`, and refuses those that contradict each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuyou_cli.core.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Holds what the command line asks for. Options that are None were not given."""

    prompts: tuple[str, ...] = ()
    file: Path | None = None
    chat: bool = False
    new: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    batch_size: int = 8
    memory: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    json_output: bool = False


def check_options(options: GenerateOptions) -> None:
    """Raises UsageError for options that contradict each other, or a number out of its range."""
    if options.prompts and options.file is not None:
        raise UsageError("--prompt and --file cannot be used together", hint="add the prompt to the file")
    if not options.prompts and options.file is None and not options.chat:
        raise UsageError("there is nothing to continue", hint="give --prompt TEXT, --file prompts.jsonl, or --chat")
    if options.json_output and len(options.prompts) != 1:
        raise UsageError("--json is for one --prompt", hint="several, and --file, write one JSON object per line without it")
    if not all(map(_is_text, options.prompts)):
        raise UsageError("--prompt: not valid UTF-8", hint="give the text in UTF-8, or in a file by --file")
    if options.temperature == 0 and (options.top_p is not None or options.top_k is not None):
        raise UsageError(
            "--temperature 0 takes the likeliest token, --top-p and --top-k draw one",
            hint="give a temperature above 0, or none",
        )
    ranges: tuple[tuple[str, float | None, float, float], ...] = (
        ("--temperature", options.temperature, 0, 100),
        ("--top-p", options.top_p, 1e-6, 1),
        ("--top-k", options.top_k, 1, 1 << 31),
        ("--max-new-tokens", options.new, 1, 1 << 31),
        ("--batch-size", options.batch_size, 1, 1 << 16),
        ("--seed", options.seed, 0, (1 << 63) - 1),
    )
    for name, value, least, most in ranges:
        if value is not None and not least <= value <= most:
            raise UsageError(f"{name}: {value:g} is not between {least:g} and {most:g}")


def _is_text(text: str) -> bool:
    """Tells whether the shell gave text: other bytes come as halves of surrogates."""
    return not any("\ud800" <= one <= "\udfff" for one in text)
