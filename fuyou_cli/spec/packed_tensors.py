"""Says how a bank of quantised weights rests: the parts of every tensor, one tensor after the other.

nf4: half a byte for each element, and the largest value of every 64 (float32). nf4_double: these maxima in eight bits, less
their mean, with the largest of every 256 of them. int8: one byte for each element, and the largest value of every row. All
parts are bytes as bitsandbytes makes them. Small ones come first, so that a reader goes forward.

Two formats are those of a model's own files, and fuyou makes neither. mxfp4: half a byte for each element, and an exponent of
two (a byte) for every 32 of them. It rests transposed: a file has rows of outputs where the model has rows of inputs. fp8: one
byte for each element, and a float32 scale for every square of 128 rows and columns; squares at the ends may be cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

from ..core.errors import UsageError
from ..core.json_files import shown
from ..core.units import align_up

Quantised = Literal["nf4", "nf4_double", "int8", "mxfp4", "fp8"]
QUANTISED: tuple[Quantised, ...] = get_args(Quantised)
NF4_BLOCK = 64  # elements with one maximum
DYNAMIC_BLOCK = 256  # of these maxima, with one maximum
MXFP4_BLOCK = 32  # elements with one exponent
FP8_BLOCK = 128  # rows and columns with one scale
READ_ONLY: tuple[Quantised, ...] = ("mxfp4", "fp8")  # what files have and fuyou does not make
TRANSPOSED: tuple[Quantised, ...] = ("mxfp4",)  # what rests with the last two dimensions of the model's tensor exchanged
_PART_ALIGN = 64  # bytes
_BANK_ALIGN = 4096  # bytes


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Holds where the parts of a tensor begin, in bytes of its bank, and their sizes. A part that a format does not have is of
    size 0."""

    shape: tuple[int, ...]
    mean: tuple[int, int]  # float32, of the maxima
    outer: tuple[int, int]  # float32: the largest maximum of every 256, less the mean
    maxima: tuple[int, int]  # float32, or codes of eight bits; of mxfp4 exponents, of fp8 scales
    codes: tuple[int, int]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def blocks(self) -> int:
        """Counts the maxima of nf4."""
        return -(-self.numel // NF4_BLOCK)


def part_sizes(quantised: Quantised, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Returns the bytes of a tensor's mean, outer maxima, maxima and codes."""
    numel = prod(shape)
    if quantised == "mxfp4":
        return 0, 0, numel // MXFP4_BLOCK, numel // 2
    if quantised == "fp8":
        rows, columns = shape
        return 0, 0, 4 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK), numel
    if quantised == "int8":
        return 0, 0, 4 * (numel // shape[-1]), numel
    blocks, codes = -(-numel // NF4_BLOCK), (numel + 1) // 2
    if quantised == "nf4":
        return 0, 0, 4 * blocks, codes
    return 4, 4 * -(-blocks // DYNAMIC_BLOCK), blocks, codes


def packed_bank(quantised: Quantised, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[Mapping[str, PackedTensor], int]:
    """Places tensors, given by name and shape in their order. Returns where each is, and the bytes of the bank."""
    packed, end = dict[str, PackedTensor](), 0
    for name, shape in tensors:
        parts = list[tuple[int, int]]()
        for size in part_sizes(quantised, shape):
            parts.append((end, size))
            end = align_up(end + size, _PART_ALIGN)
        packed[name] = PackedTensor(shape, *parts)
    return packed, align_up(end, _BANK_ALIGN)


# ---- what a model's config.json says of it ------------------------------------------------------------------------------

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
    section = config.get(CONFIG_KEY) or (text.get(CONFIG_KEY) if isinstance(text, Mapping) else None)
    if not section:
        return None
    settings = section if isinstance(section, Mapping) else {}
    four, eight = settings.get("load_in_4bit") is True, settings.get("load_in_8bit") is True
    method = settings.get("quant_method") or ("bitsandbytes" if four or eight else None)
    if method == "mxfp4":
        return StoredQuantisation("mxfp4", ())
    if method == "fp8":
        return _of_fp8(file, settings)
    if method != "bitsandbytes":
        named = shown(method)[1:-1] if isinstance(method, str) else "an unnamed method"
        raise _refusal(file, f"the checkpoint says that it is quantized with {named}")
    if four == eight:
        raise _refusal(file, f"{CONFIG_KEY} says neither load_in_4bit nor load_in_8bit, or both")
    names = _names(file, settings, "llm_int8_skip_modules")
    if eight:
        return StoredQuantisation("int8", names)
    if (levels := settings.get("bnb_4bit_quant_type", "fp4")) != "nf4":
        raise _refusal(file, f"the checkpoint is quantized by bitsandbytes with {shown(str(levels))[1:-1]}, not nf4")
    return StoredQuantisation("nf4_double" if settings.get("bnb_4bit_use_double_quant") is True else "nf4", names)


def _of_fp8(file: Path, settings: Mapping[str, Any]) -> StoredQuantisation:
    block, form = settings.get("weight_block_size"), settings.get("fmt", "e4m3")
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise _refusal(
            file, f"the checkpoint is quantized in fp8 with weight_block_size {shown(str(block))[1:-1]}, not [128, 128]"
        )
    if form != "e4m3":
        raise _refusal(file, f"the checkpoint is quantized in fp8 as {shown(str(form))[1:-1]}, not e4m3")
    return StoredQuantisation("fp8", _names(file, settings, "modules_to_not_convert"))


def _names(file: Path, settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    skipped = settings.get(key) or []
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
