"""Tests `fuyou doctor`: what it says of memory, I/O, drives and GPUs, and what it advises."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuyou_cli.cli import doctor
from fuyou_cli.core import probe
from fuyou_cli.core.units import GiB
from fuyou_cli.machine import profile

from .conftest import tree, with_drive


def test_doctor_as_lines_and_as_json(fuyou, tmp_path):
    done = fuyou("doctor", "--json")
    result = json.loads(done.stdout)
    names = [check["name"] for check in result["checks"]]
    for name in (
        "python",
        "torch",
        "transformers",
        "native extension",
        "ram",
        "pinned memory",
        "store folder",
        "free space",
        "O_DIRECT",
        "store I/O",
        "drive",
    ):
        assert name in names
    problems = [check for check in result["checks"] if check["status"] == "problem"]
    assert (done.returncode, result["ok"]) == ((1, False) if problems else (0, True))
    assert all(check["advice"] for check in problems)


@pytest.mark.parametrize("columns", [80, 100])
def test_doctor_breaks_between_words(columns, monkeypatch, capsys):
    check = doctor.Check("memory", "some words " * 20, "what to do " * 20)
    monkeypatch.setattr(doctor, "examine", lambda folder: [check])
    monkeypatch.setenv("COLUMNS", str(columns))
    assert doctor.run_doctor(None, json_output=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns and " ".join(" ".join(lines).split()) == (
        "note memory " + "some words " * 20 + "-> " + ("what to do " * 20).strip()
    )
    begins = {len(line) - len(line.lstrip()) for line in lines[1:]}
    assert begins == {14}


def test_doctor_names_a_folder_in_memory(fuyou):
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    text = fuyou("doctor", "--dir", "/dev/shm").stdout
    assert "this is memory, not a drive" in text
    assert "\x1b" not in text


def test_direct_io_is_tried_and_leaves_nothing(tmp_path):
    direct, io = doctor._store_io(tmp_path)
    assert direct.status in ("ok", "note") and ("works" in direct.found or "refuses" in direct.found)
    assert (io.status, io.found.split()[0]) in (("ok", "io_uring:"), ("note", "threads"))
    assert list(tmp_path.iterdir()) == []
    (check,) = doctor._store_io(Path("/proc"))
    assert check.status == "problem" and "cannot write to /proc" in check.found


# A seccomp filter as containers have it: the system call 425 (io_uring_setup) fails with EPERM.
FORBIDDEN = """
import ctypes, json, struct, sys
from pathlib import Path
from fuyou_cli.cli import doctor
load, jump, give = (0x20, 0, 0, 0), (0x15, 0, 1, 425), 0x06
code = b"".join(struct.pack("HBBI", *one) for one in (load, jump, (give, 0, 0, 0x50001), (give, 0, 0, 0x7FFF0000)))
program = struct.pack("HxxxxxxQ", 4, ctypes.addressof(kept := ctypes.create_string_buffer(code)))
prctl = ctypes.CDLL(None).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.c_char_p(program)):
    sys.exit(77)
