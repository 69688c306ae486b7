"""The command `labsupport release`: the lab as students get it, a separate project."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from labsupport import paths
from labsupport.course.editions import ReleaseError, make_edition, solved_notebooks

_PACKAGE = ("labsupport", "scripts/jupyterlab", "binder", ".devcontainer")
_FOLDERS = (*_PACKAGE, "data", "theory", "capstone")
_FILES = ("LICENSE", "constraints.txt", "environment.yml", "scripts/setup.sh", "scripts/lock.sh")
# What students need of the Makefile; the other commands test or change the lab.
_TARGETS = ("help", "setup", "lab", "fetch", "clean")
_LINES = re.MULTILINE | re.DOTALL
_VARIABLES = re.compile(r"(WORKERS|PYTEST|TYPOS) = ")
# A part of the installation guide that does not hold here.
_ELSEWHERE = re.compile(r"benchmarks|git clone")
_OTHER = rf"`make (?!{'|'.join(_TARGETS)})[^`]*`"  # a command that students do not get
_ASIDE = re.compile(rf"; {_OTHER}|\s\({_OTHER}\)")


def release_command(
    to: Annotated[Path, typer.Option(help="The folder to write to: new, or empty.")],
    notebooks: Annotated[
        Path | None, typer.Option(help="The solved notebooks. Default: the lab's own.")
    ] = None,
) -> None:
    """Write the students' edition: a project without solutions and hidden tests (instructors)."""
    typer.echo(f"written: {write_project(to, notebooks)}, for `make lab` there")


def write_project(target: Path, notebooks: Path | None = None) -> Path:
    """Write the project as students get it: a folder in which `make lab` works.

    Tests, grader, text twins of notebooks and history contain solutions, and stay here.

    Args:
        target: the folder; it must not exist, or be empty.
        notebooks: the folder of the solved notebooks; the lab's own if None.

    Raises:
        ReleaseError: a notebook is refused, or `target` holds something.
        OSError: the folder cannot be written to.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ReleaseError(f"{target} is not an empty folder; choose another one with --to")
    root = paths.project_root()
    editions = [make_edition(source) for source in solved_notebooks(notebooks)]
    target.mkdir(parents=True, exist_ok=True)
    for folder in _FOLDERS:
        ignored = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(root / folder, target / folder, ignore=ignored)
    for name in _FILES:
        shutil.copy(root / name, target / name)
    texts = {f"notebooks/{edition.name}": edition.text for edition in editions}
    for name, cut in (("Makefile", makefile), ("pyproject.toml", pyproject)):
        texts[name] = cut((root / name).read_text(encoding="utf-8"))
    texts["README.md"] = _readme((root / "docs/install.md").read_text(encoding="utf-8"))
    for path, text in texts.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    for page in sorted(target.rglob("*.md")):
        text = _without_other_commands(_ASIDE.sub("", page.read_text(encoding="utf-8")))
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


def _readme(text: str) -> str:
    """Return the edition's README: an introduction, and the installation guide."""
    readme = Path(__file__).with_name("edition.md").read_text(encoding="utf-8")
    for section in text.replace("](../", "](").split("\n## ")[1:]:
        kept = [part for part in section.split("\n\n") if not _ELSEWHERE.search(part)]
        readme += "\n## " + "\n\n".join(kept).rstrip("\n") + "\n"
    return readme


def _without_other_commands(text: str) -> str:
    """Return a Markdown text without the sentences and rows that name what students do not get."""
    paragraphs, in_block = [], False
    for paragraph in text.split("\n\n"):
        fences = paragraph.count("```")
        if re.search(_OTHER, paragraph):
            if in_block or fences or paragraph.lstrip().startswith("|"):
                between, parts = "\n", paragraph.split("\n")
            elif paragraph.lstrip().startswith("- "):
                between, parts = "\n", re.split(r"\n(?=- )", paragraph)
            else:
                between, parts = " ", re.split(r"(?<=[.!?])\s+|(?<=[.!?]\))\s+", paragraph)
            paragraph = between.join(part for part in parts if not re.search(_OTHER, part))
        paragraphs.append(paragraph)
        in_block ^= fences % 2 == 1
    return "\n\n".join(paragraphs)


def _without_dead_links(text: str, folder: Path) -> str:
    """Turn links to files that are not handed out into plain text."""

    def live(link: re.Match[str]) -> str:
        return link[0] if (folder / link[2]).exists() else link[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(?:#[^)]*)?\)", live, text)
