"""Exports what LoRA has trained: the adapter in peft's files, or the model with the adapter merged in, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import torch

from ..adapters.adapter_names import adapted_layer, file_name, is_added, lora_names
from ..adapters.merging import LoraSettings, LoraWeights, read_settings
from ..checkpoint.files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    CODE_PATTERN,
    CONFIG_NAME,
    TOKENIZER_CONFIG_NAME,
    companion_files,
    matches,
    names_code,
    read_json,
)
from ..checkpoint.writer import OutTensor, write_checkpoint
from ..core.errors import SwapError, UsageError
from ..engine.skeleton import TORCH_DTYPE, auto_class, load_config
from .exporting import StoreWeights, Weights, bytes_of, export_store, stored_weights, write_whole
from .state.kept_companions import kept_adapter, kept_companions

_AT_ONCE = 1 << 20  # elements merged at once: what is computed with takes some megabytes
_OF_THE_MODEL = (CONFIG_NAME, "generation_config.json")  # companions that an adapter's folder does not have; nor model's code


def export_adapter(
    source: Path,
    out: Path,
    *,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Path]:
    """Writes the adapter in the store of `source` to `out`, as peft's `from_pretrained` takes it, with the tokenizer. Returns
    the path of its weights."""
    with stored_weights(source, dtype=dtype, say=say, trained_only=True) as weights:
        beside = kept_companions(source) or Path(weights.manifest.model_dir)
        return write_adapter(weights, out, companions=beside, configuration=_configuration(source), progress=progress)


def write_adapter(
    weights: Weights,
    out: Path,
    *,
    companions: Path,
    configuration: bytes | Path,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Writes what was trained to `out`, with peft's configuration, and the tokenizer of the folder `companions`. Returns the
    path of its weights."""
    adapter = AdapterWeights(weights)
    left_out = _OF_THE_MODEL if names_code(companions, TOKENIZER_CONFIG_NAME) else (*_OF_THE_MODEL, CODE_PATTERN)
    beside = {
        name: content
        for name, content in companion_files(companions, dtype=weights.dtype).items()
        if not matches(name, left_out)
    }
    return write_checkpoint(
        out,
        adapter.tensors(),
        adapter.read,
        max_shard_size=1 << 62,  # peft reads one file
        single=ADAPTER_NAME,
        metadata=weights.metadata,
        companions={**beside, ADAPTER_CONFIG_NAME: configuration},
        progress=progress,
        check=weights.check,
    )


def export_merged(
    source: Path,
    out: Path,
    *,
    dtype: str,
    max_shard_size: int,
    model_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Path]:
    """Writes the model with the adapter in the store of `source` merged in to `out`, as `export_store` does."""
    with stored_weights(source, dtype=dtype, say=say, model_dir=model_dir) as weights:
        merged = MergedWeights(weights, read_settings(_configuration(source)))
        return write_whole(merged, source, weights.manifest, out, model_dir, max_shard_size, progress)


def _configuration(source: Path) -> Path:
    found = kept_adapter(source)
    assert found is not None, source
    return found


