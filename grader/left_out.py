"""Stubs that replace the answers in an exam edition (`grader.exam`).

The exam edition holds a copy of this file as `labsupport/left_out.py`, and imports it from there.
"""

import base64
import linecache
import zlib
from types import CodeType
from typing import Any, NoReturn


class LeftOutError(RuntimeError):
    """Something was called that answers an exercise, and is therefore not there."""


def left_out(name: str, exercise: str) -> NoReturn:
    """Say that `name` is missing here, and why.

    Raises:
        LeftOutError: always.
    """
    raise LeftOutError(
        f"{name} is not part of the exam edition, because it answers exercise {exercise}. What "
        "needs it runs as soon as your own solution passes its checks, or not in this edition."
    )


class LeftOutFunction:
    """A function that is not there: it can be imported and passed on, but not called."""

    def __init__(self, name: str, exercise: str) -> None:
        self.__name__, self.exercise = name, exercise

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse.

        Raises:
            LeftOutError: always.
        """
        left_out(self.__name__, self.exercise)


def seal(source: str) -> str:
    """A source text that cannot be read at a glance: compressed, as printable characters.

    This hides nothing from somebody who decodes it. It keeps an answer out of search results, out
    of the editor's go-to-definition, and from being copied by accident.
    """
    return base64.b85encode(zlib.compress(source.encode(), 9)).decode("ascii")


def unseal(text: str, name: str) -> CodeType:
    """The code of a sealed module; `name` is what tracebacks show in place of a file."""
    source, name = zlib.decompress(base64.b85decode(text)).decode(), f"<sealed: {name}>"
    # `inspect.getsource` finds it here: the checks compile edited copies of their solutions.
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    return compile(source, name, "exec", dont_inherit=True)
