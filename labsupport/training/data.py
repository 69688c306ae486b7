"""Documents as batches: texts, packed into sequences of one length, as a function of the step.

    documents   A A A A A |  B B B |  C C C C C          each one gets an end token (e)
    sequence 0  A A A A A e B B                          length 8
    sequence 1  B e C C C C C e
    cu_seqlens  [0, 6, 8]  and  [0, 2, 8]

Nothing is padded but the last sequence, so no computation is lost on padding. `cu_seqlens` keeps
the documents apart: `attention_varlen` lets none see another one, and positions begin at 0 in each.

A document that does not fit is cut, and continues in the next sequence as a separate document.
Its first token there (the last B above) is still a label: of the last token before the cut.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.models import python_topics, source_text
from labsupport.training.config import IGNORED
from labsupport.training.tasks.facts import Dice, dialogue, records
from labsupport.training.tokens import ByteTokenizer, Encoded, Tokenizer, encode, gpt2_tokenizer

# Far above the seeds that a reader types: what is asked after training was not in it.
FIRST_SEED = 1_000_000
DATA = ("topics", "source", "records", "dialogue")
# Some of the longest files that every Python has, and some shorter ones: 20 to 230 KB.
MODULES = (
    *("_pydecimal", "argparse", "collections", "dataclasses", "enum", "fractions", "heapq"),
    *("inspect", "pickle", "pydoc", "random", "statistics", "tarfile", "textwrap", "typing"),
)
ORIGIN = f"{platform.python_implementation()} {platform.python_version()}"
Stream = Callable[[int], "list[Packed]"]


@dataclass(frozen=True)
class Packed:
    """One training sequence, of several documents.

    Attributes:
        tokens: int64, (1, length).
        labels: int64, (1, length): the token that comes after each in its document; -100 after a
            document's end token, in padding, and where the next token is not wanted.
        positions: int64, (1, length): each token's place within its document (its part, if cut).
        cu_seqlens: int32, (documents + 1,): where each starts, and the total. Padding is a last
            document.
        padding: number of tokens of that one.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    padding: int = 0


def pack(
    documents: Iterable[Sequence[int] | Encoded], length: int, *, end_token: int
) -> Iterator[Packed]:
    """Pack documents, in their order, into sequences of one length.

    Args:
        documents: the tokens of each, without end token, or an `Encoded`: then only the tokens that
            are wanted become labels.
        length: of each sequence, in tokens.
        end_token: follows each document, and fills the rest of the last sequence.

    Raises:
        ValueError: length below 2, or from 2^31 on.
        TypeError: a document that is no sequence of integers: a text has to be encoded first.

    >>> first, second = pack([[1, 1, 1, 1, 1], [2, 2, 2], [3, 3, 3, 3, 3]], 8, end_token=0)
    >>> first.cu_seqlens.tolist(), second.labels.tolist()
    ([0, 6, 8], [[0, -100, 3, 3, 3, 3, 0, -100]])
    """
    for cut in _cut(documents, length, end_token):
        yield _packed(*cut, length, end_token)


Cut = tuple[list[int], list[int], list[int]]


def _cut(
    documents: Iterable[Sequence[int] | Encoded], length: int, end_token: int
) -> Iterator[Cut]:
    """Yield each sequence's tokens, labels, and starts of documents, unpadded."""
    if not 2 <= length < 2**31:  # cu_seqlens are int32
        raise ValueError(f"a sequence has 2 tokens or more, and below 2^31, not {length}")
    tokens: list[int] = []
    labels: list[int] = []
    starts: list[int] = []
    for document in documents:
        encoded = document if isinstance(document, Encoded) else Encoded(_tokens(document))
        ids = [*encoded.tokens, end_token]
        after = [*ids[1:], IGNORED]
        if encoded.wanted is not None:
            wanted = [*encoded.wanted[1:], False, False]
            after = [label if w else IGNORED for label, w in zip(after, wanted, strict=False)]
        done = 0
        while done < len(ids):
            fits = min(length - len(tokens), len(ids) - done)
            starts.append(len(tokens))
            tokens += ids[done : done + fits]
            labels += after[done : done + fits]
            done += fits
            if len(tokens) == length:
                yield tokens, labels, starts
                tokens, labels, starts = [], [], []
    if tokens:
        yield tokens, labels, starts


