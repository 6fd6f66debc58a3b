"""From a recipe to everything a run needs before the first byte is written: model, data, specification, plan."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..core.errors import PlanError, UsageError
from ..core.paths import expanded, folder
from ..core.units import MiB
from ..planner.search import fastest
from ..planner.wishes import Wishes
from ..spec.hardware import HardwareProfile
from ..spec.model import Dtype, ModelSpec
from ..spec.plan import Numerics, Plan, Tier
from .limits import check_positions, check_tokens
from .manifest import Manifest
from .rates import learning_rate
from .saved import find_saved
from .storage import run_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..engine.anatomy import Anatomy
    from ..engine.describe import Described, Outlined
    from ..recipe.schema import Recipe, TrainSection
    from .checkpoint.files import Checkpoint
    from .checkpoint.header import TensorEntry
    from .data import Rows, Sampler

MICRO_BATCH_TOKENS = 1024  # what `auto` computes at once: fills two cores, and its activations stay below the mmap threshold
HEAD_PIECE_BYTES = 256 * MiB  # what `auto` lets one piece of logits and their gradients take
_LOGIT_BYTES = 16  # per token and vocabulary entry: logits, float32 copy, softmax, gradient
UPDATE_CHUNKS = 6  # in the daemon's scratch: reading, computing and writing overlap
CHUNK_PARAMS = 1 << 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    recipe: Recipe
    model_dir: Path
    tokenizer_dir: Path
    anatomy: Anatomy
    model: ModelSpec
    hardware: HardwareProfile
    plan: Plan
    total_steps: int
    rows: Rows | None  # None when only planning
    sampler: Sampler | None
    checkpoint: Checkpoint | None
    entries: Mapping[str, TensorEntry]
    directories: tuple[Path, ...]  # one folder of this run per striped directory
    manifest: Manifest | None  # of a stopped run to resume
    fingerprints: dict[str, str]
    refusal: str | None = None  # why the model cannot be trained yet; only ever when planning
    outline: Outlined | None = None  # the stages before the vocabulary is cut


Probe = Callable[[str], HardwareProfile]
Progress = Callable[[str, int, int], None]
Planned = Callable[["Prepared"], None]
Choose = Callable[[ModelSpec, HardwareProfile, Wishes], Plan]


def _unheard(what: str, done: int, total: int) -> None:
    pass


def _accepted(considered: Prepared) -> None:
    pass


def prepare(
    recipe: Recipe,
    *,
    probe: Probe,
    planning_only: bool = False,
    say: Callable[[str], None],
    progress: Progress = _unheard,
    planned: Planned = _accepted,
    choose: Choose = fastest,
) -> Prepared:
    """Checks and reads what the recipe names, the cheap before the dear: configuration and tokenizer, where the data is,
    whether the run fits, the weights, the rows. Raises UsageError or PlanError; nothing of the run is written before.

    `planning_only` plans for any model, also for one that cannot be trained, and says so in `refusal`.

    `probe` measures the machine for a device once libraries are loaded; `say` hears what takes a while; `progress` hears
    of a download, what it is, the bytes so far and in all, from another thread; `planned` hears the plan before weights
    are fetched (rows and entries are still empty), and may refuse it by raising; `choose` makes the plan."""
    from ..engine.describe import outlined

    _check_backend(recipe)
    directories = run_directories(recipe)
    manifest = find_saved(recipe.checkpoint.resume, directories) if not planning_only else None
    if manifest is not None and recipe.checkpoint.resume != "auto":  # a run named by its folder goes on in that folder
        directories = tuple(Path(file).parent for file in manifest.files)
    hub = _Hub(recipe, say=say, progress=progress)
    model_dir = hub.model(need_weights=False)
    tokenizer_dir = hub.tokenizer(model_dir, needed=not planning_only)
    _look_at_data(recipe, say, needed=not planning_only)
    outline = known = outlined(_skeleton(recipe, model_dir), strict=not planning_only)
    check_positions(recipe, known.anatomy, say)
    device = device_name(recipe)
    _warm_up(recipe)
    hardware = probe(device)
    numerics = numerics_of(recipe, known.anatomy, hardware, manifest)
    known = replace(known, anatomy=cut(known.anatomy, numerics))
    described = described_at(known, numerics, strict=not planning_only)
    try:
        chosen = choose(described.model, hardware, wishes(recipe, numerics, hardware, device=device))
    except PlanError as error:
        if described.refusal is not None:
            error.add_note(f"cannot be trained yet: {described.refusal}")
        raise
    considered = Prepared(
        recipe=recipe,
        model_dir=model_dir,
        tokenizer_dir=tokenizer_dir,
        anatomy=known.anatomy,
        model=described.model,
        hardware=hardware,
        plan=chosen,
        total_steps=recipe.train.max_steps or 0,
        rows=None,
        sampler=None,
        checkpoint=None,
        entries={},
        directories=directories,
        manifest=manifest,
        fingerprints={},
        refusal=described.refusal,
        outline=outline,
    )
    if planning_only:
        return considered
    planned(considered)
    return _with_weights_and_rows(considered, hub, probe=probe, say=say, choose=choose)


def anatomy_of(
    recipe: Recipe, hardware: HardwareProfile, *, say: Callable[[str], None], progress: Progress = _unheard
) -> tuple[Anatomy, Numerics]:
    """What a run of the recipe would compute with, without data, weights or a plan: the stages, and the numerics on a machine
    of `hardware.cores` cores. Raises UsageError."""
    from ..engine.describe import outlined

    model_dir = _Hub(recipe, say=say, progress=progress).model(need_weights=False)
    anatomy = outlined(_skeleton(recipe, model_dir), strict=True).anatomy
    check_positions(recipe, anatomy, say)
    numerics = numerics_of(recipe, anatomy, hardware, None)
    return cut(anatomy, numerics), numerics


def _check_backend(recipe: Recipe) -> None:
    from ..swap.kernels import has_io_uring

    if recipe.offload.io.backend == "io_uring" and not has_io_uring():
        raise UsageError(
            "offload.io.backend: io_uring, but fuyou was built without it",
            hint="write auto or threads, or install liburing-dev and build again (scripts/quickstart does)",
        )


def _with_weights_and_rows(
    considered: Prepared, hub: _Hub, *, probe: Probe, say: Callable[[str], None], choose: Choose
) -> Prepared:
    """The dear part: weights fetched and looked at, data tokenised, and the plan once more for the process as it is then."""
    recipe, anatomy, model = considered.recipe, considered.anatomy, considered.model
    model_dir = hub.model(need_weights=True)
    checkpoint, entries = _entries(anatomy, model_dir)
    say("reading and tokenising the data")
    rows = tokenised_rows(recipe, considered.tokenizer_dir)
    check_tokens(recipe, anatomy, rows.summary)
    for note in rows.summary.notes:
        say(f"note: {note}")
    device = device_name(recipe)
    sampler, total = _steps(recipe, rows)
    learning_rate(recipe, total)  # refuses a warm-up longer than the epochs are
    hardware = probe(device)
    hardware = replace(hardware, process_bytes=hardware.process_bytes + sampler.peak_bytes)
    if repeated := sampler.note(total, recipe.train.epochs):
        say(f"note: {repeated}")
    return replace(
        considered,
        model_dir=model_dir,
        hardware=hardware,
        plan=choose(model, hardware, wishes(recipe, considered.plan.numerics, hardware, device=device)),
        total_steps=total,
        rows=rows,
        sampler=sampler,
        checkpoint=checkpoint,
        entries=entries,
        fingerprints=_fingerprints(recipe, model_dir, model, rows, total),
    )


class _Hub:
    """Model and tokenizer of a recipe as folders, fetched where they are not here."""

    def __init__(self, recipe: Recipe, *, say: Callable[[str], None], progress: Progress) -> None:
        self._model, self._tokenizer, self._say, self._progress = recipe.model, recipe.tokenizer, say, progress
        self._found: Path | None = None

    def model(self, *, need_weights: bool) -> Path:
        """The model's folder; with its weights only when asked for."""
        found = self._resolve(self._model.name_or_path, revision=self._model.revision, need_weights=need_weights)
        if self._found is not None and found != self._found:
            raise UsageError(f"{self._model.name_or_path}: changed while it was read", hint="Run the same command again.")
        self._found = found
        return found

    def tokenizer(self, model_dir: Path, *, needed: bool) -> Path:
        """The tokenizer's folder: the model's unless the recipe names another."""
        named = self._tokenizer.name_or_path
        if named is None and not needed:
            return model_dir
        return self._resolve(named or str(model_dir), tokenizer_only=True)

    def _resolve(self, name: str, **options: Any) -> Path:
        from .checkpoint.hub import Download, resolve

        def announce(download: Download) -> None:
            self._say(f"downloading {download.name}: {download.files} files, {download.total:,} bytes")

        def progress(done: int, total: int) -> None:
            self._progress(f"downloading {name}", done, total)

        trusted = self._model.trust_remote_code
        return resolve(name, trust_remote_code=trusted, announce=announce, progress=progress, **options)


