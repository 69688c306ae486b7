"""The command `labsupport release`: the lab as students get it, a separate project."""

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from grader import exam as without_answers
from labsupport import paths
from labsupport.course.editions import ReleaseError, make_edition, solved_notebooks

_FOLDERS = ("data", "theory", "scripts/jupyterlab", "binder", ".devcontainer")
_FILES = ("LICENSE", "constraints.txt", "environment.yml", "scripts/setup.sh", "scripts/lock.sh")
# What students need of the Makefile; the other commands test or change the lab.
_TARGETS = ("help", "setup", "lab", "fetch", "clean")
_LINES = re.MULTILINE | re.DOTALL
_VARIABLES = re.compile(r"(WORKERS|PYTEST|TYPOS) = ")
# A part of the installation guide that does not hold here.
_ELSEWHERE = re.compile(r"benchmarks|git clone")
_LEFT_OUT = re.compile(
    r"`?(flash_torch|flash_triton|minimal_ring|kernels/|capstone/data_parallel)"
    r"|lab's own function|`(python|text)` block"
)
_PROGRAMS = re.compile(r"^## The code in the chapters runs\n.*?(?=^## |\Z)", _LINES)
# A program or pseudo-code, and what the program prints.
_BLOCK = re.compile(
    r"^(```+)(python|text)\b.*?^\1[ ]*\n(?:\n*(^(```+)text\b.*?^\4[ ]*\n))?", _LINES
)
_OUTLINE = re.compile(r"<details><summary>Hint 3.*?</details>", re.DOTALL)  # the innermost one
_RECORDED = re.compile(r"\s\(`python -m benchmarks[^)]*\)")  # how a run was recorded
_NOTE = "*(A program, not part of the exam edition.)*"
_OTHER = rf"`make (?!{'|'.join(_TARGETS)})[^`]*`"  # a command that students do not get
_ASIDE = re.compile(rf"; {_OTHER}|\s\({_OTHER}\)")


def release_command(
    to: Annotated[Path, typer.Option(help="The folder to write to: new, or empty.")],
    notebooks: Annotated[
        Path | None, typer.Option(help="The solved notebooks. Default: the lab's own.")
    ] = None,
    exam: Annotated[
        bool, typer.Option("--exam", help="Also without the code that answers an exercise.")
    ] = False,
) -> None:
    """Write the students' edition: a project without solutions and hidden tests (instructors)."""
    typer.echo(f"written: {write_project(to, notebooks, exam=exam)}, for `make lab` there")


