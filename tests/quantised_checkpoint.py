"""Writes checkpoints as bitsandbytes saves them, by the numpy reference: nothing of the code that reads them has a part in it.

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

from fuyou_cli.swap.quantised import dynamic_levels

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
    said = {
        "quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8",
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind == "nf4_double",
        "llm_int8_skip_modules": (list(left) if told is None else told) or None,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return target


def quantised(name: str, weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file that stand for the weight `name`."""
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


def as_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
