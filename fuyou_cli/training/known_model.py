"""Describes a recipe's model for plans: from what is kept of it on disk, or from its skeleton, which is built when needed."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..checkpoint.files import has_weights
from ..checkpoint.names import is_in
from ..core.errors import UsageError
from ..core.json_files import find_text, from_json, object_in
from ..core.paths import keep_file, kept_folder, machine_id, read_plain
from ..core.probe import hidden_by_proc
from ..spec.model import InPlace, ModelFacts, ModelSpec, OperatorSpec, StageSpec, TensorSpec
from .adapting import adapt
from .numerics import positions_of
from .stored_quantised import check_marked, quantised_keys, quantised_names, stored_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..engine.anatomy import Anatomy
    from ..engine.describe import Outlined
    from ..recipe.schema import Recipe
    from ..spec.plan import Numerics


Kind = TypeVar("Kind")


class KnownModel:
    """Holds what is known of a model, whether from its description or from its skeleton. `strict`: a model that cannot be
    trained is refused once it is built. `process` returns the bytes of this process; None: the plan is for another machine."""

    def __init__(self, recipe: Recipe, model_dir: Path, *, strict: bool, process: Callable[[], int] | None = None) -> None:
        self._recipe, self._folder, self._strict, self._process = recipe, model_dir, strict, process
        self._before = None if process is None or "torch" in sys.modules else process()
        self._descriptions = Descriptions.of(recipe, model_dir)
        self._kept = self._descriptions.find(ModelFacts)
        self._knows_process = self._kept is not None and self._kept.loaded_bytes is not None
        self._facts = self._kept if process is None or self._knows_process else None
        self._outline: Outlined | None = None
        self._cut: dict[tuple[int, int, str, bool], tuple[InPlace | None, Anatomy]] = {}

    @property
    def is_elsewhere(self) -> bool:
        """Tells whether the plan is for another machine."""
        return self._process is None

    def build(self) -> Outlined:
        """Returns the model's stages before the vocabulary is cut. The first call builds the model, and has torch start its
        threads and first kernels, so that the process's memory is measured as it will be."""
        if self._outline is None:
            self._outline = outline_of(self._recipe, self._folder, strict=self._strict)
            if self._process is not None:
                warm_up(self._recipe)
        return self._outline

    @property
    def facts(self) -> ModelFacts:
        if self._facts is None:
            self._facts = self._kept or facts_of(self.build(), self._recipe)
        return self._facts

    @property
    def unloaded_bytes(self) -> int:
        """Returns by how much a process grows that builds the model, if this one has not."""
        return self.facts.loaded_bytes or 0 if self._outline is None else 0

    def keep(self) -> None:
        """Keeps the facts for later plans, with the bytes of all that was loaded if nothing had been before."""
        facts = self.facts
        if self._before is not None and self._process is not None and self._outline is not None and not self._knows_process:
            facts = replace(facts, loaded_bytes=self._process() - self._before)
        if facts != self._kept:
            self._descriptions.keep(facts)

    def once(self, kind: type[Kind], make: Callable[[], Kind], *about: object, of_files: bool = False) -> Kind:
        """Returns what was kept of the model under `about`, or makes it and keeps it. `of_files`: it says where weights lie,
        which a plan takes as it was kept; who builds the model, to run it, looks at the files."""
        kept = None if of_files and self._outline is not None else self._descriptions.find(kind, *about)
        if kept is None:
            self._descriptions.keep(kept := make(), *about)
        return kept

    def uncut(self) -> str:
        """Says why a block with experts stays whole."""
        from ..engine.cutting import obstacles

        name, reason = next((obstacle for obstacle in obstacles(self.build().anatomy).items() if obstacle[1]), ("", ""))
        return f"{name} cannot be computed in ranges of its experts: {reason}"

    def specified(self, numerics: Numerics, files: InPlace | None, *, compiled: bool) -> ModelSpec:
        """Returns the model's specification at micro-batches of this shape, kept or traced. Raises UsageError if it cannot be
        traced."""
        about = (traced(numerics), compiled, repr(files))
        return _shared(self.once(ModelSpec, lambda: self._traced(numerics, files, compiled=compiled), *about))

    def _traced(self, numerics: Numerics, files: InPlace | None, *, compiled: bool) -> ModelSpec:
        from ..engine.compiled import as_compiled
        from ..engine.describe import specified

        traced = specified(
            replace(self.build(), anatomy=self.stages(numerics, files)),
            dtype=numerics.compute_dtype,
            micro_batch_size=numerics.micro_batch_size,
            max_seq_len=numerics.max_seq_len,
            head_chunk_tokens=numerics.head_chunk_tokens,
        )
        return as_compiled(traced) if compiled else traced

    def stages(self, numerics: Numerics, files: InPlace | None) -> Anatomy:
        """Returns the stages with vocabulary and experts cut, and with frozen weights as they lie in the model's `files`."""
        from ..engine.anatomy import read_in_place
        from ..engine.cutting import cut_experts, cut_vocabulary

        apart = numerics.padding == "none" or self._recipe.dataset.packing == "isolated"
        about = (numerics.vocabulary_rows, numerics.range_experts, numerics.compute_dtype, apart)
        if about not in self._cut or self._cut[about][0] is not files:
            known = self.build().anatomy
            anatomy = cut_vocabulary(replace(known, isolated=known.isolated and apart), numerics.vocabulary_rows)
            anatomy = cut_experts(anatomy, numerics.range_experts)
            self._cut[about] = files, anatomy if files is None else read_in_place(anatomy, files, numerics.compute_dtype)
        return self._cut[about][1]


