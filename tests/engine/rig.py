"""A run of a tiny random model through the real arena, store and daemon, and the same run in plain PyTorch.

    subject = Subject(config, Shape())
    with Rig(subject, tmp_path, home="ssd") as rig:
        rig.run(3)

`Subject` is what stays the same between rigs to be compared: weights, numerics, data. Everything `Rig` takes besides
may change how the bytes move and nothing else.

With FUYOU_TEST_DEVICE=cuda every rig computes on the GPU, whatever device its test names: most tests compare one placement with
another, bit for bit, so they find what only a GPU shows. Tests that compare with plain PyTorch, or that are about the emulated
device itself, fail then. FUYOU_TEST_DEVICE=emulated shows which ones need more than one device.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from fuyou_cli.engine.anatomy import Anatomy, dissect, frozen, isolated, quantised
from fuyou_cli.engine.compiled import CompiledBlocks, as_compiled
from fuyou_cli.engine.context import HostMemory
from fuyou_cli.engine.cutting import cut_experts, cut_vocabulary
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.devices import Device, open_device
from fuyou_cli.engine.executor import Executor, StepAbandoned, StepOutcome
from fuyou_cli.engine.skeleton import TORCH_DTYPE, auto_class, build
from fuyou_cli.engine.updates import Optimizer
from fuyou_cli.planner.boundary_layout import Kept
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import Visit
from fuyou_cli.recipe.schema import AdapterSection
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import Dtype, ModelSpec, Rule, StageSpec, StateDtype, StateLayout
from fuyou_cli.spec.packed_tensors import Quantised
from fuyou_cli.spec.plan import Numerics, Plan, Span, StagePlan, StateTensor, Tier
from fuyou_cli.swap.daemon import Counters, DaemonOptions, SwapDaemon
from fuyou_cli.swap.kernels import Workers, join, scratch_size
from fuyou_cli.swap.store import Arena, Store
from fuyou_cli.training.quantised_weights import quantise
from tests import emulated

from .comparing import Outcome

if TYPE_CHECKING:
    from fuyou_cli.engine.ranks import Ranks
    from fuyou_cli.engine.replicas import Replicas

emulated.register()  # scripts that take steps with it have no conftest

EVERYWHERE: Any = os.environ.get("FUYOU_TEST_DEVICE")
if EVERYWHERE == "cuda":  # attention too: with `warn_only` its backward still gives other bits every time
    torch.use_deterministic_algorithms(True)
# Memory that a device may take beside its plan: cuBLAS and torch's allocator take more at once than a tiny model needs.
SPARE = 128 << 20 if EVERYWHERE == "cuda" else 0

CHUNK = 16384  # parameters: the smallest update chunk, so that small stages have several

HARDWARE = HardwareProfile(
    device="cpu", device_name="test", cores=2, ram_total=1 << 34, ram_available=1 << 34, process_bytes=0,
    device_memory=0, disk_free=1 << 40, matmul_flops=1e12, store_read=1e9, store_write=1e9, store_read_mixed=1e9,
    store_write_mixed=1e9, adamw=((1, 1e10),), h2d=0.0, d2h=0.0, measured="2026-01-01",
)  # fmt: skip

OPTIMIZER = Optimizer(lr=4e-3, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The numerics of a run."""

    dtype: Dtype = "float32"
    accumulate: Dtype = "float32"
    batch: int = 4
    micro: int = 2
    tokens: int = 16
    chunk: int = 0
    vocabulary: int = 0
    states: StateDtype = "float32"
    rule: Rule = "adamw"
    router_aux_loss: float = 0.0
    lanes: int = 1
    experts: int = 0  # of a range
    quantised: Quantised | None = None  # how frozen weights of blocks rest


# What takes long to make, once for all subjects of a process that are made of the same. A test that changes a skeleton puts it
# back at its end.
_DISSECTED: dict[Hashable, Anatomy] = {}
_INSPECTED: dict[Hashable, ModelSpec] = {}
_INITIAL: dict[Hashable, Mapping[str, torch.Tensor]] = {}


def _dissected(
    made_of: Hashable, config: PreTrainedConfig, dtype: Dtype, attention: str, adapter: AdapterSection | None, apart: bool
) -> Anatomy:
    """Returns the stages of a model of which no pattern freezes, and nothing is cut."""
    if (made_of, dtype) not in _DISSECTED:
        skeleton = build(config, dtype=dtype, attention=attention)
        if adapter is not None:
            from fuyou_cli.adapters.injection import inject  # needs peft

            inject(skeleton, adapter)
        anatomy = dissect(skeleton, marked=adapter is not None)
        _DISSECTED[made_of, dtype] = isolated(anatomy) if apart else anatomy
    anatomy = _DISSECTED[made_of, dtype]
    anatomy.model.train()
    return anatomy


