"""What `labsupport train --data ... --tokens ...` trains on: named texts, as batches by step."""

from __future__ import annotations

from collections.abc import Callable

from labsupport.training.documents.dialogue import dialogue
from labsupport.training.documents.facts import records
from labsupport.training.documents.packing import Packed
from labsupport.training.documents.real import ORIGIN, help_documents, source_documents
from labsupport.training.documents.streams import FIRST_SEED, batches, generated
from labsupport.training.documents.tokens import ByteTokenizer, Encoded, Tokenizer, encode

DATA = ("topics", "source", "records", "dialogue")
TOKENS = ("bytes", "gpt2")


def named_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes" or "gpt2".

    Raises:
        ValueError: another name. For "gpt2" what `load_tokenizer` raises if it was not fetched.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name != "gpt2":
        raise ValueError(f"unknown tokens {name!r}; known: {', '.join(TOKENS)}")
    from labsupport.training.documents.tokens import gpt2_tokenizer

    return gpt2_tokenizer()


def named_batches(
    data: str, tokenizer: Tokenizer, length: int, *, accumulation: int = 1, seed: int = 0
) -> Callable[[int], list[Packed]]:
    """Batches for `train`: step -> `accumulation` sequences.

    Args:
        data: "topics" or "source": Python's help texts or its library's source files, again and
            again, in another order each time; every token is a label. "records" or "dialogue":
            made for each step, none twice; labels are the answers to questions about facts in the
            text before them.
        tokenizer: what `named_tokenizer` gives.
        length: of each sequence, in tokens.
        accumulation: sequences in a step.
        seed: of the order, or of the texts that are made.

    Raises:
        ValueError: an unknown name; a length that is too short for a text with facts.
    """
    end = tokenizer.end_token
    if data in ("topics", "source"):
        texts = help_documents() if data == "topics" else source_documents()
        tokens = [tokenizer.encode(document.text) for document in texts]
        return batches(tokens, length, end_token=end, seed=seed, accumulation=accumulation)
    if data not in DATA:
        raise ValueError(f"unknown data {data!r}; known: {', '.join(DATA)}")
    write = records if data == "records" else dialogue
    characters = _characters(lambda size: write(size, seed=0, ask="throughout").text, tokenizer)

    def make(number: int) -> Encoded:
        size = characters(length - 1)  # and the end token
        while True:
            document = write(size, seed=number, ask="throughout")
            encoded = encode(tokenizer, document.text, wanted=document.answers)
            if len(encoded.tokens) < length:
                return encoded
            size -= max(1, size // 50)

    # Runs with other seeds share no text as long as they are shorter than a billion sequences.
    first = FIRST_SEED + seed * 10**9
    return generated(make, length, end_token=end, accumulation=accumulation, first_seed=first)


def data_origin(data: str) -> str:
    """The data's name and, where its texts come from Python, whose: another one has others."""
    return f"{data} of {ORIGIN}" if data in ("topics", "source") else data


def _characters(sample: Callable[[int], str], tokenizer: Tokenizer) -> Callable[[int], int]:
    """How many characters a text of so many tokens has, nearly: a byte each, or as in a sample."""
    if isinstance(tokenizer, ByteTokenizer):
        return lambda tokens: tokens
    text = sample(4096)
    each = len(text) / len(tokenizer.encode(text))
    return lambda tokens: int(each * tokens)
