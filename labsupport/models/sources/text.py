"""Long English texts that every Python brings along: its own help, and its own source code.

No download, no license question. Each version of Python has its own texts: a number measured on
them belongs to that version.
"""

from __future__ import annotations

import importlib.util
import tokenize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def python_topics() -> dict[str, str]:
    """Return the texts of Python's `help()` on the language's topics, such as "assert".

    About 80 texts, half a million characters together, sorted by name.

    >>> "assert" in python_topics()
    True
    """
    from pydoc_data.topics import topics

    return {name: topics[name] for name in sorted(topics)}


def source_text(module: str) -> str:
    """Return the source of a standard-library module, such as "argparse", without importing it.

    Raises:
        ValueError: there is no such module, or it is not written in Python.

    >>> "class ArgumentParser" in source_text("argparse")
    True
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not (spec.origin or "").endswith(".py"):
        raise ValueError(f"there is no module {module!r} with a Python source; try argparse")
    with tokenize.open(str(spec.origin)) as file:  # minds the file's own encoding
        return file.read()


def tokens_of(tokenizer: Any, text: str, length: int) -> Tensor:
    """Return the first `length` tokens of a text: int64, (1, length).

    Raises:
        ValueError: the text has fewer tokens than that, or `length` is below 1.

    >>> tokens_of(load_tokenizer("stories15m"), "Once upon a time", length=4).shape
    torch.Size([1, 4])
    """
    import torch

    if length < 1:
        raise ValueError(f"length counts tokens: at least 1, not {length}")
    ids = tokenizer.encode(text, verbose=False)  # no warning of a text that is long on purpose
    if len(ids) < length:
        raise ValueError(
            f"the text has {len(ids):,} tokens ({len(text):,} characters), not {length:,}. Longer "
            'ones: " ".join(python_topics().values()), or several source_text(...) joined'
        )
    return torch.tensor([ids[:length]], dtype=torch.int64)