def _tokens(document: Any) -> list[int]:
    """Return a document's tokens as numbers."""
    tokens = document.tolist() if isinstance(document, Tensor) else document
    if isinstance(tokens, Sequence) and all(hasattr(token, "__index__") for token in tokens):
        return [int(token) for token in tokens]
    raise TypeError(
        f"a document is a sequence of its tokens' numbers, but {document!r:.60} was given: encode "
        "a text first, and put one document into a list"
    )


def _packed(
    tokens: list[int], labels: list[int], starts: list[int], length: int, pad: int
) -> Packed:
    padding = length - len(tokens)
    starts = [*starts, len(tokens)] if padding else starts
    offsets = torch.tensor([*starts, length], dtype=torch.int32)
    begins = torch.repeat_interleave(offsets[:-1], offsets.diff())
    return Packed(
        torch.tensor([tokens + [pad] * padding], dtype=torch.int64),
        torch.tensor([labels + [IGNORED] * padding], dtype=torch.int64),
        (torch.arange(length) - begins).unsqueeze(0),
        offsets,
        padding,
    )


def tensors(batch: Any) -> dict[str, Tensor]:
    """Return a micro-batch's tensors by name.

    Raises:
        TypeError: neither a mapping nor a dataclass with tensors `tokens` and `labels`, or labels
            that are not integers.

    >>> (packed,) = pack([[1, 2, 3], [4, 5, 6]], 8, end_token=0)
    >>> sorted(tensors(packed))
    ['cu_seqlens', 'labels', 'positions', 'tokens']
    """
    if is_dataclass(batch):
        # Beside its tensors it may know numbers, such as the size of its padding.
        batch = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    whole = isinstance(batch, Mapping) and {"tokens", "labels"} <= batch.keys()
    if not whole or not all(isinstance(value, Tensor) for value in batch.values()):
        raise TypeError(
            "a micro-batch is a mapping or a dataclass of tensors, `tokens` and `labels` among "
            f"them, and not {type(batch).__name__}; batches(step) returns a list of them"
        )
    if batch["labels"].is_floating_point():
        raise TypeError(f"labels must be integers (the right tokens), not {batch['labels'].dtype}")
    return dict(batch)


# --- batches by step, so that a run that resumes sees the same data -------------------------------


