"""The layers, and what is nowhere in the package. Read from the syntax tree: nothing is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fuyou_cli"
LAYERS = {
    "core": 0, "recipe": 1, "spec": 1, "planner": 2, "swap": 3, "engine": 4, "data": 5, "checkpoint": 5, "adapters": 5,
    "training": 6, "machine": 6, "advice": 7, "quickstart": 7, "inference": 7, "cli": 8,
}  # fmt: skip
PURE = [name for name, layer in LAYERS.items() if layer <= 2]  # neither torch nor the extension, not even inside
NATIVE = "fuyou_cli._native"
TERMINAL = {"rich", "typer"}
BANNED_IMPORTS = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
BANNED_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput",
    "subprocess.getstatusoutput", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load",
    "tempfile.mktemp",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """Holds one imported module by its full name; `eager` when it happens as soon as the file is imported."""

    module: str
    line: int
    eager: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def module(self) -> str:
        """The full name it is imported by; a package's own file has the package's."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def layer(self) -> str:
        """The folder under the package; "" for the package's own files."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else ""


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Source(path=path, text=text, tree=ast.parse(text, str(path))))
    return tuple(found)


def in_layer(name: str) -> list[Source]:
    return [source for source in sources() if source.layer == name]


@cache
def imports(source: Source) -> tuple[Import, ...]:
    return tuple(_imports(source))


def _imports(source: Source) -> Iterator[Import]:
    package = ("fuyou_cli", *source.path.relative_to(PACKAGE).parts[:-1])
    for node, eager in _walk(source.tree, eager=True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=alias.name, line=node.lineno, eager=eager)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            for alias in node.names:
                yield Import(module=f"{module}.{alias.name}", line=node.lineno, eager=eager)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "import_module"):
            named = node.args[0] if node.args else None
            if isinstance(named, ast.Constant) and isinstance(named.value, str):
                yield Import(module=named.value, line=node.lineno, eager=eager)


def _walk(node: ast.AST, *, eager: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it runs on import: not inside a function, not under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        yield child, eager
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield part, False
            for part in child.orelse:
                yield part, eager
                yield from _walk(part, eager=eager)
            continue
        lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _walk(child, eager=eager and not lazy)


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "fuyou_cli" and len(parts) > 1 else None


def top(module: str) -> str:
    return module.split(".")[0]


def dotted(node: ast.expr) -> str:
    """Returns `a.b.c` of such an expression, "" of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_every_folder_has_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and list(path.rglob("*.py"))}
    assert folders == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_only_go_down(layer: str) -> None:
    upwards = [
        f"{source.name}:{found.line}: {layer} ({LAYERS[layer]}) imports {found.module}"
        for source in in_layer(layer)
        for found in imports(source)
        if (other := layer_of(found.module)) in LAYERS and other != layer and LAYERS[other] >= LAYERS[layer]
    ]
    assert upwards == []
    assert any(imports(source) for source in in_layer(layer))


def test_no_circles() -> None:
    """Finds none inside a folder either: whoever reads a module need not have read it to understand what it imports."""
    graph = imported_modules()
    assert [name for name in graph if name in reached(graph, graph[name])] == []


@cache
def imported_modules() -> dict[str, set[str]]:
    """Each module of the package and those it imports, also inside functions and under TYPE_CHECKING."""
    known = {source.module for source in sources()} - {"fuyou_cli"}

    def found(name: str) -> str:
        """The module that an imported name is, or is in."""
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    return {
        source.module: {found(one.module) for one in imports(source)} - {"", source.module}
        for source in sources()
        if source.module in known
    }


def reached(graph: Mapping[str, set[str]], begin: set[str]) -> set[str]:
    seen: set[str] = set()
    waiting = list(begin)
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"a"}}
    assert {name for name in graph if name in reached(graph, graph[name])} == {"a", "b", "c"}


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "swap"])
def test_only_swap_sees_the_extension(layer: str) -> None:
    found = [f"{s.name}:{i.line}" for s in in_layer(layer) for i in imports(s) if i.module.startswith(NATIVE)]
    assert found == []
    assert any(i.module.startswith(NATIVE) for s in in_layer("swap") for i in imports(s))


