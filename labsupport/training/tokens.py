"""Text to tokens and back: bytes, or GPT-2's byte pairs; and which tokens hold given characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
        """Return the tokens' text; U+FFFD for bytes that are no UTF-8, nothing for end tokens.

        Raises:
            ValueError: an id that is no token.
        """
        return bytes(self._texts_tokens(ids)).decode(errors="replace")

    def _texts_tokens(self, ids: Iterable[int]) -> list[int]:
        """Return the ids without end tokens."""
        numbers = [int(i) for i in ids]
        for i in numbers:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"{i} is no token: there are 0 ... {self.vocab_size - 1}")
        return [i for i in numbers if i != self.end_token]

    def spans(self, text: str) -> list[Span]:
        """Return the characters [start, end) that each of the text's tokens covers."""
        return [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]


class BytePairTokenizer(ByteTokenizer):
    """GPT-2's byte pairs (or another byte-level vocabulary), from a fast Transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.end_token = int(tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens; a text that spells the end token is text, too."""
        return self._encoded(text)["input_ids"]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the tokens' text; U+FFFD for bytes that are no UTF-8, nothing for end tokens."""
        return self._tokenizer.decode(self._texts_tokens(ids), clean_up_tokenization_spaces=False)

    def spans(self, text: str) -> list[Span]:
        """Return the characters [start, end) that each of the text's tokens covers."""
        return self._encoded(text)["offset_mapping"]

    def _encoded(self, text: str) -> Any:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return self._tokenizer(text, return_offsets_mapping=True, **options)


Tokenizer = ByteTokenizer


def gpt2_tokenizer() -> BytePairTokenizer:
    """Return GPT-2's tokenizer: 50,257 tokens; 50256 ends a document.

    Raises: as `load_tokenizer` of `labsupport.models.sources`.

    >>> gpt2_tokenizer().decode(gpt2_tokenizer().encode("attention"))
    'attention'
    """
    from labsupport.models.sources.load import load_tokenizer

    return BytePairTokenizer(load_tokenizer("gpt2", download=False))


@dataclass(frozen=True)
class Encoded:
    """A document's tokens, and which of them a model is trained to predict.

    Attributes:
        tokens: without an end token.
        wanted: one bool a token; None: all of them, and the end token after them.

    Raises:
        ValueError: not one bool a token.
    """

    tokens: list[int]
    wanted: list[bool] | None = None

    def __post_init__(self) -> None:
        if self.wanted is not None and len(self.wanted) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, but wanted has {len(self.wanted)} bools")


def encode(tokenizer: Tokenizer, text: str, wanted: Sequence[Span] | None = None) -> Encoded:
    """Return the text's tokens, and which of them are wanted.

    `wanted` are spans of characters, such as `FactDocument.answers`: only tokens that cover one of
    these are wanted; a byte-pair token may reach over a span's border: " red" holds "red" and the
    space before it. None: all tokens are wanted.

    Raises:
        ValueError: a span that does not lie in the text.

    >>> encode(ByteTokenizer(), "a: 7.", [(3, 4)]).wanted
    [False, False, False, True, False]
    """
    tokens = tokenizer.encode(text)
    if wanted is None:
        return Encoded(tokens)
    characters = bytearray(len(text))
    for start, end in wanted:
        if not 0 <= start <= end <= len(text):
            raise ValueError(f"the span {start, end} is not in a text of {len(text)} characters")
        characters[start:end] = b"\1" * (end - start)
    return Encoded(tokens, [any(characters[start:end]) for start, end in tokenizer.spans(text)])
