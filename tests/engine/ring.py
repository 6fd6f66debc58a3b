"""The same steps by one process and by several ranks of torch.distributed (gloo), and what may differ between them: nothing.

    workers = Workers(3)
    compare(CASES["llama"], workers, ranks=2)
    compare_replicas(CASES["LoRA"], workers, replicas=2)

Workers are spawned once, as each loads torch and transformers, and take one case after the other. Also a module of
`scripts/prove_ranks.py`, which runs every family.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import random
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from fuyou_cli.core.errors import FuyouError, SwapError, UsageError
from fuyou_cli.engine.forward_only import ForwardOnly
from fuyou_cli.planner.memory import compute_memory
from fuyou_cli.planner.ring import deal, groups
from fuyou_cli.recipe.schema import AdapterSection
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import MicroBatch
from fuyou_cli.training.evaluation import AwayWeights, PassingWeights
from tests.planner.models import link_bytes

from . import families
from .measuring import peak_of_a_step
from .rig import Rectangle, Rig, Shape, Subject

STEPS, BLOCKS = 3, 4
_PIECE = 1000  # elements read at once
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}


def deeper(config: PreTrainedConfig, blocks: int = BLOCKS) -> PreTrainedConfig:
    """Returns a configuration with more blocks."""
    if isinstance(config, transformers.GPTNeoConfig):
        types, layers = [[["global", "local"], blocks // 2]], ["global", "local"] * (blocks // 2)
        return transformers.GPTNeoConfig(
            **{**config.to_dict(), "num_layers": blocks, "attention_types": types, "attention_layers": layers}
        )
    key = "n_layer" if isinstance(config, (transformers.GPT2Config, transformers.GPTJConfig)) else "num_hidden_layers"
    # The kinds of layers follow from their number.
    kept = {name: value for name, value in config.to_dict().items() if name not in ("layer_types", "num_hidden_layers")}
    return type(config)(**{**kept, key: blocks})


def _named(name: str) -> PreTrainedConfig:
    """Returns a family's configuration by its name, or another one's."""
    gated = {**families._GATED, **families._ENDS}
    others: dict[str, Callable[[], PreTrainedConfig]] = {
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**gated, **_EXPERTS),
        "gpt_oss": lambda: transformers.GptOssConfig(**gated, num_local_experts=4, head_dim=8, sliding_window=8),
        "tied llama": lambda: families.llama(tie_word_embeddings=True),
        "gpt2, dropout": lambda: families.gpt2(dropout=0.1),
        "opt, projected": lambda: families.opt(projected_to=16),
        "granite": lambda: transformers.GraniteConfig(**gated, embedding_multiplier=3.0, residual_multiplier=0.5),
    }
    return others[name]() if name in others else families.FAMILIES[name]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describes steps that are taken by one process and by ranks. `way`: of `Rig`; `owners`: "deal", "in turn" with pieces of
    the head, or a seed to draw them; `lengths`: of rows, in micro-batches of their own width; `broken`: the step whose input
    gives no finite loss."""

    family: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    way: Mapping[str, Any] = field(default_factory=dict)
    owners: str | int = "deal"
    adapter: bool | Mapping[str, Any] = False
    documents: tuple[tuple[int, ...], ...] = ()
    widths: tuple[int, ...] = ()  # of the micro-batches
    evaluates: bool = False
    breaks: bool = False  # a weight of the second block is NaN
    skips: bool = False
    leaves: int | None = None  # the rank that ends in the second step
    unlike: Mapping[str, Any] = field(default_factory=dict)  # of `way`, on rank 1
    freeze: tuple[str, ...] = ()
    measures: bool = False  # what a step has alive
    blocks: int = BLOCKS
    steps: int = STEPS

    def subject(self) -> Subject:
        shape = Shape(**{"batch": 8, "micro": 2, **self.shape})
        asked = self.adapter if isinstance(self.adapter, Mapping) else {}
        if asked.get("experts"):
            from .test_expert_lora import Adapted

            return Adapted(self.family, shape)
        adapter = AdapterSection(**{"r": 4, **asked}) if self.adapter else None
        subject = Subject(
            deeper(_named(self.family), self.blocks), shape, freeze=self.freeze, adapter=adapter, apart=bool(self.documents)
        )
        if self.breaks:
            name = next(name for name in subject.initial if ".1." in name and name.endswith("weight"))
            subject.initial[name].view(-1)[0] = torch.nan
        return subject


