"""Finds the small files beside the weights: configuration, tokenizer, licence. They are copied; only what a
configuration says of dtypes is changed."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from fuyou_cli.core.disk import unusable
from fuyou_cli.core.errors import UsageError
from fuyou_cli.spec.packed_tensors import CONFIG_KEY

from .files import inside, read_json

CONFIG_NAME = "config.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"  # beside an adapter, or in a store that holds one; never beside a whole model

TEMPLATE_FOLDER = "additional_chat_templates"  # of named chat templates; no other folder is copied

# Belong to the model: settings for generation and of what prepares images, and licence texts that must go with the weights.
MODEL_PATTERNS = ("generation_config.json", "*processor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
# The same, and every file that a tokenizer of transformers may have.
PATTERNS = (
    *MODEL_PATTERNS, "tokenizer.json", TOKENIZER_CONFIG_NAME, "special_tokens_map.json", "added_tokens.json", "vocab*.json",
    "vocab.txt", "merges.txt", "bpe.codes", "tokenizer.model*", "spiece.model", "spm.model", "sentencepiece*.model",
    "*.tiktoken", "tekken.json", "emoji.json", "normalizer.json", "byte_maps.json", "entity_vocab.json", "word_shape.json",
    "word_pronunciation.json", "prophetnet.tokenizer", "chat_template.jinja", "chat_template.json",
    f"{TEMPLATE_FOLDER}/*.jinja",
)  # fmt: skip
_PIECE = 1 << 16  # bytes in memory at once
CODE_PATTERN = "*.py"  # only where a configuration names code of its own


def companion_files(source: Path, *, dtype: str) -> dict[str, bytes | Path]:
    """Maps each file name to its content or path: the files that `write_checkpoint` puts beside weights of `dtype`. Named chat
    templates keep their folder.

    Raises UsageError if config.json is missing or a file lies outside the directory.
    """
    if not (source / CONFIG_NAME).is_file():
        raise UsageError(f"{source}: has no {CONFIG_NAME}", hint="give a directory written by save_pretrained")
    config = read_json(inside(source, CONFIG_NAME))
    companions: dict[str, bytes | Path] = {CONFIG_NAME: config_bytes(config, dtype=dtype)}
    patterns = (*PATTERNS, CODE_PATTERN) if "auto_map" in config or names_code(source, TOKENIZER_CONFIG_NAME) else PATTERNS
    return companions | {name: inside(source, name) for name in found_in(source, patterns)}


def names_code(folder: Path, name: str) -> bool:
    """Tells whether a configuration names code of its own. That of a tokenizer is copied and never run."""
    return (folder / name).is_file() and "auto_map" in read_json(inside(folder, name))


def found_in(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Lists the files of a folder that match a pattern. Those of the folder of templates are `FOLDER/NAME`."""
    paths = [*folder.iterdir(), *(folder / TEMPLATE_FOLDER).glob("*")]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if matches(name, patterns) and (folder / name).is_file()]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tells whether a name matches a pattern, whose `*` stands for no `/`."""
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def own_code(source: Path) -> list[tuple[str, str]]:
    """Lists names and digests of the code files that the configuration may use."""
    names = sorted(file.name for file in source.glob(CODE_PATTERN) if file.is_file())
    return [(name, hashlib.sha256(inside(source, name).read_bytes()).hexdigest()) for name in names]


def pieces(content: bytes | Path) -> Iterator[bytes]:
    """Yields a companion's content piece by piece, as a tokenizer.json may have tens of megabytes. Raises UsageError with the
    file's name where it cannot be read."""
    try:
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
            yield from iter(partial(stream.read, _PIECE), b"")
    except OSError as error:
        raise unusable(f"{content!s}: cannot be read: {error.strerror}", error) from error


def is_companion(name: str) -> bool:
    """Tells whether a file of this name may stand beside weights that we wrote; `FOLDER/NAME` is in the folder of templates."""
    return matches(name, (CONFIG_NAME, ADAPTER_CONFIG_NAME, *PATTERNS, CODE_PATTERN))


def config_bytes(config: dict[str, Any], *, dtype: str) -> bytes:
    """Returns config.json for weights of `dtype`. Every part of the model that states a dtype gets this one."""
    return (json.dumps({**_with_dtype(config, dtype), "dtype": dtype}, indent=2, ensure_ascii=False) + "\n").encode()


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    adjusted: dict[str, Any] = {}
    for key, value in config.items():
        if key == CONFIG_KEY:
            continue  # weights that we write are not quantised
        if key in ("dtype", "torch_dtype"):  # torch_dtype: the name before transformers 5
            adjusted["dtype"] = dtype
        elif key.endswith("_config") and isinstance(value, dict):
            adjusted[key] = _with_dtype(value, dtype)
        else:
            adjusted[key] = value
    return adjusted
