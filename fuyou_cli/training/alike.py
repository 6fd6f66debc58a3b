"""What ranks of one run must have alike, and what several of them cannot do yet: refused by name, before a byte is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import UsageError
from .peers import Peers
from .prepare import Inspected, Ready, device_name
from .state.resume import library_versions

if TYPE_CHECKING:
    from ..recipe.schema import Recipe

# What each box may have of its own, beside how fast it goes.
_OF_A_BOX = (
    "version", "output_dir", "dataset.cache_dir", "dataset.num_workers", "offload.dir", "offload.max_memory",
    "offload.io", "offload.measure", "offload.ssd_write_limit", "logging", "train.nproc",
)  # fmt: skip


def are_replicas(recipe: Recipe, count: int) -> bool:
    """Tells whether so many ranks compute the whole model each, or are a ring. Raises UsageError where replicas are asked for
    that the lanes do not allow. On GPUs only a ring is chosen."""
    lanes, asked = recipe.train.lanes, recipe.train.parallel
    allows = lanes % count == 0
    if asked == "replicas" and not allows:
        raise UsageError(
            f"train.parallel is replicas, but {count} of them cannot share {lanes} lane{'s' * (lanes > 1)} out",
            hint="a new run with train.lanes: 8 goes on with 1, 2, 4 or 8 replicas, and has the same results with each",
        )
    return asked == "replicas" or (asked == "auto" and allows and device_name(recipe) == "cpu")


def refuse_keys(recipe: Recipe, count: int) -> None:
    """Raises UsageError for what one process can do and several ranks cannot yet. Of replicas the first one evaluates."""
    is_ring = not are_replicas(recipe, count)
    refused = {
        "eval.samples": is_ring and recipe.eval.samples is not None,
        "train.compile=true": recipe.train.compile,
        "dataset.streaming=true": recipe.dataset.streaming,
        "train.parallel=replicas on a GPU": not is_ring and device_name(recipe) == "cuda",
    }
    if wrong := [key for key, is_set in refused.items() if is_set]:
        raise UsageError(
            f"several ranks cannot train with {', '.join(wrong)} yet", hint="leave it out, or train in one process: no --nproc"
        )


def refuse_unlike_recipe(recipe: Recipe, peers: Peers) -> None:
    """Raises UsageError on every rank if one has another recipe, other versions or another kind of device than rank 0. It comes
    before anything else that ranks tell one another, as these decide what that is: on CPUs they may be replicas."""
    settings = {
        key: value
        for key, value in recipe.settings().items()
        if not any(key == name or key.startswith(f"{name}.") for name in _OF_A_BOX)
    }
    versions = {f"version of {name}": version for name, version in library_versions(recipe).items()}
    peers.refuse_unlike("recipe", {"kind of device": device_name(recipe), **settings, **versions})


def refuse_unlike_start(inspected: Inspected, peers: Peers) -> None:
    """Raises UsageError on every rank if one has a recipe that reads otherwise beside the model, or another processor or GPU
    than rank 0."""
    import torch

    recipe = inspected.recipe
    device = {"kind of processor": torch.backends.cpu.get_cpu_capability()}
    if inspected.device == "cuda":
        device["GPU"] = torch.cuda.get_device_name()
    refuse_unlike_recipe(recipe, peers)
    peers.refuse_unlike("device", device)


def refuse_unlike_data(ready: Ready, peers: Peers) -> None:
    """Raises UsageError on every rank if one has read another model or other data than rank 0."""
    peers.refuse_unlike("data", {f"content of {name}": digest for name, digest in ready.fingerprints.items()})