def _look_at_data(recipe: Recipe, say: Callable[[str], None], *, needed: bool) -> None:
    """Says which files are taken. A plan can be made without data (of a shipped recipe, say): then it is a note."""
    from .data import MissingDataError, look

    try:
        sources = look(recipe.dataset)
    except MissingDataError as error:
        if needed:
            raise
        say(f"note: {error.message}: a run would be refused" + (f" ({error.hint})" if error.hint else ""))
        return
    for source in sources:
        if source.choice is not None:
            say(f"data: {source.choice}")


def run_directories(recipe: Recipe) -> tuple[Path, ...]:
    """The folders of this run's store, one per striped directory."""
    name = run_name(folder(recipe.output_dir, key="output_dir"))
    return tuple(directory.resolve() / name for directory in recipe.offload_directories(os.environ))


def device_name(recipe: Recipe) -> str:
    """cuda where there is one, else cpu, unless the recipe says."""
    if recipe.offload.device != "auto":
        return recipe.offload.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _warm_up(recipe: Recipe) -> None:
    """Makes torch start its threads and generate its first kernels, so that the process is measured as it will be."""
    import torch

    if recipe.train.threads != "auto":
        torch.set_num_threads(recipe.train.threads)
    dtype = torch.bfloat16 if recipe.precision.compute == "bfloat16" else torch.float32
    x = torch.zeros(1, 4, 64, 64, dtype=dtype, requires_grad=True)
    weight = torch.zeros(64, 64, dtype=dtype, requires_grad=True)
    y = torch.nn.functional.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)
    torch.nn.functional.silu(y).float().sum().backward()


