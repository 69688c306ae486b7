"""The command `labsupport release`: the lab as students get it, a project of its own."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from grader import exam as without_answers
from labsupport import paths
from labsupport.course.editions import Edition, ReleaseError, make_edition, solved_notebooks

_FOLDERS = ("data", "theory", "scripts/jupyterlab")
_FILES = ("LICENSE", "constraints.txt", "environment.yml", "scripts/setup.sh")
# What students need of the Makefile; the other commands test or change the lab.
_TARGETS = ("help", "setup", "lab", "fetch", "clean")
_VARIABLES = re.compile(r"(WORKERS|PYTEST|TYPOS) = ")
# A part of the lab's README that does not hold here.
_ELSEWHERE = re.compile(r"benchmarks|tests|make (test|book)|GRADING|<!--|git clone")
_LEFT_OUT = re.compile(r"`?(flash_torch|flash_triton|minimal_ring|kernels/)")
_BLOCK = re.compile(r"^(```+)(python|text)\b.*?^\1[ ]*\n", re.MULTILINE | re.DOTALL)
_OUTLINE = re.compile(r"<details><summary>Hint 3.*?</details>", re.DOTALL)  # the innermost one
_NOTE = "*(A program, not part of the exam edition.)*"

_README = """# The FlashAttention lab{kind}

Four Jupyter notebooks, in which you write FlashAttention, use it, train with it and measure it; the
package `labsupport`, which they import; and [the theory](theory/README.md).

## Start

You need Linux or macOS (on Windows: WSL 2), Python 3.11 to 3.13 and `make`. In this folder, type

```bash
make lab
```

It installs everything into `.venv`, fetches two small models, puts your own copies of the notebooks
into `work/`, and opens JupyterLab on them. (With an environment that is installed already:
`make lab PY=python`.) Each exercise has a specification and checks, which run here.

```bash
.venv/bin/labsupport progress
```

says how far you are. `make` alone lists the commands. You hand in the notebooks of `work/`.
{more}
"""
_EXAM = """
This edition lacks what answers an exercise: the lab's own implementations, and the programs in the
chapters. The checks judge with stored cases. A cell that needs something that is missing says *not
part of the exam edition*; a cell that asks for your own solution runs as soon as that passes its
checks.
"""


def release_command(
    to: Annotated[Path, typer.Option(help="The folder to write to: new, or empty.")],
    notebooks: Annotated[
        Path | None, typer.Option(help="The solved notebooks. Default: the lab's own.")
    ] = None,
    exam: Annotated[
        bool, typer.Option("--exam", help="Also without the code that answers an exercise.")
    ] = False,
) -> None:
    """Write the lab for students: a project without solutions and hidden tests (instructors)."""
    typer.echo(f"written: {write_project(to, notebooks, exam=exam)}, for `make lab` there")


def write_project(target: Path, notebooks: Path | None = None, *, exam: bool = False) -> Path:
    """Write the project as students get it: a folder in which `make lab` works.

    It holds the notebooks without solutions, hidden tests and outputs, the package, the theory and
    the data. It holds no tests, no grader, no text twins of notebooks and no history: these contain
    solutions.

    Args:
        target: the folder; it must not exist, or be empty.
        notebooks: the folder of the solved notebooks; the lab's own if None.
        exam: also without the package's code that answers an exercise; the checks get stored cases
            in its place, which needs the solutions to run here.

    Returns:
        `target`.

    Raises:
        ReleaseError: a notebook is refused, or `target` holds something.
        OSError: the folder cannot be written to.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ReleaseError(f"{target} is not an empty folder; choose another one with --to")
    root, solved = paths.project_root(), solved_notebooks(notebooks)
    editions = [make_edition(source) for source in solved]
    tapes = without_answers.record_cases(solved) if exam else {}
    target.mkdir(parents=True, exist_ok=True)
    for folder in (*_FOLDERS, *(() if exam else ("capstone",))):
        ignored = shutil.ignore_patterns(".*", "upkeep", "__pycache__")
        shutil.copytree(root / folder, target / folder, ignore=ignored)
    for name in _FILES:
        shutil.copy(root / name, target / name)
    without_answers.write_files(target, _texts(root, [_exam(e) if exam else e for e in editions]))
    if exam:
        without_answers.write_files(target, without_answers.exam_package())
        from labsupport.checks import cases

        cases.save_cases(tapes, target / "labsupport" / "checks" / cases.FILE.name)
    else:
        package = without_answers.package_files()
        without_answers.write_files(target, ((f"labsupport/{p}", text) for p, text in package))
    readme = _readme((root / "README.md").read_text(encoding="utf-8"), exam)
    (target / "README.md").write_text(readme, encoding="utf-8")
    for page in sorted(target.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if exam:
            text = without_left_out(without_code(text))
        page.write_text(_without_dead_links(text, page.parent), encoding="utf-8")
    return target


def _texts(root: Path, editions: list[Edition]) -> Iterator[tuple[str, str]]:
    for edition in editions:
        yield f"notebooks/{edition.name}", edition.text
    for name, cut in (("Makefile", makefile), ("pyproject.toml", pyproject)):
        yield name, cut((root / name).read_text(encoding="utf-8"))


def makefile(text: str) -> str:
    """Return the Makefile with the commands that students need."""
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


def _readme(text: str, exam: bool) -> str:
    """A README of its own, and the sections of the lab's that help with an installation."""
    readme = _README.format(kind=": exam edition" if exam else "", more=_EXAM if exam else "")
    for section in text.split("\n## ")[1:]:
        if section.startswith(("Installation", "When something is wrong")):
            kept = [part for part in section.split("\n\n") if not _ELSEWHERE.search(part)]
            readme += "\n## " + "\n\n".join(kept).rstrip("\n") + "\n"
    return readme


def without_code(text: str) -> str:
    """Return a chapter of the theory without its programs, their outputs and its pseudo-code.

    Formulas and prose stay: they are what the papers say. Shell commands stay too.
    """
    cut = _BLOCK.sub(f"{_NOTE}\n", text)
    return re.sub(rf"{re.escape(_NOTE)}\n(\s*{re.escape(_NOTE)}\n)+", f"{_NOTE}\n", cut)


def without_left_out(text: str) -> str:
    """Return a Markdown text without the sentences and rows that name what an exam leaves out."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if _LEFT_OUT.search(paragraph):
            table = paragraph.lstrip().startswith(("|", "- "))
            parts = paragraph.split("\n") if table else re.split(r"(?<=[.:!?)])\s+", paragraph)
            kept = [part for part in parts if not _LEFT_OUT.search(part)]
            paragraph = ("\n" if table else " ").join(kept)
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def _exam(edition: Edition) -> Edition:
    notebook = json.loads(edition.text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = without_left_out(_OUTLINE.sub("", "".join(cell["source"])))
            cell["source"] = text.splitlines(keepends=True)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    return dataclasses.replace(edition, text=text)


def _without_dead_links(text: str, folder: Path) -> str:
    """Links to files that are not handed out become plain text."""

    def live(link: re.Match[str]) -> str:
        return link[0] if (folder / link[2]).exists() else link[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(?:#[^)]*)?\)", live, text)
