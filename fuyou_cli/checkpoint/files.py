"""Finds the files of a checkpoint, which tensor is in which file, and the small files beside the weights.

Everything is checked before any data is used. A directory that passes `open_checkpoint` has every shard that its index names.
Each shard is inside the directory and complete, with a valid header, and every tensor is there exactly once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from fuyou_cli.core.disk import file_size, status_of
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import read_object, shown
from fuyou_cli.spec.packed_tensors import CONFIG_KEY

from .reader import TensorEntry, parse_file

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_model.safetensors"  # what peft calls the weights of an adapter
JSON_LIMIT = 64 << 20  # bytes; the index of the largest mixtures takes a tenth of it
NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checked set of safetensors files. `entries` is by key in the file, in the order of shards and data. A quantised
    tensor is one entry, whatever it consists of."""

    directory: Path
    entries: dict[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for entry in self.entries.values() for part in (entry, *entry.parts))


def open_checkpoint(directory: Path) -> Checkpoint:
    """Opens the checkpoint in `directory`: one model.safetensors, or an index with its shards.

    Raises UsageError naming the file or tensor: no weights or only pickled ones; a shard that is missing, named twice, damaged
    or outside the directory; a tensor in two shards, in none, or in another shard than the index says. Raises UnreadableError
    where a drive or a permission hides a file.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory}: no such directory", hint="give the directory that holds config.json")
    from .quantised_files import with_quantised  # numpy

    if status_of(directory / SINGLE_NAME, follow=False) is not None:
        file = inside(directory, SINGLE_NAME)
        checkpoint = Checkpoint(directory=directory, entries=parse_file(file).entries)
    elif status_of(directory / INDEX_NAME, follow=False) is not None:
        checkpoint = _open_sharded(directory, shard_map(directory))
    else:
        raise _no_weights(directory)
    return replace(checkpoint, entries=with_quantised(checkpoint.entries))


def has_weights(directory: Path) -> bool:
    """Whether all files with a model's weights are there. Raises UnreadableError where nobody can tell now."""
    if file_size(directory / SINGLE_NAME) is not None:
        return True
    if file_size(directory / INDEX_NAME) is None:
        return False
    return all(file_size(directory / name) is not None for name in set(shard_map(directory).values()))


def shard_map(directory: Path) -> dict[str, str]:
    """Reads the index's map from tensor to shard name. Raises UsageError if the map is malformed."""
    index = inside(directory, INDEX_NAME)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index}: has no weight_map", hint="download the index again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise UsageError(f"{index}: tensor {shown(name)} has no shard name")
    return weight_map


def read_json(path: Path, *, names: bool = False) -> dict[str, Any]:
    """Reads the object in a small JSON file of a model. Some configurations hold infinities, with `names` names of files too.
    Raises UsageError naming the file."""
    return read_object(path, limit=JSON_LIMIT, finite=False, names=names, hint="fetch the file again")


def _open_sharded(directory: Path, weight_map: dict[str, str]) -> Checkpoint:
    index = directory / INDEX_NAME
    shard_names = sorted(set(weight_map.values()))
    shards = {name: inside(directory, name, missing_ok=True) for name in shard_names}
    missing = [name for name in shard_names if file_size(shards[name]) is None]
    if missing:
        raise UsageError(
            f"{directory}: {len(missing)} of {len(shard_names)} shards are missing: {name_list(missing)}",
            hint="download the rest of the model",
        )
    real = {os.path.realpath(file): name for name, file in shards.items()}
    if twice := next((name for name, file in shards.items() if real[os.path.realpath(file)] != name), None):
        other = real[os.path.realpath(shards[twice])]
        raise UsageError(f"{index}: shards {shown(twice)} and {shown(other)} are the same file")
    entries: dict[str, TensorEntry] = {}
    flaws: list[str] = []
    for shard_name, file in shards.items():
        for name, entry in parse_file(file).entries.items():
            if name in entries:
                flaws.append(f"{shown(name)} is in {entries[name].file.name} and in {shard_name}")
            elif weight_map.get(name, shard_name) != shard_name:
                flaws.append(f"{shown(name)} is in {shard_name}, but the index says {shown(weight_map[name])}")
            entries.setdefault(name, entry)
    flaws += [f"{shown(name)} is not in {shard}" for name, shard in weight_map.items() if name not in entries]
    if flaws:
        listed = "\n  ".join([*flaws[:NAMES_SHOWN], *(["..."] if len(flaws) > NAMES_SHOWN else [])])
        raise UsageError(
            f"{index}: {len(flaws)} tensors are not where the index says:\n  {listed}",
            hint="index and shards are from different versions: download them again",
        )
    return Checkpoint(directory=directory, entries=entries)


