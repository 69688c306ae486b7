#!/usr/bin/env bash
# Add one of pyproject.toml's extras to .venv, or find that it is there: `scripts/extra.sh book`.
# What students need not have is installed only where it is asked for.
#
# Environment: PY=...   the Python in use (default: .venv/bin/python). Another environment than
#                       .venv is looked after by its owner: nothing is installed there.
set -eu
cd "$(dirname "$0")/.."

extra=$1
python=${PY:-.venv/bin/python}
if [ "$python" != .venv/bin/python ]; then
    [ "$extra" = book ] && needed=myst_nb || needed=playwright
    "$python" -c "import $needed" 2>/dev/null && exit 0
    printf 'The %s needs more packages:  %s -m pip install -c constraints.txt -e ".[%s]"\n' \
        "$extra" "$python" "$extra" >&2
    exit 1
fi
stamp=.venv/.extra-$extra
now=$(cat pyproject.toml constraints.txt | cksum)
ready() { [ "$(cat "$stamp" 2>/dev/null)" = "$now" ]; }
if ready; then exit 0; fi
. scripts/lock.sh
if ready; then exit 0; fi
printf '[setup] packages for the %s (once)\n' "$extra"
PIP_USER=0 .venv/bin/python -m pip install --disable-pip-version-check --quiet \
    -c constraints.txt -e ".[$extra]"
printf '%s' "$now" > "$stamp"
