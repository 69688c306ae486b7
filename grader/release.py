"""The command `labsupport release`: student and exam editions written to a folder."""

from pathlib import Path
from typing import Annotated

import typer

from labsupport.course.editions import ReleaseError, make_edition, solved_notebooks
from labsupport.course.files import write_new


def release_command(
    to: Annotated[Path, typer.Option(help="The folder to write the student edition to.")],
    notebooks: Annotated[
        Path | None, typer.Option(help="The solved notebooks. Default: the lab's own.")
    ] = None,
    exam: Annotated[
        bool, typer.Option("--exam", help="The whole project, without what answers an exercise.")
    ] = False,
) -> None:
    """Make the student edition: the notebooks without solutions and hidden tests (instructors)."""
    if exam:
        from grader.exam import write_exam_edition

        typer.echo(f"written: {write_exam_edition(to, notebooks)}, for `make lab` there")
        return
    for path in write_student_edition(to, notebooks):
        typer.echo(f"written: {path}")


def write_student_edition(target: Path, notebooks: Path | None = None) -> list[Path]:
    """Write the student edition of every notebook into a folder, all of them or none.

    Args:
        target: the folder; it is created if it does not exist.
        notebooks: the folder of the solved notebooks; the lab's own if None.

    Returns:
        the files written.

    Raises:
        ReleaseError: a notebook is refused, or a file would be overwritten.
        OSError: the folder cannot be written to.
    """
    editions = [make_edition(source) for source in solved_notebooks(notebooks)]
    in_the_way = [e.name for e in editions if (target / e.name).exists()]
    if in_the_way:
        raise ReleaseError(
            f"{target} already holds {', '.join(in_the_way)}; nothing was written. "
            "Move them away or choose another folder with --to"
        )
    if target.exists() and not target.is_dir():
        raise ReleaseError(f"{target} is a file; --to wants a folder")
    target.mkdir(parents=True, exist_ok=True)
    for edition in editions:
        write_new(target / edition.name, edition.text)
    return [target / edition.name for edition in editions]
