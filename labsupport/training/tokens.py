"""Text to tokens and back: bytes, or GPT-2's byte pairs; and the tokens that hold given characters.

Both tokenizers cut a text into runs of its UTF-8 bytes and lose none. So the place of a token
follows exactly from the bytes of those before it, whatever the characters are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Span = tuple[int, int]


class ByteTokenizer:
    """Each UTF-8 byte is a token, 0 ... 255; 256 ends a document.

    Attributes:
        vocab_size: number of tokens, the end token included.
        end_token: what follows each document; no text becomes it.

    >>> ByteTokenizer().encode("é!")
    [195, 169, 33]
    """

    vocab_size: int = 257
    end_token: int = 256

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the tokens' text; U+FFFD for bytes that are no UTF-8, nothing for end tokens."""
        return b"".join(self.pieces(ids)).decode(errors="replace")

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """Return the bytes that each token stands for; none for an end token."""
        return [b"" if token == self.end_token else bytes((token,)) for token in map(int, ids)]


class BytePairTokenizer(ByteTokenizer):
    """GPT-2's byte pairs (or another byte-level vocabulary), from a Transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.end_token = int(tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens; a text that spells the end token is text, too."""
        return self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """Return the bytes that each token stands for; none for an end token."""
        tokens = [int(token) for token in ids]
        written = self._tokenizer.convert_ids_to_tokens(tokens)
        return [
            b"" if token == self.end_token else bytes(_BYTE_OF[character] for character in letters)
            for token, letters in zip(tokens, written, strict=True)
        ]


Tokenizer = ByteTokenizer


def gpt2_tokenizer(*, download: bool = False) -> BytePairTokenizer:
    """Return GPT-2's tokenizer: 50,257 tokens; 50256 ends a document.

    Raises: as `load_tokenizer` of `labsupport.models.sources`.
    """
    from labsupport.models.sources.load import load_tokenizer

    return BytePairTokenizer(load_tokenizer("gpt2", download=download))


def _byte_of() -> dict[str, int]:
    """Map the characters of GPT-2's vocabulary file to the bytes that they mean.

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
        wanted: one bool a token; None: all of them, and the end token after them.
    """

    tokens: list[int]
    wanted: list[bool] | None = None


def encode(tokenizer: Tokenizer, text: str, wanted: Sequence[Span] | None = None) -> Encoded:
    """Return the text's tokens, and which of them are wanted.

    Args:
        tokenizer: one of this file.
        text: any text.
        wanted: spans of characters, such as `FactDocument.answers`: only tokens with a byte of
            them are wanted. None: all tokens are.

    >>> encode(ByteTokenizer(), "a: 7.", [(3, 4)]).wanted
    [False, False, False, True, False]
    """
    tokens = tokenizer.encode(text)
    if wanted is None:
        return Encoded(tokens)
    marks = [False] * len(tokens)
    for start, end in token_spans(tokenizer, text, wanted):
        marks[start:end] = [True] * (end - start)
    return Encoded(tokens, marks)


def token_spans(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> list[Span]:
    """Return the smallest run of tokens with all bytes of each span: tokens [start, end).

    A byte-pair token may reach over a span's border: " red" holds "red" and the space before it.

    Args:
        tokenizer: one of this file.
        text: the whole text.
        spans: characters [start, end), none of them empty.
    """
    ends = list(accumulate(map(len, tokenizer.pieces(tokenizer.encode(text)))))  # in bytes
    before = [0, *accumulate(len(character.encode()) for character in text)]  # bytes before each
    return [
        (bisect_right(ends, before[start]), bisect_left(ends, before[end]) + 1)
        for start, end in spans
    ]
