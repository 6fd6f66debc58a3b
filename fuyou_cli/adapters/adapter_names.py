"""Names the tensors of an adapter as peft's files do, and writes the configuration that stands beside them."""

from __future__ import annotations

import json
from typing import Any

from peft import LoraConfig

from .injection import ADAPTER

WEIGHTS_NAME, CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"  # peft's files keep it without its last part


def base_name(name: str) -> str:
    """Returns the name without LoRA of a parameter of the model: what a checkpoint calls it."""
    return name.replace(".base_layer.", ".")


def file_name(name: str) -> str:
    """Returns what an adapter's file calls a trained parameter."""
    if name.endswith(_MAGNITUDE):
        return f"{_PREFIX}{name.removesuffix(_MAGNITUDE)}.lora_magnitude_vector"
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def config_text(config: LoraConfig, *, base_model: str, revision: str | None = None) -> bytes:
    """Writes `adapter_config.json`, by which peft, vLLM and others put the adapter onto `base_model`."""
    written: dict[str, Any] = {
        **config.to_dict(), "base_model_name_or_path": base_model, "revision": revision, "inference_mode": True,
    }  # fmt: skip
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in sorted(written.items())}
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()