def warm_up(recipe: Recipe) -> None:
    """Makes torch start its threads and build its first kernels."""
    import torch

    if recipe.train.threads != "auto":
        torch.set_num_threads(recipe.train.threads)
    if recipe.train.compile:
        from ..engine.compiled import load_compiler

        load_compiler()
    dtype = torch.bfloat16 if recipe.precision.compute == "bfloat16" else torch.float32
    x = torch.zeros(1, 4, 64, 64, dtype=dtype, requires_grad=True)
    weight = torch.zeros(64, 64, dtype=dtype, requires_grad=True)
    try:
        y = torch.nn.functional.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)
        torch.nn.functional.silu(y).float().sum().backward()
    except RuntimeError:
        if not hidden_by_proc():  # where it is hidden torch may not know the processor: a plan computes nothing
            raise


def _shared(model: ModelSpec) -> ModelSpec:
    """Returns the same model whose equal blocks share their operators, as those of a traced one do: a search relies on it."""
    seen: dict[tuple[OperatorSpec, ...], tuple[OperatorSpec, ...]] = {}

    def of(stage: StageSpec) -> StageSpec:
        operators, unneeded = (seen.setdefault(listed, listed) for listed in (stage.operators, stage.unneeded))
        return replace(stage, operators=operators, unneeded=unneeded)

    return replace(model, stages=tuple(map(of, model.stages)))


def traced(numerics: Numerics) -> tuple[object, ...]:
    """Returns the numerics that a specification depends on."""
    cut = (numerics.head_chunk_tokens, numerics.vocabulary_rows, numerics.range_experts)
    return (numerics.compute_dtype, numerics.padding == "none", numerics.micro_batch_size, numerics.max_seq_len, *cut)


def outline_of(recipe: Recipe, model_dir: Path, *, strict: bool) -> Outlined:
    """Finds the stages of the model in a folder, and what of them is trained. If `strict`, refuses a model that cannot be
    trained."""
    from ..engine.skeleton import build, load_config

    trusted = recipe.model.trust_remote_code
    model = build(
        load_config(model_dir, trust_remote_code=trusted),
        dtype=recipe.precision.compute,
        attention=recipe.model.attn_implementation,
        trust_remote_code=trusted,
    )
    adapt(model, recipe)
    return _with_frozen(recipe, model, model_dir, strict=strict)


def _with_frozen(recipe: Recipe, model: PreTrainedModel, model_dir: Path, *, strict: bool) -> Outlined:
    """Finds the stages of a model, freezes what the recipe does not train, and marks what of it rests quantised."""
    from ..engine.anatomy import frozen, quantised
    from ..engine.describe import outlined

    has_adapter = recipe.adapter is not None
    outline = outlined(model, strict=strict, isolated=recipe.dataset.packing == "isolated", marked=has_adapter)
    anatomy = outline.anatomy if has_adapter else frozen(outline.anatomy, recipe.freeze)
    stored = stored_in(model_dir)
    if stored is None or recipe.model.quantisation is None:
        return replace(outline, anatomy=quantised(anatomy, recipe.model.quantisation))
    names = quantised_names(recipe, anatomy, model_dir, stored)
    anatomy = quantised(anatomy, recipe.model.quantisation, names)
    if has_weights(model_dir):
        check_marked(anatomy, names, stored)
    return replace(outline, anatomy=anatomy)