def tokenised_rows(recipe: Recipe, tokenizer_dir: Path) -> Rows:
    """The recipe's data as rows of tokens: made once, found again by what it depends on."""
    from .data import prepare as prepare_data

    template = recipe.tokenizer.chat_template
    cache = recipe.dataset.cache_dir or Path(recipe.output_dir, "data")
    return prepare_data(
        dataset=recipe.dataset,
        tokenizer_dir=tokenizer_dir,
        chat_template=None if template is None else expanded(template, key="tokenizer.chat_template"),
        pad_token=recipe.tokenizer.pad_token,
        cache_dir=folder(cache, key="dataset.cache_dir"),
    )


def _skeleton(recipe: Recipe, model_dir: Path) -> PreTrainedModel:
    from ..engine.skeleton import build, load_config

    config = load_config(model_dir, trust_remote_code=recipe.model.trust_remote_code)
    return build(
        config,
        dtype=recipe.precision.compute,
        attention=recipe.model.attn_implementation,
        trust_remote_code=recipe.model.trust_remote_code,
    )


def _entries(anatomy: Anatomy, model_dir: Path) -> tuple[Checkpoint, Mapping[str, TensorEntry]]:
    from .checkpoint.files import open_checkpoint
    from .checkpoint.matched import entries_for

    checkpoint = open_checkpoint(model_dir)
    return checkpoint, entries_for(anatomy.model, checkpoint)


