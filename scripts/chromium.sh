#!/usr/bin/env bash
# Print the path of a Chromium or Chrome for `make test-browser`; install one if there is none.
set -eu

for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    [ -n "$name" ] && command -v "$name" && exit 0
done
# Debian's and Ubuntu's own package, where we may: nothing to configure, updates with the system.
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } >&2 &&
        command -v chromium && exit 0
fi
# Playwright's own build of it; playwright finds it, so there is no path to print.
"${PY:-.venv/bin/python}" -m playwright install chromium >&2 && exit 0
printf 'There is no Chromium. Debian, Ubuntu: sudo apt install chromium. Elsewhere: %s\n' \
    "install Chrome, or set CHROMIUM=/path/to/it" >&2
exit 1
