"""The command `labsupport start`."""

from pathlib import Path
from typing import Annotated

import typer


def start_command(
    to: Annotated[
        Path | None, typer.Option(help="The folder of your copies. Default: work/ in the project.")
    ] = None,
) -> None:
    """Give you copies of notebooks and checklist, and renew old ones with your work kept."""
    from labsupport.course.start import start_work

    for line in start_work(to).lines():
        typer.echo(line)
