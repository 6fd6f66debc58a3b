"""What others may have put where a run writes: a link to a file of ours, a second name of one, a pipe, a file of theirs.

Nothing of it is written to or waited for, and what a run makes is nobody else's to read, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from proof.parsers import manifest

from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.paths import own_folder
from fuyou_cli.training.state import kept_companions as companions
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state import store_folders as parts
from fuyou_cli.training.state.saver import Saver
from fuyou_cli.training.state.store_folders import LOSSES, write_losses

PRECIOUS = b"my thesis"
SOMEBODY = 12345  # a user


def _keep(folder: Path) -> None:
    companions._replace(folder / manifests.COMPANIONS, {"config.json": b"{}"})


def _reserve_disk(folder: Path, tensors: int = 1) -> None:
    model = SimpleNamespace(stages=(SimpleNamespace(tensors=range(tensors)),))
    ready = SimpleNamespace(planned=SimpleNamespace(total_steps=1))
    Saver._reserve_disk(cast(Any, SimpleNamespace(folder=folder, ready=ready, files=SimpleNamespace(model=model))))


# what writes, where a plant would be hit, what is there afterwards
WRITERS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "losses": (lambda folder: write_losses(folder, [1.0, 2.0]), LOSSES, LOSSES),
    "manifest": (lambda folder: manifests.write(folder, manifest()), ".manifest.new", manifests.NAME),
    "part": (lambda folder: parts.write_parts("0" * 16, [folder]), parts.NEW_PART, parts.PART_FILE),
    "companion": (_keep, "companions/.config.json.unfinished", "companions/config.json"),
    "spare": (_reserve_disk, "spare", "spare"),
}


def _symbolic(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def _to_nothing(place: Path, victim: Path) -> None:
    place.symlink_to(victim.with_name("new"))


def _hard(place: Path, victim: Path) -> None:
    place.hardlink_to(victim)


def _pipe(place: Path, victim: Path) -> None:
    os.mkfifo(place)


def _pipe_with_a_reader(place: Path, victim: Path) -> None:
    os.mkfifo(place)
    os.open(place, os.O_RDONLY | os.O_NONBLOCK)  # until this process ends


def _somebodys(place: Path, victim: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    place.write_bytes(PRECIOUS)
    os.chown(place, SOMEBODY, SOMEBODY)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("plant", [_symbolic, _to_nothing, _hard, _pipe, _pipe_with_a_reader, _somebodys])
def test_what_others_planted_is_not_written_to(writer: str, plant: Callable[[Path, Path], None], tmp_path: Path) -> None:
    write, name, _ = WRITERS[writer]
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_bytes(PRECIOUS)
    victim.chmod(0o644)
    (folder / manifests.COMPANIONS).mkdir(parents=True)
    plant(folder / name, victim)
    before = (folder / name).lstat()
    if writer == "spare":
        write(folder)  # which a run can go without
    else:
        with pytest.raises((FuyouError, OSError), match=r"is not a plain file|second name|another user"):
            write(folder)
    assert victim.read_bytes() == PRECIOUS and stat.S_IMODE(victim.stat().st_mode) == 0o644
    assert not (tmp_path / "new").exists()
    after = (folder / name).lstat()
    assert (after.st_ino, after.st_mode, after.st_size) == (before.st_ino, before.st_mode, before.st_size)


@pytest.mark.usefixtures("open_to_all")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("was", [None, 0o644, 0o4777], ids=str)
def test_nobody_else_may_read_it(writer: str, was: int | None, tmp_path: Path) -> None:
    """Changes it also where it was there: another version made it, or a copy was put back."""
    write, name, made = WRITERS[writer]
    (tmp_path / manifests.COMPANIONS).mkdir()
    if was is not None:
        (tmp_path / name).write_bytes(b"longer than what is written now" * 4096)
        (tmp_path / name).chmod(was)
    write(tmp_path)
    assert stat.S_IMODE((tmp_path / made).stat().st_mode) == 0o600
    if writer in ("manifest", "part", "companion"):
        assert b"longer" not in (tmp_path / made).read_bytes(), "what was there is gone"
    if writer == "companion":
        assert stat.S_IMODE((tmp_path / manifests.COMPANIONS).stat().st_mode) == 0o700


def test_the_reserved_disk_has_room_for_a_manifest_of_many_tensors(tmp_path: Path) -> None:
    """Of a mixture whose experts are tensors of their own: on a full disk its last manifest could not be written."""
    stage, count = manifest().stages[0], 30_000
    name = "model.layers.60.mlp.experts.255.down_proj.weight"
    tensor = replace(stage.tensors[0], name=name, stored_as=name, shape=(7168, 2048), offset=1 << 34, count=7168 * 2048)
    manifests.write(tmp_path, replace(manifest(), stages=(replace(stage, tensors=(tensor,) * count),)))
    _reserve_disk(tmp_path, count)
    assert (tmp_path / "spare").stat().st_size > (tmp_path / manifests.NAME).stat().st_size > 4 << 20


@pytest.mark.usefixtures("open_to_all")
def test_folders(tmp_path: Path) -> None:
    own_folder(tmp_path / "drive" / "run")
    assert stat.S_IMODE((tmp_path / "drive" / "run").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(0o777)
    (tmp_path / "shared").chmod(0o2775)
    own_folder(tmp_path / "shared")
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    with pytest.raises(UsageError, match="is a symbolic link"):
        own_folder(tmp_path / "link")
    assert stat.S_IMODE((tmp_path / "drive").stat().st_mode) == 0o777


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(0o755)
    os.chown(tmp_path / "run", SOMEBODY, SOMEBODY)
    with pytest.raises(UsageError, match="belongs to another user"):
        own_folder(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755
