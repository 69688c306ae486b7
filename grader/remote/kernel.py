"""The program in the sandbox: runs the student's cells, then serves calls of what they defined.

    python -m grader.remote.kernel DESCRIPTOR < plan.json

Nothing of this decides a point: the student's code could undo it. It keeps an endless loop in one
cell from costing the others, and tells the student's own error where a name is missing.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from grader.remote import programs
from grader.remote.refuse import hide_kernels
from grader.remote.values import pack, send
from grader.remote.worker import serve


class CellTimeout(BaseException):
    """The cell took too long; no Exception, which a loop around the work would catch."""


def main(descriptor: str) -> None:
    """Run the cells of the plan on stdin, and serve.

    Before each cell the grader is told its number; after the last, the first error of a cell.

    Args:
        descriptor: of the socket to the grader.
    """
    with suppress(OSError):  # the grader knows, and says so
        programs.forbid()
    hide_kernels()
    tempfile.gettempdir()  # looked for and remembered, before cells may fill it
    plan = json.load(sys.stdin)
    connection = socket.socket(fileno=int(descriptor))
    plain = {"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}}
    shell = InteractiveShell.instance(config=Config(plain))
    # Nothing is installed and no program is started by a line of the notebook's.
    nothing: Any = lambda *args, **kwargs: None  # noqa: E731
    shell.system = shell.getoutput = shell.enable_gui = nothing
    magic: Any = shell.run_line_magic

    def forgiving(name: str, line: str, _stack_depth: int = 1) -> Any:
        # What Jupyter knows and this shell does not: `%config InlineBackend...`, extensions.
        with suppress(UsageError, NotImplementedError, ImportError):
            return magic(name, line, _stack_depth=_stack_depth + 1)

    shell.run_line_magic = forgiving  # type: ignore[method-assign]
    versions: dict[str, dict[str, Any]] = {}
    first_error = ""
    left = plan["own_cells_s"]
    signal.signal(signal.SIGALRM, _too_long)
    with open(os.devnull, "w") as sink, redirect_stdout(sink), redirect_stderr(sink):
        for number, step in enumerate(plan["steps"]):
            send(connection, pack({"step": number}))
            if step["check"]:
                names = shell.user_ns
                versions[step["check"]] = {n: names[n] for n in step["names"] if n in names}
                continue
            limit, start = plan["cell_timeout_s"], time.monotonic()
            if not step["exercise"]:
                limit = max(1.0, min(limit, left))
            error = _run(shell, step["source"], limit)
            first_error = first_error or error
            if not step["exercise"]:
                left -= time.monotonic() - start
    versions[""] = shell.user_ns
    send(connection, pack({"first_error": first_error}))
    serve(versions, connection)


def _run(shell: InteractiveShell, source: str, limit_s: float) -> str:
    """Run a cell; return its error, or ""."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        result = shell.run_cell(source, store_history=False)
        error = result.error_before_exec or result.error_in_exec
    except CellTimeout as problem:
        error = problem
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if error is None:
        return ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")


def _too_long(number: int, frame: Any) -> None:
    raise CellTimeout("the cell took longer than its limit")


if __name__ == "__main__":
    main(*sys.argv[1:])
