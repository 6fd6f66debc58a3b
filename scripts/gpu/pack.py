"""Wheels for a machine without network: what fuyou needs beside torch and transformers, and fuyou itself, built.

Standard library only: the machine where they are installed has nothing else yet.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import MiB

ROOT = Path(__file__).resolve().parents[2]
LABEL = "pack.json"
MOST = 60 * MiB
GIVEN = ("torch", "transformers")  # there already, with everything that they need
LEFT_OUT = ("pyarrow",)  # JSON lines are read without it, and it alone would fill the pack
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
SOURCE_ONLY = ("antlr4-python3-runtime==4.9.*",)  # omegaconf's; the registry has no wheel of it
OLDEST_GLIBC, NEWEST_GLIBC = 5, 28  # 2.x: wheels for a newer one are not taken
EXTENSION = "fuyou_cli/_native.abi3.so"


# ---- what is needed --------------------------------------------------------------------------------------------------


def name_of(requirement: str) -> str:
    """The normalised name of a requirement or wheel."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def closure(names: Iterable[str], requires: Callable[[str], Sequence[str]]) -> set[str]:
    """`names` and everything that they require, directly or not."""
    known: set[str] = set()
    waiting = [name_of(name) for name in names]
    while waiting:
        if (name := waiting.pop()) not in known:
            known.add(name)
            waiting += [name_of(one) for one in requires(name)]
    return known


def wanted(project: dict[str, Any], given: set[str]) -> list[str]:
    """The requirements to pack: of the project and of its tests, but for what is `given`, unless we ask for a version of it."""
    tools = [one for one in project["optional-dependencies"]["test"] if name_of(one) in TEST_TOOLS]
    asked = [one for one in project["dependencies"] if name_of(one) not in (*GIVEN, *LEFT_OUT)]
    return [one for one in (*asked, *tools) if name_of(one) not in given or re.search(r"[<>=~!]", one)]


def _environment(python: str) -> dict[str, str]:
    """What markers are asked of: the other machine's interpreter."""
    return {
        "python_version": python, "python_full_version": f"{python}.0", "implementation_name": "cpython",
        "platform_python_implementation": "CPython", "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix",
        "extra": "",
    }  # fmt: skip


def installed_requires(python: str) -> Callable[[str], list[str]]:
    """What packages installed here require under that version of Python."""
    return lambda name: that_apply(_installed(name), python)


def _installed(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        if name in GIVEN:
            raise UsageError(
                f"--pack: {name} is not installed here, so what it brings along is not known",
                hint="run it with the interpreter that runs fuyou (.venv/bin/python scripts/gpu_check --pack DIR)",
            ) from None
        return []


def that_apply(requirements: Iterable[str], python: str) -> list[str]:
    from pip._vendor.packaging.requirements import Requirement

    parsed = [Requirement(one) for one in requirements]
    return [str(one) for one in parsed if one.marker is None or one.marker.evaluate(_environment(python))]


def missing(wheels: Sequence[Path], asked: Iterable[str], given: set[str], python: str) -> list[str]:
    """What these wheels and what is given leave unmet of `asked` and of the wheels' own requirements."""
    from pip._vendor.packaging.requirements import Requirement

    metadata = {name_of(wheel.name.split("-")[0]): _metadata(wheel) for wheel in wheels}
    unmet, seen, waiting = [], set(), [(one, "fuyou") for one in asked]
    while waiting:
        text, by = waiting.pop()
        need = Requirement(text)
        name = name_of(need.name)
        if (found := metadata.get(name)) is None:
            if name not in given:
                unmet.append(f"{text} (for {by})")
        elif not need.specifier.contains(found["Version"], prereleases=True):
            unmet.append(f"{text} (for {by}; packed is {found['Version']})")
        elif name not in seen:
            seen.add(name)
            waiting += [(one, name) for one in that_apply(found.get_all("Requires-Dist") or [], python)]
    return sorted(unmet)


def _metadata(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        return HeaderParser().parsestr(archive.read(name).decode())


# ---- packing ---------------------------------------------------------------------------------------------------------


def pack(folder: Path, python: str) -> None:
    """Fills `folder`. Raises UsageError where something is missing or the pack grows too large."""
    _emptied(folder)
    requires = installed_requires(python)
    given = closure(GIVEN, requires)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = wanted(project, given)
    print(f"packing for Python {python}: {', '.join(asked)}", flush=True)
    _pip("wheel", "--no-deps", "--wheel-dir", folder, *SOURCE_ONLY)
    _pip("download", "--dest", folder, "--find-links", folder, *_platform(python), *asked, "pip")
    _pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    wheels = sorted(folder.glob("*.whl"))
    if unmet := missing(wheels, asked, given, python):
        raise UsageError(f"--pack: Python {python} would miss {', '.join(unmet)}")
    size = sum(wheel.stat().st_size for wheel in wheels)
    if size > MOST:
        largest = sorted(wheels, key=lambda wheel: -wheel.stat().st_size)[:3]
        raise UsageError(f"--pack: {size / MiB:.1f} MiB, more than {MOST // MiB}: {', '.join(one.name for one in largest)}")
    glibc = _glibc(folder)
    label = {"python": python, "machine": platform.machine(), "requirements": asked, "sources": sources(), "glibc": glibc}
    (folder / LABEL).write_text(json.dumps(label, indent=1) + "\n", encoding="utf-8")
    print(f"{len(wheels)} wheels, {size / MiB:.1f} MiB, in {folder}; the extension needs glibc {glibc} or newer")


def _emptied(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    there = list(folder.iterdir())
    if any(path.suffix != ".whl" and path.name != LABEL for path in there):
        raise UsageError(f"--pack: {folder} has other files in it", hint="name a new folder")
    for path in there:
        path.unlink()


def _platform(python: str) -> list[str]:
    machine = platform.machine()
    names = [f"manylinux_2_{minor}_{machine}" for minor in range(OLDEST_GLIBC, NEWEST_GLIBC + 1)]
    names += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    words = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return [*words, *(word for name in names for word in ("--platform", name))]


def _pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *map(str, words)]
    if subprocess.run(command, check=False).returncode != 0:
        raise UsageError(f"--pack: pip {words[0]} failed, see above")


def _glibc(folder: Path) -> str:
    """The oldest glibc that the packed extension loads with: the newest version that it names."""
    with zipfile.ZipFile(_own_wheel(folder)) as archive:
        found = re.findall(rb"GLIBC_2\.(\d+)", archive.read(EXTENSION))
    return f"2.{max(map(int, found))}"


def _own_wheel(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("fuyou-*.whl"))))


