#!/usr/bin/env bash
# Add one of pyproject.toml's extras to .venv, or find that it is there: `scripts/extra.sh book`.
# What students need not have is installed only where it is asked for.
set -eu
cd "$(dirname "$0")/.."

extra=$1
stamp=.venv/.extra-$extra
now=$(cat pyproject.toml constraints.txt | cksum)
[ -e .venv ] || exit 0  # another environment is in use (make PY=python), and looked after by its owner
[ "$(cat "$stamp" 2>/dev/null)" = "$now" ] && exit 0
printf '[setup] packages for the %s (once)\n' "$extra"
PIP_USER=0 .venv/bin/python -m pip install --disable-pip-version-check --quiet \
    -c constraints.txt -e ".[$extra]"
printf '%s' "$now" > "$stamp"
