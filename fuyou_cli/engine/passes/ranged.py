"""Computes blocks whose experts are stages of their own (`engine/ranges`): the block's visit, then one of each range."""

from __future__ import annotations

import time
from functools import partial

import torch

from ...spec.micro_batch import MicroBatch
from ..anatomy import Installed
from ..crossings import Gathering, Leaving, clear_padding
from ..experts import Bank, Noting
from ..ranges import Sent, add_outputs, differentiate
from ..streamed import Call
from .block import Beside, BlockPasses


class RangedPasses(BlockPasses):
    """Computes stages whose input is a boundary, and with a block the ranges of its experts that follow."""

    _sent: Gathering | None = None  # what the block under way sends to its experts

    def first_in_backward(self, stage: int) -> int:
        """Returns the stage whose visit begins the backward of a call of `stage`."""
        return self.visits.model.ranges(stage).stop - 1

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        ranges = self.visits.model.ranges(call.stage)
        if not ranges:
            return super().forward(call, x)
        self._sent = sent = Gathering(self.visits.crossings, x.shape)
        try:
            y = super().forward(call, x)
        finally:
            self._sent = None
        whole = sent.settled()
        sums = self._room(y, y.shape[-1])
        for stage in ranges:
            self._add(stage, whole, sums, y, each=self._each(call.stage))
        return y

    def _computed(self, part: MicroBatch, parameters: Installed) -> None:
        if self._sent is not None:
            self._sent.put(part, _noted(parameters).packed(part.end - part.first))

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None:
        model = self.visits.model
        ranges = model.ranges(call.stage)
        if not ranges:
            return super().backward(call, ids, grad_y)
        goes_back, each = model.stages[call.stage].goes_back, self._each(call.stage)
        sums = self._room(grad_y, grad_y.shape[-1] + each) if goes_back else None
        sent: torch.Tensor | None = None
        for stage in reversed(ranges):
            if model.stages[stage].goes_back:
                follows = stage > ranges[0] and model.stages[stage - 1].goes_back
                sent = self._differentiate(stage, sent, sums, grad_y, each=each, follows=follows)
        del sent
        if sums is None:
            return None
        self._begins = Beside(sums, lambda parameters, sums: _noted(parameters).roots(sums))
        try:
            return super().backward(call, ids, grad_y)
        finally:
            self._begins = None

    def _each(self, block: int) -> int:
        """Returns how many experts of a block a token is sent to."""
        return self.visits.model.stages[block].choices

    def _room(self, like: torch.Tensor, columns: int) -> torch.Tensor:
        """Returns room for sums of the whole batch. They are in float32: rounding after each range would make the result depend
        on the number of ranges."""
        return self.visits.crossings.batches.lend((*like.shape[:2], columns), torch.float32)

    def _add(self, stage: int, sent: torch.Tensor, sums: torch.Tensor, y: torch.Tensor, *, each: int) -> None:
        """Visits a range, which adds its outputs to `sums`; the last one adds these to `y`."""
        visits = self.visits
        visit, flat = visits.enter("forward", stage, sent)
        begin = time.monotonic()
        begins, ends = visits.model.stages[stage - 1].expert_range is None, visits.model.stages[stage].is_last_range
        micro_batches, given = visits.micro_batches(sent), [sent, *([] if begins else [sums]), *([y] if ends else [])]
        arriving = visits.inputs(partial(_parts, part, given) for part in micro_batches)
        leaving, target = Leaving(visits.crossings), y if ends else sums
        with torch.no_grad(), visits.installed(stage, flat) as parameters:
            for number, part in enumerate(micro_batches):
                packed, *more = arriving.take()
                if visit.stash and visits.device.separate:
                    kept = leaving.keep(packed, visits.boundaries.rows(stage, number))
                    visits.boundaries.awaits(stage, kept)
                total = self._begun(part, sums) if begins else more.pop(0)
                flat_total = total.view(-1, total.shape[-1])
                add_outputs(
                    visits.stages[stage], _bank(parameters), Sent.of(packed, y.shape[-1], each), flat_total, self._inside
                )
                clear_padding(target, part)
                leaving.put((more[0] + total).to(y.dtype) if ends else total, part.of(target))
                del packed, more, total, flat_total
                visits.between()
        leaving.settle()
        visits.boundaries.seal(stage)
        visits.leave(visit, begin)

    def _inside(self) -> None:
        """Moves on what can move on, where this thread computes."""
        if not self.visits.device.separate:
            self.visits.inside()

    def _begun(self, part: MicroBatch, sums: torch.Tensor) -> torch.Tensor:
        return self.visits.crossings.begun(part.of(sums)).zero_()

    def _differentiate(
        self, stage: int, sent: torch.Tensor | None, sums: torch.Tensor | None, grad_y: torch.Tensor, *, each: int,
        follows: bool,
    ) -> torch.Tensor | None:  # fmt: skip
        """Visits a range in backward: adds the gradients of what it was sent to `sums` (None: nobody wants them), and sums its
        own. `sent`: None in the first of these visits, which takes it from where it was kept, and returns it if another
        `follows`."""
        visits = self.visits
        visit, flat = visits.enter("backward", stage)
        kept = visits.boundaries.take(stage, visits.residency.wait_until) if visit.take else []
        total = visits.sums.open(stage, resume=visit.resume)
        begin = time.monotonic()
        begins, micro_batches = sent is None, visits.micro_batches(grad_y)
        given = [grad_y] if begins or sums is None else [grad_y, sums]
        if begins and follows:
            sent = visits.crossings.batches.lend((*grad_y.shape[:2], kept[0].shape[-1]), kept[0].dtype)
        sources = (
            partial(lambda n, part: [kept[n] if kept else part.of(sent).contiguous(), *_parts(part, given)], *one)
            for one in enumerate(micro_batches)
        )
        arriving, leaving = visits.inputs(sources), Leaving(visits.crossings)
        with visits.learning(stage, flat, total) as parameters:
            for part in micro_batches:
                packed, grad, *more = arriving.take()
                if begins and sent is not None:
                    leaving.put(packed, part.of(sent))
                found = None if sums is None else more[0] if more else self._begun(part, sums)
                differentiate(
                    visits.stages[stage], _bank(parameters), Sent.of(packed, grad.shape[-1], each),
                    grad.reshape(-1, grad.shape[-1]), None if found is None else found.view(-1, found.shape[-1]),
                    self._inside,
                )  # fmt: skip
                if sums is not None and found is not None:
                    clear_padding(sums, part)
                    leaving.put(found, part.of(sums))
                del packed, grad, more, found
                visits.between()
        leaving.settle()
        visits.boundaries.awaits(stage, *arriving.uploads)
        if visit.take:
            (visits.boundaries.leave if visit.measures else visits.boundaries.drop)(stage)
        visits.sums.end(visit, stage, total)
        visits.leave(visit, begin)
        return sent


def _parts(part: MicroBatch, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.of(whole).contiguous() for whole in given]


def _bank(parameters: Installed) -> Bank:
    (bank,) = parameters.banks
    assert isinstance(bank, Bank)
    return bank


def _noted(parameters: Installed) -> Sent:
    """Returns what the block that has just computed sent to its experts."""
    (noting,) = parameters.banks
    assert isinstance(noting, Noting)
    return Sent.by(noting)