def write_project(target: Path, notebooks: Path | None = None, *, exam: bool = False) -> Path:
    """Write the project as students get it: a folder in which `make lab` works.

    Tests, grader, text twins of notebooks and history contain solutions, and stay here.

    Args:
        target: the folder; it must not exist, or be empty.
        notebooks: the folder of the solved notebooks; the lab's own if None.
        exam: also without the package's code that answers an exercise; the checks get stored cases
            in its place, which needs the solutions to run here.

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
        ignored = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(root / folder, target / folder, ignore=ignored)
    for name in _FILES:
        shutil.copy(root / name, target / name)
    texts = {f"notebooks/{e.name}": _exam(e.text) if exam else e.text for e in editions}
    for name, cut in (("Makefile", makefile), ("pyproject.toml", pyproject)):
        texts[name] = cut((root / name).read_text(encoding="utf-8"))
    if exam:
        texts["pyproject.toml"] = texts["pyproject.toml"].replace(' "capstone",', "", 1)
    texts["README.md"] = _readme((root / "docs/install.md").read_text(encoding="utf-8"), exam)
    if exam:
        texts |= without_answers.exam_package()
    else:
        texts |= {f"labsupport/{path}": text for path, text in without_answers.package_files()}
    without_answers.write_files(target, texts.items())
    if exam:
        from labsupport.checks import cases

        cases.save_cases(tapes, target / "labsupport" / "checks" / cases.FILE.name)
        without_answers.save_models(target / "labsupport" / "models.json")
    for page in sorted(target.rglob("*.md")):
        text = _ASIDE.sub("", page.read_text(encoding="utf-8"))
        text = without_left_out(text, re.compile(_OTHER))
        if exam:
            text = without_left_out(without_code(_PROGRAMS.sub("", text)))
        page.write_text(_without_dead_links(text, page.parent), encoding="utf-8")
    return target


def makefile(text: str) -> str:
    """Return the Makefile with the commands that students need."""
    text = re.sub(r"^\.PHONY:.*?[^\\]\n", f".PHONY: {' '.join(_TARGETS)}\n", text, flags=_LINES)
    listed = re.compile(rf'^.*echo "make (?!({"|".join(_TARGETS)}) ).+\n', re.MULTILINE)
    kept = []
    for paragraph in listed.sub("", text).split("\n\n"):
        target = re.search(r"^([a-z-]+):(?!=)", paragraph, re.MULTILINE)
        if not _VARIABLES.search(paragraph) and (not target or target[1] in _TARGETS):
            kept.append(paragraph)
    return "\n\n".join(kept).rstrip("\n") + "\n"


def pyproject(text: str) -> str:
    """Return pyproject.toml without the package `grader` and its commands.

    What notebooks need are dependencies there, so that `pip install labsupport-*.whl` is enough.
    """
    kept = [part for part in text.split("\n\n") if "[project.entry-points." not in part]
    text = "\n\n".join(kept).replace('"labsupport", "grader",', '"labsupport",', 1)
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    needed = [line for line in extras["notebook"] if "[triton]" not in line] + extras["triton"]
    lines = "".join(f'    "{requirement}",\n' for requirement in needed)
    return text.replace("dependencies = [\n", f"dependencies = [\n{lines}", 1)


def _readme(text: str, exam: bool) -> str:
    """Return the edition's README: an introduction, and the installation guide."""
    own = Path(__file__).parent
    readme = (own / "edition.md").read_text(encoding="utf-8")
    if exam:
        readme = readme.replace("\n", ": exam edition\n", 1)
        readme += (own / "edition-exam.md").read_text(encoding="utf-8")
    for section in text.replace("](../", "](").split("\n## ")[1:]:
        kept = [part for part in section.split("\n\n") if not _ELSEWHERE.search(part)]
        readme += "\n## " + "\n\n".join(kept).rstrip("\n") + "\n"
    return readme


def without_code(text: str) -> str:
    """Return a chapter of the theory without its programs and its pseudo-code.

    What the programs print stays, since the prose reads it; so do shell commands.
    """

    def cut_one(block: re.Match[str]) -> str:
        prints = block[3] if block[2] == "python" else None
        return f"{_NOTE}\n\n{prints}" if prints else f"{_NOTE}\n"

    cut = _BLOCK.sub(cut_one, text)
    return re.sub(rf"{re.escape(_NOTE)}\n(\s*{re.escape(_NOTE)}\n)+", f"{_NOTE}\n", cut)


def without_left_out(text: str, left_out: re.Pattern[str] = _LEFT_OUT) -> str:
    """Return a Markdown text without the sentences and rows that name what is left out."""
    paragraphs, in_block = [], False
    for paragraph in text.split("\n\n"):
        fences = paragraph.count("```")
        if left_out.search(paragraph):
            if in_block or fences or paragraph.lstrip().startswith("|"):
                between, parts = "\n", paragraph.split("\n")
            elif paragraph.lstrip().startswith("- "):
                between, parts = "\n", re.split(r"\n(?=- )", paragraph)
            else:
                between, parts = " ", re.split(r"(?<=[.!?])\s+|(?<=[.!?]\))\s+", paragraph)
            paragraph = between.join(part for part in parts if not left_out.search(part))
        paragraphs.append(paragraph)
        in_block ^= fences % 2 == 1
    return "\n\n".join(paragraphs)


def _exam(notebook_text: str) -> str:
    """Return a notebook without outlines of solutions and without mentions of missing parts."""
    notebook = json.loads(notebook_text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = _RECORDED.sub("", _OUTLINE.sub("", "".join(cell["source"])))
            cell["source"] = without_left_out(text).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _without_dead_links(text: str, folder: Path) -> str:
    """Turn links to files that are not handed out into plain text."""

    def live(link: re.Match[str]) -> str:
        return link[0] if (folder / link[2]).exists() else link[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(?:#[^)]*)?\)", live, text)
