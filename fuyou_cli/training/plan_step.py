"""Plans an inspected model (`plan`), a changed recipe (`replan`), or again once its files or the rows are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ..checkpoint.hub import Hub, Progress
from ..core.errors import FuyouError, PlanError, UsageError
from ..core.json_files import from_json
from ..planner.commit_interval import COMMITS, with_longer_steps
from ..planner.memory import code_bytes, range_sizes
from ..planner.place import Candidate, least_memory
from ..planner.plan_request import PlanRequest, update_chunks_for, update_threads_for
from ..planner.ring import RankPlan, RingTimeline, chain_seconds, check_owners, fastest_deal, simulate_ring
from ..planner.search import Effort, RunPlanner, may_measure_first, step_cost
from ..spec.hardware import HardwareProfile, Network, with_measured_graphs
from ..spec.model import ModelSpec
from ..spec.plan import Numerics, Plan, Tier
from .known_model import KnownModel, traced
from .length import Epoch, steps_of
from .numerics import (
    MOST_OF_MIXTURES,
    MOST_TOKENS,
    check_lanes,
    check_positions,
    fastest_size,
    gpu_limit,
    likely_sizes,
    numerics_of,
    sizes_of,
    timed_shapes,
    usual_tokens,
    widths_of,
)
from .peers import Alike
from .prepare import Fetched, Inspected, Planned, Ready, Say, StoreDisks, check_resumed, fields_of, in_place_of, unheard
from .state.resume import refused, steps_left

if TYPE_CHECKING:
    from ..engine.anatomy import Anatomy
    from ..recipe.schema import Recipe

CHUNK_PARAMS = 1 << 19
SLOWER = 0.01  # share of the step by which the earlier candidate may be slower after it is placed again
_NUMBERS = ("seed", "dataset", "train", "precision")  # recipe sections that numerics depend on


def plan(
    inspected: Inspected,
    hardware: HardwareProfile,
    disks: StoreDisks | None = None,
    candidate: Candidate | None = None,
    *,
    say: Say,
    epoch: Epoch | None = None,
    effort: Effort = "search",
) -> Planned:
    """Makes a plan for a machine. Raises PlanError if a run does not fit. If nothing is to run, returns the plan that needs
    least.

    `candidate`: is placed, and nothing is searched. `epoch`: what is known of the rows.

    Where whole blocks do not fit, plans blocks whose experts are stages of their own, in the largest ranges that fit: each
    weight still passes once.
    """
    if inspected.recipe.dataset.streaming:
        from ..data.stream import Stream

        hardware = replace(hardware, process_bytes=hardware.process_bytes + Stream.peak_bytes)
    inspected = _resumable(inspected, say)
    peers = inspected.peers
    if peers is not None and (peers.alike is not None or not peers.is_first):
        alike = peers.alike or peers.choose_alike(None)
        return _plan_alike(inspected, hardware, disks, epoch, alike)
    planned = _plan(inspected, hardware, disks, candidate, say=say, epoch=epoch, effort=effort)
    if peers is not None:
        peers.choose_alike(planned.plan, planned.model.owners)
    return planned


def plan_ranks(
    inspected: Inspected, hardware: HardwareProfile, disks: StoreDisks | None, network: Network, *, say: Say,
    epoch: Epoch | None = None, effort: Effort = "search",
) -> tuple[Planned, ...]:  # fmt: skip
    """Makes the plans that the ranks of a run would make, each for its part of a box: `hardware`, `disks`. Ranks between the
    first and the last have alike stages, so one search serves all of them."""
    inspected = _resumable(inspected, say)
    seat = Seat(rank=0, network=network)
    first = _plan(inspected, hardware, disks, None, say=say, epoch=epoch, effort=effort, seat=seat)
    return _with_others(first, network, effort=effort)


def _with_others(
    first: Planned, network: Network, *, effort: Effort = "search", candidate: Candidate | None = None
) -> tuple[Planned, ...]:  # fmt: skip
    """Returns the first rank's plan and those that the others would make. `candidate`: is tried for each; None: searches."""
    alike, planned, between = Alike.of(first.plan, first.model.owners), [first], candidate
    for rank in range(1, network.ranks):
        seat, is_last = Seat(rank=rank, network=network, alike=alike), rank == network.ranks - 1
        tried = candidate if is_last else between
        made = _plan_alike(
            first, first.hardware, first.disks, first.epoch, alike, seat, before=first, effort=effort, candidate=tried
        )  # fmt: skip
        between = between or (None if made.found is None else made.found.best.candidate)
        planned.append(made)
    return tuple(planned)


