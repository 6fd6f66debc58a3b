"""Turns the placement keys of a recipe into a request to the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from ..core.errors import UsageError
from ..planner.plan_request import PlanRequest, update_chunks_for, update_threads_for
from ..spec.hardware import HardwareProfile
from ..spec.plan import Numerics, Tier
from .best_place import best_copies
from .limits import gpu_limit
from .state.stored import Manifest

if TYPE_CHECKING:
    from ..recipe.schema import Recipe

CHUNK_PARAMS = 1 << 19


class _Kept(TypedDict):
    """Holds the arguments of `PlanRequest` about outputs."""

    kept: Literal["all", "none"] | None
    kept_there: Literal["room"] | None


class _Updates(TypedDict):
    """Holds the arguments of `PlanRequest` about when updates run."""

    defer: float | None
    norm_first: bool | None


class _Exported(TypedDict):
    """Holds the arguments of `PlanRequest` about the export."""

    export_item: int
    exports_trained: bool


_KEPT: dict[str, _Kept] = {
    "auto": {"kept": None, "kept_there": None},
    "keep": {"kept": "none", "kept_there": "room"},
    "swap": {"kept": "all", "kept_there": None},
    "recompute": {"kept": "none", "kept_there": None},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskShare:
    """Describes the disk under one file of a store. Bytes."""

    free: int  # including what files of this store already hold there
    files: int  # number of this store's files on this disk
    has_export: bool  # whether the exported model goes there too


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreDisks:
    """Describes the room that the disks have for a store, as it was found."""

    shares: tuple[DiskShare, ...]  # one per file; files are striped, so the fullest disk limits all
    total: int  # bytes of all these disks; offload.max_memory.ssd may name a share of it

    def limit(self, recipe: Recipe) -> int | None:
        """Resolves `offload.max_memory.ssd`. Returns None if it is auto."""
        asked = recipe.offload.max_memory.ssd
        return None if asked.is_auto else asked.resolve(total=self.total, auto=0)

    def budget(self, recipe: Recipe, export_bytes: int) -> int:
        """Returns the bytes that the store may use beside an export at the end and the best weights."""
        export = export_bytes * (recipe.export.at_end + best_copies(recipe))
        least = min((share.free - export * share.has_export) // share.files for share in self.shares)
        there, limit = max(0, least * len(self.shares)), self.limit(recipe)
        return there if limit is None else min(there, limit)


def plan_request(
    recipe: Recipe,
    numerics: Numerics,
    hardware: HardwareProfile,
    *,
    device: str,
    saved: Manifest | None = None,
    disks: StoreDisks | None = None,
    parameters: int = 0,
) -> PlanRequest:
    """Resolves the keys to numbers. A `saved` run keeps its kind of store. `disks`: the room for the store, beside the export
    of this many `parameters`; None: the free disk in the machine's profile."""
    from ..swap.kernels import scratch_size

    offload = recipe.offload
    everything: Tier | None = "cpu" if offload.strategy == "none" else None
    depth = 16 if offload.io.queue_depth == "auto" else offload.io.queue_depth
    threads = update_threads_for(hardware, device=device, torch_threads=numerics.torch_threads)
    exported = _exported(recipe)
    return PlanRequest(
        numerics=numerics,
        model_name=recipe.model.name_or_path,
        device=device,
        clip_grad_norm=recipe.train.clip_grad_norm,
        gpu_budget=gpu_limit(recipe, hardware),
        cpu_budget=offload.max_memory.cpu.resolve(total=hardware.ram_total, auto=_usual_budget(hardware, device)),
        ssd_budget=None if disks is None else disks.budget(recipe, parameters * exported["export_item"]),
        weights=_tier(offload.weights, device) or everything,
        states=_tier(offload.optimizer_states, device) or everything,
        gradients=_tier(offload.gradients, device) or everything,
        boundaries=_tier(offload.boundaries, device) or everything,
        **_kept(offload.activations, device),
        lookahead=None if offload.lookahead == "auto" else offload.lookahead,
        **_updates(recipe),
        io_backend=offload.io.backend,
        read_depth=depth,
        write_depth=depth,
        block_size=1 << 20 if offload.io.block_size == "auto" else offload.io.block_size,
        update_threads=threads,
        chunk_params=CHUNK_PARAMS,
        scratch_size=scratch_size(CHUNK_PARAMS, update_chunks_for(threads)),
        **exported,
        commit_every=recipe.checkpoint.commit_every_steps,
        wear=offload.wear,
        sweeps=_sweeps(recipe.train.sweep_tokens, numerics),
    )


def _updates(recipe: Recipe) -> _Updates:
    offload, measures = recipe.offload, {"auto": None, "always": True, "never": False}[recipe.offload.norm_first]
    if recipe.model.kernels == "liger" or recipe.model.trust_remote_code:
        measures = False  # their backward may write into what forward saved, and a second one would be given that
    return {"defer": None if offload.defer_updates == "auto" else offload.defer_updates, "norm_first": measures}


def _exported(recipe: Recipe) -> _Exported:
    return {"export_item": 2 if recipe.export.dtype == "bfloat16" else 4, "exports_trained": recipe.adapter is not None}


def _sweeps(asked: int | Literal["auto"], numerics: Numerics) -> int | None:
    """Returns the number of equal sweeps of at most `asked` tokens. None leaves it to the planner."""
    if asked == "auto":
        return None
    whole, one = numerics.micro_batches, numerics.micro_batch_tokens
    if asked < one:
        raise UsageError(
            f"train.sweep_tokens: {asked:,} is less than a micro-batch of {one:,} tokens",
            hint="use auto or more, or set train.micro_batch_size",
        )
    return next(count for count in range(1, whole + 1) if whole % count == 0 and whole // count * one <= asked)


def _tier(value: str, device: str) -> Tier | None:
    if value == "gpu" and device == "cpu":
        raise UsageError("a tensor is placed on gpu, but offload.device is cpu", hint="use cpu, ssd or auto")
    return None if value == "auto" else cast(Tier, value)


def _kept(activations: str, device: str) -> _Kept:
    if activations == "keep" and device == "cpu":
        raise UsageError(
            "offload.activations is keep, but offload.device is cpu, which has no memory of its own", hint="use auto"
        )
    return _KEPT[activations]


def _usual_budget(hardware: HardwareProfile, device: str) -> int:
    """Returns nine tenths of the available RAM. Beside a GPU nearly all of it is pinned, so it is at most what the driver may
    pin."""
    most = int(hardware.ram_available * 0.9)
    return min(most, hardware.pinnable) if device == "cuda" and hardware.pinnable else most
