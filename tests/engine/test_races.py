"""Nothing that a GPU runs overtakes what it depends on (`tests/races`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn import every

from tests.races import OrderedDevice

from .families import gpt2, llama
from .rig import Rig, Shape, Subject

STEPS = 2  # what the first leaves is used in the second
TIED = llama(tie_word_embeddings=True)
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "tied, cut": lambda: Subject(TIED, Shape(vocabulary=40)),
    "uneven": lambda: Subject(gpt2(dropout=0.1), Shape(batch=5, micro=2, dtype="bfloat16")),
    "rows": lambda: Subject(llama(), Shape(batch=4, micro=1)),
}
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("tied, cut", dict(home="cpu", device_states=(3, 4), clip=None)),  # blocks, whose gradients do not rest
    ("uneven", dict(home="cpu", kept="all")),
    ("uneven", dict(kept="all", batch_on_device=False)),
    ("rows", dict(sweeps=2, clip=None, lookahead=2)),
]


@pytest.mark.parametrize(("name", "way"), every(3, WAYS))
def test_nothing_overtakes_what_it_depends_on(name: str, way: dict[str, Any], tmp_path: Path) -> None:
    device = OrderedDevice()
    named: Any = dict(device="emulated", opened=device, through=device.watched)
    with Rig(SUBJECTS[name](), tmp_path, **named, **way) as rig, device.watching():
        rig.run(STEPS)
    assert device.races == []