print(json.dumps([check.as_dict() for check in doctor._store_io(Path(sys.argv[1]))][-1]))
"""


def test_doctor_where_io_uring_is_forbidden(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORBIDDEN, tmp_path], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this machine forbids seccomp filters")
    check = json.loads(done.stdout)
    assert check["status"] == "note" and check["found"].startswith("threads (io_uring refused: errno 1, not permitted")
    assert "threads take more CPU; io_uring: forbidden" in check["advice"]


def test_doctor_says_who_forbids_io_uring(tmp_path):
    def said(setting):
        return profile.io_uring_forbidden(tree(tmp_path / setting, {"proc/sys/kernel/io_uring_disabled": f"{setting}\n"}))

    assert "kernel.io_uring_disabled=2; root may set it to 0" in said("2") and "all users" in said("2")
    assert "kernel.io_uring_group" in said("1")
    assert "seccomp" in said("0") and "seccomp" in profile.io_uring_forbidden(tmp_path / "an older kernel")


def test_doctor_on_a_group_that_is_too_small():
    group = probe.CgroupMemory(version=2, path=Path("/sys/fs/cgroup/job"), limit=GiB // 2, in_use=0)
    small = doctor._group(group)
    assert (
        small.status == "note"
        and "512 MiB (v2, /sys/fs/cgroup/job)" in small.found
        and "raise the group's limit" in small.advice
    )
    roomy = doctor._group(replace(group, limit=4 * GiB))
    assert (roomy.status, roomy.advice) == ("ok", "")


class Torch:
    """Stands for what doctor looks at of torch."""

    def __init__(self, cuda, *, available=False):
        self.version = SimpleNamespace(cuda=cuda)
        self.cuda = SimpleNamespace(is_available=lambda: available)


@pytest.mark.parametrize(
    ("torch", "advice"),
    [
        (Torch("13.0", available=True), ""),
        (Torch(None), "install a CUDA build of torch"),
        (None, "install a CUDA build of torch"),
        (Torch("13.0"), "torch is built for CUDA 13.0, which needs a newer driver; or install a torch for CUDA 12.4"),
        (Torch("12.4"), "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_doctor_on_a_gpu_that_torch_cannot_use(torch, advice):
    check = doctor._gpu_check(0, "a card", doctor._cuda_version(12040), torch)
    assert (check.name, check.status) == ("gpu 0", "note" if advice else "ok")
    assert advice in check.advice and bool(check.advice) == bool(advice)


def test_doctor_on_a_card_without_a_driver(tmp_path):
    none = doctor._without_driver("no library", tmp_path)
    assert (none.status, none.advice) == ("ok", "")
    tree(tmp_path / "sys/bus/pci/devices", {
        "0000:00:1f.0/vendor": "0x8086\n", "0000:00:1f.0/class": "0x030000\n", "0000:01:00.1/vendor": "0x10de\n",
        "0000:01:00.1/class": "0x040300\n",
    })  # fmt: skip
    assert doctor._without_driver("no library", tmp_path).status == "ok"  # another maker's, and a sound device
    tree(tmp_path / "sys/bus/pci/devices", {"0000:01:00.0/vendor": "0x10de\n", "0000:01:00.0/class": "0x030200\n"})
    card = doctor._without_driver("no library", tmp_path)
    assert card.status == "note" and "install NVIDIA's driver" in card.advice


def test_doctor_on_a_worn_drive_and_on_a_hard_disk(tmp_path, monkeypatch):
    sysfs = with_drive(tmp_path, {"device/model": "Samsung SSD 870 QVO 1TB\n", "size": "1953525168\n"})

    def check(blocks):
        monkeypatch.setattr(profile, "nvme_wear", lambda device: profile.Wear(percent_used=0, written=512 * blocks))
        (found,) = doctor._drives(tmp_path, sysfs)
        return found

    fresh, worn = check(10**9), check(680 * 10**9)
    assert (fresh.status, fresh.advice) == ("ok", "")
    assert fresh.found == "sda, Samsung SSD 870 QVO 1TB, rated for 360 TB of writes, 512 GB written"
    assert worn.status == "note" and "near the end of its rated life" in worn.advice
    tree(sysfs / "devices" / "sda", {"queue/rotational": "1\n", "device/model": "Old disk\n"})
    turns = check(0)
    assert turns.status == "note" and "a hard disk" in turns.advice and "rated writes unknown" in turns.found


def test_how_stages_on_a_gpu_are_updated_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, none = SimpleNamespace(version=SimpleNamespace(cuda="13.0")), SimpleNamespace(version=SimpleNamespace(cuda=None))
    known = {"cuda-bindings": "13.0.3"}

    def version(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert [*doctor._kernel(None), *doctor._kernel(none)] == []
    (check,) = doctor._kernel(cuda)
    assert (check.status, check.found) == ("ok", "one kernel, compiled by cuda-bindings 13.0.3")
    known.clear()
    (check,) = doctor._kernel(cuda)
    assert (check.status, check.found) == ("note", "tensor operations") and "pip install cuda-bindings" in check.advice


def test_a_card_that_does_not_tell_its_memory_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose memory is the system's, or a part of one that may not be asked."""

    class Refused(Exception):
        pass

    def memory(handle: int) -> SimpleNamespace:
        if handle == 0:
            raise Refused("Not Supported")
        return SimpleNamespace(free=GiB, total=2 * GiB)

    driver = SimpleNamespace(
        NVMLError=Refused, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlSystemGetCudaDriverVersion=lambda: 13000, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetName=lambda handle: f"card {handle}", nvmlDeviceGetMemoryInfo=memory,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    first, second = (check.found for check in doctor._gpu() if check.name.startswith("gpu "))
    assert first == "card 0, memory not known (Not Supported), driver 580.1 for CUDA 13.0"
    assert second.startswith("card 1, 1.00 GiB of 2.00 GiB free")
