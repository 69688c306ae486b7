"""Functions that are left out because they answer an exercise.

An edition without the answers holds a copy of this file as `labsupport/left_out.py`.
"""

import textwrap
from typing import NoReturn

NOT_HERE = "not part of the exam edition"


class LeftOutError(RuntimeError):
    """A function that answers an exercise was called, but is left out."""

    def _render_traceback_(self) -> list[str]:
        """Show only the message in a notebook."""
        return textwrap.wrap(str(self), 100)


def left_out(name: str, exercise: str) -> NoReturn:
    """Raise LeftOutError, which says why `name` is missing."""
    raise LeftOutError(
        f"{name} is {NOT_HERE}, because it answers exercise {exercise}. What needs it runs as soon "
        "as your own solution passes its checks, or not in this edition."
    )
