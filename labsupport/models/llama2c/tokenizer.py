"""llama2.c's tokenizer.bin, and SentencePiece's tokenizer.model, behind one small interface.

A tokenizer.bin (Andrej Karpathy, llama2.c: tokenizer.py and `build_tokenizer` in run.c) is the
length of the longest token as an int32, then of each token its score (float32), its length (int32)
and its bytes. How many tokens there are, the checkpoint says. Tokens 0, 1 and 2 are unknown, begin
(BOS) and end of text (EOS); tokens 3 to 258 are the 256 bytes, for what no other token covers. They
are written as `<0x0A>`, in older files as the character itself.

Text becomes tokens as in Llama 2's SentencePiece model: a space in front, one token for each
character, or for each of its UTF-8 bytes, then the neighbours whose union has the best score are
merged, again and again.
"""

from __future__ import annotations

import heapq
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import BatchEncoding

BOS, EOS, FIRST_BYTE = 1, 2, 3
BYTES = range(FIRST_BYTE, FIRST_BYTE + 256)
# Longer than any token of a real vocabulary: beyond it, the file is something else.
LONGEST_TOKEN = 4096


class Tokenizer(ABC):
    """What generation asks of a tokenizer, by the names that Transformers' tokenizers use."""

    bos_token_id = BOS
    eos_token_id = EOS
    # Llama has no token for padding: the attention mask says what is text.
    pad_token_id = EOS
    padding_side = "left"
    chat_template = None

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens, after a BOS unless `add_special_tokens` is False."""

    @abstractmethod
    def pieces(self) -> list[tuple[bytes, float]]:
        """Each token's bytes and score, as tokenizer.bin has them."""

    def __len__(self) -> int:
        return len(self.pieces())

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        """The text of tokens (a list or a tensor of one dimension).

        The space that `encode` put in front goes when a BOS stands before it: tokens from the
        middle of a text keep theirs. Bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: a token that the vocabulary does not have.
        """
        pieces = self.pieces()
        text, before = bytearray(), None
        for token in _integers(ids):
            if not 0 <= token < len(pieces):
                raise ValueError(f"token {token} is not among 0 ... {len(pieces) - 1}")
            piece = pieces[token][0]
            if before == BOS and piece.startswith(b" "):
                piece = piece[1:]
            before = token
            if token in (BOS, EOS) and skip_special_tokens:
                continue
            text += bytes([token - FIRST_BYTE]) if token in BYTES else piece
        return text.decode("utf-8", errors="replace")

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = True) -> list[str]:
        """The text of each of several sequences of tokens."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        padding: bool | str = False,
        return_tensors: str | None = None,
        add_special_tokens: bool = True,
    ) -> BatchEncoding:
        """Tokens and attention mask of one text or several.

        Args:
            texts: one text gives flat lists, unless tensors are asked for.
            padding: fill up shorter texts, on the `padding_side`, to the longest.
            return_tensors: "pt" for int64 tensors (texts, tokens); None for lists.
            add_special_tokens: begin each text with a BOS.

        Raises:
            ValueError: tensors of texts of several lengths without padding; another kind of tensor.
        """
        import torch
        from transformers import BatchEncoding

        if return_tensors not in (None, "pt"):
            raise ValueError(f'return_tensors is "pt" or None, not {return_tensors!r}')
        if padding not in (False, True, "longest", "do_not_pad"):
            raise ValueError(f"padding goes to the longest text (True) or nowhere, not {padding!r}")
        single = isinstance(texts, str)
        ids = [self.encode(text, add_special_tokens) for text in ([texts] if single else texts)]
        longest = max(map(len, ids), default=0)
        mask = [[1] * len(row) for row in ids]
        if padding in (True, "longest"):
            ids = [self._pad(row, self.pad_token_id, longest) for row in ids]
            mask = [self._pad(row, 0, longest) for row in mask]
        if return_tensors == "pt":
            if len({len(row) for row in ids}) > 1:
                raise ValueError("texts of several lengths make no tensor: give padding=True")
            return BatchEncoding(
                {"input_ids": _tensor(ids, torch), "attention_mask": _tensor(mask, torch)}
            )
        if single:
            return BatchEncoding({"input_ids": ids[0], "attention_mask": mask[0]})
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def _pad(self, row: list[int], fill: int, length: int) -> list[int]:
        filling = [fill] * (length - len(row))
        return filling + row if self.padding_side == "left" else row + filling


class Llama2cTokenizer(Tokenizer):
    """A tokenizer.bin's tokens, and llama2.c's way to encode with them."""

    def __init__(self, pieces: Sequence[tuple[bytes, float]]) -> None:
        """Take each token's bytes and score.

        Raises:
            ValueError: tokens 3 to 258 are not the 256 bytes.
        """
        self._pieces = list(pieces)
        named = [piece for piece, _ in self._pieces[FIRST_BYTE : BYTES.stop]]
        newer = [b"<0x%02X>" % byte for byte in range(256)]
        older = [chr(byte).encode() for byte in range(256)]
        if named not in (newer, older):
            raise ValueError(
                f"tokens {FIRST_BYTE} to {BYTES.stop - 1} must be the bytes <0x00> to <0xFF>: "
                "llama2.c writes with them what no other token covers"
            )
        # Neither the special tokens nor the bytes stand for text that is written like their names.
        self._token: dict[bytes, int] = {}
        for token, (piece, _) in enumerate(self._pieces):
            if token >= BYTES.stop:
                self._token.setdefault(piece, token)

    def pieces(self) -> list[tuple[bytes, float]]:
        """Each token's bytes and score."""
        return self._pieces

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens, after a BOS unless `add_special_tokens` is False."""
        start = [BOS] if add_special_tokens else []
        if not text:
            return start
        tokens: list[int] = []
        for character in " " + text:
            raw = character.encode("utf-8")
            known = self._token.get(raw)
            tokens += [FIRST_BYTE + byte for byte in raw] if known is None else [known]
        return start + self._merge(tokens)

    def _merge(self, tokens: list[int]) -> list[int]:
        """Merge the two neighbours of the best score, the leftmost of equals, until none are left.

        run.c looks through all pairs for each merge, which takes N² steps; a heap of the candidates
        finds the same pairs in N log N.
        """
        alive: list[int | None] = list(tokens)
        left, right = list(range(-1, len(tokens) - 1)), list(range(1, len(tokens) + 1))
        candidates: list[tuple[float, int, int, int, int]] = []

        def consider(i: int) -> None:
            j = right[i] if i >= 0 else len(alive)
            if j >= len(alive):
                return
            first, second = alive[i], alive[j]
            assert first is not None
            assert second is not None
            union = self._token.get(self._pieces[first][0] + self._pieces[second][0])
            if union is not None:
                heapq.heappush(candidates, (-self._pieces[union][1], i, union, first, second))

        for i in range(len(alive)):
            consider(i)
        while candidates:
            _, i, union, first, second = heapq.heappop(candidates)
            j = right[i]
            if alive[i] != first or j >= len(alive) or alive[j] != second:
                continue  # one of the two has become part of another token
            alive[i], alive[j] = union, None
            right[i] = right[j]
            if right[i] < len(alive):
                left[right[i]] = i
            consider(left[i])
            consider(i)
        return [token for token in alive if token is not None]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, run by the sentencepiece package."""

    def __init__(self, processor: Any) -> None:
        """Take a `sentencepiece.SentencePieceProcessor`."""
        self._processor = processor
        self._cached: list[tuple[bytes, float]] | None = None

    def pieces(self) -> list[tuple[bytes, float]]:
        """Each token's bytes and score, as llama2.c's tokenizer.py exports them."""
        if self._cached is None:
            named = {BOS: "\n<s>\n", EOS: "\n</s>\n"}
            self._cached = [
                (
                    named.get(token, self._processor.IdToPiece(token)).replace("▁", " ").encode(),
                    self._processor.GetScore(token),
                )
                for token in range(self._processor.GetPieceSize())
            ]
        return self._cached

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens, after a BOS unless `add_special_tokens` is False."""
        return ([BOS] if add_special_tokens else []) + self._processor.Encode(text)


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.bin, or a SentencePiece model (a name that ends in .model).

    Raises:
        ValueError: the file is cut off, or something else.
        FileNotFoundError: there is no such file.
        ImportError: a .model, and the sentencepiece package is missing.
    """
    path = Path(path)
    return _read_sentencepiece(path) if path.suffix == ".model" else _read_bin(path)


