#!/usr/bin/env bash
# Resolve the whole environment again and write constraints.txt. Maintainers run it (`make
# constraints`) after changing pyproject.toml or to move to newer versions, then `make test`.
#
# uv resolves once for every system and Python version the lab supports; pip could only resolve
# for the one it runs on. The chosen torch and triton are pinned by hand in pyproject.toml.
set -eu
python=${1:-${PYTHON:-python3}}
cd "$(dirname "$0")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$python" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv

"$tools/bin/uv" pip compile pyproject.toml --quiet --no-header --no-annotate --universal \
    --python-version 3.11 --fork-strategy fewest --upgrade \
    --extra notebook --extra grader --extra dev --extra triton --extra book --extra browser \
    --output-file "$tools/pins.txt"

{
    echo "# The tested version of every package, of what pyproject.toml names and of what that pulls in."
    echo "# Made by \`make constraints\`; do not edit by hand. For Python 3.11 to 3.13, Linux and macOS."
    echo "# The extras [cuda] and [hopper] are left out: they are compiled for the machine at hand."
    cat "$tools/pins.txt"
} > constraints.txt
echo "constraints.txt: $(grep -c '==' constraints.txt) pins"