@dataclass(frozen=True)
class Seen:
    """What one process saw. `states`: digests of everything at rest, by stage and kind; `stalls`: causes of waits."""

    numbers: list[Any]  # of every step: loss, norm, skipped, counts of experts, auxiliary loss
    states: dict[tuple[int, str], str]
    moved: tuple[int, int]  # bytes of the store, read and written
    predicted: tuple[int, int] = (0, 0)  # of a step, by the plan
    link: tuple[int, int] = (0, 0)  # bytes of boundaries, taken and given
    planned: tuple[int, int] = (0, 0)
    sent: int = 0  # other bytes to ranks
    summed: int = 0  # bytes of gradients to replicas
    evaluated: list[float] = field(default_factory=list)
    passed: dict[str, str] = field(default_factory=dict)  # digests of the weights that passed, of all ranks
    stalls: tuple[str, ...] = ()
    beside_arena: int = 0  # whole batches from and for other ranks that lay in memory which no device pins
    alive: tuple[int, int] = (0, 0)  # most bytes beside the arena in one step more, and what the plan charges
    error: str = ""


def run(case: Case, ranks: Any = None, owners: tuple[int, ...] = (), replicas: Any = None) -> Seen:
    """Takes the case's steps here. `ranks`, `replicas`: None for one process."""
    subject, way = case.subject(), case.way
    if ranks is not None and ranks.rank == 1:
        way = {**way, **case.unlike}
    with (
        tempfile.TemporaryDirectory() as folder,
        Rig(subject, Path(folder), ranks=ranks, owners=owners, replicas=replicas, **way) as rig,
    ):
        rig.executor.may_skip = case.skips
        in_arena = _watch_lending(rig)
        others = ranks if replicas is None else replicas.ranks
        sent, summed = 0 if others is None else others.sent, 0 if replicas is None else replicas.sent
        error, evaluated, passed = "", list[float](), dict[str, str]()
        try:
            for number, (ids, labels) in enumerate(subject.batches(case.steps), start=1):
                if number == 2 and others is not None and case.leaves == others.rank:
                    rig.executor.between_micro_batches = lambda: os._exit(1)
                rig.outcomes.append(_step(case, rig, number, ids, labels))
        except FuyouError as found:
            error = f"{type(found).__name__}: {found.message}"
        if not error:
            rig.executor.drain()
        counters, link = rig.counters(), rig.executor.visits.link
        crossed = (0, 0) if link is None else (link.received_bytes, link.sent_bytes)
        beside = 0 if others is None else others.sent - sent
        if case.evaluates and not error:
            forward = ForwardOnly(rig.executor)
            with forward.open():
                evaluated = forward.losses(Rectangle(ids, labels), last=True).sum(-1).tolist()
            with forward.open():
                passed = _passed(forward, rig, subject.spec, ranks)
        stalls = tuple(rig.executor.visits.residency.stalls)
        computed = case.shape.get("batch", 8) * subject.shape.tokens if not case.widths else sum(2 * w for w in case.widths)
        alive = (0, 0)
        if case.measures:
            charged = compute_memory(rig.spec, rig.request)
            alive = peak_of_a_step(rig), charged.whole_batch + charged.stage
        planned = link_bytes(rig.spec, rig.executor.visits.schedule, computed, rig.plan.sweeps)
        return Seen(
            numbers=[(one.loss, one.grad_norm, one.skipped, one.sent, one.aux_loss, one.label_tokens) for one in rig.outcomes],
            states={} if error else at_rest(rig),
            moved=(counters.read_bytes, counters.written_bytes),
            predicted=(rig.plan.predicted.read_per_step, rig.plan.predicted.written_per_step),
            link=crossed,
            planned=(case.steps * planned[0], case.steps * planned[1]),
            sent=beside,
            summed=0 if replicas is None else replicas.sent - summed,
            evaluated=evaluated,
            passed=passed,
            stalls=stalls,
            beside_arena=in_arena.count(False),
            alive=alive,
            error=error,
        )


