"""The command `labsupport start`."""

from pathlib import Path
from typing import Annotated

import typer


def start_command(
    folder: Annotated[
        Path | None,
        typer.Argument(help="The folder of your copies. Default: work/, in the project if cloned."),
    ] = None,
) -> None:
    """Make your copies of notebooks and checklist, or update them; your work stays."""
    from labsupport.course.start import start_work

    for line in start_work(folder).lines():
        typer.echo(line)