def facts_of(outline: Outlined, recipe: Recipe) -> ModelFacts:
    """Finds out what a plan needs to know of a model that was built. Raises UsageError if its vocabulary cannot be cut as the
    recipe says."""
    from ..engine.anatomy import frozen_with_others
    from ..engine.cutting import resolved_rows
    from ..engine.routing import without_aux_loss

    anatomy = outline.anatomy
    model = anatomy.model
    untouched = (p.numel() for name, p in model.named_parameters() if is_in(anatomy.untouched, name))
    limit, learned = positions_of(model)
    return ModelFacts(
        refusal=outline.refusal,
        attention=str(model.config._attn_implementation),
        positions=limit,
        learns_positions=learned,
        embeddings=_rows(model.get_input_embeddings()),
        logits=model.config.get_text_config().vocab_size,
        head_rows=_rows(model.get_output_embeddings()),
        vocabulary_rows=resolved_rows(anatomy, recipe.train.head_chunk_vocab),
        has_frozen=any(stage.frozen for stage in anatomy.stages),
        keeps_apart=anatomy.isolated,
        frozen_with=tuple(frozen_with_others(anatomy, recipe.freeze)),
        without_aux_loss=without_aux_loss(anatomy),
        untouched=anatomy.untouched,
        untouched_parameters=sum(untouched),
    )


def _rows(module: object) -> int:
    """Returns the rows of an embedding's or a head's matrix, 0 where there is none."""
    weight = getattr(module, "weight", None)
    return 0 if weight is None else int(weight.shape[0])


LARGEST = 32 << 20  # bytes of a file; the one of 405B parameters with an adapter has under 1 MB
_PLAIN = (str, int, float, type(None))
_but_place = attrgetter(*(field.name for field in fields(TensorSpec) if field.init and field.name not in ("name", "offset")))
_EXPERT = re.compile(r"(.+\.experts\.)([0-9]{1,6})(\..+)")  # a tensor's name up to the expert's number, and after it
MOST = 100  # files; more push out those that were not used for longest
_DESCRIBING = ("adapters", "checkpoint", "core", "engine", "planner", "recipe", "spec", "training")  # make what is kept


class Descriptions:
    """Finds and keeps what is known of one model with one recipe. With an empty key, nothing is found or kept."""

    def __init__(self, key: str) -> None:
        self._key = key

    @classmethod
    def of(cls, recipe: Recipe, model_dir: Path) -> Descriptions:
        """Returns those of the model in a folder. Nothing is known of a model with code of its own: that may do anything."""
        if recipe.model.trust_remote_code or any(map(_is_worked_on, ("transformers", "torch", "peft"))):
            return cls("")
        try:
            return cls(_key(recipe, model_dir))
        except (OSError, ValueError, UsageError):  # whoever builds the model says what is wrong
            return cls("")

    def find(self, kind: type[Kind], *about: object) -> Kind | None:
        """Returns what was kept under `about`, or None."""
        if not self._key:
            return None
        path = self._path(kind, about)
        try:
            description = read_description(kind, path)
        except UsageError:
            return None
        if description is not None:
            with suppress(OSError):
                os.utime(path)  # used now
        return description

    def keep(self, value: Any, *about: object) -> None:
        """Keeps a value, if its folder can be written to."""
        if not self._key:
            return
        with suppress(OSError):
            keep_file(self._path(type(value), about), written(value), most=MOST)

    def _path(self, kind: type[Any], about: tuple[object, ...]) -> Path:
        return kept_folder() / "models" / f"{_digest([self._key, kind.__name__, *map(repr, about)])[:32]}.json"


def written(value: Any) -> bytes:
    """Returns the content of a file: a digest of the rest, and the value without what is as its type has it anyway."""
    body = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False).encode()
    return sha256(body).hexdigest().encode() + b"\n" + body