def _passed(forward: ForwardOnly, rig: Rig, whole: ModelSpec, ranks: Any) -> dict[str, str]:
    """Digests every tensor of the model, in pieces, as a copy of the best weights reads them. The first rank reads those of
    all."""
    away = None if ranks is None else AwayWeights(ranks, rig.spec.owners)
    spec = whole if ranks is None or ranks.rank == 0 else rig.spec
    names = {tensor.name: f"stored {tensor.name}" for stage in spec.stages for tensor in stage.tensors}

    def passing(away: AwayWeights | None = None) -> PassingWeights:
        return PassingWeights(forward.weights, spec, names, dtype="float32", step=1, run="", away=away)

    if away is not None and ranks.rank != 0:
        passing().give_to(ranks)
        with pytest.raises(SwapError, match="no such drive"):
            ranks.answer(_refuse)
        return {}
    with nullcontext() if away is None else ranks.asking():
        assert away is None or away.names().items() < names.items()
        weights, found = passing(away), dict[str, str]()
        for tensor in weights.tensors():
            pieces = [
                weights.read(tensor, first, min(_PIECE, tensor.numel - first)) for first in range(0, tensor.numel, _PIECE)
            ]
            found[tensor.name] = hashlib.sha256(b"".join(pieces)).hexdigest()
        weights.check()
    if away is not None:
        for rank in range(1, ranks.size):
            with pytest.raises(SwapError, match=rf"^rank {rank} on .*: no such drive$"):
                ranks.ask(rank, ["read"])
    return found


def _refuse(question: Any) -> bytes:
    raise SwapError("no such drive", hint=f"of {question}")


def _watch_lending(rig: Rig) -> list[bool]:
    """Returns a list that tells of every whole batch that the link is lent whether it lies in the arena."""
    in_arena, link = list[bool](), rig.executor.visits.link
    if link is None:
        return in_arena
    lend = link._lend

    def watched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        whole = lend(shape, dtype)
        in_arena.append(rig.memory.holds(whole))
        return whole

    link._lend = watched
    return in_arena


