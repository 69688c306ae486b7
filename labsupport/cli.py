"""The `labsupport` program: its commands are the files of `labsupport.commands`."""

import os
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from labsupport import __version__
from labsupport.commands.bench import bench_command
from labsupport.commands.compare import compare_command
from labsupport.commands.doctor import doctor_command
from labsupport.commands.fetch import fetch_command
from labsupport.commands.generate import generate_command
from labsupport.commands.lab import lab_command
from labsupport.commands.monitor import monitor_command
from labsupport.commands.profile import profile_command
from labsupport.commands.progress import progress_command
from labsupport.commands.ring import ring_app
from labsupport.commands.start import start_command
from labsupport.commands.sweep import sweep_command
from labsupport.commands.train import TrainOptions, train_command, with_options

app = typer.Typer(
    name="labsupport",
    help="The FlashAttention lab: check this machine, get the notebooks, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
PROGRAM = {"allow_interspersed_args": False}  # options after -- belong to another program


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"labsupport {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _add_grader_commands() -> None:
    """Add the commands of `grader`, or a message that explains why this edition lacks them."""
    registered = {entry.name: entry for entry in entry_points(group="labsupport.commands")}
    for name in ("release", "grade"):
        try:
            command = registered[name].load()
        except (KeyError, ModuleNotFoundError) as error:
            if not isinstance(error, KeyError) and str(error.name).split(".")[0] != "grader":
                raise
            app.command(name, hidden=True, context_settings={"ignore_unknown_options": True})(
                _no_grader
            )
        else:
            app.command(name)(command)


def _no_grader(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    raise RuntimeError(
        "`release` and `grade` are for instructors: the package `grader` is not part of "
        "this edition. Run them in the whole project, after `make setup`"
    )


app.command("doctor")(doctor_command)
app.command("monitor", context_settings=PROGRAM)(monitor_command)
app.command("fetch")(fetch_command)
app.command("lab", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    lab_command
)
app.command("start")(start_command)
app.command("progress")(progress_command)
_add_grader_commands()
app.command("bench")(bench_command)
app.command("compare")(compare_command)
app.command("sweep")(sweep_command)
app.command("profile")(profile_command)
app.command("generate")(generate_command)
app.command("train")(with_options(train_command, TrainOptions))
app.add_typer(ring_app, name="ring")


def main() -> None:
    """Run the program; an error is one line on stderr and exit status 1.

    With LABSUPPORT_DEBUG=1 in the environment, errors keep their traceback.
    """
    try:
        app()
    except Exception as error:
        if os.environ.get("LABSUPPORT_DEBUG", "0") not in ("", "0"):
            raise
        message = " ".join(str(error).split()) or "no further explanation"
        # Our own errors say all that there is to say; of any other, the kind helps to search.
        expected = isinstance(error, (ValueError, OSError, RuntimeError))
        kind = "" if expected else f"{type(error).__name__}: "
        hint = "" if expected else " (LABSUPPORT_DEBUG=1 shows where)"
        sys.exit(f"labsupport: {kind}{message}{hint}")


if __name__ == "__main__":
    main()