@pytest.mark.parametrize("layer", [*PURE, "swap"])
def test_planning_needs_no_torch(layer: str) -> None:
    heavy = {"torch", "transformers", "datasets"}
    found = [f"{s.name}:{i.line}: {i.module}" for s in in_layer(layer) for i in imports(s) if top(i.module) in heavy]
    assert found == []


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "cli"])
def test_only_the_command_line_draws(layer: str) -> None:
    found = [f"{s.name}:{i.line}: {i.module}" for s in in_layer(layer) for i in imports(s) if top(i.module) in TERMINAL]
    assert found == []


def test_the_planner_reads_no_clock_file_or_environment() -> None:
    outside = {"os", "time", "datetime", "random", "pathlib", "socket", "subprocess", "sys", "io", "shutil"}
    planner = in_layer("planner")
    assert [f"{s.name}:{i.line}: {i.module}" for s in planner for i in imports(s) if top(i.module) in outside] == []
    assert not any(isinstance(n, ast.Name) and n.id == "open" for s in planner for n in ast.walk(s.tree))


# ---- what is nowhere -------------------------------------------------------------------------------------------------


def test_no_banned_calls() -> None:
    found = [
        f"{source.name}:{node.lineno}: {dotted(node.func)}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and dotted(node.func) in BANNED_CALLS
    ]
    switched_on = [
        f"{source.name}:{node.lineno}: {node.arg}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle") and not _is_false(node.value)
    ]
    assert found + switched_on == []


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_only_folders_made_on_the_spot_are_removed() -> None:
    """Nothing of a person's is ever deleted as a folder."""
    removing = [source for source in sources() if "shutil.rmtree" in _calls(source)]
    assert [source.name for source in removing if "tempfile.mkdtemp" not in _calls(source)] == []


def _calls(source: Source) -> set[str]:
    return {dotted(node.func) for node in ast.walk(source.tree) if isinstance(node, ast.Call)}


def test_no_banned_imports() -> None:
    found = [f"{s.name}:{i.line}: {i.module}" for s in sources() for i in imports(s) if top(i.module) in BANNED_IMPORTS]
    assert found == []


def test_no_catch_all() -> None:
    """Nothing is swallowed: no `except:`, and `except Exception` or `except BaseException` only where it is raised again. One
    place is another matter: loggers of other makers may raise anything, which is said, and must not end a run."""
    found = [
        source.name
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and _catches_all(node)
    ]
    assert found == ["fuyou_cli/training/loggers.py"]


def _catches_all(node: ast.ExceptHandler) -> bool:
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    names = {"" if kind is None else dotted(kind) for kind in kinds}
    raised = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in node.body)
    return "" in names or (bool(names & {"Exception", "BaseException"}) and not raised)


def test_no_file_name_twice() -> None:
    """Says by a name which file is meant, wherever it is spoken of."""
    assert shared_names() == set()


def shared_names() -> set[str]:
    folders = defaultdict(list)
    for source in sources():
        folders[source.path.stem].append(source.path.parent)
    return {name for name, found in folders.items() if len(found) > 1} - {"__init__"}


def test_no_class_name_twice() -> None:
    """Finds one meaning for the name of a public class, whichever file speaks of it; an alias of a type takes no such name."""
    classes, files = set[str](), defaultdict(set)
    for source in sources():
        for node in source.tree.body:
            for name in _names_given(node):
                files[name].add(source.name)
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.add(node.name)
    assert {name: sorted(files[name]) for name in classes if len(files[name]) > 1} == {}
    assert "Plan" in classes


def _names_given(node: ast.stmt) -> list[str]:
    """Returns the names that a statement of a module gives to a class, a function or a value."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    return [dotted(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    found = [
        f"{source.name}:{number}"
        for source in sources()
        for number, line in enumerate(source.text.splitlines(), start=1)
        if any(mark in line for mark in marks)
    ]
    assert found == []


def test_annotations_are_postponed() -> None:
    found = [
        source.name
        for source in sources()
        if any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in source.tree.body)
        and "from __future__ import annotations" not in source.text
    ]
    assert found == []


# ---- in a process of its own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["--help"], ["finetune", "--help"], ["recipes", "ls"]], ids=str)
def test_light_commands_load_nothing_heavy(command: list[str]) -> None:
    program = (
        "import sys\n"
        "from fuyou_cli.cli.app import main\n"
        f"sys.argv = ['fuyou', *{command!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'fuyou_cli._native'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
