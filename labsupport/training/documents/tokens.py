"""Text to tokens and back: bytes, or GPT-2's byte pairs; and which tokens some characters became.

Both tokenizers cut a text into runs of its UTF-8 bytes, and lose none. So where a token lies
follows from the bytes of those before it, exactly, whatever the characters are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

Span = tuple[int, int]


class Tokenizer(Protocol):
    """What the lab's training asks of a tokenizer.

    Attributes:
        vocab_size: how many tokens there are, the end token included.
        end_token: what stands behind each document. No text becomes it.
    """

    vocab_size: int
    end_token: int

    def encode(self, text: str) -> list[int]:
        """The text's tokens, and nothing else."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens. Bytes that are no UTF-8 become U+FFFD, end tokens nothing."""
        ...

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """The bytes that each token stands for; of end tokens none."""
        ...


class ByteTokenizer:
    """Each UTF-8 byte is a token, 0 ... 255; 256 ends a document.

    >>> ByteTokenizer().encode("é!")
    [195, 169, 33]
    """

    vocab_size = 257
    end_token = 256

    def encode(self, text: str) -> list[int]:
        """The text's bytes.

        Raises:
            UnicodeEncodeError: the text holds half of a surrogate pair, which has no bytes.
        """
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of bytes; U+FFFD for what is no UTF-8."""
        return b"".join(self.pieces(ids)).decode(errors="replace")

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """One byte each, and none for the end token.

        Raises:
            ValueError: a token below 0 or above 256.
        """
        return [b"" if token == self.end_token else bytes((token,)) for token in map(int, ids)]


class BytePairTokenizer:
    """GPT-2's byte pairs (or another byte-level vocabulary), from a Transformers tokenizer.

    Args:
        tokenizer: what `load_tokenizer("gpt2")` gives.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.end_token = int(tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """The text's tokens. A text that spells the end token is text all the same."""
        return self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; U+FFFD for what is no UTF-8."""
        return b"".join(self.pieces(ids)).decode(errors="replace")

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """The bytes that each token stands for; of end tokens none."""
        tokens = [int(token) for token in ids]
        written = self._tokenizer.convert_ids_to_tokens(tokens)
        return [
            b"" if token == self.end_token else bytes(_BYTE_OF[character] for character in letters)
            for token, letters in zip(tokens, written, strict=True)
        ]


def gpt2_tokenizer(*, download: bool = False) -> BytePairTokenizer:
    """GPT-2's tokenizer: 50,257 tokens; 50256 ends a document.

    Raises: as `labsupport.models.sources.load.load_tokenizer`.
    """
    from labsupport.models.sources.load import load_tokenizer

    return BytePairTokenizer(load_tokenizer("gpt2", download=download))


def _byte_of() -> dict[str, int]:
    """Which byte a character of GPT-2's vocabulary file means.

    The vocabulary writes printable bytes as Latin-1 characters, and the others, in order, as those
    from U+0100 on (openai/gpt-2, src/encoder.py, `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_of()


@dataclass(frozen=True)
class Encoded:
    """A document's tokens, and which of them a model is trained to predict.

    Attributes:
        tokens: without an end token.
        wanted: one bool a token; None: all of them, and the end token behind them.
    """

    tokens: list[int]
    wanted: list[bool] | None = None

    def __post_init__(self) -> None:
        if self.wanted is not None and len(self.wanted) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, but {len(self.wanted)} marks in `wanted`")


def encode(tokenizer: Tokenizer, text: str, wanted: Sequence[Span] | None = None) -> Encoded:
    """The text's tokens, and which of them are wanted.

    Args:
        tokenizer: any of this file's.
        text: any text.
        wanted: spans of characters, such as `FactDocument.answers`: only tokens with a byte of
            them are wanted. None: all tokens are.

    Raises:
        ValueError: as `token_spans`.

    >>> encode(ByteTokenizer(), "a: 7.", [(3, 4)]).wanted
    [False, False, False, True, False]
    """
    tokens = tokenizer.encode(text)
    if wanted is None:
        return Encoded(tokens)
    marks = [False] * len(tokens)
    for start, end in token_spans(tokenizer, text, wanted, tokens=tokens):
        marks[start:end] = [True] * (end - start)
    return Encoded(tokens, marks)


def token_spans(
    tokenizer: Tokenizer, text: str, spans: Sequence[Span], *, tokens: list[int] | None = None
) -> list[Span]:
    """The tokens that hold characters: for each span the smallest run with all of its bytes.

    A byte-pair token may reach over a span's border: " red" holds "red" and the space before it.

    Args:
        tokenizer: any of this file's.
        text: the whole text.
        spans: characters [start, end), none of them empty.
        tokens: the text's tokens, if they are known.

    Returns:
        Tokens [start, end) of each span.

    Raises:
        ValueError: a span that is empty or not within the text; tokens that do not spell the text.
    """
    tokens = tokenizer.encode(text) if tokens is None else tokens
    ends = list(accumulate(map(len, tokenizer.pieces(tokens))))  # of each token, in bytes
    before = [0, *accumulate(len(character.encode()) for character in text)]  # bytes before each
    if (ends[-1] if ends else 0) != before[-1]:
        raise ValueError("these tokens do not spell this text: their bytes differ in number")
    found = []
    for start, end in spans:
        if not 0 <= start < end <= len(text):
            raise ValueError(f"[{start}, {end}) is no span of a text of {len(text)} characters")
        found.append((bisect_right(ends, before[start]), bisect_left(ends, before[end]) + 1))
    return found
