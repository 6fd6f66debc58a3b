"""Tensors read out of files, and the mark of a checkpoint."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fuyou_cli.checkpoint import reader as reader_module
from fuyou_cli.checkpoint.reader import SAMPLE, TensorEntry, TensorReader, parse_file, weights_mark
from fuyou_cli.core.errors import UsageError

from .tiny_models import assert_same_bits, read_all, same_bits

# ---- reader ----------------------------------------------------------------------------------------------------------
# Tests reading: every dtype, any part of a tensor, conversions as torch does them, little memory, no silent short read.


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PIECE", 64)


def test_reads_every_dtype(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(24).to(dtype).reshape(2, 3, 4)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
                      torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint32, torch.float8_e4m3fn)
    }  # fmt: skip
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "x.safetensors")
    entries = parse_file(tmp_path / "x.safetensors").entries
    assert_same_bits({name: read_all(entries)[name] for name in tensors}, tensors)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_converts_as_torch_does(tmp_path: Path, source: torch.dtype, wanted: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(7, 31).to(source)
    tensor[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    save_file({"before": torch.zeros(3, dtype=source), "w": tensor}, tmp_path / "x.safetensors")
    entry = parse_file(tmp_path / "x.safetensors").entries["w"]
    with TensorReader() as reader:
        whole = torch.full((7, 31), 9, dtype=wanted)
        reader.read_into(entry, whole)
        assert same_bits(whole, tensor.to(wanted))
        for first, count in ((0, 217), (5, 100), (216, 1), (217, 0)):
            part = torch.full((count,), 9, dtype=wanted)
            reader.read_into(entry, part, first_element=first)
            assert same_bits(part, tensor.to(wanted).reshape(-1)[first : first + count])


def test_writes_nothing_outside_the_destination(tmp_path: Path) -> None:
    save_file({"w": torch.ones(10)}, tmp_path / "x.safetensors")
    entry = parse_file(tmp_path / "x.safetensors").entries["w"]
    slot = torch.full((30,), 9, dtype=torch.bfloat16)
    with TensorReader() as reader:
        reader.read_into(entry, slot[10:20])
        assert slot.tolist() == [9.0] * 10 + [1.0] * 10 + [9.0] * 10
        for wrong in (torch.empty(11), torch.empty(20)[::2]):
            with pytest.raises(ValueError, match="w"):
                reader.read_into(entry, wrong)
        with pytest.raises(ValueError, match="elements 1 to 11 of 10"):
            reader.read_into(entry, torch.empty(10), first_element=1)


def test_refuses_values_that_do_not_fit(tmp_path: Path) -> None:
    save_file({"big": torch.tensor([1.0, 1e6]), "whole": torch.arange(2)}, tmp_path / "x.safetensors")
    entries = parse_file(tmp_path / "x.safetensors").entries
    with TensorReader() as reader:
        with pytest.raises(UsageError, match="'big' has values too large for float16"):
            reader.read_into(entries["big"], torch.empty(2, dtype=torch.float16))
        reader.read_into(entries["big"], torch.empty(2, dtype=torch.bfloat16))
        with pytest.raises(UsageError, match="'whole' is int64 and cannot become float32"):
            reader.read_into(entries["whole"], torch.empty(2))


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_file_that_shrinks_is_named(tmp_path: Path, wanted: torch.dtype) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(1000)}, path)
    entry = parse_file(path).entries["w"]
    path.write_bytes(path.read_bytes()[:-1])
    with TensorReader() as reader:
        with pytest.raises(UsageError, match=r"x\.safetensors: is too short: tensor 'w'"):
            reader.read_into(entry, torch.empty(1000, dtype=wanted))
        with pytest.raises(UsageError, match="too short"):
            reader.read(entry)
    path.unlink()
    with TensorReader() as reader, pytest.raises(UsageError, match="cannot be opened"):
        reader.read(entry)


@pytest.mark.parametrize("cached", [False, True])
def test_reads_whole_pages(tmp_path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the end of the file, with and without the page cache, and never beyond; a file that shrank is named."""
    if cached:
        monkeypatch.setattr(reader_module.os, "O_DIRECT", 0)
    monkeypatch.setattr(reader_module, "PIECE", 2 * mmap.PAGESIZE)
    path, page = tmp_path / "x.safetensors", mmap.PAGESIZE
    content = torch.randint(256, (5 * page + 100,), dtype=torch.uint8)
    path.write_bytes(content.numpy().tobytes())
    with mmap.mmap(-1, 8 * page) as memory, memoryview(memory) as into, TensorReader() as reader:
        reader.read_pages(path, page, content.numel(), into[: 5 * page])
        assert into[: 4 * page + 100] == content.numpy().data[page:]
        assert into[5 * page :] == bytes(3 * page)
        assert reader.bytes_read == 4 * page + 100
        with pytest.raises(UsageError, match=r"x\.safetensors: is too short: what is read at 4096 ends at byte 28672"):
            reader.read_pages(path, page, 7 * page, into[: 6 * page])


