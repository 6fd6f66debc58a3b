"""Nothing damaged is exported or computed with: sums are looked at before a model takes its place, and as a run reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn import every

from fuyou_cli.core.errors import SwapError
from fuyou_cli.spec.plan import Span
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.run import Run
from fuyou_cli.training.state.at_rest import saved_store
from tests.damage import counted_reads, flip

from .conftest import NewProject, Project, WholeOf
from .running import STEPS, exported, manifest_of, store_of, train


def _export(store: Path, out: Path) -> None:
    export_store(saved_store(store), out, dtype="float32", max_shard_size=1 << 30)


def test_a_flipped_bit_is_never_exported(stopped: Project, tmp_path: Path) -> None:
    """The first byte of an extent, one in the middle, and the last, which may be no tensor's."""
    saved, store, out = manifest_of(stopped), store_of(stopped), tmp_path / "out"
    stage = next(stage for stage in saved.stages if stage.params)
    for tensor, extent in (("weights", stage.weights), ("remainder", stage.remainder)):
        assert extent is not None
        for byte in (extent.offset, extent.offset + extent.size // 2, extent.offset + extent.size - 1):
            flip(Path(saved.files[0]), byte)
            with pytest.raises(
                SwapError, match=f"{tensor} of {stage.name}: bytes {extent.offset} to .* are not what was written"
            ):
                _export(store, out)
            assert list(tmp_path.iterdir()) == []
            flip(Path(saved.files[0]), byte)
    assert exported(store, out)


def test_a_bit_flipped_on_its_way_is_not_exported(stopped: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips a bit in every third read in turn, though the store is whole."""
    reads = counted_reads(monkeypatch)
    store = store_of(stopped)
    _export(store, tmp_path / "whole")
    count = reads.seen
    for number in range(1, count + 1, 3):
        reads.seen, reads.at = 0, number
        with pytest.raises(SwapError, match="are not what was written there"):
            _export(store, tmp_path / "out")
    assert count > 20 and not (tmp_path / "out").exists()


# ---- a bit that flips while a run trains ---------------------------------------------------------------------------------


STEP = 3
ON_SSD = {"offload.boundaries": "ssd", "offload.gradients": "ssd", "train.max_steps": STEPS}
TENSORS = ("weights", "remainder", "momentum", "variance", "gradients", "boundary")


def _at_rest(run: Run, tensor: str) -> Span | None:
    """Finds an extent of the last block that lies on the store alone, and is still to be read; of boundaries the first block's,
    which lies there longest. Gradients may take until a later step to be seen there."""
    if run.step + 1 < STEP:
        return None
    blocks = [stage.index for stage in run.model.stages if stage.kind == "block"]
    stage = blocks[0] if tensor == "boundary" else blocks[-1]
    record, plan = run.executor.visits.residency.records[stage], run.plan.stages[stage]
    if tensor == "boundary":
        kept = run.executor.visits.boundaries.ledger.kept.get(stage)
        return plan.boundary_extent if kept is not None and kept.span is None else None
    if tensor == "gradients":
        visit = run.executor.visits.schedule.visits[run.executor.visits.lookahead.cursor]
        is_there = record.gradients == "resting" and visit.phase == "backward" and visit.stage < stage  # of this very step
        return plan.gradients_extent if is_there and record.gradient_slot is None and record.update is None else None
    if record.slotted or record.update is not None:
        return None
    return plan.extent(tensor, record.turn)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensor", every(3, TENSORS))
def test_a_flipped_bit_ends_the_run_and_the_next_one_is_whole(tensor: str, new_project: NewProject, whole: WholeOf) -> None:
    expected = whole(ON_SSD).losses
    project, flipped = new_project("flipped", ON_SSD), list[int]()

    def damage(run: Run) -> None:
        if not flipped and (span := _at_rest(run, tensor)) is not None:
            flipped.append(span.offset + span.size // 3)
            flip(run.store.paths[0], flipped[0])

    of = "" if tensor in ("weights", "boundary") else f"{tensor} of "
    with pytest.raises(SwapError, match=f"reading {of}.*: bytes .* are not what was written there"):
        train(project, damage)
    assert flipped and manifest_of(project).step < STEPS
    flip(Path(manifest_of(project).files[0]), flipped[0])  # it was on its way that it flipped
    assert train(project)[0] == expected
