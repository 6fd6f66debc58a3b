"""Writes checkpoints as bitsandbytes saves them, by the numpy reference, and as models are published in mxfp4 and fp8: nothing
of the code that reads them has a part in it.

`test_stored_quantised` compares the files with the library's own where it is installed (0.50: equal to the last byte)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fuyou_cli.swap.kernels import dynamic_levels

from .swap import quantised_reference as reference

_STATE = "quant_state.bitsandbytes__nf4"


def write_quantised(
    source: Path, target: Path, kind: str, *, left: Sequence[str] = (), told: Any = None, head: bool = False
) -> Path:
    """Copies a small Llama with the matrices of its blocks quantised, but for modules whose names end like one of `left`, and
    its head if asked. told: what config.json says of them."""
    shutil.copytree(source, target)
    tensors = dict[str, torch.Tensor]()
    for name, value in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if ("layers." in name or (head and module == "lm_head")) and value.dim() == 2 and not module.endswith(tuple(left)):
            tensors |= quantised(name, value, kind)
        else:
            tensors[name] = value
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    skipped = (list(left) if told is None else told) or None
    if kind == "fp8":
        said: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        (target / "config.json").write_text(
            json.dumps({**config, "quantization_config": said | {"modules_to_not_convert": skipped}})
        )
        return target
    said = {
        "quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8",
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind == "nf4_double",
        "llm_int8_skip_modules": skipped,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return target


def quantised(name: str, weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file that stand for the weight `name`."""
    if kind == "fp8":
        codes8, squares = fp8(weight)
        return {name: codes8, f"{name}_scale_inv": squares}
    if kind == "mxfp4":
        blocks, exponents = mxfp4(weight)
        return {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    values = weight.float().numpy()
    if kind == "int8":
        codes, maxima = reference.int8(values.astype(np.float16).astype(np.float32))
        module = name.removesuffix(".weight")
        form = torch.zeros((), dtype=torch.uint8)
        return {name: torch.from_numpy(codes), f"{module}.SCB": torch.from_numpy(maxima), f"{module}.weight_format": form}
    packed, maxima = reference.nf4(values.reshape(-1))
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape),
    }  # fmt: skip
    parts = {"absmax": torch.from_numpy(maxima), "quant_map": torch.from_numpy(reference.NF4.copy())}
    if kind == "nf4_double":
        mean, levels = parts["absmax"].mean(), dynamic_levels()
        codes, outer = reference.dynamic(maxima - mean.numpy(), levels)
        parts |= {"absmax": torch.from_numpy(codes), "nested_absmax": torch.from_numpy(outer)}
        parts["nested_quant_map"] = torch.from_numpy(levels.copy())
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": mean.item()}
    parts[_STATE] = as_bytes(json.dumps(state))
    return {name: torch.from_numpy(packed).view(-1, 1)} | {f"{name}.{part}": value for part, value in parts.items()}


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes of a matrix and the scales of its squares, the largest value of each being the largest code."""
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            square = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scales[row, column] = weight[square].float().abs().max() / 448
            codes[square] = (weight[square].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def of_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values that codes and scales stand for."""
    every = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * every[: codes.shape[0], : codes.shape[1]]


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns blocks and exponents of a tensor of experts as transformers has it, (experts, inputs, outputs)."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    rows = weight.float().transpose(1, 2).contiguous().unflatten(2, (-1, 32))
    exponents = rows.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = rows / 2 ** exponents[..., None]
    codes = (scaled.abs()[..., None] - levels).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def as_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