class AdapterWeights:
    """Reads everything that was trained: of LoRA, and of `modules_to_save`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        names = {one: weights.model_name(one) for one in weights.tensors() if weights.is_trained(one)}
        self._stored = {one.name if is_added(name) else file_name(name): one for one, name in names.items()}

    def tensors(self) -> list[OutTensor]:
        return [replace(stored, name=name) for name, stored in self._stored.items()]

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        return self._weights.read(self._stored[tensor.name], first, count)


class MergedWeights:
    """Reads the model's weights with the adapter merged in, as peft's `merge_and_unload` does. Each is rounded once.

    A and B of one layer are in memory at a time. With DoRA a matrix is read twice: its norms come first."""

    def __init__(self, weights: StoreWeights, settings: LoraSettings) -> None:
        self._weights, self._settings, self.dtype = weights, settings, weights.dtype
        self._stored = {weights.model_name(one): one for one in weights.tensors()}
        # masters count only where the result is as wide
        narrow = weights.dtype == weights.manifest.compute_dtype == "bfloat16"
        self._wide = "bfloat16" if narrow else "float32"
        self._layer: str | None = None
        self._lora: LoraWeights
        self._norms: torch.Tensor | None = None
        self._seen: dict[int, int] = {}  # with DoRA: where a piece begins, and its sum when it was read for the norms

    @property
    def metadata(self) -> dict[str, str]:
        return self._weights.metadata

    def check(self) -> None:
        self._weights.check()

    def tensors(self) -> list[OutTensor]:
        return [stored for name, stored in self._stored.items() if not is_added(name)]

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        """Returns elements [first, first + count) of a tensor. The view is valid until the next call."""
        layer = adapted_layer(self._weights.model_name(tensor), self._stored)
        if layer is None:
            return self._agreed(tensor, first, count)
        if layer != self._layer:
            self._begin(layer, tensor)
        merged = torch.empty(count, dtype=TORCH_DTYPE[tensor.dtype])
        for begin in range(0, count, _AT_ONCE):
            piece = self._piece(tensor, first + begin, min(_AT_ONCE, count - begin))
            merged[begin : begin + len(piece)] = self._lora.merged(piece, first + begin, norms=self._norms)
        return bytes_of(merged)

    def _begin(self, layer: str, tensor: OutTensor) -> None:
        """Reads what is merged into a layer's matrix."""
        a, b, magnitude = (self._whole(name) for name in lora_names(layer))
        shape = tensor.shape[::-1] if self._settings.fan_in_fan_out else tensor.shape
        is_dora = self._settings.use_dora
        if a is None or b is None or (len(b), a.shape[-1]) != shape or is_dora != (magnitude is not None):
            raise UsageError(f"the store's adapter of {layer} does not fit its weights", hint="its manifest is damaged")
        scaling = self._settings.scaling(layer, len(a))
        self._lora = LoraWeights(
            a=a, b=b, scaling=scaling, transposed=self._settings.fan_in_fan_out, magnitude=magnitude
        )  # fmt: skip
        self._layer, self._norms, self._seen = layer, None, {}
        if is_dora:
            begins = range(0, tensor.numel, _AT_ONCE)
            self._norms = self._lora.output_norms(self._piece(tensor, at, min(_AT_ONCE, tensor.numel - at)) for at in begins)

    def _whole(self, name: str) -> torch.Tensor | None:
        """Returns a tensor of LoRA, in float32."""
        if (stored := self._stored.get(name)) is None:
            return None
        flat = torch.empty(stored.numel, dtype=torch.float32)
        for first in range(0, stored.numel, _AT_ONCE):
            part = flat[first : first + _AT_ONCE]
            part.copy_(self._elements(stored, first, len(part)))
        return flat.view(stored.shape)

    def _piece(self, tensor: OutTensor, first: int, count: int) -> torch.Tensor:
        """Returns elements of a matrix. Raises SwapError if they are not what was read for the norms: the store's own sum is
        of what was read first."""
        found = self._elements(tensor, first, count)
        if self._settings.use_dora and self._seen.setdefault(first, (total := crc32(bytes_of(found)))) != total:
            raise _changed(tensor)
        return found

    def _elements(self, tensor: OutTensor, first: int, count: int) -> torch.Tensor:
        content = self._agreed(replace(tensor, dtype=self._wide), first, count)
        return torch.frombuffer(content, dtype=TORCH_DTYPE[self._wide])

    def _agreed(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        """Reads trained elements twice. Sums are of what is read in its order, and merging does not follow it; but there is
        little of them."""
        once = crc32(self._weights.read(tensor, first, count)) if self._weights.is_trained(tensor) else None
        content = self._weights.read(tensor, first, count)
        if once is not None and crc32(content) != once:
            raise _changed(tensor)
        return content


def _changed(tensor: OutTensor) -> SwapError:
    return SwapError(f"{tensor.name} changed between two reads of the store", hint="nothing was exported: try again")


def as_trained(source: Path, weights: StoreWeights) -> StoreWeights | MergedWeights:
    """Returns the weights of the model that the store in `source` has trained: with its adapter merged in, if it has one."""
    kept = kept_adapter(source)
    return weights if kept is None else MergedWeights(weights, read_settings(kept))


def export_trained(
    store: Path,
    out: Path,
    *,
    dtype: str,
    max_shard_size: int,
    merged: bool = False,
    model_dir: Path | None = None,
    progress: Callable[[int, int], None],
    say: Callable[[str], None],
) -> list[Path]:
    """Writes what a store's run has trained to `out`: a model, or an adapter unless it is to be `merged`. `model_dir`: where
    the model's checkpoint is now, if not where it was. Returns the files of weights."""
    adapts = kept_adapter(store) is not None
    if merged and not adapts:
        raise UsageError(f"{store} holds a model and no adapter, so there is nothing to merge", hint="leave out --merged")
    if adapts and not merged:
        return export_adapter(store, out, dtype=dtype, progress=progress, say=say)
    export = export_merged if merged else export_store
    return export(store, out, dtype=dtype, max_shard_size=max_shard_size, model_dir=model_dir, progress=progress, say=say)


def how_to_load(out: Path, store: Path) -> str | None:
    """Returns two lines of Python that load an adapter that was exported from a store. None: it is a model."""
    if not (out / ADAPTER_CONFIG_NAME).is_file():
        return None
    base = read_json(out / ADAPTER_CONFIG_NAME, names=True).get("base_model_name_or_path")
    kept, name = kept_companions(store), "AutoModelForCausalLM"
    if kept is not None:
        with suppress(UsageError):  # a model with code of its own
            name = auto_class(load_config(kept)).__name__
    return (
        "load it with transformers and peft:\n"
        f'  base = {name}.from_pretrained({base!r}, dtype="auto")\n'
        f"  model = PeftModel.from_pretrained(base, {str(out.resolve())!r})"
    )
