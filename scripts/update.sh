#!/usr/bin/env bash
# Move to the newest versions and run everything again (`make update`; maintainers). About an hour.
#
#   scripts/update.sh               all steps, in the order below
#   scripts/update.sh --from STEP   continue at a step, after fixing what stopped it
#   scripts/update.sh --back        the pins from before the update
#
#   pins          constraints.txt resolved again             (scripts/constraints.sh)
#   environment   .venv made, or brought to the new pins
#   tests         all of `make test`, with the stored notebooks as they are
#   notebooks     run; new outputs stored
#   pictures      drawn again
#   stored        what was stored just now, tested
#
# Nothing stored is touched before the tests have passed. The old pins lie in build/update until the
# last step has passed, and each step's output in build/update/STEP.log.
set -eu
cd "$(dirname "$0")/.."

python=.venv/bin/python
state=build/update
old=$state/constraints.old.txt
steps="pins environment tests notebooks pictures stored"
make=${MAKE:-make}
export MAKEFLAGS=--no-print-directory
unset ARGS  # `make update ARGS=...` means this script, not the commands that it calls

say() { printf '[update] %s\n' "$*"; }

changed_pins() {
    diff -U 0 "$old" constraints.txt | grep '^[-+][^-+#]' | sed 's/^/    /' || true
}

do_step() {
    case $1 in
        # Without .venv any Python will do: the step only borrows its venv module.
        pins) if [ -x "$python" ]; then scripts/constraints.sh "$python"; else scripts/constraints.sh; fi ;;
        environment) "$make" setup fetch ;;
        tests) "$make" test ;;
        notebooks) "$make" notebooks ;;
        pictures) "$make" pictures ;;
        stored) "$make" notebook-tests && "$python" -m pytest -q \
            tests/test_notebooks.py tests/test_setup.py tests/theory tests/texts ;;
    esac
}

go_back() {
    [ -e "$old" ] || { say "there is no update to go back from ($old is not there)"; exit 1; }
    cp "$old" constraints.txt
    say "constraints.txt is as before the update; .venv follows"
    "$make" setup
    rm -rf "$state"
    say "back. If notebooks or pictures were stored: git checkout -- notebooks theory/figures docs"
}

# PyTorch, Triton and Transformers: a pin of theirs needs a run in data/versions.csv.
recorded_pin_changed() {
    changed_pins | grep -Eq '^ *\+(torch|triton|transformers)=='
}

failed() {
    say "stopped at the step '$1'; all of its output: $state/$1.log"
    if cmp -s "$old" constraints.txt; then
        say "the pins are unchanged, so the cause lies elsewhere"
    else
        say "what changed in constraints.txt:"
        changed_pins
    fi
    if [ "$1" = tests ] && recorded_pin_changed; then
        say "If only the record of versions fails (tests/test_versions.py), run the tests for it:"
        say "  $python -m pytest -p scripts.versions --record-versions -n auto --maxprocesses 4 \\"
        say "      --dist loadfile -m 'not slow and not browser' && $python -m scripts.versions"
    fi
    say "The way on, one of:"
    say "  fix it, then                 make update ARGS='--from $1'"
    say "  keep a package back: give it an upper bound in pyproject.toml, with the reason, then"
    say "                               make update"
    say "  leave it for another day     make update ARGS=--back"
    exit 1
} >&2

from=pins
case "${1:-}" in
    '') ;;
    --back) go_back; exit 0 ;;
    --from) from=${2:-} ;;
    *) say "unknown: $1; see the top of scripts/update.sh" >&2; exit 2 ;;
esac
case " $steps " in
    *" $from "*) [ -n "$from" ] ;;
    *) say "there is no step '$from'; the steps: $steps" >&2; exit 2 ;;
esac
if [ "$from" = pins ] && [ ! -e "$old" ] && [ -n "$(git status --porcelain 2>/dev/null)" ]; then
    say "there are changes that are not committed: they would be mixed with those of the update" >&2
    say "commit or stash them (git stash -u), then run the same command again" >&2
    exit 1
fi

mkdir -p "$state"
if [ -e "$old" ]; then
    say "an update was begun before: its old pins are kept, to go back to"
else
    cp constraints.txt "$old"
fi

begun=
for step in $steps; do
    [ "$step" = "$from" ] && begun=yes
    [ -n "$begun" ] || continue
    say "$step ..."
    started=$(date +%s)
    # tee would hide the step's own result: pipefail keeps it.
    if ! (set -o pipefail; do_step "$step" 2>&1 | tee "$state/$step.log"); then failed "$step"; fi
    say "$step: done in $(($(date +%s) - started)) s"
    if [ "$step" = pins ]; then
        if cmp -s "$old" constraints.txt; then say "no newer versions"; else changed_pins; fi
        say "chosen by hand, in pyproject.toml, and not moved: $(
            sed -n 's/^constraint-dependencies = //p' pyproject.toml)"
    fi
done

say "all is well with these pins:"
changed_pins
rm -rf "$state"
say "now look at the changes (git diff --stat), say in CHANGELOG.md what users notice, and commit;"
say "scripts/versions.sh lowest says whether the oldest supported versions still do"
