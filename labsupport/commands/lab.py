"""The command `labsupport lab`, which `make lab` calls."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from labsupport.commands.doctor import doctor_command
from labsupport.commands.fetch import fetch_command
from labsupport.commands.start import start_command
from labsupport.paths import project_root, work_dir


def lab_command(
    context: typer.Context,
    folder: Annotated[
        Path | None, typer.Option(help="The folder of your copies. Default: as in `start`.")
    ] = None,
) -> None:
    """Check this machine, make your copies of the notebooks and open JupyterLab on them.

    Further options are JupyterLab's, such as --no-browser or --port 8889.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise RuntimeError("JupyterLab is not installed: pip install 'labsupport[notebook]'")
    doctor_command(quick=True)
    start_command(folder)
    try:
        fetch_command(["smollm2", "gpt2"], quiet=True)
    except Exception as error:  # the lab starts without them: only what needs one will say so
        typer.echo(
            f"[warn] models are missing, some notebooks will stop there ({error}); "
            "to try again: labsupport fetch"
        )
    typer.echo("JupyterLab is starting (a few seconds); Control-C here, twice, stops it")
    # Theory opens as pages, file names have room, nothing asks about news.
    settings = [str(project_root() / "scripts" / "jupyterlab")]
    programs = [str(Path(sys.executable).parent)]
    environment = os.environ | {
        "JUPYTER_CONFIG_PATH": _before(settings, "JUPYTER_CONFIG_PATH"),
        "PATH": _before(programs, "PATH"),
        # A kernel of the same name in the home directory must not stand in for this Python's.
        "JUPYTER_PREFER_ENV_PATH": "1",
    }
    # JupyterLab refuses to run as root, which is what one is in most containers.
    options = ["--log-level=WARN", *(["--allow-root"] if os.geteuid() == 0 else []), *context.args]
    command = [sys.executable, "-m", "jupyterlab", *options, str(folder or work_dir())]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def _before(first: list[str], variable: str) -> str:
    """A path variable's value with further entries in front."""
    return os.pathsep.join([*first, *filter(None, [os.environ.get(variable)])])
