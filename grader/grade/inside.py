"""What the assembled notebook's first cell sets up in the student's kernel.

Nothing of this decides a point: the student's code could undo it. It keeps an endless loop in one
cell from costing the others, and tells the student's own mistake instead of "it is not there".
"""

import itertools
import signal
import socket
from typing import Any

import torch  # noqa: F401  (imported before any cell's time runs: it is not the student's)

_MAX_TEXT = 500


class CellTimeout(BaseException):
    """The cell took too long; not an Exception, which a loop around the work would catch."""


def watch_cells(shell: Any, cell_timeout_s: float, started: str) -> Any:
    """Limit the time of each cell from the next on, note how it failed, and say that we begin.

    Args:
        shell: IPython's, from `get_ipython()`.
        cell_timeout_s: seconds; 0 for the last cell, which serves.
        started: the path of the socket where the grader waits for a call.

    Returns:
        a function that returns the failures as {"3": "NameError: ..."}: the number is that of the
        cell, counted from 1.
    """
    failures: dict[str, str] = {}
    # IPython's own count stands still where cells run without history, as nbval's do.
    ended = itertools.count(1)

    def too_long(number: int, frame: Any) -> None:
        raise CellTimeout(f"the cell took longer than {cell_timeout_s:g} s")

    def before(info: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, cell_timeout_s)

    def after(result: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        number = next(ended)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            said = " ".join(str(error).split())[:_MAX_TEXT]
            failures[str(number)] = f"{type(error).__name__}: {said}".rstrip(": ")

    def what_failed() -> dict[str, str]:
        return dict(failures)

    signal.signal(signal.SIGALRM, too_long)
    shell.events.register("pre_run_cell", before)
    shell.events.register("post_run_cell", after)
    # Nobody looks at tracebacks and pictures here, and they take time.
    shell.history_manager.enabled = False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(started)
    return what_failed
