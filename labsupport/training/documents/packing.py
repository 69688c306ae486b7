"""Documents of any length, packed into sequences of one length.

    documents   A A A A A |  B B B |  C C C C C          each one gets an end token (e)
    sequence 0  A A A A A e B B                          length 8
    sequence 1  B e C C C C C e
    cu_seqlens  [0, 6, 8]  and  [0, 2, 8]

Nothing is padded but the last sequence, so no computation is lost on padding. `cu_seqlens` keeps
the documents apart: `attention_varlen` lets none see another one, and positions begin at 0 in each.

A document that does not fit is cut, and continues in the next sequence as a document of its own.
Its first token there (the last B above) stands without context: what came before is in another
sequence. As a label it is not lost: it is what the last token before the cut must predict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labsupport.training.documents.tokens import Encoded

IGNORED = -100


@dataclass(frozen=True)
class Packed:
    """One training sequence, of several documents.

    Attributes:
        tokens: int64, (1, length).
        labels: int64, (1, length): the token that comes after each in its document; -100 behind a
            document's end token, in padding, and where the next token is not wanted.
        positions: int64, (1, length): each token's place within its document (its piece, if cut).
        cu_seqlens: int32, (documents + 1,): where each starts, and the total. Padding is a last
            document of its own.
        padding: how many tokens that one has.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    padding: int = 0

    def to(self, device: torch.device | str) -> Packed:
        """The same on another device."""
        return Packed(
            self.tokens.to(device),
            self.labels.to(device),
            self.positions.to(device),
            self.cu_seqlens.to(device),
            self.padding,
        )


def pack(
    documents: Iterable[Sequence[int] | Encoded],
    length: int,
    *,
    end_token: int,
    pad_token: int | None = None,
    cut: bool = True,
) -> Iterator[Packed]:
    """Pack documents, in their order, into sequences of one length.

    Args:
        documents: the tokens of each, without end token, or an `Encoded`: then only the tokens that
            are wanted become labels.
        length: of each sequence, in tokens.
        end_token: goes behind each document, an empty one too.
        pad_token: fills the rest of a sequence; None: the end token. It is never a label.
        cut: whether documents that do not fit are cut. False: such a one begins the next sequence,
            and the rest is padded. For documents that lose their meaning when they are cut, such as
            facts and the questions about them.

    Raises:
        ValueError: length below 2; without `cut`, a document that, with its end token, is longer.

    >>> first, second = pack([[1, 1, 1, 1, 1], [2, 2, 2], [3, 3, 3, 3, 3]], 8, end_token=0)
    >>> first.cu_seqlens.tolist(), second.labels.tolist()
    ([0, 6, 8], [[0, -100, 3, 3, 3, 3, 0, -100]])
    """
    if length < 2:
        raise ValueError(f"a sequence has 2 tokens or more, not {length}")
    pad = end_token if pad_token is None else pad_token
    tokens: list[int] = []
    labels: list[int] = []
    starts: list[int] = []
    for number, document in enumerate(documents):
        ids, after = _with_labels(document, end_token)
        if not cut and len(ids) > length - len(tokens):
            if len(ids) > length:
                raise ValueError(
                    f"document {number} has {len(ids)} tokens with its end token, a sequence "
                    f"{length}: take longer sequences, or cut=True"
                )
            yield _packed(tokens, labels, starts, length, pad)
            tokens, labels, starts = [], [], []
        done = 0
        while done < len(ids):
            fits = min(length - len(tokens), len(ids) - done)
            starts.append(len(tokens))
            tokens += ids[done : done + fits]
            labels += after[done : done + fits]
            done += fits
            if len(tokens) == length:
                yield _packed(tokens, labels, starts, length, pad)
                tokens, labels, starts = [], [], []
    if tokens:
        yield _packed(tokens, labels, starts, length, pad)


def _with_labels(document: Sequence[int] | Encoded, end_token: int) -> tuple[list[int], list[int]]:
    """A document's tokens with the end token, and what each of them must predict."""
    ids = [*(document.tokens if isinstance(document, Encoded) else document), end_token]
    labels = [*ids[1:], IGNORED]
    if isinstance(document, Encoded) and document.wanted is not None:
        wanted = [*document.wanted[1:], False, False][: len(ids)]
        labels = [label if w else IGNORED for label, w in zip(labels, wanted, strict=True)]
    return ids, labels


def _packed(
    tokens: list[int], labels: list[int], starts: list[int], length: int, pad: int
) -> Packed:
    padding = length - len(tokens)
    if padding:
        starts = [*starts, len(tokens)]
    offsets = torch.tensor([*starts, length], dtype=torch.int32)
    sizes = offsets.diff()
    begins = torch.repeat_interleave(offsets[:-1], sizes)
    return Packed(
        torch.tensor([tokens + [pad] * padding], dtype=torch.int64),
        torch.tensor([labels + [IGNORED] * padding], dtype=torch.int64),
        (torch.arange(length) - begins).unsqueeze(0),
        offsets,
        padding,
    )
