"""Rules between keys: pairs that exclude each other, numbers that must divide, places a device does not have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.typed import show_value
from .view import Finding, Written, default_of

_SENSIBLE = 1 << 31
_TIERS = ("weights", "gradients", "optimizer_states", "boundaries")


def _at(dotted: str) -> tuple[str, ...]:
    return tuple(dotted.split("."))


def _conflict(dotted: str, message: str, remedy: str | None = None) -> Finding:
    return Finding(path=_at(dotted), code="conflict", message=message, help=remedy)


def _revision(written: Written) -> Iterator[Finding]:
    name = written.get("model.name_or_path")
    if not written.has("model.revision") or not isinstance(name, str):
        return
    try:
        local = Path(name).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):  # no such home, too long, a null character: said elsewhere
        return
    if local or name.startswith(("/", "./", "../", "~")):
        yield _conflict(
            "model.revision",
            f"`model.revision` although {show_value(name)} is a folder, which has no revisions",
            "leave it out, or name a model of the hub",
        )


def _data(written: Written) -> Iterator[Finding]:
    if any(value == [] for _, value in written.matches("dataset.train")):
        yield Finding(path=_at("dataset.train"), code="out-of-range", message="`dataset.train` is empty")


def _length(written: Written) -> Iterator[Finding]:
    if written.has("train.epochs") and written.has("train.max_steps"):
        yield _conflict(
            "train.max_steps",
            "`train.max_steps` and `train.epochs` both say how long to train",
            "keep one; `key=null` clears the other on the command line",
        )
    cleared = any(True for _ in written.matches("train.epochs")) and not written.has("train.epochs")
    if cleared and not written.has("train.max_steps"):
        yield _conflict("train.epochs", "nothing says how long to train", "write `train.epochs` or `train.max_steps`")


def _warmup(written: Written) -> Iterator[Finding]:
    steps, last = written.whole("lr_scheduler.warmup_steps"), written.whole("train.max_steps")
    if written.has("lr_scheduler.warmup_steps") and written.has("lr_scheduler.warmup_ratio"):
        yield _conflict(
            "lr_scheduler.warmup_steps",
            "`lr_scheduler.warmup_steps` and `lr_scheduler.warmup_ratio` both say how long to warm up",
            "keep one; `key=null` clears the other on the command line",
        )
    if steps is not None and last is not None and steps > last:
        yield _conflict(
            "lr_scheduler.warmup_steps",
            f"a warm-up of {steps} steps does not end within `train.max_steps: {last}`",
        )


def _decay(written: Written) -> Iterator[Finding]:
    ratio = written.get("lr_scheduler.min_lr_ratio")
    if written.get("lr_scheduler.name") == "constant" and ratio not in (
        None,
        1,
        default_of("lr_scheduler.min_lr_ratio"),
    ):
        yield _conflict(
            "lr_scheduler.min_lr_ratio",
            "a constant schedule never decays, so `lr_scheduler.min_lr_ratio` says nothing",
            "leave it out, or use linear, cosine or wsd",
        )


def _batch(written: Written) -> Iterator[Finding]:
    batch, micro = written.whole("train.batch_size"), written.whole("train.micro_batch_size")
    if batch is not None and micro is not None and 0 < micro < _SENSIBLE and 0 < batch < _SENSIBLE and batch % micro:
        yield _conflict(
            "train.micro_batch_size",
            f"`train.batch_size: {batch}` is not a multiple of `train.micro_batch_size: {micro}`",
            f"use {_divisor_near(batch, micro)}, or auto",
        )


def _divisor_near(batch: int, micro: int) -> int:
    """The largest divisor of `batch` that is at most `micro`."""
    small = [divisor for divisor in range(1, math.isqrt(batch) + 1) if batch % divisor == 0]
    return max(divisor for pair in small for divisor in (pair, batch // pair) if divisor <= max(micro, 1))


def _device(written: Written) -> Iterator[Finding]:
    if written.get("offload.device") != "cpu":
        return
    if written.get("offload.weights") == "gpu":  # nothing else may rest there yet, on any device
        yield _conflict("offload.weights", "`offload.weights: gpu` on `offload.device: cpu`, which has no gpu tier", "use cpu")
    if written.has("offload.max_memory.gpu") and written.get("offload.max_memory.gpu") != "auto":
        yield _conflict("offload.max_memory.gpu", "`offload.device: cpu` has no gpu memory to limit", "leave it auto")
    if written.get("model.attn_implementation") == "flash_attention_2":
        yield _conflict("model.attn_implementation", "flash_attention_2 does not run on `offload.device: cpu`", "use sdpa")


def _emulated(written: Written) -> Iterator[Finding]:
    asked = written.get("offload.max_memory.gpu")
    if written.get("offload.device") == "emulated" and isinstance(asked, str) and asked.rstrip().endswith("%"):
        yield _conflict(
            "offload.max_memory.gpu",
            "a share of an emulated device's memory: it has no size of its own",
            "write a size such as 512MiB, or auto for no limit",
        )


def _strategy(written: Written) -> Iterator[Finding]:
    strategy = written.get("offload.strategy")
    for tier in _TIERS:
        home = written.get(f"offload.{tier}")
        if strategy == "none" and home == "ssd":
            yield _conflict(f"offload.{tier}", f"`offload.{tier}: ssd` although `offload.strategy: none` keeps the ssd out")
        if strategy == "manual" and home == "auto" and tier in ("weights", "optimizer_states"):
            yield _conflict(
                "offload.strategy",
                f"`offload.strategy: manual` needs `offload.{tier}` to be gpu, cpu or ssd",
                "name the tier, or use auto and name only the tiers you care about",
            )


def _deferral(written: Written) -> Iterator[Finding]:
    share = written.get("offload.defer_updates")
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if is_number and 0 <= share < 1 and written.get("train.clip_grad_norm") is not None:
        yield _conflict(
            "offload.defer_updates",
            f"`offload.defer_updates: {show_value(share)}` but `train.clip_grad_norm` makes every update wait for the norm",
            "leave it auto, or turn clipping off with `train.clip_grad_norm: null`",
        )


def _commits(written: Written) -> Iterator[Finding]:
    mode, key = written.get("checkpoint.mode"), "checkpoint.snapshot_every_steps"
    every = written.get("checkpoint.commit_every_steps")
    if mode == "snapshot" and not written.has(key):
        yield _conflict("checkpoint.mode", f"`checkpoint.mode: snapshot` without `{key}`", "say how many steps apart they are")
    if mode == "snapshot" and written.has("checkpoint.commit_every_steps"):
        yield _conflict(
            "checkpoint.commit_every_steps",
            f"snapshots are what is committed, every `{key}` steps",
            "leave it out, or use `checkpoint.mode: in_place`",
        )
    if mode != "snapshot" and written.has(key):
        yield _conflict(key, f"`{key}` but no snapshots", "add `checkpoint.mode: snapshot`")
    cleared = any(True for _ in written.matches("checkpoint.commit_every_steps")) and every is None
    if mode == "redo" and (cleared or every not in (None, 1, "auto")):
        yield _conflict(
            "checkpoint.commit_every_steps",
            "`checkpoint.mode: redo` makes every step durable by its gradients",
            "leave it out, or use `checkpoint.mode: in_place`",
        )
    if mode == "redo" and written.get("offload.gradients") == "cpu":
        yield _conflict(
            "offload.gradients", "`offload.gradients: cpu` but `checkpoint.mode: redo` keeps them on the ssd", "use ssd"
        )


def _skipping(written: Written) -> Iterator[Finding]:
    steps = written.whole("train.skip_nonfinite")
    if steps and written.get("train.clip_grad_norm") is None:
        yield _conflict(
            "train.skip_nonfinite",
            f"`train.skip_nonfinite: {show_value(steps)}` without `train.clip_grad_norm`: a step's first updates are under way "
            "before its last gradients are known, so it cannot be skipped",
            "set train.clip_grad_norm, or leave it 0",
        )


def _backends(written: Written) -> Iterator[Finding]:
    backends = written.get("logging.backends")
    if isinstance(backends, list) and len(set(map(str, backends))) != len(backends):
        yield _conflict("logging.backends", "`logging.backends` names one backend twice")


RULES: tuple[Callable[[Written], Iterator[Finding]], ...] = (
    _revision,
    _data,
    _length,
    _warmup,
    _decay,
    _batch,
    _device,
    _emulated,
    _strategy,
    _deferral,
    _commits,
    _skipping,
    _backends,
)


def broken_rules(written: Written) -> Iterator[Finding]:
    for rule in RULES:
        yield from rule(written)
