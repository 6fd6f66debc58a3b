"""Tests machines that one does not have: named by parts, or written in a file; whatever is wrong is said at once."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from drawn import crossed

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import GiB, parse_rate
from fuyou_cli.machine.described import described, described_box
from fuyou_cli.machine.profile import origins_of, write_profile
from fuyou_cli.recipe.named import shipped_hardware, shipped_recipes
from fuyou_cli.spec.hardware import Drive, StageRate

WHOLE = """
device: cuda
device_name: some card
device_memory: 12GiB
cores: 8
ram_total: 64GiB
matmul_flops: 40 TFLOPS
store_read: 3GB/s
store_write: 2GB/s
store_read_mixed: 1.5GB/s
store_write_mixed: 1024MiB/s
adamw: {1: 8GB/s, 4: 2e10}
h2d: 12GB/s
d2h: 12GB/s
io_cpu: 1e-10
drives:
  - {model: some drive, capacity: 1TB, rated_bytes: 600TB}
stage_rates:
  - {kind: block, dtype: bfloat16, hidden: 4096, params: 218112000, tokens: 1024, forward: 30TFLOPS, backward: 3.5e13,
     given: 28TFLOPS}
"""


def test_parts_make_a_machine() -> None:
    found = described("rtx4090,12xp5510,768GiB,2xgold5320")
    assert (found.device, found.device_memory, found.cores) == ("cuda", 24 * GiB, 52)
    assert found.matmul_flops == 162e12 and found.h2d == found.d2h == 21e9
    assert found.store_read_mixed + found.store_write_mixed == pytest.approx(18.2e9, rel=1e-3)
    assert found.store_read == found.store_write == 32e9
    assert len(found.drives) == 12 and found.disk_free == sum(drive.capacity for drive in found.drives) == 12 * 3_840 * 10**9
    assert (found.ram_total, found.pinnable) == (768 * GiB, 768 * GiB) and 0 < found.ram_available < 768 * GiB
    assert (found.measured, found.name) == ("described", "rtx4090,12xp5510,768GiB,2xgold5320")
    assert found.stage_rate("block", "bfloat16", 1, 1, 1).backward == 162e12
    assert any("ICDE 2025" in source for source in found.sources)


def test_the_number_of_drives_counts() -> None:
    rates = {n: described(f"rtx3090,{n}xp5510,128GiB") for n in (1, 2, 3, 4, 6, 12, 24)}
    mixed = {n: (found.store_read_mixed + found.store_write_mixed) / 1e9 for n, found in rates.items()}
    assert [round(mixed[n], 1) for n in (1, 2, 3, 6, 12, 24)] == [4.3, 7.4, 9.3, 13.9, 18.2, 36.4]
    assert mixed[3] < mixed[4] < mixed[6]
    said = {n: found.source_of("store_read").partition(f"; {n} p5510: ")[2] for n, found in rates.items()}
    assert said == {1: "", 2: "", 3: "", 6: "", 12: "", 4: "interpolated between 3 and 6",
                    24: "assumption, 2 times as fast as 12 of them, at most 32 GB/s"}  # fmt: skip
    one, two = described("gen4,64GiB"), described("2xgen4,64GiB")
    assert two.store_read == 2 * one.store_read and two.burst_bytes == 2 * one.burst_bytes
    assert one.sustained_write < one.store_write / 4 and one.drives[0].rated_bytes == 1200 * 10**12


@crossed(3, gpu=["rtx3090", "rtx4080", "rtx4090", "a100", "h100", "h200"], drives=["gen4", "2xgen4", "gen5", "p5510"])
def test_all_that_is_shipped(gpu: str, drives: str) -> None:
    found = described(f"{gpu.upper()} + {drives} + 256GiB")
    words = ("specification, not measured", "Ratel", "assumption", "`fuyou bench`")
    assert all(any(word in source for word in words) for source in found.sources)  # none without its origin
    assert found.digest() != described(f"{gpu},{drives},256GiB,2xgold5320").digest()


def test_several_cards_share_a_box() -> None:
    one = described("rtx4090,2xgen4,128GiB")
    box = described_box("4xrtx4090,2xgen4,128GiB")
    share = box.of_rank(4)
    assert box.cards == 4 and box.machine.device_memory == share.device_memory == one.device_memory
    assert share.ram_available == one.ram_available // 4 and share.cores == one.cores // 4
    assert share.store_read == one.store_read / 4 and share.store_write_mixed == one.store_write_mixed / 4
    assert share.h2d == one.h2d / 4, "a desktop has lanes for one card"
    assert described_box("4xrtx4090,2xgen4,128GiB,2xgold5320").of_rank(4).h2d == one.h2d == box.machine.h2d
    assert share.adamw == ((1, 10e9), (2, 55e9 / 4), (4, 55e9 / 4), (8, 55e9 / 4), (16, 55e9 / 4))
    with pytest.raises(UsageError, match="describes 4 cards"):
        described("4xrtx4090,2xgen4,128GiB")


def test_a_file_may_have_several_cards(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text("parts: 2xrtx4090,gen4,128GiB\ndram: 60GB/s\n")
    box = described_box(path)
    assert box.cards == 2 and box.of_rank(2).dram == 30e9


def test_without_a_gpu_the_host_computes() -> None:
    found = described("gen4,64GiB")
    assert (found.device, found.device_memory, found.h2d, found.cores) == ("cpu", 0, 0.0, 16)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rtx4099,2xgen4,128GiB", "'rtx4099' is neither a part nor a size (did you mean rtx4090?)"),
        ("rtx4090,128GiB", "no drives"),
        ("rtx4090,gen4", "no RAM"),
        ("rtx4090,gen4,128", "'128' is neither"),
        ("rtx4090,rtx3090,gen4,64GiB,128GiB", "more than one kind of GPU; more than one RAM"),
        ("0xgen4,64GiB", "'0xgen4' is neither"),
        ("", "no drives; no RAM"),
        ("rtx4090,1000000000xgen4,64GiB", "more than 1,024 gen4 drives"),
        ("65xrtx4090,gen4,64GiB", "more than 64 cards"),
        ("1025xgen4,64GiB", "more than 1,024 gen4 drives"),
        (f"{'9' * 5000}xgen4,64GiB", "more than 1,024 gen4 drives"),
        ("gen4,4097PiB", "more than 4096PiB of RAM"),
        (f"gen4,{'9' * 400}GiB", f"'{'9' * 36}... is neither"),
        ("x" * 5000, f"'{'x' * 36}... is neither"),
    ],
    ids=lambda text: text[:20],
)
def test_parts_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        described(text)
    assert said in error.value.message and error.value.exit_code == 2
    assert error.value.hint is not None and len(error.value.message) < 400
    for name in ("rtx4090", "h200", "gen5", "p5510", "desktop", "768GiB"):
        assert name in error.value.hint


def test_a_machine_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(WHOLE)
    found = described(path)
    assert found == described(str(path))
    assert (found.name, found.device, found.measured) == ("box", "cuda", "described")
    assert found.ram_total == 64 * GiB and found.matmul_flops == 40e12 and found.store_write_mixed == 1024 * 2**20
    assert found.adamw == ((1, 8e9), (4, 2e10)) and found.io_cpu == 1e-10
    assert found.drives == (Drive(model="some drive", capacity=10**12, rated_bytes=600 * 10**12),)
    assert found.disk_free == 10**12
    (rate,) = found.stage_rates
    assert rate == StageRate(
        kind="block", dtype="bfloat16", hidden=4096, params=218_112_000, tokens=1024, forward=3e13, backward=3.5e13,
        given=2.8e13,
    )  # fmt: skip


def test_a_profile_kept_on_another_machine(tmp_path: Path) -> None:
    (tmp_path / "box.yaml").write_text(WHOLE)
    measured = replace(described(tmp_path / "box.yaml"), measured="2026-01-02", name="there", h2d=1.25e-3)
    write_profile(measured, tmp_path / "profile.json")
    assert described(str(tmp_path / "profile.json")) == measured


def test_a_file_that_starts_from_parts(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text("parts: rtx4090,2xgen4,128GiB\nram_total: 96GiB\nh2d: 25GB/s\n")
    found, base = described(path), described("rtx4090,2xgen4,128GiB")
    assert (found.h2d, found.ram_total, found.pinnable) == (25e9, 96 * GiB, 96 * GiB)
    assert found.ram_available < 96 * GiB
    assert (found.d2h, found.store_read, found.adamw) == (base.d2h, base.store_read, base.adamw)


def test_parts_follow_what_a_file_says_of_drives(tmp_path: Path) -> None:
    """Takes room, and rates once a drive is full, from the file; what is written down of these stays as it is."""
    path = tmp_path / "box.yaml"
    path.write_text("parts: rtx4090,2xgen4,128GiB\ndrives: [{model: small, capacity: 500GB}]\n")
    assert described(path).disk_free == 500 * 10**9
    path.write_text("parts: rtx4090,2xgen4,128GiB\ndrives: [{model: small, capacity: 500GB}]\ndisk_free: 20GB\n")
    assert described(path).disk_free == 20 * 10**9
    path.write_text("parts: rtx4090,gen4,128GiB\nstore_write: 1GB/s\nstore_read: 2GB/s\n")
    slow = described(path)
    assert (slow.store_write, slow.sustained_write) == (1e9, 1e9)  # the part's is 1.4
    assert (slow.store_write_mixed, slow.sustained_write_mixed) == (1e9, 0.7e9)  # nor faster than alone
    assert slow.store_read_mixed == 2e9 and slow.sustained_read_mixed <= 2e9
    path.write_text("parts: rtx4090,2xgen4,128GiB\nstore_write: 1GB/s\n")
    slow = described(path)
    assert max(slow.store_write_mixed, slow.sustained_write, slow.sustained_write_mixed) <= 1e9
    path.write_text("parts: rtx4090,p5510,128GiB\nstore_write: 1GB/s\nstore_write_mixed: 1GB/s\n")
    assert not described(path).slows_down and described(path).lasting().store_write == 1e9


def test_a_measured_profile_may_have_been_measured_on_a_full_drive(tmp_path: Path) -> None:
    (tmp_path / "box.yaml").write_text(WHOLE)
    measured = replace(described(tmp_path / "box.yaml"), measured="2026-01-02", sustained_write=2.1e9, disk_free=2 * 10**12)
    write_profile(measured, tmp_path / "profile.json")
    assert described(tmp_path / "profile.json") == measured


def test_everything_wrong_with_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    text = WHOLE.replace("cores: 8", "cores: many").replace("store_read: 3GB/s", "store_reed: 3GB/s")
    text = text.replace("h2d: 12GB/s", "h2d: 12TFLOPS").replace("kind: block", "kind: norm").replace("1TB", "-1")
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        described(path)
    lines = error.value.message.splitlines()
    assert str(path) in lines[0] and "6 errors" in lines[0]
    for start in ("store_read: missing", "store_reed: unknown key (did you mean store_read", "h2d: '12TFLOPS'",
                  "cores: expected a whole number, got 'many'",
                  "drives[0].capacity: ", "stage_rates[0].kind: expected 'block', 'compiled block' or 'head'"):  # fmt: skip
        assert any(line.strip().startswith(start) for line in lines), start


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "keys and values"),
        ("rtx4090", "keys and values"),
        ("parts: [rtx4090]", "parts: expected names"),
        ("parts: rtx4090,gen4", "parts: 'rtx4090,gen4' does not describe a machine: no RAM"),
        ("parts: rtx4090,gen4,64GiB\nram_available: 65GiB", "ram_available: larger than ram_total"),
        ("parts: rtx4090,gen4,64GiB\nadamw: {4: 8GB/s, 2: 9GB/s}", "adamw: must give a rate for 1 thread, and ascending"),
        ("parts: rtx4090,gen4,64GiB\nshared_compute: 1.5", "shared_compute: must be a share"),
        ("parts: rtx4090,gen4,64GiB\ndevice: tpu", "device: must be cpu or cuda"),
        ("parts: rtx4090,gen4,64GiB\ndevice_memory: 0", "device_memory: must be more than 0"),
        ("parts: rtx4090,gen4,64GiB\nstore_write_mixed: 0", "store_write_mixed: must be more than 0"),
        ("parts: rtx4090,gen4,64GiB\nsustained_write: 7GB/s", "sustained_write: more than store_write"),
        ("parts: rtx4090,gen4,64GiB\nstore_write_mixed: 1GB/s\nsustained_write_mixed: 2GB/s", "sustained_write_mixed: more"),
        ("parts: rtx4090,gen4,64GiB\nstore_read: 1GB/s\nstore_read_mixed: 2GB/s", "store_read_mixed: more than store_read"),
        ("parts: rtx4090,gen4,64GiB\ndevice: cpu", "device: cpu, but parts names a GPU"),
        ("parts: rtx4090,gen4,64GiB\ndisk_free: 3TB", "disk_free: larger than its drives"),
        (WHOLE.replace("forward: 30TFLOPS", "forward: 0"), "stage_rates[0].forward: must be more than 0"),
        (WHOLE.replace("tokens: 1024", "tokens: 0"), "stage_rates[0].tokens: must be more than 0"),
        ("parts: rtx4090,gen4,64GiB\nstore_read: .nan", "store_read: expected a"),
        ("parts: rtx4090,gen4,64GiB\nstore_read: true", "store_read: expected a"),
        (f"parts: rtx4090,gen4,64GiB\nram_total: 1{'0' * 400}", "ram_total: must be at most"),
        (f"parts: rtx4090,gen4,64GiB\nram_total: 1{'0' * 400}GiB", "ram_total: a size has too many digits"),
        (f"parts: rtx4090,gen4,64GiB\nh2d: 1{'0' * 400}", "h2d: expected a number"),
        (f"parts: rtx4090,gen4,64GiB\nh2d: 1{'0' * 400}GB/s", "h2d: a rate must be at most"),
        (f"parts: rtx4090,gen4,64GiB\nio_cpu: 1{'0' * 400}", "io_cpu: expected a number"),
        ("parts: rtx4090,2000xgen4,64GiB", "does not describe a machine: more than 1,024 gen4 drives"),
    ],
)
def test_files_that_describe_no_machine(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        described(path)
    assert said in error.value.message and str(path) in error.value.message and error.value.exit_code == 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read") as error:
        described("none.yaml")
    assert "rtx4090" in (error.value.hint or "")  # perhaps parts were meant
    with pytest.raises(UsageError, match="cannot read"):
        described("./" + "x" * 5000)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read"):
        described(tmp_path / "bytes.yaml")


def test_hardware_is_no_recipe() -> None:
    assert set(shipped_hardware()) == {"gpus", "drives", "hosts"}
    assert not set(shipped_hardware()) & set(shipped_recipes())


@pytest.mark.parametrize(
    ("text", "unit", "rate"),
    [("21GB/s", "B/s", 21e9), ("2 GiB/s", "B/s", 2.0 * GiB), ("7450MB/s", "B/s", 7.45e9), ("162TFLOPS", "FLOP/s", 162e12),
     ("1.5 PFLOP/s", "FLOP/s", 1.5e15), (5, "B/s", 5.0), (2.5e9, "B/s", 2.5e9)],
)  # fmt: skip
def test_rates_as_people_write_them(text: str | float, unit: str, rate: float) -> None:
    assert parse_rate(text, unit) == rate


@pytest.mark.parametrize("text", ["21", "21GB", "fast", "-1GB/s", "1GFLOPS", -1, float("nan"), True])
def test_what_is_no_rate(text: str | float) -> None:
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text, "B/s")


def _origins(text: str | Path) -> dict[str, str]:
    return {rate.what: rate.origin for rate in origins_of(described(text))}


def test_every_rate_says_whose_figure_it_is(tmp_path: Path) -> None:
    assert _origins("rtx4090,gen4,128GiB") == {
        "compute": "measured", "store read, write": "specification", "store, both at once": "assumption",
        "store, sustained": "assumption", "AdamW, one thread": "assumption", "to GPU, back": "measured",
        "GPU memory": "assumption",
    }  # fmt: skip
    one, four = _origins("rtx3090,1xp5510,64GiB"), _origins("rtx3090,4xp5510,64GiB")
    assert (one["store, both at once"], four["store, both at once"]) == ("measured", "assumption")  # 4: between 3 and 6
    assert "store, sustained" not in one  # they do not slow down
    path = tmp_path / "box.yaml"
    path.write_text("parts: h100,gen4,64GiB\nh2d: 50GB/s\nd2h: 50GB/s\nstore_read: 5GB/s\n")
    found = {rate.what: rate for rate in origins_of(described(path))}
    assert found["GPU memory"].origin == "measured"
    assert (found["to GPU, back"].origin, found["to GPU, back"].source) == ("given", "given in box.yaml")
    assert found["store read, write"].origin == "specification"  # of the two the lesser known
    assert "given in box.yaml" in found["store read, write"].source
    path.write_text(WHOLE)
    assert set(_origins(path).values()) == {"given"}


@crossed(
    5,
    gpu=["rtx3090", "rtx4080", "rtx4090", "a100", "h100", "h200"],
    drives=["gen4", "3xgen4", "gen5", "p5510", "4xp5510"],
    host=["desktop", "2xgold5320"],
)
def test_nothing_shipped_is_without_a_source(gpu: str, drives: str, host: str) -> None:
    for rate in origins_of(described(f"{gpu},{drives},256GiB,{host}")):
        assert rate.source != "not known", rate.what
    for rate in origins_of(described(f"{drives},256GiB,{host}")):
        assert rate.source != "not known", rate.what


@pytest.mark.parametrize(("gpu", "sheet"), [("rtx4080", 97.5e12), ("a100", 312e12), ("h100", 989e12), ("h200", 989e12)])
def test_no_block_gets_a_data_sheets_peak(gpu: str, sheet: float) -> None:
    """Uses a stated share of the data sheet, which is an assumption, beside cards that somebody measured."""
    found = described(f"{gpu},gen4,64GiB")
    (compute,) = (rate for rate in origins_of(found) if rate.what == "compute")
    assert 0.5 * sheet < found.matmul_flops < sheet
    assert compute.origin == "assumption" and f"times {found.matmul_flops / sheet:.2g}" in compute.source


def _parts() -> dict[str, dict[str, Any]]:
    """Every shipped part by its name, its file read as it is."""
    return {name: part for path in shipped_hardware().values() for name, part in yaml.safe_load(path.read_text()).items()}


def _products(text: str) -> list[float]:
    """Yields every `704 tokens/s x 8 x 13e9` in the text, with the units of rates counted."""
    units = {"GFLOPS": 1e9, "TFLOPS": 1e12, "GB/s": 1e9}
    factor = r"\d[\d.]*(?:e\d+)?(?: (?!x )[A-Za-z/]+)?"
    chains = [chain.split(" x ") for chain in re.findall(rf"{factor}(?: x {factor})+", text)]
    parted = [[one.partition(" ") for one in chain] for chain in chains]
    return [prod(float(number) * units.get(unit, 1.0) for number, _, unit in chain) for chain in parted]


def test_products_in_sources_are_read_as_they_are_written() -> None:
    assert _products("one, 704 tokens/s x 8 x 13e9: of steps; 52 x 40 GFLOPS") == [704 * 8 * 13e9, 52 * 40e9]
    assert _products("PCIe 4.0 x16, 162 of 165.2 TFLOPS, times 0.98") == []


def test_rates_are_the_products_that_their_sources_give() -> None:
    """Compares to three digits. Rates of compute come first in their source."""
    given = {
        (name, source): _products(source)[0]
        for name, part in _parts().items()
        for source in part["sources"]
        if source.startswith("matmul_flops") and _products(source)
    }
    assert sorted(name for name, _ in given) == ["2xgold5320", "desktop", "rtx3090"]
    for (name, source), product in given.items():
        assert parse_rate(_parts()[name]["matmul_flops"], "FLOP/s") == pytest.approx(product, rel=1e-3), source


def test_adamw_of_the_host_is_what_its_source_says() -> None:
    host = _parts()["2xgold5320"]
    (source,) = (source for source in host["sources"] if "adamw" in source)
    rates = {threads: parse_rate(rate, "B/s") for threads, rate in host["adamw"].items()}
    assert rates[1] == rates[8] / 8 == 10e9 and rates[max(rates)] == 250e9 == max(rates.values())
    assert "10 GB/s of each of 8 cores, 250 GB/s at most" in source
    _, channels = _products(source)
    assert f"{250e9 / channels:.0%}".replace("%", " %") in source


@pytest.mark.parametrize(
    ("key", "share", "gpus"),
    [
        ("matmul_flops", "sustained_share", ["rtx4080", "a100", "h100", "h200"]),
        ("device_memory_rate", "memory_share", ["rtx3090", "rtx4080", "rtx4090", "a100", "h200"]),
    ],
)
def test_a_share_is_what_its_source_divides(key: str, share: str, gpus: list[str]) -> None:
    assert gpus == [name for name, part in _parts().items() if share in part]
    for part in map(_parts().__getitem__, gpus):
        (source,) = (source for source in part["sources"] if source.startswith(key))
        (reached, sheet) = re.findall(r"([\d.]+) of ([\d.]+) T", source)[0]
        assert part[share] == pytest.approx(float(reached) / float(sheet), abs=0.01) and f"times {part[share]}" in source


def test_a_gpus_memory_has_what_sums_of_gradients_get_of_its_data_sheet() -> None:
    sheets = {"rtx3090": 936e9, "rtx4080": 716.8e9, "rtx4090": 1008e9, "a100": 1935e9, "h100": 3.35e12, "h200": 4.8e12}
    found = {name: described(f"{name},gen4,64GiB").device_memory_rate for name in sheets}
    assert found == pytest.approx({name: 0.73 * sheet for name, sheet in sheets.items()}, rel=0.003)
    assert described("gen4,64GiB").device_memory_rate == 0.0


def test_drives_do_at_once_what_their_source_says() -> None:
    drives = _parts()["p5510"]
    (source,) = (source for source in drives["sources"] if source.startswith("store_read_mixed"))
    listed = re.findall(r"\d[\d.]*", source.partition("GB/s in all")[0].partition("), ")[2])
    counts = [rates["count"] for rates in drives["rates"]]
    for total, rates in zip(map(float, listed), drives["rates"], strict=True):
        both = [parse_rate(rates[key], "B/s") for key in ("store_read_mixed", "store_write_mixed")]
        assert both == pytest.approx([total * 1e9 * 16 / 30, total * 1e9 * 14 / 30], rel=1e-3), rates["count"]
    assert f"for {', '.join(map(str, counts[:-1]))} and {counts[-1]} drives" in source and "shared 16 to 14" in source


def test_a_profile_that_was_measured_says_so(tmp_path: Path) -> None:
    measured = replace(described("gen4,64GiB"), measured="2026-01-02", sources=("fuyou bench, quick",), name="there")
    write_profile(measured, tmp_path / "profile.json")
    assert set(_origins(tmp_path / "profile.json").values()) == {"measured"}
