#!/usr/bin/env bash
# Run the tests at an end of what pyproject.toml allows, each in a new environment:
#
#   scripts/versions.sh lowest [PYTEST ARGUMENTS]   the oldest version of every direct dependency
#   scripts/versions.sh newest [PYTEST ARGUMENTS]   the newest of everything, without pins
#
# The environments are made again each time, in build/versions-*, and .venv is not touched. The counts
# at the end belong into the table of docs/versions.md.
#
# Environment: PYTHON=3.13   the Python to use, by version or path (default: python3)
#              TORCH=cpu|cuda  which build of PyTorch (default: what this machine can use)
#              WITH="torch==2.13.0"   further requirements, to test another combination
set -eu
cd "$(dirname "$0")/.."

say() { printf '[versions] %s\n' "$*"; }

end=${1:-}
case "$end" in
    lowest | newest) ;;
    *) say "unknown: '$end'; say lowest or newest" >&2; exit 2 ;;
esac
shift
[ $# -gt 0 ] || set -- -m "not slow and not browser"

case "${TORCH:-}" in
    cpu) build=cpu ;;
    '' | cuda) build=auto ;;
    *) say "TORCH=$TORCH is unknown: cpu or cuda" >&2; exit 2 ;;
esac
# With a build of PyTorch among the requirements (WITH="torch==2.13.0+cpu") there is none to choose.
case "${WITH:-}" in *torch==*+*) build= ;; esac

if [ ! -x build/uv/bin/uv ]; then
    python3 -m venv build/uv
    build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
fi
# --no-config: the pins in pyproject.toml's [tool.uv] are for constraints.txt.
uv() { build/uv/bin/uv "$1" --no-config --quiet "${@:2}"; }
venv=build/versions-$end
rm -rf "$venv"
# --seed: the lab fetches models through pip where a direct connection fails.
uv venv --seed --python "${PYTHON:-python3}" "$venv"
install() { uv pip install --python "$venv" ${build:+--torch-backend "$build"} "$@"; }

if [ "$end" = lowest ]; then
    say "the oldest versions of what the lab imports"
    # shellcheck disable=SC2086  # WITH holds several requirements, in words
    install --resolution lowest-direct -e '.[triton]' ${WITH:-}
    # What tests the lab need not be old; but it must not lift what was just installed.
    uv pip freeze --python "$venv" --exclude-editable > "$venv/pins.txt"
    say "the newest tools that get along with them"
    install -e '.[dev]' -c "$venv/pins.txt"
else
    say "the newest versions of everything"
    # shellcheck disable=SC2086
    install --upgrade -e '.[dev]' ${WITH:-}
fi
say "the models that the tests load"
"$venv/bin/python" -m labsupport.cli fetch --quiet
uv pip list --python "$venv" | grep -E '^(torch|triton|transformers|numpy|pandas|matplotlib|pytest) ' || true
say "the tests"
"$venv/bin/python" -m pytest -n auto --maxprocesses 4 --dist loadfile "$@"