def inside(directory: Path, name: str, *, missing_ok: bool = False) -> Path:
    """Returns the path of a file of the checkpoint. Refuses a name or a link that leads out of the directory.

    Only a snapshot in the hub's cache may be made of links: snapshots/<commit>/<file> points into blobs/.
    """
    parts = PurePosixPath(name).parts
    refusal = UsageError(
        f"{directory}: the file {shown(name)} lies outside the directory",
        hint="copy the model's files into one directory, without links",
    )
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise refusal
    path = directory / name
    try:
        root = directory.resolve()
        real = path.resolve(strict=not missing_ok)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: links to a file that does not exist", hint="download it again") from error
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle, before Python 3.13
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{directory}: the link {shown(name)} cannot be followed: {why}") from error
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"][:1]
    if not any(real.is_relative_to(place) for place in (root, *blobs)):
        raise refusal
    return path


def _no_weights(directory: Path) -> UsageError:
    names = sorted(file.name for file in directory.iterdir())
    pickled = [name for name in names if name.endswith((".bin", ".pth", ".pt", ".bin.index.json"))]
    if pickled:
        return UsageError(
            f"{directory}: has only pickled weights ({name_list(pickled)}), and reading a pickle can run code",
            hint="use a revision with safetensors, or convert the weights on an isolated machine: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
        )
    if ADAPTER_NAME in names:
        return an_adapter(directory)
    return UsageError(
        f"{directory}: has neither {SINGLE_NAME} nor {INDEX_NAME}",
        hint="give a directory written by save_pretrained, or a hub id",
    )


def an_adapter(
    directory: object, hint: str = "merge it into its base model first (merge_and_unload), or give the base model"
) -> UsageError:
    """Makes the error for the folder of an adapter that is named as a model."""
    return UsageError(f"{directory}: holds an adapter, not a whole model", hint=hint)


def name_list(names: list[str]) -> str:
    """Lists up to eight names, and how many more there are."""
    listed = ", ".join(shown(name) for name in names[:NAMES_SHOWN])
    return listed if len(names) <= NAMES_SHOWN else f"{listed} and {len(names) - NAMES_SHOWN} more"


# ---- what lies beside the weights ------------------------------------------------------------------------------------


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
    """Whether a configuration names code of its own. That of a tokenizer is copied and never run."""
    return (folder / name).is_file() and "auto_map" in read_json(inside(folder, name))


def found_in(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Lists the files of a folder that match a pattern. Those of the folder of templates are `FOLDER/NAME`."""
    paths = [*folder.iterdir(), *(folder / TEMPLATE_FOLDER).glob("*")]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if matches(name, patterns) and (folder / name).is_file()]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches a pattern, whose `*` stands for no `/`."""
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def own_code(source: Path) -> list[tuple[str, str]]:
    """Lists names and digests of the code files that the configuration may use."""
    names = sorted(file.name for file in source.glob(CODE_PATTERN) if file.is_file())
    return [(name, hashlib.sha256(inside(source, name).read_bytes()).hexdigest()) for name in names]


def is_companion(name: str) -> bool:
    """Whether a file of this name may stand beside weights that we wrote; `FOLDER/NAME` is in the folder of templates."""
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
