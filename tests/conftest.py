"""Gives every test time enough for a drawn example on a busy machine, and says what to repeat when one fails."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from drawn import load_profile

from fuyou_cli.core.paths import kept_folder

load_profile()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: products give the same bits every time

# A shell's background job ignores Ctrl-C, and one under nohup a closed terminal: so would every command that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


DEAR = ("e2e", "scripts", "quickstart", "engine", "cli", "hostile", "bench", "swap", "data")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the emulated device known, but where others run the tests: their start waits for this process to load torch."""
    if config.getoption("dist", "no") == "no":
        from tests import emulated

        emulated.register()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the folders whose files take longest first: the last ones are short, so that no worker waits for another's."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return DEAR.index(folder) if folder in DEAR else len(DEAR)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Hides what imports and collection made from the garbage collector: it would look through it again in every test."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.freeze()  # what ends with the process is not looked through once more


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Restores handlers: a run that an error ends in this process leaves signals ignored, because a command then ends. Every
    command that a later test starts would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def open_to_all() -> Iterator[None]:
    """No umask: files have the mode that they are made with."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(scope="session", autouse=True)
def kept_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps descriptions of models for all tests of a session, and never beside those of whoever runs it. Tests about
    describing have a folder of their own."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if folder.name.startswith("popen-") else folder  # one for all workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "kept-by-all"))
        (kept_folder() / "models").mkdir(parents=True, exist_ok=True)
        yield


@pytest.fixture
def served_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenises in this process, where a process of its own proves no more."""
    from served import serve

    monkeypatch.setattr("fuyou_cli.data.cache._serve", serve)
