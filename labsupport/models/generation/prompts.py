"""From texts to one batch of tokens.

Texts of different lengths are padded on the left: so the last column holds every row's newest
token, and the next one is appended to all rows at once. Two things then follow from the padding:

    attention mask    False where a row is padded: no query may see these keys
    positions         0, 1, 2 ... from each row's own first token on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Batch:
    """Prompts as tokens, padded on the left.

    ids: (batch, width) int64.
    lengths: how many tokens of each row are real.
    """

    ids: Tensor
    lengths: tuple[int, ...]

    @property
    def width(self) -> int:
        """Columns: the length of the longest prompt."""
        return self.ids.shape[1]

    @property
    def starts(self) -> Tensor:
        """(batch,) int64: the column of each row's first real token."""
        return self.width - torch.tensor(self.lengths, device=self.ids.device)

    def mask(self, width: int) -> Tensor | None:
        """(batch, width) int64: 0 in the padded columns, else 1; None when no row is padded."""
        if min(self.lengths) == self.width:
            return None
        columns = torch.arange(width, device=self.ids.device)
        return (columns >= self.starts[:, None]).long()

    @property
    def positions(self) -> Tensor:
        """(batch, width) int64: 0 at each row's first real token, and in the padding."""
        columns = torch.arange(self.width, device=self.ids.device)
        return (columns - self.starts[:, None]).clamp(min=0)


def batch_of(rows: Sequence[Sequence[int]], device: torch.device | str, pad: int = 0) -> Batch:
    """Rows of token ids as a `Batch`; `pad` fills the left of the shorter ones.

    Raises:
        ValueError: no row, or an empty one.
    """
    if not rows:
        raise ValueError("no prompt was given: pass a text, or a list of texts")
    if not all(rows):
        empty = [index for index, row in enumerate(rows) if not row]
        raise ValueError(f"a prompt needs at least one token, but row {empty[0]} has none")
    width = max(map(len, rows))
    padded = [[pad] * (width - len(row)) + list(row) for row in rows]
    return Batch(torch.tensor(padded, device=device), tuple(map(len, rows)))


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Sequence[str],
    device: torch.device | str,
    *,
    chat: bool = False,
) -> Batch:
    """Texts as a `Batch`.

    Args:
        prompts: one text, or several.
        chat: wrap each text as a user's message, by the tokenizer's chat template.

    An empty text becomes the tokenizer's begin-of-sequence token.

    Raises:
        TypeError: a prompt is no text.
        ValueError: no prompt, or no tokenizer; an empty text without such a token; a text of which
            the tokenizer makes no tokens; `chat` without a template.
    """
    if tokenizer is None:
        raise ValueError(
            "this model came without a tokenizer: pass one, or use prefill_and_decode with tokens"
        )
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"a prompt is a text, but a {type(text).__name__} was given: {text!r}")
    if chat:
        texts = [_as_message(tokenizer, text) for text in texts]
    # The chat template writes the special tokens itself.
    rows = [tokenizer(text, add_special_tokens=not chat)["input_ids"] for text in texts]
    for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
        if row:
            continue
        if text:
            raise ValueError(
                f"the tokenizer makes no token of the text {text[:40]!r}: "
                "it has no vocabulary, or drops such characters"
            )
        rows[index] = [_first_token(tokenizer)]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return batch_of(rows, device, 0 if pad is None else pad)


def check_model(model: PreTrainedModel) -> None:
    """Refuse what cannot continue a text.

    Raises:
        ValueError: the model has no classifier, sees what follows, or is an encoder and a decoder.
    """
    able = getattr(model, "can_generate", lambda: False)()
    if not able or model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} does not continue texts: this needs a causal language model "
            "of Transformers, such as LlamaForCausalLM (and no encoder-decoder)"
        )


def check_room(model: PreTrainedModel, batch: Batch, max_new_tokens: int) -> None:
    """Refuse tokens that the model has no place for.

    Raises:
        ValueError: a token beyond the rows of the embedding; a prompt that, with the new tokens, is
            longer than the model's positions. With both numbers, and what would fit.
    """
    embedding: Any = model.get_input_embeddings()
    rows, largest = embedding.weight.shape[0], int(batch.ids.max())
    if largest >= rows:
        raise ValueError(
            f"there is a token {largest}, and the model's embedding has {rows} rows: "
            "this tokenizer does not belong to this model"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(batch.lengths)
    if limit is None or longest + max_new_tokens <= limit:
        return
    if longest > limit:
        raise ValueError(
            f"the text has {longest} tokens, and the model has {limit} positions: shorten it"
        )
    raise ValueError(
        f"{longest} tokens of prompt and {max_new_tokens} new ones are "
        f"{longest + max_new_tokens}, and the model has {limit} positions: "
        f"pass max_new_tokens={limit - longest} or less, or a shorter prompt"
    )


def end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[int, ...]:
    """The tokens that end a text: those of the model's generation settings, else the tokenizer's.

    (An instruction-tuned model may end its turn with another token than its texts.)
    """
    found = model.generation_config.eos_token_id if model.generation_config else None
    if found is None and tokenizer is not None:
        found = tokenizer.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def cut(tokens: Sequence[Tensor], batch: Batch, ends: Sequence[int]) -> list[list[int]]:
    """Columns of tokens as rows, each cut behind its first end token."""
    if not tokens:
        return [[] for _ in batch.lengths]
    rows = torch.stack(list(tokens), dim=1).tolist()
    lengths = (
        next((n for n, token in enumerate(row, 1) if token in ends), len(row)) for row in rows
    )
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _as_message(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            "chat=True (--chat) wraps the prompt by the tokenizer's chat template, and this "
            "tokenizer has none: leave it away, or use an instruction-tuned model such as smollm2"
        )
    messages = [{"role": "user", "content": text}]
    wrapped = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(wrapped, str)
    return wrapped


def _first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.bos_token_id is None:
        raise ValueError(
            "the prompt is empty, and this tokenizer has no token that begins a text: "
            "write at least one word"
        )
    return tokenizer.bos_token_id
