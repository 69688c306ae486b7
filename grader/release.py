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
_FILES = (
    *("LICENSE", "constraints.txt", "environment.yml", "scripts/setup.sh", "scripts/lock.sh"),
    "docs/install.md",
)
# What students need of the Makefile; the other commands test or change the lab.
_TARGETS = ("help", "setup", "lab", "fetch", "clean")
_LINES = re.MULTILINE | re.DOTALL
_VARIABLES = re.compile(r"(WORKERS|PYTEST|TYPOS) = ")


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

    Tests, grader, text twins of notebooks and history contain solutions, and stay here. Raise
    ReleaseError if a notebook is refused, or `target` holds something.
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
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, target / name)
    texts = {f"notebooks/{edition.name}": edition.text for edition in editions}
    for name, cut in (("Makefile", makefile), ("pyproject.toml", pyproject)):
        texts[name] = cut((root / name).read_text(encoding="utf-8"))
    texts["README.md"] = Path(__file__).with_name("edition.md").read_text(encoding="utf-8")
    for path, text in texts.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    for page in sorted(target.rglob("*.md")):
        text = _without_dead_links(page.read_text(encoding="utf-8"), page.parent)
        page.write_text(text, encoding="utf-8")
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


def _without_dead_links(text: str, folder: Path) -> str:
    """Turn links to files that are not handed out into plain text."""

    def live(link: re.Match[str]) -> str:
        return link[0] if (folder / link[2]).exists() else link[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(?:#[^)]*)?\)", live, text)
