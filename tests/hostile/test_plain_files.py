"""Tests that what is no plain file is refused by name, whichever command is told to read it: none waits for the writer of a
pipe, or for the end of a device that has none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import read_plain
from fuyou_cli.data.cache import read_template
from fuyou_cli.data.sources import MissingDataError, locate
from fuyou_cli.machine.described import described
from fuyou_cli.recipe.diagnostics import RecipeErrors
from fuyou_cli.recipe.load import load_recipe

from .conftest import Run

pytestmark = pytest.mark.timeout(180)  # what it is about waits for ever; a busy machine imports torch for 20 s


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Makes places by what they are: nobody writes to the pipe, and the device never ends."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    listening = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(tmp_path)  # the name of a socket is short
    try:
        listening.bind("socket.jsonl")
    finally:
        os.chdir(here)
        listening.close()
    return {"a pipe": tmp_path / "pipe.jsonl", "a socket": tmp_path / "socket.jsonl", "a device": Path("/dev/zero")}


def test_each_reader_says_what_is_there(places: dict[str, Path]) -> None:
    for what, path in places.items():
        says = f"it is {what}, not a plain file"
        for read in (load_recipe, described, read_template):
            with pytest.raises(UsageError) as refused:
                read(path)
            assert says in refused.value.message and str(path) in refused.value.message
        with pytest.raises(OSError, match=says):
            read_plain(path, limit=1)
        with pytest.raises(UsageError) as refused:
            locate(str(path), "train")
        assert says in refused.value.message and not isinstance(refused.value, MissingDataError)


def test_a_link_to_a_plain_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "link", limit=3) == b"123"
    assert read_plain(tmp_path / "link", limit=9) == b"12345"


def test_a_folder_and_a_large_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeErrors, match="Is a directory"):
        load_recipe(tmp_path)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # nothing of it on the disk
    with pytest.raises(RecipeErrors, match="this is not a recipe: more than"):
        load_recipe(large)
    with pytest.raises(UsageError, match="larger than 4 MiB, so not a template"):
        read_template(large)


def test_every_command_that_reads_a_recipe(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    for command in (
        ("validate",),
        ("plan",),
        ("finetune", "recipe.yaml"),
        ("bench", "recipe.yaml"),
        ("export", "recipe.yaml", "x"),
    ):
        code, _, err = run(*command)
        assert code == 2 and "recipe.yaml: error[unreadable]: cannot be read: it is a pipe, not a plain file" in err, command
