"""Builds the model without its weights: a Hugging Face causal language model whose parameters are on the meta device.

Only parameters go to meta. Buffers (rotary frequencies, embedding scales) are computed for real, because they are often absent
from checkpoints and cannot be computed later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from ..core.errors import UsageError, pip_install
from ..core.json_files import find_object
from ..spec.packed_tensors import CONFIG_KEY, stored_quantisation
from .attention import SINKS, WITH_SINKS, rows_are_whole
from .experts import use_in

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int16": torch.int16}

LARGE = 1 << 30  # bytes
MOST_LAYERS = 2_000
MOST_EXPERTS = 32_768
LARGEST_SIZE = 1 << 26
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_SIZES = (
    "vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner",
    "head_dim", "num_attention_heads", "n_head", "num_key_value_heads", "max_position_embeddings", "n_positions", "n_ctx",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "state_size", "conv_kernel",
)  # fmt: skip
_MOST = {
    **dict.fromkeys(_LAYER_KEYS, MOST_LAYERS),
    **dict.fromkeys((*EXPERT_KEYS, "n_shared_experts"), MOST_EXPERTS),
    **dict.fromkeys(_SIZES, LARGEST_SIZE),
}
_LARGEST_CONFIG = 16 << 20  # bytes
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
# By name, because transformers replaces torch's functions by its own while it builds.
_FILLS = {"normal_", "uniform_", "fill_", "zero_", "constant_", "zeros_", "ones_", "kaiming_uniform_"}

# Errors that transformers and torch raise for a model or a configuration that their code was not made for.
LIBRARY_ERRORS = (
    RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError, ImportError,
    StrictDataclassError, re.error,
)  # fmt: skip
_UNREADABLE = (*LIBRARY_ERRORS, OSError)


class _Weightless(TorchFunctionMode):
    """Creates a tensor larger than any buffer should be directly on meta, inside the mode: the fused experts of one block can
    be larger than the machine's memory. Filling a tensor on meta is skipped, because it takes a third of the time of
    building."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.nbytes > LARGE:
                return made
        elif getattr(func, "__name__", "") in _FILLS and (filled := kwargs.get("tensor", args[0] if args else None)).is_meta:
            return filled
        return func(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Sends every parameter that a module registers inside to meta. A real parameter that is never filled costs nothing before
    that."""
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


def said(error: BaseException) -> str:
    """Returns one line for an error of a library. The text of a KeyError alone says nothing."""
    lines = str(error).strip().splitlines() or ["no details"]
    if isinstance(error, StrictDataclassError):
        return lines[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")
    return lines[0] if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {lines[0]}"


def load_config(directory: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Returns the model's configuration, without what it says of quantised weights. Raises UsageError naming the file."""
    file = directory / "config.json"
    hint = "name a model in the transformers format: a folder with a config.json"
    content = find_object(file, limit=_LARGEST_CONFIG, finite=False, hint=hint) or {}
    _refuse_endless(file, content)
    stored_quantisation(file, content)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
        for part in (config, config.get_text_config()):
            vars(part).pop(CONFIG_KEY, None)  # weights are decoded before a module sees them
    except _UNREADABLE as error:
        raise UsageError(f"{file}: not a model configuration: {said(error)}", hint=hint) from error
    return config


def _refuse_endless(file: Path, content: dict[str, Any]) -> None:
    """Raises UsageError for more layers or experts, or larger sizes, than any model has, because they would be built."""
    for section in (content, *(inner for inner in content.values() if isinstance(inner, dict))):
        for key, bound in _MOST.items():
            value = section.get(key)
            if isinstance(value, (int, float)) and not value <= bound:
                raise UsageError(f"{file}: {key} is {value:,}: no model has that many", hint="restore the original file")


def setting(text: PreTrainedConfig, name: str, *, layer: int = 0) -> Any:
    """Returns a value of a configuration, for this layer if layers differ in it; None without one."""
    if getattr(text, "is_heterogeneous", False) and layer < len(text.per_layer_config):
        text = text.per_layer_config[layer]
    return getattr(text, name, None)


def build(config: PreTrainedConfig, *, dtype: str, attention: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Returns the skeleton in training mode: parameters of `dtype` on meta, buffers real."""
    if attention == "sdpa" and not _supports_sdpa(config):
        attention = SINKS if config.model_type in WITH_SINKS else "eager"
    if attention.startswith("flash"):
        rows_are_whole()
    try:
        options: dict[str, Any] = {"dtype": TORCH_DTYPE[dtype], "attn_implementation": attention}
        options["trust_remote_code"] = trust_remote_code
        with _parameters_on_meta(), _Weightless():
            model = auto_class(config).from_config(config, **options)
        if any(buffer.is_meta for buffer in model.buffers()):  # one buffer was too large
            with _parameters_on_meta():
                model = auto_class(config).from_config(config, **options)
    except LIBRARY_ERRORS as error:
        if isinstance(error, ImportError) and attention.startswith("flash"):
            needs = "builds flash-attn: a GPU of sm80 or newer"
            hint = f"{pip_install('fuyou[flash]')} ({needs}), or use model.attn_implementation=sdpa"
            raise UsageError(f"model.attn_implementation: {attention}: {error}", hint=hint) from error
        raise UsageError(
            f"cannot build a causal language model of this configuration: {said(error)}",
            hint="the model's config.json must be of a causal language model",
        ) from error
    _widen_buffers(model)
    model.train()
    model.config.use_cache = False
    use_in(model)
    return model


def _widen_buffers(model: PreTrainedModel) -> None:
    """Gives buffers the dtype that `from_pretrained` gives them: a router's correction, rounded, would choose other experts."""
    for holder_name, holder in model.named_modules():
        for name, buffer in holder._buffers.items():
            if buffer is not None and buffer.is_floating_point() and stays_float32(model, f"{holder_name}.{name}"):
                holder._buffers[name] = buffer.float()


def stays_float32(model: PreTrainedModel, name: str) -> bool:
    """Whether the family keeps a parameter or buffer in float32 whatever the compute dtype."""
    listed = model._keep_in_fp32_modules_strict or ()
    return any(re.search(re.escape(part).replace(r"\*", ".*"), name) for part in listed)


def auto_class(config: PreTrainedConfig) -> Any:
    """Returns the class of transformers that builds the model: with its parts for images or sound, if its checkpoint was saved
    with them, so that an export has them too."""
    whole = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    is_named = whole is not None and whole.__name__ in (config.architectures or ())
    has_text_alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_named or (whole is not None and not has_text_alone) else AutoModelForCausalLM


def _supports_sdpa(config: PreTrainedConfig) -> bool:
    """Whether sdpa computes the model correctly. It does not if attention logits are capped: sdpa leaves the cap out,
    whatever the model's class in transformers 5.17 says."""
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return False
    model_class = auto_class(config)._model_mapping.get(type(config), None)
    return model_class is None or bool(getattr(model_class, "_supports_sdpa", True))
