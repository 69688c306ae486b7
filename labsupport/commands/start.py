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
    """Give you copies of notebooks and checklist, and renew old ones with your work kept."""
    from labsupport.course.start import start_work

    for line in start_work(folder).lines():
        typer.echo(line)
