"""Runs DeepSpeed's ZeRO-3 NVMe offload on the same disk, through the loop ds_train.py, or returns what it once measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fuyou_cli.machine.measure.timing import BackgroundLoad

from .both_sides import NOISE_CORES, THREADS, limited, started
from .materials import LENGTH
from .setting import Setting
from .verdicts import digest

# Measured with ds_train.py on two cores, disk held at 0.6 + 0.6 GB/s, 1.1b shape, 512 tokens per step, no clipping.
RECORDED = {"step_s": 71.1, "opt_s": 55.2, "cg_peak_gib": 7.9, "shape": "1.1b", "tokens": LENGTH}


def deepspeed_run(
    setting: Setting, peers: Path | None, *, rows: int, micro: int, throttle: tuple[int, int], turn: int
) -> tuple[dict[str, Any], str]:
    """Returns (its record, ""), or ({}, why there is none)."""
    why = unusable(peers)
    if why:
        return {}, why
    assert peers is not None
    disk = f"disk {throttle[0] / 1e9:g}+{throttle[1] / 1e9:g} GB/s"
    loop = digest([peers / "ds_train.py"])  # no part of this checkout: its contents go into the key
    key = f"deepspeed {setting.shape}, {rows}x{LENGTH} by {micro}, {disk}, ds_train.py {loop}, turn {turn}"
    result = setting.measure(key, lambda: _deepspeed_run(setting, peers, rows=rows, micro=micro, throttle=throttle))
    if result.get("failed"):
        return {}, "ds_train.py failed: " + str(result["failed"]).splitlines()[-1]
    return result, ""


def unusable(peers: Path | None) -> str:
    """Says why DeepSpeed cannot run here. Returns an empty text if it seems to be able to."""
    if peers is None:
        return "no --peers"
    if not (peers / "ds_train.py").is_file():
        return "ds_train.py is not in --peers"
    probe = subprocess.run([sys.executable, "-c", "import deepspeed"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "DeepSpeed is not installed for this Python"


def _deepspeed_run(setting: Setting, peers: Path, *, rows: int, micro: int, throttle: tuple[int, int]) -> dict[str, Any]:
    """Makes one warm-up step and two measured steps. Its rows are random tokens, because it takes no others; the work is the
    same."""
    scratch = Path(os.environ.get("BENCH_DIR", setting.work / "peers"))
    scratch.mkdir(parents=True, exist_ok=True)
    out, output = setting.work / "ds.jsonl", setting.work / "ds.txt"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(peers / "ds_train.py"), "--size", setting.shape, "--offload", "nvme"]
    command += ["--batch", str(micro), "--accum", str(rows // micro), "--seq", str(LENGTH), "--warmup", "1"]
    command += ["--steps", "2", "--max-s", "1", "--threads", str(THREADS), "--out", str(out)]
    command += ["--nvme", str(setting.work / "ds_nvme")]
    others = BackgroundLoad()
    with (
        limited(setting.work, memory=None, throttle=throttle) as (held, _),
        output.open("wb") as file,
        started(command, held, file, BENCH_DIR=str(scratch)) as child,
    ):
        child.wait()
    cores = others.cores()
    records = read_records(out)
    if child.returncode != 0 or not records or "step_s" not in records[-1]:
        said = records[-1].get("error", "") if records else ""
        return {"failed": f"{output.read_text(errors='replace')[-1500:]}\nexit code {child.returncode} {said}".strip()}
    wanted = ("step_s", "step_min", "step_max", "fwd_s", "bwd_s", "opt_s", "cg_peak_gib", "peak_rss_gib")
    wanted += ("rd_gb_step", "wr_gb_step", "ds", "quiet_steps", "steps", "interference")
    noise = {"others_cores": cores, "noisy": cores > NOISE_CORES}
    return {name: records[-1].get(name) for name in wanted} | noise


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