def _step(case: Case, rig: Rig, number: int, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    last = number == case.steps
    if not case.documents and not case.widths:
        return rig.step(ids, labels, number, last=last) and rig.outcomes.pop()
    options: dict[str, Any] = {}
    if case.documents:
        options["documents"] = [list(each) for each in case.documents]
    if case.widths:
        parts = [MicroBatch(first=2 * n, end=2 * n + 2, width=w, longest=w) for n, w in enumerate(case.widths)]
        for part in parts:
            labels[part.rows, part.width :] = -100
        each = len(parts) // rig.plan.numerics.lanes
        options["sweeps"] = [tuple(parts[first : first + each]) for first in range(0, len(parts), each)]
    return rig.executor.step(ids, labels, step=number, lr=rig.optimizer.lr, last=last, **options)


def at_rest(rig: Rig) -> dict[tuple[int, str], str]:
    """Digests weights and states of a drained rig."""
    found = {}
    for stage, _ in rig._stages():
        sizes = {"weights": stage.trained_weight_bytes, "frozen": stage.frozen_weight_bytes}
        sizes |= {name: stage.state_size(name) for name in ("remainder", "momentum", "variance")}  # type: ignore[arg-type]
        for name, size in sizes.items():
            if size:
                resting = rig._resting(stage, name, torch.uint8, size)  # type: ignore[arg-type]
                found[stage.index, name] = hashlib.sha256(resting.numpy().tobytes()).hexdigest()
    return found


def owners_of(case: Case, spec: ModelSpec, ranks: int) -> tuple[int, ...]:
    if isinstance(case.owners, str):
        return deal(spec, ranks, head_in_turn=case.owners == "in turn")
    chance, listed = random.Random(case.owners), groups(spec)
    blocks = [n for n, group in enumerate(listed) if any(spec.stages[stage].kind == "block" for stage in group)]
    first = dict(zip(chance.sample(blocks, ranks), range(ranks), strict=True))
    given = {n: first.get(n, chance.randrange(ranks)) for n in range(len(listed))}
    return tuple(given[n] for _, n in sorted((stage, n) for n, group in enumerate(listed) for stage in group))


# ---- workers -----------------------------------------------------------------------------------------------------------


def work(rank: int, size: int, store: str, jobs: Any, results: Any) -> None:
    """Takes cases from `jobs` until there is None. A case of fewer ranks than workers is the first ones'."""
    import torch.distributed as dist

    from fuyou_cli.engine.ranks import Ranks
    from fuyou_cli.engine.replicas import Replicas

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    worlds = {count: [dist.new_group(list(range(count)), backend="gloo") for _ in range(2)] for count in range(2, size + 1)}
    joined: dict[int, Ranks] = {}
    while (job := jobs.get()) is not None:
        case, count, replicates = job
        try:
            if count not in joined:
                joined[count] = Ranks(worlds[count][0])
            ranks = joined[count]
            if replicates:
                results.put((rank, run(case, replicas=Replicas(ranks, Ranks(worlds[count][1], ranks.hosts)))))
            else:
                results.put((rank, run(case, ranks, owners_of(case, case.subject().spec, count))))
        except UsageError as error:
            results.put((rank, Seen(numbers=[], states={}, moved=(0, 0), error=f"UsageError: {error.message}")))
        except BaseException:
            results.put((rank, traceback.format_exc()))


class Workers:
    """Processes that are ranks of one group."""

    def __init__(self, size: int) -> None:
        context, self._folder = multiprocessing.get_context("spawn"), tempfile.TemporaryDirectory()
        self._results = context.Queue()
        self._jobs = [context.Queue() for _ in range(size)]
        store = str(Path(self._folder.name) / "store")
        self.processes = [
            context.Process(target=work, args=(rank, size, store, jobs, self._results), daemon=True)
            for rank, jobs in enumerate(self._jobs)
        ]
        for process in self.processes:
            process.start()

    def stop(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for process in self.processes:
            process.join(2)
            process.kill()
            process.join()
        self._folder.cleanup()

    def start(self, case: Case, ranks: int, *, replicates: bool = False) -> None:
        for jobs in self._jobs[:ranks]:
            jobs.put((case, ranks, replicates))

    def seen(self, ranks: int) -> list[Seen]:
        """Returns what each rank saw of the case that was started: the first so many."""
        found: dict[int, Any] = {}
        while len(found) < ranks:
            rank, seen = self._results.get(timeout=240)
            assert isinstance(seen, Seen), f"rank {rank}: {seen}"
            found[rank] = seen
        return [found[rank] for rank in range(ranks)]


def compare(case: Case, workers: Workers, ranks: int) -> tuple[Seen, list[Seen]]:
    """Takes the same steps here and by ranks, and compares everything but times. Returns what both saw."""
    workers.start(case, ranks)
    alone = run(case)
    among = workers.seen(ranks)
    states: dict[tuple[int, str], str] = {}
    for seen in among:
        assert seen.error == alone.error
        assert repr(seen.numbers) == repr(alone.numbers)  # as NaN is not itself
        assert seen.evaluated == alone.evaluated
        assert seen.passed == (alone.passed if seen is among[0] else {})
        assert not states.keys() & seen.states.keys()
        states |= seen.states
        assert seen.error or seen.link == seen.planned, (seen.link, seen.planned)
        assert seen.sent <= case.steps * (64 << 10)
    assert states == alone.states
    assert alone.error or all(math.isfinite(one[0]) or case.skips for one in alone.numbers)
    return alone, among


def compare_replicas(case: Case, workers: Workers, replicas: int, alone: Seen | None = None) -> tuple[Seen, list[Seen]]:
    """Takes the same steps here and by replicas, and compares everything but times. `alone`: what was seen here before."""
    workers.start(case, replicas, replicates=True)
    alone = run(case) if alone is None else alone
    among = workers.seen(replicas)
    for seen in among:
        assert seen.error == alone.error
        assert repr(seen.numbers) == repr(alone.numbers)
        assert seen.states == alone.states
        assert seen.sent <= case.steps * (64 << 10)
    assert alone.error or all(math.isfinite(one[0]) or case.skips for one in alone.numbers)
    return alone, among


def in_dtype(case: Case, dtype: str) -> Case:
    return replace(case, shape={**case.shape, "dtype": dtype})