def batches(
    documents: Sequence[Sequence[int] | Encoded],
    length: int,
    *,
    end_token: int,
    seed: int = 0,
    accumulation: int = 1,
) -> Stream:
    """Go through documents again and again, in another order each time: step → its sequences.

    In each epoch every document comes once, in an order that follows from the seed (0 or more) and
    the epoch. A step may take its sequences from two epochs.

    Args:
        documents, length, end_token: as for `pack`.
        seed: of the order.
        accumulation: sequences in each step.

    Raises:
        ValueError: no documents; accumulation below 1, or length below 2; a step below 0.

    >>> stream = batches([[1, 2, 3], [4, 5]], 4, end_token=0)
    >>> [packed.tokens.shape for packed in stream(1)]
    [torch.Size([1, 4])]
    """
    if not documents or accumulation < 1 or length < 2:
        raise ValueError(
            f"{len(documents)} documents, accumulation={accumulation}, length={length}: at least "
            "1, 1 and 2"
        )
    total = sum(len(d.tokens if isinstance(d, Encoded) else d) + 1 for d in documents)
    each = -(-total // length)  # sequences of an epoch
    mixed = Dice(seed).below(2**53)  # neighbouring seeds share no epoch's order
    kept: dict[int, list[Cut]] = {}  # the epochs last asked for

    def sequence(number: int) -> Packed:
        epoch, index = divmod(number, each)
        if epoch not in kept:
            order = Dice(mixed + epoch).some(documents, len(documents))
            while len(kept) > 1:
                del kept[min(kept)]
            kept[epoch] = list(_cut(order, length, end_token))
        return _packed(*kept[epoch][index], length, end_token)

    return _by_step(sequence, accumulation)


def _by_step(sequence: Callable[[int], Packed], accumulation: int) -> Stream:
    """Return the sequences of a step."""

    def stream(step: int) -> list[Packed]:
        if step < 0:
            raise ValueError(f"steps count from 0, and {step} was given")
        return [sequence(step * accumulation + i) for i in range(accumulation)]

    return stream


def generated(
    make: Callable[[int], Sequence[int] | Encoded],
    length: int,
    *,
    end_token: int,
    accumulation: int = 1,
    first_seed: int = FIRST_SEED,
) -> Stream:
    """Make one document for each sequence, none twice: step → its sequences.

    Args:
        make: seed → a document's tokens, or `Encoded`, with fewer tokens than `length`.
        length, end_token: as for `pack`.
        accumulation: sequences in each step.
        first_seed: of the first document; the following ones count up. Test with seeds below it.

    Raises:
        ValueError: accumulation below 1; a step below 0; a document that is too long.
    """
    if accumulation < 1:
        raise ValueError(f"accumulation is {accumulation}: at least 1 sequence in a step")

    def sequence(number: int) -> Packed:
        packed = list(pack([make(first_seed + number)], length, end_token=end_token))
        if len(packed) > 1:
            raise ValueError(f"a document with its end token has more than {length} tokens")
        return packed[0]

    return _by_step(sequence, accumulation)


def together(sequences: Sequence[Packed], batch: int, *, apart: bool) -> list[dict[str, Tensor]]:
    """Join sequences of one length into micro-batches of `batch` sequences each.

    With `apart` a micro-batch is one long sequence, (1, batch * length), in which no document sees
    another; else it has rows, (batch, length), and a row's documents see those before them.

    Raises:
        ValueError: batch below 1, or sequences of different lengths.

    >>> one, two = pack([[1, 2, 3], [4, 5, 6]], 4, end_token=0)
    >>> [(batch["tokens"].shape, *batch) for batch in together([one, two], 2, apart=False)]
    [(torch.Size([2, 4]), 'tokens', 'labels')]
    >>> together([one, two], 2, apart=True)[0]["cu_seqlens"]
    tensor([0, 4, 8], dtype=torch.int32)
    """
    if batch < 1 or len({one.tokens.shape for one in sequences}) > 1:
        raise ValueError(f"batch is {batch}: at least 1, of sequences of one length")
    joined = []
    for start in range(0, len(sequences), batch):
        some, dim = sequences[start : start + batch], 1 if apart else 0
        micro_batch = {
            "tokens": torch.cat([one.tokens for one in some], dim),
            "labels": torch.cat([one.labels for one in some], dim),
        }
        if apart:
            micro_batch["positions"] = torch.cat([one.positions for one in some], 1)
            lengths = torch.cat([one.cu_seqlens.diff() for one in some])
            micro_batch["cu_seqlens"] = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        joined.append(micro_batch)
    return joined


def data_named(value: str) -> str | list[str]:
    """Return the name of the lab's texts, or the paths of the reader's own, which commas divide.

    Raises:
        ValueError: no such texts, and no such file or folder.
    """
    if value in DATA:
        return value
    paths = value.split(",")
    for path in paths:
        if not path or not Path(path).exists():
            raise ValueError(
                f"unknown data {path!r}: give one of {', '.join(DATA)}, or text files and folders"
            )
    return paths


def named_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "bytes" or "gpt2"; raise ValueError for another name."""
    if name not in ("bytes", "gpt2"):
        raise ValueError(f"unknown tokens {name!r}; known: bytes, gpt2")
    return ByteTokenizer() if name == "bytes" else gpt2_tokenizer()


def named_batches(
    data: str | Sequence[str | Path],
    tokenizer: Tokenizer,
    length: int,
    *,
    accumulation: int = 1,
    seed: int = 0,
    split: Literal["all", "training", "validation"] = "all",
) -> Stream:
    """Return batches for `train`: step -> `accumulation` sequences.

    Args:
        data: "topics" or "source": Python's help texts or its library's source files, again and
            again, in another order each time; every token is a label. "records" or "dialogue":
            made for each step, none twice; labels are the answers to questions about facts in the
            text before them. Or paths for `documents_from`; every token is a label.
        tokenizer: as from `named_tokenizer`.
        length: of each sequence, in tokens.
        accumulation: sequences in a step.
        seed: of the order, or of the texts that are made.
        split: "validation" has texts that "training" never shows: every tenth document, or the last
            tenth of each document of one's own.

    Raises:
        ValueError: an unknown name; a length that is too short for a text with facts. OSError,
            ValueError: as `documents_from`.
    """
    end = tokenizer.end_token
    if not isinstance(data, str) or data in ("topics", "source"):
        if isinstance(data, str):
            documents = help_documents() if data == "topics" else source_documents()
            texts = [document.text for document in documents]
            if split != "all":
                texts = [t for i, t in enumerate(texts) if (i % 10 == 9) == (split == "validation")]
        else:
            texts = [document.text for document in documents_from(data)]
            if split != "all":
                cuts = [len(text) * 9 // 10 for text in texts]
                parts = [slice(cut) if split == "training" else slice(cut, None) for cut in cuts]
                texts = [text[part] for text, part in zip(texts, parts, strict=True)]
        tokens = [tokenizer.encode(text) for text in texts]
        return batches(tokens, length, end_token=end, seed=seed, accumulation=accumulation)
    if data not in DATA:
        raise ValueError(f"unknown data {data!r}; known: {', '.join(DATA)}")
    write = records if data == "records" else dialogue
    size = length - 1  # characters that have `length - 1` tokens, nearly: and the end token
    if type(tokenizer) is not ByteTokenizer:
        sample = write(4096, seed=0, ask="throughout").text
        size = int(size * len(sample) / len(tokenizer.encode(sample)))

    def make(number: int) -> Encoded:
        characters = size
        while True:
            document = write(characters, seed=number, ask="throughout")
            encoded = encode(tokenizer, document.text, wanted=document.answers)
            if len(encoded.tokens) < length:
                return encoded
            characters -= max(1, characters // 50)

    # Runs with other seeds share no text as long as they are shorter than a billion sequences.
    first = FIRST_SEED // 2 if split == "validation" else FIRST_SEED + seed * 10**9
    return generated(make, length, end_token=end, accumulation=accumulation, first_seed=first)


# --- real documents: one's own, or texts that every Python has, different in each version ---------


@dataclass(frozen=True)
class Document:
    """A text, and its name: a path, or that of a text of Python's with the version."""

    name: str
    text: str


def help_documents() -> list[Document]:
    """Return the texts of Python's `help()` on the language's topics, in the order of their names.

    Raises:
        ModuleNotFoundError: this Python was packed without them; `source_documents` stays.

    >>> help_documents()[0].name
    "help('...'), CPython ..."
    """
    return [Document(f"help({n!r}), {ORIGIN}", text) for n, text in python_topics().items()]


def source_documents(modules: str | Iterable[str] = MODULES) -> list[Document]:
    """Return source files of the standard library, by module or one, without importing them.

    Raises:
        ValueError: a name that is no module with a Python source.

    >>> source_documents(["argparse"])[0].name
    "argparse's source, CPython ..."
    """
    names = [modules] if isinstance(modules, str) else modules
    return [Document(f"{name}'s source, {ORIGIN}", source_text(name)) for name in names]


def documents_from(paths: str | Path | Iterable[str | Path]) -> list[Document]:
    """Read text files as documents; of a folder, all text files in it and below, sorted by path.

    A string is one path, and an empty one is none. Text is UTF-8 without NUL. In a folder other
    files are left out, and so is what is hidden.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a file that is given by name is not text; no text in all the paths.

    >>> [document.name for document in documents_from(["README.md"])]
    ['README.md']
    """
    documents = []
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    if "" in paths:  # Path("") is the folder that one happens to be in
        raise ValueError(f"there is an empty path in {paths}: give text files or folders")
    for path in map(Path, paths):
        files = [path]
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file())
            files = [f for f in below if not any(p[0] == "." for p in f.relative_to(path).parts)]
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                text = "\0"
            if "\0" not in text:
                documents += [Document(str(file), text)] if text.strip() else []
            elif file == path:
                raise ValueError(f"{file} is not a text file in UTF-8")
    if not documents:
        raise ValueError(f"no text in {', '.join(map(str, paths))}: give text files or folders")
    return documents


def data_origin(data: str | Sequence[str | Path]) -> str:
    """Return what identifies the texts: a name, the version of Python, or a checksum of files."""
    if isinstance(data, str):
        return f"{data} of {ORIGIN}" if data in ("topics", "source") else data
    texts = [document.text for document in documents_from(data)]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return f"{len(texts)} files with SHA-256 {digest[:16]}"
