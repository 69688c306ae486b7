"""Follow the links that leave the project: `make links`.

Links of all pages, addresses in docstrings, and the sources in data/hardware.csv go onto one page,
which Sphinx's link checker follows: it knows of redirects, rate limits and second attempts. Other
people's sites change and fail, so this is no part of `make test`.
"""

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from scripts import texts

BUILD = texts.ROOT / "build" / "links"
ADDRESS = re.compile(r"https://[^\s<>\"'`)\]}|;]+[^\s<>\"'`)\]}|;.,:]")
OPTIONS = ("linkcheck_timeout=30", "linkcheck_retries=2", "linkcheck_workers=8")
# Sites answer programs so that they do not answer on the first try; a reader sees the page.
REFUSED = re.compile(r"\b(401|403|429)\b")


def addresses() -> dict[str, list[str]]:
    """Each address outside of the project, without its anchor, and the places that name it."""
    out: dict[str, list[str]] = defaultdict(list)
    for path in texts.pages():
        for link in texts.links(path):
            if link.external and link.target.startswith("https:"):
                _note(out, link.target, path, link.line)
    for path in texts.sources():
        for passage in texts.docstrings(path):
            for found in ADDRESS.finditer(passage.text):
                line = passage.line + passage.text.count("\n", 0, found.start())
                _note(out, found[0], path, line)
    hardware = texts.ROOT / "data" / "hardware.csv"
    for line, text in enumerate(hardware.read_text(encoding="utf-8").split("\n"), 1):
        for found in ADDRESS.finditer(text):
            _note(out, found[0], hardware, line)
    return dict(out)


def _note(out: dict[str, list[str]], target: str, path: Path, line: int) -> None:
    out[target.partition("#")[0]].append(f"{path.relative_to(texts.ROOT)}:{line}")


def follow(found: list[str], build: Path = BUILD) -> dict[str, tuple[str, str]]:
    """The state of each address: Sphinx's word for it (working, broken, ...), and why.

    A `RuntimeError` is raised if Sphinx itself failed; `build` is for its page and report.
    """
    source, report = build / "source", build / "report"
    source.mkdir(parents=True, exist_ok=True)
    (report / "output.json").unlink(missing_ok=True)
    page = ["# Links", "", *(f"- <{address}>" for address in found), ""]
    (source / "index.md").write_text("\n".join(page), encoding="utf-8")
    settings = [part for option in OPTIONS for part in ("-D", option)]
    command = [sys.executable, "-m", "sphinx", "-b", "linkcheck", "-C", "-E", "-q", *settings]
    command += ["-D", "extensions=myst_parser", str(source), str(report)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not (report / "output.json").exists():
        raise RuntimeError(f"Sphinx could not follow the links:\n{done.stderr or done.stdout}")
    lines = (report / "output.json").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["uri"]: (row["status"], row["info"]) for row in rows}


def main() -> None:
    """Follow all, say which are broken or refused and where they stand; fail if one is broken."""
    places = addresses()
    print(f"{len(places)} addresses, named in {sum(map(len, places.values()))} places", flush=True)
    counts: Counter[str] = Counter()
    for address, (status, why) in sorted(follow(sorted(places)).items()):
        if status in ("broken", "timeout"):
            status = "refused to programs" if REFUSED.search(why) else status
            print(f"{status}: {address}\n    {why}\n    {', '.join(places.get(address, []))}")
        counts[status] += 1
    print(", ".join(f"{number} {status}" for status, number in counts.most_common()))
    sys.exit(1 if counts["broken"] or counts["timeout"] else 0)


if __name__ == "__main__":
    main()
