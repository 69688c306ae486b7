#!/usr/bin/env bash
# Make .venv ready to use, or find that it is, in a few milliseconds. `make` calls this before
# whatever else it does. Written for bash 3.2 and BSD tools, which is what macOS has.
#
# Environment: TORCH=cpu|cuda (empty: keep what is installed, else look for an NVIDIA driver)
#              PYTHON=/path/to/python3 (empty: keep that of .venv, else look for one)
#
# Three files in .venv say how far it is:
#   .made-by-setup   this script made the folder, so this script may delete it
#   .torch           cpu or cuda
#   .ready           written last; holds what the folder was made from
set -eu
cd "$(dirname "$0")/.."

torch_pin=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)
tested_minors="3.11 3.12 3.13"

say() { printf '[setup] %s\n' "$*"; }
stop() {
    printf '[setup] stopped: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '[setup]   %s\n' "$line" >&2; done
    exit 1
}

fingerprint() {
    # The folder counts: a moved .venv has scripts and an editable install that point elsewhere.
    printf '%s\n' "$PWD"
    cat pyproject.toml constraints.txt scripts/setup.sh | cksum
}

works() { "$1" -c 'import sys' >/dev/null 2>&1; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

find_python() {
    # Tested versions first, in the order people have them; then anything newer than 3.11.
    local found="" newer="" candidate version
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.13 python3.12 python3.11 python
    fi
    for candidate in "$@"; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        version=$(version_of "$candidate")
        [ -n "$version" ] || continue
        case " $tested_minors " in
            *" $version "*) printf '%s\n' "$candidate"; return ;;
        esac
        found="$found $candidate is $version;"
        if [ "${version%%.*}" -eq 3 ] && [ "${version#*.}" -gt 13 ]; then
            newer=${newer:-$candidate}
        fi
    done
    if [ -n "$newer" ]; then
        say "note: Python $(version_of "$newer") is newer than the tested ones ($tested_minors)" >&2
        printf '%s\n' "$newer"
        return
    fi
    stop "the lab needs Python 3.11 or newer; found:${found:- none}" \
        "Debian, Ubuntu:  sudo apt install python3.12 python3.12-venv   (or 3.11, 3.13: what your release has)" \
        "Ubuntu 22.04:    python3 -m pip install uv; python3 -m uv python install 3.12;" \
        "                 then  make lab PYTHON=\"\$(python3 -m uv python find --managed-python 3.12)\"" \
        "Fedora:          sudo dnf install python3.12" \
        "macOS:           brew install python@3.12" \
        "anywhere:        conda env create -f environment.yml" \
        "already there under another name?  make lab PYTHON=/path/to/python3.12"
}

check_python() {
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 || stop \
        "$1 has no venv module (Debian and Ubuntu ship it apart)" \
        "sudo apt install python$(version_of "$1")-venv"
    if [ "$(uname -s)" = Darwin ] &&
        [ "$("$1" -c 'import platform; print(platform.machine())')" = x86_64 ]; then
        stop "PyTorch $torch_pin has no build for Intel Macs, or for an Intel Python on Apple silicon" \
            "Apple silicon: brew install python@3.12, then make lab PYTHON=/opt/homebrew/bin/python3.12" \
            "Intel Mac: work on a Linux machine and use \`make lab ARGS=--no-browser\` there"
    fi
}

other_python() {
    # Does PYTHON name another version than .venv's? One that will not do stops here: nothing is lost.
    local asked
    [ -n "${PYTHON:-}" ] || return 1
    asked=$(find_python) || exit 1
    [ "$(version_of "$asked")" != "$(version_of .venv/bin/python)" ] || return 1
    check_python "$asked"
}

detect_torch() {
    if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; then
        echo cuda
    else
        echo cpu
    fi
}

check_disk() {
    local need_gb=$1 free_kb
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kb" -ge $((need_gb * 1024 * 1024)) ] || stop \
        "this needs about $need_gb GB of disk; $((free_kb / 1024 / 1024)) GB are free in $PWD"
}

pip_install() {
    # The user's own pip settings stay in force (mirrors, proxies), except --user, which a
    # virtual environment refuses.
    PIP_USER=0 .venv/bin/python -m pip install --disable-pip-version-check "$@"
}

