"""Imports what a run imports, then runs `fuyou WORDS` in a forked child for every line it is sent. `nursery.py` starts it.

A line is a request as JSON: `words`, a program to run `first`, a `package` to import before it is forked, the `folder` to run
in, its `environment`, and the files `out` and `err` of its output. The answer is the child's number and, when it is over, its
exit code. The output of a finished command also says what it still has of threads, arenas, daemons and open files below the
folder `under` (if it names one), and by how much its memory has grown.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: F401 - what a run imports
import transformers
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama

from fuyou_cli.checkpoint.names import architecture_renames
from fuyou_cli.cli import app
from fuyou_cli.engine.describe import outlined, specified
from fuyou_cli.engine.skeleton import build
from fuyou_cli.swap.daemon import SwapDaemon
from fuyou_cli.swap.store import Arena
from tests import emulated

_NO_END = 70  # the command returned instead of ending the process


def main() -> None:
    emulated.register()
    _warm_up(json.loads(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["package"]:
            _import_all(request["package"])
        child = os.fork()
        if child == 0:
            os._exit(_run(request))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _warm_up(models: list[tuple[str, int, int]]) -> None:
    """Loads what every run would pay for otherwise: modules that are imported late, names that architectures give, and what
    torch learns of operators without data and keeps by their sizes (folder of a model, rows and tokens of a micro-batch). What
    exists by then is hidden from the garbage collector, or every child would copy it. No thread may be left, because a child
    would not have it. With one thread and no device, torch starts none."""
    # packages that may not be there, or take seconds to import
    _import_all("fuyou_cli", but=(".__main__", ".adapters", ".lm_eval_model"))
    for folder, rows, tokens in models:
        model = build(transformers.AutoConfig.from_pretrained(folder), dtype="bfloat16", attention="sdpa")
        architecture_renames(model, ())
        specified(outlined(model), dtype="bfloat16", micro_batch_size=rows, max_seq_len=tokens, head_chunk_tokens=0)
    gc.collect()
    gc.freeze()


def _import_all(package: str, *, but: tuple[str, ...] = ()) -> None:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not any(name in module.name for name in but):
            importlib.import_module(module.name)


def _run(request: dict[str, Any]) -> int:
    _become(request)
    code, before = _NO_END, _anonymous_kib()
    try:
        exec(request["first"], {})
        app.main(request["words"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    if request["under"]:
        for kept in _left(request["under"]):
            print("LEAKED", kept)
        print("KEPT", _anonymous_kib() - before)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _become(request: dict[str, Any]) -> None:
    """Gives the child a process group of its own, the request's folder, environment and output, and nothing to read."""
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)


def _anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _left(under: str) -> Iterator[str]:
    """Says which files below the folder, threads, arenas and daemons are still open."""
    gc.collect()
    for link in Path("/proc/self/fd").iterdir():
        try:
            path = str(link.readlink())
        except OSError:
            continue
        if path.startswith(f"{under}/"):
            yield f"open: {path}"
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            yield f"thread: {thread.name}"
    for thing in gc.get_objects():
        if type(thing) in (Arena, SwapDaemon) and thing._handle is not None:
            yield f"not closed: {type(thing).__name__}"


if __name__ == "__main__":
    main()
