"""Reads what a model's config.json says of weights that rest quantised in its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import UsageError
from ..core.json_files import shown
from .packed_tensors import FP8_BLOCK, Quantised

CONFIG_KEY = "quantization_config"
_MOST_SKIPPED = 100_000  # names


@dataclass(frozen=True, slots=True)
class StoredQuantisation:
    """Holds the format of linear weights in blocks (of mxfp4: of experts), and the modules whose weights are left in 16 bit."""

    kind: Quantised
    skipped: tuple[str, ...]

    def takes(self, module: str) -> bool:
        """Tells whether the weight of this linear module is quantised. A name that is skipped stands for all in that module,
        and for modules that end so. (transformers takes it for a regular expression too: files say more than this.)"""
        if self.kind == "mxfp4":
            return module.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        return not any(name and (module.endswith(name) or module.startswith(f"{name}.")) for name in self.skipped)


def stored_quantisation(file: Path, config: Mapping[str, Any]) -> StoredQuantisation | None:
    """Reads the content of `file`, a config.json. None: its weights are not quantised. Raises UsageError for a format that
    fuyou does not read."""
    text = config.get("text_config")
    found = config.get(CONFIG_KEY) or (text.get(CONFIG_KEY) if isinstance(text, Mapping) else None)
    if not found:
        return None
    said = found if isinstance(found, Mapping) else {}
    four, eight = said.get("load_in_4bit") is True, said.get("load_in_8bit") is True
    method = said.get("quant_method") or ("bitsandbytes" if four or eight else None)
    if method == "mxfp4":
        return StoredQuantisation("mxfp4", ())
    if method == "fp8":
        return _of_fp8(file, said)
    if method != "bitsandbytes":
        named = shown(method)[1:-1] if isinstance(method, str) else "an unnamed method"
        raise _refusal(file, f"the checkpoint says that it is quantized with {named}")
    if four == eight:
        raise _refusal(file, f"{CONFIG_KEY} says neither load_in_4bit nor load_in_8bit, or both")
    names = _names(file, said, "llm_int8_skip_modules")
    if eight:
        return StoredQuantisation("int8", names)
    if (levels := said.get("bnb_4bit_quant_type", "fp4")) != "nf4":
        raise _refusal(file, f"the checkpoint is quantized by bitsandbytes with {shown(str(levels))[1:-1]}, not nf4")
    return StoredQuantisation("nf4_double" if said.get("bnb_4bit_use_double_quant") is True else "nf4", names)


def _of_fp8(file: Path, said: Mapping[str, Any]) -> StoredQuantisation:
    block, form = said.get("weight_block_size"), said.get("fmt", "e4m3")
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise _refusal(
            file, f"the checkpoint is quantized in fp8 with weight_block_size {shown(str(block))[1:-1]}, not [128, 128]"
        )
    if form != "e4m3":
        raise _refusal(file, f"the checkpoint is quantized in fp8 as {shown(str(form))[1:-1]}, not e4m3")
    return StoredQuantisation("fp8", _names(file, said, "modules_to_not_convert"))


def _names(file: Path, said: Mapping[str, Any], key: str) -> tuple[str, ...]:
    skipped = said.get(key) or []
    if not isinstance(skipped, list) or len(skipped) > _MOST_SKIPPED or not all(isinstance(name, str) for name in skipped):
        raise _refusal(file, f"{CONFIG_KEY}.{key} is not a list of names")
    return tuple(skipped)


def _refusal(file: Path, what: str) -> UsageError:
    return UsageError(
        f"{file}: {what}",
        hint="fuyou reads nf4 and int8 of bitsandbytes, mxfp4, fp8 in squares of 128, and float32, bfloat16 and float16 "
        "weights, which it quantises itself (model.quantize): use the model that was quantized; if the weights are not "
        f"quantized, remove {CONFIG_KEY} from config.json",
    )
