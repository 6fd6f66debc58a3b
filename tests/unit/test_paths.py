"""Tests paths of a recipe that cannot be what they should be: one error, with the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import folder


def test_a_folder_may_be_there_or_not_yet(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for good in (tmp_path, tmp_path / "new" / "er", tmp_path / "link" / "new", Path("relative")):
        assert folder(good, key="offload.dir") == good
    assert folder("~/x", key="offload.dir") == Path.home() / "x"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "file is a file, not a folder"),
        ("file/below/it", "file is a file, not a folder"),
        ("link", "link is a file, not a folder"),
        ("nowhere", "nowhere is a link to nothing"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_stands_in_the_way_is_named(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match=words) as caught:
        folder(tmp_path / name, key="offload.dir")
    assert caught.value.message.startswith("offload.dir: ")


def test_a_home_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"offload.dir: ~nosuchuser/x"):
        folder("~nosuchuser/x", key="offload.dir")