def sources() -> str:
    """A name for the C sources: an extension built of others is not this checkout's."""
    held = hashlib.sha256()
    for path in sorted(path for path in (ROOT / "native").rglob("*") if path.suffix in (".c", ".h", ".py", ".txt", ".map")):
        held.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return held.hexdigest()[:16]


# ---- installing ------------------------------------------------------------------------------------------------------


def install(wheels: Path, venv: Path, *, given: Sequence[str] = GIVEN) -> Path:
    """A virtual environment in `venv` that sees what this interpreter sees, with the wheels in it and the extension in this
    checkout where none is; its interpreter. Nothing is fetched. Raises UsageError."""
    if not (wheels / LABEL).is_file():
        raise UsageError(f"--wheels: {wheels} was not filled by scripts/gpu_check --pack")
    label = json.loads((wheels / LABEL).read_text(encoding="utf-8"))
    _fits(label)
    python = venv / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", "--system-site-packages", venv], check=True)
    # The interpreter may itself live in a virtual environment; a new one sees only that one's base.
    pure = subprocess.run([python, "-c", _PURELIB], check=True, capture_output=True, text=True).stdout.strip()
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(pure, "seen.pth").write_text("".join(f"{path}\n" for path in seen), encoding="utf-8")
    absent = subprocess.run([python, "-c", _ABSENT, *given], check=True, capture_output=True, text=True).stdout.split()
    if absent:
        raise UsageError(
            f"{' and '.join(absent)} cannot be found by {sys.executable}", hint="run this with a Python that has them"
        )
    (pip,) = wheels.glob("pip-*.whl")  # runs as it is
    command = [python, pip / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-index"]
    for words in (["--find-links", wheels, *label["requirements"]], ["--no-deps", _own_wheel(wheels)]):
        if subprocess.run([*command, *words], check=False).returncode != 0:
            raise UsageError("--wheels: they cannot be installed, see above")
    _put_extension(wheels)
    return python


_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
_ABSENT = "import sys; from importlib.util import find_spec; print(*[one for one in sys.argv[1:] if find_spec(one) is None])"


def _fits(label: dict[str, Any]) -> None:
    here, machine = f"{sys.version_info[0]}.{sys.version_info[1]}", platform.machine()
    if (label["python"], label["machine"]) != (here, machine):
        packed = f"Python {label['python']} on {label['machine']}"
        raise UsageError(f"--wheels: packed for {packed}, this is {here} on {machine}", hint=f"--pack DIR --python {here}")
    if label["sources"] != sources():
        raise UsageError("--wheels: the extension was built of other C sources than this checkout's", hint="pack again")


def _put_extension(wheels: Path) -> None:
    """Commands that run from a checkout look for it there."""
    path = ROOT / EXTENSION
    if path.exists():
        return
    with zipfile.ZipFile(_own_wheel(wheels)) as archive:
        content = archive.read(EXTENSION)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(content)
    new.rename(path)
