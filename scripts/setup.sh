# Sourced by scripts/test and scripts/quickstart: everything a fresh Debian 12+ / Ubuntu 24.04+ machine lacks.
#
#   setup [EXTRA]   system packages, .venv, torch, and this checkout installed into it; EXTRA is a pip extra (test)
#
# The second time it takes a moment: .venv remembers what it was made from. Environment:
#   PYTHON                 the interpreter to build .venv with (default: the newest python3 >= 3.11 found)
#   FUYOU_WITHOUT_URING=1  build without io_uring (no liburing-dev needed)

PINNED_TORCH=2.13.0
CPU_BUILDS=https://download.pytorch.org/whl/cpu # what PyPI has for x86 is the CUDA build, some GB

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

say() { printf '%s\n' "$@" >&2; }
die() { say "$@"; exit 1; }

# The interpreter: $PYTHON, or the first that is new enough. Empty where there is none.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

# Debian names of what is missing, one per line. $1: the interpreter, or empty.
missing_packages() {
    local version=3
    if [ -z "$1" ]; then
        printf '%s\n' python3 python3-venv python3-dev
    else
        version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        # Interpreters that did not come from Debian bring both themselves.
        "$1" -c 'import ensurepip, venv' 2>/dev/null || echo "python$version-venv"
        "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
            echo "python$version-dev"
    fi
    if ! command -v cc >/dev/null; then
        printf '%s\n' gcc libc6-dev
    elif ! echo '#include <stdlib.h>' | cc -E - >/dev/null 2>&1; then
        echo libc6-dev
    fi
    if [ "${FUYOU_WITHOUT_URING:-0}" != 1 ]; then
        [ -e /usr/include/liburing.h ] || [ -e /usr/local/include/liburing.h ] || echo liburing-dev
    fi
    [ -n "$(ls -A /etc/ssl/certs 2>/dev/null)" ] || echo ca-certificates
}