def read_description(kind: type[Kind], path: Path) -> Kind | None:
    """Reads such a file. Returns None if there is none. Raises UsageError for one that is damaged, which its digest decides."""
    text = find_text(path, limit=LARGEST)
    if text is None:
        return None
    digest, _, body = text.partition("\n")
    if sha256(body.encode()).hexdigest() != digest:
        raise UsageError(f"{path}: is damaged")
    data = object_in(path, body)
    _expand_experts(data.get("stages", []))
    return from_json(kind, data, defaults=True)


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return _with_runs_of_experts(value) if value and isinstance(value[0], TensorSpec) else list(map(_plain, value))
    keys = {}
    for name, default in _fields(type(value)):  # type: ignore[arg-type]  # mypy takes the class for an instance
        field_value = getattr(value, name)
        if field_value is None or field_value != default:
            keys[name] = _plain(field_value)
    return keys


def _with_runs_of_experts(tensors: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
    """Writes tensors that differ only in the number of their expert, one after the other, as the first of them with
    `experts: [how many, elements from one to the next]`. DeepSeek-V3 has 74,000 tensors, of which 3,000 are left."""
    runs: list[dict[str, Any]] = []
    first, last, expert = tensors[0], "", 0  # of the run, its tensors' name without the expert's number, and its last expert
    for tensor in tensors:
        name = _EXPERT.fullmatch(tensor.name)
        pattern, number = ("", 0) if name is None else (f"{name[1]}*{name[3]}", int(name[2]))
        if pattern and pattern == last and number == expert + 1 and _but_place(tensor) == _but_place(first):
            run = runs[-1]
            count, apart = run.get("experts", (1, tensor.offset - first.offset))
            if tensor.offset == first.offset + count * apart:
                run["experts"], expert = [count + 1, apart], number
                continue
        runs.append(_plain(tensor))
        first, last, expert = tensor, pattern, number
    return runs


def _expand_experts(stages: list[dict[str, Any]]) -> None:
    """Puts every expert's tensors in place of runs of them (`_with_runs_of_experts`)."""
    for stage in stages:
        tensors: list[object] = []
        for tensor in stage["tensors"]:
            count, apart = tensor.pop("experts", (1, 0))
            if count == 1:
                tensors.append(tensor)
                continue
            first = from_json(TensorSpec, tensor, defaults=True)
            before, number, after = _EXPERT.fullmatch(first.name).groups()  # type: ignore[union-attr]  # as it was written
            own = {key: getattr(first, key) for key, _ in _fields(TensorSpec)}
            for expert in range(count):
                own["name"], own["offset"] = f"{before}{int(number) + expert}{after}", first.offset + expert * apart
                tensors.append(TensorSpec(**own))
        stage["tensors"] = tensors


@cache  # a large model has a hundred thousand of a kind
def _fields(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the names of a dataclass's fields that it is made from, with what they are by default."""
    return tuple((field.name, field.default) for field in fields(kind) if field.init)


# ---- what a description depends on -----------------------------------------------------------------------------------


def _key(recipe: Recipe, model_dir: Path) -> str:
    train, model = recipe.train, recipe.model
    return _digest(
        [
            {file.name: sha256(read_plain(file, limit=LARGEST)).hexdigest() for file in sorted(model_dir.glob("config*.json"))},
            [model.attn_implementation, model.quantisation, recipe.precision.compute, train.head_chunk_vocab],
            [recipe.dataset.packing == "isolated", list(recipe.freeze)],
            quantised_keys(model_dir) if stored_in(model_dir) is not None else None,
            None if recipe.adapter is None else recipe.adapter.model_dump(mode="json", exclude={"start"}),
            [sys.version, platform.platform(), machine_id(), list(_installed()), _own_code()],
        ]
    )


def _digest(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _installed() -> Iterator[tuple[str, int]]:
    """Yields the name, with the version, of every installed package, and when it was installed."""
    for place in dict.fromkeys(sys.path):
        with suppress(OSError), os.scandir(place or ".") as entries:
            yield from sorted(
                (entry.name, entry.stat().st_mtime_ns) for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))
            )


def _is_worked_on(name: str) -> bool:
    """Tells whether a library is a folder that somebody works on: its version does not say what is in it."""
    module_spec = importlib.util.find_spec(name)
    if module_spec is None or module_spec.origin is None:
        return name != "peft"  # which need not be there
    return not any(Path(module_spec.origin).parents[1].glob(f"{name}-*.dist-info"))


def _own_code() -> str:
    package, code = Path(__file__).parents[1], sha256()
    for folder in _DESCRIBING:
        for file in sorted((package / folder).rglob("*.py")):
            code.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return code.hexdigest()