class Subject:
    """Holds one random model: as plain PyTorch (`fresh`), as a skeleton cut into stages, and the data it learns."""

    def __init__(
        self, config: PreTrainedConfig, shape: Shape, *, freeze: Sequence[str] = (), adapter: AdapterSection | None = None,
        attention: str = "sdpa", apart: bool = False,
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        self.config, self.shape, self.adapter = config, shape, adapter
        made_of = (config.to_json_string(use_diff=False), attention, repr(adapter), apart)
        anatomy = _dissected(made_of, config, shape.dtype, attention, adapter, apart)
        self.attention = anatomy.model.config._attn_implementation
        anatomy = frozen(anatomy, freeze) if adapter is None else anatomy
        anatomy = anatomy if shape.quantised is None else quantised(anatomy, shape.quantised)
        self.anatomy = cut_experts(cut_vocabulary(anatomy, shape.vocabulary), shape.experts)
        self.spec = self._inspected((made_of, tuple(freeze), shape.quantised)).with_layout(
            StateLayout(weights=shape.dtype, dtype=shape.states, rule=shape.rule)
        )
        self.numerics = Numerics(
            compute_dtype=shape.dtype, accumulate_dtype=shape.accumulate, batch_size=shape.batch,
            micro_batch_size=shape.micro, max_seq_len=shape.tokens, head_chunk_tokens=shape.chunk, torch_threads=1,
            seed=7, vocabulary_rows=shape.vocabulary, range_experts=shape.experts, router_aux_loss=shape.router_aux_loss,
            lanes=shape.lanes,
        )  # fmt: skip
        if (key := (type(self), made_of, shape.dtype)) not in _INITIAL:
            _INITIAL[key] = self.fresh().state_dict()
        torch.manual_seed(11)  # as `fresh` leaves it
        self.initial = {name: value.detach().clone() for name, value in _INITIAL[key].items()}

    def _inspected(self, made_of: Hashable) -> ModelSpec:
        shape = self.shape
        key = (made_of, shape.dtype, shape.micro, shape.tokens, shape.chunk, shape.vocabulary, shape.experts)
        if key not in _INSPECTED:
            _INSPECTED[key] = inspect(
                self.anatomy, dtype=shape.dtype, micro_batch_size=shape.micro, max_seq_len=shape.tokens,
                head_chunk_tokens=shape.chunk,
            )  # fmt: skip
        return _INSPECTED[key]

    def fresh(self) -> PreTrainedModel:
        """Returns plain PyTorch with the initial weights, in training mode."""
        torch.manual_seed(11)
        more = {"experts_implementation": "eager"} if self.anatomy.has_experts else {}
        model = auto_class(self.config).from_config(
            copy.deepcopy(self.config), dtype=TORCH_DTYPE[self.shape.dtype], attn_implementation=self.attention, **more
        )
        if self.adapter is not None:
            inject_by_peft(model, self.adapter)
        return model.train()

    def stored(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns tensors of a model by the names that stages have: one of all experts as those of each."""
        found: dict[str, torch.Tensor] = {}
        for name, value in weights.items():
            parts = self.anatomy.parts.get(name, ())
            rows = [list(matrix.split(shape[0])) for (_, shape), matrix in zip(parts, value, strict=False)] if parts else []
            found |= {part: rows[n % len(rows)][n // len(rows)] for n, (part, _) in enumerate(parts)} or {name: value}
        return found

    def batches(self, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (ids, labels) of each step: two batches in turn, so that there is something to learn; every row has its own
        number of labels, and one is padded."""
        generator = torch.Generator().manual_seed(5)
        size = (2, self.shape.batch, self.shape.tokens)
        ids = torch.randint(1, self.config.vocab_size, size, generator=generator)
        labels = ids.clone()
        for row in range(self.shape.batch):
            labels[:, row, : 1 + row] = -100
        ids[:, -1, -3:], labels[:, -1, -3:] = 0, -100
        for step in range(steps):
            yield ids[step % 2], labels[step % 2]


def inject_by_peft(model: PreTrainedModel, section: AdapterSection) -> None:
    """Puts LoRA into a model in memory; B is not zero, so that A learns from the first step on."""
    import peft

    peft.inject_adapter_in_model(peft.LoraConfig(**section.model_dump(exclude={"type", "modules_to_save", "experts"})), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)


@dataclass(frozen=True)
class Rectangle:
    """A batch whose rows are all computed whole, as `data.batches.Batch` is given to what only goes forward."""

    ids: torch.Tensor
    labels: torch.Tensor
    documents: None = None
    sweeps: None = None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, self.labels


class Rig:
    """Holds an executor over files in `folder`. `home` pins every tensor; None leaves the choice to the planner."""

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        *,
        home: Tier | None = "ssd",
        states: Tier | None = None,  # else as `home`
        device_states: tuple[int, ...] | None = None,
        gradients: Tier | None = None,
        clip: float | None = 0.5,
        device: Literal["cpu", "emulated", "cuda"] = "cpu",
        lookahead: int | None = None,
        defer: bool | None = None,
        budget: int = 1 << 33,
        gpu_budget: int | None = None,
        batch_on_device: bool = True,  # where it has memory of its own
        directories: int = 1,
        backend: str = "auto",
        update_threads: int = 1,
        chunks: int = 6,
        chunk: int = CHUNK,  # parameters
        optimizer: Optimizer = OPTIMIZER,
        boundaries: Tier | None = None,
        kept: Kept | Literal["all"] | None = None,
        kept_there: Kept | Literal["room"] | None = None,
        sweeps: int | None = None,
        norm_first: bool | None = None,
        opened: Device | Callable[[], Device] | None = None,  # instead of one that is opened by its name; or how it is opened
        hardware: HardwareProfile = HARDWARE,
        planning: Callable[[ModelSpec, HardwareProfile, PlanRequest], Plan] = plan,
        through: Callable[[SwapDaemon], Any] = lambda daemon: daemon,  # what the executor takes for the daemon
        compiled: CompiledBlocks | None = None,
        data_sums: bool = False,
        ranks: Ranks | None = None,  # of several processes, each with a rig
        owners: tuple[int, ...] = (),  # the rank of each stage
        replicas: Replicas | None = None,  # of several processes that compute all stages
    ) -> None:
        device = EVERYWHERE if EVERYWHERE and opened is None else device
        self.subject, self.anatomy, self.optimizer, self._compiled = subject, subject.anatomy, optimizer, compiled
        self.spec, self.losses = subject.spec if compiled is None else as_compiled(subject.spec), list[float]()
        self.outcomes, self._ranks, self._replicas = list[StepOutcome](), ranks, replicas
        if ranks is not None:
            self.spec, batch_on_device = self.spec.of_rank(owners, ranks.rank), False
        count = 1 if replicas is None else replicas.ranks.size
        self.request = PlanRequest(
            numerics=subject.numerics.of_sweep(count), model_name="tiny", device=device, clip_grad_norm=clip, cpu_budget=budget,
            gpu_budget=gpu_budget, batch_on_device=batch_on_device and device != "cpu",
            weights=home, states=states or home, gradients=gradients or home, boundaries=boundaries or home, kept=kept,
            kept_there=kept_there, device_states=device_states, sweeps=sweeps, norm_first=norm_first,
            lookahead=lookahead, defer=defer, io_backend=backend, update_threads=update_threads, chunk_params=chunk,
            scratch_size=scratch_size(chunk, chunks), read_depth=4, write_depth=4, block_size=64 << 10, stripe=64 << 10,
        )  # fmt: skip
        self.plan: Plan = replace(planning(self.spec, hardware, self.request), numerics=subject.numerics, replicas=count)
        with ExitStack() as self._stack:
            self._open(folder, directories, opened, through, data_sums)
            self._stack = self._stack.pop_all()

    def _open(
        self, folder: Path, directories: int, opened: Device | Callable[[], Device] | None,
        through: Callable[[SwapDaemon], Any], data_sums: bool,
    ) -> None:  # fmt: skip
        plan = self.plan
        # behind the planned arena: a window to look into the store with
        self._window = Span(offset=plan.arena_size, size=max(4 * stage.params for stage in self.spec.stages))
        arena = self._stack.enter_context(Arena(plan.arena_size + self._window.size))
        self.device = opened if isinstance(opened, Device) else open_device(plan.device) if opened is None else opened()
        self._stack.callback(self.device.close)
        paths = [folder / f"part{number}" / "store.bin" for number in range(directories)]
        for path in paths:
            path.parent.mkdir(parents=True)
            self._stack.callback(path.unlink, missing_ok=True)  # pytest keeps folders for days, stores are large
        store = self._stack.enter_context(Store.open(paths, stripe=plan.io.stripe, size=plan.store_size, create=True))
        options = DaemonOptions.of(plan.io, data_sums=data_sums)
        self.daemon = self._stack.enter_context(SwapDaemon(arena, store, options))
        self.memory = HostMemory(arena)
        self.device.pin(self.memory.tensor(Span(offset=0, size=arena.size), torch.uint8))
        self.executor = Executor(
            anatomy=self.anatomy, model=self.spec, plan=plan, daemon=through(self.daemon), memory=self.memory,
            device=self.device, optimizer=self.optimizer, compiled=self._compiled, ranks=self._ranks, replicas=self._replicas,
        )  # fmt: skip
        self._stack.callback(self.executor.close)
        self.put_weights(self.subject.initial)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    # ---- stepping ------------------------------------------------------------------------------------------------

    def run(self, steps: int, *, begin: int = 1, settle: bool = False) -> list[float]:
        """Runs the steps up to `steps`, then drains; returns the losses. `settle` lets every update finish before the next
        step."""
        records = self.executor.visits.residency.records
        for number, (ids, labels) in enumerate(self.subject.batches(steps), start=1):
            if number < begin:
                continue
            self.step(ids, labels, number, last=number == steps)
            if settle:
                self.executor.visits.residency.wait_until(lambda: all(r.update is None for r in records), "the test")
        self.executor.drain()
        return self.losses

    @property
    def visit(self) -> Visit:
        """Returns the visit under way."""
        return self.executor.visits.schedule.visits[self.executor.visits.lookahead.cursor]

    def give_up(
        self, step: int, at: Callable[[Visit], bool], *, after: bool = False, times: int = 1, drain: bool = False,
        look: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Begins a step and gives it up in the first visit of which `at` is true: between its micro-batches, or `after` it.
        `drain`: also ends updates of earlier steps; `look` is called before anything is forgotten."""

        def ends(visit: Visit | None = None) -> None:
            if at(self.visit if visit is None else visit):
                raise StepAbandoned

        callback = "after_visit" if after else "between_micro_batches"
        usual = getattr(self.executor, callback)
        setattr(self.executor, callback, ends)
        for _ in range(times):
            with suppress(StepAbandoned):
                self.step(*list(self.subject.batches(step))[-1], step)
                raise AssertionError("nothing gave the step up")
            look()
            self.executor.abandon()
            if drain:
                self.executor.drain()
        setattr(self.executor, callback, usual)

    def step(self, ids: torch.Tensor, labels: torch.Tensor, number: int, *, last: bool = False) -> StepOutcome:
        real = ids != 0 if self.anatomy.has_experts else None  # no token of `Subject.batches` is 0
        outcome = self.executor.step(ids, labels, step=number, lr=self.optimizer.lr, last=last, real=real)
        self.losses.append(outcome.loss)
        self.outcomes.append(outcome)
        return outcome

    def counters(self) -> Counters:
        return self.daemon.counters()

    # ---- looking at what rests -----------------------------------------------------------------------------------

    @property
    def generations(self) -> set[int]:
        """Returns the generations of all stages that own trained parameters."""
        records = self.executor.visits.residency.records
        return {record.generation for record, stage in zip(records, self.spec.stages, strict=True) if stage.trained}

    def put_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Puts generation 0, as a checkpoint without remainders leaves it."""
        weights = self.subject.stored(weights)
        for stage, placed in self._stages():
            target = placed.weights_ram or self._window
            there = self.executor.visits.states.weights(stage.index)
            flat = self.memory.tensor(target, TORCH_DTYPE[self.spec.compute_dtype], stage.params - stage.quantised).zero_()
            if stage.quantised:
                self._quantise(stage, target, weights)
            for tensor in stage.tensors:
                if tensor.quantised:
                    continue
                part = weights[tensor.name].reshape(-1)[tensor.first : tensor.first + tensor.numel]
                flat[tensor.offset : tensor.offset + tensor.numel] = part
            if there is not None:
                there.copy_(flat)
            if placed.weights == "ssd":
                for place, extent in placed.fetched(0):
                    self.daemon.wait(self.daemon.write(target.offset + place, extent.offset, extent.size))
            if placed.trained_ram is not None:
                self.memory.tensor(placed.trained_ram, flat.dtype).copy_(flat[: stage.trained])

    def _quantise(self, stage: StageSpec, target: Span, weights: dict[str, torch.Tensor]) -> None:
        bank = self.memory.tensor(target, torch.uint8, stage.weight_bytes)[-stage.packed_bytes :]
        with Workers(1) as workers:
            quantise(
                stage, bank, lambda name, most: iter(weights[name].reshape(-1).split(most)), dtype=self.spec.compute_dtype,
                workers=workers,
            )  # fmt: skip

    def weights(self) -> dict[str, torch.Tensor]:
        """Every parameter as it rests (drained), in the compute dtype."""
        found: dict[str, torch.Tensor] = {}
        for stage in self.owning_stages():
            add_named(found, stage, self._flat(stage))
        return found

    def _flat(self, stage: StageSpec) -> torch.Tensor:
        """Returns a stage's parameters, trained and frozen ones."""
        dtype = TORCH_DTYPE[self.spec.compute_dtype]
        banks: list[tuple[StateTensor, int]] = [("weights", stage.trained), ("frozen", stage.params - stage.trained)]
        return torch.cat([self._resting(stage, name, dtype, count) for name, count in banks if count])

    def padding(self) -> torch.Tensor:
        """Returns what rests between and behind the parameters of the stages (drained)."""
        found: list[torch.Tensor] = []
        for stage in self.owning_stages():
            flat = self._flat(stage)
            inside = torch.zeros(stage.params, dtype=torch.bool)
            for tensor in stage.tensors:
                inside[tensor.offset : tensor.offset + tensor.numel] = True
            found.append(flat[~inside])
        return torch.cat(found)

    def masters(self) -> dict[str, torch.Tensor]:
        """Returns of bf16 the float32 masters, rebuilt from weights and remainders."""
        found: dict[str, torch.Tensor] = {}
        for stage, _ in self._stages():
            weights = self._resting(stage, "weights", torch.bfloat16, stage.trained)
            remainder = self._resting(stage, "remainder", torch.int16, stage.trained)
            master = torch.empty(stage.params)
            join(as_bytes(weights), as_bytes(remainder), as_bytes(master))
            add_named(found, stage, master)
        return found

    def resting_gradients(self, stage: StageSpec) -> torch.Tensor:
        """Returns what the next update will read: deferred, with gradients at home in RAM."""
        span = self.plan.stages[stage.index].gradients_ram
        assert span is not None
        return self.memory.tensor(span, TORCH_DTYPE[self.plan.numerics.accumulate_dtype], stage.params).clone()

    def owning_stages(self) -> list[StageSpec]:
        return [stage for stage in self.spec.stages if stage.params]

    def _stages(self) -> Iterator[tuple[StageSpec, StagePlan]]:
        for stage in self.owning_stages():
            yield stage, self.plan.stages[stage.index]

    def _resting(self, stage: StageSpec, tensor: StateTensor, dtype: torch.dtype, count: int) -> torch.Tensor:
        ram = self.plan.stages[stage.index].ram(tensor)
        if stage.index in self.executor.visits.states.homes:
            return self.executor.visits.states.at_rest(stage.index, 0)[tensor][0].view(dtype).cpu().clone()
        if ram is None:
            extent = self.plan.stages[stage.index].extent(tensor, self.executor.visits.residency.records[stage.index].turn)
            assert extent is not None
            self.daemon.wait(self.daemon.read(self._window.offset, extent.offset, extent.size))
            ram = self._window
        return self.memory.tensor(ram, dtype, count).clone()


def outcome(subject: Subject, folder: Path, steps: int, **way: Any) -> Outcome:
    """Runs steps in a rig that is opened for them."""
    with Rig(subject, folder, **way) as rig:
        return rig.run(steps), rig.weights()


def assert_moves_as_planned(subject: Subject, folder: Path, *, after: int = 2, **way: Any) -> tuple[Plan, int]:
    """Compares the bytes of one more step, after this many, with those of the plan. The first two differ: states are still all
    zero, deferred updates run in the next one. Returns the plan, and how many parameters the step updated."""
    found = []
    for steps in (after, after + 1):
        with Rig(subject, folder / str(steps), **way) as rig:
            rig.run(steps, settle=True)
            found.append(rig.counters())
    less, more = found
    predicted = rig.plan.predicted
    moved = (more.read_bytes - less.read_bytes, more.written_bytes - less.written_bytes)
    assert moved == (predicted.read_per_step, predicted.written_per_step)
    return rig.plan, more.update_params - less.update_params


def named(stage: StageSpec, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {t.name: flat[t.offset : t.offset + t.numel].view(t.shape).clone() for t in stage.tensors}


def add_named(found: dict[str, torch.Tensor], stage: StageSpec, flat: torch.Tensor) -> None:
    """The same, pieces of one tensor put together in the order of their stages."""
    for name, value in named(stage, flat).items():
        found[name] = torch.cat([found[name], value]) if name in found else value


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())
