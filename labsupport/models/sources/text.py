"""Long English texts that every Python brings along: its own help, and its own source code.

No download, no license question. But each version of Python has its own: a number that was measured
on such a text belongs to that version.
"""

from __future__ import annotations

import importlib.util
import tokenize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def python_topics() -> dict[str, str]:
    """The texts of Python's `help()` on the language's topics, such as "assert" and "with".

    About 80 texts of half a million characters together, in the order of their names. They differ
    between versions of Python.

    Raises:
        ModuleNotFoundError: this Python was packed without `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ModuleNotFoundError(
            "this Python has no pydoc_data, which holds the texts of help(): it was packed without "
            "a part of its standard library. source_text() gives another long text."
        ) from None
    return {name: topics[name] for name in sorted(topics)}


def source_text(module: str) -> str:
    """The source of a standard-library module, such as "argparse", which is not imported for it.

    Sources differ between versions of Python.

    Raises:
        ValueError: there is no such module, or it is not written in Python.
    """
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ValueError(f"there is no module {module!r}; try argparse, inspect or typing")
    if not found.has_location or not (found.origin or "").endswith(".py"):
        raise ValueError(f"{module} has no Python source ({found.origin}); try argparse or inspect")
    with tokenize.open(str(found.origin)) as file:  # minds the file's own encoding
        return file.read()


def tokens_of(tokenizer: Any, text: str, length: int) -> Tensor:
    """The first tokens of a text: int64, (1, length).

    Args:
        tokenizer: a Transformers tokenizer, or one of `labsupport.models.llama2c`.
        text: any text.
        length: how many tokens.

    Raises:
        ValueError: the text has fewer tokens than that, or `length` is below 1.
    """
    import torch

    if length < 1:
        raise ValueError(f"length counts tokens: at least 1, not {length}")
    # Through encode, since a long text is meant here: calling a tokenizer warns of it.
    ids = tokenizer.encode(text, **({"verbose": False} if hasattr(tokenizer, "vocab") else {}))
    if len(ids) < length:
        raise ValueError(
            f"the text has {len(ids):,} tokens ({len(text):,} characters), not {length:,}. Longer "
            'ones: " ".join(python_topics().values()), or several source_text(...) joined'
        )
    return torch.tensor([ids[:length]], dtype=torch.int64)
