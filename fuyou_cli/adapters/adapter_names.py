"""Names the tensors of an adapter as peft's files do, and writes the configuration that stands beside them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an export needs no peft
    from peft import LoraConfig
    from torch import nn

ADAPTER = "default"  # the name that peft gives an adapter by itself
_PREFIX = "base_model.model."
_A, _B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
_MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"  # peft's files keep it without its last part
_BASE = ".base_layer.weight"
OF_EXPERTS = (_A[1:], _B[1:])  # what stands for `weight` in the names of A and B of an expert's matrix
_HOLDER = re.compile(r"[^.]+(?=\.experts\.\d+\.)")  # the module that has experts
_IN_FILES = re.compile(r"\.experts\.\d+\.([^.]+)\.lora_A\.weight")
FUSED_ALPHA = r"experts\.gate_up_proj"  # see `alpha_of_fused`


def base_name(name: str) -> str | None:
    """Returns the name without LoRA of a parameter of the model: what a checkpoint calls it. None for one that LoRA added."""
    return None if is_added(name) else name.replace(".base_layer.", ".")


def file_name(name: str) -> str:
    """Returns what an adapter's file calls a trained parameter."""
    if name.endswith(_MAGNITUDE):
        return f"{_PREFIX}{name.removesuffix(_MAGNITUDE)}.lora_magnitude_vector"
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def as_beside(key: str, base: str) -> str:
    """Returns the name in an adapter's file of an expert's A or B, with the module called as in `base`, the matrix' name in the
    checkpoint: others than transformers know the module by that name."""
    holder = _HOLDER.search(base)
    return key if holder is None else _HOLDER.sub(holder[0], key, count=1)


def neutral(key: str) -> str:
    """Returns a name in an adapter's file with the module that has experts called one way: it has had several names."""
    return _HOLDER.sub("mlp", key, count=1)


def is_added(name: str) -> bool:
    """Tells whether a parameter is one that LoRA adds to the model."""
    return name.endswith((_A, _B, _MAGNITUDE))


def adapted_layer(name: str, added: Container[str]) -> str | None:
    """Returns the name of the layer, or of the expert's matrix, whose weight this is, if it has LoRA. `added`: names of what
    LoRA adds, among others."""
    layer = name.removesuffix(_BASE if name.endswith(_BASE) else ".weight")
    return layer if name.endswith(_BASE) or layer + _A in added else None


def layer_of(name: str) -> str:
    """Returns the name of the layer that LoRA adds a parameter to."""
    return name.removesuffix(_A).removesuffix(_B).removesuffix(_MAGNITUDE)


def lora_names(layer: str) -> tuple[str, str, str]:
    """Returns the names of a layer's A, B and, with DoRA, magnitudes."""
    return layer + _A, layer + _B, layer + _MAGNITUDE


def targets_in_experts(keys: Iterable[str]) -> set[str]:
    """Returns the names by which an adapter's file, which has these keys, calls matrices of experts that have LoRA."""
    return {match[1] for key in keys if (match := _IN_FILES.search(key))}


def alpha_of_fused(alpha: float, *, use_rslora: bool) -> dict[str, float]:
    """Returns what alpha_pattern has to say of experts. peft joins gate and up to one matrix of twice the rank and twice the
    alpha, which is another scale if it is divided by the root of the rank."""
    return {FUSED_ALPHA: alpha * math.sqrt(2)} if use_rslora else {}


def config_of(model: nn.Module) -> LoraConfig:
    """Returns peft's configuration of the adapter that `inject` put into the model, with the targets it found."""
    config: LoraConfig = model.peft_config[ADAPTER]  # type: ignore[index]
    return config


def config_text(config: LoraConfig, *, base_model: str, revision: str | None = None) -> bytes:
    """Writes `adapter_config.json`, by which peft, vLLM and others put the adapter onto `base_model`."""
    written: dict[str, Any] = {
        **config.to_dict(), "base_model_name_or_path": base_model, "revision": revision, "inference_mode": True,
    }  # fmt: skip
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in sorted(written.items())}
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")  # of a path
