"""The `labsupport` program, run in this process."""

from typer.testing import CliRunner

from labsupport.cli import app


def program(*arguments, ok=True, env=None):
    """Run `labsupport *arguments` here; it must succeed or, with ok=False, fail."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env=env)
    assert (done.exit_code == 0) is ok, (done.output, done.exception)
    return done
