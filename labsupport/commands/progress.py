"""The command `labsupport progress`."""

from pathlib import Path
from typing import Annotated

import typer


def progress_command(
    folder: Annotated[
        Path | None, typer.Argument(help="Your notebooks. Default: as in `start`.")
    ] = None,
) -> None:
    """Show which exercises your saved notebooks pass, and what comes next. Runs nothing."""
    from labsupport.course.progress import progress_of_folder
    from labsupport.course.three_days import progress_on_path

    found = progress_of_folder(folder)
    for line in [*found.lines(), *progress_on_path(folder, found.checks)]:
        typer.echo(line)
