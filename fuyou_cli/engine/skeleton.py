"""The model without its weights: a Hugging Face causal language model whose parameters live on the meta device.

Only parameters go to meta. Buffers (rotary frequencies, embedding scales) are computed for real, because they are often
absent from checkpoints and cannot be recovered later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..core.errors import UsageError

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int16": torch.int16}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter a module registers goes to the meta device. `torch.empty` touches no page, so creating the
    real one first costs nothing; its initialisation then runs on meta."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_config(directory: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's configuration, or a UsageError naming the file."""
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UsageError(
            f"{directory / 'config.json'}: not a model configuration: {str(error).splitlines()[0]}",
            hint="point model.name_or_path at a directory with a Hugging Face config.json",
        ) from None


def build(config: PreTrainedConfig, *, dtype: str, attention: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The skeleton in training mode: parameters of `dtype` on meta, buffers real."""
    if attention == "sdpa" and not _supports_sdpa(config):
        attention = "eager"
    try:
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=TORCH_DTYPE[dtype],
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, KeyError) as error:
        raise UsageError(f"cannot build a causal language model of this configuration: {error}") from None
    model.train()
    model.config.use_cache = False
    return model


def _supports_sdpa(config: PreTrainedConfig) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model_class is None or getattr(model_class, "_supports_sdpa", True)
