"""Tests profiles without measuring: assumed for this machine, and kept on disk."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core import probe
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.machine import profile
from fuyou_cli.machine import profile as store
from fuyou_cli.spec.hardware import Drive, StageRate

NOTES: list[str] = []
hardware_for, keep = (partial(function, say=NOTES.append) for function in (store.hardware_for, store.keep))


def rate(tokens: int, forward: float = 1e12) -> StageRate:
    return StageRate(
        kind="block", dtype="bfloat16", hidden=64, params=4096, tokens=tokens, forward=forward, backward=forward
    )  # fmt: skip


def test_figures_of_this_machine_are_sane() -> None:
    facts = profile.assumed_hardware()
    assert facts.cores >= 1 and facts.device_name
    assert 64 * MiB < facts.ram_available <= facts.ram_total
    assert facts.disk_free > 0
    assert 0 < facts.pinnable <= facts.ram_total and facts.pinnable_why


def test_assumed_rates_say_so(tmp_path: Path) -> None:
    found = profile.assumed_hardware(tmp_path)
    assert found.measured == "assumed" and found.device_memory == 0 and found.h2d == 0.0
    assert min(found.matmul_flops, found.store_read, found.store_write_mixed, found.adamw_bytes) > 0
    on_gpu = profile.assumed_hardware(tmp_path, device="cuda", device_name="card", device_memory=24 * GiB)
    assert on_gpu.h2d > 0 and on_gpu.device_name == "card" and on_gpu.matmul_flops > found.matmul_flops


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    found = replace(
        profile.assumed_hardware(tmp_path),
        measured="2026-01-02",
        store_read=2.5e9,
        stage_rates=(rate(512), rate(1024)),
        adamw=((1, 3e9), (2, 5e9)),
        drives=(Drive(model="a drive", capacity=10**12, used_bytes=7),),
        sources=("here",),
    )
    path = tmp_path / "profiles" / "here.json"
    store.write_profile(found, path)
    assert store.read_profile(path) == found
    data = json.loads(path.read_text())
    wrong = {**data, "cores": "two", "speed": 1, "h2d": "fast", "adamw": [[1]], "drives": [{"model": "x"}], "d2h": True}
    wrong["stage_rates"] = [{**data["stage_rates"][0], "kind": "norm", "forward": -1.0}]
    path.write_text(json.dumps(wrong))
    with pytest.raises(UsageError) as error:
        store.read_profile(path)
    for key in ("speed: unknown", "cores: ", "h2d: ", "adamw[0]", "drives[0].capacity: missing", "d2h: ",
                "stage_rates[0].kind: ", "stage_rates[0].forward: "):  # fmt: skip
        assert key in error.value.message, key
    path.write_text(json.dumps({**data, "store_read_mixed": 0, "stage_rates": [{**data["stage_rates"][0], "backward": 0}]}))
    with pytest.raises(UsageError) as error:  # no machine is that slow: such a profile would have planned nothing
        store.read_profile(path)
    for key in ("store_read_mixed: must be more than 0", "stage_rates[0].backward: must be more than 0"):
        assert key in error.value.message, key
    path.write_text(json.dumps({**data, "disk_free": 0, "ram_total": 0}))  # how much there was then, on a full disk say
    assert store.read_profile(path).disk_free == 0
    for text in ("{", "[]", '{"schema_version": 99}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="profile"):
            store.read_profile(path)
    with pytest.raises(UsageError, match="cannot read"):
        store.read_profile(tmp_path / "none.json")


def test_a_kept_profile_is_this_machines_and_this_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert hardware_for(tmp_path, device="cpu").measured == "assumed"
    facts = replace(profile.assumed_hardware(tmp_path), measured="2026-01-02", store_read=2.5e9, ram_total=1, cores=99)
    keep(facts, tmp_path)
    for device in ("cpu", "emulated"):  # an emulated device computes on the processor
        found = hardware_for(tmp_path, device=device)
        assert (found.measured, found.store_read, found.device) == ("2026-01-02", 2.5e9, device)
        assert found.ram_total > 64 * MiB and found.cores == profile.core_count()  # as they are now
    with monkeypatch.context() as renamed:
        renamed.setattr(platform, "node", lambda: "another-name")
        assert hardware_for(tmp_path, device="cpu").measured == "2026-01-02"
    cores = profile.core_count()
    for module, name, value in (
        (store, "machine_id", lambda: "of another installation"),
        (store, "cpu_name", lambda: "another processor"),
        (store, "core_count", lambda: cores + 1),
    ):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(module, name, value)
            assert hardware_for(tmp_path, device="cpu").measured == "assumed", name
    assert store.profile_path(tmp_path, tmp_path / "b", device="cpu") == store.profile_path(tmp_path, device="cpu")
    assert store.profile_path(tmp_path, Path("/proc"), device="cpu") != store.profile_path(tmp_path, device="cpu")
    assert store.profile_path(tmp_path, device="cuda") != store.profile_path(tmp_path, device="cpu")


@given(now=st.integers(0, 8 * GiB), measured=st.integers(0, 4 * GiB))
def test_a_process_as_plans_take_it_is_no_smaller_and_little_larger(now: int, measured: int) -> None:
    taken = store.steady_process(now, measured=measured)
    least = measured + store.PROCESS_STEP
    assert now <= taken < max(least, now) + store.PROCESS_STEP


def test_processes_of_nearly_one_size_plan_alike() -> None:
    measured, usual = 272 * MiB, 280 * MiB
    assert len({store.steady_process(usual + off * MiB, measured=measured) for off in range(-4, 5)}) == 1


def test_measurements_of_one_machine_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = replace(profile.assumed_hardware(tmp_path), measured="2026-01-02")
    keep(replace(base, stage_rates=(rate(512), rate(1024)), sustained_write=5e8, burst_bytes=9), tmp_path)
    again = keep(replace(base, stage_rates=(rate(512, 2e12), rate(2048)), store_read=7e9), tmp_path)
    assert again.stage_rates == (rate(512, 2e12), rate(1024), rate(2048))
    assert (again.store_read, again.sustained_write, again.burst_bytes) == (7e9, 5e8, 9)
    assert hardware_for(tmp_path, device="cpu").stage_rates == again.stage_rates
    newer = keep(replace(base, sustained_write=6e8), tmp_path)
    assert (newer.sustained_write, newer.burst_bytes) == (6e8, 0)  # measured together, replaced together
    other = keep(replace(base, device_name="another processor"), tmp_path)
    assert other.stage_rates == () and other.sustained_write == 0.0


def test_what_is_free_of_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what this process holds of the card already; about the same gives the same plan, and no digest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    card = SimpleNamespace(name="a card", total_memory=24 * GiB)
    free = {"free": 20 * GiB, "own": GiB}
    for name, value in (
        ("is_available", lambda: True), ("current_device", lambda: 0), ("get_device_properties", lambda device: card),
        ("mem_get_info", lambda card: (free["free"], 24 * GiB)), ("memory_reserved", lambda card: free["own"] + GiB),
        ("memory_allocated", lambda card: GiB),  # by others in the process: not to be had
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    found = hardware_for(tmp_path, device="cuda")
    assert (found.device_free, found.device_memory) == (21 * GiB, 24 * GiB)
    free["free"] += 3 * MiB
    assert hardware_for(tmp_path, device="cuda").device_free == 21 * GiB
    free["free"] = 7 * GiB
    less = hardware_for(tmp_path, device="cuda")
    assert less.device_free == 8 * GiB and less.digest() == found.digest()
    free["free"], free["own"] = 1, 0
    assert hardware_for(tmp_path, device="cuda").device_free == 1  # full is not unknown
    assert hardware_for(tmp_path, device="cpu").device_free == 0
    monkeypatch.setattr(store.probe, "process_bytes", lambda: 300 * MiB)
    sizes = [hardware_for(tmp_path, device=device).process_bytes for device in ("cpu", "cuda")]
    assert sizes[1] - sizes[0] == profile.LATER_ON_A_GPU, "what CUDA's libraries take once they compute"


@pytest.mark.parametrize("left", ["", '{"schema_version": 1, "dev', '{"schema_version": 1, "cores": 2}'])
def test_a_damaged_kept_profile_stands_in_nobodys_way(left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = store.profile_path(tmp_path, device="cpu")
    path.parent.mkdir(parents=True)
    path.write_text(left)
    assert hardware_for(tmp_path, device="cpu").measured == "assumed"
    assert str(path) in NOTES[-1]
    keep(replace(profile.assumed_hardware(tmp_path), measured="2026-01-02"), tmp_path)
    assert hardware_for(tmp_path, device="cpu").measured == "2026-01-02"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_shares_are_of_what_the_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that 90 % of a host's RAM is more than a container of an eighth of it gets."""
    whole = probe.physical_memory()
    assert profile.assumed_hardware().ram_total <= whole
    limit = probe.CgroupMemory(version=2, path=Path("/"), limit=whole // 8, in_use=0)
    monkeypatch.setattr(probe, "cgroup_limits", lambda root=None: [limit])
    for found in (profile.assumed_hardware(), hardware_for(Path(), device="cpu")):
        assert found.ram_available <= found.ram_total == whole // 8
