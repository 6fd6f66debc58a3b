"""Names the tensors of an adapter as peft's files do, and writes the configuration that stands beside them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an export needs no peft
    from peft import LoraConfig
    from torch import nn

ADAPTER = "default"  # the name that peft gives an adapter by itself
_PREFIX = "base_model.model."
_A, _B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
_MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"  # peft's files keep it without its last part
_BASE = ".base_layer.weight"


def base_name(name: str) -> str | None:
    """Returns the name without LoRA of a parameter of the model: what a checkpoint calls it. None for one that LoRA added."""
    return None if is_added(name) else name.replace(".base_layer.", ".")


def file_name(name: str) -> str:
    """Returns what an adapter's file calls a trained parameter."""
    if name.endswith(_MAGNITUDE):
        return f"{_PREFIX}{name.removesuffix(_MAGNITUDE)}.lora_magnitude_vector"
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def is_added(name: str) -> bool:
    """Tells whether a parameter is one that LoRA adds to the model."""
    return name.endswith((_A, _B, _MAGNITUDE))


def adapted_layer(name: str) -> str | None:
    """Returns the name of the layer whose matrix this is, if it has LoRA."""
    return name.removesuffix(_BASE) if name.endswith(_BASE) else None


def lora_names(layer: str) -> tuple[str, str, str]:
    """Returns the names of a layer's A, B and, with DoRA, magnitudes."""
    return layer + _A, layer + _B, layer + _MAGNITUDE


def config_of(model: nn.Module) -> LoraConfig:
    """Returns peft's configuration of the adapter that `inject` put into the model, with the targets it found."""
    found: LoraConfig = model.peft_config[ADAPTER]  # type: ignore[index]
    return found


def config_text(config: LoraConfig, *, base_model: str, revision: str | None = None) -> bytes:
    """Writes `adapter_config.json`, by which peft, vLLM and others put the adapter onto `base_model`."""
    written: dict[str, Any] = {
        **config.to_dict(), "base_model_name_or_path": base_model, "revision": revision, "inference_mode": True,
    }  # fmt: skip
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in sorted(written.items())}
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")  # of a path
