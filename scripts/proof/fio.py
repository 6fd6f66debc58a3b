"""Shows what the held disk gives: fio's concurrent mix of one reader and one writer."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from .both_sides import limited, started
from .common_recipe import fresh
from .setting import RunFailed, Setting

FILE_SIZE = 1 << 30
SECONDS = 8
COMMON = ["--output-format=json", "--thread", "--ioengine=io_uring", "--direct=1", "--bs=1M", "--iodepth=8"]


def mix(setting: Setting, throttle: tuple[int, int], *, turn: int) -> dict[str, Any]:
    """Returns bytes per second {read, write} of both at once under the throttle; `absent` if fio is not installed."""
    if shutil.which("fio") is None:
        return {"absent": "fio is not installed (apt-get install fio)"}
    key = f"fio mix, disk {throttle[0] / 1e9:g}+{throttle[1] / 1e9:g} GB/s, {SECONDS} s, turn {turn}"
    result = setting.measure(key, lambda: _mix(setting.work / "fio", throttle))
    if result.get("failed"):
        raise RunFailed(f"{key}: {result['failed']}")
    return result


def _mix(folder: Path, throttle: tuple[int, int]) -> dict[str, Any]:
    fresh(folder)
    try:
        fill = ["--name=fill", "--rw=write", f"--size={FILE_SIZE}"]
        for name in ("r", "w"):  # written before: a file's first pass is slower
            command = ["fio", *COMMON, *fill, f"--filename={folder / name}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        timed = ["--time_based", f"--runtime={SECONDS}", f"--size={FILE_SIZE}"]
        jobs = ["--name=r", "--rw=read", f"--filename={folder / 'r'}", *timed]
        jobs += ["--name=w", "--rw=write", "--overwrite=1", f"--filename={folder / 'w'}", *timed]
        output = folder / "out.json"
        with (
            limited(folder, memory=None, throttle=throttle) as (held, _),
            output.open("wb") as file,
            started(["fio", *COMMON, *jobs], held, file) as child,
        ):
            child.wait()
        text = output.read_text()
        if child.returncode != 0:
            return {"failed": text[-500:]}
        reader, writer = json.loads(text[text.index("{") :])["jobs"]
        return {"read": reader["read"]["bw_bytes"], "write": writer["write"]["bw_bytes"]}
    finally:
        fresh(folder)  # 2 GB