def _read_bin(path: Path) -> Llama2cTokenizer:
    raw = path.read_bytes()
    longest = struct.unpack_from("<i", raw)[0] if len(raw) >= 4 else 0
    if not 1 <= longest <= LONGEST_TOKEN:
        raise ValueError(
            f"{path} is no tokenizer.bin: its longest token would have {longest} bytes"
        )
    pieces, at = [], 4
    while at < len(raw):
        if at + 8 > len(raw):
            raise ValueError(f"{path} is cut off after {len(pieces)} tokens")
        score, length = struct.unpack_from("<fi", raw, at)
        if not 0 <= length <= longest:
            raise ValueError(
                f"{path} is no tokenizer.bin: token {len(pieces)} would have {length} bytes, the "
                f"longest has {longest}"
            )
        at += 8 + length
        if at > len(raw):
            raise ValueError(f"{path} is cut off in token {len(pieces)}")
        pieces.append((raw[at - length : at], score))
    try:
        return Llama2cTokenizer(pieces)
    except ValueError as error:
        raise ValueError(f"{path} is no tokenizer.bin: {error}") from None


def _read_sentencepiece(path: Path) -> SentencePieceTokenizer:
    try:
        import sentencepiece
    except ImportError:
        raise ImportError(
            f"{path.name} is a SentencePiece model: `pip install sentencepiece` to read it"
        ) from None
    raw = path.read_bytes()
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(raw)
    except RuntimeError as error:
        raise ValueError(f"{path} is no SentencePiece model: {error}") from None
    if (processor.bos_id(), processor.eos_id()) != (BOS, EOS):
        raise ValueError(
            f"{path} begins texts with token {processor.bos_id()} and ends them with "
            f"{processor.eos_id()}; Llama's models do with {BOS} and {EOS}"
        )
    return SentencePieceTokenizer(processor)


def write_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a tokenizer.bin."""
    pieces = tokenizer.pieces()
    with Path(path).open("wb") as file:
        file.write(struct.pack("<i", max(len(piece) for piece, _ in pieces)))
        for piece, score in pieces:
            file.write(struct.pack("<fi", score, len(piece)) + piece)


def _integers(ids: Any) -> list[int]:
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return values if isinstance(values, list) else [values]


def _tensor(rows: list[list[int]], torch_: Any) -> torch.Tensor:
    return torch_.tensor(rows, dtype=torch_.int64)