def _plan_alike(
    inspected: Inspected, hardware: HardwareProfile, disks: StoreDisks | None, epoch: Epoch | None, alike: Alike,
    seat: Seat | None = None, *, before: Planned | None = None, effort: Effort = "search", candidate: Candidate | None = None,
) -> Planned:  # fmt: skip
    """Plans for a rank with what rank 0 has chosen. A candidate that does not fit gives way to a search. `before`: made of the
    same stages as they are now."""

    def planned(candidate: Candidate | None) -> Planned:
        planner = _Planner(
            inspected, hardware, disks, epoch, before=before,
            range_experts=alike.numerics.range_experts, seat=seat, effort=effort, candidate=candidate,
            or_least=not inspected.to_run,
        )  # fmt: skip
        return planner.planned(alike.numerics)

    if candidate is not None:
        with suppress(PlanError):
            return planned(candidate)
    return planned(None)


def simulated(ranks: Sequence[Planned], network: Network) -> RingTimeline:
    """Returns the step of all ranks, without commits that are more than a step apart."""
    return simulate_ring([RankPlan(model=one.model, hardware=one.hardware, plan=one.plan) for one in ranks], network)


def seconds_of_all(ranks: Sequence[Planned], timeline: RingTimeline) -> float:
    """Returns the seconds of a step of all ranks, with the share of commits that the slowest rank has."""
    return timeline.step_seconds + max(one.plan.predicted.step_seconds - one.plan.plain_seconds for one in ranks)


