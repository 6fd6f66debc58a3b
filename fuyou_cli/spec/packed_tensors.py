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
from typing import Literal, get_args

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
    found, end = dict[str, PackedTensor](), 0
    for name, shape in tensors:
        parts = list[tuple[int, int]]()
        for size in part_sizes(quantised, shape):
            parts.append((end, size))
            end = align_up(end + size, _PART_ALIGN)
        found[name] = PackedTensor(shape, *parts)
    return found, align_up(end, _BANK_ALIGN)