# Installs system packages: as root at once, else after a yes, else it says what to run.
install_packages() {
    local as_root=() answer
    if ! command -v apt-get >/dev/null; then
        die "Missing on this machine (Debian's names): $*" "Install them with the system's package manager, then run this again."
    fi
    if [ "$(id -u)" != 0 ]; then
        say "Missing system packages: $*"
        if [ -t 0 ] && command -v sudo >/dev/null; then
            read -r -p "Install them now with sudo apt-get? [y/N] " answer
            [[ $answer == [yY]* ]] && as_root=(sudo)
        fi
        if [ ${#as_root[@]} = 0 ]; then
            die "Run this as an administrator, then start again:" "  sudo apt-get update && sudo apt-get install -y $*"
        fi
    fi
    say "system packages: installing $*"
    if ! { "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } \
        >"$root/build/apt.log" 2>&1 </dev/null; then
        tail -n 15 "$root/build/apt.log" >&2
        die "apt-get failed; the whole log is build/apt.log"
    fi
}

# The version of torch that an interpreter sees, if it is 2.10 or newer.
usable_torch() {
    "$1" - <<'PYTHON' 2>/dev/null || true
from importlib import metadata
version = metadata.version("torch")
if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= (2, 10):
    print(version)
PYTHON
}

gpu_seen() { [ -e /dev/nvidia0 ] || [ -e /dev/dxg ] || nvidia-smi -L >/dev/null 2>&1; }

# pip, quietly, its output in build/pip.log; its exit status. Python compiles modules as they are imported, a fifth of them.
pip_try() {
    "$venv/bin/python" -m pip install --no-compile --quiet --disable-pip-version-check --no-input "$@" \
        >"$root/build/pip.log" 2>&1 </dev/null
}

# The same, with the last lines where it fails: then nothing goes on.
pip_install() {
    if ! pip_try "$@"; then
        tail -n 25 "$root/build/pip.log" >&2
        die "pip failed; the whole log is build/pip.log"
    fi
}

# A .venv with pip. Only one made here is ever made anew: another may hold somebody's work.
ready_venv() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    if [ ! -e "$venv" ] || [ -e "$venv/made-by-fuyou" ] || [ -e "$root/build/venv-unfinished" ]; then
        make_venv "$1"
        return
    fi
    "$venv/bin/python" -m ensurepip >"$root/build/pip.log" 2>&1 &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    die "$venv exists and has no pip that works (uv makes such ones), and it was not made by this script." \
        "Put pip into it (uv pip install pip), or move it away; then start again."
}

# .venv, seeing the system's packages when torch is among them.
make_venv() {
    local python=$1 system_torch options=()
    system_torch=$(usable_torch "$python")
    [ -n "$system_torch" ] && options=(--system-site-packages)
    say "environment: $venv ($("$python" --version))"
    touch "$root/build/venv-unfinished" # beside it, as --clear would take it along: one cut short is made anew
    "$python" -m venv --clear "${options[@]}" "$venv" || die "python -m venv failed"
    touch "$venv/made-by-fuyou" && rm "$root/build/venv-unfinished"
    # The interpreter may itself live in a virtual environment; a new one sees only that one's base.
    if [ -n "$system_torch" ] && [ -z "$(usable_torch "$venv/bin/python")" ]; then
        "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
            >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/installed_torch.pth"
    fi
}

# Fetches torch for this machine; sets $why. Without a GPU the CPU build: what pip knows here first, then PyTorch's index.
fetch_torch() {
    if gpu_seen; then
        say "torch: no 2.10 or newer installed; fetching $PINNED_TORCH, pip's build for this machine's GPU (some GB)"
        pip_install "torch==$PINNED_TORCH"
        why="pip's default build, as there is a GPU"
        return
    fi
    say "torch: no 2.10 or newer installed and no GPU seen; fetching a CPU build of $PINNED_TORCH"
    why="no GPU was seen"
    pip_try "torch==$PINNED_TORCH+cpu" && return
    pip_try --extra-index-url "$CPU_BUILDS" --retries 1 --timeout 15 "torch==$PINNED_TORCH+cpu" && return
    say "torch: no CPU build at hand, nor at $CPU_BUILDS; fetching pip's default (some GB where that is a CUDA build)"
    pip_install "torch==$PINNED_TORCH"
    why="no GPU was seen, but no CPU build could be had"
}

# torch before everything else: an installed one is kept, or the pinned one is fetched; then nothing may change it.
choose_torch() {
    local version build why="already installed, and 2.10 or newer is wanted"
    [ -n "$(usable_torch "$venv/bin/python")" ] || fetch_torch
    version=$(usable_torch "$venv/bin/python")
    build=$("$venv/bin/python" -W ignore -c 'import torch; print("CUDA " + torch.version.cuda if torch.version.cuda else "CPU")') ||
        die "torch $version is installed and does not import, see above"
    say "torch: $version, $build build: $why"
    echo "torch==$version" >"$venv/constraints.txt"
}

# ON or OFF for a CMake option, always said: a build folder remembers what it was told once.
on_off() { [ "$1" = "$2" ] && echo ON || echo OFF; }

# What the installation depends on: changed sources, options or extras install again.
fingerprint() {
    (cd "$root" && find native pyproject.toml -type f -print0 | sort -z | xargs -0 sha256sum &&
        echo "$1 ${FUYOU_WITHOUT_URING:-0}") | sha256sum | cut -d' ' -f1
}

# Whether what was installed last is this checkout with these options, and with the extra $1 or, without one, with any.
installed() {
    local stamps=("$venv"/installed-*) extra
    [ ${#stamps[@]} = 1 ] && [ -e "${stamps[0]}" ] || return # of two, nobody knows which one is the last
    extra=${stamps[0]##*/installed-}
    [ "$extra" != run ] || extra=
    [ -z "$1" ] || [ "$extra" = "$1" ] || return
    [ "$(cat "${stamps[0]}")" = "$(fingerprint "$extra")" ]
}

# The system's packages, and a .venv with pip.
prepare() {
    local python missing
    [ "$(uname -s)" = Linux ] || die "fuyou runs on Linux (on Windows inside WSL2)"
    mkdir -p "$root/build"

    python=$(find_python)
    missing=$(missing_packages "$python")
    if [ -n "$missing" ]; then
        # shellcheck disable=SC2086  # package names, one word each
        install_packages $missing
        python=$(find_python)
    fi
    [ -n "$python" ] || die "Python 3.11 or newer is needed; this machine has $(python3 --version 2>&1 || echo none)." \
        "Name one with PYTHON=/path/to/python."

    ready_venv "$python"
}

setup() {
    local extra=${1:-} want
    prepare
    if installed "$extra"; then
        say "torch: $(usable_torch "$venv/bin/python"), as installed before"
        return
    fi
    choose_torch
    want=$(fingerprint "$extra") # before: sources that change while they are built are built again
    say "fuyou: building and installing into .venv"
    rm -f "$venv"/installed-* # there is one extension in it: what an earlier stamp says is no longer so
    pip_install --constraint "$venv/constraints.txt" \
        --config-settings "cmake.define.FUYOU_WITHOUT_URING=$(on_off "${FUYOU_WITHOUT_URING:-0}" 1)" \
        --editable "$root${extra:+[$extra]}"
    # Compiles what every run imports: once, here, not in each of the first processes. What fails is told by who needs it.
    "$venv/bin/python" -W ignore -c 'import fuyou_cli.engine.executor, transformers.models.llama.modeling_llama' \
        >/dev/null 2>&1 || true
    echo "$want" >"$venv/installed-${extra:-run}"
}
