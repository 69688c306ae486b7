"""What is to be run: a script, a module, or a function in one of them."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """Where the code is, and which function of it; None means all of it, as a program."""

    where: Literal["file", "module"]
    name: str
    function: str | None

    def __str__(self) -> str:
        return self.name if self.function is None else f"{self.name}:{self.function}"

    def job(self, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float) -> bytes:
        """All that a worker must know.

        Raises:
            TypeError: keywords for a script; arguments that cannot be sent to another process.
        """
        if self.function is None:
            if kwargs:
                raise TypeError(
                    f"{self} is run as a program, which takes strings and no keywords, but "
                    f'{", ".join(kwargs)} was given: args=["--name", "value"], or name a function, '
                    f'"{self}:train"'
                )
            arguments: Any = [str(arg) for arg in args]
        else:
            try:
                arguments = pickle.dumps((tuple(args), dict(kwargs)))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise TypeError(
                    f"the arguments for {self} cannot be sent to another process: {error}. Send "
                    "plain data, and build models and data sets inside the function"
                ) from None
        return pickle.dumps(
            {
                "where": self.where,
                "name": self.name,
                "function": self.function,
                "arguments": arguments,
                "sys_path": [os.getcwd() if entry == "" else entry for entry in sys.path],
                "timeout": timeout,
            }
        )


def find(target: str | Path | Callable[..., Any]) -> Target:
    """Understand what the caller named.

    Raises:
        FileNotFoundError, ModuleNotFoundError: there is no such file or module.
        TypeError: a function that another process cannot import.

    >>> find("labsupport.paths:cache_folder").function
    'cache_folder'
    """
    if callable(target):
        return _of_function(target)
    text = os.fspath(target)
    place, colon, function = text.rpartition(":")
    if not (place and colon and all(part.isidentifier() for part in function.split("."))):
        place, function = text, ""
    if place.endswith(".py") or "/" in place or os.sep in place:
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        return Target("file", str(path), function or None)
    try:
        known = importlib.util.find_spec(place) is not None
    except (ImportError, ValueError):
        known = False
    if not known:
        raise ModuleNotFoundError(
            f"there is no module {place!r} to import from {os.getcwd()}. A file's name ends in .py"
        )
    return Target("module", place, function or None)


def _of_function(function: Callable[..., Any]) -> Target:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file and "<" not in name:
        return Target("file", str(Path(file).resolve()), name)
    if module in ("", "__main__") or "<" in name or not name:
        raise TypeError(
            f"another process cannot import {name or function!r}, because it is defined in a "
            "notebook or inside of a function. Write it to a file (%%writefile work.py) and launch "
            f'"work.py:{name.rpartition(".")[2].strip("<>") or "main"}"'
        )
    return Target("module", module, name)