install_torch() {
    # On a terminal pip shows its progress: the download is the longest step.
    local quiet=--quiet
    [ -t 1 ] && quiet=--progress-bar=on
    if [ "$(uname -s)" = Darwin ]; then
        say "PyTorch $torch_pin (about 100 MB)"
        pip_install $quiet "torch==$torch_pin" -c constraints.txt || torch_failed
    elif [ "$1" = cuda ]; then
        say "PyTorch $torch_pin, CUDA build (several GB: 5 to 15 minutes)"
        # A local wheel folder may hold the CPU build, which sorts as the newer of the two.
        pip_install $quiet "torch==$torch_pin,!=$torch_pin+cpu" -c constraints.txt || torch_failed
    else
        say "PyTorch $torch_pin, CPU build (about 200 MB: a minute or two)"
        # First where pip is set up to look, then uv, which knows where PyTorch keeps its CPU builds.
        pip_install --quiet "torch==$torch_pin+cpu" -c constraints.txt 2>/dev/null && return
        pip_install --quiet uv && .venv/bin/python -m uv pip install --no-config --no-deps \
            --python .venv --torch-backend cpu "torch==$torch_pin" && return
        say "the CPU build was not found (above: what uv says): taking the package registry's instead."
        say "It works without a GPU too, but it is the CUDA build: several GB, 5 to 15 minutes."
        say "To avoid that, add PyTorch's CPU index to pip's settings: docs/install.md"
        check_disk 10
        pip_install $quiet "torch==$torch_pin" -c constraints.txt || torch_failed
    fi
}

torch_failed() {
    stop "pip could not install PyTorch $torch_pin (its own message stands above)" \
        "'No matching distribution': this Python or system has no build; try make lab PYTHON=python3.12" \
        "a connection error: check the network or the proxy, then run the same command again"
}

if [ "${1:-}" = fingerprint ]; then fingerprint; exit 0; fi

case "${TORCH:-}" in
    '' | cpu | cuda) ;;
    *) stop "TORCH=$TORCH is unknown" "choose TORCH=cpu or TORCH=cuda, or leave it out" ;;
esac
ready() {
    installed=$(cat .venv/.torch 2>/dev/null || true)
    [ -e .venv/.ready ] && [ "$(cat .venv/.ready)" = "$(fingerprint)" ] &&
        [ "${TORCH:-$installed}" = "$installed" ] && works .venv/bin/python && ! other_python
}
if ready; then exit 0; fi
. scripts/lock.sh
if ready; then exit 0; fi

torch=${TORCH:-${installed:-$(detect_torch)}}
if [ -e .venv ]; then
    [ -e .venv/.made-by-setup ] || stop \
        ".venv exists, but this Makefile did not make it; it is left as it is" \
        "move it away or delete it (rm -rf .venv), then run the same command again" \
        "to use it, or any other environment that has the lab: make lab PY=./.venv/bin/python"
    # Only a finished environment, of the same place and build, can be brought up to date. Of one
    # that was interrupted nobody knows which packages are whole.
    if [ ! -e .venv/.ready ] || [ "$(head -n 1 .venv/.ready)" != "$PWD" ] ||
        [ "$torch" != "$installed" ] || ! works .venv/bin/python || other_python; then
        say "starting .venv over (interrupted, moved, broken, for another Python or build of PyTorch)"
        rm -rf .venv
    fi
fi

python=.venv/bin/python
if [ ! -e .venv ]; then
    python=$(find_python)
    check_python "$python"
fi
say "Python $(version_of "$python"), PyTorch for $torch; this happens once and takes a few minutes"
if [ ! -e .venv ]; then
    if [ "$torch" = cuda ]; then check_disk 10; else check_disk 3; fi
    mkdir .venv
    touch .venv/.made-by-setup
    "$python" -m venv .venv
fi
rm -f .venv/.ready
printf '%s\n' "$torch" > .venv/.torch

install_torch "$torch"
say "JupyterLab, the lab itself and its tools (about 150 packages: 1 to 2 minutes)"
pip_install --quiet -e '.[notebook,dev]' -c constraints.txt || stop \
    "pip could not install the lab's packages (its own message stands above)" \
    "run the same command again; pip keeps what it has downloaded"
fingerprint > .venv/.ready
say "ready"
