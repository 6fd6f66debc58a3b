"""Checks rules between keys: pairs that exclude each other, numbers that must divide, places a device does not have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.typed import show_value
from .diagnostics import Diagnostic
from .view import Written, default_of

_SENSIBLE = 1 << 31
_TIERS = ("weights", "gradients", "optimizer_states", "boundaries")
_KEEP_ONE = "keep one; `key=null` clears the other on the command line"

Broken = Iterator[tuple[str, str, str | None]]  # the key to point at, what is wrong, what to do


def broken_rules(written: Written) -> Iterator[Diagnostic]:
    for rule in _RULES:
        for key, message, remedy in rule(written):
            yield Diagnostic(path=tuple(key.split(".")), code="conflict", message=message, help=remedy)


def _revision(written: Written) -> Broken:
    name = written.get("model.name_or_path")
    if not written.has("model.revision") or not isinstance(name, str):
        return
    try:
        local = Path(name).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):  # no such home, too long, a null character: said elsewhere
        return
    if local or name.startswith(("/", "./", "../", "~")):
        message = f"`model.revision` although {show_value(name)} is a folder, which has no revisions"
        yield "model.revision", message, "leave it out, or name a model of the hub"


def _length(written: Written) -> Broken:
    if written.has("train.epochs") and written.has("train.max_steps"):
        yield "train.max_steps", "`train.max_steps` and `train.epochs` both say how long to train", _KEEP_ONE
    if written.clears("train.epochs") and not written.has("train.max_steps"):
        yield "train.epochs", "nothing says how long to train", "write `train.epochs` or `train.max_steps`"


def _warmup(written: Written) -> Broken:
    key, steps, last = "lr_scheduler.warmup_steps", written.whole("lr_scheduler.warmup_steps"), written.whole("train.max_steps")
    if written.has(key) and written.has("lr_scheduler.warmup_ratio"):
        yield key, f"`{key}` and `lr_scheduler.warmup_ratio` both say how long to warm up", _KEEP_ONE
    if steps is not None and last is not None and steps > last:
        yield key, f"a warm-up of {steps} steps does not end within `train.max_steps: {last}`", None


def _decay(written: Written) -> Broken:
    key = "lr_scheduler.min_lr_ratio"
    if written.get("lr_scheduler.name") == "constant" and written.get(key) not in (None, 1, default_of(key)):
        yield key, f"a constant schedule never decays, so `{key}` says nothing", "leave it out, or use linear, cosine or wsd"


def _batch(written: Written) -> Broken:
    batch, micro = written.whole("train.batch_size"), written.whole("train.micro_batch_size")
    if batch is not None and micro is not None and 0 < micro < _SENSIBLE and 0 < batch < _SENSIBLE and batch % micro:
        message = f"`train.batch_size: {batch}` is not a multiple of `train.micro_batch_size: {micro}`"
        yield "train.micro_batch_size", message, f"use {_divisor_near(batch, micro)}, or auto"


def _divisor_near(batch: int, micro: int) -> int:
    """Finds the largest divisor of `batch` that is at most `micro`."""
    small = [divisor for divisor in range(1, math.isqrt(batch) + 1) if batch % divisor == 0]
    return max(divisor for pair in small for divisor in (pair, batch // pair) if divisor <= max(micro, 1))


def _device(written: Written) -> Broken:
    device, gpu = written.get("offload.device"), written.get("offload.max_memory.gpu")
    if device == "emulated" and isinstance(gpu, str) and gpu.rstrip().endswith("%"):
        message = "a share of an emulated device's memory: it has no size of its own"
        yield "offload.max_memory.gpu", message, "write a size such as 512MiB, or auto for no limit"
    if device != "cpu":
        return
    if written.get("offload.weights") == "gpu":  # nothing else may rest there yet, on any device
        yield "offload.weights", "`offload.weights: gpu` on `offload.device: cpu`, which has no gpu tier", "use cpu"
    if written.has("offload.max_memory.gpu") and gpu != "auto":
        yield "offload.max_memory.gpu", "`offload.device: cpu` has no gpu memory to limit", "leave it auto"
    if written.get("model.attn_implementation") == "flash_attention_2":
        yield "model.attn_implementation", "flash_attention_2 does not run on `offload.device: cpu`", "use sdpa"


def _strategy(written: Written) -> Broken:
    strategy = written.get("offload.strategy")
    for tier in _TIERS:
        key, home = f"offload.{tier}", written.get(f"offload.{tier}")
        if strategy == "none" and home == "ssd":
            yield key, f"`{key}: ssd` although `offload.strategy: none` keeps the ssd out", None
        if strategy == "manual" and home == "auto" and tier in ("weights", "optimizer_states"):
            message = f"`offload.strategy: manual` needs `{key}` to be gpu, cpu or ssd"
            yield "offload.strategy", message, "name the tier, or use auto and name only the tiers you care about"


def _deferral(written: Written) -> Broken:
    share, clip = written.get("offload.defer_updates"), written.get("train.clip_grad_norm")
    if isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share < 1 and clip is not None:
        asked = f"`offload.defer_updates: {show_value(share)}`"
        message = f"{asked} but `train.clip_grad_norm` makes every update wait for the norm"
        yield "offload.defer_updates", message, "leave it auto, or turn clipping off with `train.clip_grad_norm: null`"


def _commits(written: Written) -> Broken:
    mode, snapshots, commits = (
        written.get("checkpoint.mode"),
        "checkpoint.snapshot_every_steps",
        "checkpoint.commit_every_steps",
    )
    if mode == "snapshot" and not written.has(snapshots):
        yield "checkpoint.mode", f"`checkpoint.mode: snapshot` without `{snapshots}`", "say how many steps apart they are"
    leave_out = "leave it out, or use `checkpoint.mode: in_place`"
    if mode == "snapshot" and written.has(commits):
        yield commits, f"snapshots are what is committed, every `{snapshots}` steps", leave_out
    if mode != "snapshot" and written.has(snapshots):
        yield snapshots, f"`{snapshots}` but no snapshots", "add `checkpoint.mode: snapshot`"
    if mode == "redo" and (written.clears(commits) or written.get(commits) not in (None, 1, "auto")):
        yield commits, "`checkpoint.mode: redo` makes every step durable by its gradients", leave_out
    if mode == "redo" and written.get("offload.gradients") == "cpu":
        yield "offload.gradients", "`offload.gradients: cpu` but `checkpoint.mode: redo` keeps them on the ssd", "use ssd"


def _skipping(written: Written) -> Broken:
    key, steps = "train.skip_nonfinite", written.whole("train.skip_nonfinite")
    if steps and written.get("train.clip_grad_norm") is None:
        why = "a step's first updates are under way before its last gradients are known, so it cannot be skipped"
        message = f"`{key}: {show_value(steps)}` without `train.clip_grad_norm`: {why}"
        yield key, message, "set train.clip_grad_norm, or leave it 0"


def _backends(written: Written) -> Broken:
    backends = written.get("logging.backends")
    if isinstance(backends, list) and len(set(map(str, backends))) != len(backends):
        yield "logging.backends", "`logging.backends` names one backend twice", None


_RULES: tuple[Callable[[Written], Broken], ...] = (
    _revision, _length, _warmup, _decay, _batch, _device, _strategy, _deferral, _commits, _skipping, _backends,
)  # fmt: skip
