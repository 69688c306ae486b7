"""The command by itself: python -m labsupport.analysis.profile, as `labsupport profile`."""

import typer

from labsupport.commands.profile import profile_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"allow_interspersed_args": False})(profile_command)

if __name__ == "__main__":
    app()
