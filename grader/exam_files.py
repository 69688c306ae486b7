"""The project around the package in an exam: Makefile, README, theory without its code."""

import re

# What students need; the other commands test or change the lab.
_TARGETS = ("help", "setup", "lab", "fetch", "clean")
_VARIABLES = re.compile(r"(WORKERS|PYTEST) = ")
_BLOCK = re.compile(r"^(```+)(python|text)\b.*?^\1[ ]*\n", re.MULTILINE | re.DOTALL)
_NOTE = "*(A program, not part of the exam edition.)*"

README = """# The FlashAttention lab: exam edition

You need Linux or macOS (on Windows: WSL 2), Python 3.11 to 3.13 and `make`. In this folder, type

```bash
make lab
```

It installs everything into `.venv`, fetches two small models, puts your own copies of the
notebooks into `work/`, and opens JupyterLab on them. (With an environment that is installed
already: `make lab PY=python`.) Each exercise has a specification and checks, which run here.
`make` alone lists the commands. `.venv/bin/labsupport progress` says how far you are. You hand in
the notebooks of `work/`.

This edition lacks what answers an exercise. A cell that needs it says *not part of the exam
edition*; most run as soon as your own solution passes its checks. The theory is here without its
programs.

To install without a network, ask your instructor for a folder of wheels: the field guide, chapter
10 of `theory/`, says how it is made.
"""


def makefile(text: str) -> str:
    """The Makefile with the commands that students need."""
    kept = []
    for paragraph in text.split("\n\n"):
        name = re.match(r"([a-z-]+):(?!=)", paragraph.split("\n# ")[0])
        rule = re.search(r"^([a-z-]+):(?!=)", paragraph, re.MULTILINE)
        target = name or rule
        if (target and target[1] not in _TARGETS) or _VARIABLES.search(paragraph):
            continue
        lines = []
        for line in paragraph.split("\n"):
            if (said := re.search(r'echo "make ([a-z-]+) ', line)) and said[1] not in _TARGETS:
                continue
            if line.startswith(".PHONY:"):
                line = f".PHONY: {' '.join(_TARGETS)}"
            lines.append(line)
        kept.append("\n".join(lines))
    return "\n\n".join(kept).rstrip("\n") + "\n"


def pyproject(text: str) -> str:
    """Return pyproject.toml without the package `grader` and its commands."""
    kept = [part for part in text.split("\n\n") if "[project.entry-points." not in part]
    return "\n\n".join(kept).replace('["labsupport", "grader"]', '["labsupport"]', 1)


def without_code(text: str) -> str:
    """A chapter of the theory without its programs, their outputs and its pseudo-code.

    Formulas and prose stay: they are what the papers say. Shell commands stay too.
    """
    cut = _BLOCK.sub(f"{_NOTE}\n", text)
    return re.sub(rf"{re.escape(_NOTE)}\n(\s*{re.escape(_NOTE)}\n)+", f"{_NOTE}\n", cut)
