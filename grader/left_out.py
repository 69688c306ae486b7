"""Functions that are left out because they answer an exercise, and cells that wait for one.

An edition without the answers holds a copy of this file as `labsupport/left_out.py`.
"""

import textwrap
from types import TracebackType
from typing import Any, NoReturn

NOT_HERE = "not part of the exam edition"
WAITS = "This cell waits for"
_said: list[str] = []  # what cells said that did not run


class LeftOutError(RuntimeError):
    """A function that answers an exercise was called, but is left out."""

    def _render_traceback_(self) -> list[str]:
        """Show only the message in a notebook."""
        _said.append(str(self))
        return textwrap.wrap(str(self), 100)


def left_out(name: str, exercise: str) -> NoReturn:
    """Raise LeftOutError, which says why `name` is missing."""
    which = "exercises" if "," in exercise else "exercise"
    raise LeftOutError(f"{name} is {NOT_HERE}: it answers {which} {exercise}.")


def waits_for(exercise: str, name: str = "solution") -> NoReturn:
    """Raise LeftOutError, which says which exercise a cell waits for."""
    raise LeftOutError(
        f"{WAITS} exercise {exercise}: it needs your {name}, which must pass its checks."
    )


def shorten_errors() -> None:
    """Show errors that follow from a missing part as one line, in a notebook."""
    try:
        shell = get_ipython()  # type: ignore[name-defined]
    except NameError:
        return
    from labsupport.distributed.launch import LaunchError

    shell.set_custom_exc((NameError, KeyError, NotImplementedError, LaunchError), _show)


def _show(
    shell: Any, kind: type, error: BaseException, trace: TracebackType, tb_offset: Any = None
) -> None:
    lines = [
        line.partition("LeftOutError: ")[2]
        for line in str(error).splitlines()
        if "LeftOutError: " in line
    ]
    if kind is NotImplementedError and not str(error):  # a stub
        while trace.tb_next is not None:
            trace = trace.tb_next
        lines = [f"{WAITS} an exercise above: {trace.tb_frame.f_code.co_name} is not written yet."]
    elif kind in (NameError, KeyError) and _said and _of_another_cell(error, shell):
        lines = [f"{WAITS} one above, which did not run ({kind.__name__}: {error})."]
    _said.extend(lines)
    lines = lines[-1:] or shell.InteractiveTB.structured_traceback(kind, error, trace, tb_offset)
    shell._showtraceback(kind, error, lines)


def _of_another_cell(error: BaseException, shell: Any) -> bool:
    """Return whether the name that is missing stands in another cell, so that it is no slip."""
    word = str(getattr(error, "name", None) or error.args[0])
    return any(word in cell for cell in shell.user_ns["In"][:-1])
