"""Tests what is fetched from the hub and what each refusal says; a small HTTP server answers as the real one does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.checkpoint import hub
from fuyou_cli.checkpoint.files import INDEX_NAME, SINGLE_NAME, found_in, open_checkpoint
from fuyou_cli.checkpoint.hub import resolve
from fuyou_cli.core.errors import OutOfSpaceError, UsageError
from tests.hub_server import COMMIT, GATED, Hub

from .tiny_models import write_file

TOOLS = "additional_chat_templates/tool_use.jinja"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub_server = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub_server.address)
    template = hub_server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=hub_server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    one = write_file(tmp_path / "one", [("a", "F32", [2000], 8000)]).read_bytes()
    two = write_file(tmp_path / "two", [("b", "BF16", [3], 6)]).read_bytes()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    common = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "README.md": b"#"}
    hub_server.repositories = {
        "o/sharded": {
            **common,
            "run.py": b"print()",
            INDEX_NAME: json.dumps(index).encode(),
            "model-1.safetensors": one,
            "model-2.safetensors": two,
            "pytorch_model.bin": b"pickle",
            "consolidated.safetensors": one,
            "original/model-1.safetensors": one,
        },
        "o/single": {**common, SINGLE_NAME: one},
        "o/pickled": {**common, "pytorch_model.bin": b"pickle"},
        "o/foreign": {
            **common,
            SINGLE_NAME: one,
            "config.json": b'{"model_type": "new", "auto_map": {"AutoModel": "run.Model"}}',
        },
        "o/known": {**common, "config.json": b'{"model_type": "phi3", "auto_map": {"AutoModel": "run.Model"}}'},
        "o/files-gated": {**common, "config.json": GATED},
        "o/empty": {"README.md": b"#"},
        "o/tokenizer": {"tokenizer.json": b"{}", "chat_template.jinja": b"{}", TOOLS: b"{}", SINGLE_NAME: one},
    }
    yield hub_server
    hub_server.shutdown()
    thread.join()
    hub_server.server_close()


def refusal(name: str, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        resolve(name, **options)
    return caught.value


def test_downloads_what_training_needs_and_nothing_else(server: Hub) -> None:
    announced: list[str] = []
    heard: list[tuple[str, int, int]] = []
    directory = resolve("o/sharded", say=announced.append, progress=lambda *call: heard.append(call))
    wanted = ["config.json", "model-1.safetensors", "model-2.safetensors", INDEX_NAME, "tokenizer.json"]
    assert sorted(server.sent) == wanted
    assert list(open_checkpoint(directory).entries) == ["a", "b"]
    sizes = {name: len(content) for name, content in server.repositories["o/sharded"].items()}
    weights = sizes["model-1.safetensors"] + sizes["model-2.safetensors"]
    small = sum(sizes[name] for name in wanted) - weights
    assert announced == [f"downloading o/sharded: {n} files, {size:,} bytes" for n, size in ((3, small), (2, weights))]
    of_weights = [done for what, done, total in heard if (what, total) == ("downloading o/sharded", weights)]
    assert of_weights == sorted(of_weights) and of_weights[-1] == weights and len(of_weights) > 1


def test_the_cache_answers_without_the_network(server: Hub) -> None:
    first = resolve("o/single")
    server.requests = 0
    assert resolve("o/single") == first
    assert resolve("o/single", revision=COMMIT) == first
    assert server.requests == 0
    (first / SINGLE_NAME).unlink()  # an incomplete snapshot is completed, and only that
    server.sent.clear()
    assert resolve("o/single", need_weights=False) == first
    assert server.requests == 0
    assert resolve("o/single") == first
    assert (first / SINGLE_NAME).exists()


def test_weights_only_when_needed(server: Hub) -> None:
    directory = resolve("o/single", need_weights=False)
    assert sorted(server.sent) == ["config.json", "tokenizer.json"]
    assert resolve("o/single") == directory
    assert sorted(server.sent) == ["config.json", SINGLE_NAME, "tokenizer.json"]


def test_a_tokenizer_needs_no_model_beside_it(server: Hub, tmp_path: Path) -> None:
    directory = resolve("o/tokenizer", tokenizer_only=True)
    assert found_in(directory, ["*", "*/*"]) == [TOOLS, "chat_template.jinja", "tokenizer.json"]
    server.requests = 0
    assert resolve("o/tokenizer", tokenizer_only=True) == directory
    assert server.requests == 0
    assert resolve(str(directory), tokenizer_only=True) == directory
    resolve("o/foreign", tokenizer_only=True)  # a model of its own code may have a plain tokenizer
    for name in ("o/empty", str(tmp_path)):
        assert "has no tokenizer" in refusal(name, tokenizer_only=True).message
    assert "has no config.json" in refusal("o/tokenizer").message


def test_says_what_to_do(server: Hub) -> None:
    server.refusals = {"o/gated": (403, "GatedRepo"), "o/private": (401, "RepoNotFound"), "o/bad-token": (403, "")}
    for name, says, hint in (
        ("o/gated", "its owner restricts access", "hf auth login"),
        ("o/files-gated", "its owner restricts access", "hf auth login"),
        ("o/private", "no such model", "hf auth login"),
        ("o/bad-token", "refuses access", "hf auth login"),
        ("o/absent", "no such model", "spelling"),
        ("o/pickled", f"has no {SINGLE_NAME}", "safetensors"),
        ("o/empty", "has no config.json", "transformers"),
    ):
        error = refusal(name)
        assert name in error.message and says in error.message, error.message
        assert hint in str(error.hint), error.hint
    assert "o/single@nowhere: no such revision" in refusal("o/single", revision="nowhere").message


def test_the_folder_of_an_adapter_is_named_as_one(tmp_path: Path) -> None:
    """It has no config.json of a model."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    error = refusal(str(tmp_path))
    assert "holds an adapter, not a whole model" in error.message and "base model" in str(error.hint)


def test_says_that_the_hub_cannot_be_reached(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        UsageError, match=r"o/m: no such directory, not in the local cache, and the download failed \("
    ) as caught:
        resolve("o/m")
    assert "local directory" in str(caught.value.hint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "(HF_HUB_OFFLINE is set)" in refusal("o/single").message
    assert server.requests == 0


def test_checks_the_space_before_it_downloads(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = hub.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage._replace(free=5000))
    with pytest.raises(OutOfSpaceError, match=r"takes 8\.\d+ kB, but only 5 kB are free"):
        resolve("o/single")
    assert SINGLE_NAME not in server.sent


def test_code_of_the_repository_is_refused_unless_asked_for(server: Hub) -> None:
    error = refusal("o/foreign", need_weights=False)
    assert "code from its own repository" in error.message and "trust_remote_code" in str(error.hint)
    assert "code from its own" in refusal("o/foreign").message
    assert SINGLE_NAME not in server.sent  # refused before the weights are fetched
    assert resolve("o/foreign", need_weights=False, trust_remote_code=True).is_dir()
    assert resolve("o/known", need_weights=False).is_dir()  # transformers has this one itself


def test_directories_are_taken_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(UsageError, match="is a file"):
        resolve(str(tmp_path / "config.json"))
    for name in ("./absent", "/absent/model", "a/b/c", "../x", "o/", "", "~no-such-user/model"):
        with pytest.raises(UsageError):
            resolve(name)


@pytest.mark.parametrize("kind", [[], {}, None, 7, "new"])
def test_code_of_its_own_is_refused_whatever_the_model_is_called(tmp_path: Path, kind: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "run.Model"}, "model_type": kind}))
    with pytest.raises(UsageError, match="needs code from its own repository"):
        hub.refuse_remote_code(tmp_path)