def halves(before: Planned, network: Network) -> tuple[Planned, ...]:
    """Makes the plans of several boxes like this plan's, with as large micro-batches as this plan or the network asks for.
    Takes a brief search that begins with this plan's choice."""
    planner, numerics = _Planner(before, before.hardware, before.disks, before.epoch, before=before), before.plan.numerics
    sizes = [numerics]
    while sizes[-1].micro_batch_size % 2 == 0 and before.recipe.train.micro_batch_size == "auto":
        sizes.append(planner.numerics(sizes[-1].micro_batch_size // 2))
    seat = Seat(rank=0, network=network)
    own = None if before.found is None else before.found.best.candidate
    ranked = _Planner(before, before.hardware, before.disks, before.epoch, before=before, seat=seat, near=own)
    first = ranked.planned(min(sizes, key=ranked.chain_seconds))
    return _with_others(first, network, candidate=None if first.found is None else first.found.best.candidate)


def _plan(
    inspected: Inspected, hardware: HardwareProfile, disks: StoreDisks | None, candidate: Candidate | None, *, say: Say,
    epoch: Epoch | None, effort: Effort, seat: Seat | None = None,
) -> Planned:  # fmt: skip
    """Plans whole blocks, or ranges of their experts where those do not fit."""

    def planner(range_experts: int) -> _Planner:
        return _Planner(
            inspected, hardware, disks, epoch, candidate=candidate, effort=effort, or_least=not inspected.to_run,
            range_experts=range_experts, seat=seat,
        )  # fmt: skip

    whole: Planned | None = None
    refused_whole: PlanError | None = None
    may_be_cut = inspected.manifest is None and inspected.known.facts.refusal is None
    try:
        whole = planner(0).planned()
    except PlanError as error:
        refused_whole = error
    if may_be_cut and (whole is None or not _fits(whole)):
        for size in planner(0).range_sizes():
            with suppress(PlanError):
                cut = planner(size).planned()
                if not cut.model.has_ranges:
                    say(f"note: {inspected.known.uncut()}")
                    break
                if _fits(cut):
                    return cut
    if refused_whole is not None:
        raise refused_whole
    assert whole is not None
    return whole


def _fits(planned: Planned) -> bool:
    """Tells whether RAM and the device have room. Disks need as much whatever is cut."""
    predicted, request = planned.plan.predicted, planned.request
    on_device = request.gpu_budget is None or predicted.gpu_peak <= request.gpu_budget
    return on_device and predicted.cpu_peak <= request.cpu_budget


def replan(before: Planned, recipe: Recipe, candidate: Candidate | None = None, *, effort: Effort = "search") -> Planned:
    """Plans with changed keys for the same model and machine. Raises PlanError if nothing fits, UsageError if the model refuses
    them."""
    epoch = before.epoch if recipe.dataset == before.recipe.dataset else None
    inspected = replace(before, recipe=recipe)
    planner = _Planner(inspected, before.hardware, before.disks, epoch, before=before, candidate=candidate, effort=effort)
    numerics = before.plan.numerics  # even of a saved run, if none of their settings changed
    if any(getattr(recipe, section) != getattr(before.recipe, section) for section in _NUMBERS):
        micro = numerics.micro_batch_size if recipe.train.batch_size % numerics.micro_batch_size == 0 else None
        numerics = numerics_of(
            recipe, inspected.known.facts, before.hardware, None, micro=micro, epoch=before.epoch,
            range_experts=numerics.range_experts,
        )  # fmt: skip
    return planner.planned(numerics)


def plan_downloaded(fetched: Fetched, hardware: HardwareProfile, disks: StoreDisks | None, *, say: Say) -> Fetched:
    """Plans again if what was said of the model's files is no longer true, because they have been downloaded since: they may be
    read where they are. Raises PlanError."""
    before = fetched.planned
    found = in_place_of(before, before.known, before.device, say)
    if found == before.in_place:
        return fetched
    planned = plan(replace(before, in_place=found), hardware, disks, epoch=before.epoch, say=say)
    return replace(fetched, planned=planned)


def settle(
    ready: Ready, hardware: HardwareProfile, disks: StoreDisks | None = None, candidate: Candidate | None = None
) -> Ready:
    """Places the candidate of the plan again, for the current rows, process and disks. Searches again only if it does not fit,
    is slower, or the drives' rates change with the run's length. `candidate`: is placed instead, and nothing is searched.
    Raises PlanError."""
    before = ready.planned
    hardware = replace(hardware, process_bytes=hardware.process_bytes + ready.sampler.peak_bytes)

    def planned(candidate: Candidate | None) -> Planned:
        planner = _Planner(before, hardware, disks, Epoch.of(ready.rows), before=before, candidate=candidate)
        return planner.planned(before.plan.numerics)

    if candidate is not None or before.found is None:
        return replace(ready, planned=planned(candidate))
    with suppress(PlanError):
        again, old = planned(before.found.best.candidate), before.plan
        is_slower = again.plan.predicted.step_seconds > old.predicted.step_seconds * (1 + SLOWER)
        if again.plan.sustained == old.sustained and not is_slower:
            return replace(ready, planned=replace(again, found=before.found))
    return replace(ready, planned=planned(None))


def with_waits(planned: Planned) -> Planned:
    """Returns the plan of a rank with the step of all ranks over their link, in place of its own without waits for them. All
    ranks call it."""
    if (peers := planned.ring) is None:
        return planned
    mine = [asdict(planned.hardware), asdict(planned.plan)]
    ranks = [
        RankPlan(
            model=planned.whole.of_rank(planned.model.owners, rank),
            hardware=from_json(HardwareProfile, hardware),
            plan=from_json(Plan, plan),
        )
        for rank, (hardware, plan) in enumerate(peers.all_gather("plans", mine))
    ]
    timeline, commit = simulate_ring(ranks, peers.network), max(rank.plan.predicted.commit_seconds for rank in ranks)
    step, own, plan = timeline.step_seconds, timeline.ranks[peers.rank], planned.plan
    each = commit / plan.commit_every if plan.has_apart_commits and plan.commit_every else 0.0
    stalls = {**own.stalls, COMMITS: each} if each else own.stalls
    predicted = replace(
        plan.predicted, step_seconds=step + each, forward_seconds=own.forward_seconds, stalls=stalls, commit_seconds=commit
    )
    return replace(planned, plan=replace(plan, predicted=predicted))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Says whose plan is made among several ranks. `alike`: None if this rank chooses it for all; `on_box`: ranks that share
    its box, 0 for those of the network's."""

    rank: int
    network: Network
    alike: Alike | None = None
    on_box: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FastestSize:
    """Holds the rows of the fastest micro-batch."""

    rows: int


class _Planner:
    """Plans one model on one machine. Keeps specifications and searches, so that nothing is done twice."""

    def __init__(
        self, inspected: Inspected, hardware: HardwareProfile, disks: StoreDisks | None, epoch: Epoch | None, *,
        before: Planned | None = None, candidate: Candidate | None = None, near: Candidate | None = None,
        effort: Effort = "search", or_least: bool = False, range_experts: int = 0, seat: Seat | None = None,
    ) -> None:  # fmt: skip
        if seat is None and (peers := inspected.peers) is not None:
            seat = Seat(rank=peers.rank, network=peers.network, alike=peers.alike, on_box=peers.local_count)
        self._seat = seat
        self._inspected, self._hardware, self._disks = inspected, hardware, disks
        self._epoch, self._range_experts = epoch, range_experts
        self._runs = RunPlanner(hardware, candidate=candidate, near=near, effort=effort, or_least=or_least)
        self._described: dict[tuple[object, ...], ModelSpec] = {}
        self._dealt: dict[tuple[PlanRequest, Network], tuple[int, ...]] = {}
        if before is not None:  # of the same model
            self._described[traced(before.plan.numerics)] = before.whole

    def planned(self, numerics: Numerics | None = None) -> Planned:
        """Plans with these numerics, or with those of the recipe and the fastest micro-batch."""
        inspected = self._inspected
        numerics = numerics or self.numerics(self._micro_batch())
        model, request = self._request(numerics)
        rows = None if self._epoch is None else self._epoch.rows
        steps = steps_left(steps_of(inspected.recipe, rows), inspected.manifest)
        made = self._runs.plan(model, request, steps=steps)
        plan = made.plan
        if request.commit_every == "auto" and self._seat is not None and self._replicas == 1:
            plan = with_longer_steps(model, self._hardware, plan, self.chain_seconds(numerics))
        return Planned(
            **fields_of(inspected, Inspected),
            hardware=self._hardware,
            disks=self._disks,
            model=model,
            request=made.request,
            plan=replace(plan, numerics=numerics, replicas=self._replicas),
            found=made.search,
            epoch=self._epoch,
            whole=self._specified(numerics),
        )

    @property
    def _replicas(self) -> int:
        peers = self._inspected.peers
        return peers.count if peers is not None and peers.are_replicas else 1

    def numerics(self, micro: int | None) -> Numerics:
        """Returns the numerics with micro-batches of `micro` rows (None: the usual ones), or those of a saved run."""
        return numerics_of(
            self._inspected.recipe, self._inspected.known.facts, self._hardware, self._inspected.manifest,
            micro=micro, epoch=self._epoch, range_experts=self._range_experts,
        )  # fmt: skip

    def range_sizes(self) -> list[int]:
        """Returns how many experts a range may have where whole blocks do not fit, the most first."""
        return range_sizes(*self._request(self.numerics(None)))

    def _request(self, numerics: Numerics) -> tuple[ModelSpec, PlanRequest]:
        """Returns what is planned with these numerics, of which a replica has a share of the rows. Raises UsageError if the
        model refuses what the recipe asks."""
        inspected, device, model = self._inspected, self._inspected.device, self._specified(numerics)
        check_lanes(model, numerics)
        numerics = numerics.of_sweep(self._replicas)
        asked = plan_request(
            inspected.recipe,
            numerics,
            self._hardware,
            device=device,
            disks=self._disks,
            parameters=model.parameters if inspected.recipe.adapter is None else model.trained_parameters,
        )
        if asked.is_swept and not model.may_sweep:
            raise UsageError(
                f"train.sweep_tokens: {model.architecture} needs all rows of a step at once",
                hint="leave it auto: the model sums or draws random numbers over all rows, in its embedding or between layers",
            )
        if asked.norm_first and not may_measure_first(model, asked):
            raise UsageError(
                f"offload.norm_first: {model.architecture} cannot measure the norm first as it is trained here",
                hint="leave it auto: the head is tied, some weights are frozen, or the model writes into outputs",
            )
        if self._epoch is not None:
            from ..data.batches import typical_step  # with numpy

            asked = replace(asked, typical=typical_step(self._epoch.lengths, numerics))
        widths = widths_of(inspected.recipe, numerics) if device == "cpu" else 1
        asked = replace(asked, code_bytes=code_bytes(model, numerics, widths=widths) if widths > 1 else 0)
        return (model, asked) if self._seat is None else self._of_rank(model, asked, self._seat)

    def _of_rank(self, model: ModelSpec, asked: PlanRequest, seat: Seat) -> tuple[ModelSpec, PlanRequest]:
        """Returns what is planned for one rank: its stages, or all for a replica, and its part of the box, with what all ranks
        have alike."""
        if not self._inspected.recipe.offload.max_memory.cpu.is_auto:  # auto is of this rank's part of the box already
            asked = replace(asked, cpu_budget=asked.cpu_budget // (seat.on_box or seat.network.ranks_per_box))
        if (alike := seat.alike) is not None:
            asked = replace(asked, sweeps=alike.sweeps, norm_first=alike.norm_first, commit_every=alike.commit_every)
        elif asked.norm_first is None and not may_measure_first(model, asked):
            asked = replace(asked, norm_first=False)  # others' stages may not, whatever this rank's may
        if self._replicas > 1:
            return model, asked
        owners = self._owners(model, asked, seat)
        check_owners(model, owners, seat.network.ranks)
        view = model.of_rank(owners, seat.rank)
        if asked.sweeps is None:  # a sweep has fewer micro-batches, and ranks wait for one another in each
            whole = replace(asked, sweeps=1)
            asked = whole if least_memory(view, self._hardware, whole) <= asked.cpu_budget else asked
        return view, asked

    def _owners(self, model: ModelSpec, asked: PlanRequest, seat: Seat) -> tuple[int, ...]:
        """Returns the rank of each stage: as a saved run has it, else as rank 0 deals them, by the times of its own machine."""
        saved = None if self._inspected.moves else self._inspected.manifest
        if saved is not None and saved.share is not None:
            return saved.share.owners
        if seat.alike is not None:
            return seat.alike.owners
        about = asked, seat.network
        if about not in self._dealt:
            self._dealt[about] = fastest_deal(model, self._hardware, asked, seat.network)
        return self._dealt[about]

    def chain_seconds(self, numerics: Numerics) -> float:
        """Estimates the step of all ranks with such micro-batches if compute and the network bind."""
        assert self._seat is not None
        _, asked = self._request(numerics)
        return chain_seconds(self._specified(numerics), self._hardware, asked, self._seat.network)

    def _seconds_of_all(self, numerics: Numerics) -> float:
        """Simulates the step of all ranks with such micro-batches. Raises PlanError."""
        assert self._seat is not None
        first = self.planned(numerics)
        choice = None if first.found is None else first.found.best.candidate
        ranks = _with_others(first, self._seat.network, candidate=choice)
        return seconds_of_all(ranks, simulated(ranks, self._seat.network))

    def _specified(self, numerics: Numerics) -> ModelSpec:
        about, recipe = traced(numerics), self._inspected.recipe
        known = self._described.get(about)
        if known is None:
            compiled = recipe.train.compile
            known = self._inspected.known.specified(numerics, self._inspected.in_place, compiled=compiled)
            if compiled:
                known = with_measured_graphs(known, self._hardware, numerics.micro_batch_tokens)
        layout = replace(known.layout, dtype=recipe.optimizer.state_dtype, rule=recipe.optimizer.name)
        self._described[about] = known if known.layout == layout else known.with_layout(layout)
        return self._described[about]

    def _micro_batch(self) -> int | None:
        """Returns the rows of the fastest micro-batch, None where the recipe or a saved run decides. Sizes are compared, unless
        that was done for this very recipe and machine. This machine never counts as the same: its free disk changes."""
        inspected = self._inspected
        if inspected.recipe.train.micro_batch_size != "auto" or inspected.manifest is not None:
            return None
        if not inspected.known.is_elsewhere:
            return self._by_the_assumed_link()._compared_sizes()
        recipe = inspected.recipe.model_dump_json()
        about: tuple[object, ...] = (
            recipe, self._hardware, self._disks, inspected.in_place, self._epoch, self._range_experts
        )  # fmt: skip
        about = about if self._seat is None else (*about, self._seat)
        return inspected.known.once(FastestSize, lambda: FastestSize(rows=self._compared_sizes()), *about).rows

    def _by_the_assumed_link(self) -> _Planner:
        """Returns this planner as if no link had been measured: numerics may not depend on a rate that is another one each
        time, and by it stages are dealt, too."""
        planner = copy(self)
        if self._seat is not None:
            planner._seat = replace(self._seat, network=self._seat.network.assumed)
        return planner

    def _compared_sizes(self) -> int:
        """Compares the simulated usual plans of the sizes, then the searched plans of the best two, for several ranks by the
        step of all. Those of a mixture may be larger, where compute takes the most time: each expert then has more rows, and
        nothing else becomes faster."""
        recipe, hardware = self._inspected.recipe, self._hardware
        is_ring = self._seat is not None and self._replicas == 1
        batch, length, usual = (
            recipe.train.batch_size // recipe.train.lanes,
            recipe.dataset.max_seq_len,
            usual_tokens(hardware),
        )
        middle, is_bound = sizes_of(batch, length, usual=usual)[1], False

        def of(size: int) -> tuple[ModelSpec, PlanRequest]:
            return self._request(self.numerics(size))

        def least(size: int) -> int:
            model, request = of(size)
            return least_memory(model, hardware, request)

        def seconds(size: int, effort: Effort) -> float | None:
            nonlocal is_bound
            if size * length > MOST_TOKENS and is_bound and effort == "usual":
                return None
            model, asked = of(size)
            try:
                plan = self._runs.plan(model, asked, steps=steps_of(recipe, None), effort=effort).plan
                of_all = self._seconds_of_all(asked.numerics) if is_ring and effort == "search" else None
            except PlanError:
                return None
            on_device = asked.gpu_budget is None or plan.predicted.gpu_peak <= asked.gpu_budget
            fits = on_device and plan.predicted.cpu_peak <= plan.cpu_budget
            if effort == "usual":
                is_bound = plan.predicted.bottleneck != "compute"
            if not fits:
                return None
            if is_ring:
                return of_all or max(self.chain_seconds(asked.numerics), plan.predicted.step_seconds)
            return plan.predicted.step_seconds if effort == "usual" else step_cost(model, asked, plan)

        is_mixture = hardware.device == "cuda" and any(stage.expert_work for stage in of(middle)[0].stages)
        return fastest_size(
            batch,
            length,
            usual=usual,
            most=MOST_OF_MIXTURES if is_mixture else MOST_TOKENS,
            planned=lambda size: seconds(size, "usual"),
            searched=lambda size: seconds(size, "search"),
            needed=least,
        )


def _resumable(inspected: Inspected, say: Say) -> Inspected:
    """Drops the saved run if it cannot be resumed with this recipe, and plans as for a new run. A run is refused."""
    try:
        check_resumed(inspected, accept_changes=True)
    except FuyouError as error:
        if inspected.to_run:
            raise
        say(refused(error))
        return replace(inspected, saved=None)
    return inspected


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLayers:
    """Holds a recipe's stages as a run would compute them, the numerics of each micro-batch to time them at, those first that
    count most, and what they are timed for (`StageRate.layers`)."""

    anatomy: Anatomy
    sizes: list[Numerics]
    layers: str


def own_layers(recipe: Recipe, hardware: HardwareProfile, *, say: Say, progress: Progress = unheard) -> OwnLayers:
    """Finds the stages to time for a recipe.

    They have the recipe's adapter, whose small products are slow for their FLOPs. Without one all stages are trained: rates are
    of whole blocks, and a plan counts what freezing spares. On a GPU they are timed at the micro-batches that a plan is likely
    to choose, and so is what is compiled, which takes seconds for each. Rows that are not packed are taken to be so unlike that
    they will lie end to end."""
    model_dir = Hub(recipe, say=say, progress=progress).model_or_shapes()
    layers = layers_of(recipe, model_dir, cores=hardware.cores)
    epoch = Epoch(rows=None, lengths=(1,)) if recipe.dataset.packing != "concat" else None
    dataset = recipe.dataset.model_copy(update={"packing": False})
    plain = recipe.model.model_copy(update={"quantize": "none", "double_quant": False})
    recipe = recipe.model_copy(update={"freeze": (), "dataset": dataset, "model": plain})
    known = KnownModel(recipe, model_dir, strict=True)
    facts = known.facts
    check_positions(recipe, facts.positions, facts.learns_positions, say)
    batch, length, usual = recipe.train.batch_size, recipe.dataset.max_seq_len, usual_tokens(hardware)
    asked = recipe.train.micro_batch_size
    if hardware.device == "cuda" or recipe.train.compile:
        likely = likely_sizes(batch, length, usual=usual) if asked == "auto" else [asked]
        shapes = [(size, length) for size in likely]
    elif asked == "auto":
        shapes = timed_shapes(batch, length, usual=usual)
    else:
        shapes = timed_shapes(asked, length, usual=max(usual, asked * length))

    def numerics(rows: int, width: int) -> Numerics:
        one = numerics_of(recipe, facts, hardware, None, micro=rows, epoch=epoch)
        return replace(one, batch_size=max(one.batch_size, rows), micro_batch_size=rows, max_seq_len=width)

    sizes = [numerics(*shape) for shape in shapes]
    return OwnLayers(anatomy=known.stages(sizes[0], None), sizes=sizes, layers=layers)


def layers_of(recipe: Recipe, model_dir: Path, *, cores: int) -> str:
    """Identifies what a recipe's own stages are timed for: all that their seconds depend on beside the shape of a micro-batch,
    and the length of its rows."""
    model, train, precision = recipe.model, recipe.train, recipe.precision
    about = [
        {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(model_dir.glob("config*.json"))},
        [model.attn_implementation, "torch", precision.compute, precision.grad_accum],
        [train.threads, cores, train.compile, train.head_chunk_tokens, train.head_chunk_vocab],
        recipe.dataset.packing == "concat",  # else attention is computed for each row or document
        None if recipe.adapter is None else recipe.adapter.model_dump(mode="json", exclude={"start"}),
        version("torch"),
    ]
    return f"{sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]}/{recipe.dataset.max_seq_len}"


def plan_request(
    recipe: Recipe, numerics: Numerics, hardware: HardwareProfile, *, device: str, disks: StoreDisks | None = None,
    parameters: int = 0,
) -> PlanRequest:  # fmt: skip
    """Resolves the keys to numbers. `disks`: the room for the store, beside the export
    of this many `parameters`; None: the free disk in the machine's profile."""
    from ..swap.kernels import scratch_size

    offload, export_item = recipe.offload, 2 if recipe.export.dtype == "bfloat16" else 4
    depth = 16 if offload.io.queue_depth == "auto" else offload.io.queue_depth
    threads = update_threads_for(hardware, device=device, torch_threads=numerics.torch_threads)
    # Beside a GPU nearly all of the RAM is pinned, so a budget is at most what the driver may pin.
    most = int(hardware.ram_available * 0.9)
    most = min(most, hardware.pinnable) if device == "cuda" and hardware.pinnable else most

    def home(value: str) -> Tier | None:
        if value == "gpu" and device == "cpu":
            raise UsageError("a tensor is placed on gpu, but offload.device is cpu", hint="use cpu, ssd or auto")
        usual: Tier | None = "cpu" if offload.strategy == "none" else None
        return usual if value == "auto" else cast(Tier, value)

    if (keeps := offload.activations == "keep") and device == "cpu":
        what = "offload.activations is keep, but offload.device is cpu, which has no memory of its own"
        raise UsageError(what, hint="use auto")
    kept: dict[str, Literal["all", "none"] | None] = {"auto": None, "keep": "none", "swap": "all", "recompute": "none"}
    measures_first = {"auto": None, "always": True, "never": False}[offload.norm_first]
    if recipe.model.trust_remote_code:
        measures_first = False  # its backward may write into what forward saved, and a second one would be given that
    return PlanRequest(
        numerics=numerics,
        model_name=recipe.model.name_or_path,
        device=device,
        clip_grad_norm=recipe.train.clip_grad_norm,
        gpu_budget=gpu_limit(recipe, hardware),
        cpu_budget=offload.max_memory.cpu.resolve(total=hardware.ram_total, auto=most),
        ssd_budget=None if disks is None else disks.budget(recipe, parameters * export_item),
        weights=home(offload.weights),
        states=home(offload.optimizer_states),
        gradients=home(offload.gradients),
        boundaries=home(offload.boundaries),
        kept=kept[offload.activations],
        kept_there="room" if keeps else None,
        lookahead=None if offload.lookahead == "auto" else offload.lookahead,
        defer=None if offload.defer_updates == "auto" else bool(offload.defer_updates),
        norm_first=measures_first,
        io_backend=offload.io.backend,
        read_depth=depth,
        write_depth=depth,
        block_size=1 << 20 if offload.io.block_size == "auto" else offload.io.block_size,
        update_threads=threads,
        chunk_params=CHUNK_PARAMS,
        scratch_size=scratch_size(CHUNK_PARAMS, update_chunks_for(threads)),
        export_item=export_item,
        exports_trained=recipe.adapter is not None,
        commit_every=recipe.checkpoint.commit_every_steps,
        wear=offload.wear,
        sweeps=_sweeps(recipe.train.sweep_tokens, numerics),
    )


def _sweeps(asked: int | Literal["auto"], numerics: Numerics) -> int | None:
    """Returns the number of equal sweeps of at most `asked` tokens. None leaves it to the planner."""
    if asked == "auto":
        return None
    total, one = numerics.micro_batches, numerics.micro_batch_tokens
    if asked < one:
        raise UsageError(
            f"train.sweep_tokens: {asked:,} is less than a micro-batch of {one:,} tokens",
            hint="use auto or more, or set train.micro_batch_size",
        )
    return next(count for count in range(1, total + 1) if total % count == 0 and total // count * one <= asked)