def test_goes_on_through_the_page_cache_where_a_direct_read_is_refused(tmp_path: Path) -> None:
    """As by file systems that open for O_DIRECT all the same. Here the kernel refuses memory that is not aligned."""
    path, page = tmp_path / "x.safetensors", mmap.PAGESIZE
    content = torch.randint(256, (3 * page,), dtype=torch.uint8)
    path.write_bytes(content.numpy().tobytes())
    with mmap.mmap(-1, 4 * page) as memory, memoryview(memory) as into, TensorReader() as reader:
        for _ in range(2):
            reader.read_pages(path, 0, 3 * page, into[1 : 3 * page + 1])
            assert into[1 : 3 * page + 1] == content.numpy().data
        assert reader.bytes_read == 2 * 3 * page


@pytest.mark.usefixtures("small_pieces")
def test_compares_stored_tensors(tmp_path: Path) -> None:
    one = torch.arange(50, dtype=torch.float32)
    other = one.clone()
    other[49] = 0
    save_file({"a": one, "b": one.clone(), "c": other, "d": one.clone()[:49]}, tmp_path / "x.safetensors")
    entries = parse_file(tmp_path / "x.safetensors").entries
    with TensorReader() as reader:
        assert reader.equal(entries["a"], entries["b"])
        assert not reader.equal(entries["a"], entries["c"])
        assert not reader.equal(entries["a"], entries["d"])


MEMORY_PROGRAM = """
import json, os, resource, struct, sys
from pathlib import Path
import torch
from fuyou_cli.checkpoint.files import parse_file
from fuyou_cli.checkpoint.reader import TensorReader

path, elements = Path(sys.argv[1]), 48 << 20
table = json.dumps({"w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}).encode()
with path.open("wb") as file:
    file.write(struct.pack("<Q", len(table)) + table)
    file.truncate(8 + len(table) + 4 * elements)
destination = torch.ones(elements, dtype=torch.bfloat16)
part = torch.empty(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with TensorReader() as reader:
    entry = parse_file(path).entries["w"]
    reader.read_into(entry, destination)
    for first in range(0, elements, 1 << 20):
        reader.read_into(entry, part, first_element=first)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert not destination.any()
print((after - before) >> 10)
"""


def test_a_large_tensor_costs_one_piece_of_memory(tmp_path: Path) -> None:
    """Converts 192 MiB of file: the process grows by the 16 MiB piece and little else."""
    arguments = [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path / "x.safetensors")]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(run.stdout) <= 32


# ---- mark ------------------------------------------------------------------------------------------------------------
# The mark of a checkpoint's weights: the same for the same weights in any files, another for others.


def _entries(folder: Path, *shards: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    folder.mkdir()
    found: dict[str, TensorEntry] = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"{number}.safetensors")
        found |= parse_file(folder / f"{number}.safetensors").entries
    return found


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"a": torch.randn(300, 40), "b": torch.randn(7), "c": torch.randn(64, 64).bfloat16(), "empty": torch.zeros(0)}


def test_files_do_not_matter(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    whole = weights_mark(_entries(tmp_path / "whole", weights))
    parts = [{name: value} for name, value in reversed(weights.items())]
    assert weights_mark(_entries(tmp_path / "sharded", *parts)) == whole


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_weights_trained_a_little_differ(name: str, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    before = weights_mark(_entries(tmp_path / "before", weights))
    weights[name] = weights[name] * 1.01
    assert weights_mark(_entries(tmp_path / "after", weights)) != before


def test_first_and_last_bytes_are_looked_at(tmp_path: Path) -> None:
    values = torch.zeros(100 * SAMPLE, dtype=torch.float32)
    marks = {weights_mark(_entries(tmp_path / "zero", {"a": values}))}
    for number, place in enumerate((0, -1)):
        changed = values.clone()
        changed[place] = 1.0
        marks.add(weights_mark(_entries(tmp_path / str(number), {"a": changed})))
    assert len(marks) == 3


@pytest.mark.parametrize("other", [torch.zeros(4, 2), torch.zeros(2, 4, dtype=torch.float64)])
def test_shape_and_dtype_count(other: torch.Tensor, tmp_path: Path) -> None:
    one = weights_mark(_entries(tmp_path / "one", {"a": torch.zeros(2, 4)}))
    assert weights_mark(_entries(tmp_path / "other", {"a": other})) != one