def _micro_batch(train: TrainSection, length: int) -> int:
    """Rows computed at once."""
    if train.micro_batch_size != "auto":
        return train.micro_batch_size
    most = max(1, MICRO_BATCH_TOKENS // length)
    return max(size for size in range(1, train.batch_size + 1) if size <= most and train.batch_size % size == 0)


def _head_chunk(train: TrainSection, tokens: int, columns: int) -> int:
    """Tokens the head takes at once, with logits of `columns` columns; 0: a whole micro-batch of `tokens`."""
    if train.head_chunk_tokens != "auto":
        return train.head_chunk_tokens
    most = max(64, HEAD_PIECE_BYTES // (_LOGIT_BYTES * columns))
    return 0 if tokens <= most else 1 << (most.bit_length() - 1)


def numerics_of(recipe: Recipe, anatomy: Anatomy, hardware: HardwareProfile, manifest: Manifest | None) -> Numerics:
    """What the recipe says, `auto` resolved by fixed rules; a resumed run keeps what it started with."""
    from ..engine.vocabulary import resolved_rows

    train, length = recipe.train, recipe.dataset.max_seq_len
    micro = _micro_batch(train, length)
    vocabulary_rows = resolved_rows(anatomy, train.head_chunk_vocab)
    columns = vocabulary_rows or anatomy.model.config.get_text_config().vocab_size
    chunk = _head_chunk(train, micro * length, columns)
    compute = cast(Dtype, recipe.precision.compute)
    one_piece = train.batch_size == micro and chunk == 0  # nothing is added up: a wider sum would hold the same numbers
    accumulate: Dtype = compute if one_piece else recipe.precision.grad_accum
    numerics = Numerics(
        compute_dtype=compute,
        accumulate_dtype="float32" if compute == "float32" else accumulate,
        batch_size=train.batch_size,
        micro_batch_size=micro,
        max_seq_len=length,
        head_chunk_tokens=chunk,
        torch_threads=hardware.cores if train.threads == "auto" else train.threads,
        seed=recipe.seed,
        vocabulary_rows=vocabulary_rows,
    )
    if manifest is None:
        return numerics
    kept = Numerics(**manifest.numerics)
    _refuse_changed(recipe, kept, numerics)
    return kept


def _refuse_changed(recipe: Recipe, kept: Numerics, asked: Numerics) -> None:
    """`auto` keeps what the run started with; a number that differs is an error."""
    names = {
        "compute_dtype": ("precision.compute", True),
        "accumulate_dtype": ("precision.grad_accum", True),
        "batch_size": ("train.batch_size", True),
        "micro_batch_size": ("train.micro_batch_size", recipe.train.micro_batch_size != "auto"),
        "max_seq_len": ("dataset.max_seq_len", True),
        "head_chunk_tokens": ("train.head_chunk_tokens", recipe.train.head_chunk_tokens != "auto"),
        "vocabulary_rows": ("train.head_chunk_vocab", recipe.train.head_chunk_vocab != "auto"),
        "torch_threads": ("train.threads", recipe.train.threads != "auto"),
        "seed": ("seed", True),
    }
    before, now = asdict(kept), asdict(asked)
    changed = [f"{key} was {before[k]}, is {now[k]}" for k, (key, fixed) in names.items() if fixed and before[k] != now[k]]
    if changed:
        raise UsageError(
            "the saved run cannot be resumed, its numerics changed: " + "; ".join(changed),
            hint="put the old values back, or start over with checkpoint.resume=never",
        )


def cut(anatomy: Anatomy, numerics: Numerics) -> Anatomy:
    """Embedding and head in as many stages as the numerics say."""
    from ..engine.vocabulary import cut_vocabulary

    return cut_vocabulary(anatomy, numerics.vocabulary_rows)


def described_at(known: Outlined, numerics: Numerics, *, strict: bool) -> Described:
    from ..engine.describe import specified

    return specified(
        known,
        dtype=numerics.compute_dtype,
        micro_batch_size=numerics.micro_batch_size,
        max_seq_len=numerics.max_seq_len,
        head_chunk_tokens=numerics.head_chunk_tokens,
        strict=strict,
    )


def wishes(recipe: Recipe, numerics: Numerics, hardware: HardwareProfile, *, device: str) -> Wishes:
    """The recipe's placement keys as numbers."""
    from ..swap.kernels import scratch_size

    offload = recipe.offload
    limit = offload.max_memory

    def tier(value: str) -> Tier | None:
        if value == "gpu" and device == "cpu":
            raise UsageError("a tensor is pinned to gpu, but offload.device is cpu", hint="use cpu, ssd or auto")
        return None if value == "auto" else cast(Tier, value)

    everything: Tier | None = "cpu" if offload.strategy == "none" else None
    block = offload.io.block_size
    depth = 16 if offload.io.queue_depth == "auto" else offload.io.queue_depth
    return Wishes(
        numerics=numerics,
        model_name=recipe.model.name_or_path,
        device=device,
        clip_grad_norm=recipe.train.clip_grad_norm,
        cpu_budget=limit.cpu.resolve(total=hardware.ram_total, auto=int(hardware.ram_available * 0.9)),
        weights=tier(offload.weights) or everything,
        states=tier(offload.optimizer_states) or everything,
        gradients=tier(offload.gradients) or everything,
        boundaries=tier(offload.boundaries) or everything,
        kept="all" if offload.activations == "swap" else None,
        lookahead=None if offload.lookahead == "auto" else offload.lookahead,
        defer=None if offload.defer_updates == "auto" else offload.defer_updates,
        io_backend=offload.io.backend,
        read_depth=depth,
        write_depth=depth,
        block_size=1 << 20 if block == "auto" else block,
        chunk_params=CHUNK_PARAMS,
        scratch_size=scratch_size(CHUNK_PARAMS, UPDATE_CHUNKS),
        export_item=2 if recipe.export.dtype == "bfloat16" else 4,
    )


def _steps(recipe: Recipe, rows: Rows) -> tuple[Sampler, int]:
    """The sampler and the number of steps: `max_steps`, or as many as the epochs take."""
    from .data import Sampler

    sampler = Sampler(len(rows), batch_size=recipe.train.batch_size, shuffle=recipe.dataset.shuffle, seed=recipe.seed)
    if recipe.train.max_steps is not None:
        return sampler, recipe.train.max_steps
    return sampler, sampler.steps(recipe.train.epochs or 1)


def _schedule_length(recipe: Recipe, total_steps: int) -> int | None:
    """The number of steps where the learning rate of a step depends on it: a run may be made longer at a constant rate."""
    schedule = recipe.lr_scheduler
    return None if schedule.name == "constant" and not schedule.warmup_ratio else total_steps


def _fingerprints(recipe: Recipe, model_dir: Path, model: ModelSpec, rows: Rows, total_steps: int) -> dict[str, str]:
    """Digests of what a resumed run must agree on."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))  # as it is: libraries add their defaults
    described: dict[str, Any] = {
        "model": [
            [[s.name, s.params, [[t.name, list(t.shape)] for t in s.tensors]] for s in model.stages],
            {key: value for key, value in config.items() if key[0] != "_" and key != "transformers_version"},
        ],
        "attention": recipe.model.attn_implementation,
        "optimizer": recipe.optimizer.model_dump(mode="json"),
        "schedule": [recipe.lr_scheduler.model_dump(mode="json"), _schedule_length(recipe, total_steps)],
        "clipping": recipe.train.clip_grad_norm,
        "shuffle": recipe.dataset.shuffle,
    }
    digests = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in described.items()
    }
    return {**digests, "data": rows.summary.digest}
